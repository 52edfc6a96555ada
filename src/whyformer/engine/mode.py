"""The interception: sees every torch operation of one forward pass and runs it by its rule.

Carrying: a tensor that requires grad carries relevance, because parameters and foreign leaves are detached on the way
into each operation. So "multiply by a constant" and "multiply two branches" tell themselves apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whyformer.engine import adjoints, audit, packed
from whyformer.engine.adjoints import without_graph
from whyformer.engine.attention import AttentionCapture, samples_first
from whyformer.engine.declared import gather, run_declared, watch_function
from whyformer.engine.decompositions import DECOMPOSITIONS, NORMS, PARTS, PRODUCTS, written_attention
from whyformer.engine.functions import LookedInto
from whyformer.engine.isolation import here
from whyformer.engine.operations import Operation, is_in_place, operation, operation_name, out_of_place
from whyformer.engine.probes import Edit, Features, Flows, Maps, Probe, Projections, asked
from whyformer.engine.readings import Reading, carries, is_map, is_parameter, is_statistic, is_view, largest, tensors
from whyformer.engine.regions import RegionRun, kind_row, norm_of_values
from whyformer.errors import ModelError, Strayed
from whyformer.models.structure import INFERENCE
from whyformer.program.blocks import ProgramBlock
from whyformer.program.calls import Gradients
from whyformer.program.facts import Facts, Step
from whyformer.program.operations import tensors_in
from whyformer.rules.core import NATIVE, Composite, Pass, Ruled, before_change

_LISTED = (list, tuple)


@dataclass
class Interception(AttentionCapture, TorchFunctionMode):
    """The mode of one forward pass over ``model``; see :func:`whyformer.engine.run.record`."""

    model: nn.Module
    composite: Composite
    run: Pass
    probes: tuple[Probe, ...] = ()
    roots: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    muted: int = 0
    aside: int = 0
    attentions: int = 0
    block: int | None = None
    last: bool = False
    grouped: bool = False
    attention_blocks: list[int | None] = field(default_factory=list)
    norm_before: int | None = None
    entered: torch.Size = field(default_factory=torch.Size)
    block_input: Tensor | None = None
    statistics: bool = False
    waiting: int = 0
    watch: Callable[..., Any] | None = None
    facts: Facts | None = None
    number: int = 0
    depth: int = 0
    decomposed: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.own: set[int] = {id(t) for t in self.roots}
        self.maps, self.flows, self.edit = asked(self.probes, Maps), asked(self.probes, Flows), asked(self.probes, Edit)
        self.features, self.projections = asked(self.probes, Features), asked(self.probes, Projections)
        self.declared = gather()
        self.kept = packed.kept(self.model)
        self.open: dict[int, RegionRun | None] = {}
        self.gradients, self.looked_into = Gradients(), LookedInto(self.declared.functions)
        self.inputs: frozenset[int] = frozenset()
        self.functions = False
        self.entries: dict[int, Tensor] = {}
        self.borders: dict[int, list[Callable[[Tensor], Any]]] = {}
        self.transformed = torch._C._are_functorch_transforms_active()
        if self.flows is not None:
            self.anchor = torch.zeros((), requires_grad=True)
            self.add_root(self.anchor)

    def __hash__(self) -> int:
        return id(self)

    def add_root(self, tensor: Tensor) -> Tensor:
        """Let the graph begin at this leaf."""
        self.roots.append(tensor)
        self.own.add(id(tensor))
        return tensor

    # -- dispatch --------------------------------------------------------------------------------------------
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = operation_name(func), kwargs or {}
        row = operation(name)
        inside = here.run is self
        number = self._count(row) if inside and self.facts is not None and not self.depth and not self.aside else -1
        if inside:
            self.gradients.follow(name, args)
        if not inside or self.muted or row.kind == "silent":
            result = func(*args, **kwargs)
            if name in ("detach", "data") and inside and is_parameter(args[0]):
                result._whyformer_parameter = True
            return result if self.watch is None else self.watch(self, name, func, args, kwargs, result)
        if torch._C._are_functorch_transforms_active() and not self.transformed:  # the audit sees the result
            return func(*args, **kwargs)
        in_function = self.gradients.in_function()
        self.functions = self.functions or in_function
        self.depth += 1
        try:
            if self.looked_into.results:
                args, kwargs = self.looked_into.instead(args), self.looked_into.instead(kwargs)
            if not in_function or not self.composite.audit or self.facts is None or number in self.facts.opaque:
                result = self._run(number, name, row, func, args, kwargs)
                return result if number not in self.borders else self._at_border(number, name, result)
            with torch.enable_grad():
                return self.looked_into.cut(name, self._run(number, name, row, func, args, kwargs))
        finally:
            self.depth -= 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Calls of our own, which are none of the model's."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def border(self, block: ProgramBlock, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call ``before`` and ``after`` as hooks of a module around a part of the program."""
        if self.facts is None or block.number >= len(self.facts.blocks):
            raise Strayed
        first, last = self.facts.blocks[block.number]

        def enter(hidden: Tensor) -> Any:
            changed = before(block, (hidden,), {})
            return None if changed is None else changed[0][0]

        self.borders.setdefault(first, []).append(enter)
        self.borders.setdefault(last, []).insert(0, lambda hidden: after(block, (), {}, hidden))

    def _at_border(self, number: int, name: str, result: Tensor) -> Tensor:
        """What leaves a block and enters the next."""
        made = result
        with self:
            for hook in self.borders[number]:
                changed = hook(made)
                made = made if changed is None else changed
        if made is not result and is_in_place(name):  # the model has it under its old name
            self.looked_into.stand_in(result, made)
        return made

    def _count(self, row: Operation) -> int:
        """The number of a call, which has to be the one that was written down.

        Raises:
            Strayed: it is another one.
        """
        if row.kind == "silent":
            return -1
        assert self.facts is not None
        number, self.number = self.number, self.number + 1
        if number >= len(self.facts.calls) or self.facts.calls[number] != row.name:
            raise Strayed
        return number

    def ended(self) -> None:
        """The pass is over.

        Raises:
            Strayed: calls that were written down have not come.
        """
        if self.facts is not None and self.number != len(self.facts.calls):
            raise Strayed

    def _run(
        self, number: int, name: str, row: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch._C._is_any_autocast_enabled() and self.composite.carrier == "relevance":
            with torch._C._DisableAutocast():
                return self._run(number, name, row, func, args, kwargs)
        if kwargs and row.kind not in ("", "view"):
            for place, word in enumerate(("input", "other")):
                if len(args) == place and word in kwargs:
                    args, kwargs = (*args, kwargs[word]), {k: v for k, v in kwargs.items() if k != word}
        step = None if number < 0 or self.facts is None else self.facts.steps.get(number)
        run = None if step is None else self._region(step, number, args, kwargs)
        if step is not None and run is not None:
            if is_in_place(name) or kwargs.get("inplace") is True:
                before_change(args[0])
            if run.native:
                args, kwargs = self._own_only(args, kwargs)
                result = func(*args, **kwargs)
                for tensor in tensors((result,)):
                    self._see(tensor)
            else:
                result = without_graph(func, args, kwargs)
            run.note(number, name, func, args, kwargs, result)
            return result if number != step.leaves else self._leave(run, name, args, result)
        rearranged = self._rearranged(number, row, func, args, kwargs) if number >= 0 else NotImplemented
        if rearranged is not NotImplemented:
            return rearranged
        result = self._dispatch(name, row, func, args, kwargs)
        if step is not None and not self.composite.audit:
            self._pass_by(step, number, func, args, kwargs, result)
        if torch.is_grad_enabled():
            for tensor in tensors((result, *args[: is_in_place(name)])):
                self._see(tensor)
        return result if self.watch is None else self.watch(self, name, func, args, kwargs, result)

    def _rearranged(
        self, number: int, row: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An attention by a map that stands second, or with heads before samples, as one ``[B, H, Q, K]`` @ values;
        NotImplemented for any other call."""
        assert self.facts is not None
        place = self.facts.maps.get(number, -1)
        if place >= 0:
            tensors_in((*args, *kwargs.values()))[place]._whyformer_map = True  # type: ignore[attr-defined]
        if place == 1 and row.kind == "matrix product":
            with self:
                return torch.matmul(args[1].mT, args[0].mT).mT
        if not self.probes or self.run.batch == 1:
            return NotImplemented
        if number in self.facts.scattered:
            raise ModelError(
                "an attention of this model keeps several samples in one axis, in an order that could not be "
                "measured, so which map belongs to which sample is unknown: explain one sample at a time"
            )
        if number not in self.facts.heads_first:
            return NotImplemented
        with self:
            return samples_first(func, args, kwargs, self.run.batch)

    def _see(self, tensor: Tensor) -> None:
        """The mode knows what it was computed from."""
        if tensor.requires_grad:
            base = tensor if tensor._base is None else tensor._base  # other views of it may come to carry too
            if not self._foreign(base):
                base._whyformer_seen = True  # type: ignore[attr-defined]

    def _region(self, step: Step, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionRun | None:
        """The run of the region that a call is part of; None where nothing carries into it."""
        if step.leaves not in self.open:
            run = None
            given = tensors_in((*args, *kwargs.values()))
            if number == step.enters[0] and self.composite.audit and self.carries((given[step.enters[1]],), {}):
                read = given[step.enters[1]]
                audit.hidden(self, (read,))
                row = kind_row(step.region.kind)
                native = self.composite.rule(row.name, row.kind) is NATIVE
                run = RegionRun(step, read.clone() if step.writes and not native else read, native, inner=[read])
                self._see(run.entry)
            self.open[step.leaves] = run
        run = self.open[step.leaves]
        if number == step.leaves:
            del self.open[number]
        return run

    def _pass_by(self, step: Step, number: int, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """A region of a pass without rules: its calls are the model's own, a norm or a map is noted where it ends."""
        region = step.region
        if number == step.enters[0]:
            self.entries[number] = tensors_in((*args, *kwargs.values()))[step.enters[1]]
        if number == step.leaves and step.enters[0] in self.entries:
            entry = self.entries.pop(step.enters[0])
            if "norm" in region.kind:
                self._note_norm(result)
                if self.projections is not None and not self.aside and region.axis == -1:
                    written = norm_of_values(region, entry, result)
                    self.projections.follow(region.kind, (entry,), {}, result, self._post_norm, written)
            elif region.kind == "softmax":
                self._note("softmax", (entry,), {"dim": region.axis}, result)
                if self.watch is not None:
                    self.watch(self, "softmax", func, (entry,), {"dim": region.axis}, result)

    def _leave(self, run: RegionRun, name: str, args: tuple[Any, ...], result: Tensor) -> Tensor:
        """The exit of a region: its value, with the rule of the one call that the region stands for."""
        row, reading, function, given, named = run.as_call(result)
        made, entry, run.entry = result, run.entry, run.entry.detach()  # or its graph would hold itself
        if not run.native:
            made = self._by_rule(row.name, row, reading, function, (entry,), {})
            self._see(made)
        self._mark(row.name, reading, (entry,), {}, made)
        made = self._note(row.name, given, named, made)
        made = made if self.watch is None else self.watch(self, row.name, function, given, named, made)
        if is_in_place(name) and not run.native:
            with self:
                made = args[0].copy_(made)
            self._see(args[0])
        return made

    def _dispatch(self, name: str, row: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in DECOMPOSITIONS:
            self.decomposed = tensors(args)
            with self:
                return DECOMPOSITIONS[name](*args, **kwargs)
        carried = self.carries(args, kwargs)
        if carried and self.composite.audit and name in self.declared.operations:
            declared = self.declared.operations[name]
            args, kwargs = self._own_only(args, kwargs)
            audit.hidden(self, args)
            result = run_declared(self, declared, name, func, args, kwargs)
            return self._note(declared.like or name, args, kwargs, result)
        if carried and self.composite.audit and name in NORMS:
            with self:
                result = NORMS[name](*args, **kwargs)
            if result is not NotImplemented:
                return result
        followed = self.projections is not None and any(hasattr(t, "_whyformer_mixed") for t in tensors(args))
        if name in PRODUCTS and (carried or followed or any(map(is_map, tensors(args)))):
            with self:
                result = PRODUCTS[name](*args, **kwargs)
            if result is not NotImplemented:
                return result
        attention = None
        if row.kind == "attention":
            if carried and self.composite.rule(name, row.kind) is None:
                return self._unknown(name, name, func, *self._own_only(args, kwargs))
            bias = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if bias is not None and self.carries((bias,), {}):  # made of the input: a branch of its own
                with self:
                    return written_attention(*args, **kwargs)
            attention = self._fused_attention
        elif row.kind == "matrix product" and is_map(args[0]):
            attention = self._written_attention
        if attention is not None:
            mixed: Any = attention(func, *self._own_only(args, kwargs))
            if not self.aside and (not self.grouped or self.block is not None):
                mixed._whyformer_mixed = ("mixed", self.attentions - 1)
            return mixed
        if not carried:
            result = without_graph(func, args, kwargs)
            if self.kept:
                packed.note(self.kept, args, kwargs, result)
            picked = isinstance(result, Tensor) and not isinstance(result, nn.Parameter)
            if row.kind == "view" and picked and args and is_parameter(args[0]):
                result._whyformer_picked = name == "__getitem__" and isinstance(args[1], Tensor)
            if not isinstance(result, nn.Parameter) and self._makes_weights(row, args):
                for tensor in tensors((result,)):
                    if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                        tensor._whyformer_parameter = True  # type: ignore[attr-defined]
            return self._note(name, args, kwargs, result)
        args, kwargs = self._own_only(args, kwargs)
        audit.hidden(self, args)
        if self.composite.carrier == "relevance" and row.kind and any(map(packed.is_wrapped, args)):
            args = packed.unwrapped(name, func, args)
        return self._note(name, args, kwargs, self._carried(name, row, func, args, kwargs))

    def _makes_weights(self, row: Operation, args: tuple[Any, ...]) -> bool:
        """Whether this call computes weights from weights; one of our own, or where no facts are followed, whether it
        rearranges some."""
        if self.facts is not None and self.depth == 1:
            return self.number - 1 in self.facts.weights
        return row.kind == "view" and bool(args) and is_parameter(args[0]) and len(tensors(args)) == 1

    def _carried(self, name: str, row: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation by its rule, and know a norm's statistic again."""
        if is_in_place(name) or kwargs.get("inplace") is True:
            before_change(args[0])
        if not self.composite.audit:
            result = self._native(name, func, args, kwargs)
            if not row.kind:
                audit.without_derivative(self, name, result)
            return adjoints.in_order(name, result)
        reading = row.read(row, func, args, kwargs)
        if reading.role == "layer" and self.number - 1 in self.inputs and (
            self.depth == 1 or is_view(reading.operands[0], self.decomposed)  # not the last layer of an attention
        ):
            reading.role = "input layer"
        result = adjoints.in_order(name, self._by_rule(name, row, reading, func, args, kwargs))
        self._mark(name, reading, args, kwargs, result)
        if row.read is largest:
            for tensor in tensors((result,)):
                tensor._whyformer_largest = tensor.numel() < args[0].numel()  # type: ignore[attr-defined]
        return result

    def _mark(self, name: str, reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Statistics, and what activations gave, are known again where they scale a branch."""
        if reading.kind == "statistic" or (self.statistics and self._of_statistics(name, reading, args, kwargs)):
            self.statistics = True
            for tensor in tensors((result,)):
                tensor._whyformer_statistic = True  # type: ignore[attr-defined]
        elif reading.kind == "activation":
            for tensor in tensors((result,)):
                tensor._whyformer_activated = True  # type: ignore[attr-defined]

    def _of_statistics(self, name: str, reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all that carries into it are statistics, and it mixes no channels."""
        taken = args[1:2] if name == "copy_" else args[:1] if name.endswith("_as") else (*args, *kwargs.values())
        given = [t for t in tensors(taken) if t.requires_grad]
        return all(map(is_statistic, given)) and reading.role not in ("layer", "input layer", "weighted sum", "product")

    def _by_rule(
        self, name: str, row: Operation, reading: Reading, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        composite = self.composite
        rule = composite.rule(reading.role, reading.kind)
        several = row.name in PARTS and len({id(t) for t in tensors((*args, *kwargs.values())) if carries(t)}) > 1
        if rule is NATIVE and not several:
            return self._native(name, func, args, kwargs)
        if is_in_place(name) or kwargs.get("inplace") is True:
            plain = out_of_place(name) if is_in_place(name) else func
            if plain is None:
                return self._unknown(name, name, func, args, kwargs)
            # the same out of place, copied into the target, so that aliases see it and relevance follows
            with self:
                value = plain(args[0].clone(), *args[1:], **{k: v for k, v in kwargs.items() if k != "inplace"})
            return args[0].copy_(value)
        parts = reading.instead or (partial(PARTS[name], *args, **kwargs) if name in PARTS else None)
        if parts is not None:
            with self:
                return parts()
        carried = {id(t) for t in tensors((*args, *kwargs.values())) if t.requires_grad}
        if rule is None or not carried <= {id(o) for o in reading.operands}:
            return self._unknown(row.name, reading.role, func, args, kwargs)
        if rule.share != 1 and rule.gradient is None:
            return rule.shared(func(*args, **kwargs))
        operands = rule.held(reading.operands)
        if not any(map(carries, operands)):
            return without_graph(reading.compute, operands, {})
        return Ruled.apply(rule, self.run, reading.compute, reading.info, *operands)

    def _native(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By its ordinary adjoint."""
        result = adjoints.cheaper(name, func, args, kwargs, self.last)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _unknown(self, name: str, role: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation without a rule: it runs, and is refused where relevance arrives at it."""
        given = (*args, *kwargs.values())
        before = {t.grad_fn for t in tensors(given)}
        result = func(*args, **kwargs)
        audit.without_derivative(self, name, result)
        audit.unknown(self, name, role, result, given, before)
        return result

    def passes_as_declared(self, node: Any, value: Tensor) -> bool:
        """Whether a node of a custom autograd function has a rule, which it gets here."""
        declared = self.declared.functions.get(getattr(node, "_forward_cls", nn.Module))
        return declared is not None and watch_function(self, declared, node, value)

    # -- what carries ----------------------------------------------------------------------------------------
    def _foreign(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return False
        return id(value) not in self.own if value.is_leaf else self.functions and self._of_weights_alone(value.grad_fn)

    def _of_weights_alone(self, node: Any) -> bool:
        """Whether autograd noted an autograd function that only weights lead into."""
        if not hasattr(node, "_forward_cls"):
            return False
        leaves = [getattr(parent, "variable", None) for parent, _ in node.next_functions if parent is not None]
        return all(leaf is not None and id(leaf) not in self.own for leaf in leaves)

    def carries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled():
            if torch.is_inference_mode_enabled() and any(t.requires_grad for t in tensors((*args, *kwargs.values()))):
                raise ModelError(INFERENCE)
            return False
        own = self.own
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                inner = value.requires_grad and (not value.is_leaf or id(value) in own)
                if inner and not (self.functions and self._foreign(value)):
                    return True
            elif isinstance(value, _LISTED) and self.carries(tuple(tensors((value,))), {}):
                return True
        return False

    def _own_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Parameters and other foreign leaves detached; nothing of the model is changed."""

        def own(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not (value.requires_grad and self._foreign(value)):
                    return value
                detached: Any = value.detach()
                detached._whyformer_parameter = is_parameter(value)
                return detached
            if isinstance(value, _LISTED) and any(isinstance(v, Tensor) for v in value):
                return type(value)([own(v) for v in value]) if type(value) in (list, tuple) else value
            return value

        return tuple([own(a) for a in args]), {k: own(v) for k, v in kwargs.items()} if kwargs else kwargs
