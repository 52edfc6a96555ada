"""Run a method on some samples; what fails is told sample by sample, the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whyformer.benchmarks.configurations import Configuration
from whyformer.evaluate.forwards import padded
from whyformer.explanation.result import Explanation


class Unusable(Exception):  # noqa: N818
    """A map without information; ``kind`` is "constant" (then ``scores`` is the map), "nan" or "failed"."""

    def __init__(self, kind: str, message: str, scores: NDArray[np.float64] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.scores = scores


@dataclass(frozen=True)
class Found:
    """The explanation of one sample, or why there is none."""

    explanation: Explanation | None
    error: Unusable | None = None

    def map(self) -> NDArray[np.float64]:
        """``[H, W]`` pixels of the model's input; raises :class:`Unusable`."""
        return self._checked(lambda e: e.heatmap()[0])

    def scores(self) -> NDArray[np.float64]:
        """``[N]`` tokens or patches, or ``[H, W]`` pixels; raises :class:`Unusable`."""
        return self._checked(lambda e: e.scores[0])

    def _checked(self, read: Any) -> NDArray[np.float64]:
        if self.explanation is None:
            raise self.error or Unusable("failed", "no explanation")
        return usable(np.asarray(read(self.explanation).double()))


def usable(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores, if they are finite and not all equal."""
    if not np.isfinite(scores).all():
        raise Unusable("nan", "the map holds NaN or infinity")
    if scores.size > 1 and scores.max() == scores.min():
        raise Unusable("constant", "all scores are equal, so they say nothing", scores)
    return scores


def explain_pixels(
    model: nn.Module, processor: Any, configuration: Configuration, pixels: Tensor, targets: Sequence[int]
) -> list[Found]:
    """Explanations of pictures ``[B, C, H, W]``, in one batch if that works, else one by one."""
    return _explain(
        model, processor, configuration, [pixels[i] for i in range(len(pixels))], list(targets), torch.stack
    )


def explain_ids(
    model: nn.Module,
    processor: Any,
    configuration: Configuration,
    rows: Sequence[Sequence[int]],
    targets: Sequence[int],
    pad: int,
) -> list[Found]:
    """Explanations of token rows of any lengths; scores of padding are cut off by the caller (``[:len(row)]``)."""

    def batch(some: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        ids, mask = padded(some, pad)
        return {"input_ids": ids, "attention_mask": mask}

    return _explain(model, processor, configuration, list(rows), list(targets), batch)


def _explain(
    model: nn.Module, processor: Any, configuration: Configuration, items: list[Any], targets: list[int], batch: Any
) -> list[Found]:
    from whyformer.explaining import explain

    if not items:
        return []
    try:
        made = explain(model, batch(items), configuration.method, targets, processor, **configuration.settings)
        return [Found(one) for one in made]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:
        if len(items) > 1:
            singles = (
                _explain(model, processor, configuration, [i], [t], batch) for i, t in zip(items, targets, strict=True)
            )
            return [found for single in singles for found in single]
        kind = "nan" if "NaN" in str(error) else "failed"
        return [Found(None, Unusable(kind, f"{type(error).__name__}: {error}"))]
