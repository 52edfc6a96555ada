"""Relevance through linear layers: a common interface for all of them, and the rules that use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from whyformer.tape.adjoints import rows_with_flow, unbroadcast
from whyformer.tape.tables import EXTENSIONS, KINDS, RESHAPES
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape
from whyformer.tape.walking import Flows, Parts, Step, Walk, repeat_unit

__all__ = [
    "Back",
    "LayerRule",
    "alpha_beta",
    "divide",
    "epsilon_rule",
    "finite",
    "gamma_rule",
    "identity",
    "layer_rule",
    "multiply",
    "repeat_without_constant",
    "separate",
    "unchanged",
    "wide",
    "without_constant",
]

Back: TypeAlias = Callable[[Walk, Step, Flows], Parts]
LayerRule: TypeAlias = "Callable[[Layer], Tensor]"
"""Rule of linear layers: takes a layer with the relevance of its output, returns the relevance of its input."""
Part: TypeAlias = Callable[[Tensor], Tensor]
"""Takes weights, returns their positive or negative part, their absolute values, or the weights themselves."""


# -- numbers -----------------------------------------------------------------------------------------------------------
def _least(dtype: torch.dtype) -> float:
    """Return the smallest denominator by which relevance is divided: quotients by larger ones do not overflow."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0. No constant is added to b. Complex numbers are divided part by part."""
    if b.is_complex():
        return _as_pairs(divide, a, b)
    # threshold is several times faster than masked_fill
    return a / torch.threshold(b.abs(), _least(b.dtype), math.inf).copysign(b)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a ⊙ b. Complex numbers are multiplied part by part."""
    return _as_pairs(multiply, a, b) if b.is_complex() else a * b


def _as_pairs(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Apply a function to the real and imaginary parts of complex numbers separately."""
    pairs = (torch.view_as_real(t.to(b.dtype).resolve_conj()) for t in (a, b))
    return torch.view_as_complex(function(*pairs).contiguous())


def finite(value: Tensor) -> Tensor:
    """Replace infinities, such as the −∞ of a mask, by the largest finite numbers, whose product with 0 is 0."""
    if not value.is_floating_point():
        return value
    return value.clamp(torch.finfo(value.dtype).min, torch.finfo(value.dtype).max)


def wide(t: Tensor) -> Tensor:
    """Convert half precision to float32, in which rules compute."""
    return t.float() if t.is_floating_point() and t.itemsize < 4 else t


# -- linear layers -----------------------------------------------------------------------------------------------------
def unchanged(w: Tensor) -> Tensor:
    """Return the weights themselves, see :data:`Part`."""
    return w


positive, negative = partial(torch.clamp, min=0), partial(torch.clamp, max=0)

_AT_ONCE = {"cpu": 2**18}
"""Number of weights whose parts are computed at a time, 2²⁴ on other devices: 1 MB of float32 fits the cache of a
CPU."""


@dataclass(frozen=True)
class Layer:
    """A unit y = f(x; W) + constant, where f consists of any calls and is linear in x and in W. Its calls are repeated.

    Attributes:
        tape: the pass.
        unit: the unit.
        x: value of the entry.
        flow: relevance of y.
    """

    tape: Tape
    unit: Unit
    x: Tensor
    flow: Tensor

    def forward(self, x: Tensor, part: Part) -> Tensor:
        """Return f(x; part(W))."""
        return repeat_without_constant(self.tape, self.unit, {self.unit.entries[0]: x}, part)

    def backward(self, flow: Tensor, part: Part) -> Tensor:
        """Return the adjoint of x ↦ f(x; part(W)), applied to ``flow``."""
        return torch.func.vjp(partial(self.forward, part=part), self.x)[1](flow)[0]

    def y(self) -> Tensor:
        """Return the value of the exit."""
        return wide(self.tape[self.unit.exit])

    def z(self) -> Tensor:
        """Return f(x; W)."""
        return without_constant(self.tape, self.unit)


