"""``whyformer.web``: public name of the web page, which is defined in :mod:`whyformer.apps.web`."""

from whyformer.apps.web import Catalogue, PageLimits, serve

__all__ = ["Catalogue", "PageLimits", "serve"]
