"""Rules that propagate relevance itself, and their composites.

    seed, samples = {program.output: relevance}, RowSamples(rows)
    flows = walk_back(program, tape, [(deep_taylor(), seed)], observed=program.roots, samples=samples)

A rule distributes the relevance R of the exit of a unit over its entries. In formulas, ``a / b`` is 0 where b is 0:
relevance to which no entry contributes is lost.

Sources: Bach et al. 2015 (ε, αβ), Montavon et al. 2017 (z^B) and 2019 (γ), Chefer et al. 2021 (Transformer Attribution,
"TA").
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from whyformer.errors import UnknownOperation
from whyformer.rules.linear import (
    Back,
    LayerRule,
    alpha_beta,
    divide,
    epsilon_rule,
    finite,
    gamma_rule,
    identity,
    layer_rule,
    multiply,
    repeat_without_constant,
    separate,
    unchanged,
    wide,
    without_constant,
)
from whyformer.rules.multipliers import LATE_SUM
from whyformer.rules.opaque import opaque_layer_rule, refuse_adjoint
from whyformer.tape.adjoints import unbroadcast
from whyformer.tape.calls import Slot
from whyformer.tape.custom_ops import OPAQUE_LAYER
from whyformer.tape.trials import SHIFTED_SOFTMAX
from whyformer.tape.units import PRODUCT_KINDS, UNNORMALIZED
from whyformer.tape.walking import Composite, Flows, Parts, Rule, Step, Walk, adjoint

__all__ = ["LINEAR_RULES", "LinearRule", "deep_taylor", "layerwise"]

LinearRule: TypeAlias = Literal["separate", "alpha_beta", "epsilon", "gamma"]
LINEAR_RULES: tuple[str, ...] = get_args(LinearRule)


# -- rules of products and weighted sums -------------------------------------------------------------------------------
def z_rule(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Compute R_i = x_i ⊙ J_iᵀ(R / y) of a unit y that is linear in each entry x_i, with the derivative J_i (TA Eq. 2).

    Conserves relevance if there is one entry; in a product, each of the two branches gets relevance with the sum ΣR.
    The real and imaginary parts of complex numbers are treated as separate numbers.
    """
    tape, (flow,) = walk.tape, flows.values()
    pulled = _pull_back(walk, step, divide(wide(flow), without_constant(tape, step.unit)))
    return [(n, multiply(part, wide(tape[n]))) for n, part in pulled]


def _pull_back(walk: Walk, step: Step, flow: Tensor) -> Parts:
    """Return the ordinary adjoint of a unit, computed in float32 if the pass has half precision."""
    tape, unit = walk.tape, step.unit
    if tape.dtypes[unit.exit].itemsize > 2:
        return adjoint(walk, step, {unit.exit: flow})
    values = {e: wide(tape[e]) for e in unit.entries}
    live = list(dict.fromkeys(e for e, is_live in zip(unit.entries, step.live, strict=True) if is_live))

    def function(*live_values: Tensor) -> Tensor:
        return repeat_without_constant(tape, unit, values | dict(zip(live, live_values, strict=True)), unchanged)

    pull = torch.func.vjp(function, *(values[e] for e in live))[1]
    return list(zip(live, pull(flow), strict=True))


