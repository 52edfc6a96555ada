"""Loading models, and reading their structure, outputs and classes."""

from whyformer.models.loading import Loaded, load

__all__ = ["Loaded", "load"]
