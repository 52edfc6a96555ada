"""The scored inputs of a task, its recorded passes, and the rows that represent the elements of inputs."""

from __future__ import annotations

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
from whyformer.methods.attended_passes import AttendedPass, attended_pass
from whyformer.methods.map_passes import MapPass, RowsName, map_pass_of
from whyformer.methods.passes import Feed, ForwardPass, record_pass, record_wide_pass
from whyformer.methods.registry import METHODS
from whyformer.methods.roots import RootedPass, Roots, changed_pass, find_roots
from whyformer.methods.scores import Scores, at_elements
from whyformer.methods.sharing import NotShared, SharedPasses
from whyformer.methods.structure import MERGED, NOT_YET, Structure
from whyformer.models.kinds import last_row_only
from whyformer.models.output import Output, parameters
from whyformer.models.precision import HALF
from whyformer.options import Options
from whyformer.rules.registered import with_custom_rules
from whyformer.tape.places import Elements
from whyformer.tape.walking import Composite


class TaskInputs:
    """The part of a task that records passes of its inputs, and turns scores of rows into scores of inputs.

    It is the base class of :class:`whyformer.methods.task.Task`, which has the target.
    """

    model: nn.Module
    inputs: Inputs
    method: str
    read_logits: Callable[[Output], Tensor]
    last: bool
    options: Options
    shared: SharedPasses | None

    def refuse(self, reason: str, *, verdict: str = "has no meaning") -> MethodNotApplicable:
        """Return the error for a model that this method does not support."""
        raise TypeError("only a Task has a method")

    def feed(self, inputs: Inputs) -> Feed:
        """Return the (args, kwargs) to feed. If the target reads only the last row, a language model computes only the
        logits of that row."""
        args, kwargs = inputs.feed
        padded = inputs.mask is not None and (inputs.mask.dim() != 2 or not bool(inputs.mask[:, -1].all()))
        if not self.last or padded or (inputs.mask is None and "attention_mask" in kwargs):
            return args, kwargs
        return args, {**last_row_only(self.model), **kwargs}

    # -- the inputs
    @cached_property
    def scored_inputs(self) -> dict[str, Inputs]:
        """The inputs that are passed to the model and get scores, the main one first."""
        return self.inputs.sides

    @cached_property
    def derived(self) -> dict[str, str]:
        """Inputs that the model derives from another one, such as the shifted ids of a decoder: name -> source of their
        rows on a tape.

        The name is that of the argument of the model that would hold them, or that of the input with a number. The
        source is the name of the input, with a prime for each earlier look-up.
        """
        takes, sources = parameters(self.model), dict[str, str]()
        if all(side.modality != "text" for side in self.scored_inputs.values()):
            return sources
        rows = self.forward_pass().layout(self.scored_inputs, self.read_logits).rows
        looked_up, samples = dict[str, set[int]](), dict[str, set[int]]()
        for family in rows.families:
            if family.elements is not None:
                looked_up[family.source] = set(family.elements.flatten().tolist())
                samples[family.source] = set(rows.sample[family.numbers].flatten().tolist())
        for source in rows.roots:
            name = source.rstrip("'")
            if source != name:
                if samples[source] != samples[name]:
                    reason = f"it looks up the tokens of '{name}' sample by sample: explain one sample at a time"
                    way = ", with batch_size=1" if "batch_size" in METHODS[self.method].settings else ""
                    raise self.refuse(reason + way, verdict=NOT_YET)
                elements = looked_up[source] - {-1}  # empty for a start token alone
                if elements and looked_up[name].isdisjoint(elements):
                    raise self.refuse(f"it looks up the tokens of its input '{name}' in parts", verdict=NOT_YET)
                decoder, count = f"decoder_{name}", len(source) - len(name) + 1
                is_first = count == 2 and decoder in takes and decoder not in self.scored_inputs
                sources[decoder if is_first else f"{name}#{count}"] = source
        return sources

    @cached_property
    def sources(self) -> dict[str, Inputs]:
        """The scored inputs, the main one first, with the derived ones (the ids of a decoder)."""
        sides = dict(self.scored_inputs)
        for name, source in self.derived.items():
            elements = self.structure.elements_of(name)
            side = sides[source.rstrip("'")]
            sides[name] = replace(side if elements is None else _computed_from(side, elements), name=name)
        return sides

    # -- passes
    def forward_pass(self, *, wide: bool = False) -> ForwardPass:
        """Return a recorded pass of the inputs, which several targets or methods may share. With ``wide``, it runs in
        float32 or wider, as relevance requires."""

        def make() -> ForwardPass:
            feed, samples = self.feed(self.inputs), self.inputs.samples
            if wide:
                return record_wide_pass(self.model, feed, self.read_logits, samples, checkpoint=self.options.checkpoint)
            return record_pass(self.model, feed, samples, checkpoint=self.options.checkpoint)

        in_float32 = wide and (self.in_half_precision or self.forward_pass().is_half)
        if in_float32 not in self._passes:
            shared = self.shared
            self._passes[in_float32] = make() if shared is None else shared.forward_pass(self, make, in_float32)
        return self._passes[in_float32]

    @cached_property
    def _passes(self) -> dict[bool, ForwardPass]:
        return {}

    @cached_property
    def structure(self) -> Structure:
        """The streams of rows, their blocks and their attention."""
        map_pass = map_pass_of(self.forward_pass(), self.scored_inputs, self.read_logits, self.derived)
        return Structure(map_pass, self.inputs.name, (*self.scored_inputs, *self.derived))

    @property
    def in_half_precision(self) -> bool:
        """True if the model runs in half precision, by its parameters or by autocast."""
        parameters = list(self.model.parameters())
        devices = {parameter.device.type for parameter in parameters}
        supported = filter(torch.amp.is_autocast_available, devices)
        return any(p.dtype in HALF for p in parameters) or any(map(torch.is_autocast_enabled, supported))

    def map_pass(self, *, relevance: bool = False, row_alone: bool = False) -> MapPass:
        """Return a recorded pass with the attentions of all streams.

        Args:
            relevance: whether relevance will be propagated.
            row_alone: whether the result is independent of rows after the one that the target reads.

        Raises:
            MethodNotApplicable: some attention maps are unknown.
        """
        self._refuse_shared(row_alone)
        self.refuse_without_maps()
        return self._with_structure(self.forward_pass(wide=relevance))

    def block_pass(self, *, row_alone: bool = False) -> MapPass:
        """Return a recorded pass with the blocks of all inputs.

        Args:
            row_alone: as for :meth:`map_pass`.

        Raises:
            MethodNotApplicable: the main input has no recognizable blocks.
        """
        self._refuse_shared(row_alone)
        if not self.structure.map_pass.blocks_of(self.inputs.name):
            raise self.refuse("it has no recognizable blocks", verdict=NOT_YET)
        return self.structure.map_pass

    def _refuse_shared(self, row_alone: bool) -> None:
        """Raise if several targets share the pass and the result also depends on other rows than the target's."""
        if self.shared is not None and self.shared.inputs_of_targets is not None and not row_alone:
            raise NotShared

    def main_pass(self) -> MapPass:
        """Return :meth:`block_pass` with all inputs except the main one held constant."""
        map_pass = self.block_pass()
        return replace(map_pass, explained=map_pass.blocks_of(self.inputs.name)[-1][0].names)

    def _with_structure(self, recording: ForwardPass) -> MapPass:
        map_pass = self.structure.map_pass
        if recording is map_pass.recording:
            return map_pass
        return map_pass_of(recording, self.scored_inputs, self.read_logits, self.derived)

    def attended(
        self, values: Mapping[str, Tensor] | None = None, roots: Roots | None = None, *, start: int = 0
    ) -> AttendedPass:
        """Return a recorded pass with its single stream of attending rows.

        Args:
            values, roots: as for :meth:`rooted_pass`.
            start: index of the first block used. Blocks whose rows are merged later cannot be used.

        Raises:
            MethodNotApplicable: there is no such stream.
        """
        self._refuse_shared(False)
        self.refuse_streams()
        recording = self._changed(values, roots)[0] if values else self.forward_pass()
        attended = attended_pass(self._with_structure(recording), self.inputs.name)
        if attended is None:
            if self.structure.merges:
                raise self.refuse(MERGED)
            raise self.refuse("the target reads other values than the last state of its tokens", verdict=NOT_YET)
        if start < attended.first:
            raise self.refuse(MERGED)
        return attended

    def rooted_pass(
        self, composite: Composite, values: Mapping[str, Tensor] | None = None, roots: Roots | None = None
    ) -> RootedPass:
        """Return a recorded pass, ready to propagate back to all inputs.

        Args:
            composite: the rules of the backward walk.
            values: input -> replacement of the value at its root.
            roots: the roots of a pass on inputs of these shapes; None if there is none yet.
        """
        rules, relevance = with_custom_rules(composite), composite.propagates == "relevance"
        if values:
            return RootedPass(*self._changed(values, roots), rules, self.read_logits, moved=True)
        recording = self.forward_pass(wide=relevance)
        layout = recording.layout(self.scored_inputs, self.read_logits) if relevance else None
        roots = find_roots(recording, self.scored_inputs, self.derived)
        return RootedPass(recording, roots, rules, self.read_logits, layout)

    def _changed(self, values: Mapping[str, Tensor], roots: Roots | None) -> tuple[ForwardPass, Roots]:
        self._refuse_shared(False)
        with naming_changed_inputs():
            arguments = self.model, self.feed(self.inputs), self.inputs.samples, self.scored_inputs
            return changed_pass(*arguments, values, roots, derived=self.derived, checkpoint=self.options.checkpoint)

    # -- rows
    def located(self, name: str, rows_name: RowsName) -> tuple[int, Elements]:
        """Return (number of rows of a name, which of them represent the elements of an input).

        Args:
            name: name of the input.
            rows_name: name of the rows.

        Raises:
            MethodNotApplicable: it is unknown.
        """
        located = self.structure.map_pass.elements(name, rows_name)
        if located is None:
            modality = self.sources[name].modality
            element = {"image": "part of the picture", "text": "token"}.get(modality, "moment or vector")
            raise self.refuse(f"the {element} of '{name}' that each of its rows represents is unknown", verdict=NOT_YET)
        mask = self.sources[name].mask
        return located if mask is None else (located[0], located[1].within(mask))

    def cells(self, picture: str, rows_name: RowsName) -> Elements:
        """Return the rows, among those of a name, that represent the cells of a picture.

        Raises:
            MethodNotApplicable: they are unknown, or a cell has none.
        """
        _, elements = self.located(picture, rows_name)
        if bool((elements.rows < 0).any()):
            raise self.refuse(f"some parts of the picture '{picture}' are represented by no row", verdict=NOT_YET)
        return elements

    def only_rows(self) -> RowsName:
        """Return the name of the rows of the only stream that the target reads, or raise."""
        rows_name = self.structure.only_rows(self.inputs.name)
        if rows_name is None:
            raise self.refuse("the target reads no single sequence of tokens", verdict=NOT_YET)
        return rows_name

    def real_rows(self, rows_name: RowsName | None, shape: Sequence[int]) -> Tensor:
        """Return ``[B, N]`` True at rows other than padding, also at rows that the model adds, such as learned prompts.
        ``rows_name`` is that of :meth:`only_rows` by default."""
        rows_name, real = self.only_rows() if rows_name is None else rows_name, torch.ones(*shape, dtype=torch.bool)
        for name, side in self.sources.items():
            if name not in rows_name or (side.mask is None and side.modality != "text"):
                continue
            content = torch.ones(side.extent, dtype=torch.bool) if side.mask is None else side.mask
            if side.mask is None:  # the model itself adds all padding
                elements_of_rows = self.structure.map_pass.elements(name, rows_name)
                if elements_of_rows is None or elements_of_rows[0] != shape[1]:
                    continue
            count, elements = self.located(name, rows_name)
            if count != shape[1]:
                raise self.refuse(f"it has {shape[1]} rows, but {count} enter its first block")
            rows, mask = elements.rows.cpu().expand(len(real), -1), content.flatten(0, -2).cpu()
            if mask.shape != rows.shape:
                tokens = self._elements(name, len(mask))
                mask = mask.gather(1, tokens.clamp(min=0)) & (tokens >= 0)
            if len(rows_name) == 1:  # if padding has no rows, as where it is set to 0, rows of no element are padding
                real[((rows < 0) & ~mask).any(1)] = False
            for selected, value in ((~mask, False), (mask, True)):
                sample, column = ((rows >= 0) & selected).nonzero(as_tuple=True)
                real[sample, rows[sample, column]] = value
        return real

    def mean_of_queries(self, maps: Tensor, rows_name: RowsName | None = None) -> Tensor:
        """Return the mean ``[B, K]`` of maps ``[B, Q, K]`` over the queries except padding; ``rows_name`` as for
        :meth:`real_rows`."""
        real = self.real_rows(rows_name, maps.shape[:2]).to(maps.device)
        return (maps * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    def _elements(self, name: str, count: int) -> Tensor:
        """Return ``[B, M]`` the element of an input that each looked-up row represents."""
        elements = self.structure.elements_of(name)
        if elements is None:
            raise self.refuse(f"the look-up of the tokens of its input '{name}' was not recognized", verdict=NOT_YET)
        return elements.expand(count, -1)

    def by_sample(self, name: str, values: Tensor) -> Tensor:
        """Reshape the value at a root to ``[B, N, D]``, also if patches of all samples are packed into ``[P, D]``; to
        ``[B, C, N, D]`` for several texts per sample."""
        choices = self.sources[name].choices
        if choices is not None:
            inside = values.shape[:2] == (self.inputs.batch, choices)
            return values if inside else values.unflatten(0, (self.inputs.batch, choices))
        return self.inputs.by_sample(values) if self._is_packed(name) else values

    def packed(self, name: str, values: Tensor) -> Tensor:
        """Invert :meth:`by_sample`."""
        return values.flatten(0, 1) if self._is_packed(name) else values

    def has_several_texts(self, name: str) -> bool:
        """Return whether an input holds several texts of each sample: multiple choice, or those that a detector looks
        for in its picture."""
        side, is_input = self.sources[name], name in (self.inputs.name, *self.inputs.others)
        unshared = side.modality == "text" and is_input and name not in self.inputs.shared
        return side.choices is not None or (unshared and self.inputs.is_packed(side.tensor))

    def _is_packed(self, name: str) -> bool:
        side = self.sources[name]
        if name not in (self.inputs.name, *self.inputs.others):
            return False
        packed = name != self.inputs.name and (
            (side.modality == "tensor" and side.tensor.dim() != 3 and side.tensor.shape[:-1] != (self.inputs.batch,))
            or (side.modality == "image" and len(side.tensor) > self.inputs.batch)  # several pictures per prompt
        )
        return packed or self.has_several_texts(name)

    def plain_tokens(self) -> Tensor:
        """Return ``[B, N]`` or ``[1, 1]`` True at tokens of the main text that are not placeholders of another input or
        of values computed from one."""
        name, inputs = self.inputs.name, self.scored_inputs.keys()
        names = [n for n in self.structure.map_pass.row_names if name in n] if len(inputs) > 1 else []
        for rows_name in sorted(names, key=lambda n: len(n & inputs) < 2):
            if len(rows_name & inputs) > 1 or self.structure.map_pass.elements(name, rows_name) is not None:
                return self.at_tokens(name, (self.located(name, rows_name)[1].rows >= 0).float()).cpu() > 0
        return torch.ones(1, 1, dtype=torch.bool)

    def at_tokens(self, name: str, values: Tensor) -> Tensor:
        """Return ``[B, N]`` of a text's tokens from ``[B, M]`` of the rows looked up by its ids."""
        elements, tokens = self.structure.elements_of(name), self.sources[name].tensor.shape[-1]
        if elements is None or name in self.derived:
            return values
        places = elements.to(values.device).expand(len(values), -1)
        return values.new_zeros(len(values), tokens).scatter_add(1, places.clamp(min=0), values * (places >= 0))

    def of_rows(self, values: Tensor, logits: Tensor, diagnostics: dict[str, Any] | None = None) -> Scores:
        """Turn scores ``[B, N]`` of the only stream that the target reads into scores of its inputs."""
        return self.of_sources({self.only_rows(): values}, logits, diagnostics or {})

    def of_sources(self, row_scores: Mapping[RowsName, Tensor], logits: Tensor, diagnostics: dict[str, Any]) -> Scores:
        """Turn scores ``[B, N]`` of rows, by the rows' names, into scores of the inputs' elements."""
        by_input = {}
        for name, side in self.sources.items():
            rows = {key: self._of_elements(name, key, values) for key, values in row_scores.items() if name in key}
            # a class token that is joined to other keys is a row of the queries, whose other rows are not keys
            scored = [pair for pair in rows.values() if bool(pair[0].any())] or list(rows.values())
            for values, elements in scored[:1]:
                values = self.at_tokens(name, values) if side.modality == "text" else values
                kind = "patch" if side.modality == "image" else "token"
                by_input[name] = Scores(values, logits, kind, {}, elements.grid, elements.box, inputs=side)
        return self.assemble(by_input, logits, diagnostics)

    def _of_elements(self, name: str, rows_name: RowsName, values: Tensor) -> tuple[Tensor, Elements]:
        """Return scores of the elements of an input, from those of the rows of a name, and the elements."""
        tokens, elements = self.located(name, rows_name)
        if tokens != values.shape[1]:
            raise self.refuse(f"its attention maps cover {values.shape[1]} of {tokens} rows")
        return at_elements(values, elements.rows), elements

    def assemble(self, by_input: dict[str, Scores], logits: Tensor, diagnostics: dict[str, Any]) -> Scores:
        """Return the main input's scores, with those of the other inputs as parts."""
        main = by_input.pop(self.inputs.name, None)
        if main is None:
            raise self._without_scores()
        return replace(main, diagnostics=diagnostics, parts=by_input)

    def _without_scores(self) -> MethodNotApplicable:
        """Return the error for maps without scores of the main input. It names the blocks that attend to this input."""
        name, settings = self.inputs.name, METHODS[self.method].settings
        blocks = self.structure.attending(name)
        if blocks:
            ways = {"block": f"block={blocks[-1]}", "aggregation": f"aggregation={{'layers': {blocks[-1]}}}"}
            way = " or ".join(text for setting, text in ways.items() if setting in settings)
            reason = f"the chosen block does not attend to its input '{name}'"
            return self.refuse(f"{reason}. Ways out: {way} (blocks {', '.join(map(str, blocks))} attend to it)")
        if any(name in key for key in self.structure.reached):
            return self.refuse(f"no block of the sequence that its output reads attends to its input '{name}' itself")
        return self.refuse(f"no attention connects its output with its input '{name}'", verdict=NOT_YET)

    @property
    def one_sequence(self) -> bool:
        """True if the target reads a single stream, which attends once in each block."""
        return self.structure.only_rows(self.inputs.name) is not None

    def refuse_without_maps(self) -> None:
        """Check that all attention maps are known.

        Raises:
            MethodNotApplicable: they are not.
        """
        reason = self.structure.without_maps
        if reason is not None:
            raise self.refuse(reason[0], verdict=reason[1])

    def refuse_streams(self, remedy: str = "") -> None:
        """Check that there is a single stream, which attends once in each block, and that its maps are known.

        Args:
            remedy: a sentence that ends the error.

        Raises:
            MethodNotApplicable: there is none.
        """
        self.refuse_without_maps()
        if self.one_sequence:
            return
        if self.structure.map_pass.reduced:
            raise self.refuse(MERGED)
        streams = {name for a in self.structure.attentions.values() for name in a.queries | a.keys}
        reason = f"its attention mixes several sequences of tokens ({', '.join(sorted(streams))})"
        if len(streams) < 2:
            reason = "one of its blocks attends more than once, not at all, or separately for each head"
        raise self.refuse(f"{reason}. {remedy}" if remedy else reason, verdict=NOT_YET)


@contextmanager
def naming_changed_inputs() -> Iterator[None]:
    """Re-raise errors of a model on changed inputs with a message that names this cause."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, WhyformerError):
            raise
        raise on_changed_inputs(error) from error


def _computed_from(side: Inputs, elements: Tensor) -> Inputs:
    """Return ids that a model computed from an input and then looked up, such as shifted ones with a start token."""
    rows = elements.expand(side.batch, -1).cpu()
    inside = rows.clamp(min=0)

    def picked(values: Tensor | None, otherwise: bool) -> Tensor | None:
        if values is None:
            return None
        return values.cpu().gather(1, inside).masked_fill(rows < 0, otherwise).to(values.device)

    mask = picked(side.mask, True)
    if mask is not None and side.mask is not None and mask.shape == side.mask.shape:
        mask &= side.mask  # ids at the positions of padding are padding too
    tokens = side.features.tokens
    tokens = None if tokens is None or len(tokens) != len(rows) else tokens  # copies have the features of their samples
    if tokens is not None:
        tokens = [[text[i] if i >= 0 else "·" for i in row] for text, row in zip(tokens, rows.tolist(), strict=True)]
    return replace(side, mask=mask, special=picked(side.special, True), features=Features(tokens))
