"""Rules whose carrier is a multiplier m: relevance is x ⊙ m, and the gradient is the multiplier of the empty
composite.

Some factors are held constant, some products are shared between their branches, some slopes are replaced by secants. A
rule maps the flow at the exit of a unit to flows at its entries, see :mod:`whyformer.tape.walking`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from whyformer.rules.linear import identity
from whyformer.tape.adjoints import softmax_adjoint
from whyformer.tape.state import in_transform
from whyformer.tape.tables import ELEMENTWISE, KINDS
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite, Flows, Parts, Rule, Step, Walk, adjoint, repeat_unit

CompositeName = Literal["plain", "ah", "ln", "ah_ln", "libra", "attnlrp", "cp_lrp", "gim"]
"""Names of :data:`COMPOSITES`: what a method's setting ``composite`` may be."""


# -- secants ---------------------------------------------------------------------------------------------------------
def secant(walk: Walk, step: Step, flows: Flows) -> Parts:
    """m_x = m_y (g(x) − g(0)) / x, the slope of the secant from 0 in the place of g'(x); at x = 0 its limit g'(0).
    Where g has no value at 0, as a logarithm, it is g'(x)."""
    if len(step.unit.entries) > 1:  # bounds that depend on the input: no function of one number
        return adjoint(walk, step, flows)
    (entry,), flow = step.unit.entries, flows[step.unit.exit]
    x, g = walk.tape[entry], _Function(walk, step)
    h = torch.finfo(x.dtype).eps ** 0.5
    zero = x.new_zeros(()) if g.elementwise else torch.zeros_like(x)
    origin = g(zero)
    limit = (g(zero + h) - g(zero - h)) / (2 * h)
    known = not in_transform()  # then Python may look at numbers
    if known and not bool(origin.isfinite().all()):
        return adjoint(walk, step, flows)
    if known and g.elementwise and float(origin) == 0:  # no difference is taken, so only 0/0 has to be replaced
        slope = g(x).div_(x).nan_to_num_(float(limit), math.inf, -math.inf)
    else:
        slope = torch.where(x.abs() < h, limit, (g(x) - origin) / torch.where(x == 0, 1, x))
    return [(entry, (slope * flow).to(flow.dtype))]


@dataclass
class _Function:
    """An activation as a function of its entry."""

    walk: Walk
    step: Step

    @property
    def elementwise(self) -> bool:
        """True if it is the same function of one number everywhere."""
        tape, unit = self.walk.tape, self.step.unit
        inner = {unit.entries[0], *(r for n in unit.calls for r in tape.calls[n].results)}
        calls = [tape.calls[n] for n in unit.calls]
        single = all(o in inner or math.prod(tape.shapes[o]) == 1 for c in calls for o in c.operands)
        return single and all(c.name in ELEMENTWISE or KINDS.get(c.name) == "activation" for c in calls)

    def __call__(self, x: Tensor) -> Tensor:
        unit = self.step.unit
        return repeat_unit(self.walk.tape, unit, {unit.entries[0]: x})[0]


# -- norms -----------------------------------------------------------------------------------------------------------
def detached_norm(walk: Walk, step: Step, flows: Flows) -> Parts:
    """LN rule: y = (x − mean x) · [1/√(var x + ε)] · w + b with the bracket held constant (Ali et al., ICML 2022).

    Of a norm that is written out the bracket is a value inside it, so the rule is its adjoint without what flows
    there.
    """
    unit = step.unit
    if not unit.places:
        return adjoint(walk, step, flows)
    beside = [(o, f) for o, f in adjoint(walk, step, flows) if o != unit.entries[0]] if len(unit.entries) > 1 else []
    return [*beside, (unit.entries[0], _through_norm(walk, unit, flows[unit.exit]))] if step.live[0] else beside


def _through_norm(walk: Walk, unit: Unit, flow: Tensor) -> Tensor:
    """What flows through a norm of one call, with its deviation held constant."""
    gain = norm_operand(walk.tape, unit, "weight")
    return normalise(walk.tape, unit, flow if gain is None else flow * gain).to(flow.dtype)


