"""Arbitration: criteria by reference implementations and by hand, held-out features, shared forward passes."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, ModelError
from whyformer.evaluation.arbitration import Arbitration, arbitrate, split
from whyformer.evaluation.metrics.faithfulness import ranked_faithfulness
from whyformer.explanation.features import Features
from whyformer.explanation.result import Explanation
from whyformer.methods.passes import record_pass

# the attribute of the package with this name is the function
module = sys.modules["whyformer.evaluation.arbitration"]
FILL = 3
CRITERIA = ("aopc", "auac", "comprehensiveness", "deletion", "insertion", "log_odds", "rft", "sufficiency")
NAMES = ["raw_attention", ("rollout", {}), {"method": "raw_attention", "block": 0}, "saliency", "input_x_gradient"]


class Bag(nn.Module):
    """f = Σ_t w[id_t], so removing a token (id 0, weight 0) decreases f by exactly its weight."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0, *weights], dtype=torch.float64))
        self.rows = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.rows += len(input_ids)
        total = self.weights[input_ids].sum(1)
        return torch.stack([-total, total], 1)


def value(logits: Tensor) -> Tensor:
    return logits[:, 1]


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal up to 1e-12, because candidates share passes."""
    return bool((actual - expected).abs().max() <= 1e-12 * expected.abs().max())


def explanation_of(scores: Any, method: str = "by hand") -> Explanation:
    table = torch.tensor(scores, dtype=torch.float64)
    table = table if table.dim() == 2 else table[None]
    return Explanation(table, "token", method, {}, torch.full((len(table),), -1), torch.zeros(len(table), 2))


def bag(weights: list[float]) -> tuple[Bag, dict[str, Tensor]]:
    return Bag(weights).eval(), {"input_ids": torch.arange(1, len(weights) + 1)[None]}


# -- criteria ------------------------------------------------------------------------------------------------------
def reference_rft(scores: list[float], drops: list[float]) -> float:
    """methods.md §4.2: sort by magnitude and give each feature the last rank of its group of ties."""
    sizes = sorted((abs(a) for a in scores), reverse=True)
    ranks = {size: rank for rank, size in enumerate(sizes, start=1)}
    total = 0.0
    for a, d in zip(scores, drops, strict=True):
        term = d if a > 0 else -d if a < 0 else -abs(d)
        total += term / ranks[abs(a)]
    return total


def test_rft_by_hand() -> None:
    """w = 3, −2, 1, ½ and a = 4, −1, 0, 2: ranks 1, 3, 4, 2, terms 3, 2, −1, ½, so 3 + 2/3 − 1/4 + 1/4 = 11/3."""
    model, inputs = bag([3, -2, 1, 0.5])
    result = arbitrate(model, inputs, [explanation_of([4, -1, 0, 2])], holdout=0, target=value, baseline=0)
    assert math.isclose(result.score, Fraction(11, 3))
    assert torch.equal(result.selection, result.heldout)
    # ties all take the worst rank: 2, 2, 3
    tied = arbitrate(model, inputs, [explanation_of([1, 1, 0.5, 0])], holdout=0, target=value, baseline=0)
    assert math.isclose(tied.score, Fraction(3, 2) + Fraction(-2, 2) + Fraction(1, 3) - Fraction(1, 8))


def test_rft_equals_the_reference() -> None:
    for n in (1, 2, 5, 30):
        scores = torch.randint(-3, 4, (n,)).double()
        outputs = torch.randn(n, dtype=torch.float64)
        expected = reference_rft(scores.tolist(), (0.7 - outputs).tolist())
        assert math.isclose(ranked_faithfulness(scores, 0.7 - outputs), expected, rel_tol=1e-12, abs_tol=1e-12)


def test_deletion_and_comprehensiveness_by_hand() -> None:
    """Ten tokens of weight 10, 9 ... 1, in the correct order: f decreases from 55 by 10, 9 ..."""
    model, inputs = bag([float(w) for w in range(10, 0, -1)])
    settings: dict[str, Any] = {"holdout": 0, "target": value, "baseline": 0}
    best, worst = explanation_of(list(range(10, 0, -1))), explanation_of(list(range(1, 11)))
    curve = [55, 45, 36, 28, 21, 15, 10, 6, 3, 1, 0]
    result = arbitrate(model, inputs, [worst, best], "deletion", **settings)
    assert math.isclose(float(result.heldout[1, 0, 0]), (sum(curve) - (55 + 0) / 2) / 10)
    assert not result.higher_is_better
    assert result.winners.tolist() == [[1]]
    # 1, 5 and 10 % of ten tokens are one, 20 % two, 50 % five
    result = arbitrate(model, inputs, [worst, best], "comprehensiveness", **settings)
    assert math.isclose(float(result.heldout[1, 0, 0]), (10 + 10 + 10 + 19 + 40) / 5)
    assert math.isclose(float(result.heldout[0, 0, 0]), (1 + 1 + 1 + 3 + 15) / 5)
    assert result.higher_is_better
    assert result.winners.tolist() == [[1]]


def remove_features(inputs: Any, b: int, removed: list[int]) -> Any:
    """The inputs with features of sample b removed, independently of the library."""
    if isinstance(inputs, Tensor):
        changed = inputs.clone()
        columns = inputs.shape[-1] // 8
        for p in removed:
            r, c = divmod(p, columns)
            changed[b, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8] = 0
        return changed
    ids = inputs["input_ids"].clone()
    ids[b, removed] = FILL
    return {**inputs, "input_ids": ids}


def entry(candidate: Any) -> tuple[str, dict[str, Any]]:
    """A candidate of ``NAMES`` as (method, settings)."""
    if isinstance(candidate, dict):
        return candidate["method"], {k: v for k, v in candidate.items() if k != "method"}
    return (candidate, {}) if isinstance(candidate, str) else candidate


def on_patches(explanation: Explanation) -> Tensor:
    if explanation.level != "pixel":
        return explanation.scores
    return explanation.scores.reshape(2, 3, 8, 5, 8).mean((2, 4)).reshape(2, 15)


@pytest.mark.parametrize("name", ["hf_vit_wide", "bert"])
@pytest.mark.parametrize("criterion", ["rft", "deletion", "comprehensiveness"])
@pytest.mark.parametrize("holdout", [0, 0.4])
def test_criterion_equals_a_reference_loop(name: str, criterion: str, holdout: float) -> None:
    """Selection and held-out scores of every candidate, for the probability of the target of each sample."""
    model, inputs = zoo.build(name)
    fill = {"baseline": FILL} if name == "bert" else {}
    before = snapshot(model)
    result = arbitrate(model, inputs, NAMES, criterion, holdout=holdout, target=[1, 3], **fill)
    assert_unchanged(model, before)
    maps = [
        on_patches(whyformer.explain(model, inputs, method, target=[1, 3], **settings)) for method, settings in map(entry, NAMES)
    ]
    lengths = zoo.LENGTHS if name == "bert" else (15, 15)
    for b, target in enumerate([1, 3]):

        @cache
        def output(*removed: int, b: int = b, target: int = target) -> float:
            return float(zoo.call(model, remove_features(inputs, b, list(removed))).softmax(-1)[b, target])

        parts = split(list(range(lengths[b])), holdout, 0)
        for part, table in zip(parts, (result.selection, result.heldout), strict=True):
            for m, scores in enumerate(maps):
                a = {t: float(scores[b, t]) for t in part}
                order = sorted(part, key=lambda t: -a[t])
                clean, n = output(), len(part)
                if criterion == "rft":
                    expected = reference_rft([a[t] for t in part], [clean - output(t) for t in part])
                elif criterion == "deletion":
                    curve = [output(*order[: n * k // 10]) for k in range(11)]
                    expected = sum((u + v) / 20 for u, v in pairwise(curve))
                else:
                    counts = [max(1, round(Fraction(p, 100) * n)) for p in (1, 5, 10, 20, 50)]
                    expected = sum(clean - output(*order[:k]) for k in counts) / 5
                assert math.isclose(float(table[m, b, 0]), expected, rel_tol=1e-6, abs_tol=1e-9)


# -- held-out features------------------------------------------------------------------------------------------------
def test_split_sizes_and_seed() -> None:
    for n, holdout, sizes in (
        (10, 0.5, (5, 5)),
        (10, 0.2, (8, 2)),
        (3, 0.9, (1, 2)),
        (2, 0.01, (1, 1)),
        (1, 0.5, (1, 1)),
    ):
        features = list(range(100, 100 + n))
        chosen, held = split(features, holdout, 0)
        assert (len(chosen), len(held)) == sizes
        assert chosen == sorted(chosen)
        assert sorted({*chosen, *held}) == features
        assert n == 1 or not set(chosen) & set(held)
    assert split([4, 7], 0, 0) == ([4, 7], [4, 7])
    assert split(list(range(20)), 0.5, 0) == split(list(range(20)), 0.5, 0)
    assert split(list(range(20)), 0.5, 0) != split(list(range(20)), 0.5, 1)
    with pytest.raises(InputError, match="no features"):
        split([], 0.5, 0)


def test_heldout_score_is_unbiased_by_the_selection() -> None:
    """The best of forty random explanations looks good on the features that selected it, but not on held-out features."""
    draws = torch.Generator().manual_seed(0)
    batch, n = 20, 20
    model = Bag(torch.randn(50, generator=draws).tolist()).eval()
    ids = torch.randint(1, 51, (batch, n), generator=draws)
    noise = [explanation_of(torch.randn(batch, n, generator=draws).tolist(), f"noise {m}") for m in range(40)]
    settings: dict[str, Any] = {"target": value, "baseline": 0}
    unbiased = arbitrate(model, {"input_ids": ids}, noise, **settings)
    chosen = unbiased.selection.gather(0, unbiased.winners[None])[0]
    overall, spread = float(unbiased.heldout.mean()), float(unbiased.heldout.std())
    assert chosen.mean() > overall + 1.5 * spread
    assert abs(unbiased.score - overall) < 4 * spread / batch**0.5
    # without held-out features, the reported score is the one of the selection
    biased = arbitrate(model, {"input_ids": ids}, noise, holdout=0, **settings)
    assert biased.score > float(biased.heldout.mean()) + 1.5 * float(biased.heldout.std())


def test_true_weights_win_against_noise() -> None:
    """The true weights are chosen for every sample, and are best on held-out features."""
    draws = torch.Generator().manual_seed(1)
    model = Bag(torch.randn(50, generator=draws).tolist()).eval()
    ids = torch.randint(1, 51, (10, 20), generator=draws)
    noise = [explanation_of(torch.randn(10, 20, generator=draws).tolist()) for _ in range(5)]
    truth = explanation_of(model.weights.detach()[ids].tolist(), "the weights")
    for criterion in CRITERIA:
        result = arbitrate(
            model, {"input_ids": ids}, [*noise, truth], criterion, mode="dataset", target=value, baseline=0
        )
        assert result.winners.eq(5).all()
        means = result.heldout[:, :, 0].mean(1)
        assert int(means.argmax() if result.higher_is_better else means.argmin()) == 5


def test_arbitration_is_reproducible_and_equals_single_samples() -> None:
    model, inputs = zoo.build("bert")
    settings: dict[str, Any] = {"candidates": NAMES, "baseline": FILL}
    first = arbitrate(model, inputs, target=[1, 3], **settings)
    torch.manual_seed(7)
    repeated = arbitrate(model, inputs, target=[1, 3], **settings)
    assert torch.equal(first.selection, repeated.selection)
    assert torch.equal(first.heldout, repeated.heldout)
    assert first.winners.tolist() == repeated.winners.tolist()
    other = arbitrate(model, inputs, target=[1, 3], seed=1, **settings)
    assert not torch.allclose(first.selection, other.selection)
    for b, target in enumerate([1, 3]):
        single = arbitrate(model, zoo.rows(inputs, b, crop=True), target=target, batch_size=3, **settings)
        assert torch.allclose(single.selection[:, 0], first.selection[:, b], atol=1e-9)
        assert torch.allclose(single.heldout[:, 0], first.heldout[:, b], atol=1e-9)


# -- cost ----------------------------------------------------------------------------------------------------------
def test_candidates_share_perturbed_forwards() -> None:
    model, inputs = bag([3, -2, 1, 0.5, 2, -1])
    explanations = [explanation_of(torch.randn(6).tolist(), f"e{m}") for m in range(7)]
    arbitrate(model, inputs, explanations, target=value, baseline=0)  # the first call also inspects the output
    model.rows = 0
    result = arbitrate(model, inputs, explanations, target=value, baseline=0)
    assert result.cost == {"perturbed": 6, "unshared": 7 * 6, "clean": 1}
    assert model.rows == 6 + 1
    # the two parts of 3 features have at most 2³ − 1 subsets each, for any number of candidates
    model.rows = 0
    result = arbitrate(model, inputs, explanations, "deletion", target=value, baseline=0)
    assert model.rows == result.cost["perturbed"] + 1 <= 2 * 7 + 1
    assert result.cost["unshared"] == 7 * 2 * 3


def test_class_agnostic_explanations_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plain = module.Prepared.explain

    def counted(ready: Any, method: str, *args: Any, **settings: Any) -> Explanation:
        calls.append(method)
        return plain(ready, method, *args, **settings)

    monkeypatch.setattr(module.Prepared, "explain", counted)
    model, inputs = zoo.build("hf_vit")
    arbitrate(model, inputs, ["rollout", "saliency"], mode="label")
    assert calls.count("rollout") == 1
    assert calls.count("saliency") == zoo.CLASSES


@pytest.mark.parametrize("mode", ["instance", "label"])
def test_methods_share_a_forward_pass_and_equal_explain(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        recorded.append(1)
        return record_pass(*args, **options)

    for module in ("task_inputs", "passes"):  # the second for relevance
        monkeypatch.setattr(f"whyformer.methods.{module}.record_pass", counted)
    model, inputs = zoo.build("hf_vit")
    names = ["transformer_attribution", "gae", "rollout", "lrp_ah_ln"]
    result = arbitrate(model, inputs, names, target=[1, 3], mode=mode, labels=2)
    assert recorded == [1]
    for b, by_class in enumerate(result.by_label):
        for label, e in by_class.items():
            alone = whyformer.explain(model, inputs, e.method, target=[label, label]).scores[b]
            assert close(e.scores[0], alone)


# -- modes ---------------------------------------------------------------------------------------------------------
GOOD = torch.tensor([
    # sample 0, 1, 2; labels 0, 1
    [[3.0, 0.0], [1.0, 5.0], [0.0, 0.0]],  # candidate 0
    [[2.0, 9.0], [2.0, 0.0], [0.0, 0.0]],  # candidate 1
    [[1.0, 1.0], [9.0, 1.0], [0.0, 0.0]],  # candidate 2
])  # fmt: skip
LABELS = torch.tensor([[4, 1], [7, 1], [4, 1]])


@pytest.mark.parametrize(
    ("mode", "winners"),
    [
        ("label", [[0, 1], [2, 0], [0, 0]]),
        # means over the labels: 1.5 5.5 1 · 3 1 5 · 0 0 0
        ("prime", [[1, 1], [2, 2], [0, 0]]),
        ("mean_baseline", [[2, 2], [2, 2], [2, 2]]),
    ],
)
def test_winners_of_label_modes_by_hand(mode: str, winners: list[list[int]]) -> None:
    result, choosing, reported = module._choose(GOOD, LABELS, mode, 0.5, 0)
    assert result.tolist() == winners
    assert choosing.all()
    assert reported.all()


@pytest.mark.parametrize(
    ("mode", "winners"),
    [
        ("instance", [0, 2, 0]),
        # samples 0 and 2 are of class 4: means 1.5, 1, ½; sample 1 alone of class 7
        ("class", [0, 2, 0]),
        # means 4/3, 4/3, 10/3
        ("dataset", [2, 2, 2]),
    ],
)
def test_winners_of_target_modes_by_hand(mode: str, winners: list[int]) -> None:
    assert module._choose(GOOD[..., :1], LABELS[:, :1], mode, 0.5, 0)[0][:, 0].tolist() == winners


def test_prime_mode_differs_from_the_published_code() -> None:
    """The published code averages over configurations and returns the configuration whose index is the best label (methods.md §8 #26)."""
    published = int(GOOD[:, 0].mean(0).argmax())
    assert published == 1
    assert int(GOOD[:, 1].mean(0).argmax()) == 0
    assert module._choose(GOOD, LABELS, "prime", 0.5, 0)[0][1].tolist() == [2, 2]


def test_batch_mode_selects_on_some_samples_for_the_others() -> None:
    good = torch.randn(4, 9, 1)
    winners, choosing, reported = module._choose(good, torch.zeros(9, 1), "batch", 1 / 3, 5)
    assert int(reported.sum()) == 3
    assert torch.equal(choosing, ~reported)
    assert winners.tolist() == [[int(good[:, choosing, 0].mean(1).argmax())]] * 9
    model, inputs = zoo.build("hf_vit")
    result = arbitrate(model, inputs, NAMES, mode="batch", target=1)
    assert torch.equal(result.selection, result.heldout)
    sample = int(result.reported.nonzero())
    assert math.isclose(result.score, float(result.heldout[int(result.winners[0, 0]), sample, 0]))
    rows = result.table()
    assert rows[0]["selection"] == float(result.selection[0, 1 - sample])
    assert rows[0]["heldout"] == float(result.heldout[0, sample])
    with pytest.raises(InputError, match="needs 2"):
        arbitrate(model, inputs[:1], NAMES, mode="batch")


def test_first_of_ties_wins() -> None:
    model, inputs = bag([1, 2, 3])
    same = [explanation_of([3, 2, 1], f"e{m}") for m in range(3)]
    assert arbitrate(model, inputs, same, target=value, baseline=0).winners.tolist() == [[0]]


def test_chosen_explanations_equal_explain() -> None:
    model, inputs = zoo.build("hf_vit")
    result = arbitrate(model, inputs, NAMES, target=[1, 3])
    assert result.labels.tolist() == [[1], [3]]
    for b, explanation in enumerate(result.explanations):
        method, settings = entry(NAMES[int(result.winners[b, 0])])
        expected = whyformer.explain(model, inputs, method, target=[1, 3], **settings)[b]
        assert len(explanation) == 1
        assert close(explanation.scores, expected.scores)
        assert explanation.target.tolist() == expected.target.tolist()
    expected_score = result.heldout.gather(0, result.winners[None]).mean()
    assert math.isclose(result.score, float(expected_score))


def test_label_mode_chooses_for_every_class() -> None:
    model, inputs = zoo.build("hf_vit")
    result = arbitrate(model, inputs, ["saliency", "input_x_gradient"], mode="label", target=[1, 3])
    logits = zoo.call(model, inputs)
    for b, target in enumerate([1, 3]):
        rest = [c for c in logits[b].argsort(descending=True).tolist() if c != target]
        assert result.labels[b].tolist() == [target, *rest]
        assert set(result.by_label[b]) == set(range(zoo.CLASSES))
        for k, label in enumerate(result.labels[b].tolist()):
            chosen = result.by_label[b][label]
            assert chosen.target.tolist() == [label]
            method = ["saliency", "input_x_gradient"][int(result.winners[b, k])]
            expected = whyformer.explain(model, inputs, method, target=label)[b]
            assert close(chosen.scores, expected.scores)
        assert torch.equal(result.explanations[b].scores, result.by_label[b][target].scores)
    # the first column equals that of the target alone
    alone = arbitrate(model, inputs, ["saliency", "input_x_gradient"], target=[1, 3])
    assert torch.allclose(result.selection[..., :1], alone.selection, atol=1e-12)
    assert arbitrate(model, inputs, ["saliency"], mode="prime", labels=2).labels.shape == (2, 2)


def test_prime_mode_over_all_classes_refuses_class_agnostic_methods() -> None:
    """The changes of all probabilities of a softmax sum to 0, so the choice would depend on rounding."""
    model, inputs = zoo.build("hf_vit")
    agnostic = ["rollout", "raw_attention"]
    with pytest.raises(InputError, match=rf"mean over all {zoo.CLASSES} classes.*\(rollout, raw_attention\): pass labels="):
        arbitrate(model, inputs, agnostic, mode="prime", target=1)
    with pytest.raises(InputError, match=r"\(rollout\)"):
        arbitrate(model, inputs, ["saliency", "rollout"], mode="prime", target=1, labels=zoo.CLASSES)
    # allowed: fewer classes, class-specific methods, or multi-label classes
    result = arbitrate(model, inputs, agnostic, "comprehensiveness", mode="prime", target=1, labels=zoo.CLASSES - 1)
    assert result.selection.mean(-1).abs().min() > 1e-6
    arbitrate(model, inputs, ["saliency", "input_x_gradient"], mode="prime", target=1)
    model.config.problem_type = "multi_label_classification"
    result = arbitrate(model, inputs, agnostic, mode="prime", target=1)
    assert result.labels.shape == (2, zoo.CLASSES)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_criterion_equals_the_metric(criterion: str) -> None:
    """Without held-out features a criterion equals ``evaluate`` with ten steps."""
    model, inputs = zoo.build("bert")
    e = whyformer.explain(model, inputs, "input_x_gradient", 1)
    result = arbitrate(model, inputs, [e], criterion, holdout=0, target=1, baseline=FILL)
    steps = {"steps": 10} if criterion in ("deletion", "insertion") else {}
    expected = whyformer.evaluate(model, inputs, e, criterion, baseline=FILL, **steps)
    assert result.heldout[0, :, 0].numpy() == pytest.approx(expected.values, abs=1e-9)
    assert result.higher_is_better == (expected.better == "higher")


def test_mean_baseline_mode() -> None:
    model, inputs = zoo.build("bert")
    result = arbitrate(model, inputs, NAMES, mode="mean_baseline", baseline=FILL, target=1)
    expected = whyformer.explain(model, inputs, "raw_attention", aggregation={"layers": "mean"}, target=1)
    assert all(close(e.scores, expected[b].scores) for b, e in enumerate(result.explanations))
    assert result.winners.eq(len(NAMES)).all()
    assert len(result.candidates) == len(NAMES) + 1


# -- candidates ----------------------------------------------------------------------------------------------------
def test_pixel_scores_and_other_grids_are_averaged_over_cells() -> None:
    model, x = zoo.build("hf_vit")
    pixel = whyformer.explain(model, x, "saliency", target=1)
    assert pixel.level == "pixel"
    cells = pixel.scores.reshape(2, 4, 8, 4, 8).mean((2, 4)).reshape(2, 16)
    patch = Explanation(cells, "patch", "by hand", {}, pixel.target, pixel.logits, features=Features(grid=(4, 4), image_size=(32, 32)))
    result = arbitrate(model, x, [pixel, patch], target=1)
    assert torch.allclose(result.selection[0], result.selection[1], atol=1e-12)
    assert result.candidates == ["given saliency", "given by hand"]
    coarse = Explanation(
        cells[:, :4], "patch", "by hand", {}, pixel.target, pixel.logits, features=Features(grid=(2, 2), image_size=(32, 32))
    )
    assert torch.isfinite(arbitrate(model, x, [coarse], target=1).heldout).all()
    # cells of another size than the patches of the model, cropped at the border
    assert arbitrate(model, x, [pixel, patch], target=1, patch=12).cost["perturbed"] == 2 * 9


def test_arbitration_on_swin_and_on_text() -> None:
    model, x = zoo.build("hf_swin")
    result = arbitrate(model, x, ["saliency", "gradcam"], patch=8)
    assert result.cost["perturbed"] == 2 * 16
    text = ["a gripping and moving film", "the plot is thin and nothing in it works"]
    result = arbitrate("bundled:sst2", text, ["raw_attention", "saliency"])
    assert result.settings["baseline"] == "unk"
    tokens = [t for row in result.explanations for t in (row.tokens or [[]])[0] if t not in ("[CLS]", "[SEP]", "[PAD]")]
    assert result.cost["perturbed"] == len(tokens)


def test_str_is_a_table() -> None:
    model, inputs = zoo.build("hf_vit")
    result = arbitrate(model, inputs, NAMES)
    assert result.candidates == ["raw_attention", "rollout", "raw_attention(block=0)", "saliency", "input_x_gradient"]
    text = str(result)
    assert text.startswith("rft (higher is better), mode instance: ")
    assert all(name in text for name in result.candidates)
    assert "32 perturbed forwards; 160 without sharing" in text
    assert sum(row["chosen"] for row in result.table()) == 2
    assert arbitrate(model, inputs, ["rollout", "rollout"]).candidates == ["rollout", "rollout #2"]


# -- invalid arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"candidates": []}, "no candidates"),
        ({"candidates": ["rolout"]}, "Did you mean 'rollout'"),
        ({"candidates": [("rollout", {"head_fusion": "median"})]}, "head_fusion must be one of"),
        ({"candidates": [3]}, "a candidate is a method name"),
        ({"candidates": [{"block": 1}]}, "a candidate is a method name"),
        ({"criterion": "luck"}, "criterion must be one of aopc, auac, comprehensiveness, deletion, insertion, log_odds, rft, sufficiency"),
        ({"mode": "best"}, "mode must be one of instance"),
        ({"holdout": 1.0}, "holdout must be at least 0"),
        ({"holdout": True}, "holdout"),
        ({"batch_size": 0}, "batch_size"),
        ({"patch": 0}, "patch must be an integer of at least 1"),
        ({"patch": 2.5}, "patch must be an integer of at least 1"),
        ({"seed": 2**70}, "seed must be an integer"),
        ({"labels": 0}, "labels"),
        ({"baseline": "mask"}, "is not for a picture"),
        ({"target": value, "mode": "label"}, "must be a class, not a callable"),
        ({"target": 9}, "class 9 is out of range"),
    ],
)
def test_invalid_argument_raises(settings: dict[str, Any], match: str) -> None:
    model, inputs = zoo.build("hf_vit")
    with pytest.raises(InputError, match=match):
        arbitrate(model, inputs, **{"candidates": ["rollout"], **settings})


