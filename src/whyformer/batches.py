"""Explain a list of any length in batches, halving the batch size when memory runs out, and join the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whyformer.errors import InputError, TooLarge, WhyformerError
from whyformer.explanation.counts import in_bytes
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.inputs.normalize import some_of
from whyformer.models.memory import free_memory, is_out_of_memory
from whyformer.progress import Track
from whyformer.targets import Target, check_target, of_samples

AT_ONCE = 32
"""Batch size for a list of samples; halved when memory runs out."""


def in_batches(
    inputs: Any,
    count: int,
    target: Target,
    track: Track,
    begin: Callable[[Any], Any],
    explain: Callable[..., Explanation],
) -> Explanation:
    """Explain all samples of a list in batches and return one explanation.

    Args:
        count: number of samples.
        track: progress function that wraps the iteration over several batches.
        begin: function from a part of the inputs to a :class:`whyformer.prepared.Prepared`.
        explain: function (prepared inputs, target, whether they are all samples) -> explanation.

    Raises:
        TooLarge: the result would not fit into memory.
    """
    padding = "", False

    def batches() -> Iterator[Explanation]:
        nonlocal padding
        start, size = 0, AT_ONCE
        while start < count:
            stop = min(start + size, count)
            is_all = stop - start == count
            try:
                ready = begin(some_of(inputs, start, stop))
                if start == 0:  # validate the targets of all samples
                    check_target(target, ready.labels, ready.classes, count, ready.processor)
                result = explain(ready, target if is_all else of_samples(target, range(start, stop)), is_all)
            except (WhyformerError, RuntimeError, MemoryError) as error:
                if not is_all and isinstance(error, InputError):
                    error.add_note(f"in the batch of samples {start} to {stop - 1} of {count}")
                if stop - start == 1 or not (is_out_of_memory(error) or isinstance(error, TooLarge)):
                    raise
                size = (stop - start) // 2
                continue
            start, padding = stop, ready.padding
            yield result

    parts: list[Explanation] = []
    for result in batches() if count <= AT_ONCE else track(batches(), "explaining", math.ceil(count / AT_ONCE)):
        if len(result) == count:
            return result
        if not parts:
            _refuse_too_many(result, inputs, count)
        parts.extend(result)
    return joined(parts, *padding)


def _refuse_too_many(first: Explanation, inputs: Any, count: int) -> None:
    """Raise if the explanations of all samples, extrapolated from the first batch, exceed the free memory."""
    parts = [first, *first.parts.values()]
    tensors = [t for e in parts for t in (e.scores, e.logits, e.pictures, e.sounds) if t is not None]
    own_ids = {id(sample) for sample in inputs}
    pictures = [p for e in parts for p in e.originals or () if p is not None and id(p) not in own_ids]
    # tensors count twice, for the parts and their concatenation; Pillow stores 4 bytes per pixel
    size = 2 * sum(t.nbytes for t in tensors) + sum(4 * p.width * p.height for p in pictures)
    needed, free = size / len(first) * count, free_memory(torch.device("cpu"))
    if needed > free:
        raise TooLarge(
            f"the explanations of {count:,} samples take about {in_bytes(needed)} of memory, and {in_bytes(free)} are "
            "free: use whyformer.explain_many, which yields them one at a time or writes them to a folder (out=...)"
        )
