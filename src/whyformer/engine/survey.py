"""What one run shows of a model: its streams of tokens, attention depths, and where streams enter blocks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whyformer.engine.run import Feed, Root, record
from whyformer.engine.trace import Attention, Key, Lookup, Path, Trace
from whyformer.models.facts import Block, groups_of
from whyformer.models.readout import anything
from whyformer.models.structure import TOKENS_FIRST
from whyformer.rules.core import Composite

_GRADIENT = Composite("gradient", "multiplier", audit=False)


@dataclass(frozen=True)
class Structure:
    """What one run showed of a model.

    Attributes:
        attentions: of the blocks, in order of execution.
        lookups: stream -> its look-up, for streams of token ids.
        entries: stream -> the first block call that its rows enter before any attention (where blocks of several
            groups are entered so, of those that lead to the output), and all streams that do.
        unaligned: streams of which more or fewer rows enter there than were looked up.
        outputs: rows -> the last block call that they leave, and where they stand in what it returns.
        calls, rows: the name of the group that each block called is of, and whose rows enter it.
        batches: numbers of samples of the inputs.
        plain: one stream, and one attention in each block of one group.
    """

    attentions: tuple[Attention, ...]
    lookups: Mapping[str, Lookup]
    entries: Mapping[str, tuple[int, Key]]
    outputs: Mapping[Key, tuple[int, Path]]
    calls: tuple[str, ...]
    rows: tuple[Key | None, ...]
    batches: frozenset[int]
    unaligned: frozenset[str]
    plain: bool

    @property
    def firsts(self) -> dict[Key, int]:
        """Rows -> the first block call in which they look at something."""
        calls = [(a.queries, a.block) for a in reversed(self.attentions)]
        return {key: call for key, call in calls if call is not None}

    def layers(self) -> list[list[int]]:
        """Numbers of attentions by depth, from the input; those of one depth do not see one another's output."""
        depths = sorted({a.depth for a in self.attentions})
        return [[i for i, a in enumerate(self.attentions) if a.depth == d] for d in depths]

    def level(self, number: int) -> int:
        """Of an attention: how many layers of attentions of its queries among themselves lie before it; cross-attention
        counts with the one before it."""
        own = self.attentions[number]
        alike = {a.depth for a in self.attentions if a.queries == a.keys == own.queries and a.depth < own.depth}
        return len(alike) if own.queries == own.keys else max(0, len(alike) - 1)

    def depth_of(self, key: Key) -> int:
        """Number of layers of attention of these rows among themselves."""
        return len({a.depth for a in self.attentions if a.queries == a.keys == key})

    def group_of(self, name: str) -> str | None:
        """The group of blocks in which the rows of an input attend, those that are read out before others; if they are
        seen to attend in none (in windows), that which they enter most often."""
        ends = self.ends()
        own = sorted((key in ends, call, key) for key, call in self.firsts.items() if name in key)
        blocks = [a.block for a in self.attentions if own and a.queries == own[-1][2]]
        if not own:
            blocks = [call for call, key in enumerate(self.rows) if key and name in key]
        calls = [self.calls[block] for block in blocks if block is not None]
        return max(calls, key=calls.count) if calls else None

    def reached(self) -> set[Key]:
        """Rows from which attention leads to what is read out."""
        reached = set(self.ends())
        for a in reversed(self.attentions):
            if a.queries in reached:
                reached.add(a.keys)
        return reached

    @property
    def partly(self) -> tuple[int, int] | None:
        """(how many attend, how many there are) of the blocks of one kind that some rows run through on the way to what
        is read out, where not all do: the others mix tokens in another way, or not at all."""
        for key in self.reached():
            attending = {a.block for a in self.attentions if a.queries == key and a.block is not None}
            groups = {self.calls[block] for block in attending}
            through = {i for i, rows in enumerate(self.rows) if rows == key and self.calls[i] in groups}
            if through - attending:
                return len(attending), len(through | attending)
        return None

    @property
    def windowed(self) -> bool:
        """Whether attention on the way from what is read out works in windows or at several resolutions, so that there
        is no map over all rows."""
        reached = self.reached()
        on_the_way = [a for a in self.attentions if a.queries in reached]
        sizes = {pair for a in on_the_way for pair in ((a.queries, a.shape[1]), (a.keys, a.shape[2]))}
        return any(a.shape[0] not in self.batches for a in on_the_way) or len(sizes) > len({key for key, _ in sizes})

    def alone(self, name: str) -> Key | None:
        """The rows that hold an input and are read out, if they look at themselves only, once in each call of a group
        of blocks that no other rows enter."""
        for key in (k for k in self.ends() if name in k):
            own = [a for a in self.attentions if a.queries == key]
            groups = {self.calls[a.block] for a in own if a.block is not None}
            once = len(groups) == 1 and len({a.block for a in own}) == len(own) == self.calls.count(*groups)
            if once and all(a.keys == key for a in own):
                return key
        return None

    def ends(self) -> dict[Key, tuple[int, Path]]:
        """Rows that no other rows take up later -> where they leave their last block."""
        own = {key: max((a.depth for a in self.attentions if a.queries == key), default=0) for key in self.outputs}
        taken = {
            key
            for key in own
            for a in self.attentions
            if a.queries != key and (a.queries | a.keys) & key and a.depth > own[key]
        }
        return {key: end for key, end in self.outputs.items() if key not in taken}