@dataclass(frozen=True)
class MatrixLayer(Layer):
    """A unit y = x @ W + constant. Parts of W are computed in chunks, so that no second copy of the weights is in
    memory.

    Attributes:
        x: ``[M, I]``, rows of the entry.
        flow: ``[M, O]``, relevance of these rows of y.
        weight: ``[I, O]``, W.
        rows: indices of the rows that ``x`` and ``flow`` hold; None for all.
    """

    weight: Tensor
    rows: Tensor | None = None

    def forward(self, x: Tensor, part: Part) -> Tensor:
        return self._by_parts(lambda w: x @ part(wide(w)), part, 1)

    def backward(self, flow: Tensor, part: Part) -> Tensor:
        return self._by_parts(lambda w: flow @ part(wide(w)).t(), part, 0)

    def _by_parts(self, product: Callable[[Tensor], Tensor], part: Part, axis: int) -> Tensor:
        w = self.weight
        step = max(64, _AT_ONCE.get(w.device.type, 2**24) // w.shape[1 - axis])
        if (part is unchanged and w.itemsize > 2) or w.shape[axis] <= step:
            return product(w)
        return torch.cat([product(p) for p in w.split(step, axis)], -1)

    def y(self) -> Tensor:
        return self._rows_of(wide(self.tape[self.unit.exit]))

    def z(self) -> Tensor:
        constant, y = _constant(self.tape, self.unit), self.tape[self.unit.exit]
        if constant is None:
            return self.y()
        # a sum that was rounded to half precision with the constant must be recomputed without it
        return self.forward(self.x, unchanged) if y.itemsize < 4 else self._rows_of(y - self.tape[constant])

    def _rows_of(self, y: Tensor) -> Tensor:
        y = y.reshape(-1, self.weight.shape[1])
        return y if self.rows is None else y[self.rows]


def relevance_of_layer(tape: Tape, unit: Unit, flow: Tensor, rule: LayerRule, *, every_row: bool = False) -> Tensor:
    """Return the relevance of the entry of a linear unit.

    Args:
        tape: the pass.
        unit: a unit of kind "layer".
        flow: relevance of its exit.
        rule: the rule.
        every_row: compute all rows. By default, rows without relevance may be skipped.
    """
    x, weight = wide(tape[unit.entries[0]]), _matrix(tape, unit)
    flow = flow.to(x.dtype)
    if weight is None:
        return rule(Layer(tape, unit, x, flow))
    width, height = weight.shape
    flow, rows = flow.reshape(-1, height), x.reshape(-1, width)
    subset = None if every_row else rows_with_flow(flow)
    if subset is None:
        return rule(MatrixLayer(tape, unit, rows, flow, weight)).reshape(x.shape)
    relevance = rule(MatrixLayer(tape, unit, rows[subset], flow[subset], weight, subset))
    return relevance.new_zeros(len(flow), width).index_copy_(0, subset, relevance).reshape(x.shape)


def _matrix(tape: Tape, unit: Unit) -> Tensor | None:
    """Return ``[I, O]``, the weights of a unit that computes x @ W for each row; None for other linear maps."""
    first, *rest = (tape.calls[n] for n in unit.calls)
    at = 1 if first.name == "addmm" else 0
    if first.name not in ("mm", "bmm", "matmul", "addmm") or first.kwargs or first.operands[at] != unit.entries[0]:
        return None
    if rest and rest[-1].name == "add":
        rest.pop()
    weight, entry, exit_ = tape[first.operands[at + 1]], tape.shapes[unit.entries[0]], tape.shapes[unit.exit]
    if weight.dim() < 2 or any(c.name not in RESHAPES for c in rest):
        return None
    # the same matrix may have been expanded for all samples
    same = all(n == 1 or step == 0 for n, step in zip(weight.shape[:-2], weight.stride(), strict=False))
    weight = weight[(0,) * (weight.dim() - 2)]
    width, height = weight.shape
    return weight if same and entry.numel() * height == exit_.numel() * width else None


def _constant(tape: Tape, unit: Unit) -> int | None:
    """Return the number of the value that a linear unit adds to its product, such as a bias; None if there is none."""
    first, *rest = (tape.calls[n] for n in unit.calls)
    if rest and rest[-1].name == "add":
        inside = {r for call in (first, *rest) for r in call.results}
        return next(o for o in rest[-1].operands if o not in inside)
    name = {"convolution": "bias", **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), "self")}.get(first.name)
    number = None if name is None else first.operand(name)
    return None if number in unit.entries else number


