"""Walks over a recorded pass in which one sequence of rows attends.

    attended = attended_pass(passed)
    walked = attended.walk_blocks(seed, [GRADIENT, deep_taylor()], seen, blocks)

``seen`` is called at each map, the last block first, with what flows to it under each composite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.methods.attended import MapPass, Seen, Walked
from whyformer.methods.passes import record_pass
from whyformer.tape.streams import Stream, is_passed
from whyformer.tape.walking import Composite

__all__ = ["AttendedPass", "attended_pass"]


@dataclass(frozen=True, eq=False)
class AttendedPass(MapPass):
    """A recorded pass of one sequence of rows, which attend to one another once in each block. Inputs that are not in
    it are constant.

    Attributes:
        first: number of its first block: that of the blocks before the last merge of rows.
    """

    first: int = 0

    @property
    def stream(self) -> Stream:
        """The sequence."""
        (stream,) = self.ends.values()
        return stream

    @property
    def tokens(self) -> int:
        """Number of rows of each sample."""
        return int(self.stream.rows.shape[1])

    def features(self, value: int, tensor: Tensor) -> Tensor:
        """Do :meth:`features_of` for the sequence."""
        return self.features_of(self.stream, value, tensor)

    def laid_out(self, value: int, features: Tensor) -> Tensor:
        """Return ``[B, N, D]`` in the layout of a value: the inverse of :meth:`features`. What is no row gets zeros."""
        rows, own, empty = self.layout.rows, self.stream.rows, torch.zeros_like(self.whole.tape[value])
        return rows.with_features(value, empty, own, features.reshape(rows.features(value, empty, own).shape))

    def with_value(self, value: int, other: Tensor) -> AttendedPass:
        """Record another pass of the model in which a value is another one, of the same shape.

        Raises:
            ModelError: the model takes another way then.
        """
        whole = self.whole
        changed = record_pass(whole.model, whole.feed, whole.samples, {value: lambda _: other})
        if changed.tape.signature != whole.tape.signature:
            raise ModelError("the model takes another way if what its blocks hand on is changed")
        return replace(self, whole=changed)

    def walk_blocks(
        self,
        seed: Tensor,
        composites: Sequence[Composite],
        seen: Seen | None = None,
        blocks: Iterable[int] = (),
        entering: Seen | None = None,
    ) -> Walked:
        """Walk back from the target to the maps of some blocks, and to what enters them.

        Args:
            seed, composites, seen: as for :meth:`walk`.
            blocks: those that are watched.
            entering: called with a block, what enters it, and what flows there under the last composite,
                ``[B, N, D]``.
        """
        own = dict(enumerate(self.stream.blocks, self.first))
        watched = [block for block in sorted(blocks) if block in own]
        at = {} if entering is None else {own[i].entry: partial(self._entered, i, entering) for i in watched}
        return self.walk(seed, composites, seen, watched, at=at)

    def _entered(self, index: int, entering: Seen, *flows: Tensor | None) -> None:
        """Hand over what enters a block, sample by sample."""
        if flows[-1] is not None:
            entering(index, *self.arrived(self.stream, self.stream.blocks[index - self.first].entry, flows[-1]))


def attended_pass(passed: MapPass, name: str | None = None) -> AttendedPass | None:
    """Return a pass with the one sequence of rows that attends in it; None if there is no such sequence.

    Args:
        passed: a recorded pass.
        name: an input whose rows are in the sequence that is meant, where others attend too.
    """
    layout = passed.layout
    read_out = [s for s in layout.streams if s.is_read and name in (None, *s.names)]
    if len({frozenset(s.names) for s in read_out}) != 1:
        return None
    stream = read_out[-1]
    before = [s for s in layout.streams if s is not stream and set(s.names) == set(stream.names)]
    if name is None and len(before) + 1 < len(layout.streams):
        return None
    if not stream.attends_to_itself:
        return None
    names, first = () if len(layout.streams) == 1 else stream.names, sum(len(s.blocks) for s in before)
    attentions = {i: block.attentions[0] for i, block in enumerate(stream.blocks, first)}
    known = passed.whole, layout, passed.read, attentions, {"": stream}, passed.sources, passed.inputs
    attended = AttendedPass(*known, names, first)
    # else the target reads something beside the states of the stream, as those of an earlier resolution
    alone = first or any(is_passed(attended.program, block.exit) for block in stream.blocks)
    return attended if alone else None
