"""The same function written in other ways: each has the same scores as the first one, or is refused."""
