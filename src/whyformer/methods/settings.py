"""Settings of all methods as keyword arguments, for editors and type checkers.

The methods document and check their settings (:func:`whyformer.list_methods`). Pass other settings of a custom method
as ``**{"my_setting": 1}`` if a type checker must accept them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from whyformer.options import Keywords


class Settings(TypedDict, total=False):
    """Settings of methods; each method takes some of them."""

    affinity: bool
    aggregation: Mapping[str, Any] | None
    alpha: float
    baseline: str | int | None
    batch_size: int
    block: int | None
    blocks: int | Sequence[int]
    blur: float
    composite: str
    count_padding: bool
    discard_ratio: float
    distance: str
    distance_threshold: float
    epsilon: float
    gamma: float
    gradient_weighted: bool
    head_fusion: str
    limit: int
    masks: int
    multiply_by_input: bool
    noise: float
    norm: str
    normalize_rows: bool
    output: str
    patch: int | None
    purpose: str
    rule: str
    samples: int
    scope: str
    secant: bool
    seed: int
    share: float
    side: str
    squared: bool
    start_layer: int | None
    steps: int
    stride: int | None
    tokens_ratio: float
    variant: str
    weighting: str
    window: int


class OptionsAndSettings(Keywords, Settings, total=False):
    """Options of the model and settings of the method."""
