"""Metrics: each formula with its row of the registry; importing this package fills the registry."""

from whyformer.evaluation.metrics import faithfulness, localisation, plausibility, relevance  # noqa: F401 - fill METRICS
