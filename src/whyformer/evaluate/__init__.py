"""How good is an explanation? Metrics for one of them, and benchmarks over data sets."""

from whyformer.evaluate.metrics import METRICS, Metric, metrics
from whyformer.evaluate.runner import Outcome, run_benchmark
from whyformer.evaluate.single import Evaluation, evaluate

__all__ = ["METRICS", "Evaluation", "Metric", "Outcome", "evaluate", "metrics", "run_benchmark"]
