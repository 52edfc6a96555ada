"""Walks over a recorded pass that are watched at its maps of attention and at its blocks.

    passed = map_pass(whole, sources, read)
    walked = passed.walk(seed, [GRADIENT, deep_taylor()], seen, passed.attentions)

``seen`` is called at each map, the last one first, with what flows to it under each composite.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.passes import Change, ForwardPass, Layout, Read, record_pass
from whyformer.rules.registered import with_own_rules
from whyformer.tape.members import Members
from whyformer.tape.mixing import mixes
from whyformer.tape.places import Elements, Places, find_elements, find_places
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.sharing import split_keys
from whyformer.tape.streams import Block, Stream, path_to, readout
from whyformer.tape.structure import Attention
from whyformer.tape.trunk import Trunk
from whyformer.tape.units import Unit
from whyformer.tape.walking import Composite, walk_back

__all__ = [
    "Key",
    "MapPass",
    "NamedAttention",
    "Walked",
    "has_one_resolution",
    "map_pass",
]

Seen = Callable[..., None]
Key = frozenset[str]
"""A name of rows: the inputs that have elements among them; a name of its own for rows of learned vectors."""


@dataclass(frozen=True)
class NamedAttention:
    """An attention, by the names of its rows.

    Attributes:
        queries, keys: names of the rows that look, and of those that are looked at.
        depth: the largest number of attentions on a path to its output.
        layer: position of its block in the stream of the queries.
    """

    queries: Key
    keys: Key
    depth: int
    layer: int


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
    """A recorded pass whose maps of attention and blocks can be looked at.

    Attributes:
        whole: the pass.
        layout: its rows, attentions and streams.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
        attentions: those in blocks, by number.
        ends: name -> stream that the target reads.
        sources: the inputs by name.
        inputs: name of rows -> input that gets their scores, where the names differ.
        alone: the inputs that are no constants, by the names of their rows; none for all of them.
    """

    whole: ForwardPass
    layout: Layout
    read: Read
    attentions: Mapping[int, Attention]
    ends: Mapping[Any, Stream]
    sources: Mapping[str, Inputs] = field(repr=False)
    inputs: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[str, ...] = ()

    @property
    def pictures(self) -> frozenset[str]:
        """Names of the inputs that are pictures."""
        return frozenset(name for name, side in self.sources.items() if side.modality == "image")

    @property
    def roots(self) -> list[int]:
        """The values in which the rows of the inputs that are explained begin."""
        return [self.layout.rows.begun[name] for name in self.alone] or self.layout.roots

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

    # -- whose rows attend to whose
    @cached_property
    def named(self) -> dict[int, NamedAttention]:
        """Number of each attention -> the names of its rows."""
        names, found = self._names, dict[int, NamedAttention]()
        for number, attention in self.attentions.items():
            stream, block = self.block_of(number)
            layer = stream.blocks.index(block)
            found[number] = NamedAttention(self.name_of(stream), names[id(attention.keys)], attention.depth, layer)
        return found

    @cached_property
    def _names(self) -> dict[int, Key]:
        """Names of the rows of all attentions and streams, by the identity of their numbers."""
        found: dict[int, Key] = {}
        for numbers in self._rows:
            name = frozenset(self.sources_of(numbers))
            alike = name in found.values() or not name
            found[id(numbers)] = name | {f"rows {len(found)}"} if alike else name
        return found

    @cached_property
    def _rows(self) -> list[Tensor]:
        """The numbers of the rows that look or are looked at, and those of streams without attention."""
        sides = [side for a in self.attentions.values() for side in (a.queries, a.keys)]
        sides += [stream.rows for stream in self.layout.streams if stream.all_blocks]
        return list({id(numbers): numbers for numbers in sides if numbers is not None}.values())

    def sources_of(self, numbers: Tensor | None) -> set[str]:
        """Return the inputs that some rows are made of, those of learned vectors that attended left out."""
        if numbers is None:
            return set()
        rows, products = self.layout.rows, {p.product for a in self.layout.attentions for p in a.pieces}
        families = (rows.families[f] for f in rows.family[numbers].unique().tolist())
        return {self.inputs.get(f.source, f.source) for f in families if f.source and f.value not in products}

    @property
    def copies(self) -> list[tuple[Key, Key, Tensor]]:
        """:attr:`Layout.copies` with the names of the streams."""
        return [(self.name_of(s), self.name_of(t), same) for s, t, same in self.layout.copies]

    @cached_property
    def looked_at(self) -> dict[int, dict[Key, Tensor | None]]:
        """Number of each attention -> names of the streams that its keys are rows of, each with ``[B, K, N]``, True
        where a key is a row of the stream; None where the keys are the rows in their order. Keys that are rows of no
        stream have the name of the keys."""
        found: dict[int, dict[Key, Tensor | None]] = {}
        for number, attention in self.attentions.items():
            parts, rest = split_keys(attention, self.block_of(number)[0], self.layout.streams)
            assert attention.keys is not None
            found[number] = {self.name_of(stream): same for stream, same in parts}
            if not parts:
                found[number][self.named[number].keys] = None
            elif bool(rest.any()):
                found[number][self.named[number].keys] = torch.diag_embed(rest)
        return found

    @property
    def keys(self) -> list[Key]:
        """The names of all rows that look or are looked at."""
        return list(self._names.values())

    def name_of(self, stream: Stream) -> Key:
        """Return the name of the rows of a stream."""
        return self._names[id(stream.rows)]

    def elements(self, name: str, key: Key) -> tuple[int, Elements] | None:
        """Return how many rows a name stands for, and which of them stand for the elements of an input; None if that
        is unknown.

        Args:
            name: of the input.
            key: of the rows.
        """
        numbers = next((n for n in self._rows if self._names[id(n)] == key), None)
        if numbers is None:
            return None
        source = self.source_of(name)
        found = find_elements(self.whole.tape, self.layout.rows, numbers, source, name in self.pictures)
        return None if found is None else (int(numbers.shape[1]), found)

    def source_of(self, name: str) -> str:
        """Return the name of the rows of an input."""
        return next((source for source, own in self.inputs.items() if own == name), name)

    @property
    def is_complete(self) -> bool:
        """True if it is known which rows look at which in all attentions that lead to the target, and each is in a
        block of its rows, or pools them. Rows that are looked at, but look at none, are not mixed otherwise before."""
        own = list(self.attentions.values())
        known = all(a.queries is not None and a.keys is not None for a in own)
        others = [a for a in self.layout.leading if a not in own]
        complete = known and all(a.is_learned for a in others) and all(map(_is_complete, self.layout.streams))
        first = {id(a.keys): a for a in reversed(own)}  # of those that look at the same rows
        return complete and not any(map(self._mixed_before, first.values()))

    def _mixed_before(self, attention: Attention) -> bool:
        """Return True if the rows that an attention looks at look at none, and may have been mixed on the way to it."""
        keys, rows, value = attention.keys, self.layout.rows, attention.pieces[0].value
        if keys is None or value is None or any(s.all_blocks and s.rows is keys for s in self.layout.streams):
            return False
        families = [rows.families[f] for f in rows.family[keys].unique().tolist()]
        if len(families) != 1 or not families[0].source or value not in self.whole.tape.maker:
            return False
        return mixes(self.whole.tape, rows, keys, families[0].value, value) is not False

    # -- blocks
    def blocks_of(self, name: str) -> list[tuple[Stream, Block]]:
        """Return the blocks that the rows of an input go through, in the order of execution: where they are in several
        streams, those of the one that the target reads; where patches are merged on the way, the blocks before too."""
        holding = [s for s in self.layout.streams if s.all_blocks and name in s.names]
        last = next((s for s in reversed(holding) if s.is_read), holding[-1] if holding else None)
        return [(s, b) for s in holding if last is not None and set(s.names) == set(last.names) for b in s.all_blocks]

    def block_of(self, index: int) -> tuple[Stream, Block]:
        """Return the stream and the block that an attention belongs to."""
        attention = self.attentions[index]
        blocks = ((stream, block) for stream in self.layout.streams for block in stream.blocks)
        return next((stream, block) for stream, block in blocks if attention in block.attentions)

    def places(self, picture: str, stream: Stream) -> Places | None:
        """Return where the cells of a picture lie among the rows of a stream; None if that cannot be read off the
        pass, and for an input that is no picture."""
        return find_places(self.whole.tape, self.layout.rows, stream, picture) if picture in self.pictures else None

    def input_of_attention(self, stream: Stream, block: Block) -> int:
        """Return the number of what a block normalises first, if both queries and values of its attention are made of
        that, or all of its first branch if it has none; else of what enters the block."""
        if not block.attentions:
            units = (self.program.makers[n] for n in self.path(stream, block)[1:])
            added = (unit for unit in units if unit.kind == "add")
            branch = path_to(self.program.dominator, max(next(added).entries))
            path = self._within(branch, block.entry)
            return path[self.behind_norm(path)]
        piece = next((a for a in block.attentions if a.is_self), block.attentions[0]).pieces[0]
        ends = [n for n in (piece.query, piece.value) if n is not None] or [piece.map]
        first, *others = (path_to(self.program.dominator, n) for n in ends)
        path = self._within([n for n in first if all(n in other for other in others)], block.entry)
        return path[self.behind_norm(path)]

    def path(self, stream: Stream, block: Block) -> list[int]:
        """Return the values of a stream's spine from what enters a block to what leaves it, without those inside of
        units; and the sums between that something leads past."""
        path = [n for n in self._within(stream.spine, block.entry) if n <= block.exit]
        members = Members(stream.rows, self.layout.rows)
        between = (Trunk(self.program.makers, members, *ends).values[1:] for ends in pairwise(path))
        return [*path[:1], *(n for values in between for n in values)]

    def _within(self, path: Sequence[int], first: int) -> list[int]:
        """The values of a path from one on that are no unit's inside. Where something leads past it, as an embedding
        that is added once more, the later ones."""
        behind = [n for n in path if n > first and n in self.program.makers]
        return [first, *behind] if first in path or not behind else behind

    def behind_norm(self, path: Sequence[int], first: int = 0) -> int:
        """Return the position behind a norm that follows a value on a path, with its weight and bias.

        Args:
            path: numbers of values through which all paths from the first to the last lead.
            first: position of the value, which is returned if no norm follows it.
        """
        found, kinds = first, frozenset(("view", "norm"))
        for i in range(first + 1, len(path)):
            unit = self.program.makers[path[i]]
            if unit.kind not in kinds or unit.entries[0] != path[i - 1] or not self._is_of_features(unit):
                break
            if found > first and self._readers[path[i - 1]] > 1:  # a scale of one branch behind the norm
                break
            if unit.kind == "norm" or found > first:
                found, kinds = i, frozenset(("view", "scale", "shift"))
        return found

    def adds_rows(self, value: int) -> bool:
        """Return True if a value is a sum with constants of several axes, such as learned vectors."""
        unit, tape = self.program.makers[value], self.whole.tape
        constants = (o for n in unit.calls for o in tape.calls[n].operands if o not in unit.entries)
        return unit.kind == "shift" and any(len(tape.shapes[o]) > 1 for o in constants)

    def _is_of_features(self, unit: Unit) -> bool:
        """Return True if what a unit adds or multiplies by is the same for all rows, as the bias of a norm is and
        positions are not."""
        if unit.kind not in ("scale", "shift"):
            return True
        tape, samples = self.whole.tape, RowSamples(self.layout.rows)
        others = {o for c in unit.calls for o in tape.calls[c].operands} - {*unit.entries, *unit.exits}
        return all(samples.is_shared(unit.exit, tape.shapes[o]) for o in others)

    @cached_property
    def _readers(self) -> Counter[int]:
        """Value -> how many units read it."""
        return Counter(e for u in self.program.units for e in set(u.entries))

    @cached_property
    def program(self) -> Program:
        """The units between the rows and the logits."""
        starts = self.whole.starts(self.read, torch.ones_like(self.logits))
        return read_program(self.whole.tape, self.roots, starts)

    def holds(self, value: int, stream: Stream) -> bool:
        """Return True if a value holds the rows of a stream and no other."""
        rows = self.layout.rows
        label = rows.labels.get(value, ())
        return len(label) == 1 and torch.equal(rows.distinct(label[0]), stream.rows.flatten().sort().values)

    def features_of(self, stream: Stream, value: int, tensor: Tensor) -> Tensor:
        """Return ``[B, N, D]``, the features of each row of a stream.

        Args:
            stream: whose rows are meant.
            value: number of a value that is no map.
            tensor: of its shape, such as a flow.

        Raises:
            ModelError: its rows are unknown, or others than those of the stream.
        """
        if not self.holds(value, stream):
            raise ModelError(f"the rows of value {value} are not those that attend")
        return self.layout.rows.features(value, tensor, stream.rows).flatten(2)

    def arrived(self, stream: Stream, value: int, flow: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return :meth:`features_of` a value and of what flows there; zeros for None."""
        tensor = self.whole.tape[value]
        flow = torch.zeros_like(tensor) if flow is None else flow
        return self.features_of(stream, value, tensor), self.features_of(stream, value, flow)

    def rerun(self, change: Change, stream: Stream, block: Block) -> Tensor:
        """Return ``[B, N, D]``, what leaves a block in another pass of the model in which some values are replaced. The
        model may decide otherwise in it, as which experts rows choose.

        Args:
            change: number of a value -> function that replaces it.
            stream, block: those of this pass.

        Raises:
            ModelError: the other pass has other streams or blocks.
        """
        whole = record_pass(self.whole.model, self.whole.feed, self.whole.samples, change)
        layout = whole.layout(self.sources, self.read, learned=bool(self.layout.first_maps))
        numbers = [(s.rows.shape, len(s.blocks)) for s in self.layout.streams]
        if [(s.rows.shape, len(s.blocks)) for s in layout.streams] != numbers:
            raise ModelError("the model takes another way if a value of its attention is changed")
        own = layout.streams[next(i for i, s in enumerate(self.layout.streams) if s is stream)]
        leaving = own.blocks[stream.blocks.index(block)].exit
        return replace(self, whole=whole, layout=layout).features_of(own, leaving, whole.tape[leaving])

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
            composites: rules, to which those of users are added; the first carries multipliers, so that the rows which
                are read out are known.
            seen: called with an attention's number and what flows to its map under each composite, ``[B, H, Q, K]``,
                the last attention first; not called where nothing arrives under some of them.
            watched: numbers of the attentions that are watched.
            at: value -> function that is called with what flows there under each composite.
            starts: what the walk starts with at other values than the logits.
        """
        tape, rows, walked = self.whole.tape, self.layout.rows, Walked()
        composites = [with_own_rules(composite) for composite in composites]
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


def _all(watchers: Sequence[Seen], *flows: Tensor | None) -> None:
    for watcher in watchers:
        watcher(*flows)


def has_one_resolution(layout: Layout) -> bool:
    """Return False if the rows of an input attend, are merged, and attend again."""
    blocks = [stream for stream in layout.streams if stream.blocks and not stream.is_learned]
    return len({frozenset(stream.names) for stream in blocks}) == len(blocks)


def map_pass(
    whole: ForwardPass, sources: Mapping[str, Inputs], read: Read, made: Mapping[str, str] | None = None
) -> MapPass:
    """Return a pass with its sequences, their blocks and the attentions in these.

    Args:
        whole: a recorded pass.
        sources: the inputs by name.
        read: the model's output -> ``[B, C]``, the row of logits that the target is about.
        made: name -> source of its rows, for ids that the model makes of an input, such as those of a decoder.
    """
    layout = whole.layout(sources, read, learned=True)
    own = [a for stream in layout.streams for block in stream.blocks for a in block.attentions]
    inputs = {source: name for name, source in (made or {}).items()}
    attentions = dict(enumerate(sorted(own, key=lambda a: a.map)))
    passed = MapPass(whole, layout, read, attentions, {}, sources, inputs)
    return replace(passed, ends={passed.name_of(s): s for s in layout.streams if s.is_read and s.blocks})


def _is_complete(stream: Stream) -> bool:
    """Return True if the rows of a stream look at themselves in all of its blocks or in none. Else learned vectors did
    so before they looked at any input, and that attention is not on the tape."""
    looks = [any(a.is_self for a in block.attentions) for block in stream.blocks]
    return not stream.is_learned or all(looks) or not any(looks)
