"""A trial on one row, to check that the methods apply and to choose the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from whyformer.errors import (
    FOREIGN_ERRORS,
    InputError,
    MethodNotApplicable,
    ModelError,
    UnknownOperation,
    WhyformerError,
)
from whyformer.inputs.feed import device_of
from whyformer.jobs.batching import RowContent, Session, collated, content_shape
from whyformer.methods.passes import record_pass
from whyformer.models.memory import is_out_of_memory, total_memory

TRIED = 32
"""Number of rows that are read for the trial, which explains the largest of them."""
SHARE = 4
"""A batch may hold 1 / SHARE of the memory; the rest is for the model, temporary tensors, and other processes."""
MOST = {"cpu": 32, "cuda": 128}
_OF_THE_MODEL: dict[str, type[WhyformerError]] = {
    kind.__name__: kind for kind in (MethodNotApplicable, ModelError, UnknownOperation)
}


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        pass_bytes: memory that the recorded pass of a row holds, in bytes.
        size: batch size for such rows.
    """

    pass_bytes: int
    size: int


def run_trial(
    session: Session, reads: Sequence[RowContent], on_start: Callable[[Iterable[int]], None] = lambda rows: None
) -> Trial:
    """Explain the largest of some rows alone.

    The batch size is the largest power of two of such rows whose recorded pass fits a quarter of the memory, at most 32
    (128 on a GPU). It is the same in every run on the same machine.

    Args:
        session: the model and the methods.
        reads: the rows.
        on_start: as for :meth:`~whyformer.jobs.batching.Session.explain`.

    Raises:
        WhyformerError: a method does not apply to this model, so that it would fail for every row.
    """
    session.check_column(reads)
    usable = [read for read in reads if read.error is None]
    place = device_of(session.model)
    most = MOST.get(place.type, MOST["cpu"])
    if not usable:
        return Trial(0, most)
    _check_kind(session, usable[0].content)
    largest = max(usable, key=lambda r: len(r.content) if isinstance(r.content, str) else 0)
    (explained,) = session.explain([largest], 1, on_start)
    for failure in explained.failures:
        if failure.kind in _OF_THE_MODEL:
            raise _OF_THE_MODEL[failure.kind](failure.reason)
    pass_bytes = _pass_bytes(session, largest) if explained.explanations else 0
    allowed = max(1, total_memory(place) // SHARE // max(pass_bytes, 1))
    size = min(most, 1 << (int(allowed).bit_length() - 1))
    return Trial(pass_bytes, size)


def _pass_bytes(session: Session, read: RowContent) -> int:
    """Return the bytes that the recorded pass of a row holds: 0 if the model cannot be recorded, so that no method of
    the session needs such a pass; the whole memory if it does not fit."""
    try:
        ready, checkpoint = session.opened.prepare(collated([read.content])), session.opened.options.checkpoint
        tape = record_pass(session.model, ready.inputs.feed, ready.inputs.samples, checkpoint=checkpoint).tape
        return sum(math.prod(tape.shapes[n]) * tape.dtypes[n].itemsize for n in tape.maker if tape.holds(n))
    except (MemoryError, *FOREIGN_ERRORS) as error:
        return total_memory(device_of(session.model)) if is_out_of_memory(error) else 0


def _check_kind(session: Session, content: Any) -> None:
    kind = {"text": "text", "pair": "text", "picture": "image", "tensors": "both"}[content_shape(content, 0)[0]]
    for method, _ in session.methods:
        if "both" not in (kind, method.modality) and kind != method.modality:
            explained = "pictures" if method.modality == "image" else "text"
            raise InputError(f"{method.name} explains {explained}, and the input is {kind}: remove the method")
