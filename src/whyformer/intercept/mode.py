"""The interception: sees every torch operation of one forward pass and runs it by its rule.

Carrying: a tensor that requires grad carries relevance, because parameters and foreign leaves are detached on the way
into each operation. So "multiply by a constant" and "multiply two branches" tell themselves apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whyformer.composites import Composite
from whyformer.errors import ModelError, UnknownOperation
from whyformer.intercept import operations as ops
from whyformer.intercept.decompositions import DECOMPOSITIONS, RELEVANCE_DECOMPOSITIONS
from whyformer.rules import elementary
from whyformer.rules.attention import attention_gradient, masked_softmax
from whyformer.rules.core import Call, Pass, Rule, Ruled, keep_value

_PLAIN_ATTENTION = Rule("attention", lambda call, r: (_ for _ in ()).throw(RuntimeError("gradient only")), attention_gradient)
_PRODUCT_WITH_CONSTANT = Rule("product", elementary.z_rule)
_CHECKPOINTS = ("CheckpointFunctionBackward", "CheckpointFunctionBackwardBackward")


@dataclass
class AttentionCall:
    """One attention of the forward pass, as a forward watcher sees it.

    Attributes:
        index: 0-based position among the attentions of the pass.
        block: index of the block it lies in, or None outside all blocks (a pooling head).
        query, key: ``[B, H, N, d]``, None where the model computes its map itself (eager attention).
        value: ``[B, H, K, d]``.
    """

    index: int
    block: int | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    weights: Tensor | None = None

    def map(self, rows: Tensor | None = None) -> Tensor:
        """The attention map A ``[B, H, Q, K]``; ``rows`` ``[B, Q]`` picks and sums query rows -> ``[B, H, K]``."""
        if self.weights is None:
            assert self.query is not None and self.key is not None
            self.weights = masked_softmax((self.query @ self.key.transpose(-2, -1)) * self.scale, self.mask)
        return self.weights if rows is None else torch.einsum("bq,bhqk->bhk", rows.to(self.weights.dtype), self.weights)


@dataclass
class Projection:
    """The output projection W_O of an attention and, in post-norm models, the normalisation after its residual sum.

    Attributes:
        weight: ``[D, H·d]``; bias ``[D]`` or None.
        norm_weight, norm_input, norm_eps: γ, the summed vectors ``[B, N, D]`` and ε; None in pre-norm models.
    """

    index: int
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_input: Tensor | None = None
    norm_eps: float = 0.0


@dataclass
class Plan:
    """What one recorded forward pass is for.

    Attributes:
        composite: the table of rules.
        first: the graph begins at the map of this attention (0-based, among the attentions of the blocks); None if it
            begins at another root.
        watch: called with each :class:`AttentionCall` in the forward pass.
        observe: called in each backward pass with (attention index, A, flow into A), ``[B, H, Q, K]`` each.
        edit_value: called with (attention index, value) and returns the value to use instead.
        project: called with the :class:`Projection` of each attention's output.
        features: blocks whose first normalisation (if it comes before the attention; else whose input) is a root.
    """

    composite: Composite
    first: int | None = None
    watch: Callable[[AttentionCall], None] | None = None
    observe: Callable[[int, Tensor, Tensor], None] | None = None
    edit_value: Callable[[int, Tensor], Tensor] | None = None
    project: Callable[[Projection], None] | None = None
    features: tuple[int, ...] = ()


@dataclass
class Interception(TorchFunctionMode):
    """The mode of one forward pass over ``model``; see :func:`whyformer.intercept.record.record`."""

    model: nn.Module
    plan: Plan
    run: Pass
    roots: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    muted: int = 0
    attentions: int = 0
    block: int | None = None
    grouped: bool = False
    convolution_grid: tuple[int, ...] | None = None
    attention_blocks: list[int | None] = field(default_factory=list)
    norm_before: int | None = None
    block_input: Tensor | None = None
    projections: dict[int, Projection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.own: set[int] = {id(t) for t in self.roots}
        if self.plan.first is not None:
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
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = ops.operation_name(func)
        if self.muted or name in ops.SILENT:
            return func(*args, **kwargs)
        if name in DECOMPOSITIONS:
            with self:
                return DECOMPOSITIONS[name](*args, **kwargs)
        attention = None
        if name == "scaled_dot_product_attention":
            attention = self._fused_attention
        elif name in ("matmul", "bmm") and _is_map(args[0]):
            attention = self._written_attention
        if attention is not None:
            mixed = attention(func, *self._own_only(args, kwargs))
            mixed._whyformer_mixed = ("mixed", self.attentions - 1)
            return mixed
        if not self._carries(args, kwargs):
            with torch.no_grad():
                result = func(*args, **kwargs)
            return self._note(name, args, kwargs, result)
        args, kwargs = self._own_only(args, kwargs)
        result = self._carried(name, func, args, kwargs)
        return self._note(name, args, kwargs, result)

    def _carried(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        composite = self.plan.composite
        self._refuse_hidden_graphs(args)
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
        return name in native or (ops.is_in_place(name) and (name[:-1] in native or name == "__setitem__"))

    def _unless_silent(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Audit: an unknown operation may run only if nothing carried comes out of it."""
        result = func(*args, **kwargs)
        if not any(t.requires_grad for t in _tensors((result,))):
            return result
        raise UnknownOperation(
            f"the operation '{name}' in {self.where()} carries relevance, and {self.plan.composite.name} has no rule "
            f"for it. Ways out: add a rule to the composite's table (composites.py: rules[{name!r}] = ...), or a row "
            "to intercept/canonizers.py if the module writes a known operation by hand, or use a gradient method "
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

    def _carries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = _tensors((*args, *kwargs.values()))
        return torch.is_grad_enabled() and any(t.requires_grad and not self._foreign(t) for t in found)

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

    def _refuse_hidden_graphs(self, args: tuple[Any, ...]) -> None:
        """Refuse what the mode cannot see: checkpointed segments and custom autograd functions."""
        for tensor in _tensors(args):
            node = tensor.grad_fn
            if node is None or not isinstance(node, torch.autograd.function.BackwardCFunction):
                continue
            kind = type(node).__name__
            if kind in _CHECKPOINTS:
                raise ModelError(
                    f"activation checkpointing hides operations from whyformer (seen before {self.where()}). Turn it off: "
                    "model.gradient_checkpointing_disable(), or model.set_grad_checkpointing(False) in timm"
                )
            if not kind.startswith(("Ruled", "_Scaled", "_DetachedNorm", "Tap")) and self.plan.composite.audit:
                raise UnknownOperation(
                    f"a custom torch.autograd.Function ({kind.removesuffix('Backward')}) carries relevance before "
                    f"{self.where()}; {self.plan.composite.name} cannot look inside. Use a gradient method instead"
                )

    # -- relevance carrier -----------------------------------------------------------------------------------
    def _relevance_rule(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
        rules = self.plan.composite.rules
        if name in ("mul", "matmul", "div"):
            both = sum(isinstance(a, Tensor) and a.requires_grad for a in args[:2]) == 2
            if name == "mul":
                return rules["mul_two"] if both else rules["mul"]
            if name == "div":
                return None if args[1] is not None and isinstance(args[1], Tensor) and args[1].requires_grad else rules["div"]
            if not both and getattr(args[1], "_whyformer_parameter", False):
                return rules["linear"]
            return rules["matmul"] if both else _PRODUCT_WITH_CONSTANT
        if name == "einsum":
            carrying = sum(t.requires_grad for t in _tensors(args))
            return {1: _PRODUCT_WITH_CONSTANT, 2: rules["matmul"]}.get(carrying)
        if name in ("conv2d", "conv1d", "conv3d") and id(args[0]) in self.own:
            return rules.get("input_conv")
        return rules.get(name)

    def _ruled(self, rule: Rule, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "linear":
            a = ops.bind("input weight bias", args, kwargs, bias=None)
            operands = [a["input"], a["weight"]] + ([] if a["bias"] is None else [a["bias"]])
            return Ruled.apply(rule, self.run, func, {}, *operands)
        if name == "matmul" and rule is self.plan.composite.rules["linear"]:
            return Ruled.apply(rule, self.run, lambda x, w: func(x, w.mT), {}, args[0], args[1].mT)
        if name.startswith("conv"):
            a = ops.bind("input weight bias stride padding dilation groups", args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
            info = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
            operands = [a["input"], a["weight"]] + ([] if a["bias"] is None else [a["bias"]])
            return Ruled.apply(rule, self.run, lambda x, w, b=None: func(x, w, b, **info), info, *operands)
        if name == "einsum":
            return Ruled.apply(rule, self.run, lambda *operands: func(args[0], *operands), {}, *_tensors(args))
        if name == "gelu":
            approximate = kwargs.get("approximate", "none")
            return Ruled.apply(rule, self.run, lambda x: func(x, approximate=approximate), {"approximate": approximate}, args[0])
        if name in ("add", "sub"):
            return self._sum(rule, name, func, args, kwargs)
        if name in ("mul", "div") and not isinstance(args[0], Tensor):
            args = (args[1], args[0])
        if rule.relevance is elementary.identity and not args[0].requires_grad:
            if name != "mul":
                return self._unless_silent(name, func, args, kwargs)
            args = (args[1], args[0])
        spots = [i for i, a in enumerate(args) if isinstance(a, Tensor) and (i == 0 or name in ("mul", "matmul", "div"))]

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
        if not isinstance(right, Tensor) or not isinstance(left, Tensor) or _is_bias(left, right) or _is_bias(right, left):
            # a number or a bias vector takes no relevance
            if isinstance(left, Tensor) and left.requires_grad:
                return Ruled.apply(_SHIFT, self.run, lambda x: func(x, right), {}, left)
            return Ruled.apply(_SHIFT, self.run, lambda x: func(left, x), {}, right)
        return Ruled.apply(rule, self.run, lambda u, v: func(u, v), {"signs": (1, sign)}, left, right)

    def _in_place(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Any = None) -> Any:
        """The same out of place, copied into the target, so that aliases see it and relevance follows."""
        keep_value(args[0])
        if name in ("copy_", "__setitem__", "masked_fill_", "zero_", "fill_", "squeeze_", "unsqueeze_", "t_", "transpose_"):
            return func(*args, **kwargs)
        plain = plain or ops.out_of_place(name)
        if plain is None:
            return self._unless_silent(name, func, args, kwargs)
        with self:
            value = plain(args[0].clone(), *args[1:], **kwargs)
        return args[0].copy_(value)

    # -- attention -------------------------------------------------------------------------------------------
    def _rule_of_attention(self) -> Rule | None:
        """How an attention is opened, or None where it may stay as it is."""
        if self.plan.composite.carrier == "relevance":
            return self.plan.composite.rules["scaled_dot_product_attention"]
        return _PLAIN_ATTENTION if self.plan.observe is not None else None

    def _observer(self, index: int) -> Callable[[Tensor, Tensor], None]:
        def observe(weights: Tensor, flow: Tensor) -> None:
            if self.plan.observe is not None and index >= 0:
                self.plan.observe(index, self._four(weights), self._four(flow))

        return observe

    def _four(self, maps: Tensor) -> Tensor:
        """``[B·H, Q, K]`` as ``[B, H, Q, K]``."""
        if maps.dim() == 3:
            batch = self.run.batch if maps.shape[0] % self.run.batch == 0 else 1
            return maps.reshape(batch, -1, *maps.shape[1:])
        return maps

    def _fused_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = ops.bind(
            "query key value attn_mask dropout_p is_causal scale enable_gqa", args, kwargs,
            attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        )  # fmt: skip
        q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
        index = self._count_attention()
        if self.plan.edit_value is not None:
            v = self.plan.edit_value(index, v)
        scale = q.shape[-1] ** -0.5 if a["scale"] is None else float(a["scale"])
        options = {"is_causal": a["is_causal"], "scale": a["scale"], "enable_gqa": a["enable_gqa"]}
        carries = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        begin = self._begins(index, carries)
        carries = carries or begin
        rule = self._rule_of_attention() if carries else None
        if rule is None:
            rules = self.plan.composite.rules
            if carries and "scaled_dot_product_attention" in rules:
                output = rules["scaled_dot_product_attention"](func, (q, k, v), {"attn_mask": mask, **options})
            elif self.plan.watch is None:
                output = func(q, k, v, attn_mask=mask, **options)
            else:
                full = causal_mask(q, k) if a["is_causal"] else mask
                key, value = _match_heads(q, k, v)
                call = AttentionCall(index, self.block, q, key, value, full, scale)
                self.plan.watch(call)
                # where the watcher asked for the map, the product with the values is all that is left to do
                output = func(q, k, v, attn_mask=mask, **options) if call.weights is None else call.weights @ value
            return output
        info = {"mask": causal_mask(q, k) if a["is_causal"] else mask, "scale": scale, "observe": self._observer(index)}
        key, value = _match_heads(q, k, v)
        options["enable_gqa"] = False

        def compute(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            return func(q, k, v, attn_mask=mask, **options)

        operands = (q, key, value, self.anchor) if begin else (q, key, value)
        return Ruled.apply(rule, self.run, compute, info, *operands)

    def _written_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A·V of an attention whose map the model computed itself; A is observed on its way."""
        weights, v = args[:2]
        index = self._count_attention()
        if self.plan.edit_value is not None:
            v = self.plan.edit_value(index, v)
        carries = torch.is_grad_enabled() and (weights.requires_grad or v.requires_grad)
        begin = self._begins(index, carries)
        carries = carries or begin
        if carries and self._rule_of_attention() is not None:
            operands = (weights, self.anchor) if begin else (weights,)
            info = {"observe": self._observer(index)}
            weights = Ruled.apply(_OBSERVE, self.run, lambda w, *_: w, info, *operands)
        if not carries:
            with torch.no_grad():
                output = func(weights, v, *args[2:], **kwargs)
        elif self.plan.composite.carrier == "relevance":
            output = Ruled.apply(self.plan.composite.rules["matmul"] if v.requires_grad else _HALVED, self.run, func, {}, weights, v)
        else:
            output = func(weights, v, *args[2:], **kwargs)
        if self.plan.watch is not None:
            call = AttentionCall(index, self.block, None, None, self._four(v), weights=self._four(weights))
            self.plan.watch(call)
        return output

    def _begins(self, index: int, carries: bool) -> bool:
        """Whether the graph begins at this attention's map: the first asked for, and any later one that nothing reaches
        yet (a decoder's own attention)."""
        return torch.is_grad_enabled() and self.plan.first is not None and index >= self.plan.first and not carries

    def _count_attention(self) -> int:
        """Position among the attentions of the blocks; −1 for one outside them (a pooling head, another tower)."""
        if self.grouped and self.block is None:
            return -1
        index, self.attentions = self.attentions, self.attentions + 1
        self.attention_blocks.append(self.block)
        if self.block in self.plan.features and self.norm_before != self.block and self.block_input is not None:
            self.add_root(self.block_input)  # post-norm block: nothing is normalised before its attention
            self.block_input = None
        return index

    # -- notes taken on the way ------------------------------------------------------------------------------
    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Mark attention maps, and remember the grid of the first convolution."""
        if name == "softmax" and isinstance(result, Tensor) and result.dim() in (3, 4):
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            if axis in (-1, result.dim() - 1):
                result._whyformer_map = True  # type: ignore[attr-defined]
        elif name in ops.VIEWS and args and _is_map(args[0]) and isinstance(result, Tensor) and result.dim() in (3, 4):
            if name != "__getitem__" or result.shape == args[0].shape:
                result._whyformer_map = True  # type: ignore[attr-defined]
        elif name == "conv2d" and self.convolution_grid is None:
            self.convolution_grid = tuple(result.shape[-2:])
        elif name in ops.NORMS and self.block is not None and self.block not in self.attention_blocks and self.norm_before != self.block:
            self.norm_before = self.block
            if self.block in self.plan.features:
                self.add_root(result)
        if self.plan.project is not None:
            self._follow_mixture(name, args, kwargs, result)
        return result

    def _follow_mixture(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow an attention's output to the layer that projects it, and on to a post-norm after the residual sum."""
        source = next((a for a in _tensors(args[:2]) if hasattr(a, "_whyformer_mixed")), None)
        if source is None or not isinstance(result, Tensor):
            return
        stage, index = source._whyformer_mixed  # type: ignore[attr-defined]
        if stage == "mixed" and name in ("linear", "addmm"):
            weight, bias = (args[2].T, args[0]) if name == "addmm" else (args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
            self.projections[index] = Projection(index, weight.detach(), bias if bias is None else bias.detach())
            result._whyformer_mixed = ("projected", index)  # type: ignore[attr-defined]
        elif name in ops.VIEWS or (stage == "projected" and name == "add"):
            result._whyformer_mixed = ("summed" if name == "add" else stage, index)  # type: ignore[attr-defined]
        elif stage == "summed" and name == "layer_norm" and self.norm_before != self.attention_blocks[index]:
            a = ops.bind("input normalized_shape weight bias eps", args, kwargs, weight=None, eps=1e-5)
            projection = self.projections[index]
            weight = torch.ones_like(result[0, 0]) if a["weight"] is None else a["weight"].detach()
            projection.norm_weight, projection.norm_input, projection.norm_eps = weight, a["input"].detach(), a["eps"]


def _observed(call: Call, flow: Tensor) -> Sequence[Tensor | None]:
    call.info["observe"](call.operands[0], flow)
    return [flow, *(torch.zeros_like(a) for a in call.operands[1:])]


def _halved(call: Call, relevance: Tensor) -> Sequence[Tensor | None]:
    return elementary.product_halved(call, relevance)


_OBSERVE = Rule("attention map", _observed, _observed, books=False)
_HALVED = Rule("product", _halved)
_SHIFT = Rule("shift", elementary.identity, lambda call, flow: [flow], books=False)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """True where a query may look: the lower triangle, as ``is_causal`` of the fused kernels."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _match_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for grouped queries."""
    if query.dim() < 4 or query.shape[-3] == key.shape[-3]:
        return key, value
    repeats = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)


def _is_map(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "_whyformer_map", False)


def _is_bias(value: Tensor, other: Tensor) -> bool:
    """A vector along the features: takes no relevance, as the bias of a linear layer."""
    return not value.requires_grad and value.dim() <= 1 and other.dim() > 1


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(v for v in value if isinstance(v, Tensor))
    return found