def product_rule(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Apply half of the z rule to each branch of a product. Both branches get the same sum, so that the normalization
    of TA Eq. 9–10 is a half of each. Conserves relevance."""
    return z_rule(walk, step, {n: flow / 2 for n, flow in flows.items()})


def gate_rule(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Pass R / 2 to each branch of an elementwise product. Conserves relevance."""
    (flow,) = flows.values()
    if step.unit.name == "div":
        raise _refused(step, "a quotient of two branches")
    return [(e, unbroadcast(flow / 2, walk.tape.shapes[e])) for e in step.unit.entries]


# -- rules of one branch -----------------------------------------------------------------------------------------------
def norm_rule(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Pass R to the input of a norm; if its weight depends on a root too, R / 2 to each. Conserves relevance."""
    unit = step.unit
    if len(unit.entries) == 1:
        return identity(walk, step, flows)
    if unit.name == "native_group_norm" or walk.tape.calls[unit.calls[0]].operand("bias") in unit.entries:
        raise _refused(step, "a norm whose shift carries relevance")
    return gate_rule(walk, step, flows)


def scale_rule(normalised: bool) -> Back:
    """Return the rule for a product with a constant: R to the entry. Conserves relevance.

    For complex numbers, (a + ib)(c + id) = (ac − bd) + i(ad + bc): each of the two sums uses the add rule.
    """

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        unit, tape = step.unit, walk.tape
        call = tape.calls[unit.calls[0]]
        if unit.name == "div" and unit.places:
            first = call.args[0]
            if not isinstance(first, Slot) or first.index != unit.places[0]:
                raise _refused(step, "a quotient whose divisor carries relevance")
        if not tape.dtypes[unit.exit].is_complex or unit.name not in ("mul", "div"):
            return identity(walk, step, flows)
        (entry,), (flow,) = unit.entries, flows.values()
        x = tape[entry].to(flow.dtype).resolve_conj()
        c = call([torch.ones_like(x) if o == entry else tape[o] for o in call.operands])[0].resolve_conj()
        sums = ((flow.real, x.real * c.real, -x.imag * c.imag), (flow.imag, x.real * c.imag, x.imag * c.real))
        shares = (_relevance_of_branches(walk, unit.exit, r, u + v, (u, v), normalised) for r, u, v in sums)
        relevance = torch.complex(*(torch.stack(parts).sum(0) for parts in zip(*shares, strict=True)))
        return [(entry, unbroadcast(relevance, tape.shapes[entry]))]

    return back


def clip_rule(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Pass R to the entry of a clip; if bounds depend on a root, to the selected values. Conserves relevance."""
    return (identity if len(step.unit.entries) == 1 else adjoint)(walk, step, flows)


# -- rules of sums -----------------------------------------------------------------------------------------------------
def add_rule(normalised: bool) -> Back:
    """Return the rule for a sum y = u + v. Plain (TA Eq. 2): R_u = u ⊙ R / y, which may be large where u
    and v cancel. Conserves relevance.

    Normalised (TA Eq. 9–10): R_u · |ΣR_u| / (|ΣR_u| + |ΣR_v|) · ΣR / ΣR_u, with sums over each sample. Conserves
    relevance, and no branch gets more than ΣR.
    """

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        unit, tape, (flow,) = step.unit, walk.tape, flows.values()
        call = tape.calls[unit.calls[0]]
        alpha = call.argument("alpha", 1)
        factors = {"sub": (1, -alpha), "rsub": (-alpha, 1)}.get(call.name, (1, alpha))
        values = (wide(tape[o]) for o in call.operands)
        branches = [v if f == 1 else v * f for v, f in zip(values, factors, strict=True)]
        y = branches[0] + branches[1] if len(unit.calls) > 1 else wide(tape[unit.exit])  # a mean is half of the sum
        parts = _relevance_of_branches(walk, unit.exit, wide(flow), y, branches, normalised)
        places = zip(unit.entries, unit.places, step.live, strict=True)
        return [(e, unbroadcast(parts[p], tape.shapes[e])) for e, p, live in places if live]

    return back


def _relevance_of_branches(
    walk: Walk, exit_: int, flow: Tensor, y: Tensor, branches: Sequence[Tensor], normalised: bool
) -> Sequence[Tensor]:
    """Return the relevance of the two branches of a sum y."""
    s = divide(flow, y)
    parts = [multiply(s, finite(branch)) for branch in branches]
    if not normalised:
        return parts

    def sums(part: Tensor) -> Tensor:
        result = walk.samples.sums(exit_, part)
        return result.real + result.imag if result.is_complex() else result

    total, branch_sums = sums(flow), [sums(part) for part in parts]
    magnitude = branch_sums[0].abs() + branch_sums[1].abs()
    factors = [divide(divide(s.abs(), magnitude) * total, s) for s in branch_sums]
    return [part * walk.samples.spread(exit_, factor, part) for part, factor in zip(parts, factors, strict=True)]


def shift_rule(normalised: bool) -> Back:
    """Return the rule for the sum of a branch and a constant. If the constant is a bias, the same for all rows, the
    branch gets R. Otherwise (position embeddings, masks) the add rule applies, and the relevance of the constant is
    dropped."""
    add = add_rule(normalised)

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        operands = walk.tape.calls[step.unit.calls[0]].operands
        branches = {p for p, carries in zip(step.unit.places, step.carry, strict=True) if carries}
        shapes = [walk.tape.shapes[o] for i, o in enumerate(operands) if i not in branches]
        bias = all(walk.samples.is_shared(step.unit.exit, shape) for shape in shapes)
        return identity(walk, step, flows) if bias else add(walk, step, flows)

    return back


# -- composites --------------------------------------------------------------------------------------------------------
_WAY_OUT = (
    "use a gradient method, such as input_x_gradient, or occlusion, or write the model without this operation"
)
_REFUSED = {
    "power": "a power, which has no rule for relevance",
    "statistic": "a statistic that is no part of a norm, which has no rule for relevance",
    "moments": "a deviation that is no part of a norm, which has no rule for relevance",
    SHIFTED_SOFTMAX: "a softmax whose scores and bias are never added, so that no rule divides relevance between them",
    "log softmax": "log-probabilities, which have no rule for relevance (the logits have)",
}


def _refused(step: Step, reason: str) -> UnknownOperation:
    return UnknownOperation(f"relevance arrives at '{step.unit.name}', {reason}: {_WAY_OUT}")


def unknown(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Refuse an operation without a rule, if relevance arrives."""
    if not any(bool(flow.any()) for flow in flows.values()):
        return []
    adjoint(walk, step, flows)  # an operation without a derivative raises an error that says so
    raise _refused(step, "an operation without a rule for relevance")


def _rules(rule: LayerRule, name: str, normalised: bool) -> dict[str, Rule]:
    """Return rules by kind of unit. Views, selections and logsumexp, a soft maximum, use their ordinary adjoint.

    Args:
        rule: rule of linear layers.
        name: name of this rule for audits.
        normalised: use the normalised add rule.
    """
    add, layers = "normalised add" if normalised else "add", f"{name}, z^B at inputs"
    backs: dict[str, tuple[Back, str | None]] = {
        **dict.fromkeys(("activation", "rectifier", "softmax", "quotient", "identity"), (identity, "identity")),
        "norm": (norm_rule, "identity"),
        "scale": (scale_rule(normalised), "identity"),
        "clip": (clip_rule, "identity"),
        "layer": (layer_rule(rule), layers),
        OPAQUE_LAYER: (opaque_layer_rule(rule, z_rule), layers),
        "adjoint": (refuse_adjoint, None),
        "weighted sum": (z_rule, "z"),
        **dict.fromkeys(PRODUCT_KINDS, (product_rule, "z × 0.5")),
        "gate": (gate_rule, "half to each"),
        "activated gate": (gate_rule, "half to each"),
        "add": (add_rule(normalised), add),
        "shift": (shift_rule(normalised), f"identity for biases, else {add}"),
        "other": (unknown, None),
    }
    refused = {kind: Rule(refuse=f"{reason}: {_WAY_OUT}") for kind, reason in _REFUSED.items()}
    # the grid of a sampling and the matrix of a linear system are held constant
    with_constants = {
        "sampling": Rule(constant=(1,), back=z_rule, name="z, places constant"),
        "solve": Rule(constant=(0,), back=z_rule, name="z, matrix constant"),
        UNNORMALIZED: LATE_SUM,
    }
    return {kind: Rule(back=back, name=title) for kind, (back, title) in backs.items()} | refused | with_constants


@functools.cache  # plans of walks are cached by the identity of the composite
def deep_taylor(alpha: float = 1.0) -> Composite:
    """Return the composite of Transformer Attribution (Chefer et al. 2021): the αβ rule with one denominator for linear
    layers, the z^B rule for layers that read pixels, the normalised add rule, half to each branch of a product, and the
    identity for norms, activations and softmax. The relevance of logits with positive and with negative weight in the
    target is propagated separately.

    Args:
        alpha: α of the αβ rule, with β = α − 1.
    """
    name = f"alpha-beta (alpha={alpha:g})"
    title = f"deep Taylor decomposition (alpha={alpha})"
    return Composite(title, _rules(alpha_beta(alpha), name, True), "relevance", by_sign=True)


@functools.cache
def layerwise(
    rule: LinearRule = "separate",
    *,
    alpha: float = 1.0,
    epsilon: float = 1e-6,
    gamma: float = 0.25,
    normalise_add: bool = False,
) -> Composite:
    """Return a composite of layer-wise relevance propagation: :func:`deep_taylor` with another rule for linear layers
    and, by default, the plain add rule.

    Args:
        rule: rule of linear layers; "separate" is the baseline "LRP" of Chefer et al. 2021.
        alpha: α of "alpha_beta", with β = α − 1.
        epsilon: ε of "epsilon", added to the denominator with its sign.
        gamma: γ of "gamma".
        normalise_add: use the normalised add rule.
    """
    layer_rules: dict[str, tuple[LayerRule, str]] = {
        "separate": (separate, ""),
        "alpha_beta": (alpha_beta(alpha), f", alpha={alpha}"),
        "epsilon": (epsilon_rule(epsilon), f", epsilon={epsilon}"),
        "gamma": (gamma_rule(gamma), f", gamma={gamma}"),
    }
    of_layers, setting = layer_rules[rule]
    name = f"LRP ({rule}{setting}{', normalised add' if normalise_add else ''})"
    rules = _rules(of_layers, rule.replace("_", "-"), normalise_add)
    return Composite(name, rules, "relevance", by_sign=normalise_add)
