"""``record``: one forward pass as data, for relevance at any place inside a model and for interventions.

r = whyformer.record(model, pixels)
print(r)                                       # the program, one line a unit
mlp = r["encoder.layer.3.mlp"]                 # the value that this module returned
r.relevance(mlp, target=7, composite="attnlrp")
r.replay({mlp: torch.zeros_like(mlp.tensor)})  # the logits without it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor

from whyformer.errors import FOREIGN_ERRORS, InputError, unknown
from whyformer.explaining import OpenedModel, open_model
from whyformer.inputs import Inputs
from whyformer.inputs.unfit import unfit
from whyformer.inside import Inside, look_inside
from whyformer.methods.passes import ForwardPass, Layout, record_pass
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.rules.registered import declared, with_own_rules
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Block
from whyformer.tape.structure import Attention
from whyformer.tape.units import Unit, reach, roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import Composite, walk_back
from whyformer.tape.walking import replay as replay_tape
from whyformer.targets import Target

__all__ = ["Record", "Value", "record"]


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the recorded pass. Two with one number are equal.

    Attributes:
        number: its number on the tape.
        shape: its shape.
        module: path of the module that returned it, or that made the call; "" for the model itself.
    """

    number: int
    shape: torch.Size
    module: str
    _tape: Tape = field(repr=False)

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tape[self.number]

    def __index__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self.number == other.number if isinstance(other, Value) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.number)


