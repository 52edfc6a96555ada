"""Methods. Importing this package fills the registry."""

from whyformer.methods import (  # noqa: F401 - each fills the registry
    attention,
    features,
    gradients,
    norms,
    propagation,
    transformer_attribution,
    weighted_attention,
)
from whyformer.methods.registry import METHODS, Method, find, methods

__all__ = ["METHODS", "Method", "find", "methods"]
