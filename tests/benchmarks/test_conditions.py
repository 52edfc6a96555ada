"""Benchmark ``conditions``, and the settings of perturbation that it goes through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

import whyformer
from whyformer.baselines import Filling
from whyformer.benchmarks import conditions, perturbation
from whyformer.benchmarks.batches import PictureBatch, read_batch
from whyformer.benchmarks.conditions import CONDITIONS, FIGURES, tau
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.runner import run_benchmark
from whyformer.benchmarks.study import Study
from whyformer.datasets.readers import open_pictures
from whyformer.errors import InputError
from whyformer.inputs.removal import fill
from whyformer.models import load
from zoo_evaluate import picture_folder, processor, tiny_vit

CLEAN = {"correct": 1, "probability": 1.0}


@pytest.fixture(scope="module")
def batch() -> PictureBatch:
    loaded = load("bundled:digits")
    _, samples = open_pictures("scenes:2")
    study = Study(loaded.model, loaded.processor, "image", samples[:3], (), {})
    made = read_batch(study, study.samples)
    assert isinstance(made, PictureBatch)
    return made


def test_without_upsampling_every_patch_keeps_its_own_score(batch: PictureBatch) -> None:
    e = whyformer.explain(batch.study.model, batch.pixels, "libragrad", batch.predicted, batch.study.processor)
    blocky, smooth = replace(batch, nearest=True), batch
    for i in range(len(batch.samples)):
        own, resized = blocky.read(i, e[i]), smooth.read(i, e[i])
        assert np.allclose(blocky.features(i, own), e.scores[i].double().numpy(), atol=1e-7)
        assert np.array_equal(own, blocky.covered(i, blocky.features(i, own)[None])[0])
        assert not np.allclose(smooth.features(i, resized), e.scores[i].double().numpy(), atol=1e-3 * float(e.scores.abs().max()))
    pixels = whyformer.explain(batch.study.model, batch.pixels, "gim", batch.predicted, batch.study.processor)
    assert np.array_equal(blocky.read(0, pixels[0]), smooth.read(0, pixels[0])) and pixels.level == "pixel"


def test_equal_scores_go_from_the_other_end() -> None:
    flat = np.zeros((2, 5))
    for ties, at in (("index", slice(0, 3)), ("last", slice(7, 10))):
        wanted = np.zeros(10, dtype=bool)
        wanted[at] = True
        for name in perturbation.DIRECTIONS:
            assert np.array_equal(perturbation._masks(flat, name, {"ties": ties})[2].reshape(-1), wanted), (ties, name)
    # the order of scores that differ does not depend on it
    scores = np.random.default_rng(0).permutation(10).reshape(2, 5).astype(float)
    first, last = (perturbation._masks(scores, "positive", {"ties": ties}) for ties in ("index", "last"))
    assert np.array_equal(first, last)


def test_noise_is_of_each_sample_and_within_the_range_of_pixels(batch: PictureBatch) -> None:
    mean, std = (v[None, :, None, None] for v in (batch.spec.mean, batch.spec.std))

    def noise(some: PictureBatch) -> torch.Tensor:
        black, white = ((level - mean[0]) / std[0] for level in (0, 1))
        filling = Filling(some.pixels, black=black[:, 0, 0], white=white[:, 0, 0], uniform=some.random_pixels)
        return fill("noise", filling)

    drawn = noise(batch) * std + mean
    assert float(drawn.min()) > -1e-5 and float(drawn.max()) < 1 + 1e-5 and 0.27 < float(drawn.std()) < 0.31
    assert torch.equal(noise(batch.some([2]))[0], noise(batch)[2])
    assert not torch.equal(noise(batch)[0], noise(batch)[1])


def test_tau_is_the_one_of_scipy() -> None:
    values = np.random.default_rng(0).normal(size=(4, 12))
    assert tau(values) == pytest.approx([kendalltau(row[:6], row[6:])[0] for row in values])


def report_of(figures: dict[str, dict[str, list[float]]]) -> str:
    """The tables for these probabilities (the same at all steps) by condition and method, a figure a sample."""
    names = tuple(figures)
    methods = list(figures[names[0]])
    study = SimpleNamespace(options={"conditions": names}, configurations=[Configuration(m) for m in methods])

    def curves(value: float) -> dict[str, dict[str, list[float]]]:
        return {d: {"correct": [0] * 9, "probability": [value] * 9} for d in perturbation.DIRECTIONS}

    results = {
        m: {f"s{i}": {"clean": CLEAN, **{n: curves(figures[n][m][i]) for n in names}} for i in range(6)} for m in methods
    }
    found = conditions.summarize(study, results)  # type: ignore[arg-type]
    return "\n".join(t.markdown() for t in found.tables if t.name == "positive-probability")


def test_the_verdict_names_what_survives_and_what_turns() -> None:
    low, middle, high = ([base + 0.01 * i for i in range(6)] for base in (0.1, 0.4, 0.7))
    said = report_of({"black": {"a": low, "b": middle, "c": high}, "blur": {"a": low, "b": high, "c": middle}})
    assert "in every condition a is ahead of b, c" in said
    assert "b is ahead of c in black, behind it in blur" in said
    assert "condition b" not in said


def test_the_conditions_are_the_published_benchmark_with_its_options(tmp_path: Path) -> None:
    asked = {"model": tiny_vit(), "processor": processor(), "data": picture_folder(tmp_path / "data"), "methods": "gae,gradcam"}
    changed = {"black": {}, "last": {"ties": "last"}, "patch": {"per": "patch"}, "zero": {"baseline": "zero"}}
    here = run_benchmark("conditions", out=tmp_path / "a", conditions=",".join(changed), **asked).report
    for condition, more in changed.items():
        there = run_benchmark("perturbation", out=tmp_path / condition, constant="count", explained="predicted", **more, **asked).report
        for table, title in zip(here.tables, ("Positive, predicted ↓", "Negative, predicted ↑"), strict=False):
            for method in ("gae", "gradcam", "random"):
                assert table.cells[method, condition].measured == there.tables[0].cells[title, method].measured
    assert list(FIGURES)[:2] == [t.title for t in here.tables[:2]] and set(CONDITIONS) >= {"noise", "nearest"}


def test_one_condition_alone_is_refused(tmp_path: Path) -> None:
    asked = {"model": "bundled:digits", "data": "scenes:1", "out": tmp_path, "methods": "gae"}
    with pytest.raises(InputError, match="at least two"):
        run_benchmark("conditions", conditions="black", **asked)
    with pytest.raises(InputError, match="conditions must be some of black, zero"):
        run_benchmark("conditions", conditions="black,white", **asked)
