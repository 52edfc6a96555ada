"""What a method asks of a recorded forward pass: attention maps, their flows, projections, block inputs, features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whyformer.engine.operations import operation
from whyformer.engine.readings import bind, tensors
from whyformer.engine.trace import Trace
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

    def map(self) -> Tensor:
        """The attention map A ``[B, H, Q, K]``."""
        if self.weights is None:
            assert self.query is not None
            assert self.key is not None
            self.weights = masked_softmax((self.query @ self.key.transpose(-2, -1)) * self.scale, self.mask)
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
        by_heads: ``seen`` may be called several times for one attention of a gradient pass, each time with some heads
            (in order), so that a long input's maps are never all there at once.
    """

    seen: Callable[[int, Tensor, Tensor], None]
    first: int = 0
    by_heads: bool = False


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
class BlockCalls:
    """(module, args, kwargs, output) of each block in order of execution."""

    found: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Tally:
    """(operation, row of the composite) -> (name of its rule, None if it has none; calls), of operations that carry."""

    found: dict[tuple[str, str], tuple[str | None, int]] = field(default_factory=dict)

    def add(self, name: str, role: str, rule: str | None) -> None:
        """Count one call."""
        self.found[name, role] = (rule, self.found.get((name, role), (rule, 0))[1] + 1)


class Reached(Exception):  # noqa: N818 - no error: the forward pass has gone far enough
    pass


@dataclass(frozen=True)
class Until:
    """The pass ends with :class:`Reached` where that block is called; ``found`` gets what enters it ``[B, N, D]`` and,
    by name, the leaves at which the graph began."""

    call: int
    found: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)


@dataclass
class Projection:
    """The output projection W_O of an attention and, in post-norm models, the normalisation after its residual sum.

    Attributes:
        weight: ``[D, H·d]``; bias ``[D]`` or None.
        norm_weight, norm_input, norm_eps: γ, the summed vectors ``[B, N, D]`` and ε; None in pre-norm models.
    """

    index: int
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_input: Tensor | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True)
class Projections:
    """The :class:`Projection` of each attention's output, by the attention's index."""

    found: dict[int, Projection] = field(default_factory=dict)

    def follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, post_norm: Callable[[int], bool]
    ) -> None:
        """Follow an attention's output to the layer that projects it, and on to a post-norm after the residual sum.

        Args:
            post_norm: whether a normalisation here can be the one after that attention.
        """
        source = next((a for a in tensors(args[:2]) if hasattr(a, "_whyformer_mixed")), None)
        if source is None or not isinstance(result, Tensor):
            return
        stage, index = source._whyformer_mixed
        if stage == "mixed" and name in ("linear", "addmm"):
            weight, bias = (
                (args[2].T, args[0]) if name == "addmm" else (args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
            )
            self.found[index] = Projection(index, weight.detach(), bias if bias is None else bias.detach())
            result._whyformer_mixed = ("projected", index)  # type: ignore[attr-defined]
        elif operation(name).kind == "view" or (stage == "projected" and name == "add"):
            result._whyformer_mixed = ("summed" if name == "add" else stage, index)  # type: ignore[attr-defined]
        elif stage == "summed" and name == "layer_norm" and post_norm(index):
            a = bind("input normalized_shape weight bias eps", args, kwargs, weight=None, eps=1e-5)
            projection = self.found[index]
            weight = torch.ones_like(result[0, 0]) if a["weight"] is None else a["weight"].detach()
            projection.norm_weight, projection.norm_input, projection.norm_eps = weight, a["input"].detach(), a["eps"]


Probe = Maps | Flows | Edit | Features | BlockInputs | BlockCalls | Projections | Trace | Until | Tally


P = TypeVar("P", bound=Probe)


def asked(probes: tuple[Probe, ...], kind: type[P]) -> P | None:
    """The probe of that kind, or None."""
    return next((probe for probe in probes if isinstance(probe, kind)), None)
