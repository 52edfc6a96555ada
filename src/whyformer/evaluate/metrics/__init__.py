"""Metrics: each formula with its row of the registry. Called, the room lists them: ``whyformer.evaluate.metrics()``."""

from whyformer.evaluate.registry import metrics
from whyformer.rooms import make_callable

make_callable(__name__, metrics)
