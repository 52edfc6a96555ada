"""A trial on one row: which methods apply, and how many rows fit into memory at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from whyformer.errors import InputError, MethodNotApplicable, ModelError, UnknownOperation, WhyformerError
from whyformer.inputs.feed import place_of
from whyformer.jobs.batching import Explained, OutOfMemory, Read, Session
from whyformer.jobs.rows import PAIR
from whyformer.models.memory import total_memory

TRIED = 32
"""So many rows are read for the trial, which is on the largest of them."""
SHARE = 4
"""A batch may keep a quarter of the memory: the rest is for the model, for what is passing, and for others."""
MOST = {"cpu": 32, "cuda": 128}
_OF_THE_MODEL = (MethodNotApplicable, ModelError, UnknownOperation)


@dataclass(frozen=True)
class Trial:
    """What came of the trial.

    Attributes:
        explained: what came of the row; None if none could be read.
        kept: bytes that the graphs of its explanations hold; seconds: how long it took.
        size: how many such rows make a batch.
    """

    explained: Explained | None
    kept: int
    seconds: float
    size: int

    def checked(self) -> Trial:
        """Itself, if the methods apply.

        Raises:
            WhyformerError: one of them has no meaning on this model, so that it would fail on every row.
        """
        for failure in [] if self.explained is None else self.explained.failures:
            kind: type[WhyformerError] | None = next((k for k in _OF_THE_MODEL if k.__name__ == failure.kind), None)
            if kind is not None:
                raise kind(failure.reason)
        return self


def tried(
    session: Session, reads: Sequence[Read], begun: Callable[[Iterable[int]], None] = lambda rows: None
) -> Trial:
    """Explain the largest of some rows alone.

    The size is the largest power of two of such rows whose graphs keep a quarter of the memory, at most 32 (128 on a
    GPU): the same in every run on one machine.
    """
    usable = [one for one in reads if one.error is None]
    place = place_of(session.model)
    most = MOST.get(place.type, MOST["cpu"])
    if not usable:
        return Trial(None, 0, 0.0, most)
    _check_kind(session, usable[0].content)
    one = max(usable, key=lambda r: len(r.content) if isinstance(r.content, str) else 0)
    parameters = {p.untyped_storage().data_ptr() for p in session.model.parameters()}
    kept, explained, start = 0, None, time.perf_counter()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), contextlib.suppress(OutOfMemory):
        (explained,) = session.explain([one], 1, begun)
    allowed = max(1, total_memory(place) // SHARE // max(kept, 1))
    size = min(most, 1 << (int(allowed).bit_length() - 1))
    return Trial(explained, kept, time.perf_counter() - start, size)


def _check_kind(session: Session, content: Any) -> None:
    words = isinstance(content, str) or (isinstance(content, Mapping) and PAIR in content)
    kind = "text" if words else "image" if isinstance(content, Image.Image) else "both"
    for method, _ in session.methods:
        if "both" not in (kind, method.modality) and kind != method.modality:
            explained = "pictures" if method.modality == "image" else "text"
            raise InputError(f"{method.name} explains {explained}, and the input is {kind}: leave it out")
