"""Ordinary adjoints in fewer operations than autograd's: at the few rows of a last block that a target reads, and of
pictures cut into patches; what an operation computes going forward stays its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.readings import Arguments, bind, tensors
from whyformer.rules.core import Pass
from whyformer.rules.relevance.attention import masked_softmax

_FEWEST = 16
"""Rows from which on it is worth the look."""
_PATCHES = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


def cheaper(name: str, func: Callable[..., Any], args: Arguments, kwargs: Mapping[str, Any], last: bool) -> Any:
    """The result of a layer of constant weights whose adjoint is cheaper written out, NotImplemented for other calls.

    Args:
        last: whether it is a layer of a last block, to which something comes back at few rows as a rule.
    """
    if name in _PATCHES:
        return _patches(func, bind(_CONVOLUTION, args, dict(kwargs), **_DEFAULTS), _PATCHES[name])
    if not last or name not in ("linear", "addmm"):
        return NotImplemented
    if name == "linear":
        given, turned = bind("input weight bias", args, dict(kwargs), bias=None), False
        x, weight, bias = given["input"], given["weight"], given["bias"]
    elif len(args) == 3 and not kwargs:
        (bias, x, weight), turned = args, True
    else:
        return NotImplemented
    if not _constant(x, weight, bias) or weight.dim() != 2 or x.numel() < _FEWEST * x.shape[-1]:
        return NotImplemented

    def compute(value: Tensor) -> Tensor:
        result: Tensor = func(bias, value, weight) if turned else func(value, weight, bias)
        return result

    return LayerOfRows.apply(compute, weight.T if turned else weight, x)


def _constant(x: Any, weight: Any, bias: Any) -> bool:
    """Whether it is a layer of constant weights, on a CPU (to ask a GPU takes longer than to compute)."""
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype == weight.dtype
    return (
        plain
        and x.requires_grad
        and not weight.requires_grad
        and not getattr(bias, "requires_grad", False)
        and _as_is()
    )


def _as_is() -> bool:
    """Whether no transformation or change of precision is in force, of which a function of its own knows nothing."""
    return not torch._C._is_any_autocast_enabled() and not torch._C._are_functorch_transforms_active()


class LayerOfRows(torch.autograd.Function):
    """y = x Wᵀ + b; on the way back g W, 0 at the rows where g is 0."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _own(compute(x))

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (weight,), flow = ctx.saved_tensors, flows[0]
        flat = flow.reshape(-1, flow.shape[-1])
        rows = _reached(flat[:, 0], lambda: flat.any(1))
        if rows is None:
            found = flat @ weight
        else:
            found = flat.new_zeros(len(flat), weight.shape[1])
            found[rows] = flat[rows] @ weight
        return None, None, found.view(*flow.shape[:-1], -1)


def _own(output: Tensor) -> Tensor:
    return output.detach() if output._is_view() else output  # a view could not be changed in place


def _reached(some: Tensor, reached: Callable[[], Tensor]) -> Tensor | None:
    """The numbers of the rows that are ``reached``, None where these are the half or more, as a rule seen in ``some``
    number of each row."""
    if 2 * int(some.count_nonzero()) >= len(some):
        return None
    rows = reached().nonzero()[:, 0]
    return rows if 2 * len(rows) < len(some) else None


