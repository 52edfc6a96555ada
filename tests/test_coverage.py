"""Outcomes of each architecture and method equal ``docs/measurements/coverage.md``; a few always, all with ``-m whole``."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest
import torch

from architectures import Architecture, listed
from coverage_page import PAGE, SHOWN, read, signs
from outcomes import BROKEN, WRONG, close, explain, study
from whyformer.errors import WhyformerError
from zoo import to

# one architecture of each kind that tests/zoo.py lacks
FAST = [
    "sequence classification/deberta-v2", "sequence classification/qwen2", "sequence classification/mpnet", "sequence classification/gemma2",
    "sequence classification/fnet", "causal language model/mamba", "sequence classification/bart", "sequence to sequence/marian",
    "token classification/bert", "question answering/bert", "image classification/beit", "image classification/timm cait_xxs24_224",
    "vision and language/llava", "two towers/clip", "audio classification/wav2vec2",
]  # fmt: skip
RANK = {"✓": 3, "–": 2, "○": 2, "✗": 1, "·": 0}
EVERY = {a.name: a for a in listed()}
PARAMETERS = [pytest.param(a, id=n, marks=() if n in FAST else pytest.mark.whole) for n, a in EVERY.items()]


@cache
def page() -> dict[str, dict[str, str]]:
    return read(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("architecture", PARAMETERS)
def test_outcomes_equal_the_coverage_page(architecture: Architecture) -> None:
    cells, expected = study(architecture, SHOWN), page()[architecture.name]
    actual = signs(cells)
    if architecture.name in FAST:  # an improvement does not need a new page at once
        actual = {m: expected[m] if RANK[expected[m]] < RANK[sign] else sign for m, sign in actual.items()}
    defects = {c.method: c.message for c in cells if c.outcome in (WRONG, BROKEN)}
    assert actual == expected, f"run tests/coverage_page.py if this is meant; defects found: {defects}"


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", [n for n, a in EVERY.items() if n.startswith(("sequence cl", "image cl")) and isinstance(a.builds, str)]
)
def test_sdpa_and_eager_attention_have_equal_scores(name: str) -> None:
    results = []
    for attention in ("sdpa", "eager"):
        try:
            model, inputs = EVERY[name].build(attention)
        except (ValueError, ImportError):
            pytest.skip("has one kind of attention")
        # most eager implementations of transformers take the softmax in float32 whatever the model's precision
        model, inputs = model.double(), to(inputs, torch.float64)
        results.append({})
        for method in ("input_x_gradient", "transformer_attribution", "gae", "rollout"):
            with suppress(WhyformerError, RuntimeError):  # kernels of experts support float32 only
                results[-1][method] = explain(EVERY[name], model, inputs, method).scores.double()
    assert results[0].keys() == results[1].keys()
    for method, scores in results[0].items():
        assert close(scores, results[1][method], 5e-3), method


def test_coverage_page_has_every_architecture() -> None:
    assert set(page()) == set(EVERY)
    assert len(EVERY) >= 120
    assert set(FAST) <= set(EVERY)
