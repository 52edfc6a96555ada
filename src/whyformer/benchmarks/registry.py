"""The registry of benchmarks."""

from __future__ import annotations

from importlib import import_module

from whyformer.benchmarks.study import Benchmark
from whyformer.errors import InputError

_FILES = (
    "perturbation segmentation ablation rationales activation conservation bias sanity arbitration leaderboard "
    "evidence conditions"
)
BENCHMARKS: dict[str, Benchmark] = {
    name: import_module(f"whyformer.benchmarks.{name}").BENCHMARK for name in _FILES.split()
}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark of a name.

    Raises:
        InputError: there is no such benchmark; the message lists the names.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    raise InputError(f"there is no benchmark '{name}'; benchmarks: {', '.join(BENCHMARKS)}")