# -- one run ---------------------------------------------------------------------------------------------------------
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Any, Structure]] = weakref.WeakKeyDictionary()


def survey(model: nn.Module, feed: Feed, scored: Mapping[str, str | int]) -> Structure:
    """What one plain forward pass shows of the model, once for each model and kind of inputs; where there are several
    streams, for each shape of inputs, and where the model makes ids of its own (a decoder's), for each input.

    Args:
        feed: (args, kwargs) of the model's forward.
        scored: names of the inputs that get scores -> their position or name in the feed.
    """
    named: dict[Any, Any] = {**dict(enumerate(feed[0])), **feed[1]}
    kinds = tuple((n, v.dim() if isinstance(v, Tensor) else None) for n, v in named.items())
    key: tuple[Any, ...] = (kinds, tuple(scored))
    known = _KNOWN.setdefault(model, {})
    in_order = key not in known or all(lookup.in_order for lookup in known[key].lookups.values())
    if key in known and not (known[key].plain and in_order):
        tensors = [v for v in named.values() if isinstance(v, Tensor)]
        key = (*key, tuple(tuple(v.shape) for v in tensors))
        if not in_order:
            key = (*key, tuple(v.cpu().numpy().tobytes() for v in tensors if not v.is_floating_point()))
    if key not in known:
        known[key] = _survey(model, feed, scored)
    return known[key]


def _survey(model: nn.Module, feed: Feed, scored: Mapping[str, str | int]) -> Structure:
    args, kwargs = list(feed[0]), dict(feed[1])
    trace = Trace(tuple(scored), forward_names(model))
    for name, place in scored.items():
        given: Any = args if isinstance(place, int) else kwargs
        given[place] = trace.begin(name, given[place])
    groups = groups_of(model, feed)
    trace.groups = {block: name for name, blocks in groups.items() for block in blocks}
    blocks = [block for some in groups.values() for block in some]
    record(model, (tuple(args), kwargs), _GRADIENT, trace, blocks=blocks, read=anything).release()
    if trace.tokens_first is not None:
        TOKENS_FIRST[model] = trace.tokens_first
    for name, others in trace.again.items():  # the first may only decide where the text is cut
        other = [entry for entry in others if trace.calls[entry[0]] != trace.calls[trace.entries[name][0]]]
        if other and name in trace.lookups:
            tried = [trace.entries[name], *other]
            trace.entries[name] = next((e for e in tried if _leads_on(model, feed, e[0], blocks)), tried[0])
    main = next(iter(groups.items()), ("", []))
    attending = [trace.calls[a.block] if a.block is not None else "" for a in trace.attentions]
    alone = len(scored) == 1 and len(trace.lookups) <= 1 and len({a.queries | a.keys for a in trace.attentions}) == 1
    calls = trace.calls.count(main[0])
    one_each = attending == [main[0]] * calls and len({a.block for a in trace.attentions}) == calls
    plain = not trace.attentions or (alone and one_each)
    batches = frozenset({0, *(shape[0] for shape in trace.shapes.values())})
    return Structure(
        tuple(trace.attentions), trace.lookups, trace.entries, trace.outputs, tuple(trace.calls), tuple(trace.rows),
        batches, frozenset(trace.unaligned), plain,
    )  # fmt: skip


def _leads_on(model: nn.Module, feed: Feed, call: int, blocks: list[Block]) -> bool:
    """Whether what enters a block call reaches the output."""
    recording = record(model, feed, _GRADIENT, roots={"": Root("entry", call)}, blocks=blocks, read=anything)
    found = recording.logits.requires_grad
    recording.release()
    return found


def forward_names(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    try:
        return frozenset(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return frozenset()
