"""The benchmarks by name: at once the command line's choices and the tests' parametrisation."""

from __future__ import annotations

from whyformer.benchmarks import (
    ablation,
    activation,
    arbitration,
    bias,
    conservation,
    perturbation,
    rationales,
    sanity,
    segmentation,
)
from whyformer.benchmarks.study import Benchmark
from whyformer.errors import InputError

_MODULES = (
    perturbation, segmentation, ablation, rationales, activation, conservation, bias, sanity, arbitration,
)  # fmt: skip
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name, or an error that lists the names."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    raise InputError(f"there is no benchmark '{name}'; benchmarks: {', '.join(BENCHMARKS)}")
