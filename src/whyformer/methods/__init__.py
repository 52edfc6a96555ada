"""Methods. Importing this package fills the registry."""

from whyformer.methods import transformer_attribution as _transformer_attribution
from whyformer.methods.registry import METHODS, Method, find, methods

__all__ = ["METHODS", "Method", "find", "methods"]
