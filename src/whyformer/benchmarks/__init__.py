"""Benchmarks of explanation methods: :data:`BENCHMARKS` by name, and :func:`run_benchmark`, which runs a benchmark."""

from whyformer.benchmarks.registry import BENCHMARKS, find_benchmark
from whyformer.benchmarks.runner import Outcome, run_benchmark

__all__ = ["BENCHMARKS", "Outcome", "find_benchmark", "run_benchmark"]
