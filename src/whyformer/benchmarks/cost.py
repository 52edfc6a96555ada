"""What a benchmark will cost, from a short trial, said before it starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.study import Batch, Benchmark
from whyformer.models.readout import read_logits


@dataclass
class Passes:
    """Forward passes of the model and backward passes from its logits, each of one sample."""

    forwards: int = 0
    backwards: int = 0


@contextmanager
def counted(model: nn.Module) -> Iterator[Passes]:
    """Count the passes of everything run inside; the model is left as it was."""
    passes = Passes()

    def forward(module: Any, args: Any, output: Any) -> None:
        try:
            logits = read_logits(output)
        except Exception:
            return
        passes.forwards += logits.shape[0]
        batch, node = logits.shape[0], logits.grad_fn
        if node is not None:

            def backward(*flows: Any) -> None:
                passes.backwards += batch

            node.register_hook(backward)

    handle = model.register_forward_hook(forward)
    try:
        yield passes
    finally:
        handle.remove()


@dataclass(frozen=True)
class Cost:
    """The bill: passes and seconds for all that is still to do, and the seconds a sample of each configuration."""

    samples: int
    pairs: int
    forwards: int
    backwards: int
    seconds: float
    shares: dict[str, float]

    def sentence(self) -> str:
        worst = sorted(self.shares.items(), key=lambda s: -s[1])[:3]
        slow = ", ".join(f"{label} {seconds:.2g} s" for label, seconds in worst)
        return (
            f"{self.pairs} explanations to score ({self.samples} samples): about {self.forwards:,} forward and "
            f"{self.backwards:,} backward passes, {duration(self.seconds)} by a trial on one sample (a sample: {slow})"
        )


def estimate(benchmark: Benchmark, trial: Batch, todo: dict[str, list[Configuration]]) -> Cost:
    """Measure each configuration that is to do (sample -> configurations) on the trial samples, and scale up.

    The trial's results are thrown away. Sharing of forwards between methods makes the run cheaper than this.
    """
    forwards = backwards = seconds = 0.0
    shares: dict[str, float] = {}
    missing = [c for cs in todo.values() for c in cs]
    for configuration in (c for c in trial.study.configurations if c in missing):
        with counted(trial.study.model) as passes:
            start = time.perf_counter()
            for _ in benchmark.measure(trial, [configuration]):
                pass
            share = (time.perf_counter() - start) / len(trial.samples)
        shares[configuration.label] = share
        times = missing.count(configuration) / len(trial.samples)
        forwards += passes.forwards * times
        backwards += passes.backwards * times
        seconds += share * missing.count(configuration)
    return Cost(len(todo), len(missing), round(forwards), round(backwards), seconds, shares)


def duration(seconds: float) -> str:
    """ "about 3 min" and the like."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
