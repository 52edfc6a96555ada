"""Methods that read what attention moves: vectors and their norms."""
