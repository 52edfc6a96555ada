"""Reduction of attention maps to one score per token, by heads, layers and rows; one setting for all methods over maps.

Mylonas et al. treat these choices as hyperparameters. Every method over maps takes
``aggregation``, a mapping with any of the keys below; keys that are left out have the method's defaults.

* ``heads``: "mean", "max", "min", the index of a head or a list of indices (averaged; each counts once);
* ``layers``: "rollout" (product of row-normalised I + A), "product" (of A), "sum_product" (product of unnormalised
  I + A), "mean", the index of a block or a list of indices (averaged);
* ``rows``: "readout" (the row that feeds the logits), "column_mean", "column_max" (over all queries except padding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from whyformer.errors import InputError
from whyformer.methods.registry import Checked, is_block

HEADS = ("mean", "max", "min")
LAYERS = ("rollout", "product", "sum_product", "mean")
ROWS = ("readout", "column_mean", "column_max")

MOST = 256
"""Maximum length of a list of heads or layers."""

Choice = str | int | list[int]


def _valid(aggregation: Any) -> bool:
    def is_choice(v: Any, names: tuple[str, ...]) -> bool:
        if isinstance(v, str):
            return v in names
        return is_block(v) or (isinstance(v, list | tuple) and 0 < len(v) <= MOST and all(map(is_block, v)))

    return aggregation is None or (
        isinstance(aggregation, Mapping)
        and set(aggregation) <= {"heads", "layers", "rows"}
        and is_choice(aggregation.get("heads", "mean"), HEADS)
        and is_choice(aggregation.get("layers", "mean"), LAYERS)
        and aggregation.get("rows", "readout") in ROWS
    )


AGGREGATION: Checked = (
    f"None or a mapping with heads ({', '.join(HEADS)}, numbers), layers ({', '.join(LAYERS)}, "
    f"numbers), rows ({', '.join(ROWS)})",
    _valid,
)
Choices = Annotated[Mapping[str, Any] | None, AGGREGATION]


@dataclass(frozen=True)
class Aggregation:
    """A choice of heads, layers and rows; see the module's docstring."""

    heads: Choice = "mean"
    layers: Choice = "rollout"
    rows: str = "readout"

    def with_choices(self, choices: Mapping[str, Any] | None) -> Aggregation:
        """Return a copy with the choices of a user's ``aggregation`` setting."""
        return replace(self, **dict(choices or {}))

    @property
    def numbers(self) -> list[int]:
        """The indices of layers, if they are chosen by index."""
        return [] if isinstance(self.layers, str) else [self.layers] if isinstance(self.layers, int) else self.layers

    def without_heads(self, method: str, done: str) -> None:
        """Raise if heads are chosen for a method without a choice of heads."""
        if self.heads != "mean":
            raise InputError(f"{method}: heads are {done}: omit heads in aggregation")

    def wants(self, index: int, blocks: int, start: int = 0) -> bool:
        """Return whether the map of a block is needed.

        Args:
            index: index of the block, from 0.
            blocks: number of blocks of its sequence; negative indices count from the last one.
            start: index of the first block used, if layers are not chosen by index.
        """
        if isinstance(self.layers, str):
            return index >= (start + blocks if start < 0 else start)
        return index in self.numbers or index - blocks in self.numbers

    def fuse(self, maps: Tensor) -> Tensor:
        """Fuse the heads: ``[B, H, Q, K]`` -> ``[B, Q, K]``."""
        if maps.dim() == 3:
            return maps
        if isinstance(self.heads, str):
            if self.heads == "mean":
                return maps.mean(1)
            return maps.amax(1) if self.heads == "max" else maps.amin(1)
        numbers = [self.heads] if isinstance(self.heads, int) else list(self.heads)
        for number in numbers:
            if not -maps.shape[1] <= number < maps.shape[1]:
                raise InputError(f"aggregation: head {number} is outside the model, which has {maps.shape[1]} heads")
        return maps[:, sorted({number % maps.shape[1] for number in numbers})].mean(1)
