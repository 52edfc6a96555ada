"""Composites: tables operation -> rule. A propagation method is one of these tables."""
