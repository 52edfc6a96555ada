"""The rows that the values of a pass hold, and the attention between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from whyformer.tape.attentions import Attention
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows
from whyformer.tape.shared_rows import find_copies, reduction_of, split_keys
from whyformer.tape.streams import Stream, is_passed
from whyformer.tape.values import Tape

__all__ = ["Layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows that the values of a pass hold, and the attention between them.

    Attributes:
        tape: the pass.
        program: its program from the values in which the rows begin.
        rows: the rows of the pass.
        attentions: the attentions in the order of execution.
        streams: groups of rows that attend together, in the order of their first attention.
        first_maps: number of each attention map among learned vectors before they attend to any input -> the sample of
            each of its entries along the first axis.
        is_complete: False if there is attention over vectors of a second table, in which the same ids are looked up.
    """

    tape: Tape
    program: Program
    rows: Rows
    attentions: Sequence[Attention]
    streams: Sequence[Stream]
    first_maps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def roots(self) -> list[int]:
        """Numbers of the values in which rows begin."""
        return [*self.rows.roots.values(), *self.first_maps]

    @cached_property
    def copies(self) -> list[tuple[Stream, Stream, Tensor]]:
        """:func:`~whyformer.tape.shared_rows.find_copies` of the streams, and their reductions."""
        pairs = find_copies(self.rows, self.attentions, self.streams)
        return [*(pair for pair in pairs if pair[1] not in self.earlier(pair[0])), *self.reductions]

    @cached_property
    def reductions(self) -> list[tuple[Stream, Stream, Tensor]]:
        """The streams that consist of some rows of the stream before, or of weighted sums of them, as (stream, stream
        before, :func:`~whyformer.tape.shared_rows.reduction_of`)."""
        pairs = [(stream, before) for stream in self.streams for before in self.earlier(stream)[-1:]]
        reductions = ((s, t, reduction_of(self.program, self.tape, self.rows, t, s)) for s, t in pairs)
        return [(s, t, weights) for s, t, weights in reductions if weights is not None]

    @cached_property
    def split(self) -> dict[int, tuple[list[tuple[Stream, Tensor]], Tensor]]:
        """Number of the map of each attention in a block -> :func:`~whyformer.tape.shared_rows.split_keys` of it."""
        inside = ((stream, attention) for stream in self.streams for b in stream.blocks for attention in b.attentions)
        return {attention.map: split_keys(attention, stream, self.streams) for stream, attention in inside}

    def earlier(self, stream: Stream) -> list[Stream]:
        """Return the streams whose rows attend and are then merged into the rows of a stream."""
        if stream.is_learned:
            return []
        same = [s for s in self.streams if s.blocks and not s.is_learned and set(s.names) == set(stream.names)]
        before = same[: same.index(stream)] if stream in same else []
        if stream.is_mixed:
            return before
        # rows that began before the merge, to which merged rows are added
        attended = {a.keys for block in stream.blocks for a in block.attentions}
        return [s for s in before if not s.is_read and s.rows not in attended]

    @cached_property
    def merged(self) -> frozenset[Stream]:
        """The streams whose rows attend and are then merged into those of another stream, unless the merge is a
        known reduction."""
        known, merged = {(s, t) for s, t, _ in self.reductions}, set[Stream]()
        for stream in self.streams:
            later = stream
            for before in reversed(self.earlier(stream)):
                if later in merged or (later, before) not in known:
                    merged.add(before)
                later = before
        return frozenset(merged)

    @property
    def leading(self) -> list[Attention]:
        """The attentions on paths from other rows to those that the target reads, and those whose rows are unknown."""
        rows = {a.map: stream.rows for stream in self.streams for block in stream.blocks for a in block.attentions}
        unknown = (stream for stream in self.streams if not stream.all_blocks)  # the readers of these rows are unknown
        reached: set[Tensor | None] = {s.rows for s in (*unknown, *(s for s in self.streams if s.is_read))}
        leading = list[Attention]()
        for attention in reversed(self.attentions):
            reached.update(t.rows for s, t, _ in self.copies if s.rows in reached)
            if attention.queries is None or rows.get(attention.map, attention.queries) in reached:
                leading.append(attention)
                reached.add(attention.keys)
                reached.update(stream.rows for stream, _ in self.split.get(attention.map, ((), None))[0])
        return leading

    def borders(self, program: Program) -> dict[int, int]:
        """Return {input of a block: index among all blocks} for blocks that no path of the program bypasses."""
        blocks = [block for stream in self.streams for block in stream.blocks]
        return {block.entry: i for i, block in enumerate(blocks) if is_passed(program, block.entry)}
