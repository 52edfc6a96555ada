"""The benchmark ``conditions``, and the settings of perturbation that it varies."""

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
    result = read_batch(study, study.samples)
    assert isinstance(result, PictureBatch)
    return result


def test_patches_keep_their_scores_without_interpolation(batch: PictureBatch) -> None:
    e = whyformer.explain(batch.study.model, batch.pixels, "libragrad", batch.predicted, batch.study.processor)
    blocky, smooth = replace(batch, nearest=True), batch
    for i in range(len(batch.samples)):
        read, resized = blocky.read(i, e[i]), smooth.read(i, e[i])
        assert np.allclose(blocky.features(i, read), e.scores[i].double().numpy(), atol=1e-7)
        assert np.array_equal(read, blocky.covered(i, blocky.features(i, read)[None])[0])
        assert not np.allclose(smooth.features(i, resized), e.scores[i].double().numpy(), atol=1e-3 * float(e.scores.abs().max()))
    pixels = whyformer.explain(batch.study.model, batch.pixels, "gim", batch.predicted, batch.study.processor)
    assert np.array_equal(blocky.read(0, pixels[0]), smooth.read(0, pixels[0])) and pixels.level == "pixel"


def test_ties_last_removes_equal_scores_from_the_end() -> None:
    flat = np.zeros((2, 5))
    for ties, removed in (("index", slice(0, 3)), ("last", slice(7, 10))):
        expected = np.zeros(10, dtype=bool)
        expected[removed] = True
        for name in perturbation.DIRECTIONS:
            assert np.array_equal(perturbation._masks(flat, name, {"ties": ties})[2].reshape(-1), expected), (ties, name)
    # the order of distinct scores does not depend on ties
    scores = np.random.default_rng(0).permutation(10).reshape(2, 5).astype(float)
    first, last = (perturbation._masks(scores, "positive", {"ties": ties}) for ties in ("index", "last"))
    assert np.array_equal(first, last)


def test_noise_depends_on_sample_and_is_within_pixel_range(batch: PictureBatch) -> None:
    mean, std = (v[None, :, None, None] for v in (batch.spec.mean, batch.spec.std))

    def noise(selected: PictureBatch) -> torch.Tensor:
        black, white = ((level - mean[0]) / std[0] for level in (0, 1))
        filling = Filling(selected.pixels, black=black[:, 0, 0], white=white[:, 0, 0], uniform=selected.random_pixels)
        return fill("noise", filling)

    drawn = noise(batch) * std + mean
    assert float(drawn.min()) > -1e-5 and float(drawn.max()) < 1 + 1e-5 and 0.27 < float(drawn.std()) < 0.31
    assert torch.equal(noise(batch.some([2]))[0], noise(batch)[2])
    assert not torch.equal(noise(batch)[0], noise(batch)[1])


def test_tau_equals_scipy() -> None:
    values = np.random.default_rng(0).normal(size=(4, 12))
    assert tau(values) == pytest.approx([kendalltau(row[:6], row[6:])[0] for row in values])


def report_of(figures: dict[str, dict[str, list[float]]]) -> str:
    """The table for probabilities by condition and method, one per sample and equal at all steps."""
    names = tuple(figures)
    methods = list(figures[names[0]])
    study = SimpleNamespace(options={"conditions": names}, configurations=[Configuration(m) for m in methods])

    def curves(value: float) -> dict[str, dict[str, list[float]]]:
        return {d: {"correct": [0] * 9, "probability": [value] * 9} for d in perturbation.DIRECTIONS}

    results = {
        m: {f"s{i}": {"clean": CLEAN, **{n: curves(figures[n][m][i]) for n in names}} for i in range(6)} for m in methods
    }
    summary = conditions.summarize(study, results)  # type: ignore[arg-type]
    return "\n".join(t.markdown() for t in summary.tables if t.name == "positive-probability")


def test_verdict_names_stable_and_reversed_orders() -> None:
    low, middle, high = ([base + 0.01 * i for i in range(6)] for base in (0.1, 0.4, 0.7))
    report = report_of({"black": {"a": low, "b": middle, "c": high}, "blur": {"a": low, "b": high, "c": middle}})
    assert "in every condition a is ahead of b, c" in report
    assert "b is ahead of c in black, behind it in blur" in report
    assert "condition b" not in report


def test_conditions_equal_perturbation_with_their_options(tmp_path: Path) -> None:
    arguments = {"model": tiny_vit(), "processor": processor(), "data": picture_folder(tmp_path / "data"), "methods": "gae,gradcam"}
    changed = {"black": {}, "last": {"ties": "last"}, "patch": {"per": "patch"}, "zero": {"baseline": "zero"}}
    combined = run_benchmark("conditions", out=tmp_path / "a", conditions=",".join(changed), **arguments).report
    for condition, more in changed.items():
        separate = run_benchmark("perturbation", out=tmp_path / condition, constant="count", explained="predicted", **more, **arguments).report
        for table, title in zip(combined.tables, ("Positive, predicted ↓", "Negative, predicted ↑"), strict=False):
            for method in ("gae", "gradcam", "random"):
                assert table.cells[method, condition].measured == separate.tables[0].cells[title, method].measured
    assert list(FIGURES)[:2] == [t.title for t in combined.tables[:2]] and set(CONDITIONS) >= {"noise", "nearest"}


def test_single_or_unknown_condition_raises(tmp_path: Path) -> None:
    arguments = {"model": "bundled:digits", "data": "scenes:1", "out": tmp_path, "methods": "gae"}
    with pytest.raises(InputError, match="at least two"):
        run_benchmark("conditions", conditions="black", **arguments)
    with pytest.raises(InputError, match="conditions must be some of black, zero"):
        run_benchmark("conditions", conditions="black,white", **arguments)
