"""whyformer: which patches, pixels or tokens made a Transformer say this, and whether that may be believed."""

from whyformer import targets
from whyformer.arbitrate import Arbitration, arbitrate
from whyformer.errors import WhyformerError
from whyformer.evaluate import evaluate
from whyformer.explain import explain
from whyformer.explanation import Explanation
from whyformer.maximize import Maximized, maximize_activation
from whyformer.methods import methods

__version__ = "0.1.0"
__all__ = [
    "Arbitration",
    "Explanation",
    "Maximized",
    "WhyformerError",
    "arbitrate",
    "evaluate",
    "explain",
    "maximize_activation",
    "methods",
    "targets",
]
