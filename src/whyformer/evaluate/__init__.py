"""How good is an explanation? Metrics for one of them; :mod:`whyformer.benchmarks` runs them over data sets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whyformer.evaluate.registry import METRICS, Metric, metrics
from whyformer.evaluate.single import Evaluation, evaluate
from whyformer.rooms import make_callable

if TYPE_CHECKING:
    from whyformer.benchmarks.runner import Outcome, run_benchmark

__all__ = ["METRICS", "Evaluation", "Metric", "Outcome", "evaluate", "metrics", "run_benchmark"]

make_callable(__name__, evaluate)


def __getattr__(name: str) -> Any:
    # documented here, and a room above: looked up when asked for
    if name in ("Outcome", "run_benchmark"):
        return getattr(import_module("whyformer.benchmarks.runner"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
