"""Scores of a model's inputs, and which token rows stand for which elements of which input."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.mixing import enters
from whyformer.engine.places import entering_places
from whyformer.engine.probes import Probe
from whyformer.engine.run import Feed, Recording, Root
from whyformer.engine.survey import Structure, survey
from whyformer.engine.trace import Key, Lookup
from whyformer.errors import MethodNotApplicable, WhyformerError, on_changed_inputs
from whyformer.explanation.features import Features
from whyformer.inputs import Inputs
from whyformer.methods.attended import MapPass, block_pass, map_pass
from whyformer.methods.passes import ForwardPass
from whyformer.methods.replay import Apart, Replay
from whyformer.methods.roots import RootedPass, Roots, changed_pass, find_roots
from whyformer.methods.rules import Rules
from whyformer.methods.scores import Scores, at_elements
from whyformer.methods.sequence import AttendedPass, attended_pass
from whyformer.models.facts import Block, groups_of
from whyformer.models.kinds import last_row_alone
from whyformer.models.output import Output
from whyformer.models.precision import HALF
from whyformer.rules.core import Composite
from whyformer.rules.registered import with_own_rules
from whyformer.tape.places import Places
from whyformer.tape.walking import Composite as TapeComposite

Recorded = RootedPass | Recording


class Sources:
    """The part of a task that knows its inputs; see :class:`whyformer.methods.task.Task`."""

    model: nn.Module
    inputs: Inputs
    read: Callable[[Output], Tensor]
    last: bool
    checkpoint: bool
    replay: Replay | None
    recordings: list[weakref.ref[Recording]]
    placed: list[Places | None]

    def blocks(self, unknown: str | None = None) -> int:
        """Number of blocks."""
        raise TypeError("only a whole task has blocks")

    def record(self, composite: Composite, *probes: Probe, **options: Any) -> Recording:
        """One recorded forward pass."""
        raise TypeError("only a whole task can be recorded")

    def value_index(self, logits: Tensor) -> Tensor:
        """``[B]`` the class that is meant."""
        raise TypeError("only a whole task has a target")

    def refuse(self, reason: str, *, verdict: str = "has no meaning") -> MethodNotApplicable:
        """The error for a model on which this method cannot work."""
        raise TypeError("only a whole task has a method")

    def fed(self, inputs: Inputs) -> Feed:
        """What is fed; where only the last row is read, a language model computes the logits of that one alone."""
        args, kwargs = inputs.feed
        padded = inputs.mask is not None and (inputs.mask.dim() != 2 or not bool(inputs.mask[:, -1].all()))
        if not self.last or padded or (inputs.mask is None and "attention_mask" in kwargs):
            return args, kwargs
        return args, {**last_row_alone(self.model), **kwargs}

    @cached_property
    def structure(self) -> Structure:
        """Streams and attentions, read off one forward pass for each model and kind of inputs."""
        names = (self.inputs.name, *self.inputs.others)
        return survey(self.model, self.inputs.feed, {name: self.inputs.side(name).scored for name in names})

    @cached_property
    def all_blocks(self) -> list[Block]:
        """The blocks of all groups, whose calls the structure counts."""
        return [block for blocks in self.groups.values() for block in blocks]

    @cached_property
    def groups(self) -> dict[str, list[Block]]:
        """The groups of repeated blocks by name, the main one first."""
        return groups_of(self.model, self.inputs.feed)

    @cached_property
    def given(self) -> dict[str, Inputs]:
        """The inputs that are scored, as they were passed to the model, the main one first."""
        return {name: self.inputs.side(name) for name in (self.inputs.name, *self.inputs.others)}

    @cached_property
    def made(self) -> dict[str, str]:
        """Ids that the model makes of an input -> source of their rows on a tape: the name of the input, with a prime
        for each look-up before."""
        order: dict[str, list[str]] = defaultdict(list)
        for stream, lookup in self.structure.lookups.items():
            order[lookup.input].append(stream)
        return {s: name + "'" * i for name, own in order.items() for i, s in enumerate(own) if s not in self.given}

    @cached_property
    def sources(self) -> dict[str, Inputs]:
        """The inputs that get scores, the main one first; those too that the model makes of them (a decoder's ids)."""
        found = dict(self.given)
        for stream, lookup in self.structure.lookups.items():
            if stream not in found:
                found[stream] = replace(_made_of(found[lookup.input], lookup), name=stream)
        return found

    def roots(self) -> dict[str, Root]:
        """Where the graph begins for each of the sources: pixels, vectors, or what enters the first block."""
        found = {}
        for name, side in self.sources.items():
            entry = self.structure.entries.get(name)
            if side.modality != "text":
                found[name] = Root("input", side.scored)
            elif self._unmeasured(name):
                found[name] = Root("lookup", self.structure.lookups[name].number)
            elif self.structure.plain and self.blocks() and self.structure.calls:
                found[name] = Root("entry", 0)
            elif entry is None:
                if name not in self.structure.lookups:
                    said = f"where the tokens of its input '{name}' are looked up was not seen"
                    raise self.refuse(said, verdict="is not supported yet")
                found[name] = Root("lookup", self.structure.lookups[name].number)
            elif len(entry[1]) == 1:
                found[name] = Root("entry", entry[0])
            else:
                tokens, rows, _ = self.rows(name, entry[1], entry[0])
                mine = torch.zeros(len(rows), tokens + 1, dtype=torch.bool).scatter_(1, rows.cpu() % (tokens + 1), True)
                found[name] = Root("entry", entry[0], mine[:, :tokens])
                if self._shared(entry[1], entry[0], mine[:, :tokens]):
                    found[name] = Root("lookup", self.structure.lookups[name].number)
        return found

    def _shared(self, key: Key, call: int, rows: Tensor) -> bool:
        """Whether a picture or a sound feeds the rows of a text too, so that these would take what is its own."""
        inside = [self.sources[name] for name in key if name in self.sources]  # others are learned queries
        others, feed = [side for side in inside if side.modality != "text"], self.inputs.feed
        return any(
            enters(self.model, feed, Root("input", other.scored), call, self.all_blocks, rows) for other in others
        )

    def _unmeasured(self, name: str) -> bool:
        """Whether other rows of a text enter its first block than were looked up, and which of them cannot be measured
        (latents look at them, something else has mixed them)."""
        entry = self.structure.entries.get(name)
        if entry is None or name not in self.structure.unaligned or name not in self.structure.lookups:
            return False
        return self._fed(name, entry[0], 1) is None

    def begin(self, composite: Composite, *probes: Probe, **options: Any) -> Recording:
        """Record one forward pass whose graph begins at all sources."""
        if not self.structure.plain:
            options = {"blocks": self.all_blocks, **options}
        with telling_of_changed_inputs() if "values" in options else nullcontext():
            return self.record(composite, *probes, roots=self.roots(), **options)

    def passed(self, *, wide: bool = False) -> ForwardPass:
        """One recorded pass of the inputs, which several targets or methods may share; ``wide`` in float32 or wider,
        for relevance."""
        raise TypeError("only a whole task can be recorded")

    @property
    def in_half_precision(self) -> bool:
        """Whether a pass of the model is in half precision: by its parameters, or by autocast around it."""
        parameters = list(self.model.parameters())
        devices = {parameter.device.type for parameter in parameters}
        known = filter(torch.amp.is_autocast_available, devices)
        return any(p.dtype in HALF for p in parameters) or any(map(torch.is_autocast_enabled, known))

    def tape_rules(self, rules: Rules) -> TapeComposite | None:
        """The rules for a walk over a tape to these inputs; None if that is left to the engine."""
        text = any(side.modality == "text" for side in self.sources.values())
        if rules.graph.carrier == "relevance" and text and not self.structure.attentions:
            return None  # which row of its values belongs to which sample is not always known
        return None if rules.tape is None else with_own_rules(rules.tape)

    def attended(
        self,
        values: Mapping[str, Tensor] | None = None,
        roots: Roots | None = None,
        *,
        relevance: bool = False,
        row_alone: bool = False,
    ) -> AttendedPass | None:
        """A recorded pass on a tape, with the one sequence that attends in it; None if there is none, or it is not the
        one whose blocks are counted.

        Args:
            values, roots: as for :meth:`recorded`.
            relevance: relevance is walked back.
            row_alone: rows behind the one that a target reads play no part.
        """
        if not self.one_sequence or not self.structure.attentions:
            return None
        if self.replay is not None and not row_alone:
            raise Apart
        changed = self._changed(values, roots) if values else None
        whole = changed[0] if changed else self.passed(wide=relevance)
        if relevance and whole.is_half:  # under autocast inside of the model
            return None
        alone = None if self.structure.plain else self.structure.alone(self.inputs.name)
        own = sum(alone in (None, a.queries) for a in self.structure.attentions)
        attended = attended_pass(whole, self.sources, self.read, None if alone is None else self.inputs.name)
        if attended is None or len(attended.attentions) != own:
            return None
        if self.inputs.modality == "image":
            self.placed.append(attended.places(self.inputs.name, attended.stream))
        return attended

    def map_pass_of_streams(self, *, relevance: bool = False) -> MapPass | None:
        """A recorded pass on a tape, with the attentions of several sequences; None if these are not known.

        Args:
            relevance: relevance is walked back.
        """
        if not self.structure.attentions:
            return None
        if self.replay is not None:
            raise Apart
        whole = self.passed(wide=relevance)
        if relevance and whole.is_half:  # under autocast inside of the model
            return None
        passed = map_pass(whole, self.given, self.read, self.made)
        if passed is None:
            return None
        ends, calls = self.structure.ends(), defaultdict[Key, set[int | None]](set)
        for a in self.structure.attentions:
            calls[a.queries.intersection(self.sources)].add(a.block)
        found = {key.intersection(self.sources): len(stream.blocks) for key, stream in passed.ends.items()}
        return passed if found == {k: len(calls[k]) for k in (key.intersection(self.sources) for key in ends)} else None

    def block_pass(self) -> MapPass | None:
        """A recorded pass on a tape, with the blocks of the main input; None if these are not those that are
        counted."""
        if self.replay is not None:
            raise Apart
        passed, name = block_pass(self.passed(), self.given, self.read, self.made), self.inputs.name
        found = passed.blocks_of(name)
        ends = [key.intersection(self.sources) for key in self.structure.ends() if name in key]
        own = found[-1][0].names if found else ()
        is_known = 0 < len(found) == self.blocks() and (not ends or set(own) in ends)
        return replace(passed, alone=own) if is_known else None

    def recorded(
        self, composite: Composite | Rules, values: Mapping[str, Tensor] | None = None, roots: Roots | None = None
    ) -> Recorded:
        """One recorded pass whose relevance is about to go back to all sources.

        Args:
            composite: the rules of the way back.
            values: input -> what takes the place of what is at its root.
            roots: the roots of a pass on inputs of these shapes, if they are known.
        """
        both = composite if isinstance(composite, Rules) else Rules.of(composite)
        rules = self.tape_rules(both)
        graph: dict[str, Any] = {"values": values} if values else {}
        if rules is None:
            return self.begin(both.graph, **graph)
        if values:
            changed = self._changed(values, roots)
            return RootedPass(*changed, rules, self.read, moved=True) if changed else self.begin(both.graph, **graph)
        return self.rooted(rules) or self.begin(both.graph)

    def rooted(self, rules: TapeComposite) -> RootedPass | None:
        """:meth:`recorded` on a tape; None under autocast inside of the model, or if what enters the first block is not
        of inputs alone."""
        relevance = rules.carrier == "relevance"
        whole = self.passed(wide=relevance)
        found = None if relevance and whole.is_half else find_roots(whole, self.given, self.made)
        if found is None:
            return None
        return RootedPass(whole, found, rules, self.read, whole.layout(self.given, self.read) if relevance else None)

    def _changed(self, values: Mapping[str, Tensor], roots: Roots | None) -> tuple[ForwardPass, Roots] | None:
        if self.replay is not None:
            raise Apart
        with telling_of_changed_inputs():
            known = self.model, self.fed(self.inputs), self.inputs.samples, self.given
            return changed_pass(*known, values, roots, made=self.made, checkpoint=self.checkpoint)

    def rows(self, name: str, key: Key, call: int | None = None) -> tuple[int, Tensor, tuple[int, ...] | None]:
        """(number of rows, ``[B, P]`` which row of ``key`` stands for each element of a source, −1 for none, the grid
        of these elements where it is a picture).

        Args:
            call: where these rows enter a block; by default the first in which they look at something.

        Raises:
            MethodNotApplicable: that cannot be measured.
        """
        call = self.structure.firsts.get(key) if call is None else call
        if call is None:
            raise self.refuse(f"the rows of '{name}' attend in windows, or not at all, so there is no map over them")
        found = self._fed(name, call, self.inputs.batch if len(key) > 1 else 1)
        if found is None:
            modality = self.sources[name].modality
            what = {"image": "part of the picture", "text": "token"}.get(modality, "moment or vector")
            said = f"which {what} of '{name}' each of its rows stands for cannot be measured"
            raise self.refuse(said, verdict="is not supported yet")
        return found

    def located(self, name: str, key: Key, passed: MapPass | None = None) -> tuple[int, Tensor, tuple[int, ...] | None]:
        """:meth:`rows`, as far as possible read off a recorded pass."""
        known = None if passed is None else passed.elements(name, key)
        if known is not None:
            return known[0], known[1].rows, known[1].grid
        return self.rows(name, key if key in self.structure.firsts else key.intersection(self.sources))

    def _fed(self, name: str, call: int, samples: int) -> tuple[int, Tensor, tuple[int, ...] | None] | None:
        """What :meth:`rows` says of the rows that enter a block call, None where it cannot be measured."""
        side, lookup = self.sources[name], self.structure.lookups.get(name)
        root = Root("input", side.scored) if lookup is None else Root("lookup", lookup.number)
        kind = {"picture": side.modality == "image", "turned": bool(side.turned)}
        found = entering_places(self.model, self.inputs.feed, root, call, self.all_blocks, samples, **kind)
        known = [places for places in found if places is not None]
        if len(known) < len(found) or not known or len({(p.tokens, p.grid, len(p.rows)) for p in known}) > 1:
            return None
        return known[0].tokens, torch.stack([places.rows for places in known]), known[0].grid

    def real_rows(
        self, key: Key, shape: Sequence[int], call: int | None = None, passed: MapPass | None = None
    ) -> Tensor:
        """``[B, N]`` True at rows that stand for no padding: of a text alone, those of its real tokens; ``call`` as for
        :meth:`rows`, ``passed`` as for :meth:`located`."""
        found = torch.ones(*shape, dtype=torch.bool)
        for name, side in self.sources.items():
            if name not in key or side.modality != "text" or side.mask is None:
                continue
            count, rows, _ = self.rows(name, key, call) if passed is None else self.located(name, key, passed)
            if count != shape[1]:
                raise self.refuse(f"it has {shape[1]} rows where {count} enter its first block")
            rows = rows.cpu().expand(len(found), -1)
            mask = side.mask.flatten(0, -2).cpu()
            if mask.shape != rows.shape:
                elements = self.structure.lookups[name].elements.cpu().expand(len(mask), -1)
                mask = mask.gather(1, elements.clamp(min=0)) & (elements >= 0)
            if len(key) == 1:
                found &= False
            chosen = torch.where(mask if len(key) == 1 else ~mask, rows, -1)
            sample, column = (chosen >= 0).nonzero(as_tuple=True)
            found[sample, chosen[sample, column]] = len(key) == 1
        return found

    def by_sample(self, name: str, values: Tensor) -> Tensor:
        """``[B, N, D]`` of what is at a root, also where all samples' patches are packed into one ``[P, D]``."""
        return self.inputs.by_sample(values) if self._is_packed(name) else values

    def packed(self, name: str, values: Tensor) -> Tensor:
        """The inverse of :meth:`by_sample`."""
        return values.flatten(0, 1) if self._is_packed(name) else values

    def _is_packed(self, name: str) -> bool:
        side = self.sources[name]
        if name not in (self.inputs.name, *self.inputs.others):
            return False
        packed = name != self.inputs.name and (
            (side.modality == "tensor" and side.tensor.dim() != 3 and side.tensor.shape[:-1] != (self.inputs.batch,))
            or (side.modality == "image" and len(side.tensor) > self.inputs.batch)  # several pictures of each prompt
        )
        return packed or side.choices is not None

    def own_tokens(self) -> Tensor:
        """``[B, N]`` or ``[1, 1]`` True at tokens of the main text that are no placeholders of another input."""
        entry = self.structure.entries.get(self.inputs.name)
        if self.structure.plain or entry is None or len(entry[1]) < 2:
            return torch.ones(1, 1, dtype=torch.bool)
        return self.rows(self.inputs.name, entry[1], entry[0])[1].cpu() >= 0

    def at_tokens(self, name: str, values: Tensor) -> Tensor:
        """``[B, M]`` of a text's tokens from ``[B, N]`` of the rows at its root."""
        entry, lookup = self.structure.entries.get(name), self.structure.lookups.get(name)
        if entry is None or lookup is None:
            return values
        # what was seen of rows in order holds for texts of any length
        looked_up = self.inputs.side(name).tensor.shape[1] if lookup.in_order else lookup.elements.shape[-1]
        if values.shape[1] != looked_up:
            _, rows, _ = self.rows(name, entry[1], entry[0])
            rows = rows.to(values.device).expand(len(values), -1)
            if int(rows.max()) >= values.shape[1]:
                raise self.refuse(f"it has {values.shape[1]} rows where {int(rows.max()) + 1} enter its first block")
            values = values.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
        if lookup.in_order or name not in (self.inputs.name, *self.inputs.others):
            return values
        places = lookup.elements.to(values.device).expand(len(values), -1)
        tokens = self.inputs.side(name).tensor.shape[1]
        return values.new_zeros(len(values), tokens).scatter_add(1, places.clamp(min=0), values * (places >= 0))

    def of_sources(
        self,
        found: Mapping[Key, Tensor],
        logits: Tensor,
        diagnostics: dict[str, Any],
        passed: MapPass | None = None,
    ) -> Scores:
        """Scores of the inputs' elements from scores ``[B, N]`` of rows; ``passed`` as for :meth:`located`."""
        made = {}
        for name, side in self.sources.items():
            key = next((k for k in found if name in k), None)
            if key is None:
                continue
            values = found[key]
            tokens, rows, grid = self.located(name, key, passed)
            if tokens != values.shape[1]:
                raise self.refuse(f"its maps are over {values.shape[1]} of {tokens} rows")
            values = at_elements(values, rows)
            made[name] = Scores(values, logits, "patch" if side.modality == "image" else "token", {}, grid, side)
        return self.assemble(made, logits, diagnostics)

    def assemble(self, made: dict[str, Scores], logits: Tensor, diagnostics: dict[str, Any]) -> Scores:
        """The main input's scores, those of the others as parts."""
        batch = self.inputs.batch
        others = {name: one for name, one in made.items() if name != self.inputs.name}
        for name in [n for n, one in others.items() if n in self.inputs.shared or len(one.values) != batch]:
            # the classes of the main input's samples: texts of a picture, the same for all or so many for each
            chosen, part = self.value_index(logits), made.pop(name)
            if name not in self.inputs.shared:
                chosen = chosen + torch.arange(batch, device=chosen.device) * logits.shape[-1]
            fits = name in self.inputs.shared or len(part.values) == batch * logits.shape[-1]
            if fits and len(chosen.unique()) == len(chosen):  # else their gradients have added up
                side = (part.inputs or self.inputs).select_features(chosen.tolist())
                made[name] = replace(part, values=part.values[chosen], inputs=side)
        main = made.pop(self.inputs.name, None)
        if main is None:
            # a block that looks at other rows only has no map; else there is one that was not found
            led = any(self.inputs.name in key for key in self.structure.reached())
            raise self.refuse(
                f"no attention leads from what it says to its input '{self.inputs.name}'",
                verdict="has no meaning" if led else "is not supported yet",
            )
        return replace(main, diagnostics=diagnostics, parts=made)

    @property
    def one_sequence(self) -> bool:
        """Whether what is read out is one sequence of tokens that attends once in each block."""
        return self.structure.plain or self.structure.alone(self.inputs.name) is not None

    def refuse_streams(self) -> None:
        """For methods that know one sequence of tokens and one attention a block."""
        if self.one_sequence:
            return
        structure = self.structure
        streams = {name for a in structure.attentions for name in a.queries | a.keys}
        said = f"attention mixes several sequences of tokens in it ({', '.join(sorted(streams))})"
        if len(streams) < 2:
            said = "a block of it attends more than once, not at all, or with its heads one by one"
        raise self.refuse(said, verdict="is not supported yet")


@contextmanager
def telling_of_changed_inputs() -> Iterator[None]:
    """Errors of a model on changed inputs as what they are."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, WhyformerError):
            raise
        raise on_changed_inputs(error) from error


def _made_of(side: Inputs, lookup: Lookup) -> Inputs:
    """What a model made of one of its inputs and then looked up: shifted, with start tokens."""
    rows = lookup.elements.expand(side.batch, -1).cpu()
    inside = rows.clamp(min=0)

    def picked(values: Tensor | None, otherwise: bool) -> Tensor | None:
        if values is None:
            return None
        return values.cpu().gather(1, inside).masked_fill(rows < 0, otherwise).to(values.device)

    mask = picked(side.mask, True)
    if mask is not None and side.mask is not None and mask.shape == side.mask.shape:
        mask &= side.mask  # of the text alone the model would make as many as it has
    tokens = side.features.tokens
    if tokens is not None:
        tokens = [[own[i] if i >= 0 else "·" for i in line] for own, line in zip(tokens, rows.tolist(), strict=True)]
    return replace(side, mask=mask, special=picked(side.special, True), features=Features(tokens))


def readout_row(gradient: Tensor) -> Tensor:
    """``[B, N]`` which rows of the last block's output feed the logits, from the gradient ``[B, N, D]`` there.

    The norm of each row's gradient, scaled to sum 1: one-hot for a CLS or last-token readout, even for a mean.
    """
    norms = gradient.double().norm(dim=-1) if gradient.dim() == 3 else gradient.double().abs()
    total = norms.sum(-1, keepdim=True)
    return torch.where(total > 0, norms / torch.where(total > 0, total, 1), 0).to(gradient.dtype)