def test_explanation_of_other_targets_or_inputs_raises() -> None:
    model, x = zoo.build("hf_vit")
    other = whyformer.explain(model, x, "saliency", target=2)
    with pytest.raises(InputError, match=r"is for the classes \[2, 2\], and the targets are \[1, 1\]"):
        arbitrate(model, x, [other], target=1)
    with pytest.raises(InputError, match="has 2 samples, and there are 1 inputs"):
        arbitrate(model, x[:1], [other], target=2)
    # a class-agnostic explanation fits any target
    assert arbitrate(model, x, [whyformer.explain(model, x, "rollout", target=2)], target=1).winners.eq(0).all()
    text = explanation_of([[1.0, 2.0]] * 2)
    with pytest.raises(InputError, match=r"token scores \[2, 2\], and each input has 16 features"):
        arbitrate(model, x, [text], target=value)


def test_non_finite_output_raises() -> None:
    class Fragile(Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) / (input_ids != 0).all(1, keepdim=True)

    model = Fragile([1.0, 2.0]).eval()
    with pytest.raises(ModelError, match="choose another baseline"):
        arbitrate(model, {"input_ids": torch.tensor([[1, 2]])}, [explanation_of([1, 2])], target=value, baseline=0)


def test_arbitration_result_of_a_function_target() -> None:
    model, inputs = bag([1, 2])
    result = arbitrate(model, inputs, [explanation_of([1, 2])], target=value, baseline=0)
    assert isinstance(result, Arbitration)
    assert result.labels.tolist() == [[-1]]
    assert result.by_label[0][-1] is result.explanations[0]
