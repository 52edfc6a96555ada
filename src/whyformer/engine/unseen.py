"""Linear operations whose weights nobody sees (a kernel, a compiled function): read off what they do, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from whyformer.engine.packed import PACKED
from whyformer.engine.readings import tensors
from whyformer.errors import UnknownOperation
from whyformer.models.walking import modules
from whyformer.rules.core import Call, Grads, Rule
from whyformer.rules.hidden import read_weights

if TYPE_CHECKING:
    from whyformer.engine.mode import Interception


def as_layer(mode: Interception, name: str, mixing: Rule, given: tuple[object, ...]) -> Rule:
    """The rule of relevance of a call that is declared to be linear.

    Where it multiplies each row with the same weights it is a layer, and gets the composite's rule for these; else it
    is a weighted sum, unless weights of the model are among what it is ``given``: their rule cannot be kept then.

    Args:
        mixing: the composite's rule for weighted sums.
        given: arguments, and a module of its own.
    """
    layer = mode.composite.rule("layer", "linear")
    if layer is None or layer.relevance is None or mixing.relevance is None:
        return mixing
    passed, mixed = layer.relevance, mixing.relevance

    def relevance(call: Call, flow: Tensor) -> Grads:
        place = call.needs.index(True)
        found = None if call.output is None else read_weights(_of_place(call, place), call.operands[place], call.output)
        if found is None:
            if _of_the_model(mode.model, given):
                raise UnknownOperation(_refusal(name, mode.composite.name))
            return mixed(call, flow)
        output = call.output if layer.keep_output else None
        seen = Call((call.operands[place], *found), output, (True, False, False), call.compute, call.run, {})
        back, *_ = passed(seen, flow)
        return [back if i == place else None for i in range(len(call.operands))]

    return replace(mixing, name=layer.name, relevance=relevance, keep_output=True)


def _of_place(call: Call, place: int) -> Callable[[Tensor], Tensor]:
    """What it makes of one operand."""
    return lambda rows: call.compute(*(rows if i == place else o for i, o in enumerate(call.operands)))


def _of_the_model(model: nn.Module, given: tuple[object, ...]) -> bool:
    """Whether a matrix among these is a parameter of the model, or one of its matrices of integers."""
    held = [t for m in modules(model) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    known = {_place(t) for t in held if isinstance(t, nn.Parameter) or t.dtype in PACKED}
    inside = [p for m in given if isinstance(m, nn.Module) for p in (*m.parameters(), *m.buffers())]
    return any(t.dim() > 1 and _place(t) in known for t in (*tensors(given), *inside))


def _place(value: Tensor) -> int:
    try:
        return value.untyped_storage().data_ptr()
    except RuntimeError:  # of a class of its own, without memory
        return id(value)


def _refusal(name: str, composite: str) -> str:
    return (
        f"'{name}' is declared to be linear and multiplies with weights of the model that cannot be read off what it "
        f"does (it mixes rows, or rounds what enters it), and {composite} needs these: take a method that carries "
        'multipliers, for which like="adjoint" holds (attnlrp, cp_lrp, lrp_ah_ln), explain the model before it was '
        "quantised, or give it a rule of its own, rule=whyformer.rules.core.Rule(...)"
    )
