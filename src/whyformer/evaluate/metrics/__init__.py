"""Metrics: each formula with its row of the registry."""
