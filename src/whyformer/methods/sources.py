"""Scores of a model's inputs, and which token rows stand for which elements of which input."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import MethodNotApplicable, WhyformerError, on_changed_inputs
from whyformer.explanation.features import Features
from whyformer.inputs import Inputs
from whyformer.methods.attended import Key, MapPass, map_pass
from whyformer.methods.passes import Feed, ForwardPass
from whyformer.methods.replay import Apart, Replay
from whyformer.methods.roots import RootedPass, Roots, changed_pass, find_roots
from whyformer.methods.scores import Scores, at_elements
from whyformer.methods.sequence import AttendedPass, attended_pass
from whyformer.methods.structure import MERGED, NOT_YET, Structure
from whyformer.models.kinds import last_row_alone
from whyformer.models.output import Output
from whyformer.models.precision import HALF
from whyformer.options import Options
from whyformer.rules.registered import with_own_rules
from whyformer.tape.places import Elements
from whyformer.tape.walking import Composite


class Sources:
    """The part of a task that knows its inputs; see :class:`whyformer.methods.task.Task`."""

    model: nn.Module
    inputs: Inputs
    read: Callable[[Output], Tensor]
    last: bool
    options: Options
    replay: Replay | None

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

    # -- the inputs
    @cached_property
    def given(self) -> dict[str, Inputs]:
        """The inputs that are scored, as they were passed to the model, the main one first."""
        return {name: self.inputs.side(name) for name in (self.inputs.name, *self.inputs.others)}

    @cached_property
    def made(self) -> dict[str, str]:
        """Ids that the model makes of an input, by the name of an argument that they could be given as, or a number
        behind that of the input -> source of their rows on a tape: the name of the input, with a prime for each look-up
        before."""
        takes, found = forward_names(self.model), dict[str, str]()
        if all(side.modality != "text" for side in self.given.values()):
            return found
        rows = self.passed().layout(self.given, self.read).rows
        looked_up = {f.source: set(f.elements.flatten().tolist()) for f in rows.families if f.elements is not None}
        for source in rows.begun:
            name = source.rstrip("'")
            if source != name:
                if looked_up[name].isdisjoint(looked_up[source] - {-1}):
                    raise self.refuse(f"the tokens of its input '{name}' are looked up in parts", verdict=NOT_YET)
                decoder, count = f"decoder_{name}", len(source) - len(name) + 1
                is_first = count == 2 and decoder in takes and decoder not in self.given
                found[decoder if is_first else f"{name}#{count}"] = source
        return found

    @cached_property
    def sources(self) -> dict[str, Inputs]:
        """The inputs that get scores, the main one first; those too that the model makes of them (a decoder's ids)."""
        found = dict(self.given)
        for name, source in self.made.items():
            elements = self.structure.elements_of(name)
            side = found[source.rstrip("'")]
            found[name] = replace(side if elements is None else _made_of(side, elements), name=name)
        return found

    # -- passes
    def passed(self, *, wide: bool = False) -> ForwardPass:
        """One recorded pass of the inputs, which several targets or methods may share; ``wide`` in float32 or wider,
        for relevance."""
        raise TypeError("only a whole task can be recorded")

    @cached_property
    def structure(self) -> Structure:
        """The sequences of rows, their blocks, and which of them attend to which."""
        passed = map_pass(self.passed(), self.given, self.read, self.made)
        return Structure(passed, self.inputs.name, (*self.given, *self.made))

    @property
    def in_half_precision(self) -> bool:
        """Whether a pass of the model is in half precision: by its parameters, or by autocast around it."""
        parameters = list(self.model.parameters())
        devices = {parameter.device.type for parameter in parameters}
        known = filter(torch.amp.is_autocast_available, devices)
        return any(p.dtype in HALF for p in parameters) or any(map(torch.is_autocast_enabled, known))

    def map_pass(self, *, relevance: bool = False) -> MapPass:
        """A recorded pass with the attentions of all sequences, whose maps are known.

        Args:
            relevance: relevance is walked back.

        Raises:
            MethodNotApplicable: the maps are not known.
        """
        if self.replay is not None:
            raise Apart
        self.refuse_without_maps()
        if self.structure.merges:
            raise self.refuse(MERGED)
        return self._with_structure(self.passed(wide=relevance))

    def block_pass(self, *, row_alone: bool = False) -> MapPass:
        """A recorded pass with the blocks of all inputs.

        Args:
            row_alone: rows behind the one that a target reads play no part.

        Raises:
            MethodNotApplicable: no blocks of the main input were seen.
        """
        if self.replay is not None and not row_alone:
            raise Apart
        if not self.structure.passed.blocks_of(self.inputs.name):
            raise self.refuse("no blocks were seen in it", verdict=NOT_YET)
        return self.structure.passed

    def main_pass(self) -> MapPass:
        """:meth:`block_pass`, other inputs than the main one being constant."""
        passed = self.block_pass()
        return replace(passed, alone=passed.blocks_of(self.inputs.name)[-1][0].names)

    def _with_structure(self, whole: ForwardPass) -> MapPass:
        own = self.structure.passed
        return own if whole is own.whole else map_pass(whole, self.given, self.read, self.made)

    def attended(
        self,
        values: Mapping[str, Tensor] | None = None,
        roots: Roots | None = None,
        *,
        relevance: bool = False,
        row_alone: bool = False,
        merged: bool = False,
    ) -> AttendedPass:
        """A recorded pass with the one sequence that attends in it.

        Args:
            values, roots: as for :meth:`recorded`.
            relevance: relevance is walked back.
            row_alone: rows behind the one that a target reads play no part.
            merged: its rows may be mixtures of rows that attended before.

        Raises:
            MethodNotApplicable: there is no such sequence.
        """
        if self.replay is not None and not row_alone:
            raise Apart
        self.refuse_streams()
        whole = self._changed(values, roots)[0] if values else self.passed(wide=relevance)
        name = None if self.structure.is_plain else self.inputs.name
        found = attended_pass(self._with_structure(whole), name)
        if found is None:
            if self.structure.merges:
                raise self.refuse(MERGED)
            raise self.refuse("the target reads more than the last state of its sequence of tokens", verdict=NOT_YET)
        if found.first and not merged:
            raise self.refuse(MERGED)
        return found

    def recorded(
        self, composite: Composite, values: Mapping[str, Tensor] | None = None, roots: Roots | None = None
    ) -> RootedPass:
        """One recorded pass whose relevance is about to go back to all sources.

        Args:
            composite: the rules of the way back.
            values: input -> what takes the place of what is at its root.
            roots: the roots of a pass on inputs of these shapes, if they are known.
        """
        rules, relevance = with_own_rules(composite), composite.carrier == "relevance"
        if values:
            return RootedPass(*self._changed(values, roots), rules, self.read, moved=True)
        whole = self.passed(wide=relevance)
        found = find_roots(whole, self.given, self.made)
        return RootedPass(whole, found, rules, self.read, whole.layout(self.given, self.read) if relevance else None)

    def _changed(self, values: Mapping[str, Tensor], roots: Roots | None) -> tuple[ForwardPass, Roots]:
        if self.replay is not None:
            raise Apart
        with telling_of_changed_inputs():
            known = self.model, self.fed(self.inputs), self.inputs.samples, self.given
            return changed_pass(*known, values, roots, made=self.made, checkpoint=self.options.checkpoint)

    # -- rows
    def located(self, name: str, key: Key) -> tuple[int, Elements]:
        """How many rows have a name, and which of them stand for the elements of an input.

        Args:
            name: of the input.
            key: name of the rows.

        Raises:
            MethodNotApplicable: that is unknown.
        """
        found = self.structure.passed.elements(name, key)
        if found is None:
            modality = self.sources[name].modality
            what = {"image": "part of the picture", "text": "token"}.get(modality, "moment or vector")
            raise self.refuse(f"which {what} of '{name}' each of its rows stands for is unknown", verdict=NOT_YET)
        return found

    def real_rows(self, key: Key, shape: Sequence[int]) -> Tensor:
        """``[B, N]`` True at rows that stand for no padding: of a text alone, those of its real tokens."""
        found = torch.ones(*shape, dtype=torch.bool)
        for name, side in self.sources.items():
            if name not in key or side.modality != "text" or side.mask is None:
                continue
            count, elements = self.located(name, key)
            if count != shape[1]:
                raise self.refuse(f"it has {shape[1]} rows where {count} enter its first block")
            rows, mask = elements.rows.cpu().expand(len(found), -1), side.mask.flatten(0, -2).cpu()
            if mask.shape != rows.shape:
                own = self._elements(name, len(mask))
                mask = mask.gather(1, own.clamp(min=0)) & (own >= 0)
            if len(key) == 1:
                found &= False
            chosen = torch.where(mask if len(key) == 1 else ~mask, rows, -1)
            sample, column = (chosen >= 0).nonzero(as_tuple=True)
            found[sample, chosen[sample, column]] = len(key) == 1
        return found

    def _elements(self, name: str, count: int) -> Tensor:
        """``[B, M]`` which element of an input each row that is looked up stands for."""
        found = self.structure.elements_of(name)
        if found is None:
            raise self.refuse(f"where the tokens of its input '{name}' are looked up was not seen", verdict=NOT_YET)
        return found.expand(count, -1)

    def by_sample(self, name: str, values: Tensor) -> Tensor:
        """``[B, N, D]`` of what is at a root, also where all samples' patches are packed into one ``[P, D]``; of a
        multiple choice ``[B, C, N, D]``."""
        choices = self.sources[name].choices
        if choices is not None:
            inside = values.shape[:2] == (self.inputs.batch, choices)
            return values if inside else values.unflatten(0, (self.inputs.batch, choices))
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
        """``[B, N]`` or ``[1, 1]`` True at tokens of the main text that are no placeholders of another input, or of
        what is made of one."""
        name, inputs = self.inputs.name, self.given.keys()
        keys = [k for k in self.structure.passed.keys if name in k] if len(inputs) > 1 else []
        for key in sorted(keys, key=lambda k: len(k & inputs) < 2):
            if len(key & inputs) > 1 or self.structure.passed.elements(name, key) is not None:
                return self.at_tokens(name, (self.located(name, key)[1].rows >= 0).float()).cpu() > 0
        return torch.ones(1, 1, dtype=torch.bool)

    def at_tokens(self, name: str, values: Tensor) -> Tensor:
        """``[B, N]`` of a text's tokens from ``[B, M]`` of the rows that are looked up by its ids."""
        found, tokens = self.structure.elements_of(name), self.sources[name].tensor.shape[-1]
        if found is None or name in self.made:
            return values
        places = found.to(values.device).expand(len(values), -1)
        return values.new_zeros(len(values), tokens).scatter_add(1, places.clamp(min=0), values * (places >= 0))

    def of_sources(self, found: Mapping[Key, Tensor], logits: Tensor, diagnostics: dict[str, Any]) -> Scores:
        """Scores of the inputs' elements from scores ``[B, N]`` of rows."""
        made = {}
        for name, side in self.sources.items():
            key = next((k for k in found if name in k), None)
            if key is None:
                continue
            values = found[key]
            tokens, elements = self.located(name, key)
            if tokens != values.shape[1]:
                raise self.refuse(f"its maps are over {values.shape[1]} of {tokens} rows")
            values = at_elements(values, elements.rows)
            values = self.at_tokens(name, values) if side.modality == "text" else values
            kind = "patch" if side.modality == "image" else "token"
            made[name] = Scores(values, logits, kind, {}, elements.grid, elements.box, inputs=side)
        return self.assemble(made, logits, diagnostics)

    def assemble(self, made: dict[str, Scores], logits: Tensor, diagnostics: dict[str, Any]) -> Scores:
        """The main input's scores, those of the others as parts."""
        main = made.pop(self.inputs.name, None)
        if main is None:
            # a block that looks at other rows only has no map; else there is one that was not found
            led = any(self.inputs.name in key for key in self.structure.reached)
            raise self.refuse(
                f"no attention leads from what it says to its input '{self.inputs.name}'",
                verdict="has no meaning" if led else "is not supported yet",
            )
        return replace(main, diagnostics=diagnostics, parts=made)

    @property
    def one_sequence(self) -> bool:
        """Whether what is read out is one sequence of tokens that attends once in each block."""
        return self.structure.is_plain or self.structure.alone(self.inputs.name) is not None

    def refuse_without_maps(self) -> None:
        """Raise if the maps of attention are not known.

        Raises:
            MethodNotApplicable: they are not.
        """
        reason = self.structure.without_maps
        if reason is not None:
            raise self.refuse(reason[0], verdict=reason[1])

    def refuse_streams(self) -> None:
        """Raise if there is no one sequence of tokens that attends once in each block, or if its maps are not known.

        Raises:
            MethodNotApplicable: there is none.
        """
        self.refuse_without_maps()
        if self.one_sequence:
            return
        streams = {name for a in self.structure.attentions.values() for name in a.queries | a.keys}
        said = f"attention mixes several sequences of tokens in it ({', '.join(sorted(streams))})"
        if len(streams) < 2:
            said = "a block of it attends more than once, not at all, or with its heads one by one"
        raise self.refuse(said, verdict=NOT_YET)


@contextmanager
def telling_of_changed_inputs() -> Iterator[None]:
    """Errors of a model on changed inputs as what they are."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, WhyformerError):
            raise
        raise on_changed_inputs(error) from error


def forward_names(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    try:
        return frozenset(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _made_of(side: Inputs, elements: Tensor) -> Inputs:
    """What a model made of one of its inputs and then looked up: shifted, with start tokens."""
    rows = elements.expand(side.batch, -1).cpu()
    inside = rows.clamp(min=0)

    def picked(values: Tensor | None, otherwise: bool) -> Tensor | None:
        if values is None:
            return None
        return values.cpu().gather(1, inside).masked_fill(rows < 0, otherwise).to(values.device)

    mask = picked(side.mask, True)
    if mask is not None and side.mask is not None and mask.shape == side.mask.shape:
        mask &= side.mask  # of the text alone the model would make as many as it has
    tokens = side.features.tokens
    tokens = None if tokens is None or len(tokens) != len(rows) else tokens  # those of copies stay those of the samples
    if tokens is not None:
        tokens = [[own[i] if i >= 0 else "·" for i in line] for own, line in zip(tokens, rows.tolist(), strict=True)]
    return replace(side, mask=mask, special=picked(side.special, True), features=Features(tokens))
