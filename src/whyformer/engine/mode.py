"""The interception: sees every torch operation of one forward pass and runs it by its rule.

Carrying: a tensor that requires grad carries relevance, because parameters and foreign leaves are detached on the way
into each operation. So "multiply by a constant" and "multiply two branches" tell themselves apart.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whyformer.engine import operations as ops
from whyformer.engine.attention import AttentionCapture, is_map
from whyformer.engine.decompositions import DECOMPOSITIONS, RELEVANCE_DECOMPOSITIONS, einsum_product
from whyformer.engine.isolation import here
from whyformer.engine.operations import tensors
from whyformer.engine.probes import Edit, Features, Flows, Maps, Probe, Projections, asked
from whyformer.errors import ModelError, UnknownOperation
from whyformer.rules.core import Composite, Pass, Rule, Ruled
from whyformer.rules.relevance import elementary

_PRODUCT_WITH_CONSTANT = Rule("product", elementary.z_rule)
_CHECKPOINTS = ("CheckpointFunctionBackward", "CheckpointFunctionBackwardBackward")


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
    grouped: bool = False
    attention_blocks: list[int | None] = field(default_factory=list)
    norm_before: int | None = None
    block_input: Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.own: set[int] = {id(t) for t in self.roots}
        self.maps, self.flows, self.edit = asked(self.probes, Maps), asked(self.probes, Flows), asked(self.probes, Edit)
        self.features, self.projections = asked(self.probes, Features), asked(self.probes, Projections)
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
        kwargs = kwargs or {}
        name = ops.operation_name(func)
        if here.run is not self or self.muted or name in ops.SILENT:
            return func(*args, **kwargs)
        if name == "__get__":  # most attributes (shape, dtype ...) are no operation; .T is
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor):
                return value
        result = self._dispatch(name, func, args, kwargs)
        if torch.is_grad_enabled():
            for tensor in tensors((result, *args[: ops.is_in_place(name)])):
                if tensor.requires_grad:  # of a view all of its base: other views of that may come to carry too
                    (tensor if tensor._base is None else tensor._base)._whyformer_seen = True  # type: ignore[attr-defined]
        return result

    def _dispatch(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in DECOMPOSITIONS:
            with self:
                return DECOMPOSITIONS[name](*args, **kwargs)
        if name == "einsum":
            product = self._product(args)
            if product is not None:
                with self:
                    return product()
        attention = None
        if name == "scaled_dot_product_attention":
            attention = self._fused_attention
        elif name in ("matmul", "bmm") and is_map(args[0]):
            attention = self._written_attention
        if attention is not None:
            mixed: Any = attention(func, *self._own_only(args, kwargs))
            if not self.aside and (not self.grouped or self.block is not None):
                mixed._whyformer_mixed = ("mixed", self.attentions - 1)
            return mixed
        if not self.carries(args, kwargs):
            return self._note(name, args, kwargs, _without_graph(func, args, kwargs))
        args, kwargs = self._own_only(args, kwargs)
        result = self._carried(name, func, args, kwargs)
        return self._note(name, args, kwargs, result)

    def _product(self, args: tuple[Any, ...]) -> Any:
        """An einsum of two tensors as matmul or linear, so that it gets their rules and its attention is found."""
        operands = tensors(args[1:])
        if len(operands) != 2 or not (self.carries(args, {}) or any(map(is_map, operands))):
            return None
        names = str(args[0])
        first, second = names.partition("->")[0].split(",")
        if is_map(operands[1]) or isinstance(operands[0], nn.Parameter):
            operands, names = operands[::-1], f"{second},{first}->{names.partition('->')[2]}"
        return einsum_product(names, *operands)

    def _carried(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        composite = self.composite
        self.refuse_hidden_graphs(args)
        if kwargs.get("inplace") is True:
            return self._in_place(name + "_", func, args, {**kwargs, "inplace": False}, func)
        if composite.carrier == "multiplier":
            if ops.is_in_place(name) and name[:-1] in composite.rules:
                return self._in_place(name, func, args, kwargs)
            if name in composite.rules:
                return composite.rules[name](func, args, kwargs)
            if composite.audit and not self._known(name, composite.native):
                return self._unless_silent(name, func, args, kwargs)
            return func(*args, **kwargs)
        if name in RELEVANCE_DECOMPOSITIONS:
            with self:
                return RELEVANCE_DECOMPOSITIONS[name](*args, **kwargs)
        if ops.is_in_place(name):
            return self._in_place(name, func, args, kwargs)
        if name in composite.native:
            return func(*args, **kwargs)
        rule = self._relevance_rule(name, args, kwargs)
        if rule is None:
            return self._unless_silent(name, func, args, kwargs)
        return self._ruled(rule, name, func, args, kwargs)

    def _known(self, name: str, native: frozenset[str]) -> bool:
        return name in native or (ops.is_in_place(name) and (name[:-1] in native or name in ("__setitem__", "copy_")))

    def _unless_silent(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Audit: an unknown operation may run only if nothing carried comes out of it."""
        result = func(*args, **kwargs)
        if not any(t.requires_grad for t in tensors((result,))):
            return result
        raise UnknownOperation(
            f"the operation '{name}' in {self.where()} carries relevance, and {self.composite.name} has no rule "
            f"for it. Ways out: add a rule to the composite's table (whyformer/composites: rules[{name!r}] = ...), or "
            "a row to engine/canonizers.py if the module writes a known operation by hand, or use a gradient method "
            "(input_x_gradient, integrated_gradients, gae)"
        )

    def where(self) -> str:
        """Name of the innermost module that is running, read off the call stack."""
        names = {id(m): n for n, m in self.model.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                return f"module '{names[id(owner)] or type(owner).__name__}' ({type(owner).__name__})"
            frame = frame.f_back  # type: ignore[assignment]
        return "the model"

    # -- what carries ----------------------------------------------------------------------------------------
    def _foreign(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad and value.is_leaf and id(value) not in self.own

    def carries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        for tensor in tensors((*args, *kwargs.values())):
            if tensor.requires_grad and (not tensor.is_leaf or id(tensor) in self.own):
                return True
        return False

    def _own_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Parameters and other foreign leaves detached; nothing of the model is changed."""

        def own(value: Any) -> Any:
            if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
                return type(value)([own(v) for v in value]) if type(value) in (list, tuple) else value
            if self._foreign(value):
                detached = value.detach()
                detached._whyformer_parameter = isinstance(value, nn.Parameter)
                return detached
            return value

        return tuple(own(a) for a in args), {k: own(v) for k, v in kwargs.items()}

    def refuse_hidden_graphs(self, args: tuple[Any, ...]) -> None:
        """Refuse what the mode cannot see: checkpointed segments, custom autograd functions, scripted functions."""
        for tensor in tensors(args):
            node = tensor.grad_fn
            if node is None:
                continue
            if not isinstance(node, torch.autograd.function.BackwardCFunction):
                if self.composite.audit and not hasattr(
                    tensor if tensor._base is None else tensor._base, "_whyformer_seen"
                ):
                    raise UnknownOperation(
                        f"operations that whyformer cannot see (a torch.jit function, or an extension in C++) made a "
                        f"tensor that carries relevance into {self.where()}; {self.composite.name} needs every "
                        "operation. Call the Python function that was scripted, or use a gradient method "
                        "(input_x_gradient, integrated_gradients, gae)"
                    )
                continue
            kind = type(node).__name__
            if kind in _CHECKPOINTS:
                raise ModelError(
                    "activation checkpointing hides operations from whyformer (seen before "
                    f"{self.where()}). Turn it off: "
                    "model.gradient_checkpointing_disable(), or model.set_grad_checkpointing(False) in timm"
                )
            if not kind.startswith(("Ruled", "_Scaled", "_DetachedNorm")) and self.composite.audit:
                raise UnknownOperation(
                    f"a custom torch.autograd.Function ({kind.removesuffix('Backward')}) carries relevance before "
                    f"{self.where()}; {self.composite.name} cannot look inside. Use a gradient method instead"
                )

    # -- relevance carrier -----------------------------------------------------------------------------------
    def _relevance_rule(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
        rules = self.composite.rules
        if name in ("mul", "matmul", "div"):
            both = sum(isinstance(a, Tensor) and a.requires_grad for a in args[:2]) == 2
            if name == "mul":
                return rules["mul_two"] if both else rules["mul"]
            if name == "div":
                return None if isinstance(args[1], Tensor) and args[1].requires_grad else rules["div"]
            if not both and getattr(args[1], "_whyformer_parameter", False):
                return rules["linear"]
            return rules["matmul"] if both else _PRODUCT_WITH_CONSTANT
        if name == "einsum":
            carrying = sum(t.requires_grad for t in tensors(args))
            return {1: _PRODUCT_WITH_CONSTANT, 2: rules["matmul"]}.get(carrying)
        if name in ("conv2d", "conv1d", "conv3d"):
            return rules["input" if id(args[0]) in self.own else "linear"]
        return rules.get(name)

    def _ruled(self, rule: Rule, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "linear":
            a = ops.bind("input weight bias", args, kwargs, bias=None)
            operands = [a["input"], a["weight"]] + ([] if a["bias"] is None else [a["bias"]])
            return Ruled.apply(rule, self.run, func, {}, *operands)
        if name == "matmul" and rule is self.composite.rules["linear"]:
            return Ruled.apply(rule, self.run, lambda x, w: func(x, w.mT), {}, args[0], args[1].mT)
        if name.startswith("conv"):
            names = "input weight bias stride padding dilation groups"
            a = ops.bind(names, args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
            info = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
            operands = [a["input"], a["weight"]] + ([] if a["bias"] is None else [a["bias"]])
            return Ruled.apply(rule, self.run, lambda x, w, b=None: func(x, w, b, **info), info, *operands)
        if name == "einsum":
            return Ruled.apply(rule, self.run, lambda *operands: func(args[0], *operands), {}, *tensors(args))
        if name == "gelu":
            approximate = kwargs.get("approximate", "none")
            return Ruled.apply(
                rule, self.run, lambda x: func(x, approximate=approximate), {"approximate": approximate}, args[0]
            )
        if name in ("add", "sub"):
            return self._sum(rule, name, func, args, kwargs)
        if name in ("mul", "div") and not isinstance(args[0], Tensor):
            args = (args[1], args[0])
        if rule.relevance is elementary.identity and not args[0].requires_grad:
            if name != "mul":
                return self._unless_silent(name, func, args, kwargs)
            args = (args[1], args[0])
        spots = [
            i for i, a in enumerate(args) if isinstance(a, Tensor) and (i == 0 or name in ("mul", "matmul", "div"))
        ]

        def compute(*tensors: Tensor) -> Tensor:
            filled = list(args)
            for i, t in zip(spots, tensors, strict=True):
                filled[i] = t
            return func(*filled, **kwargs)

        return Ruled.apply(rule, self.run, compute, {}, *(args[i] for i in spots))

    def _sum(self, rule: Rule, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = ops.bind("input other", args, kwargs, alpha=1)
        left, right, alpha = a["input"], a["other"], a["alpha"]
        if alpha != 1:
            with self:
                right = right * alpha
        sign = -1 if name == "sub" else 1
        if (
            not isinstance(right, Tensor)
            or not isinstance(left, Tensor)
            or _is_bias(left, right)
            or _is_bias(right, left)
        ):
            # a number or a bias vector takes no relevance
            if isinstance(left, Tensor) and left.requires_grad:
                return Ruled.apply(_SHIFT, self.run, lambda x: func(x, right), {}, left)
            return Ruled.apply(_SHIFT, self.run, lambda x: func(left, x), {}, right)
        return Ruled.apply(rule, self.run, lambda u, v: func(u, v), {"signs": (1, sign)}, left, right)

    def _in_place(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Any = None) -> Any:
        """The same out of place, copied into the target, so that aliases see it and relevance follows."""
        if name in (
            "copy_",
            "__setitem__",
            "masked_fill_",
            "zero_",
            "fill_",
            "squeeze_",
            "unsqueeze_",
            "t_",
            "transpose_",
        ):
            return func(*args, **kwargs)
        plain = plain or ops.out_of_place(name)
        if plain is None:
            return self._unless_silent(name, func, args, kwargs)
        with self:
            value = plain(args[0].clone(), *args[1:], **kwargs)
        return args[0].copy_(value)


def _without_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As under ``torch.no_grad()``, without building that context for each of a model's operations.

    Where no graph could begin nothing is switched: a view made without gradients could not be written to later.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors((*args, *kwargs.values()))):
        return func(*args, **kwargs)
    torch._C._set_grad_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(True)


def _is_bias(value: Tensor, other: Tensor) -> bool:
    """A vector along the features: takes no relevance, as the bias of a linear layer."""
    return not value.requires_grad and value.dim() <= 1 and other.dim() > 1


_SHIFT = Rule("shift", elementary.identity, lambda call, flow: [flow], books=False)
