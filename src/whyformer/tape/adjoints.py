"""Adjoints (vector–Jacobian products) of single calls: the flows to the operands, from the flows at the results.

Calls that are frequent in Transformers have a formula here; for all others, autograd is applied to the single call. A
formula may return None to fall back to autograd. A call without a derivative raises an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.tape.calls import Call, Slot
from whyformer.tape.state import in_transform
from whyformer.tape.values import Tape

aten = torch.ops.aten

__all__ = ["adjoint_of_call", "in_dtype", "matmul_of_rows", "rows_with_flow", "softmax_adjoint", "unbroadcast"]

Flow = Tensor | None
Formula = Callable[[Call, Tape, list[Flow], Sequence[bool]], Sequence[Flow] | None]

ADJOINTS: dict[str, Formula] = {}
"""Maps the name of a call to its formula, with the arguments and the result of :func:`adjoint_of_call`."""


def adjoint_of_call(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow]:
    """Return the flow to each operand of a call.

    Args:
        call: a call of the tape.
        tape: the recorded pass.
        flows: the flow at each of its results; None if nothing arrives.
        needs: for each operand, whether its flow is needed. Flows that are not needed may be None.

    Raises:
        ModelError: the call has no derivative.
    """
    formula = ADJOINTS.get(call.name)
    if formula is not None and not any(tape.dtypes[n].is_complex for n in (*call.operands, *call.results)):
        result = formula(call, tape, flows, needs)
        if result is not None:
            return result
    if call.random:
        raise ModelError(
            f"'{call.name}' draws random numbers that were not recorded, so nothing can be propagated through it: "
            "call model.eval(), or turn off the randomness in its forward"
        )
    # inside vmap, only functional transforms are possible
    gradients = iter((_by_vjp if in_transform() else _by_autograd)(call, tape, flows, needs))
    return [next(gradients) if needed else None for needed in needs]


def _by_autograd(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow]:
    """Return the flow to each operand that needs one, in order, by applying autograd to the single call."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.clone() if t.is_inference() else t.detach() for t in (tape[o] for o in call.operands)]
        inputs = [leaf.requires_grad_() for leaf, needed in zip(leaves, needs, strict=True) if needed]
        try:
            outs = call(leaves)
        except RuntimeError as error:  # a custom operator that fails under autograd
            raise _no_derivative(call) from error
        arriving = [(out, flow) for out, flow in zip(outs, flows, strict=True) if flow is not None]
        if not all(out.requires_grad for out, _ in arriving):
            raise _no_derivative(call)
        sources, grads = [out for out, _ in arriving], [_like(flow.reshape(out.shape), out) for out, flow in arriving]
        try:
            gradients = torch.autograd.grad(sources, inputs, grads, allow_unused=True)
        except RuntimeError as error:
            if "autograd formula" not in str(error):
                raise
            raise _no_derivative(call) from error
    if all(f is None for f in gradients):
        raise _no_derivative(call)
    return gradients


def _by_vjp(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow]:
    """Compute the same flows as :func:`_by_autograd` by ``torch.func.vjp``, which also works inside vmap."""
    arriving = [i for i, flow in enumerate(flows) if flow is not None]
    values = [tape[o] for o in call.operands]

    def function(*variables: Tensor) -> list[Tensor]:
        remaining = iter(variables)
        outs = call([next(remaining) if needed else t for t, needed in zip(values, needs, strict=True)])
        return [outs[i] for i in arriving]

    outs, pull, *_ = torch.func.vjp(function, *(t for t, needed in zip(values, needs, strict=True) if needed))
    paired = zip(outs, (flow for flow in flows if flow is not None), strict=True)
    return pull([in_dtype(flow.reshape(out.shape), out.dtype) for out, flow in paired])


def _like(flow: Tensor, value: Tensor) -> Tensor:
    """Return a flow in the dtype and memory layout of a value. Some backward kernels of torch give wrong results for
    other layouts."""
    flow = in_dtype(flow, value.dtype)
    return flow if flow.stride() == value.stride() else torch.empty_like(value).copy_(flow)


