"""Methods based on the vectors that attention mixes, and their norms."""
