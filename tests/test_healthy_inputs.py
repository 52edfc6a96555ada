"""Inputs that models read well, explained by what a user meets first: a warning is rare on them, so it means something."""

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
"""Besides those that a user meets first: methods whose scores add up to something, or nearly."""


def warned(es: Explanation) -> dict[int, list[str]]:
    """Number of a sample -> its warnings, of those that have any."""
    return {i: e.warnings for i, e in enumerate(es) if e.warnings}


@pytest.mark.parametrize("target", ["predicted", "each"])
@pytest.mark.parametrize("method", COMPARED)
def test_the_demo_has_no_warnings(method: str, target: str) -> None:
    assert PICTURE and SENTENCE
    given: Mapping[str, tuple[object, list[str]]] = {
        "bundled:digits": (ROOT / PICTURE[1], ["3", "7"]),
        "bundled:sst2": (SENTENCE[1], ["positive", "negative"]),
    }
    for model, (one, classes) in given.items():
        for wanted in [None] if target == "predicted" else classes:
            e = whyformer.explain(model, one, method, wanted)
            assert e.warnings == []
        assert target == "each" or float(e.probabilities().max()) > 0.9


def test_the_demo_is_in_the_readme() -> None:
    """What a newcomer copies is what was looked at."""
    assert SENTENCE and SENTENCE[1] in (ROOT / "README.md").read_text(encoding="utf-8")


def check_sentences(shared: Path, method: str, **settings: object) -> None:
    lines = (shared / "data" / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1 : 1 + COUNT]
    found = warned(whyformer.explain("bundled:sst2", [line.split("\t")[0] for line in lines], method, **settings))
    assert len(found) <= COUNT / 50, found


@pytest.mark.parametrize("method", [*COMPARED, *SUMS])
def test_few_sentences_are_warned_of(method: str, shared: Path) -> None:
    check_sentences(shared, method)


@pytest.mark.parametrize("method", ["lrp", "partial_lrp"])
def test_few_sentences_are_warned_of_where_relevance_is_conserved(method: str, shared: Path) -> None:
    check_sentences(shared, method, rule="shared")


# the default one and a map of attention; occlusion takes minutes, and adds up to nothing
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow if m in ("auto", "gae") else pytest.mark.whole) for m in COMPARED if m != "occlusion"],
)
def test_few_photographs_are_warned_of(method: str, shared: Path) -> None:
    files = sorted((shared / "data" / "imagenet_samples").glob("*.jpg"))[:COUNT]
    assert len(files) == COUNT
    found = warned(whyformer.explain(str(shared / "weights" / "deit_tiny_in1k"), files, method))
    assert len(found) <= COUNT / 50, found
