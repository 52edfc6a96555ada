"""Units: calls with one meaning, and what single calls mean."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from whyformer.tape.calls import Call
from whyformer.tape.declared import HIDDEN_LAYER
from whyformer.tape.tables import KINDS, REDUCTIONS, SOFTMAXES
from whyformer.tape.values import Tape

__all__ = ["CallReader", "Unit", "dominators", "needed_calls", "reach", "roots_of", "weights"]


@dataclass(frozen=True, eq=False)
class Unit:
    """Calls with one meaning.

    Attributes:
        kind: what a composite has a rule for, such as "layer" or "softmax".
        name: the name of its call, or its kind if it consists of several.
        entries: numbers of the values that carry relevance into it: of a gate the activated branch first, else in the
            order of the operands.
        exits: numbers of the values that carry it out of it. Only a split has more than one.
        calls: numbers of its calls.
        places: of a unit of one call, and of a sum, the position of each entry among the operands of the first call.
        statistics: of a norm that is written out, the values inside it by which it divides.
        axes: of a norm or a softmax, counted from the last.
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
        """Number of its first exit."""
        return self.exits[0]


class CallReader:
    """Units of single calls, in the order of execution, with what is known of the values before."""

    def __init__(
        self, tape: Tape, carry: list[bool], weight: list[bool], needed: set[int], regions: list[Unit]
    ) -> None:
        self.tape, self.carry, self.weight, self.needed = tape, carry, weight, needed
        # values that an activation made, also behind constant factors and shifts (True) or views (False)
        self.activated = {u.exit: True for u in regions if u.kind == "activation"}
        self.reduced: set[int] = set()  # made by a sum or a mean, or by scaling one: their roots are statistics
        self.scaling: set[int] = set()  # made by a root or an inverse of these, or by scaling or clipping one

    def unit(self, call: Call) -> Unit:
        """Return the unit of a call, one of whose operands carries."""
        places = [i for i, o in enumerate(call.operands) if self.carry[o]]
        several = len(places) > 1
        kind, places = self.kind(call, places, several)
        exits = tuple(r for r in call.results if self.carry[r] and r in self.needed)
        self.note(call, kind, exits, kind in ("view", "shift", "scale") and not several)
        entries = tuple(call.operands[i] for i in places)
        return Unit(kind, call.name, entries, exits, (call.number,), tuple(places), axes=_axes(call, self.tape))

    def kind(self, call: Call, places: list[int], several: bool) -> tuple[str, list[int]]:
        """Return the kind of a call, and the positions of its entries in their order."""
        name, first = call.name, call.operands[places[0]]
        kind = call.kind or KINDS.get(name, "other")
        if call.kind == HIDDEN_LAYER and several:
            kind = "product"
        elif kind == "linear":
            others = (o for i, o in enumerate(call.operands) if i not in places)
            constants = all(self.weight[o] or not self.tape.floating(o) for o in others)  # whole numbers choose weights
            kind = "product" if several else "layer" if constants else "weighted sum"
            kind = "scale" if kind == "layer" and _scales(call, self.tape) else kind
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
        elif "batch_norm" in name and call.args[5:6] == (True,):  # an instance norm: statistics of the input itself
            kind = "norm"
        is_statistic = name in REDUCTIONS or first in self.reduced or first in self.scaling
        return "power" if kind == "statistic" and not is_statistic else kind, places

    def note(self, call: Call, kind: str, exits: tuple[int, ...], passing: bool) -> None:
        """Note what is known of the results of a call; ``passing`` if they are those of a branch behind constants."""
        first = next(o for o in call.operands if self.carry[o])
        if kind in ("activation", "rectifier"):
            self.activated.update(dict.fromkeys(exits, True))
        elif passing and first in self.activated:
            self.activated.update(dict.fromkeys(exits, kind != "view" and self.activated[first]))
        if call.name in REDUCTIONS or (first in self.reduced and (passing or kind == "clip")):
            self.reduced.update(exits)
        if kind == "statistic" or (first in self.scaling and (passing or kind == "clip")):
            self.scaling.update(exits)

    def product(self, call: Call, places: list[int]) -> tuple[str, list[int]]:
        """Kind of an elementwise product or quotient of two branches, and the activated branch first."""
        gated = [call.operands[i] in self.activated for i in places]
        sizes = [self.tape.shapes[call.operands[i]].numel() for i in places]
        scaling = [call.operands[i] in self.scaling for i in places]
        reduced = scaling[1] or self._is_reduced(call.operands[places[1]])
        divides = call.name == "div" and (sizes[1] < sizes[0] or reduced)
        if divides or (call.name == "mul" and scaling[0] != scaling[1]):  # one number for many scales, it is no branch
            return "quotient", places if divides or scaling[1] else places[::-1]
        if gated[0] != gated[1]:
            branch = call.operands[places[gated.index(True)]]
            if sizes[0] == sizes[1] or self.activated[branch]:
                return "activated gate", places if gated[0] else places[::-1]
        return "gate", places

    def _is_reduced(self, value: int) -> bool:
        """Return True if a value is one number made of many along an axis, which may be as long as one."""
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


