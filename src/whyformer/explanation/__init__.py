"""The result of an explanation, what it belongs to, and how it is seen at other levels."""
