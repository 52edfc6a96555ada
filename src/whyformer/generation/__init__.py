"""Why a language model wrote what it wrote: prompts, the passes of a whole answer, and ``explain_generation``."""

from whyformer.generation.generating import explain_generation, explain_span

__all__ = ["explain_generation", "explain_span"]
