"""The values at which relevance ends in a recorded pass, and walks from a target to them.

    recording = record_pass(model, feed)
    rooted = RootedPass(recording, find_roots(recording, sources), COMPOSITES["attnlrp"], read_logits)
    multipliers, _ = rooted.back(seed)  # input -> m; its relevance is rooted.root_values[name] * m
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.layout import Layout
from whyformer.methods.passes import Feed, ForwardPass, LogitsReader, argument_of, record_pass
from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.program import read_program
from whyformer.tape.rows import Rows
from whyformer.tape.streams import entry
from whyformer.tape.units import roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite, walk_back

__all__ = ["RootedPass", "Roots", "changed_pass", "find_roots", "nothing_arrives"]


@dataclass(frozen=True, eq=False)
class Roots:
    """The values at which relevance ends: pixels, vectors, or, for token ids, the first block's input and any
    embeddings of the same ids in further tables that the model reads later (per-layer embeddings of Gemma 3n).

    Attributes:
        numbers: input -> numbers of its root values.
        row_numbers: input -> its rows ``[B, N]`` in the roots. Only for roots inside the model, which may also hold
            other rows.
        rows: the rows of the pass; None if no root is inside the model.
        calls: number of a root inside the model -> (the call that computes it, its shape).
    """

    numbers: Mapping[str, tuple[int, ...]]
    row_numbers: Mapping[str, Tensor]
    rows: Rows | None = None
    calls: Mapping[int, tuple[Call, torch.Size]] = field(default_factory=dict)

    @property
    def every(self) -> set[int]:
        """The root values of all inputs."""
        return {n for numbers in self.numbers.values() for n in numbers}

    def is_in(self, tape: Tape, number: int) -> bool:
        """Return True if a root inside the model has the same number in another pass."""
        (expected, shape), call = self.calls[number], tape.maker.get(number)
        if call is None or tape.shapes[number] != shape:
            return False
        return (call.number, call.name, call.operands) == (expected.number, expected.name, expected.operands)

    def arranged(self, name: str, values: Callable[[int], Tensor]) -> Tensor:
        """Return the input's rows ``[B, N, ...]`` of tensors shaped like its roots, with the features of several roots
        concatenated; the tensor itself for arguments.

        Args:
            name: name of the input.
            values: returns the tensor of a root, by its number.
        """
        first, *others = (self._arranged(name, n, values(n)) for n in self.numbers[name])
        return torch.cat([t.flatten(2) for t in (first, *others)], 2) if others else first

    def _arranged(self, name: str, number: int, value: Tensor) -> Tensor:
        if self.rows is None or name not in self.row_numbers:
            return value
        return self.rows.features(number, value, self.row_numbers[name])

    def laid_out(self, name: str, number: int, value: Tensor, arranged: Tensor) -> Tensor:
        """Return the value of a root with the input's rows replaced by those of ``arranged``; the inverse of
        :meth:`arranged`."""
        if self.rows is None or name not in self.row_numbers:
            return arranged.to(value)
        place = self._arranged(name, number, value)
        if len(self.numbers[name]) > 1:
            further = [self.calls[n][1][-1] for n in self.numbers[name][1:]]
            widths = [arranged.shape[2] - sum(further), *further]
            arranged = arranged.split(widths, 2)[self.numbers[name].index(number)].reshape(place.shape)
        return self.rows.with_features(number, value, self.row_numbers[name], arranged)


def find_roots(
    recording: ForwardPass, sources: Mapping[str, Inputs], derived: Mapping[str, str] | None = None
) -> Roots:
    """Return the roots of a pass.

    Args:
        recording: a recorded pass.
        sources: the inputs by name.
        derived: name -> source of its rows, for ids that the model computes from an input, such as a decoder's.

    Raises:
        ModelError: the model does not read an input.
    """
    tape, numbers, row_numbers = recording.tape, dict[str, tuple[int, ...]](), dict[str, Tensor]()
    texts = {name: name for name, side in sources.items() if side.modality == "text"} | dict(derived or {})
    layout = recording.layout(sources) if texts else None
    for name, side in sources.items():
        if name not in texts:
            numbers[name] = (tape.number(argument_of(recording.feed, side.scored)),)
    for name, source in texts.items():
        entered = None if layout is None else _entry(recording, layout, source, sources)
        if entered is not None and layout is not None:
            number, row_numbers[name] = entered
            numbers[name] = number, *_further(recording, layout.rows, source, number)
            continue
        fed = tape.number(argument_of(recording.feed, sources[name].scored)) if name in sources else None
        looked_up = () if fed is None else roots_of(tape, fed)
        if not looked_up:
            raise ModelError(
                f"the look-up of tokens in its input '{name}' was not recognized: if the model computes with these "
                f"numbers, pass {name}.float()"
            )
        if len(looked_up) > 1:
            rows = None if layout is None else _rows_of(layout.rows, source, looked_up)
            if rows is None:
                message = f"the tokens of its input '{name}' are looked up in several places: not supported yet"
                raise ModelError(message)
            row_numbers[name] = rows
        numbers[name] = tuple(looked_up)
    roots = Roots(numbers, row_numbers, None if layout is None else layout.rows)
    return replace(roots, calls={n: (tape.maker[n], tape.shapes[n]) for n in roots.every if n in tape.maker})


def _rows_of(rows: Rows, source: str, values: Iterable[int]) -> Tensor | None:
    """Return the rows ``[B, N]`` of an input if the same ids are looked up in all of the values; else None."""
    family = next((f for f in rows.families if f.source == source), None)
    if family is None or family.numbers.dim() < 2:
        return None
    return family.numbers if {family.value, *rows.repeats.get(source, [])}.issuperset(values) else None


def _further(recording: ForwardPass, rows: Rows, source: str, number: int) -> list[int]:
    """Return the embeddings of an input's ids in further tables from which paths that bypass the value ``number`` lead
    to the output."""
    repeats = rows.repeats.get(source)
    if not repeats:
        return []
    calls = needed_calls(recording.tape.calls, recording.outputs.values(), {number})
    read = {o for call in calls for o in call.operands}
    return [n for n in repeats if n in read and n != number]


def _entry(
    recording: ForwardPass, layout: Layout, source: str, sources: Mapping[str, Inputs]
) -> tuple[int, Tensor] | None:
    """Return (number of the root, the input's rows ``[B, N]`` in it): the first block's input, or the looked-up vectors
    if the input's rows are mixed with others before it."""
    rows = layout.rows
    if source not in rows.roots:
        return None
    looked_up = rows.roots[source]
    row_numbers = next(f.numbers for f in rows.families if f.source == source)
    program = read_program(recording.tape, [looked_up], sorted(recording.outputs.values()))
    number = entry(program, rows, layout.attentions, source)
    if number is None or (row_numbers.dim() < 2 and number != looked_up):
        return None
    arguments = [argument_of(recording.feed, side.scored) for side in sources.values() if side.modality != "text"]
    others = [recording.tape.number(t) for t in arguments]
    if len(sources) > 1 and not bool(rows.of(number).all()):
        return looked_up, row_numbers  # the value also holds vectors without a row, such as those of a picture
    texts = [n for name, n in rows.roots.items() if name != source and n not in others and n < number]
    mixed = _is_mixed(recording, rows, number, row_numbers, looked_up, (*others, *texts))
    return looked_up if mixed else number, row_numbers


_MIXED: Recent[bool] = Recent(64)


def _is_mixed(
    recording: ForwardPass, rows: Rows, value: int, row_numbers: Tensor, looked_up: int, others: tuple[int, ...]
) -> bool:
    """Return True if the rows of an input in a value depend on other inputs, or its other rows depend on this input."""
    tape = recording.tape

    def measure() -> bool:
        label, inside = rows.of(value), torch.zeros(len(rows), dtype=torch.bool)
        inside[row_numbers.flatten()] = True
        is_inside = inside[label].to(tape.device(value))
        seed = torch.randn(tape.shapes[value], generator=torch.Generator().manual_seed(0)).to(tape[value])
        program = read_program(tape, [looked_up, *others], [value])
        runs = [(GRADIENT, {value: seed * is_inside}), (GRADIENT, {value: seed * ~is_inside})]
        from_inside, from_outside = walk_back(program, tape, runs, observed=[looked_up, *others])
        tape.release()
        return any(bool(from_inside[n].any()) for n in others) or bool(from_outside[looked_up].any())

    return _MIXED.once((tape.signature, value, looked_up, others), measure)


def changed_pass(
    model: nn.Module,
    feed: Feed,
    samples: Tensor | None,
    sources: Mapping[str, Inputs],
    values: Mapping[str, Tensor],
    roots: Roots | None = None,
    *,
    derived: Mapping[str, str] | None = None,
    checkpoint: bool = False,
) -> tuple[ForwardPass, Roots]:
    """Record a pass in which the values of roots are replaced.

    Args:
        model, feed, samples, checkpoint: as for :func:`record_pass`.
        sources, derived: as for :func:`find_roots`.
        values: input -> replacement of its root's value, in the layout of :attr:`RootedPass.root_values`.
        roots: the roots of a pass on inputs of the same shapes; None if there is none yet.

    Returns:
        The pass and its roots.
    """
    args, kwargs = list(feed[0]), dict(feed[1])
    for name, side in sources.items():
        if side.modality != "text":
            place: Any = args if isinstance(side.scored, int) else kwargs
            place[side.scored] = values[name]
    texts = [name for name in values if name not in sources or sources[name].modality == "text"]
    if texts and roots is None:
        roots = find_roots(record_pass(model, feed, samples, checkpoint=checkpoint), sources, derived)
    passing = partial(record_pass, model, (tuple(args), kwargs), samples, checkpoint=checkpoint)
    if roots is None:
        recording = passing()
        return recording, find_roots(recording, sources, derived)
    for _ in range(1 + len(roots.numbers)):
        changes = _changes(roots, {name: values[name] for name in texts})
        recording = passing(changes)
        moved = [number for number in changes if not roots.is_in(recording.tape, number)]
        if not moved:
            return recording, roots
        # with other experts, the model reads a later input at another place: find it with the earlier changes only
        before = {number: change for number, change in changes.items() if number < min(moved)}
        roots = find_roots(passing(before), sources, derived)
    raise ModelError(_MOVED)


_MOVED = (
    "the model runs other operations if its inputs are changed, such as other experts, before it reads another input: "
    "use a method that does not change inputs, such as input_x_gradient, attnlrp or gae"
)


def _changes(roots: Roots, values: Mapping[str, Tensor]) -> dict[int, Callable[[Tensor], Tensor]]:
    """Return {number of a root: function that replaces the rows of all inputs whose root it is}."""

    def changed(value: Tensor, number: int) -> Tensor:
        if value.shape != roots.calls[number][1]:  # another value has this number, see changed_pass
            return value
        for name, arranged in values.items():
            if number in roots.numbers[name]:
                value = roots.laid_out(name, number, value, arranged)
        return value

    numbers = {n for name in values for n in roots.numbers[name]}
    return {number: partial(changed, number=number) for number in numbers}


def nothing_arrives(composite: Composite) -> ModelError:
    """Return the error for a walk back from a target by which nothing arrives at any input."""
    constant = f", or {composite.name} holds every path constant (then use input_x_gradient)" if composite.rules else ""
    return ModelError(
        "nothing arrives at the input: an operation of the model stops the gradient (rounding, conversion to "
        "integers), or all derivatives are 0 (a head of zeros, or too small for float16: use bfloat16)"
        f"{constant}. Remove that operation, explain another target, or use occlusion"
    )


# -- a pass under a composite ----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RootedPass:
    """A recorded pass, ready to propagate from the target to its roots.

    Attributes:
        recording: the pass.
        roots: the values at which relevance ends.
        composite: the rules of the backward walk.
        read_logits: function from the model's output to ``[B, C]``, the row of logits that the target reads.
        layout: the rows of its values, needed to distribute relevance within each sample; None for gradients.
        moved: True if the value of a root was replaced.
    """

    recording: ForwardPass
    roots: Roots
    composite: Composite
    read_logits: LogitsReader
    layout: Layout | None = None
    moved: bool = False

    @cached_property
    def logits(self) -> Tensor:
        """``[B, C]``, the row of logits that the target reads."""
        return self.recording.logits(self.read_logits)

    @property
    def root_values(self) -> dict[str, Tensor]:
        """Input -> value of its root; ``[B, N, ...]`` for texts."""
        return {name: self.roots.arranged(name, self.recording.tape.__getitem__) for name in self.roots.numbers}

    def back(self, seed: Tensor) -> tuple[dict[str, Tensor], Sums | None]:
        """Propagate to the roots; return ({input: flow that arrives at its root}, in the layout of
        :attr:`root_values`; the sums of relevance, None if the composite propagates multipliers).

        Args:
            seed: ``[B, C]``, ∂target/∂logits.

        Raises:
            ModelError: nothing arrives at any root.
        """
        recording, roots = self.recording, self.roots.every
        starts, rules = recording.starts(self.read_logits, seed), [self.composite]
        (flows,), sums = recording.walk_back(roots, starts, rules, seed=seed, layout=self.layout, observed=roots)
        if not self.moved and bool(seed.any()) and not any(bool(flow.any()) for flow in flows.values()):
            raise nothing_arrives(self.composite)
        return {name: self.roots.arranged(name, flows.__getitem__) for name in self.roots.numbers}, sums
