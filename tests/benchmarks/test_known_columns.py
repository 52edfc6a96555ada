"""Every column of every benchmark on linear models, with figures derived by hand from known maps.

A picture has 4×4 white pixels (patches of 2×2): the logit of class 1 is the sum of the pixels' weights 16, 15 ... 1 (over 136), and
that of class 0 is ½. Gradient × input then gives each pixel its weight.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from whyformer.benchmarks import BENCHMARKS
from whyformer.benchmarks.configurations import generator_for
from whyformer.benchmarks.report import Report
from whyformer.benchmarks.runner import run_benchmark
from whyformer.errors import InputError
from whyformer.evaluation.metrics.sanity import randomized_models
from whyformer.prepared import Prepared
from zoo_evaluate import WORDS, tiny_bert

METHOD = "input_x_gradient"
WEIGHTS = np.arange(16, 0, -1) / 136
PATCHES = np.array([54, 46, 22, 14]) / 136  # 16 15 12 11, 14 13 10 9, 8 7 4 3, 6 5 2 1
TOOL = SimpleNamespace(image_mean=[0.0], image_std=[1.0], resample=0, do_normalize=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1.0


class LinearForImageClassification(nn.Module):
    def __init__(self, weight: Any, bias: Any = (0.5, 0.0)) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=4, patch_size=2, num_labels=2, id2label={0: "nothing", 1: "something"})
        self.blocks = nn.ModuleList([Block(), Block()])
        self.classifier = nn.Linear(16, 2, dtype=torch.float64)
        with torch.no_grad():
            self.classifier.weight.copy_(torch.as_tensor(np.asarray(weight)))
            self.classifier.bias.copy_(torch.tensor(bias))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x[..., 0])


class BagForSequenceClassification(nn.Module):
    """The logits are sums of the embeddings of the tokens, one dimension per class."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2, id2label={0: "negative", 1: "positive"}, vocab_size=len(table), max_position_embeddings=64)
        self.embeddings = nn.Embedding(len(table), 2, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block(), Block()])
        with torch.no_grad():
            self.embeddings.weight.copy_(torch.as_tensor(np.asarray(table)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x * attention_mask[..., None]).sum(1)


def uniform_pictures(folder: Path, masks: list[int], level: int = 255) -> Path:
    """A uniform picture for each mask; ``masks`` are the numbers of leading pixels inside."""
    folder.mkdir(parents=True)
    rows = []
    for i, inside in enumerate(masks):
        Image.new("L", (4, 4), level).save(folder / f"p{i}.png")
        mask = np.where(np.arange(16) < inside, 255, 0).astype(np.uint8).reshape(4, 4)
        Image.fromarray(mask).save(folder / f"m{i}.png")
        rows.append({"image": f"p{i}.png", "mask": f"m{i}.png", "imagenet_class": 1})
    (folder / "index.json").write_text(json.dumps(rows))
    return folder


def run(tmp_path: Path, name: str, model: nn.Module, data: Path | None, tool: Any = TOOL, methods: str = METHOD, **options: Any) -> Report:
    return run_benchmark(name, model.eval(), data, tmp_path / "out", methods=methods, processor=tool, **options).report


def column(report: Report, method: str = METHOD, table: int = 0) -> dict[str, float]:
    """Figures of a method by title, whether methods are rows or columns of the table."""
    figures = {(*key,): cell.measured.value for key, cell in report.tables[table].cells.items() if cell.measured is not None}
    return {b if a == method else a: value for (a, b), value in figures.items() if method in (a, b)}


def linear() -> LinearForImageClassification:
    return LinearForImageClassification([np.zeros(16), WEIGHTS])


def p(total: float) -> float:
    """The probability of class 1 if the remaining weights sum to ``total``."""
    return 1 / (1 + math.exp(0.5 - total))


def area(values: list[float], width: float) -> float:
    return width * (sum(values) - (values[0] + values[-1]) / 2)


def test_every_benchmark_is_tested_here() -> None:
    tested = {"perturbation", "segmentation", "ablation", "activation", "conservation", "sanity", "arbitration", "rationales", "bias", "leaderboard", "evidence", "conditions"}
    assert set(BENCHMARKS) == tested


def test_columns_of_perturbation(tmp_path: Path) -> None:
    options = {"measures": "positive,negative,deletion,insertion", "steps": 4, "insertion_baseline": "zero"}
    report = run(tmp_path, "perturbation", linear(), uniform_pictures(tmp_path / "data", [4]), **options)
    # without the k highest pixels (16 − k)(17 − k)/272 remains: above ½ for ⌊16 f⌋ = 0 1 3 4, and below for 6 8 9 11 12 14;
    # without the k lowest pixels 1 − k(k + 1)/272 remains: above ½ up to k = 11
    rows = {"Positive": 100 * area([1] * 4 + [0] * 6, 0.1), "Negative": 100 * area([1] * 8 + [0] * 2, 0.1)}
    expected = {f"{r}, {e} {'↓' if r == 'Positive' else '↑'}": v for r, v in rows.items() for e in ("predicted", "target")}
    assert rows == pytest.approx({"Positive": 35, "Negative": 75})
    assert column(report) == pytest.approx(expected)
    remaining = [(16 - k) * (17 - k) / 272 for k in range(17)]
    probabilities = [p(remaining[k]) for k in (1, 3, 4, 6, 8, 9, 11, 12, 14)]
    assert column(report, table=1) == pytest.approx({
        "AOPC ↑": np.mean([p(1) - probability for probability in probabilities]), "LOdds ↓": np.mean([math.log(probability / p(1)) for probability in probabilities]),
        "Deletion ↓": area([p(remaining[k]) for k in (0, 4, 8, 12, 16)], 0.25), "Insertion ↑": area([p(1 - remaining[k]) for k in (0, 4, 8, 12, 16)], 0.25),
    }, rel=1e-5)  # fmt: skip


def test_columns_of_conditions(tmp_path: Path) -> None:
    """The mean of a white picture is white, 0 is black, and all scores are distinct; ⌊4 f⌋ = 0 0 1 1 2 2 2 3 3 patches are removed."""
    names = ("black", "zero", "mean", "last", "nearest", "patch")
    report = run(tmp_path, "conditions", linear(), uniform_pictures(tmp_path / "data", [4]), conditions=",".join(names))
    assert [t.name for t in report.tables] == ["positive", "negative", "positive-probability", "negative-probability", "order"]
    # remaining of 136 without the highest patches: 136 136 82 82 36 36 36 14 14, without the lowest: 136 136 122 122 100 100 100 54 54
    positive, negative = ([1] * 4 + [0] * 6, [1] * 5 + [0] * 5), ([1] * 8 + [0] * 2, [1] * 8 + [0] * 2)
    for table, (pixels, patches) in enumerate((positive, negative)):
        expected = {**dict.fromkeys(names, 100 * area(pixels, 0.1)), "patch": 100 * area(patches, 0.1), "mean": 90}
        assert column(report, table=table) == pytest.approx(expected)
    remaining = {"positive": (136, 136, 136, 82, 82, 36, 36, 36, 14, 14), "negative": (136, 136, 136, 122, 122, 100, 100, 100, 54, 54)}
    for table, direction in enumerate(remaining, 2):
        result = column(report, table=table)
        assert result["patch"] == pytest.approx(100 * area([p(weight / 136) for weight in remaining[direction]], 0.1), rel=1e-5)
        assert result["mean"] == pytest.approx(90 * p(1), rel=1e-5) and result["zero"] == pytest.approx(result["black"])
    order = {(row, c): cell.measured.value for (row, c), cell in report.tables[-1].cells.items()}
    assert order["Positive, probability ↓", "black"] == 1 and order["Positive, probability ↓", "mean"] == 0


def test_segmentation_sums_pixels_over_pictures(tmp_path: Path) -> None:
    report = run(tmp_path, "segmentation", linear(), uniform_pictures(tmp_path / "data", [4, 8]))
    # the first 8 pixels are above the mean: 12 and 16 of 16 are correct; background 8 of 12 and 8 of 8, object 4 of 8 and 8 of 8
    scaled = (WEIGHTS - WEIGHTS.min()) / (WEIGHTS.max() - WEIGHTS.min())
    objects = [np.arange(16) < inside for inside in (4, 8)]
    precision = [average_precision_score(np.r_[~m, m], np.r_[1 - scaled, scaled]) for m in objects]
    assert column(report) == pytest.approx({
        "Pixel accuracy ↑": 100 * 28 / 32, "mAP ↑": 100 * np.mean(precision), "mIoU ↑": 50 * (16 / 20 + 12 / 16),
        "Pointing game ↑": 100, "Energy in mask ↑": 50 * (58 + 100) / 136,
    }, rel=1e-5)  # fmt: skip


def test_ablation_has_columns_of_segmentation_and_perturbation(tmp_path: Path) -> None:
    report = run(tmp_path, "ablation", linear(), uniform_pictures(tmp_path / "data", [4]))
    result = column(report)
    assert result.pop("mAP ↑") < 100
    assert result == pytest.approx({"Pixel accuracy ↑": 75, "mIoU ↑": 50 * (8 / 12 + 4 / 8), "Positive ↓": 35, "Negative ↑": 75})


def test_columns_of_activation_for_patches(tmp_path: Path) -> None:
    report = run(tmp_path, "activation", linear(), uniform_pictures(tmp_path / "data", [4]), column="own")
    # ⌈4 f⌉ patches at f = 0, 0.1 ... 1
    counts = (0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4)
    auac = area([p(PATCHES[:k].sum()) for k in counts], 0.1)
    assert column(report) == pytest.approx({"own AUAC ↑": auac, "own AU-MSE ↓": area([PATCHES[4 - k :].sum() ** 2 for k in counts], 0.1)}, rel=1e-5)


def test_activation_with_baseline_mean(tmp_path: Path) -> None:
    """The mean of a white picture is white, so no removal changes the output."""
    data = uniform_pictures(tmp_path / "data", [4])
    assert column(run(tmp_path, "activation", linear(), data, column="own", baseline="mean")) == pytest.approx(
        {"own AUAC ↑": p(1), "own AU-MSE ↓": 0}, abs=1e-5
    )
    with pytest.raises(InputError, match="baseline must be one of zero, black, mean, blur"):
        run(tmp_path, "activation", linear(), data, baseline="unk")


def test_conservation_without_bias(tmp_path: Path) -> None:
    data = uniform_pictures(tmp_path / "data", [4, 4, 4])
    for i, level in enumerate((255, 102, 51)):
        Image.new("L", (4, 4), level).save(data / f"p{i}.png")
    model = LinearForImageClassification([-WEIGHTS, WEIGHTS], (0.0, 0.0))
    report = run(tmp_path, "conservation", model, data)
    assert column(report) == pytest.approx({"slope (1)": 1, "intercept (0)": 0, "error (0)": 0, "correlation (1)": 1}, abs=1e-5)


def test_conservation_with_bias(tmp_path: Path) -> None:
    """Σ R = f − ¼: the line has slope 1, and the error is ¼ divided by the mean |f|."""
    data = uniform_pictures(tmp_path / "data", [4, 4])
    Image.new("L", (4, 4), 51).save(data / "p1.png")
    report = run(tmp_path, "conservation", LinearForImageClassification([-WEIGHTS, WEIGHTS], (0.0, 0.25)), data)
    expected = {"slope (1)": 1, "intercept (0)": -0.25, "error (0)": 0.25 / np.mean([1.25, 0.45]), "correlation (1)": 1}
    assert column(report) == pytest.approx(expected, abs=1e-5)


def test_columns_of_sanity(tmp_path: Path) -> None:
    model = LinearForImageClassification([-WEIGHTS, WEIGHTS], (0.0, 0.0))
    report = run(tmp_path, "sanity", model, uniform_pictures(tmp_path / "data", [4]), draws=2, subsets=6)
    result = column(report)
    # the head has all parameters; the map of the randomized model is its weights
    ((_, changed),) = randomized_models(model, "cascading", seed=0)
    changed_weights = changed.classifier.weight[1].detach().numpy()
    disturbed = [WEIGHTS * generator_for(f"p0.png|m0.png/{draw}", 0).uniform(-1, 1, (1, 4, 4)).reshape(-1) * 0.1 for draw in range(2)]
    assert result["cascading: spearman"] == pytest.approx(spearmanr(WEIGHTS, changed_weights)[0], rel=1e-5)
    assert result["independent: absolute"] == pytest.approx(spearmanr(WEIGHTS, abs(changed_weights))[0], rel=1e-5)
    assert result["class: Spearman (top, least)"] == pytest.approx(-1)  # the weights of class 0 are the negatives
    assert result["max-sensitivity ↓"] == pytest.approx(max(np.linalg.norm(d) for d in disturbed) / np.linalg.norm(WEIGHTS), rel=1e-5)
    assert result["infidelity ↓"] == pytest.approx(0, abs=1e-9)  # removing a patch reduces the logit by the sum of its scores
    assert set(result) == {*(f"{o}: {k}" for o in ("cascading", "independent") for k in ("spearman", "absolute", "ssim")),
                          "class: Spearman (top, least)", "max-sensitivity ↓", "infidelity ↓"}  # fmt: skip


REVERSED = "saliency"


@pytest.fixture
def reversed_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """One method returns the map with its order reversed."""
    original = Prepared.explain

    def explain(prepared: Any, method: str, *rest: Any, **settings: Any) -> Any:
        e = original(prepared, METHOD, *rest)
        return replace(e, scores=e.scores.max() + e.scores.min() - e.scores) if method == REVERSED else e

    monkeypatch.setattr(Prepared, "explain", explain)


def test_arbitration_selects_map_in_correct_order(tmp_path: Path, reversed_method: None) -> None:
    """The reversed map loses by the criterion and by the held-out figure; all figures are computed by loops over the patches."""
    report = run(tmp_path, "arbitration", linear(), uniform_pictures(tmp_path / "data", [4, 8]), methods=f"{METHOD},{REVERSED}")
    drops = [p(1) - p(1 - weight) for weight in PATCHES]

    def rft(order: list[int]) -> float:
        return sum(drops[patch] / (rank + 1) for rank, patch in enumerate(order))

    def aopc(order: list[int]) -> float:
        removed = [sum(PATCHES[i] for i in order[: math.floor(4 * k / 10)]) for k in range(1, 10)]
        return float(np.mean([p(1) - p(1 - g) for g in removed]))

    up, down = [0, 1, 2, 3], [3, 2, 1, 0]
    first, second = column(report), column(report, REVERSED)
    assert first == pytest.approx({"Held-out AOPC ↑": aopc(up), "Prime − this": 0, "criterion RFT ↑": rft(up), "chosen in % of samples": 100}, rel=1e-5)
    assert second == pytest.approx({"Held-out AOPC ↑": aopc(down), "Prime − this": aopc(up) - aopc(down), "criterion RFT ↑": rft(down), "chosen in % of samples": 0}, rel=1e-5)
    for row in ("Prime (best of each sample)", f"Batch (best on average: {METHOD})"):
        assert column(report, row) == pytest.approx({"Held-out AOPC ↑": aopc(up), "Prime − this": 0}, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("by", ["steps", "features"])
def test_arbitration_selects_on_one_half_and_evaluates_on_the_other(by: str, tmp_path: Path, reversed_method: None) -> None:
    """The gaps of a map and its reverse are each other's negatives; all figures are computed by loops over the patches."""
    report = run(tmp_path, "arbitration", linear(), uniform_pictures(tmp_path / "data", [4]), methods=f"{METHOD},{REVERSED}", by=by)

    def gap(patches: list[int], steps: range) -> float:
        """``patches`` are sorted from highest to lowest; ⌊n k/10⌋ of them are removed."""
        counts = [math.floor(len(patches) * k / 10) for k in steps]
        removed = [(sum(PATCHES[i] for i in patches[len(patches) - n :]), sum(PATCHES[i] for i in patches[:n])) for n in counts]
        return float(np.mean([p(1 - low) - p(1 - high) for low, high in removed]))

    if by == "steps":
        criterion, held_out = gap([0, 1, 2, 3], range(1, 10, 2)), gap([0, 1, 2, 3], range(2, 10, 2))
    else:
        order = generator_for("p0.png|m0.png/halves", 0).permutation(4).tolist()
        criterion, held_out = (gap(sorted(half), range(1, 10)) for half in (order[:2], order[2:]))
    assert criterion > 0.01 and held_out > 0.01
    for method, sign in ((METHOD, 1), (REVERSED, -1)):
        expected = {"Held-out gap ↑": sign * held_out, "criterion gap ↑": sign * criterion, "Prime − this": (1 - sign) * held_out}
        result = column(report, method)
        assert result.pop("chosen in % of samples") == (100 if sign > 0 else 0)
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-9)


# -- text ---------------------------------------------------------------------------------------------------------
def bag(contributions: dict[str, float]) -> tuple[BagForSequenceClassification, Any]:
    """A model in which words contribute ``contributions`` to class 1, and all other tokens nothing."""
    tokenizer = tiny_bert()[1]
    table = np.zeros((len(tokenizer), 2))
    for word, value in contributions.items():
        table[tokenizer.convert_tokens_to_ids(word), 1] = value
    return BagForSequenceClassification(table), tokenizer


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_columns_of_rationales(tmp_path: Path) -> None:
    """Twenty words contribute 20, 19 ... 1 (over 50) to class 1; the rationale is the first, the second and the last word."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a").write_text(" ".join(WORDS))
    spans = [{"docid": "a", "start_token": a, "end_token": b} for a, b in ((0, 2), (19, 20))]
    (tmp_path / "val.jsonl").write_text("".join(
        json.dumps({"annotation_id": name, "classification": label, "evidences": [[{**s, "docid": name} for s in spans]]}) + "\n"
        for name, label in (("a", "positive"), ("b", "negative"))
    ))  # fmt: skip
    (tmp_path / "docs" / "b").write_text(" ".join(WORDS))
    contributions = [(20 - i) / 50 for i in range(20)]
    model, tokenizer = bag(dict(zip(WORDS, contributions, strict=True)))
    result = column(run(tmp_path, "rationales", model, tmp_path, tokenizer, files="a"))
    # two of the top 10 words and three of all twenty are in the rationale of three words
    expected = {f"token-F1, top {k} (macro) ↑": 100 * (2 * 2 / 13 if k == 10 else 2 * 3 / 23) for k in range(10, 81, 10)}
    expected |= {f"token-F1, top {k} (micro) ↑": expected[f"token-F1, top {k} (macro) ↑"] for k in (10, 40, 80)}
    # precision is 1 up to recall 2/3, drops to 2/19, and is 3/20 at recall 1
    expected["AUPRC ↑"] = 100 * (2 / 3 + (2 / 19 + 3 / 20) / 2 / 3)
    # 1, 5, 10, 20, 50 % of twenty words
    full, removed = sum(contributions), [sum(contributions[:k]) for k in (1, 1, 2, 4, 10)]
    expected["comprehensiveness ↑"] = 100 * np.mean([sigmoid(full) - sigmoid(full - g) for g in removed])
    expected["sufficiency ↓"] = 100 * np.mean([sigmoid(full) - sigmoid(g) for g in removed])
    assert result == pytest.approx(expected, rel=1e-5)


def test_columns_of_activation_for_tokens(tmp_path: Path) -> None:
    """[CLS] good bad film [SEP]: special tokens count among the five tokens and have score 0."""
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood bad film\t1\n")
    model, tokenizer = bag({"good": 3, "bad": -2, "film": 1})
    result = column(run(tmp_path, "activation", model, tmp_path, tokenizer, column="own"))
    # ⌈5 f⌉ at f = 0, 0.1 ... 1; shown: good, film, [CLS], [SEP], bad; pruned: [CLS], [SEP], film, bad, good
    counts = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    shown, pruned = (0, 3, 4, 4, 4, 2), (0, 0, 0, 1, -1, 2)
    assert result == pytest.approx({
        "own AUAC ↑": area([sigmoid(shown[k]) for k in counts], 0.1), "own AU-MSE ↓": area([pruned[k] ** 2 for k in counts], 0.1)
    }, rel=1e-5)  # fmt: skip


def test_columns_of_bias(tmp_path: Path) -> None:
    """ "ann is bad" and "bob is bad", is = 1, bad = −2: the names contribute 1 and −0.5 to class 1."""
    (tmp_path / "lists.json").write_text(json.dumps({"templates": ["{} is bad"], "terms": {"a": ["ann"], "b": ["bob"]}}))
    model, tokenizer = bag({"ann": 1, "bob": -0.5, "is": 1, "bad": -2})
    report = run(tmp_path, "bias", model, None, tokenizer, lists=str(tmp_path / "lists.json"))
    assert column(report) == pytest.approx({
        "a: share of relevance": 1 / 4, "a: rank": 1, "b: share of relevance": -0.5 / 3.5, "b: rank": 2, "a − b: share": 1 / 4 + 1 / 7,
    }, rel=1e-5)  # fmt: skip
    outputs = {"a": 0.0, "b": -1.5, "a − b": 1.5}
    assert column(report, "logit", 1) == pytest.approx(outputs)
    assert column(report, "probability", 1) == pytest.approx({"a": 0.5, "b": sigmoid(-1.5), "a − b": 0.5 - sigmoid(-1.5)}, rel=1e-5)
    assert f"- {METHOD}: ann 0.250, bob -0.143" in report.tables[2].note
