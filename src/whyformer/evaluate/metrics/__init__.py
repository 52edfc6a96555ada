"""Metrics: each formula with its row of the registry. Called, the room lists them: ``whyformer.evaluate.metrics()``."""

from whyformer.evaluate.metrics import faithfulness, localisation, plausibility, relevance  # noqa: F401 - fill METRICS
from whyformer.evaluate.registry import metrics
from whyformer.rooms import make_callable

make_callable(__name__, metrics)
