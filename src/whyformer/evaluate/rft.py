"""The faithfulness criterion of Mylonas et al. 2022 (RFT) and the comparison of choices by it (methods.md §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def worst_ranks(scores: ArrayLike) -> NDArray[np.int64]:
    """Rank of each |score|, the largest is 1; equal ones all get the worst of their ranks."""
    size = np.abs(np.asarray(scores, dtype=np.float64))
    return (size[None, :] >= size[:, None]).sum(-1)


def ranked_faithfulness(scores: ArrayLike, drops: ArrayLike) -> float:
    """RFT = Σ_t term_t / rank_t; higher is better.

    term_t is Δ_t where the score is positive, −Δ_t where negative, −|Δ_t| where 0.

    Args:
        scores: ``[N]`` signed; drops: ``[N]`` Δ_t = p(x) − p(x with token t replaced), in probability.
    """
    a, d = np.asarray(scores, dtype=np.float64), np.asarray(drops, dtype=np.float64)
    if a.shape != d.shape or a.ndim != 1:
        raise ValueError(f"need one score and one drop a token, got shapes {a.shape} and {d.shape}")
    term = np.where(a > 0, d, np.where(a < 0, -d, -np.abs(d)))
    return float((term / worst_ranks(a)).sum())


@dataclass(frozen=True)
class Choice:
    """What choosing by measured faithfulness gains over always taking one configuration.

    Attributes:
        best_fixed: the configuration with the highest mean criterion on the chosen half of the samples.
        prime: ``[n]`` held-out figure of the configuration chosen for each sample.
        batch: ``[n]`` held-out figure of ``best_fixed``.
        fixed: ``[n, K]`` held-out figures of every configuration.
    """

    best_fixed: int
    prime: NDArray[np.float64]
    batch: NDArray[np.float64]
    fixed: NDArray[np.float64]


def arbitrate(criterion: ArrayLike, held_out: ArrayLike) -> Choice:
    """Choose by ``criterion``, judge by ``held_out``; both ``[n, K]``, higher is better.

    Prime takes the best of each sample, Batch the best of the mean (over all samples of ``criterion``); the first of
    equals. Judging by the criterion itself would be circular, hence the second array.
    """
    c, h = np.asarray(criterion, dtype=np.float64), np.asarray(held_out, dtype=np.float64)
    if c.shape != h.shape or c.ndim != 2:
        raise ValueError(f"need two arrays [samples, configurations], got {c.shape} and {h.shape}")
    best = int(c.mean(0).argmax())
    return Choice(best, h[np.arange(len(h)), c.argmax(1)], h[:, best], h)
