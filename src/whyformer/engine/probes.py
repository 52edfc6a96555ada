"""What a method asks of a recorded forward pass: attention maps, their flows, projections, block inputs, features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from whyformer.engine.isolation import here
from whyformer.engine.norms import MeasuredNorm
from whyformer.engine.operations import is_in_place, operation
from whyformer.engine.readings import attention_scores, bind, is_map, tensors
from whyformer.engine.shares import GraphShares
from whyformer.engine.trace import Trace
from whyformer.models.facts import Block
from whyformer.rules.relevance.attention import masked_softmax


@dataclass
class AttentionCall:
    """One attention of the forward pass, as :class:`Maps` shows it.

    Attributes:
        index: 0-based position among the attentions of the pass.
        block: index of the block it lies in, or None outside all blocks (a pooling head).
        query, key: ``[B, H, N, d]``, None where the model computes its map itself (eager attention).
        value: ``[B, H, K, d]``.
    """

    index: int
    block: int | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    weights: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, queries, keys)"""
        asked = self.weights if self.query is None else self.query
        assert asked is not None
        return int(self.value.shape[0]), int(asked.shape[-2]), int(self.value.shape[-2])

    def at(self, move: Callable[[Tensor], Tensor]) -> AttentionCall:
        """Itself where ``move`` leaves its tensors where they are, else one of moved tensors."""
        if move(self.value) is self.value:
            return self
        given = (self.query, self.key, self.mask, self.weights)
        query, key, mask, weights = (None if t is None else move(t) for t in given)
        return replace(self, query=query, key=key, value=move(self.value), mask=mask, weights=weights)

    def map(self) -> Tensor:
        """The attention map A ``[B, H, Q, K]``."""
        if self.weights is None:
            assert self.query is not None
            assert self.key is not None
            self.weights = masked_softmax((self.query @ self.key.transpose(-2, -1)).mul_(self.scale), self.mask)
        return self.weights


@dataclass(frozen=True)
class Maps:
    """In the forward pass: ``seen`` is called with each :class:`AttentionCall`."""

    seen: Callable[[AttentionCall], None]


@dataclass(frozen=True)
class Flows:
    """In each backward pass: ``seen`` is called with (attention index, A, flow into A), ``[B, H, Q, K]`` each.

    Attributes:
        first: the graph begins at the map of this attention (0-based, among the attentions of the blocks).
        by_heads: ``seen`` may be called several times for one attention of a pass, each time with some heads (in
            order), so that a long input's maps are never all there at once.
    """

    seen: Callable[[int, Tensor, Tensor], None]
    first: int = 0
    by_heads: bool = False


