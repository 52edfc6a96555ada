"""What a benchmark will cost, from a short trial, said before it starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.study import Batch, Benchmark
from whyformer.models.readout import read_logits


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Count "forward" passes of the model and "backward" passes from its logits, each of one sample."""
    passes = Counter[str]()

    def forward(module: Any, args: Any, output: Any) -> None:
        try:
            logits = read_logits(output)
        except Exception:
            return
        passes["forward"] += logits.shape[0]
        batch, node = logits.shape[0], logits.grad_fn
        if node is not None:

            def backward(*flows: Any) -> None:
                passes["backward"] += batch

            node.register_hook(backward)

    handle = model.register_forward_hook(forward)
    try:
        yield passes
    finally:
        handle.remove()


def bill(benchmark: Benchmark, trial: Batch, todo: dict[str, list[Configuration]]) -> str:
    """What is still to do (sample -> configurations), by measuring each configuration on the trial samples.

    The trial's results are thrown away. Sharing of forwards between methods makes the run cheaper than this.
    """
    total, shares = Counter[str](), {}
    seconds = 0.0
    missing = [c for cs in todo.values() for c in cs]
    for configuration in (c for c in trial.study.configurations if c in missing):
        times = missing.count(configuration) / len(trial.samples)
        with counted(trial.study.model) as passes:
            start = time.perf_counter()
            for _ in benchmark.measure(trial, [configuration]):
                pass
            spent = time.perf_counter() - start
        shares[configuration.label] = spent / len(trial.samples)
        seconds += spent * times
        total.update({kind: round(count * times) for kind, count in passes.items()})
    slow = sorted(shares.items(), key=lambda s: -s[1])[:3]
    return (
        f"{len(missing)} explanations to score ({len(todo)} samples): about {total['forward']:,} forward and "
        f"{total['backward']:,} backward passes, {duration(seconds)} by a trial on one sample (a sample: "
        f"{', '.join(f'{label} {share:.2g} s' for label, share in slow)})"
    )


def duration(seconds: float) -> str:
    """ "about 3 min" and the like."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
