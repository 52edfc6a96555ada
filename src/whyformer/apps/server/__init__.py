"""Explanations over HTTP (``whyformer serve``): one model, requests that come together explained together."""

from whyformer.apps.server.limits import Limits
from whyformer.apps.server.serving import serve

__all__ = ["Limits", "serve"]
