"""Explanations for tests of drawings, without a model."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch

from whyformer.explanation.features import Features
from whyformer.explanation.result import Explanation


def explanation(**values: Any) -> Explanation:
    """Return an explanation with the given fields, of itself or of its features."""
    feature_fields = {f.name for f in fields(Features)}
    return Explanation(features=Features(**{n: v for n, v in values.items() if n in feature_fields}), **{n: v for n, v in values.items() if n not in feature_fields})


def picture(
    scores: Any = None,
    *,
    grid: tuple[int, int] | None = (4, 6),
    size: tuple[int, int] = (32, 48),
    target: int = 1,
    level: str = "patch",
    labels: dict[int, str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Return an explanation of a picture; by default with a single patch of score 2 in row 1, column 4."""
    if scores is None:
        scores = torch.zeros(grid or (4, 6))
        scores[1, 4] = 2.0
    scores = torch.as_tensor(scores, dtype=torch.float32)
    labels = labels or {0: "cat", 1: "dog", 2: "emu"}
    ramp = torch.linspace(0, 255, size[0] * size[1] * 3).reshape(1, *size, 3).to(torch.uint8)
    values: dict[str, Any] = {
        "method": "transformer_attribution", "settings": {"start_layer": 0}, "logits": torch.tensor([[0.5, 3.0, -1.0]]),
        "target": torch.tensor([target]), "target_names": [labels[target]], "labels": labels, "pictures": ramp,
        "image_size": size, "grid": grid if level == "patch" else None,
        "scores": scores.reshape(1, -1) if level == "patch" else scores[None],
    }  # fmt: skip
    return explanation(level=level, **{**values, **kwargs})


def sentence(
    text: str = "An utterly charming film, though it drags.",
    scores: Any = None,
    *,
    target: int = 1,
    labels: dict[int, str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Return an explanation of a sentence with words as tokens (two for long words), [CLS] and [SEP]."""
    tokens, offsets = ["[CLS]"], [(0, 0)]
    for match in re.finditer(r"\w+|[^\w\s]", text):
        begin, end = match.span()
        cuts = [begin, begin + 4, end] if end - begin > 6 else [begin, end]
        for a, b in pairwise(cuts):
            tokens.append(("##" if a > begin else "") + text[a:b].lower())
            offsets.append((a, b))
    tokens.append("[SEP]")
    offsets.append((0, 0))
    if scores is None:
        scores = torch.linspace(-1, 2, len(tokens))
        scores[0] = scores[-1] = 0
    labels = labels or {0: "negative", 1: "positive"}
    values: dict[str, Any] = {
        "method": "transformer_attribution", "settings": {}, "logits": torch.tensor([[-1.2, 2.3]]),
        "target": torch.tensor([target]), "target_names": [labels[target]], "labels": labels, "texts": [text],
        "tokens": [tokens], "offsets": [offsets], "scores": torch.as_tensor(scores, dtype=torch.float32)[None],
    }  # fmt: skip
    return explanation(level="token", **{**values, **kwargs})


ATTACK = '<script>alert("x")</script> \x1b[31mred\x1b[0m [bold]b[/bold] \u202eevil &amp; "quoted" $x^2$'
