"""Units of a program, the kinds of single calls, and which values depend on the roots or on weights.

A value *carries* (relevance) if it depends on a root through floating-point values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whyformer.tape.calls import Call
from whyformer.tape.custom_ops import OPAQUE_LAYER
from whyformer.tape.tables import KINDS, REDUCTIONS, SOFTMAXES, name_set
from whyformer.tape.values import Tape

__all__ = [
    "ACTIVATIONS",
    "PRODUCT_KINDS",
    "UNNORMALIZED",
    "CallReader",
    "Unit",
    "dominators",
    "is_diagonal",
    "reach",
    "reduced_axes",
    "roots_of",
    "scales",
    "weights",
]

UNNORMALIZED = "unnormalized attention"
"""The kind of a product exp(S) v of scores S = q kᵀ, which the model divides by Σ exp(S) afterwards, and of the
division of a product g(S) v by Σ g(S) for another activation g."""

PRODUCT_KINDS = ("product", "activated product")
"""The kinds of matrix products of two branches. In an "activated product" g(S) v, the first branch is an attention map
without softmax: an activation g, such as a sigmoid, of scores S = q kᵀ."""

ACTIVATIONS = ("activation", "rectifier", "clip")
"""The kinds of functions of one variable that are applied to each element."""

_VIEWS = ("view", "shift", "scale")
_PRESERVED_BY: dict[str, tuple[str, ...]] = {
    "reduced": (*_VIEWS, "clip"),  # sums and means
    "statistic": (*_VIEWS, "clip"),  # square roots or inverses of sums and means, by which a norm divides
    "scores": (*_VIEWS, "add", "join"),  # products of two branches
    "exponential": (*_VIEWS, "add", "join"),  # exp(S) of scores S
    "map": (*_VIEWS, *ACTIVATIONS, "quotient"),  # activations of scores: attention maps without softmax
    "map product": _VIEWS,  # products of such maps and values
    "map sum": (*_VIEWS, "clip", "statistic"),  # sums of such maps
}
"""Property of a value -> kinds of units that preserve it. A "join" is a view of several branches."""

_KEEP_DIAGONAL = name_set("t transpose expand clone contiguous alias unsqueeze _to_copy mul div")
"""Calls that keep a matrix diagonal."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One or several calls to which a composite applies one rule.

    Attributes:
        kind: the key of its rule in a composite, such as "layer" or "softmax".
        name: the name of its call; the kind if it consists of several calls.
        entries: numbers of its inputs that carry, in the order of the operands; for an activated gate or
            product, the activated branch first.
        exits: numbers of its outputs. Only a split has more than one.
        calls: numbers of its calls.
        places: for a unit of one call, and for a sum, the position of each entry among the operands of the first call.
        statistics: for a norm that consists of several calls, the values inside it by which it divides.
        axes: for a norm or a softmax, its axes (negative).
    """

    kind: str
    name: str
    entries: tuple[int, ...]
    exits: tuple[int, ...]
    calls: tuple[int, ...]
    places: tuple[int, ...] = ()
    statistics: frozenset[int] = frozenset()
    axes: tuple[int, ...] = (-1,)

    @property
    def exit(self) -> int:
        """Number of the first exit."""
        return self.exits[0]


class CallReader:
    """Turn single calls into units. Calls must be passed in the order of execution, because the kind of some depends on
    how their operands were computed."""

    def __init__(
        self, tape: Tape, carry: list[bool], weight: list[bool], needed: set[int], regions: list[Unit]
    ) -> None:
        self.tape, self.carry, self.weight, self.needed = tape, carry, weight, needed
        # value -> True for the output of an activation, also scaled or shifted; False after a view has rearranged it
        self.regions = {u.exit: u.entries[0] for u in regions if u.kind == "activation"}
        self.activated = dict.fromkeys(self.regions, True)
        self.values = {name: set[int]() for name in _PRESERVED_BY}  # property -> the values that have it

    def unit(self, call: Call) -> Unit:
        """Return the unit of a call of which at least one operand carries."""
        places = [i for i, o in enumerate(call.operands) if self.carry[o]]
        several = len(places) > 1
        kind, places = self.kind(call, places, several)
        exits = tuple(r for r in call.results if self.carry[r] and r in self.needed)
        entries = tuple(call.operands[i] for i in places)
        self.classify(call, "join" if kind == "view" and several else kind, entries, exits)
        return Unit(kind, call.name, entries, exits, (call.number,), tuple(places), axes=_axes(call, self.tape))

    def kind(self, call: Call, places: list[int], several: bool) -> tuple[str, list[int]]:
        """Return the kind of a call, and the positions of its entries among the operands, in the order of the unit."""
        name, first = call.name, call.operands[places[0]]
        kind = call.kind or KINDS.get(name, "other")
        if call.kind == OPAQUE_LAYER and several:
            kind = "product"
        elif kind == "linear":
            others = (o for i, o in enumerate(call.operands) if i not in places)
            constants = all(self.weight[o] or not self.tape.floating(o) for o in others)  # integers index weights
            kind = "layer" if constants else "weighted sum"
            kind = "scale" if kind == "layer" and scales(call, self.tape) else kind
            kind, places = self.matrix_product(call, places) if several else (kind, places)
        elif kind == "add":
            kind = "add" if several else "shift"
        elif kind == "mul":
            kind, places = self.product(call, places) if several else ("scale", places)
        elif kind == "mean" or (kind == "solve" and places == [1]):
            kind = "weighted sum"
        elif kind == "activation" and several:
            kind = "other"
        elif name in ("addcdiv", "lerp") and not several:
            kind = "scale"
        elif name == "pow":
            kind = _power(call)
        elif "batch_norm" in name and call.args[5:6] == (True,):  # an instance norm: statistics of its own input
            kind = "norm"
        is_statistic = name in REDUCTIONS or any(first in self.values[p] for p in ("reduced", "statistic"))
        return "power" if kind == "statistic" and not is_statistic else kind, places

    def classify(self, call: Call, kind: str, entries: tuple[int, ...], exits: tuple[int, ...]) -> None:
        """Record the properties of the results of a call: those that its unit preserves, and those that it creates."""
        first = entries[0]
        if kind in ("activation", "rectifier"):
            self.activated.update(dict.fromkeys(exits, True))
        elif kind in _VIEWS and first in self.activated:
            self.activated.update(dict.fromkeys(exits, kind != "view" and self.activated[first]))
        sources = entries if kind in ("add", "join") else entries[:1]
        preserved = [name for name, kinds in _PRESERVED_BY.items() if kind in kinds and self._any(name, sources)]
        for name in (*preserved, *self._created(call, kind, first)):
            self.values[name].update(exits)

    def _created(self, call: Call, kind: str, first: int) -> Iterator[str]:
        """Yield the properties that a call creates, whether or not its first entry has them."""
        is_of_scores = first in self.values["scores"]
        if call.name in REDUCTIONS:
            yield "reduced"
            yield from ["map sum"] if self._any("map", [first]) else []
        if kind == "statistic":
            yield "statistic"
        if kind in PRODUCT_KINDS:
            yield "scores"
        if kind == "activated product":
            yield "map product"
        if kind in ACTIVATIONS and is_of_scores:
            yield "map"
        if call.name in ("exp", "exp2") and is_of_scores:
            yield "exponential"

    def _any(self, name: str, values: Iterable[int]) -> bool:
        """Return True if any of the values has a property; "map" includes results of activations of several calls on
        scores."""
        having = self.values[name]
        return any(v in having or (name == "map" and self.regions.get(v) in self.values["scores"]) for v in values)

    def matrix_product(self, call: Call, places: list[int]) -> tuple[str, list[int]]:
        """Return the kind of a matrix product of two branches, and the positions of its entries; a map comes first."""
        if self._any("exponential", call.operands):
            return UNNORMALIZED, places
        activated = [self._any("map", [call.operands[i]]) for i in places]
        if sum(activated) != 1:
            return "product", places
        return "activated product", sorted(places, key=lambda i: not activated[places.index(i)])

    def product(self, call: Call, places: list[int]) -> tuple[str, list[int]]:
        """Return the kind of an elementwise product or quotient of two branches, and the positions of its entries. The
        activated branch of a gate, and the dividend of a quotient, come first."""
        gated = [call.operands[i] in self.activated for i in places]
        sizes = [self.tape.shapes[call.operands[i]].numel() for i in places]
        scaling = [call.operands[i] in self.values["statistic"] for i in places]
        reduced = scaling[1] or self._is_reduced(call.operands[places[1]])
        divides = call.name == "div" and (sizes[1] < sizes[0] or reduced)
        if divides or (call.name == "mul" and scaling[0] != scaling[1]):  # a statistic of each row, as in a norm
            places = places if divides or scaling[1] else places[::-1]
            dividend, divisor = (call.operands[i] for i in places)
            is_late = dividend in self.values["map product"] and divisor in self.values["map sum"]
            return UNNORMALIZED if is_late else "quotient", places
        if gated[0] != gated[1]:
            branch = call.operands[places[gated.index(True)]]
            if sizes[0] == sizes[1] or self.activated[branch]:
                return "activated gate", places if gated[0] else places[::-1]
        return "gate", places

    def _is_reduced(self, value: int) -> bool:
        """Return True if a value is the result of a reduction, even along an axis of size 1."""
        return value in self.tape.maker and self.tape.maker[value].name in REDUCTIONS


def _power(call: Call) -> str:
    exponent = call.args[1] if len(call.args) > 1 else None
    if not isinstance(exponent, int | float):
        return "power"
    if abs(exponent) == 0.5:
        return "statistic"
    return "activation" if exponent >= 1 and exponent == int(exponent) else "power"


def _axes(call: Call, tape: Tape) -> tuple[int, ...]:
    dims = len(tape.shapes[call.operands[0]])
    if call.name in SOFTMAXES or call.name == "_log_softmax":
        axis = call.args[1]
        return (axis - dims if axis >= 0 else axis,)
    if call.name in ("native_layer_norm", "_fused_rms_norm"):
        return tuple(range(-len(call.args[1]), 0))
    return (-1,)


def reduced_axes(call: Call, tape: Tape) -> tuple[int, ...]:
    """Return the (negative) axes along which a call reduces; () if it names none."""
    dims, dim = len(tape.shapes[call.operands[0]]), call.argument("dim")
    axes = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    return tuple(sorted(a - dims if a >= 0 else a for a in axes))


def roots_of(tape: Tape, n: int) -> list[int]:
    """Return the values at which relevance of input ``n`` is read: the input itself if it is floating-point, else the
    embeddings that were looked up by its ids."""
    if tape.floating(n):
        return [n]
    ids, embeddings = {n}, list[int]()
    for call in tape.calls:
        if call.name == "embedding" and call.operands[1] in ids:
            embeddings += call.results
        elif any(o in ids for o in call.operands):
            ids.update(r for r in call.results if not tape.floating(r))
    return embeddings


def reach(tape: Tape, roots: Iterable[int]) -> list[bool]:
    """Return, for each value, whether it depends on a root through floating-point values."""
    carry = [False] * len(tape)
    for r in roots:
        carry[r] = True
    for call in tape.calls:
        if KINDS.get(call.name) != "silent" and any(carry[o] for o in call.operands):
            for r in call.results:
                carry[r] = carry[r] or tape.floating(r)
    return carry


def weights(tape: Tape) -> list[bool]:
    """Return, for each value, whether it is computed only from leaves that are not inputs: parameters, buffers,
    constants. The identity of the tensors is not used, since hooks may move weights and ``functional_call`` may replace
    them."""
    weight = [False] * len(tape)
    for n in tape.leaves:
        weight[n] = n not in tape.inputs
    constant = [False] * len(tape)  # computed without any operand, as by torch.arange
    decided = [False] * len(tape)  # integers computed from activations, such as the choice of experts
    for call in tape.calls:
        for r in call.results:
            computed = (tape.floating(o) and not (weight[o] or constant[o]) for o in call.operands)
            decided[r] = not tape.floating(r) and (any(decided[o] for o in call.operands) or any(computed))
        selects_rows = call.name in ("index", "index_select") and any(decided[o] for o in call.operands)
        sources = call.operands[:1] if selects_rows else call.operands
        if all(weight[o] or constant[o] for o in sources):
            flags = weight if any(weight[o] for o in sources) else constant
            for r in call.results:
                flags[r] = True
    return weight


def scales(call: Call, tape: Tape) -> bool:
    """Return True if a product with weights multiplies each feature by a scalar: a depthwise convolution with kernel
    size 1, or a product with a matrix that is diagonal for all weights."""
    if call.name != "convolution":
        return any(is_diagonal(tape, o) for o in call.operands)
    before, weight = (tape.shapes[o] for o in call.operands[:2])
    single = weight.numel() == weight[0] == call.argument("groups", 1) == before[1]
    return single and tape.shapes[call.results[0]] == before


def is_diagonal(tape: Tape, n: int) -> bool:
    """Return True if value ``n`` consists of diagonal square matrices."""
    call, shape = tape.maker.get(n), tape.shapes[n]
    if call is None or shape[-1:] != shape[-2:-1]:
        return False
    if call.name in ("diag_embed", "eye"):
        return True
    factors = call.operands if call.name == "mul" else call.operands[:1]
    return call.name in _KEEP_DIAGONAL and any(is_diagonal(tape, o) for o in factors)


def dominators(tape: Tape, carry: list[bool]) -> dict[int, int]:
    """Return the immediate dominator of each value that carries: the nearest value through which all paths from the
    roots to it pass; −1 if there is none."""
    above: dict[int, int] = {}
    depth = {-1: 0}
    for v in _in_order(tape, carry):
        before = [o for o in tape.maker[v].operands if carry[o]] if v in tape.maker else []
        d = before[0] if before else -1
        for b in before[1:]:
            while d != b:
                if depth[d] >= depth[b]:
                    d = above[d]
                else:
                    b = above[b]
        above[v], depth[v] = d, depth[d] + 1
    return above


def _in_order(tape: Tape, carry: list[bool]) -> Iterable[int]:
    """Yield the values that carry, in topological order."""
    yield from (n for n in range(len(carry)) if carry[n] and n not in tape.maker)
    for call in tape.calls:
        yield from (r for r in call.results if carry[r])