@dataclass(frozen=True)
class AttentionScores:
    """In the forward pass: attention's number -> what gives its scores before the softmax ``[B, H, Q, K]``, −∞ (or
    nearly) where the mask forbids."""

    found: dict[int, Callable[[], Tensor]] = field(default_factory=dict)

    def __call__(self, mode: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Look at one operation."""
        if here.run is not mode or not isinstance(result, Tensor):
            return result
        stage, index = getattr(result, "_whyformer_mixed", ("", -1))
        if stage == "mixed" and operation(name).kind == "attention":
            self.found[index] = attention_scores(args, kwargs)[0]
        elif stage == "mixed" and hasattr(args[0], "_whyformer_scores"):
            self.found[index] = args[0]._whyformer_scores.detach
        elif is_map(result) and (name == "softmax" or hasattr(args[0], "_whyformer_scores")):
            scores = args[0] if name == "softmax" else args[0]._whyformer_scores
            result._whyformer_scores = scores  # type: ignore[attr-defined]
        return result


@dataclass(frozen=True)
class Edit:
    """``change`` is called with (A, value, A·V) of each attention and returns what to use instead of A·V."""

    change: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Features:
    """A root in each of these blocks: its first normalisation if that comes before the attention, else its input."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class BlockInputs:
    """The input of each block in order of execution, ``[B, N, D]``."""

    found: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Entering:
    """These rows ``[B, N, D]`` enter the first block in place of its own; they may be fewer."""

    rows: Tensor


@dataclass(frozen=True)
class BlockFlows:
    """In each backward pass: ``seen`` is called with (block call, what enters it ``[B, N, D]``, flow into that), for
    the calls in ``blocks``."""

    blocks: frozenset[int]
    seen: Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class BlockCalls:
    """(block, args, kwargs, output) of each call of the ``blocks`` in order of execution."""

    found: list[tuple[Block, tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


# where the channels of what a layer returns stand
_CHANNELS = {"linear": -1, "matmul": -1, "addmm": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}


class Reached(Exception):  # noqa: N818 - no error: the forward pass has gone far enough
    pass


@dataclass(frozen=True)
class Until:
    """The pass ends with :class:`Reached` where that block is called; ``found`` gets what enters it ``[B, N, D]`` and,
    by name, the leaves at which the graph began."""

    call: int
    found: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)


@dataclass(frozen=True)
class FirstLayer:
    """The pass ends with :class:`Reached` behind the first linear map or convolution that the root reaches; ``found``
    as of :class:`Until`, of what that returned, the channels last."""

    found: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)

    def __call__(self, mode: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Look at one operation."""
        if here.run is mode and name in _CHANNELS and isinstance(result, Tensor) and result.requires_grad:
            self.found.append((result.movedim(_CHANNELS[name], -1), {"": mode.roots[0]}))
            raise Reached
        return result


@dataclass
class Projection:
    """The output projection W_O of an attention, with what follows it on the way to the end of the block.

    Attributes:
        weight: ``[D, H·d]``; bias ``[D]`` or None. A constant scale of the branch (LayerScale) is part of both.
        behind: the normalisations of the branch before it is added, in order.
        branch: ``[B, N, D]`` what is added; summed: the first sum that it enters; further: the next sum, of that with
            something else. None where none was seen.
        norm: in post-norm models, the normalisation of that sum.
        second: the normalisation of the sum that its output enters in turn (behind the MLP).
        joined: the attentions whose heads it takes, in order: several where each head attends by itself.
    """

    index: int
    weight: Tensor
    bias: Tensor | None
    behind: list[MeasuredNorm] = field(default_factory=list)
    branch: Tensor | None = None
    summed: Tensor | None = None
    further: Tensor | None = None
    norm: MeasuredNorm | None = None
    second: MeasuredNorm | None = None
    joined: tuple[int, ...] = ()

    def turn(self, turned: Callable[[Tensor], Tensor], move: Callable[[Tensor], Tensor]) -> None:
        """Lay the vectors out batch first, all on one device."""
        self.weight, self.bias = move(self.weight), None if self.bias is None else move(self.bias)
        if self.summed is not None and self.branch is not None:
            self.branch, self.summed = move(turned(self.branch)), move(turned(self.summed))
            self.further = None if self.further is None else move(turned(self.further))
        for one in (*self.behind, self.norm, self.second):
            if one is not None:
                one.turn(turned, move)

    def scale(self, stage: str, factor: Tensor | float) -> None:
        """What is there at this stage is multiplied by a constant ``[D]``."""
        last = {"normed": self.norm, "done": self.second}.get(stage, self.behind[-1] if self.behind else None)
        if last is None:
            self.weight = (self.weight.mT * factor).mT
            self.bias = None if self.bias is None else self.bias * factor
        else:
            last.weight, last.bias = last.weight * factor, None if last.bias is None else last.bias * factor


@dataclass(frozen=True)
class Projections:
    """The :class:`Projection` of each attention's output, by the attention's index."""

    found: dict[int, Projection] = field(default_factory=dict)
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        post_norm: Callable[[int], bool],
        written: MeasuredNorm | None = None,
    ) -> None:
        """Follow an attention's output to the layer that projects it, and on to the sums and norms of its block.

        Args:
            post_norm: whether a normalisation here can be one after that attention.
            written: the normalisation that several calls compute.
        """
        marked = [a for a in tensors(args[:2]) if hasattr(a, "_whyformer_mixed")]
        if not marked or not isinstance(result, Tensor):
            return
        source: Any = max(marked, key=lambda a: a._whyformer_mixed[1])  # the latest attention's
        stage, index = source._whyformer_mixed
        row = operation(name)
        if stage == "mixed" and name in ("linear", "addmm"):
            if name == "addmm":
                weight, bias = args[2].T, args[0]
            else:
                given = bind("input weight bias", args, kwargs, bias=None)
                weight, bias = given["weight"], given["bias"]
            bias, joined = bias if bias is None else bias.detach(), self.joined.get(index, (index,))
            self.found[index] = Projection(index, weight.detach(), bias, joined=joined)
            stage = "projected"
        elif stage == "mixed" and row.name in ("cat", "stack") and len(marked) == len(tensors(args[:2])):
            several = [one._whyformer_mixed[1] for one in marked]
            self.joined[index] = tuple(n for one in several for n in self.joined.get(one, (one,)))
        elif row.name in _FACTORS.get(stage, ()) and (stage != "done" or post_norm(index)):
            others = [a for a in (*args, *kwargs.values()) if a is not source]
            factors = [_factor(f, result) for f in (others[1:] if row.name == "addcmul" else others)]
            if any(f is None for f in factors) or (row.name == "div" and args[0] is not source):
                return
            for factor in factors:
                self.found[index].scale(stage, 1 / factor if row.name == "div" else factor)
            if row.name == "addcmul":
                stage = self._sum(index, stage, result, result - others[0])
        elif stage in _SUMS and row.name == "add":
            times = kwargs.get("alpha", 1)
            own = times if len(args) > 1 and source is args[1] else 1
            self.found[index].scale(stage, own)
            written_to = source is args[0] and is_in_place(name)
            stage = self._sum(index, stage, result, result - args[1] * times if written_to else source * own)
        elif (written is not None or name in ("layer_norm", "rms_norm")) and (stage == "projected" or post_norm(index)):
            stage = self._norm(index, stage, written or MeasuredNorm.of_call(name, args, kwargs, result))
        elif stage == "summed" and row.name == "add":  # the sum itself goes on, so what normalised it was a branch
            self.found[index].norm = self.found[index].second = None
            self.found[index].further = result.detach().clone()
            return
        elif row.kind != "view":
            return
        result._whyformer_mixed = (stage, index)  # type: ignore[attr-defined]


    def _norm(self, index: int, stage: str, norm: MeasuredNorm) -> str:
        """A norm of the branch, of the sum, or of the sum behind that."""
        projection = self.found[index]
        if stage == "projected":
            projection.behind.append(norm)
        elif stage == "summed":
            projection.norm, stage = norm, "normed"
        elif stage == "summed again":
            projection.second, stage = norm, "done"
        else:  # another norm on the way: it is followed no further
            stage = ""
        return stage

    def _sum(self, index: int, stage: str, result: Tensor, added: Tensor) -> str:
        """The first sum that a branch enters, or one behind its norm."""
        if stage == "projected":
            projection = self.found[index]
            projection.summed, projection.branch = result.detach().clone(), added.detach().clone()
        return _SUMS[stage]


def _factor(value: Any, result: Tensor) -> Any:
    """A number, or a vector ``[D]``, by which all rows are multiplied; None where they are not."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value.detach().reshape(()) if isinstance(value, Tensor) else value
    return value.detach().flatten() if value.shape[-1] == value.numel() == result.shape[-1] else None


_FACTORS = {"projected": ("mul", "div", "addcmul"), "normed": ("mul", "div"), "done": ("mul", "div")}
_SUMS = {"projected": "summed", "normed": "summed again"}


Probe = (
    Maps
    | Flows
    | AttentionScores
    | Edit
    | Features
    | BlockInputs
    | Entering
    | BlockFlows
    | BlockCalls
    | Projections
    | Trace
    | GraphShares
    | Until
    | FirstLayer
)


P = TypeVar("P", bound=Probe)


def asked(probes: tuple[Probe, ...], kind: type[P]) -> P | None:
    """The probe of that kind, or None."""
    return next((probe for probe in probes if isinstance(probe, kind)), None)
