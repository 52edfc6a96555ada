"""Rules that propagate a multiplier m: relevance is x ⊙ m, and the multiplier of the empty composite is the gradient.

The rules hold factors constant, divide products between their branches, or replace slopes by secants. A rule maps the
flow at the exit of a unit to flows at its entries, see :mod:`whyformer.tape.walking`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from whyformer.rules.linear import identity
from whyformer.tape.adjoints import softmax_adjoint
from whyformer.tape.state import in_transform
from whyformer.tape.tables import ELEMENTWISE, KINDS
from whyformer.tape.trials import SOFTMAX_KINDS
from whyformer.tape.units import PRODUCT_KINDS, UNNORMALIZED, Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite, Flows, Parts, Rule, Step, Walk, adjoint, repeat_unit

CompositeName = Literal["plain", "ah", "ln", "ah_ln", "libra", "attnlrp", "cp_lrp", "gim"]
"""Names of :data:`COMPOSITES`, the values of the setting ``composite`` of methods."""


# -- secants ---------------------------------------------------------------------------------------------------------
def secant(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Propagate m_x = m_y (g(x) − g(0)) / x: replace the derivative g'(x) by the slope of the secant through 0,
    and by its limit g'(0) at x = 0. If g(0) is not finite, as for a logarithm, use g'(x)."""
    if len(step.unit.entries) > 1:  # a clip whose bounds depend on the input is no function of x alone
        return adjoint(walk, step, flows)
    tape, unit = walk.tape, step.unit
    (entry,), flow, elementwise = unit.entries, flows[unit.exit], _is_elementwise(tape, unit)
    x, g = tape[entry], lambda t: repeat_unit(tape, unit, {entry: t})[0]
    h = torch.finfo(x.dtype).eps ** 0.5
    zero = x.new_zeros(()) if elementwise else torch.zeros_like(x)
    origin = g(zero)
    limit = (g(zero + h) - g(zero - h)) / (2 * h)
    concrete = not in_transform()  # inside vmap, Python cannot branch on values
    if concrete and not bool(origin.isfinite().all()):
        return adjoint(walk, step, flows)
    if concrete and elementwise and float(origin) == 0:  # g(x) / x is exact enough, and only 0/0 must be replaced
        slope = g(x).div_(x).nan_to_num_(float(limit), math.inf, -math.inf)
    else:
        slope = torch.where(x.abs() < h, limit, (g(x) - origin) / torch.where(x == 0, 1, x))
    return [(entry, (slope * flow).to(flow.dtype))]


def _is_elementwise(tape: Tape, unit: Unit) -> bool:
    """Return True if an activation applies the same scalar function to every element."""
    calls = [tape.calls[n] for n in unit.calls]
    inner = {unit.entries[0], *(r for c in calls for r in c.results)}
    single = all(o in inner or math.prod(tape.shapes[o]) == 1 for c in calls for o in c.operands)
    return single and all(c.name in ELEMENTWISE or KINDS.get(c.name) == "activation" for c in calls)