def roots_of(tape: Tape, n: int) -> list[int]:
    """Return where relevance of an input ends: the input itself if it is floating-point, or the vectors that were
    looked up by its ids."""
    if tape.floating(n):
        return [n]
    reached, found = {n}, list[int]()
    for call in tape.calls:
        if call.name == "embedding" and call.operands[1] in reached:
            found += call.results
        elif any(o in reached for o in call.operands):
            reached.update(r for r in call.results if not tape.floating(r))
    return found


def reach(tape: Tape, roots: Iterable[int]) -> list[bool]:
    """Return for each value whether it depends on a root through floating-point values."""
    carry = [False] * len(tape)
    for r in roots:
        carry[r] = True
    for call in tape.calls:
        if KINDS.get(call.name) != "silent" and any(carry[o] for o in call.operands):
            for r in call.results:
                carry[r] = carry[r] or tape.floating(r)
    return carry


def needed_calls(tape: Tape, outputs: Iterable[int], ends: Container[int] = ()) -> list[Call]:
    """Return the calls that some values depend on otherwise than through ``ends``, in the order of execution."""
    needed, found = set(outputs), list[Call]()
    for call in reversed(tape.calls):
        if any(r in needed and r not in ends for r in call.results):
            needed.update(call.operands)
            found.append(call)
    return found[::-1]


def weights(tape: Tape) -> list[bool]:
    """Return for each value whether it is made of values that were given and are no inputs: parameters, buffers,
    constants. Hooks may move weights and ``functional_call`` may replace them, so their identity says nothing."""
    weight = [False] * len(tape)
    for n in tape.given:
        weight[n] = n not in tape.inputs
    constant = [False] * len(tape)  # made of nothing: beside weights they do no harm
    decided = [False] * len(tape)  # whole numbers that the model computed of what it was given, such as its experts
    for call in tape.calls:
        for r in call.results:
            computed = (tape.floating(o) and not (weight[o] or constant[o]) for o in call.operands)
            decided[r] = not tape.floating(r) and (any(decided[o] for o in call.operands) or any(computed))
        chosen = call.name in ("index", "index_select") and any(decided[o] for o in call.operands)
        made_of = call.operands[:1] if chosen else call.operands
        if all(weight[o] or constant[o] for o in made_of):
            kept = weight if any(weight[o] for o in made_of) else constant
            for r in call.results:
                kept[r] = True
    return weight


def _scales(call: Call, tape: Tape) -> bool:
    """Return True for a convolution without bias in which each channel is multiplied by one number."""
    if call.name != "convolution" or call.operand("bias") is not None:
        return False
    given, weight = (tape.shapes[o] for o in call.operands[:2])
    single = weight.numel() == weight[0] == call.argument("groups", 1) == given[1]
    return single and tape.shapes[call.results[0]] == given


def dominators(tape: Tape, carry: list[bool]) -> dict[int, int]:
    """Return for each value that carries the nearest one through which all paths from the roots to it pass; −1 for
    none."""
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
    """Values that carry, each behind those that it is made of."""
    yield from (n for n in range(len(carry)) if carry[n] and n not in tape.maker)
    for call in tape.calls:
        yield from (r for r in call.results if carry[r])
