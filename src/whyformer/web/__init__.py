"""The web page, ``whyformer app``: thin, over the library's own functions; needs the extra ``whyformer[app]``."""

from whyformer.web.catalogue import Catalogue
from whyformer.web.limits import Limits
from whyformer.web.server import serve

__all__ = ["Catalogue", "Limits", "serve"]