# -- norms -----------------------------------------------------------------------------------------------------------
def detached_norm(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Apply the LN rule: y = (x − mean x) · [1/√(var x + ε)] · w + b with the bracket held constant (Ali et al.,
    ICML 2022).

    In a norm of several calls, the bracket is a value inside the unit (``statistics``), so the rule is the adjoint with
    this value held constant.
    """
    unit, parts = step.unit, Parts()
    if not unit.places:
        return adjoint(walk, step, flows)
    if len(unit.entries) > 1:  # the weight or the bias depends on a root too
        parts = [(o, f) for o, f in adjoint(walk, step, flows) if o != unit.entries[0]]
    if step.live[0]:
        flow, gain = flows[unit.exit], norm_operand(walk.tape, unit, "weight")
        through = normalise(walk.tape, unit, flow if gain is None else flow * gain)
        parts.append((unit.entries[0], through.to(flow.dtype)))
    return parts


def normalise(tape: Tape, unit: Unit, x: Tensor) -> Tensor:
    """Return (x − mean x) / √(var + ε) with the recorded deviation of a norm of one call; x / √(mean x² + ε) for an RMS
    norm."""
    call = tape.calls[unit.calls[0]]
    if unit.name == "native_group_norm":
        rstd = tape[call.results[2]]
        rows = x.reshape(*rstd.shape, -1)
        return ((rows - rows.mean(-1, keepdim=True)) * rstd[..., None]).reshape(x.shape)
    if "batch_norm" in unit.name:
        axes, shape = (0, *range(2, x.dim())), [1, -1, *[1] * (x.dim() - 2)]
        return (x - x.mean(axes, keepdim=True)) * tape[call.results[2]].reshape(shape)
    centred = x - x.mean(unit.axes, keepdim=True) if unit.name == "native_layer_norm" else x
    return centred * tape[call.results[-1]]


def norm_operand(tape: Tape, unit: Unit, name: Literal["weight", "bias"]) -> Tensor | None:
    """Return the weight or bias of a norm of one call, in a shape that broadcasts to that of its entry; None if it has
    none."""
    n = tape.calls[unit.calls[0]].operand(name)
    if n is None:
        return None
    by_channel = unit.name == "native_group_norm" or "batch_norm" in unit.name
    return tape[n].reshape(-1, *[1] * (len(tape.shapes[unit.entries[0]]) - 2)) if by_channel else tape[n]


def mean_of_moments(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Propagate only the flow to the mean through ``std_mean`` or ``var_mean``; the deviation is held constant."""
    mean = walk.tape.calls[step.unit.calls[0]].results[1]
    return adjoint(walk, step, {mean: flows[mean]}) if mean in flows else []


# -- softmax at another temperature ----------------------------------------------------------------------------------
def warm_softmax(walk: Walk, step: Step, flows: Flows, temperature: float = 2.0) -> Parts:
    """Propagate m_x = p_T ⊙ (m_y − Σ p_T m_y) with p_T = softmax(x / T), the adjoint of softmax at temperature T (Edin
    et al., 2025)."""
    unit = step.unit
    p = _at_temperature(walk.tape[unit.exit], temperature, unit.axes[0])
    return [(unit.entries[0], softmax_adjoint(flows[unit.exit].to(p.dtype), p, unit.axes[0]))]


def _at_temperature(p: Tensor, temperature: float, axis: int) -> Tensor:
    """Return softmax(x / T) from p = softmax(x). If Σp < 1, an attention sink has the remaining probability."""
    root, sink = p.pow(1 / temperature), 1 - p.sum(axis, keepdim=True)
    sink = sink.clamp(min=0).masked_fill(sink < 1e-4, 0)  # smaller values are rounding errors, not sinks
    return root / (root.sum(axis, keepdim=True) + sink.pow(1 / temperature)).clamp(min=torch.finfo(p.dtype).tiny)


# -- composites ------------------------------------------------------------------------------------------------------
_CONSTANT = Rule(constant=(0,), name="constant")
_HALF = Rule(factor=0.5)

LATE_SUM = Rule(
    refuse="a product of exp(scores), or of another activation of scores, and values, which the model divides by the "
    "sum of the activations afterwards, so that its attention map is not computed: divide before the product, as in "
    "softmax(scores) @ values, or use a gradient method, such as input_x_gradient, or occlusion"
)
# the grid of a sampling and the matrix of a linear system are held constant; "identity" is for custom operations
_COMMON = {
    "sampling": Rule(constant=(1,), name="adjoint, places constant"),
    "solve": Rule(constant=(0,), name="adjoint, matrix constant"),
    "identity": Rule(back=identity, name="identity"),
}
AH = {
    **dict.fromkeys(SOFTMAX_KINDS, _CONSTANT),
    "logsumexp": _CONSTANT,
    "activated product": Rule(constant=(0,), name="adjoint, attention map constant"),
    UNNORMALIZED: LATE_SUM,
}
LN = {
    "norm": Rule(constant=("statistics",), back=detached_norm, name="deviation constant"),
    "statistic": _CONSTANT,
    "moments": Rule(back=mean_of_moments, name="deviation constant"),
}
SECANT = {kind: Rule(back=secant, name="secant") for kind in ("activation", "clip")}
HALVES = {**dict.fromkeys((*PRODUCT_KINDS, "gate", "activated gate"), _HALF), UNNORMALIZED: LATE_SUM}
CONSTANT_GATE = {"activated gate": Rule(constant=(0,), name="adjoint, activated branch constant")}
WARM = dict.fromkeys(SOFTMAX_KINDS, Rule(back=warm_softmax, name="adjoint at temperature 2"))

# later tables override earlier ones
COMPOSITES: dict[CompositeName, Composite] = {
    "plain": GRADIENT,
    # Ali et al.: XAI for Transformers, ICML 2022
    "ah": Composite("LRP(AH)", _COMMON | AH),
    "ln": Composite("LRP(LN)", _COMMON | LN),
    "ah_ln": Composite("LRP(AH+LN)", _COMMON | AH | LN),
    # Mehri et al.: LibraGrad, CVPR 2025
    "libra": Composite("LibraGrad", _COMMON | HALVES | AH | LN | SECANT),
    # Achtibat et al.: AttnLRP, ICML 2024, in the form of Arras et al. 2025; CP-LRP is its baseline
    "attnlrp": Composite("AttnLRP", _COMMON | HALVES | LN | SECANT),
    "cp_lrp": Composite("CP-LRP", _COMMON | HALVES | AH | LN | SECANT | CONSTANT_GATE),
    # Edin et al.: Gradient Interaction Modifications, 2025
    "gim": Composite("GIM", _COMMON | HALVES | LN | WARM),
}
"""Composites of multipliers by name."""

WITH_SECANTS: dict[CompositeName, Composite] = {
    "ah": Composite("LRP(AH) with secants", _COMMON | HALVES | AH | SECANT),
    "ln": Composite("LRP(LN) with secants", _COMMON | HALVES | LN | SECANT),
    "ah_ln": COMPOSITES["libra"],
}
"""Composites of Ali et al. that also use secants for activations and halve products of two branches."""
