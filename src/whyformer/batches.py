"""A list of any length, explained in batches: fewer samples at a time where memory runs out, one result of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whyformer.errors import InputError, TooLarge, WhyformerError
from whyformer.explanation.counts import in_bytes
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.inputs.given import some_of
from whyformer.models.memory import free_memory, is_out_of_memory
from whyformer.progress import Track
from whyformer.targets import Resolver, Target, of_samples, several_tokens

AT_ONCE = 32
"""Samples of a list that go through the model together; half as many from where memory runs out."""


def in_batches(
    inputs: Any,
    count: int,
    target: Target,
    track: Track,
    begin: Callable[[Any], Any],
    explain: Callable[..., Explanation],
) -> Explanation:
    """One explanation of all samples of a list.

    Args:
        track: stands around the batches, where there are several.
        begin: of some of the samples, a :class:`whyformer.prepared.Prepared`.
        explain: of that, the target and whether these are all samples, the explanation.

    Raises:
        TooLarge: the result would not fit into memory.
    """
    padding = "", False

    def batches() -> Iterator[Explanation]:
        nonlocal padding
        start, size = 0, AT_ONCE
        while start < count:
            stop = min(start + size, count)
            whole = stop - start == count
            try:
                ready = begin(some_of(inputs, start, stop))
                names = ready.processor, ready.labels, ready.classes
                if start == 0 and several_tokens(target, *names) is None:
                    Resolver(target, ready.labels, ready.classes, count, ready.processor)  # checks those of all samples
                made = explain(ready, target if whole else of_samples(target, range(start, stop)), whole)
            except (WhyformerError, RuntimeError, MemoryError) as error:
                if not whole and isinstance(error, InputError):
                    error.add_note(f"in the batch of samples {start} to {stop - 1} of {count}")
                if stop - start == 1 or not (is_out_of_memory(error) or isinstance(error, TooLarge)):
                    raise
                size = (stop - start) // 2
                continue
            start, padding = stop, ready.padding
            yield made

    parts: list[Explanation] = []
    for made in batches() if count <= AT_ONCE else track(batches(), "explaining", math.ceil(count / AT_ONCE)):
        if len(made) == count:
            return made
        if not parts:
            _refuse_too_many(made, inputs, count)
        parts.extend(made)
    return joined(parts, *padding)


def _refuse_too_many(first: Explanation, inputs: Any, count: int) -> None:
    """Raise where the explanations of all samples, like these first ones, would take more memory than is free."""
    parts = [first, *first.parts.values()]
    tensors = [t for e in parts for t in (e.scores, e.logits, e.pictures, e.sounds) if t is not None]
    given = {id(one) for one in inputs}
    pictures = [p for e in parts for p in e.originals or () if id(p) not in given]
    # tensors twice: parts, and the whole that is made of them; pictures as Pillow keeps them
    held = 2 * sum(t.nbytes for t in tensors) + sum(4 * p.width * p.height for p in pictures)
    needed, free = held / len(first) * count, free_memory(torch.device("cpu"))
    if needed > free:
        raise TooLarge(
            f"the explanations of {count:,} samples take about {in_bytes(needed)} of memory, and {in_bytes(free)} are "
            "free: whyformer.explain_many gives them one at a time, or writes them to a folder (out=...)"
        )