@dataclass(frozen=True, eq=False)
class Record:
    """One recorded forward pass of a model; see :func:`record`.

    Attributes:
        tape: the calls and values of the pass.
        inputs: the tensors that were fed, by name or position.
        roots: where relevance ends: scored inputs of floating-point numbers, and vectors that were looked up by the
            ids of scored inputs.
        outputs: the tensors that the model returned, by name.
    """

    tape: Tape
    inputs: Mapping[str, Value]
    roots: tuple[Value, ...]
    outputs: Mapping[str, Value]
    _ready: Prepared = field(repr=False)
    _pass: ForwardPass = field(repr=False)

    # -- what there is
    @cached_property
    def program(self) -> Program:
        """The units between the roots and all outputs."""
        return read_program(self.tape, [v.number for v in self.roots], [v.number for v in self.outputs.values()])

    @cached_property
    def _carry(self) -> list[bool]:
        """Of each value, whether it depends on a root."""
        return reach(self.tape, [v.number for v in self.roots])

    @property
    def units(self) -> list[Unit]:
        """The units of the program, in the order of execution."""
        return self.program.units

    @cached_property
    def _layout(self) -> Layout:
        """On the way to the row of logits that is read by default; to any output of a model that has no such row."""
        with suppress(InputError):
            return self.layout(None)
        return self._pass.layout(self._sides)

    @property
    def _sides(self) -> dict[str, Inputs]:
        inputs = self._ready.inputs
        return {name: inputs.side(name) for name in (inputs.name, *inputs.others)}

    def layout(self, target: Target) -> Layout:
        """Which rows the values hold, and which attentions and blocks lead to the row of logits of a target."""
        return self._pass.layout(self._sides, self._ready.resolver(target).read)

    @property
    def attentions(self) -> list[Attention]:
        """The attentions, in the order of execution: numbers of their map, scores and product, and whose rows look at
        whose."""
        return list(self._layout.attentions)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all streams: numbers of what enters and leaves them, and their attentions."""
        return [block for stream in self._layout.streams for block in stream.blocks]

    def attention_map(self, attention: Attention, values: Callable[[int], Tensor] | None = None) -> Tensor:
        """Return the map of an attention as ``[B, H, Q, K]``.

        Args:
            attention: one of :attr:`attentions`.
            values: number of a value -> a tensor of its shape, such as a flow, to be laid out like the map; None for
                the map itself.

        Raises:
            ModelError: which sample, head, query or key its elements belong to is unknown.
        """
        return attention.arrange(*map(values or self.tape.__getitem__, attention.maps))

    @property
    def modules(self) -> list[str]:
        """Paths of the modules whose outputs are values of the pass."""
        return sorted(self.tape.outputs)

    def __str__(self) -> str:
        """The program: number of the exit, kind, call, shape, entries and module of each unit."""
        ends = f"{_names(self.roots)} and {_names(self.outputs.values())}"
        first = f"{len(self.tape.calls)} calls, {len(self.units)} units between {ends}"
        return "\n".join([first, *self.program.lines(self.tape.modules)])

    def value(self, number: int) -> Value:
        """Return a value by its number on the tape."""
        if not 0 <= number < len(self.tape):
            raise InputError(f"the pass has the values 0 to {len(self.tape) - 1}, not {number}")
        maker = self.tape.maker.get(number)
        module = "" if maker is None else self.tape.modules.get(maker.number, "")
        return Value(number, self.tape.shapes[number], module, self.tape)

    def runs(self, module: str) -> list[Value]:
        """Return what a module returned, one value for each time it ran; of several tensors the first.

        Raises:
            InputError: no module has that path, or it did not run, or it returned no tensor.
        """
        if module not in self.tape.outputs:
            start = "no module that ran has the path"
            raise unknown(start, module, self.tape.outputs, "print(record.modules) lists them.")
        found = [next((n for n in numbers if self.tape.floating(n)), None) for numbers in self.tape.outputs[module]]
        if None in found:
            raise InputError(f"the module '{module}' returned no tensor of floating-point numbers")
        return [Value(n, self.tape.shapes[n], module, self.tape) for n in found if n is not None]

    def __getitem__(self, module: str) -> Value:
        """Return what a module returned.

        Raises:
            InputError: as :meth:`runs`, or the module ran more than once.
        """
        runs = self.runs(module)
        if len(runs) > 1:
            raise InputError(f"the module '{module}' ran {len(runs)} times: take one of record.runs({module!r})")
        return runs[0]

    # -- walks
    def logits(self, target: Target = None) -> Tensor:
        """Return ``[B, C]``, the row of logits that a target is about."""
        return self._ready.resolver(target).read(self._pass.output()).detach()

    def walk_back(
        self, wanted: Iterable[Value | int], target: Target = None, composite: str | Composite = "plain"
    ) -> dict[Value, Tensor]:
        """Walk from the target back to some values and return what arrives there.

        Args:
            wanted: values of the pass.
            target: what is explained, as for :func:`whyformer.explain`.
            composite: the rules, by name ("deep_taylor", "lrp", or a key of
                :data:`whyformer.rules.multipliers.COMPOSITES`) or as an object. "plain" is the gradient.

        Returns:
            For each value a tensor of its shape: a multiplier m, or relevance itself if that is what the composite
            carries; zeros where nothing arrives.

        Raises:
            InputError: the target does not fit the model's output, or there is no such composite or value.
        """
        values = [v if isinstance(v, Value) else self.value(v) for v in wanted]
        for v in values:
            if not self.tape.floating(v.number):
                raise InputError(f"value {v.number} is of whole numbers, through which no relevance flows")
        seeds = self._seeds(target)
        rules = _composite(composite, self._ready.opened)
        # values that depend on no root are roots themselves, so that something arrives there
        before = {v.number for v in values if not self._carry[v.number]}
        program = read_program(self.tape, {*(r.number for r in self.roots), *before}, seeds)
        # rules that carry relevance itself share it within each sample, wherever its rows lie
        samples = RowSamples(self._layout.rows) if rules.carrier == "relevance" else None
        wanted_numbers = [v.number for v in values]
        (flows,) = walk_back(program, self.tape, [(rules, seeds)], wanted=wanted_numbers, samples=samples)
        self.tape.release()
        return {v: flows[v.number] for v in values}

    def relevance(self, value: Value | int, target: Target = None, composite: str | Composite = "plain") -> Tensor:
        """Return the relevance of each element of a value: x ⊙ m for composites of multipliers, as gradient × input
        is.

        Args:
            value: a value of the pass.
            target, composite: as for :meth:`walk_back`.
        """
        (found,) = self.relevances([value], target, composite).values()
        return found

    def relevances(
        self, values: Iterable[Value | int], target: Target = None, composite: str | Composite = "plain"
    ) -> dict[Value, Tensor]:
        """Return :meth:`relevance` at several values, from one walk."""
        rules = _composite(composite, self._ready.opened)
        flows = self.walk_back(values, target, rules)
        return {v: flow if rules.carrier == "relevance" else v.tensor * flow for v, flow in flows.items()}

    def inside(self, target: Target = None, composite: str | Composite = "attnlrp") -> Inside:
        """Return the relevance of each attention head, of each MLP and of its neurons: one walk under the composite,
        and one of plain gradients that checks which head is which.

        Args:
            target, composite: as for :meth:`walk_back`.

        Raises:
            ModelError: no attention and no MLP of a block leads to the target.
        """
        return look_inside(self, target, composite, self._ready.resolver(target).describe(self.logits(target))[1])

    def replay(self, changes: Mapping[Value, Tensor], target: Target = None) -> Tensor:
        """Return ``[B, C]``, the row of logits of the same pass with some values replaced.

        Only what depends on them is computed again; ``torch.vmap`` over this makes a batch of interventions.

        Args:
            changes: value -> what takes its place.
            target: says which row of logits is meant, as for :meth:`logits`.

        Raises:
            ModelError: the model decides by a value that depends on the changes: use :meth:`run`.
            InputError: a change has another shape than its value.
        """
        for value, tensor in changes.items():
            if tensor.shape != value.shape:
                shapes = f"{list(value.shape)}, its change {list(tensor.shape)}"
                raise InputError(f"value {value.number} has the shape {shapes}")
        end = self._pass.end
        numbers = [v.number for v in self.outputs.values()] + ([] if end is None else [end.logits])
        made = replay_tape(self.tape, {v.number: t for v, t in changes.items()}, numbers)
        now = dict(zip(numbers, made, strict=True))
        again = self._pass.output(lambda n: now[n] if n in now else self.tape[n])
        return self._ready.resolver(target).read(again)

    def run(self, changes: Mapping[Value, Callable[[Tensor], Tensor]], target: Target = None) -> Tensor:
        """Return ``[B, C]``, the row of logits of another pass in which some values are replaced as they are made.

        Slower than :meth:`replay`, and for every model: the rest of the pass may take another way.

        Args:
            changes: value -> function of the value that returns what takes its place.
            target: says which row of logits is meant, as for :meth:`logits`.
        """
        inputs, change = self._ready.inputs, {v.number: f for v, f in changes.items()}
        again = record_pass(self._ready.model, inputs.feed, inputs.samples, change)
        return self._ready.resolver(target).read(again.output()).detach()

    def _seeds(self, target: Target) -> dict[int, Tensor]:
        """∂target/∂ each output tensor that the target reads, summed over the samples."""
        resolver = self._ready.resolver(target)
        seed = self._ready.task(resolver, "record").seed(self._pass.logits(resolver.read))
        return self._pass.starts(resolver.read, seed)


def _names(values: Iterable[Value]) -> str:
    return ", ".join(str(v.number) for v in values)


_COMPOSITES: dict[str, Composite] = {
    **{str(name): rules for name, rules in COMPOSITES.items()},
    "deep_taylor": deep_taylor(),
    "lrp": layerwise(),
}


def _composite(composite: str | Composite, opened: OpenedModel) -> Composite:
    if isinstance(composite, str):
        if composite not in _COMPOSITES:
            raise unknown("there is no composite", composite, _COMPOSITES, f"Composites: {', '.join(_COMPOSITES)}")
        composite = _COMPOSITES[composite]
    with declared(opened.options.rules):
        return with_own_rules(composite)


@shows_options
def record(model: Any, inputs: Any, processor: Any = None, **options: Unpack[Keywords]) -> Record:
    """Record one forward pass of a model.

    The model runs once, as it is, in eval mode and without gradients; what it computes is kept as data. Nothing is
    registered on it, and its buffers, its inputs and torch's switches are left as they were.

    Explanations differentiate what the forward pass computes: ``detach``, ``no_grad`` and the backward functions of
    custom autograd functions play no part.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`; ``checkpoint`` has no place here.

    Returns:
        A :class:`Record`. It holds the activations of the pass until it is dropped.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`; each names the cause and the way out.
    """
    ready = open_model(model, processor, **options).prepare(inputs)
    ready.refuse_singles("record")
    if ready.opened.options.checkpoint:
        raise InputError("a record keeps every value, and checkpoint=True computes them again: take checkpoint=False")
    args, kwargs = ready.inputs.feed
    try:
        with declared(ready.opened.options.rules):
            whole = record_pass(ready.model, (args, kwargs), ready.inputs.samples, names=True)
    except FOREIGN_ERRORS as error:
        reason = unfit(ready.model, ready.inputs, error)
        if reason is None:
            raise
        raise InputError(reason) from error
    tape = whole.tape
    fed = {str(i): a for i, a in enumerate(args)} | kwargs
    inside = lambda n, name="": Value(n, tape.shapes[n], name, tape)  # noqa: E731
    named = {name: inside(tape.number(t)) for name, t in fed.items() if isinstance(t, Tensor) and tape.knows(t)}
    sides = {id(ready.inputs.side(name).tensor) for name in (ready.inputs.name, *ready.inputs.others)}
    roots = [n for name in named if id(fed[name]) in sides for n in roots_of(tape, named[name].number)]
    if not roots:
        raise InputError("the model did not read any of the inputs that could be explained")
    outputs = {name or "output": inside(n) for name, n in whole.outputs.items()}
    if not outputs:
        raise InputError("the model returned no tensor of floating-point numbers")
    return Record(tape, named, tuple(inside(n) for n in roots), outputs, ready, whole)
