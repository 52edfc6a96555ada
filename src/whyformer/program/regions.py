"""Regions: parts of the program between a value and one of its dominators that compute one known function, however it
is written. What a region is, is seen from its values, never from a name of a class or a pattern of calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.program.dominators import START, dominators
from whyformer.program.operations import is_in_place, kind_of, names, plain_name
from whyformer.program.record import Call, Program

LONGEST = 60
"""Calls that carry in one region, at most."""
STEPS = 14
"""Dominators above an exit that are tried as its entry."""


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SAME = _words(
    """
    add sub mul div rsub rdiv neg addcmul addcdiv lerp where masked_fill clamp clamp_min clamp_max maximum
    minimum fmax fmin pow rpow reciprocal sqrt rsqrt float double half bfloat16 to type type_as clone contiguous
    dropout exp2 log2 log10 erfc special_erf special_erfc special_ndtr ndtr sinh cosh tan atan arctan asinh
    logaddexp hypot sign heaviside threshold hardshrink softshrink tanhshrink nan_to_num xlogy special_xlog1py
    logit sgn positive copysign copy_ special_log1p special_expm1 special_exp2 special_log_ndtr
    """
) | names("activation")
"""Operations that act on each element by itself."""
_STRAIGHT = _words(
    """
    add sub mul div rsub neg float double half bfloat16 to type type_as clone contiguous dropout positive copy_
    """
)
"""Those among them that are linear, where one operand carries."""


_MIXING = names("linear", "matrix product", "attention") - frozenset(
    ["add", "sub", "mul", "div", "neg", "rsub", "lerp", "addcmul", "mean", "sum", "nansum", "cumsum"]
)
"""Operations of layers and attentions."""


@dataclass(frozen=True)
class Region:
    """A part of the program with one entry and one exit.

    Attributes:
        kind: "softmax", "log_softmax", "layer_norm", "rms_norm" or "activation".
        entry, exit: numbers of its values.
        calls: those that carry, in order.
        axis: along which a softmax or norm works.
        fit: of a norm, (p, k, ε) with (k·(σ^p + ε))^(1/p) what it divides by, σ² the mean square.
        core: of a norm, the call behind which only a weight and a bias follow; else the last call.
    """

    kind: str
    entry: int
    exit: int
    calls: tuple[int, ...]
    axis: int = -1
    fit: tuple[float, float, float] = (2, 1.0, 0.0)
    core: int = -1


@dataclass
class _Search:
    program: Program
    nearest: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nearest = dominators(self.program)
        self.readers = self.program.readers()

    def between(self, entry: int, end: int) -> frozenset[int] | None:
        """The values that carry after the entry, up to the exit; None where there are too many, one is read by
        others, or was made by no call of the model."""
        values, seen, ahead = self.program.values, set(), [end]
        while ahead:
            value = ahead.pop()
            if value == entry or value in seen or not values[value].carries:
                continue
            seen.add(value)
            if len(seen) > LONGEST or values[value].call < 0:
                return None
            ahead += values[value].parents
        for value in seen - {end}:
            for call in self.readers.get(value, ()):
                if any(r not in seen and values[r].carries for r in call.results):
                    return None
        if any(v in seen for v in self.program.outputs if v != end):
            return None
        return frozenset(seen)

    def calls(self, between: Iterable[int]) -> list[Call]:
        numbers = {self.program.values[v].call for v in between}
        return [self.program.calls[n] for n in sorted(numbers) if n >= 0]

    def joins(self, call: Call) -> bool:
        return len({o for o in call.operands if self.program.values[o].carries}) > 1

    def scalar(self, call: Call) -> bool:
        """Whether all that does not carry among its operands are single numbers."""
        values = self.program.values
        return all(values[o].carries or torch.Size(values[o].shape).numel() == 1 for o in call.operands)

    def shifts(self, call: Call, axis: int) -> bool:
        """Whether it adds or takes off what is the same along an axis, which a softmax along it does not see."""
        values = self.program.values
        constants = [values[o].shape for o in call.operands if not values[o].carries]
        dims = len(values[call.results[0]].shape)
        along = [shape[axis - dims] if len(shape) >= dims - axis else 1 for shape in constants]
        return plain_name(call.name) in ("add", "sub", "rsub") and all(n == 1 for n in along)

    def curved(self, call: Call) -> bool:
        """Whether it acts on each element and is not linear there."""
        return self.by_element(call) and (plain_name(call.name) not in _STRAIGHT or self._inverse(call))

    def by_element(self, call: Call) -> bool:
        """Whether it acts on each element by itself."""
        name = plain_name(call.name)
        return name in _SAME or (name in ("max", "min") and len(call.operands) == 2)

    def mixes(self, call: Call, entry: int) -> bool:
        """Whether it mixes the values of a layer: of what one divides by there are far fewer than of what enters."""
        if plain_name(call.name) not in _MIXING:
            return False
        values = self.program.values
        made, entered = (torch.Size(values[v].shape).numel() for v in (call.results[0], entry))
        return 2 * made > entered

    def _inverse(self, call: Call) -> bool:
        """A quotient by what carries."""
        values = self.program.values
        return plain_name(call.name) == "div" and len(call.operands) == 2 and values[call.operands[1]].carries


def regions(program: Program) -> list[Region]:
    """All regions, in the order of their exits; they do not overlap. Single calls that are known by name are none."""
    search = _Search(program)
    found: list[Region] = []
    taken: set[int] = set()
    for end in sorted(search.nearest, reverse=True):
        value = program.values[end]
        if value.call < 0 or end in taken or not value.rows or len(program.calls[value.call].results) > 1:
            continue
        region, between = _region(search, end)
        if region is not None:
            found.append(region)
            taken |= between
    return [_with_affine(search, region, taken) for region in found[::-1]]


def _with_affine(search: _Search, region: Region, taken: set[int]) -> Region:
    """A norm with the weight and the bias that follow it: constants along all axes but its own."""
    if region.kind not in ("layer_norm", "rms_norm"):
        return region
    program, left = search.program, ["mul", "add"]
    while True:
        readers = search.readers.get(region.exit, [])
        if len(readers) != 1 or len(readers[0].results) != 1 or region.exit in program.outputs:
            return region
        call, name = readers[0], plain_name(readers[0].name)
        constants = [program.values[o].shape for o in call.operands if o != region.exit]
        (made,) = call.results
        if made in taken or program.values[made].shape != program.values[region.exit].shape:
            return region
        if (
            name in left
            and call.operands.count(region.exit) == 1
            and len(constants) == 1
            and _along(constants[0], region.axis)
        ):
            left = left[left.index(name) + 1 :]
        elif name not in _COPIES or constants or is_in_place(call.name):
            return region
        region = replace(region, exit=made, calls=(*region.calls, call.number))
        taken.add(made)


def _along(shape: tuple[int, ...], axis: int) -> bool:
    """Whether a constant of this shape differs along one axis only."""
    return all(n == 1 or i - len(shape) == axis for i, n in enumerate(shape))


def _region(search: _Search, end: int) -> tuple[Region | None, frozenset[int]]:
    for reader in (_softmax, _norm, _activation):
        found = reader(search, end)
        if found is not None:
            region, between = found
            if not _known(search, region):
                return region, between
    return None, frozenset()


_COPIES = _words(
    """
    float double half bfloat16 to type type_as clone contiguous dropout nan_to_num positive copy_
    """
)


_NORMS = names("normalisation") | {"batch_norm", "native_layer_norm"}


def _known(search: _Search, region: Region) -> bool:
    """Whether one call of it does it all, and has rules of its own."""
    calls = [search.program.calls[i] for i in region.calls]
    working = [c for c in calls if plain_name(c.name) not in _COPIES and (len(calls) == 1 or kind_of(c.name) != "view")]
    if len(working) != 1:
        return False
    name = plain_name(working[0].name)
    return name in _NORMS or name == region.kind or (region.kind == "activation" and kind_of(name) != "")


def _entries(search: _Search, end: int) -> Iterator[tuple[int, frozenset[int], list[Call]]]:
    """(entry, values, calls) of what may be a region that ends here, from the smallest."""
    program, entry = search.program, end
    for _ in range(STEPS):
        entry = search.nearest.get(entry, START)
        if entry == START:
            return
        between = search.between(entry, end)
        if between is None:
            continue
        if program.values[entry].shape == program.values[end].shape and program.values[entry].rows:
            yield entry, between, search.calls(between)


def _made(kind: str, entry: int, end: int, calls: list[Call], axis: int = -1, **more: Any) -> Region:
    return Region(kind, entry, end, tuple(c.number for c in calls), axis, core=calls[-1].number, **more)


# -- softmax -----------------------------------------------------------------------------------------------------------
def _softmax(search: _Search, end: int) -> tuple[Region, frozenset[int]] | None:
    """y = softmax(x) along an axis, or its logarithm; some y may be 0 (masked)."""
    y = search.program.values[end].rows
    axes = {axis: kind for axis, rows in y.items() if axis >= 0 and (kind := _probabilities(rows, axis))}
    if not axes:
        return None
    best: tuple[Region, frozenset[int]] | None = None
    for entry, between, calls in _entries(search, end):
        if any(search.mixes(c, entry) for c in calls):
            break
        x = search.program.values[entry].rows
        axis = next((a for a, kind in axes.items() if a in x and _exponential(x[a], y[a], a, kind)), None)
        if best is not None:
            added = [c for c in calls if c.number not in best[0].calls]
            if axis is None or not all(search.scalar(c) or search.shifts(c, axis) for c in added):
                break
        if axis is not None:
            dims = len(search.program.values[end].shape)
            best = _made(axes[axis], entry, end, calls, axis - dims), between
    return best


def _probabilities(rows: Tensor, axis: int) -> str | None:
    if rows.shape[axis] < 2:
        return None
    total = rows.double().sum(axis)
    if (
        bool((rows >= 0).all())
        and bool((((total - 1).abs() < 1e-3) | (total.abs() < 1e-9)).all())
        and bool((total > 0.5).any())
    ):
        return "softmax"
    if bool((rows <= 1e-6).all()):
        total = rows.double().exp().sum(axis)
        return "log_softmax" if bool(((total - 1).abs() < 1e-3).all()) else None
    return None


def _exponential(x: Tensor, y: Tensor, axis: int, kind: str) -> bool:
    """Whether log y − x is constant along the axis where y is not 0."""
    x, y = x.double(), y.double()
    live = (y > 1e-12) if kind == "softmax" else (y > -27)
    off = torch.where(live, (y.log() if kind == "softmax" else y) - x, torch.nan)
    middle = off.nanmean(axis, keepdim=True)
    away = (off - middle).abs().nan_to_num(0.0)
    several = live.sum(axis) > 1
    if not bool(several.any()):
        return False
    spread = torch.where(live, x, torch.nan)
    size = (spread - spread.nanmean(axis, keepdim=True)).abs().nan_to_num(0.0)
    return float(away.max()) <= 1e-4 * max(1.0, float(size.max())) and float(size.max()) > 1e-7


# -- norms -------------------------------------------------------------------------------------------------------------
_STATISTICS = _words(
    """
    mean sum var std var_mean std_mean norm linalg_norm linalg_vector_norm normalize layer_norm rms_norm
    group_norm instance_norm einsum matmul nansum avg_pool1d adaptive_avg_pool1d cosine_similarity renorm
    batch_norm linear bmm
    """
)


def _norm(search: _Search, end: int) -> tuple[Region, frozenset[int]] | None:
    """y = (x − c)·s with s constant along an axis, s⁻ᵖ = k(σᵖ + ε): the largest such region; c is the mean or 0."""
    best: tuple[Region, frozenset[int]] | None = None
    y, dims = search.program.values[end].rows, len(search.program.values[end].shape)
    if dims < 2:
        return None
    for entry, between, calls in _entries(search, end):
        names_of = {plain_name(c.name) for c in calls}
        if any(search.mixes(c, entry) for c in calls):
            break
        if not names_of & _STATISTICS or not any(
            kind_of(c.name) in ("statistic", "normalisation", "power", "", "activation") for c in calls
        ):
            continue
        x = search.program.values[entry].rows
        for axis in sorted(a for a in x if a >= 0 and a in y)[::-1]:
            if x[axis].shape[axis] < 3:
                continue
            found = _normalised(x[axis].double().movedim(axis, -1), y[axis].double().movedim(axis, -1), y[axis].dtype)
            if found is not None:
                best = _made(found[0], entry, end, calls, axis - dims, fit=found[1]), between
                break
    return best


def _normalised(x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[str, tuple[float, float, float]] | None:
    loose = {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 2e-2)
    if not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
        return None
    for kind, c in (("layer_norm", x - x.mean(-1, keepdim=True)), ("rms_norm", x)):
        power = c.square().sum(-1, keepdim=True)
        live = (power > 1e-12 * power.max())[..., 0]
        if int(live.sum()) < 1:
            return None
        s = ((c * y).sum(-1, keepdim=True) / torch.where(power > 0, power, 1))[..., 0][live]
        if bool((s <= 0).any()) or float((c[live] * s[:, None] - y[live]).abs().max()) > loose * float(y.abs().max()):
            continue
        fit = _fitted((power[..., 0][live] / x.shape[-1]).sqrt(), s, x.shape[-1], max(loose, 1e-5))
        if fit is not None:
            return kind, fit
    return None


def _fitted(sigma: Tensor, s: Tensor, width: int, loose: float) -> tuple[float, float, float] | None:
    """(p, k, ε) of s⁻ᵖ = k(σᵖ + ε) over the rows, which must differ."""
    if (
        len(s) < 3
        or float(sigma.max()) < (1 + 1e-6) * float(sigma.min())
        or float(s.max()) < (1 + 1e-6) * float(s.min())
    ):
        return None
    for p in (2, 1):
        v, inverse = sigma**p, s**-p
        matrix = torch.stack([v, torch.ones_like(v)], 1)
        solution = torch.linalg.lstsq(matrix, inverse[:, None]).solution[:, 0]
        off = float(((matrix @ solution - inverse).abs() / inverse).max())
        k, e = float(solution[0]), float(solution[1])
        # by the mean square, the unbiased variance, the length
        exact = next(
            (n ** (p / 2) for n in (1.0, width / (width - 1), float(width)) if abs(k / n ** (p / 2) - 1) < 1e-5), k
        )
        k, e = exact, e + float(((k - exact) * v).mean())
        if k > 0 and off <= loose and e > -1e-6 * float(inverse.max()):
            return p, k, max(0.0, e / k)
    return None


# -- activations -------------------------------------------------------------------------------------------------------
_POWERS = ("statistic", "power", "linear")


def _activation(search: _Search, end: int) -> tuple[Region, frozenset[int]] | None:
    """Element by element, not linear, with one entry: the smallest such region, and what else is curved before it."""
    program = search.program
    maker = program.calls[program.values[end].call]
    if not search.by_element(maker) or not (search.curved(maker) or search.joins(maker)):
        return None
    best: tuple[Region, frozenset[int]] | None = None
    for entry, between, calls in _entries(search, end):
        if not all(map(search.by_element, calls)) or any(
            program.values[v].shape != program.values[end].shape for v in between
        ):
            break
        if best is not None:
            added = [c for c in calls if c.number not in best[0].calls]
            # on from one curved call to the next, past what only scales and shifts
            if not all(map(search.scalar, added)):
                break
            if not any(map(search.curved, added)):
                continue
        if any(map(search.joins, calls)) or any(search.curved(c) and kind_of(c.name) not in _POWERS for c in calls):
            best = _made("activation", entry, end, calls), between
    return best
