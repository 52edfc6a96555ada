"""Walks over a recorded pass that are watched at its maps of attention.

    attended = attended_pass(whole, sources, read)
    walked = attended.walk_blocks(seed, [GRADIENT, deep_taylor()], seen, blocks)

``seen`` is called at each map, the last block first, with what flows to it under each composite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.passes import ForwardPass, Layout, Read, record_pass
from whyformer.tape.places import Places, find_places
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Block, Stream, is_passed, path_to, readout
from whyformer.tape.structure import Attention
from whyformer.tape.units import Unit
from whyformer.tape.walking import Composite, walk_back

__all__ = ["AttendedPass", "MapPass", "Walked", "attended_pass", "map_pass"]

Seen = Callable[..., None]
Known = tuple[Any, Any, tuple[int, int]]
"""Of an attention: the name of its queries' rows, that of its keys' rows, and how many there are of each."""


@dataclass(eq=False)
class Walked:
    """What a walk from a target saw besides the maps.

    Attributes:
        read: stream -> ``[B, N]``, how much the target reads each row of its last state. Streams at whose last state
            nothing arrived are left out.
        sums: of relevance, if a composite carries it.
    """

    read: dict[Any, Tensor] = field(default_factory=dict)
    sums: Sums | None = None

    @property
    def row(self) -> Tensor | None:
        """``[B, N]`` of the only stream that is read; None if nothing arrived there."""
        return next(iter(self.read.values()), None)


@dataclass(frozen=True, eq=False)
class MapPass:
    """A recorded pass whose maps of attention can be looked at.

    Attributes:
        whole: the pass.
        layout: its rows, attentions and streams.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
        attentions: those that lead to the target, by number.
        ends: name -> stream that the target reads.
    """

    whole: ForwardPass
    layout: Layout
    read: Read
    attentions: Mapping[int, Attention]
    ends: Mapping[Any, Stream]

    @property
    def roots(self) -> list[int]:
        """The values in which the rows of the inputs that are explained begin."""
        return list(self.layout.rows.begun.values())

    @cached_property
    def logits(self) -> Tensor:
        """``[B, C]``, the row of logits that the target is about."""
        return self.whole.logits(self.read)

    def map(self, index: int) -> Tensor:
        """Return the map of an attention, ``[B, H, Q, K]``."""
        attention = self.attentions[index]
        return attention.arrange(*(self.whole.tape[n] for n in attention.maps))

    def scores(self, index: int) -> Tensor:
        """Return what the map of an attention is the softmax of, ``[B, H, Q, K]``."""
        attention = self.attentions[index]
        return attention.arrange(*(self.whole.tape[p.scores] for p in attention.pieces))

    def block_of(self, index: int) -> tuple[Stream, Block]:
        """Return the stream and the block that an attention belongs to."""
        attention = self.attentions[index]
        blocks = ((stream, block) for stream in self.layout.streams for block in stream.blocks)
        return next((stream, block) for stream, block in blocks if attention in block.attentions)

    def release(self) -> None:
        """Drop the values that were computed again."""
        self.whole.tape.release()

    def walk(
        self,
        seed: Tensor,
        composites: Sequence[Composite],
        seen: Seen | None = None,
        watched: Iterable[int] = (),
        *,
        at: Mapping[int, Seen] | None = None,
        starts: Mapping[int, Tensor] | None = None,
    ) -> Walked:
        """Walk back from the target to some maps.

        Args:
            seed: ``[B, C]``, ∂target/∂logits.
            composites: rules; the first carries multipliers, so that the rows which are read out are known.
            seen: called with an attention's number and what flows to its map under each composite, ``[B, H, Q, K]``,
                the last attention first; not called where nothing arrives under some of them.
            watched: numbers of the attentions that are watched.
            at: value -> function that is called with what flows there under each composite.
            starts: what the walk starts with at other values than the logits.
        """
        tape, rows, walked = self.whole.tape, self.layout.rows, Walked()
        starts = self.whole.starts(self.read, seed) if starts is None else starts
        watchers: dict[int, list[Seen]] = defaultdict(list, {n: [arrive] for n, arrive in (at or {}).items()})
        if seen is not None:
            there = [index for index in watched if index in self.attentions]
            for number, arrive in (pair for index in there for pair in self._pieces(index, seen).items()):
                watchers[number].append(arrive)
        for name, stream in self.ends.items():
            watchers[stream.last].append(partial(self._ended, walked, name))
        run = next((i for i, c in enumerate(composites) if c.carrier == "relevance"), None)
        program = read_program(tape, self.roots, starts)
        if run is not None:
            borders, first = self.layout.borders(program), min(watchers)
            walked.sums = Sums(rows, starts, seed, run, bool(borders))
            for number, border in borders.items():
                if number > first:  # the walk ends there
                    watchers[number].append(walked.sums.entering(border, number))
        with self.whole.naming_modules():
            walk_back(
                program,
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

    def _ended(self, walked: Walked, name: Any, flow: Tensor | None, *_: Tensor | None) -> None:
        """Note which rows of the last state of a stream are read."""
        if flow is not None:
            stream = self.ends[name]
            walked.read[name] = readout(self.layout.rows, stream.rows, stream.last, flow)


@dataclass(frozen=True, eq=False)
class AttendedPass(MapPass):
    """A recorded pass of one sequence of rows, which attend to one another once in each block. Inputs that are not in
    it are constant."""

    @property
    def roots(self) -> list[int]:
        begun = self.layout.rows.begun
        return [begun[name] for name in (begun if len(self.layout.streams) == 1 else self.stream.names)]

    @property
    def stream(self) -> Stream:
        """The sequence."""
        (stream,) = self.ends.values()
        return stream

    @property
    def tokens(self) -> int:
        """Number of rows of each sample."""
        return int(self.stream.rows.shape[1])

    def places(self, picture: str) -> Places | None:
        """Return where the cells of a picture lie among the rows; None if that cannot be read off the pass."""
        return find_places(self.whole.tape, self.layout.rows, self.stream, picture)

    @cached_property
    def program(self) -> Program:
        """The units between the rows and the logits."""
        starts = self.whole.starts(self.read, torch.ones_like(self.logits))
        return read_program(self.whole.tape, self.roots, starts)

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
        block = self.stream.blocks[index]
        path = self.path(block.entry, block.attentions[0].map)
        return path[self.behind_norm(path)]

    def features(self, value: int, tensor: Tensor) -> Tensor:
        """Return ``[B, N, D]``, the features of each row of the sequence.

        Args:
            value: number of a value that is no map.
            tensor: of its shape, such as a flow.

        Raises:
            ModelError: its rows are unknown, or others than those of the sequence.
        """
        return self.layout.rows.features(value, tensor, self._rows_in(value)).flatten(2)

    def laid_out(self, value: int, features: Tensor) -> Tensor:
        """Return ``[B, N, D]`` in the layout of a value: the inverse of :meth:`features`. What is no row gets zeros."""
        rows, empty, own = self.layout.rows, torch.zeros_like(self.whole.tape[value]), self._rows_in(value)
        return rows.with_features(value, empty, own, features.reshape(rows.features(value, empty, own).shape))

    def _rows_in(self, value: int) -> Tensor:
        """``[B, N]`` the rows of the sequence, if they are those of a value."""
        rows, own = self.layout.rows, self.stream.rows
        if not torch.equal(rows.distinct(rows.of(value)), own.flatten().sort().values):
            raise ModelError(f"the rows of value {value} are not those that attend")
        return own

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
        own = self.stream.blocks
        watched = [block for block in sorted(blocks) if block < len(own)]
        at = {} if entering is None else {own[i].entry: partial(self._entered, i, entering) for i in watched}
        return self.walk(seed, composites, seen, watched, at=at)

    def _entered(self, index: int, entering: Seen, *flows: Tensor | None) -> None:
        """Hand over what enters a block, sample by sample."""
        number, flow = self.stream.blocks[index].entry, flows[-1]
        if flow is not None:
            entering(index, self.features(number, self.whole.tape[number]), self.features(number, flow))


def _all(watchers: Sequence[Seen], *flows: Tensor | None) -> None:
    for watcher in watchers:
        watcher(*flows)


def attended_pass(
    whole: ForwardPass, sources: Mapping[str, Inputs], read: Read, name: str | None = None
) -> AttendedPass | None:
    """Return the pass with the one sequence of rows that attends in it; None if there is no such sequence.

    Args:
        whole: a recorded pass.
        sources: the inputs by name.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
        name: an input whose rows are in the sequence that is meant, where others attend too.
    """
    layout = whole.layout(sources, read)
    read_out = [s for s in layout.streams if s.is_read and name in (None, *s.names)]
    if len(read_out) != 1 or (name is None and len(layout.streams) != 1):
        return None
    (stream,) = read_out
    attentions = {i: block.attentions[0] for i, block in enumerate(stream.blocks)}
    attended = AttendedPass(whole, layout, read, attentions, {"": stream})
    once = all(len(block.attentions) == 1 and block.attentions[0].is_self for block in stream.blocks)
    # the target may read something else than its last state
    return attended if once and not stream.is_mixed and is_passed(attended.program, stream.last) else None


def map_pass(
    whole: ForwardPass,
    sources: Mapping[str, Inputs],
    read: Read,
    known: Mapping[int, Known],
    ends: Container[Any],
) -> MapPass | None:
    """Return the pass with the attentions of several sequences; None if they are not those that are known.

    Args:
        whole, sources, read: as for :func:`attended_pass`.
        known: number of each attention -> what is known of it, in the order of execution.
        ends: names of the rows that the target reads.
    """
    layout = whole.layout(sources, read)
    own = [a for stream in layout.streams for block in stream.blocks for a in block.attentions]
    named = _named(sorted(own, key=lambda a: a.map), known)
    if named is None or len(own) < len(layout.attentions) or any(stream.is_mixed for stream in layout.streams):
        return None
    names = {id(a.queries): known[number][0] for number, a in named.items()}
    read_out = {names[id(stream.rows)]: stream for stream in layout.streams if stream.is_read and stream.blocks}
    return MapPass(whole, layout, read, named, read_out) if read_out and all(n in ends for n in read_out) else None


def _named(attentions: Sequence[Attention], known: Mapping[int, Known]) -> dict[int, Attention] | None:
    """Number of each attention among those that are known, some of which may lead nowhere; None if that is not sure."""
    found, names, dead = dict[int, Attention](), dict[int, Any](), set[Any]()
    left = iter(known.items())
    for attention in attentions:
        if attention.queries is None or attention.keys is None:
            return None
        number, one = next(left, (-1, None))
        while one is not None and not _fits(attention, one, names):
            dead.add(one[:2])
            number, one = next(left, (-1, None))
        if one is None or one[:2] in dead:
            return None
        found[number] = attention
        names |= zip((id(attention.queries), id(attention.keys)), one[:2], strict=True)
    return found if len(set(names.values())) == len(names) else None


def _fits(attention: Attention, known: Known, names: Mapping[int, Any]) -> bool:
    """Return True if an attention can be that which is known; ``names`` are those of the rows so far."""
    queries, keys, shape = known
    rows = [(attention.queries, queries), (attention.keys, keys)]
    sizes = [0 if own is None else own.shape[1] for own, _ in rows]
    alike = all(names.get(id(own), name) == name for own, name in rows)
    return alike and attention.is_self == (queries == keys) and tuple(sizes) == shape
