"""Formulas of the metrics. Importing this package registers them."""

from whyformer.evaluation.metrics import faithfulness, localisation, plausibility, relevance  # noqa: F401 - fill METRICS
