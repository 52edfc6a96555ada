"""The audit: an operation that a composite does not know is refused once relevance arrives at it, not when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from whyformer.engine.operations import operation
from whyformer.engine.readings import tensors
from whyformer.errors import ModelError, UnknownOperation

if TYPE_CHECKING:
    from whyformer.engine.mode import Interception

_CHECKPOINTS = ("CheckpointFunctionBackward", "CheckpointFunctionBackwardBackward")
_OWN = ("RuledBackward", "LayerOfRowsBackward", "LayerOfPatchesBackward", "AttentionOfRowsBackward")
_OTHERWISE = "or use a gradient method (input_x_gradient, integrated_gradients, gae)"


def unknown(mode: Interception, name: str, role: str, results: Any, given: Sequence[Any], before: set[Any]) -> None:
    """Let what came out of an operation without a rule refuse relevance, but not gradients and not zeros."""
    arguments = tensors(given)
    changed = [t._base for t in tensors((results,)) if t._base is not None and any(t is a for a in arguments)]
    nodes = [t.grad_fn for t in (*tensors((results,)), *changed) if t.requires_grad and t.grad_fn not in before]
    known_as = "" if role == name else f" ({role})"
    place = _running(mode.model)

    def say() -> str:
        # a name that is known may be declared too, but that would hold for all its calls
        key = type(place).__name__ if operation(name).kind and place is not None else repr(name)
        return (
            f"the operation '{name}'{known_as} in {named(mode.model, place)} carries relevance, and "
            f"{mode.composite.name} has no rule for it. Ways out: say what it is like, {_line(key)}; add a rule "
            f"to the composite's table (whyformer/composites: {role!r}: ...); {_OTHERWISE}"
        )

    wait(mode, list(dict.fromkeys(nodes)), say)


def without_derivative(mode: Interception, name: str, results: Any) -> None:
    """Let what an operation without a derivative made (an integer kernel) refuse gradients and relevance."""
    nodes = [t.grad_fn for t in tensors((results,)) if t.grad_fn is not None and "NotImplemented" in t.grad_fn.name()]
    if not nodes:
        return
    place = _running(mode.model)

    def arrived(flows: tuple[Tensor | None, ...]) -> None:
        if any(flow is not None and bool(flow.any()) for flow in flows):
            raise ModelError(
                f"the operation '{name}' in {named(mode.model, place)} has no derivative (an integer kernel), so "
                "nothing reaches what lies before it: explain the model before it was quantised, or use occlusion"
            )

    for node in nodes:
        node.register_prehook(arrived)


def hidden(mode: Interception, given: Sequence[Any]) -> None:
    """Look for graphs that the mode has not seen grow: they refuse relevance too; checkpointed segments at once."""
    for tensor in tensors(given):
        node = tensor.grad_fn
        base = tensor if tensor._base is None else tensor._base
        if node is None or hasattr(base, "_whyformer_seen"):
            continue
        kind = type(node).__name__
        if kind in _CHECKPOINTS:
            raise ModelError(
                "activation checkpointing hides operations from whyformer (seen before "
                f"{named(mode.model, _running(mode.model))}). Turn it off: "
                "model.gradient_checkpointing_disable(), or model.set_grad_checkpointing(False) in timm"
            )
        if mode.composite.audit and kind not in _OWN:
            base._whyformer_seen = True  # type: ignore[attr-defined]
            if not mode.passes_as_declared(node, tensor):
                wait(mode, [node], _unseen(mode, node))


def _unseen(mode: Interception, node: Any) -> Callable[[], str]:
    place, function = _running(mode.model), getattr(node, "_forward_cls", None)

    def say() -> str:
        where = named(mode.model, place)
        if function is None:
            return (
                "operations that whyformer cannot see (torch.vmap, torch.jit, an extension in C++) made a tensor that"
                f" carries relevance into {where}; {mode.composite.name} needs every operation. Call the Python "
                f"function that was scripted, {_OTHERWISE}"
            )
        name = function.__name__
        ways = f"Say what it is like, {_line(name)}"
        if mode.kept:  # a product with them, most likely: no rule sees the weights, its derivative is exact
            like = "linear" if mode.composite.carrier == "relevance" else "adjoint"
            ways = (
                f'If it multiplies with weights in integers, {_line(name, like)}; "adjoint" holds for methods that '
                "carry multipliers (attnlrp, cp_lrp, lrp_ah_ln); or explain the model before it was quantised"
            )
        return (
            f"a custom torch.autograd.Function ({name}) carries relevance before {where}; "
            f"{mode.composite.name} cannot look inside. {ways}, {_OTHERWISE}"
        )

    return say


def _line(key: str, like: str = "gelu") -> str:
    return f'whyformer.rules.register({key}, like="{like}") or explain(..., rules={{{key}: "{like}"}})'


def wait(mode: Interception, nodes: Sequence[Any], say: Callable[[], str]) -> None:
    """Let these nodes of autograd's graph raise what ``say`` says when relevance comes that is not all zero."""
    run, multiplier = mode.run, mode.composite.carrier == "multiplier"

    def arrived(flows: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        if not (multiplier or run.relevance):
            return None
        if any(flow is not None and bool(flow.any()) for flow in flows):
            raise UnknownOperation(say())
        return (None,) * len(flows)  # not zeros, which many a derivative would make NaN of

    mode.waiting += len(nodes)
    for node in nodes:
        node.register_prehook(arrived)


def _running(model: nn.Module) -> nn.Module | None:
    """The innermost module of the model that is running, read off the call stack."""
    own = set(map(id, model.modules()))
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in own:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def named(model: nn.Module, module: nn.Module | None) -> str:
    """What error messages call a module."""
    if module is None:
        return "the model"
    name = next((n for n, m in model.named_modules() if m is module), "")
    return f"module '{name or type(module).__name__}' ({type(module).__name__})"