# -- attention -----------------------------------------------------------------------------------------------------
def attention_of_rows(
    func: Callable[..., Any], run: Pass, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float,
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A fused attention of a last block, as :func:`cheaper`; ``options`` are the kernel's other arguments."""
    given = (q, k, v)
    if not all(type(t) is Tensor and t.dim() == 4 and t.is_cpu and t.dtype == q.dtype for t in given) or not _as_is():
        return NotImplemented
    if q.dtype.itemsize < 4 or q.shape[-2] < _FEWEST or not any(t.requires_grad for t in given):
        return NotImplemented
    held, keys = None if mask is None else mask.detach(), k.shape[-2]

    def compute(*given: Tensor) -> Tensor:
        result: Tensor = func(*given, attn_mask=held, **options)
        return result

    def shown(rows: Tensor) -> Tensor | None:
        if options["is_causal"]:
            return torch.arange(keys) <= rows[:, None]
        return held if held is None or held.shape[-2] == 1 else held[..., rows, :]

    return AttentionOfRows.apply(compute, run, shown, scale, q, k, v)


class AttentionOfRows(torch.autograd.Function):
    """softmax(qkᵀ)v; on the way back the queries are left out to whose results nothing comes back."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], run: Pass, shown: Callable[[Tensor], Tensor | None], scale: float,
        *given: Tensor,
    ) -> Tensor:  # fmt: skip
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
        with torch.enable_grad():
            ctx.made = compute(*leaves), leaves
        ctx.run, ctx.shown, ctx.scale, ctx.written = run, shown, scale, _written(leaves)
        output: Tensor = ctx.made[0].detach()
        return output

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (output, leaves), flow, run = ctx.made, flows[0], ctx.run
        if not run.keep:
            ctx.made = None
        rows = _reached(flow[..., 0].any(0).any(0), lambda: flow.any(-1).any(0).any(0))
        if rows is None or _written(leaves) != ctx.written:  # autograd tells of a change in place
            wanted = [t for t in leaves if t.requires_grad]
            found = iter(torch.autograd.grad(output, wanted, flow, retain_graph=run.keep))
            parts: list[Tensor | None] = [next(found) if t.requires_grad else None for t in leaves]
        else:
            parts = _of_queries(rows, ctx.shown(rows), ctx.scale, flow, *(t.detach() for t in leaves))
        return None, None, None, None, *parts


def _written(values: list[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in values]


def _of_queries(
    rows: Tensor, mask: Tensor | None, scale: float, flow: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor | None]:
    """The gradients of q, k, v, of what comes back at some rows of the queries alone."""
    repeats, asked, flow_of = q.shape[1] // k.shape[1], q[:, :, rows], flow[:, :, rows]
    keys, values = (t if repeats == 1 else t.repeat_interleave(repeats, 1) for t in (k, v))
    weights = masked_softmax((asked @ keys.transpose(-2, -1)).mul_(scale), mask)
    d_weights = flow_of @ values.transpose(-2, -1)
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scale)
    d_q = torch.zeros_like(q)
    d_q[:, :, rows] = d_scores @ keys
    both = [d_scores.transpose(-2, -1) @ asked, weights.transpose(-2, -1) @ flow_of]
    return [d_q, *(t if repeats == 1 else t.unflatten(1, (-1, repeats)).sum(2) for t in both)]


# -- patches -------------------------------------------------------------------------------------------------------
_CONVOLUTION = "input weight bias stride padding dilation groups"
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _patches(func: Callable[..., Any], given: dict[str, Any], axes: int) -> Any:
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not _constant(x, weight, bias) or x.dim() != axes + 2 or weight.dim() != axes + 2:
        return NotImplemented
    size = tuple(weight.shape[2:])

    def every(name: str, value: Any) -> bool:
        own = given[name]
        return (tuple(own) if isinstance(own, tuple | list) else (own,) * axes) == value

    apart = every("stride", size) and every("dilation", (1,) * axes) and given["groups"] == 1
    beside = given["padding"] == "valid" or every("padding", (0,) * axes)
    if (
        not (apart and beside)
        or weight[0, 0].numel() == 1
        or any(n % s for n, s in zip(x.shape[2:], size, strict=True))
    ):
        return NotImplemented
    rest = {name: given[name] for name in ("stride", "padding", "dilation", "groups")}
    return LayerOfPatches.apply(lambda value: func(value, weight, bias, **rest), weight, x)


class LayerOfPatches(torch.autograd.Function):
    """A convolution whose patches do not overlap: on the way back one matrix product, where autograd scatters."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = x.shape
        return _own(compute(x))

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (weight,), flow = ctx.saved_tensors, flows[0]
        axes = flow.dim() - 2
        patches = flow.movedim(1, -1).reshape(-1, len(weight)) @ weight.flatten(1)
        laid = patches.view(len(flow), *flow.shape[2:], *weight.shape[1:])  # [B, h, w, C, s, s]
        order = [0, axes + 1, *(i for a in range(axes) for i in (1 + a, axes + 2 + a))]
        return None, None, laid.permute(order).reshape(ctx.shape)


def in_order(name: str, result: Any) -> Any:
    """What flows back to a ``batch_norm`` laid out in the usual order: of one sample with its channels last torch 2.13
    reads the wrong values there on a CPU."""
    if name == "batch_norm" and isinstance(result, Tensor) and result.requires_grad:
        result.register_hook(lambda flow: flow.contiguous())
    return result


def without_graph(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As under ``torch.no_grad()``, without building that context for each of a model's operations.

    Where no graph could begin nothing is switched: a view made without gradients could not be written to later.
    """
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if value.requires_grad:
                break
        elif isinstance(value, list | tuple) and any(t.requires_grad for t in tensors((value,))):
            break
    else:
        return func(*args, **kwargs)
    torch._C._set_grad_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(True)
