"""Results of explanations, their features, and their storage."""
