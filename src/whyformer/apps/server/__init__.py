"""Explanations over HTTP (``whyformer serve``): one model, with requests that arrive together in one batch."""

from whyformer.apps.server.limits import Limits
from whyformer.apps.server.serving import serve

__all__ = ["Limits", "serve"]
