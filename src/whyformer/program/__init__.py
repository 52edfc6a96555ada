"""The program of a model: one plain pass written down as data, and the readers of that record."""
