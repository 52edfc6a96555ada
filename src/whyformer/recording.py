"""``record``: record one forward pass as data, to compute relevance at any value inside a model, and interventions.

    r = whyformer.record(model, pixels)
    print(r)                                       # the program, one line for each unit
    mlp = r["encoder.layer.3.mlp"]                 # the value that this module returned
    r.relevance(mlp, target=7, composite="attnlrp")
    r.replay({mlp: torch.zeros_like(mlp.tensor)})  # the logits with this value set to zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from whyformer.errors import InputError, ModelError, UnknownOperation, unknown
from whyformer.explaining import OpenedModel, prepared
from whyformer.inside import Inside, look_inside
from whyformer.methods.layout import Layout
from whyformer.methods.passes import ForwardPass, record_pass
from whyformer.models.isolation import Snapshot
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.rules.registered import custom_rules, with_custom_rules
from whyformer.tape.attentions import Attention
from whyformer.tape.program import Program, read_program
from whyformer.tape.rows import RowSamples
from whyformer.tape.streams import Block
from whyformer.tape.units import Unit, reach, roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import Composite, walk_back
from whyformer.tape.walking import replay as replay_tape
from whyformer.targets import Target

__all__ = ["Record", "Value", "record"]


@dataclass(frozen=True, eq=False)
class _Stored:
    """The values of a pass, with the contents of the tensors that it read."""

    tape: Tape
    leaves: Snapshot
    weights: Mapping[str, Tensor]

    def refuse_changes(self, model: nn.Module | None = None) -> None:
        """Raise if walks would mix the activations with other weights, or if a new pass of ``model`` has others."""
        changed = self.leaves.changed()
        if changed is None and model is not None:
            # offloaded weights are on the meta device between passes
            named = ((n, p) for n, p in model.named_parameters() if not p.is_meta)
            changed = next((f"the parameter '{n}'" for n, p in named if self.weights.get(n) is not p), None)
        if changed is not None:
            raise ModelError(
                f"{changed} was changed after the pass was recorded, so the result would mix the values of two passes: "
                "record again, or record a copy of the model before you change it: "
                "whyformer.record(copy.deepcopy(model), inputs)"
            )

    def read(self, number: int) -> Tensor:
        """Return a copy of a value, because a write to the value itself would change later results."""
        if not self.tape.holds(number):
            self.refuse_changes()
        return self.tape[number].clone()


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the recorded pass. Values with the same number are equal.

    Attributes:
        number: its number on the tape.
        shape: its shape.
        module: path of the module that returned it or made the call; "" for the model itself.
    """

    number: int
    shape: torch.Size
    module: str
    _stored: _Stored = field(repr=False)

    @property
    def tensor(self) -> Tensor:
        """A copy of the tensor, recomputed if the tape does not store it.

        Raises:
            ModelError: it must be recomputed, and a tensor that the pass read was changed since.
        """
        return self._stored.read(self.number)

    def __index__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self.number == other.number if isinstance(other, Value) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.number)