def in_dtype(flow: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a flow to the dtype of its value; if only the flow is complex, return its real part."""
    if flow.dtype == dtype:
        return flow
    return flow.to(dtype) if dtype.is_complex or not flow.is_complex() else flow.real.to(dtype)


def _no_derivative(call: Call) -> ModelError:
    return ModelError(
        f"'{call.name}' has no derivative, and relevance has to pass through it. If it is a custom operator, add a "
        "derivative with torch.library.register_autograd, or write it in terms of torch's operators"
    )


# -- registering formulas --------------------------------------------------------------------------------------------
def _formula(names: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        ADJOINTS.update(dict.fromkeys(names.split(), formula))
        return formula

    return register


def _unary(names: str) -> Callable[[Callable[[Call, Tape, Tensor], Flow]], Any]:
    """Register a formula ``(call, tape, flow) -> flow of the first operand``. It is used if only the first result has a
    flow and only the flow of the first operand is needed."""

    def register(formula: Callable[[Call, Tape, Tensor], Flow]) -> Any:
        def general(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
            if not needs[0] or any(needs[1:]) or flows[0] is None or any(f is not None for f in flows[1:]):
                return None
            result = formula(call, tape, flows[0])
            return None if result is None else (result, *[None] * (len(needs) - 1))

        _formula(names)(general)
        return formula

    return register


def unbroadcast(flow: Tensor, shape: torch.Size) -> Tensor:
    """Sum a flow over the axes along which a value of ``shape`` was broadcast."""
    if flow.shape == shape:
        return flow
    if flow.dim() > len(shape):
        flow = flow.sum(tuple(range(flow.dim() - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and flow.shape[i] != 1)
    return (flow.sum(axes, keepdim=True) if axes else flow).reshape(shape)


def rows_with_flow(flow: Tensor) -> Tensor | None:
    """Return the indices of the rows of a matrix that are not zero; None if they are half of the rows or more. After
    the last attention, few rows have a flow, and padding has none."""
    if len(flow) <= 8 or in_transform() or 2 * int(flow[:, 0].count_nonzero()) >= len(flow):
        return None
    rows = flow.any(-1).nonzero()[:, 0]
    return rows if 2 * len(rows) < len(flow) else None


def matmul_of_rows(flow: Tensor, weight: Tensor) -> Tensor:
    """Return ``flow @ weight``, without the products of rows of ``flow`` that are zero."""
    rows = rows_with_flow(flow) if flow.dim() == 2 else None
    if rows is None:
        return flow @ weight
    return flow.new_zeros(len(flow), weight.shape[1]).index_copy_(0, rows, flow[rows] @ weight)


# -- products --------------------------------------------------------------------------------------------------------
@_formula("mm bmm matmul")
def _matmul(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), (a, b) = flows, call.operands
    if flow is None or min(len(tape.shapes[a]), len(tape.shapes[b])) < 2:
        return None
    first = unbroadcast(matmul_of_rows(flow, tape[b].mT), tape.shapes[a]) if needs[0] else None
    second = unbroadcast(tape[a].mT @ flow, tape.shapes[b]) if needs[1] else None
    return first, second


@_formula("addmm baddbmm")
def _addmm(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), (s, a, b) = flows, call.operands
    if flow is None or call.kwargs or len(call.args) > 3:
        return None
    return (
        unbroadcast(flow, tape.shapes[s]) if needs[0] else None,
        matmul_of_rows(flow, tape[b].mT) if needs[1] else None,
        tape[a].mT @ flow if needs[2] else None,
    )


@_unary("convolution")
def _convolution(call: Call, tape: Tape, flow: Tensor) -> Flow:
    weight, (stride, padding, dilation, transposed, _, groups) = tape[call.operands[1]], call.args[3:9]
    shape, kernel = tape.shapes[call.operands[0]], weight.shape[2:]
    grid = flow.shape[2:]
    exact = [*stride] == [*kernel] and [a * b for a, b in zip(grid, kernel, strict=True)] == [*shape[2:]]
    plain = groups == 1 and not transposed and max(dilation) == 1 and not any(padding)
    if exact and plain and len(kernel) == 2:  # non-overlapping patches
        rows = matmul_of_rows(flow.permute(0, 2, 3, 1).reshape(-1, flow.shape[1]), weight.flatten(1))
        return rows.reshape(shape[0], *grid, shape[1], *kernel).permute(0, 3, 1, 4, 2, 5).reshape(shape)
    like = flow.new_empty(1).expand(shape)  # only the shape is used
    return aten.convolution_backward(flow, like, weight, None, *call.args[3:9], [True, False, False])[0]


# -- views -----------------------------------------------------------------------------------------------------------
_unary("view _unsafe_view _reshape_alias reshape unsqueeze squeeze")(lambda c, t, f: f.reshape(t.shapes[c.operands[0]]))
_unary("clone alias lift_fresh contiguous")(lambda c, t, f: f)
_unary("_to_copy")(lambda c, t, f: in_dtype(f, t.dtypes[c.operands[0]]).to(t.device(c.operands[0])))
_unary("t")(lambda c, t, f: f.t())
_unary("transpose")(lambda c, t, f: f.transpose(c.args[1], c.args[2]))
_unary("permute")(lambda c, t, f: f.permute([[d % f.dim() for d in c.args[1]].index(i) for i in range(f.dim())]))
_unary("expand")(lambda c, t, f: unbroadcast(f, t.shapes[c.operands[0]]))
_unary("select")(lambda c, t, f: aten.select_backward(f, t.shapes[c.operands[0]], *c.args[1:]))
_unary("neg")(lambda c, t, f: -f)


@_unary("repeat_interleave")
def _repeat_interleave(call: Call, tape: Tape, flow: Tensor) -> Flow:
    if len(call.args) != 3 or type(call.args[1]) is not int:
        return None
    times, axis = call.args[1], call.args[2]
    axis = axis % flow.dim()
    return flow.unflatten(axis, (-1, times)).sum(axis + 1)


@_unary("slice")
def _slice(call: Call, tape: Tape, flow: Tensor) -> Flow:
    shape = tape.shapes[call.operands[0]]
    args: tuple[Any, ...] = call.args[1:]
    axis, start, end, step = args + (0, None, None, 1)[len(args) :]
    return aten.slice_backward(flow, shape, axis, start or 0, shape[axis] if end is None else end, step)


@_formula("split split_with_sizes unbind")
def _split(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    axis = call.args[-1] if len(call.args) > (1 if call.name == "unbind" else 2) else 0
    like = next(f for f in flows if f is not None)
    parts = [like.new_zeros(tape.shapes[r]) if f is None else f for r, f in zip(call.results, flows, strict=True)]
    return (torch.stack(parts, axis) if call.name == "unbind" else torch.cat(parts, axis),)


@_formula("cat")
def _cat(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), axis = flows, call.args[1] if len(call.args) > 1 else 0
    if flow is None:
        return None
    shapes = [tape.shapes[o] for o in call.operands]
    sizes = [s[axis] if len(s) == flow.dim() else 0 for s in shapes]  # an empty cache may have a single axis
    parts = zip(flow.split(sizes, axis), shapes, call.operands, needs, strict=True)
    return [p.reshape(s).to(tape.dtypes[o]) if w else None for p, s, o, w in parts]


@_formula("stack")
def _stack(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), axis = flows, call.args[1] if len(call.args) > 1 else 0
    return None if flow is None else [p if w else None for p, w in zip(flow.unbind(axis), needs, strict=True)]


@_unary("masked_fill")
def _masked_fill(call: Call, tape: Tape, flow: Tensor) -> Flow:
    return unbroadcast(flow.masked_fill(tape[call.operands[1]], 0), tape.shapes[call.operands[0]])


@_formula("where")
def _where(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), (mask, *parts) = flows, call.operands
    if flow is None or len(parts) != 2:
        return None
    first = unbroadcast(torch.where(tape[mask], flow, 0), tape.shapes[parts[0]]) if needs[1] else None
    second = unbroadcast(torch.where(tape[mask], 0, flow), tape.shapes[parts[1]]) if needs[2] else None
    return None, first, second


@_unary("index")
def _index(call: Call, tape: Tape, flow: Tensor) -> Flow:
    places = [i if i is None else tape[call.operands[i.index]] for i in call.args[1]]
    return aten.index_put(flow.new_zeros(tape.shapes[call.operands[0]]), places, flow, True)


@_formula("copy")
def _copy(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    """Propagate no flow to the overwritten operand."""
    (flow,), (_, source) = flows, call.operands
    if flow is None:
        return None
    return None, unbroadcast(flow, tape.shapes[source]).to(tape.dtypes[source]) if needs[1] else None


@_formula("fill")
def _fill(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,) = flows
    if flow is None or len(needs) < 2:
        return [None] * len(needs)
    return None, flow.sum().to(tape.dtypes[call.operands[1]]) if needs[1] else None


@_unary("native_dropout")
def _native_dropout(call: Call, tape: Tape, flow: Tensor) -> Flow:
    """Use the recorded mask."""
    p = call.args[1]
    return flow * tape[call.results[1]] * (1 / (1 - p) if p < 1 else 0)


# -- sums and elementwise products -----------------------------------------------------------------------------------
@_formula("add sub")
def _add(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,) = flows
    if flow is None or call.kwargs or len(call.args) > 2:
        return None
    if type(call.args[0]) is not Slot:  # a number minus the operand
        return (-flow if call.name == "sub" else flow,)
    signs = (1, -1 if call.name == "sub" else 1)
    rows = zip(call.operands, needs, signs, strict=False)
    return [unbroadcast(flow if s > 0 else -flow, tape.shapes[o]) if w else None for o, w, s in rows]


@_formula("mul div")
def _mul(call: Call, tape: Tape, flows: list[Flow], needs: Sequence[bool]) -> Sequence[Flow] | None:
    (flow,), divides = flows, call.name == "div"
    if flow is None or call.kwargs or type(call.args[0]) is not Slot:
        return None
    if len(call.operands) == 1:
        return (flow / call.args[1] if divides else flow * call.args[1],)
    a, b = call.operands
    first = second = None
    if needs[0]:
        first = unbroadcast(flow / tape[b] if divides else flow * tape[b], tape.shapes[a])
    if needs[1]:
        second = unbroadcast(-flow * tape[a] / tape[b].square() if divides else flow * tape[a], tape.shapes[b])
    return first, second


@_unary("mean sum")
def _mean(call: Call, tape: Tape, flow: Tensor) -> Flow:
    shape = tape.shapes[call.operands[0]]
    if not shape:
        return flow.to(tape.dtypes[call.operands[0]])
    axes = call.args[1] if len(call.args) > 1 and call.args[1] is not None else range(len(shape))
    axes = sorted(d % len(shape) for d in ([axes] if type(axes) is int else axes)) or list(range(len(shape)))
    if flow.dim() < len(shape):
        for d in axes:
            flow = flow.unsqueeze(d)
    spread = flow.to(tape.dtypes[call.operands[0]]).expand(shape)
    return spread / math.prod(shape[d] for d in axes) if call.name == "mean" else spread


# -- elementwise functions -------------------------------------------------------------------------------------------
@_unary("pow")
def _pow(call: Call, tape: Tape, flow: Tensor) -> Flow:
    p = call.args[1]
    if type(p) not in (int, float) or type(call.args[0]) is not Slot:
        return None
    return flow * (p * tape[call.operands[0]] ** (p - 1))


_unary("rsqrt")(lambda c, t, f: f * -0.5 * t[c.results[0]] ** 3)
_unary("sqrt")(lambda c, t, f: f * 0.5 / t[c.results[0]])
_unary("exp")(lambda c, t, f: f * t[c.results[0]])
_unary("tanh")(lambda c, t, f: aten.tanh_backward(f, t[c.results[0]]))
_unary("sigmoid")(lambda c, t, f: aten.sigmoid_backward(f, t[c.results[0]]))
_unary("relu")(lambda c, t, f: aten.threshold_backward(f, t[c.results[0]], 0))
_unary("silu")(lambda c, t, f: aten.silu_backward(f, t[c.operands[0]]))
_unary("gelu")(lambda c, t, f: aten.gelu_backward(f, t[c.operands[0]], **c.kwargs))


# -- softmax and layer norm ------------------------------------------------------------------------------------------
def softmax_adjoint(flow: Tensor, p: Tensor, axis: int) -> Tensor:
    """Return p ⊙ (flow − Σ flow ⊙ p), the adjoint of a softmax with the result ``p`` along an axis."""
    return aten._softmax_backward_data(flow, p, axis, p.dtype)


@_unary("_softmax _safe_softmax")
def _softmax(call: Call, tape: Tape, flow: Tensor) -> Flow:
    return softmax_adjoint(flow, tape[call.results[0]], call.args[1])


@_unary("native_layer_norm")
def _layer_norm(call: Call, tape: Tape, flow: Tensor) -> Flow:
    weight, bias = (None if n is None else tape[n] for n in (call.operand("weight"), call.operand("bias")))
    x, mean, rstd = tape[call.operands[0]], tape[call.results[1]], tape[call.results[2]]
    only_x = [True, False, False]
    return aten.native_layer_norm_backward(flow, x, call.args[1], mean, rstd, weight, bias, only_x)[0]
