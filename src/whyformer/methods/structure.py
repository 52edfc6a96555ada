"""The structure of a model, read from a recorded pass: its streams of rows, their blocks and their attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from whyformer.methods.map_passes import MapPass, NamedAttention, RowsName
from whyformer.tape.streams import Stream, is_passed

__all__ = ["MERGED", "NOT_YET", "NO_ATTENTION", "UNREAD", "Structure"]

NOT_YET = "is not supported yet"
NO_ATTENTION = "no attention was seen in its forward pass"
UNREAD = "the output of its last block is unknown or does not reach the logits"
MERGED = (
    "it removes or merges tokens between its blocks, or attends in windows or at several resolutions, so there is no "
    "map over all tokens"
)


@dataclass(frozen=True, eq=False)
class Structure:
    """The streams of rows of a recorded pass.

    Attributes:
        map_pass: the pass.
        main: name of the main input.
        sources: names of all scored inputs.
    """

    map_pass: MapPass
    main: str
    sources: tuple[str, ...]

    @property
    def attentions(self) -> Mapping[int, NamedAttention]:
        """The attentions in blocks, by index."""
        return self.map_pass.named

    @property
    def merges(self) -> bool:
        """True if rows attend, are merged, and attend again."""
        return _share_inputs(s for s in self.streams if s.blocks)

    @property
    def attends(self) -> bool:
        """True if there is attention on a path to the target."""
        return bool(self.map_pass.layout.attentions)

    @cached_property
    def streams(self) -> list[Stream]:
        """The streams with blocks."""
        return [stream for stream in self.map_pass.layout.streams if stream.all_blocks]

    @property
    def ends(self) -> Mapping[RowsName, Stream]:
        """Name of rows -> stream, for the streams that the target reads."""
        return self.map_pass.ends

    @property
    def layers(self) -> int:
        """The number of blocks of the stream that the target reads; the maximum if it reads several."""
        return max(map(self.count, self.ends.values()), default=0)

    def count(self, stream: Stream) -> int:
        """Return the number of blocks of a stream, with those before merges of its rows."""
        return sum(len(s.blocks) for s in (*self.map_pass.layout.earlier(stream), stream))

    @cached_property
    def is_plain(self) -> bool:
        """True if there is a single input whose rows attend only to rows computed from it, once in each block; or if
        there is no attention."""
        if not self.attends:
            return True
        sources = self.map_pass.sources_of
        attentions = self.map_pass.layout.attentions
        names = {name for a in attentions for side in (a.queries, a.keys) for name in sources(side)}
        return names <= {self.main} and len(self.sources) == 1 and all(s.attends_once for s in self.streams)

    def only_rows(self, name: str) -> RowsName | None:
        """Return the name of the rows that hold an input and are read by the target, if they attend only to themselves,
        once in each block, and none of them was removed or merged before; else None."""
        ends, reduced = self.ends.items(), self.map_pass.reduced
        matches = [rows for rows, stream in ends if name in rows and rows not in reduced and stream.attends_to_itself]
        return matches[0] if len(matches) == 1 else None

    def tower(self, name: str) -> RowsName | None:
        """Return :meth:`only_rows` of an input if its rows are not those of another stream; else None.

        Of a two-tower model, methods whose cost grows with the number of rows explain only the main input's tower.
        """
        rows_name = self.only_rows(name)
        return None if any(queries == rows_name for queries, _, _ in self.map_pass.copies) else rows_name

    @property
    def reached(self) -> set[RowsName]:
        """Names of the rows that attention connects with the target."""
        names = set(self.ends)
        for number, attention in reversed(list(self.attentions.items())):
            names.update(learned for stream, learned, _ in self.map_pass.copies if stream in names)
            if attention.queries in names:
                names.update(self.map_pass.key_streams[number])
        return names

    def attending(self, name: str) -> list[int]:
        """Return the indices of those blocks that attend to rows of an input, in streams that the target reads."""
        keys = self.map_pass.key_streams
        layers = ((n, a.layer) for n, a in self.attentions.items() if a.queries in self.ends and not a.is_merged)
        return sorted({layer for n, layer in layers if any(name in key for key in keys[n])})

    def elements_of(self, name: str) -> Tensor | None:
        """Return the element ``[B, M]`` of an input that each of its rows represents, −1 for none; None if the rows are
        not looked up by ids."""
        rows, source = self.map_pass.layout.rows, self.map_pass.source_of(name)
        return next((f.elements for f in rows.families if f.source == source and f.elements is not None), None)

    @cached_property
    def without_maps(self) -> tuple[str, str] | None:
        """(reason why some attention maps are unknown, verdict for methods that need them); None if all are known."""
        layout = self.map_pass.layout
        if not layout.is_complete:
            return "it looks its tokens up in two tables, and attention of the second one is not followed", NOT_YET
        if not layout.attentions:
            return NO_ATTENTION, "has no meaning"
        mixed = next((s for s in self.streams if s.mixing_count and s.is_read), None)
        if mixed is not None:
            attending = sum(bool(block.attentions) for block in mixed.blocks)
            count = attending + mixed.mixing_count
            reason = f"only {attending} of its {count} blocks have attention, the others mix tokens without a map"
            return reason, "has no meaning"
        if not self.map_pass.is_complete:
            return "the queries or keys of one of its attentions are unknown", NOT_YET
        reduced = {before for _, before, _ in layout.reductions}
        if _share_inputs(s for s in self.streams if s not in layout.merged | reduced):
            return "it processes one input in several sequences of rows beside each other", NOT_YET
        if any(map(self._is_bypassed, self.ends.values())):
            return "the target reads other values than the states of its tokens", NOT_YET
        return None if self.ends else (UNREAD, NOT_YET)

    def _is_bypassed(self, stream: Stream) -> bool:
        """Return True if the target also reads values of a stream before its first block."""
        if not stream.attends_to_itself or self.map_pass.layout.earlier(stream):
            return False
        of_stream = replace(self.map_pass, explained=stream.names)
        return not any(is_passed(of_stream.program, block.exit) for block in stream.blocks)


def _share_inputs(streams: Iterable[Stream]) -> bool:
    """Return True if the rows of several streams are those of the same inputs."""
    inputs = [frozenset(stream.names) for stream in streams if not stream.is_learned]
    return len(set(inputs)) < len(inputs)
