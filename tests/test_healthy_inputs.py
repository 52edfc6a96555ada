"""Warnings are rare on ordinary inputs with the default methods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import whyformer
from whyformer.defaults import COMPARED
from whyformer.explanation.result import Explanation

ROOT = Path(__file__).parents[1]
DEMO = (ROOT / "scripts" / "demo").read_text(encoding="utf-8")
PICTURE, SENTENCE = re.search(r"^picture=(.+)$", DEMO, re.M), re.search(r'^sentence="(.+)"$', DEMO, re.M)
COUNT = 50
SUMS = ("integrated_gradients", "lrp", "partial_lrp", "input_x_gradient", "libragrad", "lrp_ah_ln", "cp_lrp")
"""Further methods, whose scores add up to the target or nearly so."""


def warnings_of(es: Explanation) -> dict[int, list[str]]:
    """Index of a sample -> its warnings, for samples with warnings."""
    return {i: e.warnings for i, e in enumerate(es) if e.warnings}


@pytest.mark.parametrize("target", ["predicted", "each"])
@pytest.mark.parametrize("method", COMPARED)
def test_demo_has_no_warnings(method: str, target: str) -> None:
    assert PICTURE and SENTENCE
    demos: Mapping[str, tuple[object, list[str]]] = {
        "bundled:digits": (ROOT / PICTURE[1], ["3", "7"]),
        "bundled:sst2": (SENTENCE[1], ["positive", "negative"]),
    }
    for model, (example, classes) in demos.items():
        for label in [None] if target == "predicted" else classes:
            e = whyformer.explain(model, example, method, label)
            assert e.warnings == []
        assert target == "each" or float(e.probabilities().max()) > 0.9


def test_demo_sentence_is_in_the_readme() -> None:
    """The example that a reader copies is the one that is tested."""
    assert SENTENCE and SENTENCE[1] in (ROOT / "README.md").read_text(encoding="utf-8")


def check_sentences(shared: Path, method: str, **settings: object) -> None:
    lines = (shared / "data" / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1 : 1 + COUNT]
    warned = warnings_of(whyformer.explain("bundled:sst2", [line.split("\t")[0] for line in lines], method, **settings))
    assert len(warned) <= COUNT / 50, warned


@pytest.mark.parametrize("method", [*COMPARED, *SUMS])
def test_few_sentences_have_warnings(method: str, shared: Path) -> None:
    check_sentences(shared, method)


@pytest.mark.parametrize("method", ["lrp", "partial_lrp"])
def test_few_sentences_have_warnings_under_conserving_rule(method: str, shared: Path) -> None:
    check_sentences(shared, method, rule="shared")


# the default and one attention map run as slow tests; occlusion would take minutes
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow if m in ("auto", "gae") else pytest.mark.whole) for m in COMPARED if m != "occlusion"],
)
def test_few_photographs_have_warnings(method: str, shared: Path) -> None:
    files = sorted((shared / "data" / "imagenet_samples").glob("*.jpg"))[:COUNT]
    assert len(files) == COUNT
    warned = warnings_of(whyformer.explain(str(shared / "weights" / "deit_tiny_in1k"), files, method))
    assert len(warned) <= COUNT / 50, warned
