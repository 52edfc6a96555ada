"""The web page, ``whyformer app``; requires the extra ``whyformer[app]``."""

from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.apps.web.server import serve

__all__ = ["Catalogue", "PageLimits", "serve"]
