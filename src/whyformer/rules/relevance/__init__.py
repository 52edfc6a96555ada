"""Rules of the relevance carrier: what flows backward is R itself."""
