"""Equivalent forms of one function: each has the scores of the reference form, or is refused."""
