"""Walks over a recorded pass that are watched at its maps of attention.

    attended = attended_pass(whole, sources, read)
    walked = attended.walk(seed, [GRADIENT, deep_taylor()], seen)

``seen`` is called at each map, the last block first, with what flows to it under each composite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.passes import ForwardPass, Layout, Read, record_pass
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Stream, is_passed, path_to, readout
from whyformer.tape.structure import Attention, positions
from whyformer.tape.units import Unit
from whyformer.tape.walking import Composite, walk_back

__all__ = ["AttendedPass", "Walked", "attended_pass"]

Seen = Callable[..., None]


@dataclass(eq=False)
class Walked:
    """What a walk from a target saw besides the maps.

    Attributes:
        row: ``[B, N]``, how much the target reads each row of the last state; None if nothing arrived there.
        sums: of relevance, if a composite carries it.
    """

    row: Tensor | None = None
    sums: Sums | None = None


@dataclass(frozen=True, eq=False)
class AttendedPass:
    """A recorded pass of one sequence of rows, which attend to one another once in each block.

    Attributes:
        whole: the pass.
        layout: its rows, attentions and streams.
        stream: the sequence.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
    """

    whole: ForwardPass
    layout: Layout
    stream: Stream
    read: Read
    _orders: dict[int, Tensor | None] = field(default_factory=dict, repr=False)

    @cached_property
    def logits(self) -> Tensor:
        """``[B, C]``, the row of logits that the target is about."""
        return self.whole.logits(self.read)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [block.attentions[0] for block in self.stream.blocks]

    @property
    def tokens(self) -> int:
        """Number of rows of each sample."""
        return int(self.stream.rows.shape[1])

    def map(self, index: int) -> Tensor:
        """Return the map of a block, ``[B, H, N, N]``."""
        attention = self.attentions[index]
        return attention.arrange(*(self.whole.tape[n] for n in attention.maps))

    def scores(self, index: int) -> Tensor:
        """Return what the map of a block is the softmax of, ``[B, H, N, N]``."""
        attention = self.attentions[index]
        return attention.arrange(*(self.whole.tape[p.scores] for p in attention.pieces))

    @cached_property
    def program(self) -> Program:
        """The units between the rows and the logits."""
        starts = self.whole.starts(self.read, torch.ones_like(self.logits))
        return read_program(self.whole.tape, self.layout.rows.begun.values(), starts)

    def behind_norm(self, path: Sequence[int], first: int = 0) -> int:
        """Return the position behind a norm that follows a value on a path, with its weight and bias.

        Args:
            path: numbers of values through which all paths from the first to the last lead.
            first: position of the value, which is returned if no norm follows it.
        """
        found, kinds = first, frozenset(("view", "norm"))
        for i in range(first + 1, len(path)):
            unit = self._makers[path[i]]
            if unit.kind not in kinds or unit.entries[0] != path[i - 1]:
                break
            if unit.kind == "norm" or found > first:
                found, kinds = i, frozenset(("view", "scale", "shift"))
        return found

    def path(self, first: int, last: int) -> list[int]:
        """Return the values through which all paths from one to another lead, without those inside of units."""
        found = path_to(self.program.dominator, last)
        return [first, *(n for n in found[found.index(first) + 1 :] if n in self._makers)]

    @cached_property
    def _makers(self) -> dict[int, Unit]:
        return {r: u for u in self.program.units for r in u.exits}

    def input_of_attention(self, index: int) -> int:
        """Return the number of what a block normalises first, if that comes before its attention; else of what enters
        the block."""
        path = self.path(self.stream.blocks[index].entry, self.attentions[index].map)
        return path[self.behind_norm(path)]

    def features(self, value: int, tensor: Tensor) -> Tensor:
        """Return ``[B, N, D]``, the features of each row of the sequence.

        Args:
            value: number of a value that is no map.
            tensor: of its shape, such as a flow.

        Raises:
            ModelError: its rows are unknown, or others than those of the sequence.
        """
        found, order = self.layout.rows.features(value, tensor).flatten(2), self._order(value)
        return found if order is None else found.gather(1, order.to(found.device)[..., None].expand_as(found))

    def laid_out(self, value: int, features: Tensor) -> Tensor:
        """Return ``[B, N, D]`` in the layout of a value: the inverse of :meth:`features`. What is no row gets zeros."""
        rows, order = self.layout.rows, self._order(value)
        empty = torch.zeros_like(self.whole.tape[value])
        if order is not None:
            places = order.to(features.device)[..., None].expand_as(features)
            features = torch.empty_like(features).scatter(1, places, features)
        return rows.with_features(value, empty, features.reshape(rows.features(value, empty).shape))

    def _order(self, value: int) -> Tensor | None:
        """``[B, N]`` where each row of the sequence stands among those of a value; None if they stand in order."""
        rows, queries = self.layout.rows, self.stream.rows
        if value not in self._orders:
            own = rows.features(value, rows.of(value)).flatten(2)[..., 0]
            place = positions(own, len(rows))[queries]
            if own.shape != queries.shape or int(place.max()) == own.shape[1]:
                raise ModelError(f"the rows of value {value} are not those that attend")
            self._orders[value] = None if torch.equal(own, queries) else place
        return self._orders[value]

    def with_value(self, value: int, other: Tensor) -> AttendedPass:
        """Record another pass of the model in which a value is another one, of the same shape.

        Raises:
            ModelError: the model takes another way then.
        """
        whole = self.whole
        changed = record_pass(whole.model, whole.feed, whole.samples, {value: lambda _: other})
        if changed.tape.signature != whole.tape.signature:
            raise ModelError("the model takes another way if what its blocks hand on is changed")
        return replace(self, whole=changed, _orders={})

    def release(self) -> None:
        """Drop the values that were computed again."""
        self.whole.tape.release()

    def walk(
        self,
        seed: Tensor,
        composites: Sequence[Composite],
        seen: Seen | None = None,
        blocks: Iterable[int] = (),
        entering: Seen | None = None,
        *,
        at: Mapping[int, Seen] | None = None,
        starts: Mapping[int, Tensor] | None = None,
    ) -> Walked:
        """Walk back from the target to the maps of some blocks, and to what enters them.

        Args:
            seed: ``[B, C]``, ∂target/∂logits.
            composites: rules; the first carries multipliers, so that the rows which are read out are known.
            seen: called with a block and what flows to its map under each composite, ``[B, H, N, N]``, the last block
                first; not called where nothing arrives under some of them.
            blocks: those that are watched.
            entering: called with a block, what enters it, and what flows there under the last composite,
                ``[B, N, D]``.
            at: value -> function that is called with what flows there under each composite.
            starts: what the walk starts with at other values than the logits.
        """
        tape, rows, walked = self.whole.tape, self.layout.rows, Walked()
        watched = [block for block in sorted(blocks) if block < len(self.stream.blocks)]
        starts = self.whole.starts(self.read, seed) if starts is None else starts
        watchers: dict[int, list[Seen]] = defaultdict(list, {n: [arrive] for n, arrive in (at or {}).items()})
        if seen is not None:
            for number, arrive in (pair for index in watched for pair in self._pieces(index, seen).items()):
                watchers[number].append(arrive)
        if entering is not None:
            for index in watched:
                watchers[self.stream.blocks[index].entry].append(partial(self._entered, index, entering))
        watchers[self.stream.last].append(partial(self._ended, walked))
        run = next((i for i, c in enumerate(composites) if c.carrier == "relevance"), None)
        if run is not None:
            walked.sums = Sums(rows, starts, seed, run)
            for i, block in enumerate(self.stream.blocks):
                if i > min(watched, default=0):
                    watchers[block.entry].append(walked.sums.entering(i, block.entry))
        with self.whole.naming_modules():
            walk_back(
                read_program(tape, rows.begun.values(), starts),
                tape,
                [(c, starts) for c in composites],
                at={n: partial(_all, every) for n, every in watchers.items()},
                samples=RowSamples(rows),
                handed_on=None if walked.sums is None else walked.sums.handed_on,
            )
        tape.release()
        return walked

    def _pieces(self, index: int, seen: Seen) -> dict[int, Seen]:
        """What to call at the pieces of a map, so that ``seen`` is called when all have arrived."""
        attention, arrived = self.attentions[index], dict[int, tuple[Tensor | None, ...]]()

        def arrive(number: int, *flows: Tensor | None) -> None:
            arrived[number] = flows
            if len(arrived) < len(attention.maps):
                return
            runs = list(zip(*(arrived[n] for n in attention.maps), strict=True))
            arrived.clear()
            if all(any(flow is not None for flow in run) for run in runs):
                seen(index, *(attention.arrange(*run) for run in runs))

        def at(number: int) -> Seen:
            return lambda *flows: arrive(number, *flows)

        return {n: at(n) for n in attention.maps}

    def _entered(self, index: int, entering: Seen, *flows: Tensor | None) -> None:
        """Hand over what enters a block, sample by sample."""
        number, flow = self.stream.blocks[index].entry, flows[-1]
        if flow is not None:
            entering(index, self.features(number, self.whole.tape[number]), self.features(number, flow))

    def _ended(self, walked: Walked, flow: Tensor | None, *_: Tensor | None) -> None:
        """Note which rows of the last state are read."""
        if flow is not None:
            walked.row = readout(self.layout.rows, self.stream.rows, self.stream.last, flow)


def _all(watchers: Sequence[Seen], *flows: Tensor | None) -> None:
    for watcher in watchers:
        watcher(*flows)


def attended_pass(whole: ForwardPass, sources: Mapping[str, Inputs], read: Read) -> AttendedPass | None:
    """Return the pass with the one sequence of rows that attends in it; None if there is no such sequence.

    Args:
        whole: a recorded pass.
        sources: the inputs by name.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
    """
    layout = whole.layout(sources)
    read_out = [s for s in layout.streams if s.is_read]
    if len(layout.streams) != 1 or len(read_out) != 1:
        return None
    (stream,) = read_out
    attended = AttendedPass(whole, layout, stream, read)
    once = all(len(block.attentions) == 1 and block.attentions[0].is_self for block in stream.blocks)
    # the target may read something else than its last state
    return attended if once and not stream.is_mixed and is_passed(attended.program, stream.last) else None
