"""``whyformer.web``: the web page under its documented name; it lives in :mod:`whyformer.apps.web`."""

from whyformer.apps.web import Catalogue, PageLimits, serve

__all__ = ["Catalogue", "PageLimits", "serve"]
