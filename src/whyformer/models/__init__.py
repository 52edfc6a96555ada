"""Loading models and reading off them what a user should not have to say."""

from whyformer.models.loading import Loaded, load

__all__ = ["Loaded", "load"]
