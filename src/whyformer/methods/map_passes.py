"""Walks over a recorded pass that observe its attention maps and blocks.

    map_pass = map_pass_of(recording, sources, read_logits)
    walked = map_pass.walk(seed, [GRADIENT, deep_taylor()], on_map, map_pass.attentions)

``on_map`` is called at each map, the last one first, with the flow that arrives under each composite.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.layout import Layout
from whyformer.methods.passes import Callback, Change, ForwardPass, LogitsReader, record_pass
from whyformer.rules.registered import with_custom_rules
from whyformer.tape.attentions import Attention
from whyformer.tape.map_search import Piece
from whyformer.tape.members import Members
from whyformer.tape.mixing import mixes, multiplies_constants
from whyformer.tape.places import Elements, find_elements
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Block, Stream, path_to, readout
from whyformer.tape.tables import KINDS
from whyformer.tape.trials import SHIFTED_SOFTMAX
from whyformer.tape.units import Unit
from whyformer.tape.walking import Composite, replay

__all__ = ["MapPass", "NamedAttention", "RowsName", "WalkResult", "map_pass_of"]

RowsName = frozenset[str]
"""A name of rows: the set of the inputs whose elements they represent. Rows of learned vectors get a separate name."""


@dataclass(frozen=True)
class NamedAttention:
    """An attention with the names of its rows.

    Attributes:
        queries, keys: names of the query and key rows.
        depth: the largest number of attentions on a path to its output.
        layer: index of its block in the stream of the queries. Blocks before a merge of these rows are counted too.
        is_merged: whether its rows are merged into other rows later.
    """

    queries: RowsName
    keys: RowsName
    depth: int
    layer: int
    is_merged: bool = False


@dataclass(eq=False)
class WalkResult:
    """The results of a walk from a target, besides the maps.

    Attributes:
        logits: ``[B, C]`` of the forward pass.
        readouts: stream -> ``[B, N]`` weight of each row of its last state in the target. Streams at whose last state
            nothing arrived are left out.
        sums: sums of relevance, if a composite propagates relevance.
    """

    logits: Tensor
    readouts: dict[Any, Tensor] = field(default_factory=dict)
    sums: Sums | None = None

    @property
    def row(self) -> Tensor:
        """``[B, N]`` weight of each row of the only stream that the target reads."""
        return next(iter(self.readouts.values()))


@dataclass(frozen=True, eq=False)
class MapPass:
    """A recorded pass with its attention maps and blocks.

    Attributes:
        recording: the pass.
        layout: its rows, attentions and streams.
        read_logits: function from the model's output to ``[B, C]``, the row of logits that the target reads.
        attentions: the attentions in blocks, by index.
        ends: name -> stream that the target reads.
        sources: the inputs by name.
        input_of: name of rows -> input that gets their scores, if the names differ.
        explained: names of the rows of the inputs that are explained, while others are held constant; empty for all.
    """

    recording: ForwardPass
    layout: Layout
    read_logits: LogitsReader
    attentions: Mapping[int, Attention]
    ends: Mapping[Any, Stream]
    sources: Mapping[str, Inputs] = field(repr=False)
    input_of: Mapping[str, str] = field(default_factory=dict)
    explained: tuple[str, ...] = ()

    @property
    def pictures(self) -> frozenset[str]:
        """Names of the inputs that are pictures."""
        return frozenset(name for name, side in self.sources.items() if side.modality == "image")

    @property
    def roots(self) -> list[int]:
        """Numbers of the values in which the rows of the explained inputs begin."""
        return [self.layout.rows.roots[name] for name in self.explained] or self.layout.roots

    @cached_property
    def logits(self) -> Tensor:
        """``[B, C]``, the row of logits that the target reads."""
        return self.recording.logits(self.read_logits)

    def map(self, index: int) -> Tensor:
        """Return the attention map ``[B, H, Q, K]`` of an attention."""
        attention = self.attentions[index]
        return attention.arrange(*(self.recording.tape[n] for n in attention.maps))

    def scores(self, index: int) -> Tensor:
        """Return the attention scores ``[B, H, Q, K]`` before the softmax.

        Raises:
            ModelError: the model multiplies exp(scores) by a bias, so that scores with their bias are not computed.
        """
        attention, makers = self.attentions[index], self.program.makers
        # a map among learned vectors is constant, so no unit computes it
        if any(p.map in makers and makers[p.map].kind == SHIFTED_SOFTMAX for p in attention.pieces):
            raise ModelError("the attention scores of the model are not computed: it multiplies exp(q·k) by a bias")
        return attention.arrange(*(self._scores_of(p) for p in attention.pieces))

    def _scores_of(self, piece: Piece) -> Tensor:
        """Return the scores of a piece in the layout of its map, such as all columns but that of a sink."""
        tape, scores = self.recording.tape, self.recording.tape[piece.scores]
        for n in piece.path[1:]:
            unit = self.program.makers[n]
            if unit.kind in ("layer", "weighted sum") or (len(unit.entries) > 1 and unit.kind != "quotient"):
                raise ModelError(
                    "its attention maps mix outputs of softmaxes, so that their entries have no scores of their own: "
                    "use a method that needs no scores, such as grad_sam"
                )
            if unit.kind == "view":
                scores = replay(tape, {unit.entries[0]: scores}, [n])[0]
        return scores

    # -- names of rows
    @cached_property
    def named(self) -> dict[int, NamedAttention]:
        """Index of each attention -> the names of its rows."""
        names, attentions = self._names, dict[int, NamedAttention]()
        for number, attention in self.attentions.items():
            stream, block = self.block_of(number)
            layer = sum(len(s.blocks) for s in self.layout.earlier(stream)) + stream.blocks.index(block)
            queries, keys = self.name_of(stream), names[attention.keys]
            is_merged = stream in self.layout.merged
            attentions[number] = NamedAttention(queries, keys, attention.depth, layer, is_merged)
        return attentions

    @cached_property
    def _names(self) -> dict[Tensor | None, RowsName]:
        """Tensor of row numbers of an attention or stream -> name of these rows."""
        names: dict[Tensor | None, RowsName] = {}
        for numbers in self._rows:
            name = frozenset(self.sources_of(numbers))
            is_taken = name in names.values() or not name
            names[numbers] = name | {f"rows {len(names)}"} if is_taken else name
        return names

    @cached_property
    def _rows(self) -> list[Tensor]:
        """The numbers of query and key rows, and those of streams without attention."""
        sides = [side for a in self.attentions.values() for side in (a.queries, a.keys)]
        sides += [stream.rows for stream in self.layout.streams if stream.all_blocks]
        return list(dict.fromkeys(numbers for numbers in sides if numbers is not None))

    def sources_of(self, numbers: Tensor | None) -> set[str]:
        """Return the inputs from which some rows are computed, without inputs to which only learned vectors attend."""
        if numbers is None:
            return set()
        rows, products = self.layout.rows, {n for a in self.layout.attentions for n in a.products}
        families = (rows.families[f] for f in rows.family[numbers].unique().tolist())
        return {self.input_of.get(f.source, f.source) for f in families if f.source and f.value not in products}

    @property
    def copies(self) -> list[tuple[RowsName, RowsName, Tensor]]:
        """:attr:`Layout.copies` with the names of the streams."""
        return [(self.name_of(s), self.name_of(t), same) for s, t, same in self.layout.copies]

    @property
    def reduced(self) -> set[RowsName]:
        """Names of the streams that consist of rows of another stream, or of weighted sums of them."""
        return {self.name_of(stream) for stream, _, _ in self.layout.reductions}

    @cached_property
    def key_streams(self) -> dict[int, dict[RowsName, Tensor | None]]:
        """Index of each attention -> {name of a stream of its keys: ``[B, K, N]``, True where a key is a row of the
        stream; None if the keys are these rows in order}. Keys of no stream are listed under the name of the keys."""
        streams: dict[int, dict[RowsName, Tensor | None]] = {}
        for number, attention in self.attentions.items():
            parts, rest = self.layout.split[attention.map]
            streams[number] = {self.name_of(stream): same for stream, same in parts}
            if not parts:
                streams[number][self.named[number].keys] = None
            elif bool(rest.any()):
                streams[number][self.named[number].keys] = torch.diag_embed(rest)
        return streams

    @property
    def row_names(self) -> list[RowsName]:
        """The names of all query and key rows."""
        return list(self._names.values())

    def name_of(self, stream: Stream) -> RowsName:
        """Return the name of the rows of a stream."""
        return self._names[stream.rows]

    def elements(self, name: str, rows_name: RowsName) -> tuple[int, Elements] | None:
        """Return (number of rows of a name, which of them represent the elements of an input); None if unknown.

        Args:
            name: name of the input.
            rows_name: name of the rows.
        """
        numbers = next((n for n, other in self._names.items() if other == rows_name), None)
        if numbers is None:
            return None
        source = self.source_of(name)
        elements = find_elements(self.recording.tape, self.layout.rows, numbers, source, name in self.pictures)
        return None if elements is None else (int(numbers.shape[1]), elements)

    def source_of(self, name: str) -> str:
        """Return the name of the rows of an input."""
        return next((source for source, scored in self.input_of.items() if scored == name), name)

    @property
    def is_complete(self) -> bool:
        """True if the attention maps cover all mixing of rows on paths to the target."""
        in_blocks = list(self.attentions.values())
        outside = [a for a in self.layout.leading if a not in in_blocks]
        rows_known = all(a.queries is not None and a.keys is not None for a in in_blocks)
        outside_only_pools = all(a.is_learned and a.queries is not None for a in outside)
        if not rows_known or not outside_only_pools or not all(map(self._attends_visibly, self.layout.streams)):
            return False
        first_to_keys = {a.keys: a for a in reversed(in_blocks)}  # the first attention to each group of keys
        return not any(map(self._mixed_before, first_to_keys.values()))

    def _attends_visibly(self, stream: Stream) -> bool:
        """Return False if the rows of a stream are learned vectors that may have attended to themselves before they
        attended to an input, so that this attention map is unknown."""
        self_attends = [any(a.is_self for a in block.attentions) for block in stream.blocks]
        if not stream.is_learned or all(self_attends) or not any(self_attends):
            return True
        first = self_attends.index(True)
        recording, before = self.recording, stream.blocks[first].entry
        return not any(self_attends[:first]) and not multiplies_constants(self.program, recording.tape, before)

    def _mixed_before(self, attention: Attention) -> bool:
        """Return True if the key rows of an attention do not attend, and may have been mixed before it."""
        keys, rows, value = attention.keys, self.layout.rows, attention.pieces[0].value
        if keys is None or value is None or any(s.all_blocks and s.rows is keys for s in self.layout.streams):
            return False
        families = [rows.families[f] for f in rows.family[keys].unique().tolist()]
        if len(families) != 1 or not families[0].source or value not in self.recording.tape.maker:
            return False
        return mixes(self.recording.tape, rows, keys, families[0].value, value) is not False

    # -- blocks
    def blocks_of(self, name: str) -> list[tuple[Stream, Block]]:
        """Return the blocks that the rows of an input pass through, in the order of execution. If they are in several
        streams, these are the blocks of the stream that the target reads, with those before merges of its rows."""
        holding = [s for s in self.layout.streams if s.all_blocks and name in s.names]
        last = next((s for s in reversed(holding) if s.is_read), holding[-1] if holding else None)
        return [(s, b) for s in holding if last is not None and set(s.names) == set(last.names) for b in s.all_blocks]

    def block_of(self, index: int) -> tuple[Stream, Block]:
        """Return the stream and the block of an attention."""
        attention = self.attentions[index]
        blocks = ((stream, block) for stream in self.layout.streams for block in stream.blocks)
        return next((stream, block) for stream, block in blocks if attention in block.attentions)

    def input_of_attention(self, stream: Stream, block: Block) -> int:
        """Return the number of the value that the attention of a block reads: the output of the first norm, or the
        input of the block if a path to queries or values bypasses that norm. Of cross-attention, only paths to queries
        count; without attention, paths to the output of the first branch."""
        if not block.attentions:
            units = (self.program.makers[n] for n in self.path(stream, block)[1:])
            added = (unit for unit in units if unit.kind == "add")
            branch = path_to(self.program.dominator, max(next(added).entries))
            path = self._within(branch, block.entry)
            return path[self.behind_norm(path)]
        attention = next((a for a in block.attentions if a.is_self), block.attentions[0])
        piece = attention.pieces[0]
        read = (piece.query, piece.value) if attention.is_self else (piece.query,)
        ends = [n for n in read if n is not None] or [piece.map]
        first, *others = (path_to(self.program.dominator, n) for n in ends)
        path = self._within([n for n in first if all(n in other for other in others)], block.entry)
        return path[self.behind_norm(path)]

    def path(self, stream: Stream, block: Block) -> list[int]:
        """Return the values from a block's input to its output along the residual path: those of the stream's spine
        that are not inside of units, and the sums between them that other paths bypass."""
        path = [n for n in self._within(stream.spine, block.entry) if n <= block.exit]
        members = Members(stream.rows, self.layout.rows)
        between = (members.trunk(self.program.makers, *ends)[1:] for ends in pairwise(path))
        return [*path[:1], *(n for values in between for n in values)]

    def _within(self, path: Sequence[int], first: int) -> list[int]:
        """Return the values of a path from ``first`` on that are not inside of units; ``first`` itself is left out if a
        path bypasses it, as when an embedding is added again."""
        later = [n for n in path if n > first and n in self.program.makers]
        return [first, *later] if first in path or not later else later

    def behind_norm(self, path: Sequence[int], first: int = 0) -> int:
        """Return the position on a path of the output of the norm that follows a value, after its weight and bias.

        Args:
            path: numbers of values through which all paths from the first to the last lead.
            first: position of the value, which is returned if no norm follows it.
        """
        position, kinds = first, frozenset(("view", "norm"))
        for i in range(first + 1, len(path)):
            unit = self.program.makers[path[i]]
            if unit.kind not in kinds or unit.entries[0] != path[i - 1] or not self._is_of_features(unit):
                break
            if position > first and self._readers[path[i - 1]] > 1:  # a scale in one of several branches after the norm
                break
            if unit.kind == "norm" or position > first:
                position, kinds = i, frozenset(("view", "scale", "shift"))
        return position

    def adds_rows(self, value: int) -> bool:
        """Return True if a value is a sum with constants that have several axes, such as learned vectors."""
        unit, tape = self.program.makers[value], self.recording.tape
        constants = (o for n in unit.calls for o in tape.calls[n].operands if o not in unit.entries)
        return unit.kind == "shift" and any(len(tape.shapes[o]) > 1 for o in constants)

    def _is_of_features(self, unit: Unit) -> bool:
        """Return True if a unit's constants are equal for all rows: true for a norm's bias, false for positions."""
        if unit.kind not in ("scale", "shift") or KINDS.get(unit.name) == "linear":  # a diagonal matrix
            return True
        tape, samples = self.recording.tape, RowSamples(self.layout.rows)
        others = {o for c in unit.calls for o in tape.calls[c].operands} - {*unit.entries, *unit.exits}
        return all(samples.is_shared(unit.exit, tape.shapes[o]) for o in others)

    @cached_property
    def _readers(self) -> Counter[int]:
        """Value -> number of units that read it."""
        return Counter(e for u in self.program.units for e in set(u.entries))

    @cached_property
    def program(self) -> Program:
        """The program of units between the rows and the logits."""
        starts = self.recording.starts(self.read_logits, torch.ones_like(self.logits))
        return read_program(self.recording.tape, self.roots, starts)

    def holds(self, value: int, stream: Stream) -> bool:
        """Return True if a value holds exactly the rows of a stream."""
        return Members(stream.rows, self.layout.rows).holds_all_rows(value)

    def features_of(self, stream: Stream, value: int, tensor: Tensor) -> Tensor:
        """Return the features ``[B, N, D]`` of each row of a stream.

        Args:
            stream: the stream.
            value: number of a value that is not a map.
            tensor: a tensor of the value's shape, such as a flow.

        Raises:
            ModelError: the value's rows are unknown, or not those of the stream.
        """
        if not self.holds(value, stream):
            raise ModelError(f"the rows of value {value} are not the attending rows")
        return self.layout.rows.features(value, tensor, stream.rows).flatten(2)

    def arriving(self, stream: Stream, value: int, function: Callback) -> Callback:
        """Return a callback for walks, which calls a function with :meth:`features_of` a value and of the flow that
        arrives there; zeros if none arrives."""

        def arrived(flow: Tensor | None) -> None:
            tensor = self.recording.tape[value]
            flow = torch.zeros_like(tensor) if flow is None else flow
            function(self.features_of(stream, value, tensor), self.features_of(stream, value, flow))

        return arrived

    def rerun(self, change: Change, stream: Stream, block: Block) -> Tensor:
        """Return a block's output ``[B, N, D]`` in another pass of the model with some values replaced. That pass may
        take other decisions, such as which experts process a row.

        Args:
            change: number of a value -> function that replaces it.
            stream, block: the stream and block of this pass.

        Raises:
            ModelError: the other pass has other streams or blocks.
        """
        recording = record_pass(self.recording.model, self.recording.feed, self.recording.samples, change)
        layout = recording.layout(self.sources, self.read_logits, learned=bool(self.layout.first_maps))
        numbers = [(s.rows.shape, len(s.blocks)) for s in self.layout.streams]
        if [(s.rows.shape, len(s.blocks)) for s in layout.streams] != numbers:
            raise ModelError("the model runs other operations if a value of its attention is changed")
        other = layout.streams[next(i for i, s in enumerate(self.layout.streams) if s is stream)]
        leaving = other.blocks[stream.blocks.index(block)].exit
        return replace(self, recording=recording, layout=layout).features_of(other, leaving, recording.tape[leaving])

    def release(self) -> None:
        """Drop recomputed values."""
        self.recording.tape.release()

    def walk(
        self,
        seed: Tensor,
        composites: Sequence[Composite],
        on_map: Callback | None = None,
        watched: Iterable[int] = (),
        *,
        at: Mapping[int, Callback] | None = None,
        starts: Mapping[int, Tensor] | None = None,
    ) -> WalkResult:
        """Walk back from the target to some maps.

        Args:
            seed: ``[B, C]``, ∂target/∂logits.
            composites: rules, to which users' rules are added; the first must propagate multipliers, from which the
                readout rows are taken.
            on_map: called with an attention's index and the flow ``[B, H, Q, K]`` that arrives at its map under each
                composite, the last attention first, if a flow arrives under all of them.
            watched: indices of the observed attentions.
            at: value -> function to call with the flow that arrives there under each composite.
            starts: value -> start of the walk, for walks that do not start at the logits.
        """
        walked, composites = WalkResult(self.logits), [with_custom_rules(composite) for composite in composites]
        starts = self.recording.starts(self.read_logits, seed) if starts is None else starts
        watchers = defaultdict[int, list[Callback]](list, {n: [arrive] for n, arrive in (at or {}).items()})
        if on_map is not None:
            present = [index for index in watched if index in self.attentions]
            for number, arrive in (pair for index in present for pair in self._pieces(index, on_map).items()):
                watchers[number].append(arrive)
        for name, stream in self.ends.items():
            watchers[stream.last].append(partial(self._ended, walked, name))
        _, walked.sums = self.recording.walk_back(
            self.roots, starts, composites, seed=seed, layout=self.layout, at=watchers
        )
        return walked

    def _pieces(self, index: int, on_map: Callback) -> dict[int, Callback]:
        """Return {piece of a map: function to call there}, which call ``on_map`` after flows arrived at all pieces."""
        attention, arrived = self.attentions[index], dict[int, tuple[Tensor | None, ...]]()

        def arrive(number: int, *flows: Tensor | None) -> None:
            arrived[number] = flows
            if len(arrived) < len(attention.maps):
                return
            runs = list(zip(*(arrived[n] for n in attention.maps), strict=True))
            arrived.clear()
            if all(any(flow is not None for flow in run) for run in runs):
                on_map(index, *(attention.arrange(*run) for run in runs))

        return {n: partial(arrive, n) for n in attention.maps}

    def _ended(self, walked: WalkResult, name: Any, flow: Tensor | None, *_: Tensor | None) -> None:
        """Store the readout row of a stream's last state."""
        if flow is not None:
            stream = self.ends[name]
            walked.readouts[name] = readout(self.layout.rows, stream.rows, stream.last, flow)


def map_pass_of(
    recording: ForwardPass,
    sources: Mapping[str, Inputs],
    read_logits: LogitsReader,
    derived: Mapping[str, str] | None = None,
) -> MapPass:
    """Return a pass with its streams, their blocks and attentions.

    Args:
        recording: a recorded pass.
        sources: the inputs by name.
        read_logits: function from the model's output to ``[B, C]``, the row of logits that the target reads.
        derived: name -> source of its rows, for ids that the model computes from an input, such as a decoder's.
    """
    layout = recording.layout(sources, read_logits, learned=True)
    in_blocks = [a for stream in layout.streams for block in stream.blocks for a in block.attentions]
    input_of = {source: name for name, source in (derived or {}).items()}
    attentions = dict(enumerate(sorted(in_blocks, key=lambda a: a.map)))
    map_pass = MapPass(recording, layout, read_logits, attentions, {}, sources, input_of)
    ends = (s for s in layout.streams if s.is_read and s.blocks and s not in layout.merged)
    return replace(map_pass, ends={map_pass.name_of(s): s for s in ends})
