"""Explain generated texts: prompts, the passes over an answer, and ``explain_generation``."""

from whyformer.generation.generating import explain_generation, explain_span

__all__ = ["explain_generation", "explain_span"]
