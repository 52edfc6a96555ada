"""Methods. Importing this package fills the registry."""

from whyformer.methods import (  # noqa: F401 - each fills the registry
    attention,
    features,
    gae,
    gradcam_attention,
    gradients,
    norms,
    perturbation,
    propagation,
    transformer_attribution,
    value_zeroing,
)
from whyformer.methods.registry import METHODS, Method, find, methods

__all__ = ["METHODS", "Method", "find", "methods"]
