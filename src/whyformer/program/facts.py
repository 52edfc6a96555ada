"""What is known of a model's program, by number of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whyformer.program.attentions import attentions
from whyformer.program.blocks import ModuleCall, blocks, fits
from whyformer.program.operations import is_in_place, plain_name
from whyformer.program.record import Program
from whyformer.program.regions import Region, regions
from whyformer.program.samples import leading, undecided


@dataclass(frozen=True)
class Step:
    """A region as a pass meets it.

    Attributes:
        enters: (call, position among its tensor operands) where its entry is read first.
        leaves: the call that makes its exit.
        writes: whether a call of it works in place.
    """

    region: Region
    enters: tuple[int, int]
    leaves: int
    writes: bool = False


@dataclass(frozen=True)
class Facts:
    """Read off one program.

    Attributes:
        calls: the operations, by number.
        steps: call -> the region that it is part of.
        inputs: the calls that read what the model was given, however it is rearranged.
        blocks: (the call that makes what enters, the call that makes what leaves) of each block; none where the program
            is no chain of them.
        listed: whether modules that the model keeps in containers are the blocks.
        maps: call -> the position among its tensor operands of the attention map ``[..., N, N]`` that it mixes values
            with, where that is not seen from one call of softmax alone.
        undecided: the attentions whose shape leaves open whether their leading axes hold heads or samples first, which
            one sample cannot tell.
        heads_first: those in which it is heads.
        scattered: those of one leading axis in which it is neither.
        weights: the calls that compute weights from weights.
        opaque: the calls in autograd functions of which it is not known what they work on or do.
    """

    calls: tuple[str, ...]
    steps: dict[int, Step] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    opaque: frozenset[int] = frozenset()
    blocks: tuple[tuple[int, int], ...] = ()
    listed: bool = True
    weights: frozenset[int] = frozenset()
    maps: dict[int, int] = field(default_factory=dict)
    undecided: frozenset[int] = frozenset()
    heads_first: frozenset[int] = frozenset()
    scattered: frozenset[int] = frozenset()

    @property
    def written_norms(self) -> bool:
        """Whether a norm is written out in several calls."""
        return any("norm" in step.region.kind for step in self.steps.values())


def facts_of(program: Program, modules: Sequence[ModuleCall] = (), samples: int = 1) -> Facts:
    """All that the engine follows; ``modules`` are the calls of those that containers list."""
    steps: dict[int, Step] = {}
    found = regions(program)
    for region in found:
        first = program.calls[region.calls[0]]
        writes = any(is_in_place(program.calls[n].name) for n in region.calls)
        step = Step(region, (first.number, first.operands.index(region.entry)), region.calls[-1], writes)
        if program.values[region.exit].call == step.leaves:
            steps.update(dict.fromkeys(region.calls, step))
    inputs = frozenset(c.number for c in program.calls if any(program.values[o].given for o in c.operands))
    opaque = frozenset(c.number for c in program.calls if any(program.values[r].opaque for r in c.results))
    values = program.values
    weights = frozenset(c.number for c in program.calls if c.results and all(values[r].weight for r in c.results))
    mixing = attentions(program, found)
    attending, maps = [m.call for m in mixing], {m.call.number: m.weights for m in mixing if m.square and not m.direct}
    spans = blocks(program, attending)
    listed = not spans or fits(program, modules, attending, spans)
    calls = tuple(plain_name(c.name) for c in program.calls)
    leading_open = undecided(program, mixing, samples)
    return Facts(calls, steps, inputs, opaque, spans, listed, weights, maps, leading_open)


def with_samples(facts: Facts, program: Program, rolled: Program, samples: int) -> Facts:
    """The same facts, with the order of heads and samples as another pass shows it, of the last sample first."""
    order = leading(program, rolled, facts.undecided, samples)
    ahead, none = (frozenset(n for n, first in order.items() if first == other) for other in ("heads", ""))
    flat = frozenset(n for n in none if len(program.values[program.calls[n].results[0]].shape) == 3)
    return replace(facts, undecided=frozenset(), heads_first=ahead, scattered=flat)
