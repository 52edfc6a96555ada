"""whyformer: which patches, pixels or tokens made a Transformer say this, and whether that may be believed."""

from whyformer import targets
from whyformer.errors import WhyformerError
from whyformer.explain import explain
from whyformer.explanation import Explanation
from whyformer.methods import methods

__version__ = "0.1.0"
__all__ = ["Explanation", "WhyformerError", "explain", "methods", "targets"]
