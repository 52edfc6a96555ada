"""The empty table: what flows back is the plain gradient."""

from whyformer.rules.core import Composite

GRADIENT = Composite("gradient", "multiplier", audit=False)