def without_constant(tape: Tape, unit: Unit) -> Tensor:
    """Return the exit of a linear unit without its constant, such as a bias."""
    if _constant(tape, unit) is None and not _is_extended(tape, unit):
        return wide(tape[unit.exit])
    return repeat_without_constant(tape, unit, {e: wide(tape[e]) for e in unit.entries}, unchanged)


def repeat_without_constant(tape: Tape, unit: Unit, values: dict[int, Tensor], part: Part) -> Tensor:
    """Recompute the exit of a linear unit without its constant, with other entries and a part of the weights.

    Args:
        tape: the pass.
        unit: a linear unit.
        values: maps the number of an entry to its value.
        part: the part of the weights to use.
    """
    constant, sign, calls = _constant(tape, unit), _sign(tape, unit), [tape.calls[n] for n in unit.calls]
    inside = {r for call in calls for r in call.results}
    changes = dict(values)
    for o in (o for call in calls for o in call.operands if tape.floating(o) and o not in inside):
        if o not in changes:
            value = wide(tape[o])
            if o == constant:
                changes[o] = torch.zeros_like(value)
            else:
                changes[o] = sign * part(sign * value) if sign < 0 else part(value)
    result = wide(repeat_unit(tape, unit, changes)[0])
    if _is_extended(tape, unit):
        changes |= {e: torch.zeros_like(value) for e, value in values.items()}
        result = result - wide(repeat_unit(tape, unit, changes)[0])
    return result


def _is_extended(tape: Tape, unit: Unit) -> bool:
    """Return True if a linear unit extends its entry by a constant feature, whose weights are a bias."""
    return tape.calls[unit.calls[0]].name in EXTENSIONS


def _sign(tape: Tape, unit: Unit) -> int:
    """Return the sign of the product of the constant factors in a linear unit."""
    calls = [tape.calls[n] for n in unit.calls]
    factors = [a for c in calls if c.name in ("mul", "div") for a in c.args if type(a) in (int, float)]
    factors += [calls[0].kwargs.get("alpha", 1)]
    return -1 if sum(f < 0 for f in factors) % 2 else 1


