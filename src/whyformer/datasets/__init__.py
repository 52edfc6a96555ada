"""Data with known answers, to check explanations against."""

from __future__ import annotations

from whyformer.datasets.scenes import Scene, digit_scenes, split_indices

__all__ = ["Scene", "digit_scenes", "split_indices"]
