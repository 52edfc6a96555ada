"""Metrics for explanations; :mod:`whyformer.benchmarks` computes them over data sets."""

from whyformer.evaluation.deletion import token_deletion
from whyformer.evaluation.registry import METRICS, Metric, list_metrics
from whyformer.evaluation.single import Evaluation, evaluate

__all__ = ["METRICS", "Evaluation", "Metric", "evaluate", "list_metrics", "token_deletion"]