def identity(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Pass R to the first entry: the rule of activations, softmax and quotients that normalize. Conserves relevance."""
    entry, (flow,) = step.unit.entries[0], flows.values()
    return [(entry, unbroadcast(flow, walk.tape.shapes[entry]))]


# -- rules of linear layers --------------------------------------------------------------------------------------------
def by_magnitude(coefficients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> LayerRule:
    """Return the rule R_j = x_j Σ_o W_oj a_o + |x_j| Σ_o |W_oj| b_o, with z_oj = W_oj x_j and
    (a, b) = coefficients(R, Σ_j z_oj, Σ_j |z_oj|).

    Rules that treat positive and negative z_oj differently have this form, because z⁺ = (z + |z|) / 2. They need one
    forward product and two backward products.
    """

    def rule(layer: Layer) -> Tensor:
        size = layer.x.abs()
        a, b = coefficients(layer.flow, layer.z(), layer.forward(size, torch.abs))
        return layer.backward(a, unchanged) * layer.x + layer.backward(b, torch.abs) * size

    return rule


def _over_positive(r: Tensor, total: Tensor, magnitude: Tensor) -> Tensor:
    """Return R / 2Σz⁺, where 2Σz⁺ = Σz + Σ|z|; 0 where the denominator is only a rounding error of Σ|z|."""
    noise = 16 * torch.finfo(total.dtype).eps
    above = torch.threshold_((total + magnitude).sub_(magnitude, alpha=noise), _least(total.dtype), math.inf)
    return r / above.add_(magnitude, alpha=noise)


def alpha_beta(alpha: float = 1.0) -> LayerRule:
    """Return the αβ rule, with one denominator for all products of a sign (Bach et al. 2015; TA Eq. 5 for α = 1).
    Without bias.

    R_j = Σ_o (α z_oj⁺ / Σ_k z_ok⁺ − β z_oj⁻ / Σ_k z_ok⁻) R_o with z_oj = W_oj x_j and β = α − 1. Conserves relevance,
    except at outputs that lack products of one sign.
    """

    def coefficients(r: Tensor, total: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        up = _over_positive(r, total, magnitude)
        if alpha == 1:
            return up, up
        up, down = up * alpha, _over_positive(r, -total, magnitude) * (alpha - 1)
        return up + down, up - down

    return by_magnitude(coefficients)


def gamma_rule(gamma: float = 0.25) -> LayerRule:
    """Return the γ rule for entries of any sign (Montavon et al. 2019). Without bias.

    R_j = Σ_o (z_oj + γ z_oj^s) / Σ_k (z_ok + γ z_ok^s) R_o, where z^s = z if z has the sign s of Σ_k z_ok, else 0.
    Conserves relevance.
    """

    def coefficients(r: Tensor, total: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        sign = torch.ones_like(total).copysign(total)
        # z + γ z^s = (1 + γ/2) z + s γ/2 |z|, so the denominator has the sign of Σz
        s = divide(r, total * (1 + gamma / 2) + sign * magnitude * (gamma / 2))
        return s * (1 + gamma / 2), s * sign * (gamma / 2)

    return by_magnitude(coefficients)


def separate(layer: Layer) -> Tensor:
    """Compute x⁺ ⊙ W⁺ᵀ(R / W⁺x⁺) + x⁻ ⊙ W⁻ᵀ(R / W⁻x⁻), the rule of the baseline "LRP" of Chefer et al. 2021. Without
    bias.

    The two terms have separate denominators, so ΣR may double.
    """
    up, down = layer.x.clamp(min=0), layer.x.clamp(max=0)
    by_up = layer.backward(divide(layer.flow, layer.forward(up, positive)), positive)
    by_down = layer.backward(divide(layer.flow, layer.forward(down, negative)), negative)
    return by_up * up + by_down * down


def epsilon_rule(epsilon: float = 1e-6) -> LayerRule:
    """Return the ε rule, R_j = x_j Σ_o W_oj R_o / (y_o + ε sign(y_o)) (Bach et al. 2015). y includes the bias,
    which absorbs its part of R."""

    def rule(layer: Layer) -> Tensor:
        y = layer.y()
        return layer.backward(divide(layer.flow, y + torch.full_like(y, epsilon).copysign(y)), unchanged) * layer.x

    return rule


def box(low: Tensor, high: Tensor) -> LayerRule:
    """Return the z^B rule for a first layer on pixels (Montavon et al. 2017; TA's rule for the patch embedding).
    Without bias.

    R = x ⊙ Wᵀs − l ⊙ W⁺ᵀs − h ⊙ W⁻ᵀs with s = R / (Wx − W⁺l − W⁻h), where [l, h] is the range of the values of each
    sample. Conserves relevance.

    Args:
        low, high: l and h in the shape of the entry.
    """

    def rule(layer: Layer) -> Tensor:
        x = layer.x
        bounds = low.reshape(x.shape), high.reshape(x.shape)
        parts: tuple[tuple[Tensor, Part], ...] = ((x, unchanged), (-bounds[0], positive), (-bounds[1], negative))
        s = divide(layer.flow, torch.stack([layer.forward(v, w) for v, w in parts]).sum(0))
        return torch.stack([layer.backward(s, w) * v for v, w in parts]).sum(0)

    return rule


def layer_rule(rule: LayerRule) -> Back:
    """Return the rule for units of kind "layer": ``rule``, or the z^B rule if the layer reads an input of the
    model."""

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        unit, (flow,) = step.unit, flows.values()
        if not _reads_input(walk, unit.entries[0]):
            return [(unit.entries[0], relevance_of_layer(walk.tape, unit, flow, rule))]
        entry = unit.entries[0]
        bounds = walk.samples.ranges(entry, wide(walk.tape[entry]))
        return [(entry, relevance_of_layer(walk.tape, unit, flow, box(*bounds), every_row=True))]

    return back


def _reads_input(walk: Walk, value: int) -> bool:
    """Return True if a value is a root with at least three axes that was passed to the model, or a view of such
    roots."""
    tape, program, todo, visited = walk.tape, walk.program, [value], set[int]()
    while todo:
        value = todo.pop()
        if value in visited:
            continue
        visited.add(value)
        if value in program.roots:
            if value not in tape.inputs or len(tape.shapes[value]) < 3:
                return False
        elif value not in tape.maker or KINDS.get(tape.maker[value].name) != "view":
            return False
        else:
            todo += [o for o in tape.maker[value].operands if program.carry[o]]
    return True