def normalise(tape: Tape, unit: Unit, x: Tensor) -> Tensor:
    """Return (x − mean x) / √(var + ε) with the deviation of a recorded norm of one call; without the mean of an RMS
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
    """Return the weight or the bias of a norm of one call in a shape that broadcasts against its entry."""
    n = tape.calls[unit.calls[0]].operand(name)
    if n is None:
        return None
    by_channel = unit.name == "native_group_norm" or "batch_norm" in unit.name
    return tape[n].reshape(-1, *[1] * (len(tape.shapes[unit.entries[0]]) - 2)) if by_channel else tape[n]


def mean_of_moments(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Of a deviation and a mean that are computed at once, what flows to the mean."""
    mean = walk.tape.calls[step.unit.calls[0]].results[1]
    return adjoint(walk, step, {mean: flows[mean]}) if mean in flows else []


# -- softmax at another temperature ----------------------------------------------------------------------------------
def warm_softmax(walk: Walk, step: Step, flows: Flows, temperature: float = 2.0) -> Parts:
    """m_x = p_T ⊙ (m_y − Σ p_T m_y), p_T = softmax(x / T): softmax's derivative at temperature T (Edin et al.,
    2025)."""
    unit = step.unit
    p = _warmer(walk.tape[unit.exit], temperature, unit.axes[0])
    return [(unit.entries[0], softmax_adjoint(flows[unit.exit].to(p.dtype), p, unit.axes[0]))]


def _warmer(p: Tensor, temperature: float, axis: int) -> Tensor:
    """softmax(x / T) from p = softmax(x). What is lacking to 1 went to a sink."""
    root, sink = p.pow(1 / temperature), 1 - p.sum(axis, keepdim=True)
    sink = sink.clamp(min=0).masked_fill(sink < 1e-4, 0)  # no sink, but rounding
    return root / (root.sum(axis, keepdim=True) + sink.pow(1 / temperature)).clamp(min=torch.finfo(p.dtype).tiny)


# -- composites ------------------------------------------------------------------------------------------------------
_HELD = Rule(hold=(0,), name="constant")
_HALF = Rule(share=0.5)

# where something is sampled, and what a system of equations is divided by, is constant; "identity" is said by users
_COMMON = {
    "sampling": Rule(hold=(1,), name="adjoint, places constant"),
    "solve": Rule(hold=(0,), name="adjoint, matrix constant"),
    "identity": Rule(back=identity, name="identity"),
}
AH = {"softmax": _HELD, "logsumexp": _HELD}
LN = {
    "norm": Rule(hold=("statistics",), back=detached_norm, name="deviation constant"),
    "statistic": _HELD,
    "moments": Rule(back=mean_of_moments, name="deviation constant"),
}
SECANT = {kind: Rule(back=secant, name="secant") for kind in ("activation", "clip")}
HALVES = dict.fromkeys(("product", "gate", "activated gate"), _HALF)
CONSTANT_GATE = {"activated gate": Rule(hold=(0,), name="adjoint, activated branch constant")}
WARM = {"softmax": Rule(back=partial(warm_softmax, temperature=2.0), name="adjoint at temperature 2")}


def _composite(name: str, *tables: dict[str, Rule]) -> Composite:
    """Later tables hold where two have a row for the same kind."""
    rules = dict(_COMMON)
    for table in tables:
        rules.update(table)
    return Composite(name, rules)


COMPOSITES: dict[CompositeName, Composite] = {
    "plain": GRADIENT,
    # Ali et al.: XAI for Transformers, ICML 2022
    "ah": _composite("LRP(AH)", AH),
    "ln": _composite("LRP(LN)", LN),
    "ah_ln": _composite("LRP(AH+LN)", AH, LN),
    # Mehri et al.: LibraGrad, CVPR 2025
    "libra": _composite("LibraGrad", HALVES, AH, LN, SECANT),
    # Achtibat et al.: AttnLRP, ICML 2024, in the form of Arras et al. 2025; CP-LRP is its baseline
    "attnlrp": _composite("AttnLRP", HALVES, LN, SECANT),
    "cp_lrp": _composite("CP-LRP", HALVES, AH, LN, SECANT, CONSTANT_GATE),
    # Edin et al.: Gradient Interaction Modifications, 2025
    "gim": _composite("GIM", HALVES, LN, WARM),
}
"""Composites of multipliers by name."""

WITH_SECANTS: dict[CompositeName, Composite] = {
    "ah": _composite("LRP(AH) with secants", HALVES, AH, SECANT),
    "ln": _composite("LRP(LN) with secants", HALVES, LN, SECANT),
    "ah_ln": COMPOSITES["libra"],
}
"""Composites of Ali et al. with secants of activations, and products of two branches halved."""