@dataclass(frozen=True, eq=False)
class Record:
    """One recorded forward pass of a model; see :func:`record`.

    The methods that return logits or relevance, and :meth:`attention_map`, raise a ModelError if a parameter, a buffer
    or an input that the pass read was changed since.

    Attributes:
        tape: the calls and values of the pass.
        inputs: the tensors passed to the model, by name or position.
        roots: the values at which relevance of the inputs is read: floating-point inputs, and the embeddings of ids.
        outputs: the tensors that the model returned, by name.
    """

    tape: Tape
    inputs: Mapping[str, Value]
    roots: tuple[Value, ...]
    outputs: Mapping[str, Value]
    _ready: Prepared = field(repr=False)
    _pass: ForwardPass = field(repr=False)
    _stored: _Stored = field(repr=False)

    # -- structure of the pass
    @cached_property
    def program(self) -> Program:
        """The units between the roots and all outputs."""
        return read_program(self.tape, [v.number for v in self.roots], [v.number for v in self.outputs.values()])

    @cached_property
    def _carry(self) -> list[bool]:
        """For each value, whether it depends on a root."""
        return reach(self.tape, [v.number for v in self.roots])

    @property
    def units(self) -> list[Unit]:
        """The units of the program, in the order of execution."""
        return self.program.units

    @cached_property
    def _layout(self) -> Layout:
        """The layout for the default target; for a model without a default row of logits, for any output."""
        with suppress(InputError):
            return self.layout(None)
        return self._pass.layout(self._ready.inputs.sides)

    def layout(self, target: Target) -> Layout:
        """Return the rows of the values, and the attentions, streams and blocks on paths to the logits of a target."""
        return self._pass.layout(self._ready.inputs.sides, self._ready.resolver(target).read)

    @property
    def attentions(self) -> list[Attention]:
        """The attentions, in the order of execution, with the numbers of their map, scores and product, and their query
        and key rows."""
        return list(self._layout.attentions)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all streams, with the numbers of their entry and exit, and their attentions."""
        return [block for stream in self._layout.streams for block in stream.blocks]

    def attention_map(self, attention: Attention, values: Callable[[int], Tensor] | None = None) -> Tensor:
        """Return the map of an attention as ``[B, H, Q, K]``.

        Args:
            attention: one of :attr:`attentions`.
            values: function that takes the number of a map and returns a tensor of the same shape, such as a flow,
                which is returned in the layout of the map; None for the map itself.

        Raises:
            ModelError: it is unknown to which sample, head, query or key the elements of the map belong.
        """
        return attention.arrange(*map(values or self._stored.read, attention.maps))

    @property
    def modules(self) -> list[str]:
        """Paths of the modules whose outputs are values of the pass."""
        return sorted(self.tape.outputs)

    def __str__(self) -> str:
        """The program, with a line for each unit: number of its exit, kind, call, shape, entries and module."""
        ends = f"{_names(self.roots)} and {_names(self.outputs.values())}"
        first = f"{len(self.tape.calls)} calls, {len(self.units)} units between {ends}"
        return "\n".join([first, *self.program.lines(self.tape.modules)])

    def value(self, place: Value | int | str) -> Value:
        """Return a value by its number on the tape, or by the path of the module that returned it.

        Raises:
            InputError: there is no value with this number; or as :meth:`__getitem__`.
        """
        if isinstance(place, Value):
            return place
        if isinstance(place, str):
            return self[place]
        if not 0 <= place < len(self.tape):
            raise InputError(f"the pass has the values 0 to {len(self.tape) - 1}, not {place}")
        maker = self.tape.maker.get(place)
        module = "" if maker is None else self.tape.modules.get(maker.number, "")
        return Value(place, self.tape.shapes[place], module, self._stored)

    def runs(self, module: str) -> list[Value]:
        """Return the outputs of a module, one for each run; if it returned several tensors, the first.

        Raises:
            InputError: no module that ran has this path, or it returned no floating-point tensor.
        """
        if module not in self.tape.outputs:
            start = "no module that ran has the path"
            raise unknown(start, module, self.tape.outputs, "print(record.modules) lists them.")
        firsts = [next((n for n in numbers if self.tape.floating(n)), None) for numbers in self.tape.outputs[module]]
        if None in firsts:
            raise InputError(f"the module '{module}' returned no floating-point tensor")
        return [Value(n, self.tape.shapes[n], module, self._stored) for n in firsts if n is not None]

    def __getitem__(self, module: str) -> Value:
        """Return the output of a module; if it returned several tensors, the first.

        Raises:
            InputError: as :meth:`runs`, or the module ran more than once.
        """
        runs = self.runs(module)
        if len(runs) > 1:
            raise InputError(f"the module '{module}' ran {len(runs)} times: use one of record.runs({module!r})")
        return runs[0]

    # -- walks
    def logits(self, target: Target = None) -> Tensor:
        """Return ``[B, C]``, the logits to which a target refers.

        Args:
            target: as for :func:`whyformer.explain`.
        """
        self._stored.refuse_changes()
        return self._ready.resolver(target).read(self._pass.output()).detach()

    def walk_back(
        self, values: Iterable[Value | int | str], target: Target = None, composite: str | Composite = "plain"
    ) -> dict[Value, Tensor]:
        """Propagate from the target back to some values.

        Args:
            values: values of the pass, their numbers, or the paths of the modules that returned them.
            target: the class or output to explain, as for :func:`whyformer.explain`.
            composite: the rules, by name ("deep_taylor", "lrp", or a key of
                :data:`whyformer.rules.multipliers.COMPOSITES`) or as an object. "plain" is the gradient.

        Returns:
            For each value, a tensor of its shape: a multiplier m, or relevance if the composite propagates relevance
            itself; zeros if nothing arrives.

        Raises:
            InputError: the target does not fit the model's output, a composite or value does not exist, or a value is
                not floating-point, or lies inside a unit to which the composite applies a rule that gives the parts of
                the unit no relevance.
            ModelError: a tensor that the pass read was changed since.
        """
        self._stored.refuse_changes()
        traced = [self.value(v) for v in values]
        for v in traced:
            if not self.tape.floating(v.number):
                raise InputError(f"value {v.number} is not floating-point, so no relevance flows through it")
        seeds = self._seeds(target)
        rules = _composite(composite, self._ready.opened)
        flows = self._flows({v.number for v in traced}, seeds, rules)
        self.tape.release()
        return {v: flows[v.number] for v in traced}

    def _flows(self, numbers: set[int], seeds: dict[int, Tensor], rules: Composite) -> dict[int, Tensor]:
        """Return the flows at some values."""
        # rules that propagate relevance itself normalise it within each sample, wherever its rows lie
        samples = RowSamples(self._layout.rows) if rules.propagates == "relevance" else None

        def program(leaves: Iterable[int] = (), between: Iterable[int] = ()) -> Program:
            return read_program(self.tape, {*(r.number for r in self.roots), *leaves}, seeds, between)

        def walk(program: Program, observed: Iterable[int]) -> dict[int, Tensor]:
            return walk_back(program, self.tape, [(rules, seeds)], observed=observed, samples=samples)[0]

        # values that depend on no root, such as weights, become roots
        leaves = {n for n in numbers if not self._carry[n]}
        if not rules.rules:  # the gradient at a value does not depend on how calls are joined to units
            joined = any(program(leaves).unit_around(n, self.tape) for n in numbers)
            return walk(program(leaves, numbers if joined else ()), numbers)
        # further roots and smaller units change the rules, so each such value must not affect the others
        inside = {n: unit for n in numbers - leaves if (unit := program().unit_around(n, self.tape))}
        flows = walk(program(), (numbers - leaves - inside.keys()).union(*(unit.entries for unit in inside.values())))
        for leaf in leaves:
            flows |= walk(program([leaf], [leaf]), [leaf])
        for n, unit in inside.items():
            with suppress(UnknownOperation):
                parts = walk(program(between=[n, *unit.entries]), [n, *unit.entries])
                if all(_agree(parts[entry], flows[entry]) for entry in unit.entries):
                    flows[n] = parts[n]
            if n not in flows:
                raise InputError(
                    f"value {n} lies inside a unit of {len(unit.calls)} calls ({unit.kind}), to which {rules.name} "
                    f"applies one rule, so value {n} has no relevance of its own: use value "
                    f"{' or '.join(map(str, unit.entries))}, the input of the unit, value {unit.exit}, its output, or "
                    'the composite "plain", the gradient'
                )
        return flows

    def relevance(
        self, value: Value | int | str, target: Target = None, composite: str | Composite = "plain"
    ) -> Tensor:
        """Return the relevance of each element of a value x: x ⊙ m if the composite propagates multipliers m, as in
        gradient × input.

        Args:
            value: a value of the pass, its number, or the path of the module that returned it.
            target, composite: as for :meth:`walk_back`.

        Returns:
            A tensor of the shape of the value.
        """
        (relevance,) = self.relevances([value], target, composite).values()
        return relevance

    def relevances(
        self, values: Iterable[Value | int | str], target: Target = None, composite: str | Composite = "plain"
    ) -> dict[Value, Tensor]:
        """Return the :meth:`relevance` of several values, computed in one walk, with a further walk for each weight and
        each value inside a unit, if the composite has rules."""
        rules = _composite(composite, self._ready.opened)
        flows = self.walk_back(values, target, rules)
        return {v: flow if rules.propagates == "relevance" else self.tape[v.number] * flow for v, flow in flows.items()}

    def inside(self, target: Target = None, composite: str | Composite = "attnlrp") -> Inside:
        """Return the relevance of each attention head, each MLP and its neurons. This takes one walk with the composite
        and one with plain gradients, which checks the assignment of heads.

        Args:
            target, composite: as for :meth:`walk_back`.

        Raises:
            ModelError: no block with an attention or an MLP leads to the target.
        """
        return look_inside(self, target, composite, self._ready.resolver(target).describe(self.logits(target))[1])

    def replay(self, changes: Mapping[Value | int | str, Tensor], target: Target = None) -> Tensor:
        """Return ``[B, C]``, the logits of the recorded pass with some values replaced.

        Only calls that depend on the changes are repeated. ``torch.vmap`` over this method computes a batch of
        interventions.

        Args:
            changes: maps a value, its number, or the path of the module that returned it, to its replacement, a tensor
                of the same shape.
            target: selects the logits, as for :meth:`logits`.

        Raises:
            ModelError: the model decides by a value that depends on the changes: use :meth:`run`; or a tensor that the
                pass read was changed since.
            InputError: the shape of a replacement differs from that of its value.
        """
        self._stored.refuse_changes()
        replaced = {self.value(place): tensor for place, tensor in changes.items()}
        for value, tensor in replaced.items():
            if tensor.shape != value.shape:
                shapes = f"{list(value.shape)}, and its replacement {list(tensor.shape)}"
                raise InputError(f"value {value.number} has the shape {shapes}")
        end = self._pass.end
        numbers = [v.number for v in self.outputs.values()] + ([] if end is None else list(end.reads))
        tensors = replay_tape(self.tape, {v.number: t for v, t in replaced.items()}, numbers)
        values = dict(zip(numbers, tensors, strict=True))
        output = self._pass.output(lambda n: values[n] if n in values else self.tape[n])
        return self._ready.resolver(target).read(output)

    def run(self, changes: Mapping[Value | int | str, Callable[[Tensor], Tensor]], target: Target = None) -> Tensor:
        """Return ``[B, C]``, the logits of a new pass in which some values are replaced as they are computed.

        Slower than :meth:`replay`, but works for every model: after a change, the model may take another path.

        Args:
            changes: maps a value, its number, or the path of the module that returned it, to a function that takes its
                tensor and returns the replacement.
            target: selects the logits, as for :meth:`logits`.

        Raises:
            ModelError: a parameter was changed or replaced since.
        """
        self._stored.refuse_changes(self._ready.model)
        inputs, change = self._ready.inputs, {self.value(place).number: f for place, f in changes.items()}
        changed = record_pass(self._ready.model, inputs.feed, inputs.samples, change)
        return self._ready.resolver(target).read(changed.output()).detach()

    def _seeds(self, target: Target) -> dict[int, Tensor]:
        """Return the gradient of the target, summed over the samples, with respect to each output that it reads."""
        resolver = self._ready.resolver(target)
        seed = self._ready.task(resolver, "record").seed(self._pass.logits(resolver.read))
        return self._pass.starts(resolver.read, seed)


def _agree(first: Tensor, second: Tensor) -> bool:
    """Return True if two flows at a value differ by rounding only."""
    return bool((first - second).norm() <= torch.finfo(first.dtype).eps ** 0.5 * second.norm())


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
    with custom_rules(opened.options.rules):
        return with_custom_rules(composite)


@shows_options
def record(model: Any, inputs: Any, processor: Any = None, **options: Unpack[Keywords]) -> Record:
    """Record one forward pass of a model.

    The unmodified model runs once, in eval mode and without gradients, and all of its operations and values are
    recorded. Nothing is registered on the model; its buffers, its inputs and the global settings of torch are restored.

    Relevance is propagated through what the forward pass computes: ``detach``, ``no_grad`` and the backward functions
    of custom autograd functions have no effect.

    Args:
        model, inputs, processor, **options: as for :func:`whyformer.explain`; ``checkpoint=True`` is not supported.

    Returns:
        A :class:`Record`. It holds the activations of the pass in memory.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`, with the cause and a way out.
    """
    ready = prepared(model, inputs, processor, **options)
    ready.refuse_singles("record")
    if ready.opened.options.checkpoint:
        raise InputError("record stores every value, so it does not support checkpoint=True: use checkpoint=False")
    args, kwargs = ready.inputs.feed
    passing = lambda task: record_pass(ready.model, (args, kwargs), ready.inputs.samples, names=True)  # noqa: E731
    forward_pass: ForwardPass = ready.work(ready.task(name="record"), passing)
    tape = forward_pass.tape
    arguments = {str(i): a for i, a in enumerate(args)} | kwargs
    stored = _Stored(tape, Snapshot(_leaves(tape, ready.model, arguments)), dict(ready.model.named_parameters()))
    value = lambda n, name="": Value(n, tape.shapes[n], name, stored)  # noqa: E731
    named = {name: value(tape.number(t)) for name, t in arguments.items() if isinstance(t, Tensor) and tape.knows(t)}
    sides = {id(side.tensor) for side in ready.inputs.sides.values()}
    roots = [n for name in named if id(arguments[name]) in sides for n in roots_of(tape, named[name].number)]
    if not roots:
        raise InputError("the model did not read any of the inputs that could be explained")
    outputs = {name or "output": value(n) for name, n in forward_pass.outputs.items()}
    if not outputs:
        raise InputError("the model returned no floating-point tensor")
    return Record(tape, named, tuple(value(n) for n in roots), outputs, ready, forward_pass, stored)


def _leaves(tape: Tape, model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return {description: tensor} of the tensors that a pass read and that other code can write to."""
    names = {id(argument): f"the input '{name}'" for name, argument in arguments.items()}
    names |= {id(p): f"the parameter '{n}'" for n, p in model.named_parameters()}
    names |= {id(b): f"the buffer '{n}'" for n, b in model.named_buffers()}
    leaves = sorted(tape.leaves - tape.written)
    return {names.get(id(tape[n]), f"value {n}, which the model read,"): tape[n] for n in leaves}
