"""Arbitration: criteria against slow separate implementations and fractions by hand, honest holding out, shared forwards."""

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
from whyformer.evaluation.holdout import split
from whyformer.evaluation.metrics.faithfulness import ranked_faithfulness
from whyformer.evaluation.select import Arbitration, arbitrate
from whyformer.explanation.features import Features
from whyformer.explanation.result import Explanation
from whyformer.methods.passes import record_pass

# the package's attribute of that name is the function
module = sys.modules["whyformer.evaluation.select"]
FILL = 3
CRITERIA = ("aopc", "auac", "comprehensiveness", "deletion", "insertion", "log_odds", "rft", "sufficiency")
NAMES = ["raw_attention", ("rollout", {}), {"method": "raw_attention", "block": 0}, "saliency", "input_x_gradient"]


class Bag(nn.Module):
    """f = Σ_t w[id_t], so taking a token out (id 0, weight 0) drops f by its weight exactly."""

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


def alike(found: Tensor, alone: Tensor) -> bool:
    """To 1e-12: candidates share passes."""
    return bool((found - alone).abs().max() <= 1e-12 * alone.abs().max())


def given(scores: Any, method: str = "by hand") -> Explanation:
    table = torch.tensor(scores, dtype=torch.float64)
    table = table if table.dim() == 2 else table[None]
    return Explanation(table, "token", method, {}, torch.full((len(table),), -1), torch.zeros(len(table), 2))


def bag(weights: list[float]) -> tuple[Bag, dict[str, Tensor]]:
    return Bag(weights).eval(), {"input_ids": torch.arange(1, len(weights) + 1)[None]}


# -- criteria ------------------------------------------------------------------------------------------------------
def slow_rft(scores: list[float], drops: list[float]) -> float:
    """methods.md §4.2 word by word: sort by size, walk through groups of equals, give each the last place of its group."""
    sizes = sorted((abs(a) for a in scores), reverse=True)
    ranks = {size: place for place, size in enumerate(sizes, start=1)}
    total = 0.0
    for a, d in zip(scores, drops, strict=True):
        term = d if a > 0 else -d if a < 0 else -abs(d)
        total += term / ranks[abs(a)]
    return total


def test_rft_by_hand() -> None:
    """w = 3, −2, 1, ½ and a = 4, −1, 0, 2: ranks 1, 3, 4, 2, terms 3, 2, −1, ½, so 3 + 2/3 − 1/4 + 1/4 = 11/3."""
    model, inputs = bag([3, -2, 1, 0.5])
    found = arbitrate(model, inputs, [given([4, -1, 0, 2])], holdout=0, target=value, fill_id=0)
    assert math.isclose(found.score, Fraction(11, 3))
    assert torch.equal(found.selection, found.heldout)
    # ties all take the worst rank: 2, 2, 3
    tied = arbitrate(model, inputs, [given([1, 1, 0.5, 0])], holdout=0, target=value, fill_id=0)
    assert math.isclose(tied.score, Fraction(3, 2) + Fraction(-2, 2) + Fraction(1, 3) - Fraction(1, 8))


def test_rft_equals_a_slow_one() -> None:
    for n in (1, 2, 5, 30):
        scores = torch.randint(-3, 4, (n,)).double()
        outputs = torch.randn(n, dtype=torch.float64)
        wanted = slow_rft(scores.tolist(), (0.7 - outputs).tolist())
        assert math.isclose(ranked_faithfulness(scores, 0.7 - outputs), wanted, rel_tol=1e-12, abs_tol=1e-12)


def test_deletion_and_comprehensiveness_by_hand() -> None:
    """Ten tokens of weight 10, 9 ... 1, in the right order: f falls from 55 by 10, 9 ..."""
    model, inputs = bag([float(w) for w in range(10, 0, -1)])
    settings: dict[str, Any] = {"holdout": 0, "target": value, "fill_id": 0}
    best, worst = given(list(range(10, 0, -1))), given(list(range(1, 11)))
    curve = [55, 45, 36, 28, 21, 15, 10, 6, 3, 1, 0]
    found = arbitrate(model, inputs, [worst, best], "deletion", **settings)
    assert math.isclose(float(found.heldout[1, 0, 0]), (sum(curve) - (55 + 0) / 2) / 10)
    assert not found.higher_is_better
    assert found.winners.tolist() == [[1]]
    # 1, 5 and 10 % of ten tokens are one, 20 % two, 50 % five
    found = arbitrate(model, inputs, [worst, best], "comprehensiveness", **settings)
    assert math.isclose(float(found.heldout[1, 0, 0]), (10 + 10 + 10 + 19 + 40) / 5)
    assert math.isclose(float(found.heldout[0, 0, 0]), (1 + 1 + 1 + 3 + 15) / 5)
    assert found.higher_is_better
    assert found.winners.tolist() == [[1]]


def without(inputs: Any, b: int, gone: list[int]) -> Any:
    """The inputs with features of sample b taken out, written separately from the library."""
    if isinstance(inputs, Tensor):
        changed = inputs.clone()
        columns = inputs.shape[-1] // 8
        for p in gone:
            r, c = divmod(p, columns)
            changed[b, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8] = 0
        return changed
    ids = inputs["input_ids"].clone()
    ids[b, gone] = FILL
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
def test_equal_to_a_slow_loop(name: str, criterion: str, holdout: float) -> None:
    """Both parts, every candidate; probabilities of each sample's own target."""
    model, inputs = zoo.build(name)
    fill = {"fill_id": FILL} if name == "bert" else {}
    before = snapshot(model)
    found = arbitrate(model, inputs, NAMES, criterion, holdout=holdout, target=[1, 3], **fill)
    assert_unchanged(model, before)
    maps = [
        on_patches(whyformer.explain(model, inputs, method, target=[1, 3], **own)) for method, own in map(entry, NAMES)
    ]
    lengths = zoo.LENGTHS if name == "bert" else (15, 15)
    for b, target in enumerate([1, 3]):

        @cache
        def output(*gone: int, b: int = b, target: int = target) -> float:
            return float(zoo.call(model, without(inputs, b, list(gone))).softmax(-1)[b, target])

        parts = split(list(range(lengths[b])), holdout, 0)
        for part, table in zip(parts, (found.selection, found.heldout), strict=True):
            for m, scores in enumerate(maps):
                a = {t: float(scores[b, t]) for t in part}
                order = sorted(part, key=lambda t: -a[t])
                clean, n = output(), len(part)
                if criterion == "rft":
                    wanted = slow_rft([a[t] for t in part], [clean - output(t) for t in part])
                elif criterion == "deletion":
                    curve = [output(*order[: n * k // 10]) for k in range(11)]
                    wanted = sum((u + v) / 20 for u, v in pairwise(curve))
                else:
                    counts = [max(1, round(Fraction(p, 100) * n)) for p in (1, 5, 10, 20, 50)]
                    wanted = sum(clean - output(*order[:k]) for k in counts) / 5
                assert math.isclose(float(table[m, b, 0]), wanted, rel_tol=1e-6, abs_tol=1e-9)


# -- holding out ---------------------------------------------------------------------------------------------------
def test_split() -> None:
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


def test_the_choice_is_not_scored_on_what_made_it() -> None:
    """Forty explanations at random: none is better than another. The best looks good where it was chosen, not elsewhere."""
    draws = torch.Generator().manual_seed(0)
    batch, n = 20, 20
    model = Bag(torch.randn(50, generator=draws).tolist()).eval()
    ids = torch.randint(1, 51, (batch, n), generator=draws)
    noise = [given(torch.randn(batch, n, generator=draws).tolist(), f"noise {m}") for m in range(40)]
    settings: dict[str, Any] = {"target": value, "fill_id": 0}
    honest = arbitrate(model, {"input_ids": ids}, noise, **settings)
    chosen = honest.selection.gather(0, honest.winners[None])[0]
    everywhere, spread = float(honest.heldout.mean()), float(honest.heldout.std())
    assert chosen.mean() > everywhere + 1.5 * spread
    assert abs(honest.score - everywhere) < 4 * spread / batch**0.5
    # with nothing held out, the reported score is the one that chose
    fooled = arbitrate(model, {"input_ids": ids}, noise, holdout=0, **settings)
    assert fooled.score > float(fooled.heldout.mean()) + 1.5 * float(fooled.heldout.std())


def test_a_better_explanation_is_found() -> None:
    """The weights themselves among noise: chosen for every sample, and best where nothing was chosen."""
    draws = torch.Generator().manual_seed(1)
    model = Bag(torch.randn(50, generator=draws).tolist()).eval()
    ids = torch.randint(1, 51, (10, 20), generator=draws)
    noise = [given(torch.randn(10, 20, generator=draws).tolist()) for _ in range(5)]
    truth = given(model.weights.detach()[ids].tolist(), "the weights")
    for criterion in CRITERIA:
        found = arbitrate(
            model, {"input_ids": ids}, [*noise, truth], criterion, mode="dataset", target=value, fill_id=0
        )
        assert found.winners.eq(5).all()
        means = found.heldout[:, :, 0].mean(1)
        assert int(means.argmax() if found.higher_is_better else means.argmin()) == 5


def test_reproducible_and_alone_as_in_the_batch() -> None:
    model, inputs = zoo.build("bert")
    settings: dict[str, Any] = {"candidates": NAMES, "fill_id": FILL}
    first = arbitrate(model, inputs, target=[1, 3], **settings)
    torch.manual_seed(7)
    again = arbitrate(model, inputs, target=[1, 3], **settings)
    assert torch.equal(first.selection, again.selection)
    assert torch.equal(first.heldout, again.heldout)
    assert first.winners.tolist() == again.winners.tolist()
    other = arbitrate(model, inputs, target=[1, 3], seed=1, **settings)
    assert not torch.allclose(first.selection, other.selection)
    for b, target in enumerate([1, 3]):
        one = arbitrate(model, zoo.rows(inputs, b, crop=True), target=target, batch_size=3, **settings)
        assert torch.allclose(one.selection[:, 0], first.selection[:, b], atol=1e-9)
        assert torch.allclose(one.heldout[:, 0], first.heldout[:, b], atol=1e-9)


# -- what it costs -------------------------------------------------------------------------------------------------
def test_perturbed_forwards_are_shared() -> None:
    model, inputs = bag([3, -2, 1, 0.5, 2, -1])
    explanations = [given(torch.randn(6).tolist(), f"e{m}") for m in range(7)]
    arbitrate(model, inputs, explanations, target=value, fill_id=0)  # the first time it is seen what the output is
    model.rows = 0
    found = arbitrate(model, inputs, explanations, target=value, fill_id=0)
    assert found.cost == {"perturbed": 6, "unshared": 7 * 6, "clean": 1}
    assert model.rows == 6 + 1
    # the two parts of 3 have 2³ − 1 subsets each at most, whatever the number of candidates
    model.rows = 0
    found = arbitrate(model, inputs, explanations, "deletion", target=value, fill_id=0)
    assert model.rows == found.cost["perturbed"] + 1 <= 2 * 7 + 1
    assert found.cost["unshared"] == 7 * 2 * 3


def test_explanations_that_do_not_depend_on_the_class_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    plain = module.Prepared.explain

    def counted(ready: Any, method: str, *args: Any, **settings: Any) -> Explanation:
        made.append(method)
        return plain(ready, method, *args, **settings)

    monkeypatch.setattr(module.Prepared, "explain", counted)
    model, inputs = zoo.build("hf_vit")
    arbitrate(model, inputs, ["rollout", "saliency"], mode="label")
    assert made.count("rollout") == 1
    assert made.count("saliency") == zoo.CLASSES


@pytest.mark.parametrize("mode", ["instance", "label"])
def test_methods_share_a_forward_pass_and_give_what_they_give_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        recorded.append(1)
        return record_pass(*args, **options)

    for module in ("task", "passes"):  # the second for relevance
        monkeypatch.setattr(f"whyformer.methods.{module}.record_pass", counted)
    model, inputs = zoo.build("hf_vit")
    names = ["transformer_attribution", "gae", "rollout", "lrp_ah_ln"]
    found = arbitrate(model, inputs, names, target=[1, 3], mode=mode, labels=2)
    assert recorded == [1]
    for b, by_class in enumerate(found.by_label):
        for label, e in by_class.items():
            alone = whyformer.explain(model, inputs, e.method, target=[label, label]).scores[b]
            assert alike(e.scores[0], alone)


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
def test_choices_by_hand(mode: str, winners: list[list[int]]) -> None:
    found, choosing, reported = module._choose(GOOD, LABELS, mode, 0.5, 0)
    assert found.tolist() == winners
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
def test_choices_for_the_target(mode: str, winners: list[int]) -> None:
    assert module._choose(GOOD[..., :1], LABELS[:, :1], mode, 0.5, 0)[0][:, 0].tolist() == winners


def test_prime_is_not_the_published_codes() -> None:
    """That averages over configurations and returns the configuration with the number of the best label (methods.md §8 #26)."""
    published = int(GOOD[:, 0].mean(0).argmax())
    assert published == 1
    assert int(GOOD[:, 1].mean(0).argmax()) == 0
    assert module._choose(GOOD, LABELS, "prime", 0.5, 0)[0][1].tolist() == [2, 2]


def test_batch_chooses_on_some_samples_for_the_others() -> None:
    good = torch.randn(4, 9, 1)
    winners, choosing, reported = module._choose(good, torch.zeros(9, 1), "batch", 1 / 3, 5)
    assert int(reported.sum()) == 3
    assert torch.equal(choosing, ~reported)
    assert winners.tolist() == [[int(good[:, choosing, 0].mean(1).argmax())]] * 9
    model, inputs = zoo.build("hf_vit")
    found = arbitrate(model, inputs, NAMES, mode="batch", target=1)
    assert torch.equal(found.selection, found.heldout)
    sample = int(found.reported.nonzero())
    assert math.isclose(found.score, float(found.heldout[int(found.winners[0, 0]), sample, 0]))
    rows = found.table()
    assert rows[0]["selection"] == float(found.selection[0, 1 - sample])
    assert rows[0]["heldout"] == float(found.heldout[0, sample])
    with pytest.raises(InputError, match="needs 2"):
        arbitrate(model, inputs[:1], NAMES, mode="batch")


def test_of_equals_the_first_wins() -> None:
    model, inputs = bag([1, 2, 3])
    same = [given([3, 2, 1], f"e{m}") for m in range(3)]
    assert arbitrate(model, inputs, same, target=value, fill_id=0).winners.tolist() == [[0]]


def test_chosen_explanations() -> None:
    model, inputs = zoo.build("hf_vit")
    found = arbitrate(model, inputs, NAMES, target=[1, 3])
    assert found.labels.tolist() == [[1], [3]]
    for b, explanation in enumerate(found.explanations):
        method, settings = entry(NAMES[int(found.winners[b, 0])])
        wanted = whyformer.explain(model, inputs, method, target=[1, 3], **settings)[b]
        assert len(explanation) == 1
        assert alike(explanation.scores, wanted.scores)
        assert explanation.target.tolist() == wanted.target.tolist()
    wanted_score = found.heldout.gather(0, found.winners[None]).mean()
    assert math.isclose(found.score, float(wanted_score))


def test_label_mode_answers_for_every_class() -> None:
    model, inputs = zoo.build("hf_vit")
    found = arbitrate(model, inputs, ["saliency", "input_x_gradient"], mode="label", target=[1, 3])
    logits = zoo.call(model, inputs)
    for b, target in enumerate([1, 3]):
        rest = [c for c in logits[b].argsort(descending=True).tolist() if c != target]
        assert found.labels[b].tolist() == [target, *rest]
        assert set(found.by_label[b]) == set(range(zoo.CLASSES))
        for k, label in enumerate(found.labels[b].tolist()):
            chosen = found.by_label[b][label]
            assert chosen.target.tolist() == [label]
            method = ["saliency", "input_x_gradient"][int(found.winners[b, k])]
            wanted = whyformer.explain(model, inputs, method, target=label)[b]
            assert alike(chosen.scores, wanted.scores)
        assert torch.equal(found.explanations[b].scores, found.by_label[b][target].scores)
    # the first column is what the target alone gives
    alone = arbitrate(model, inputs, ["saliency", "input_x_gradient"], target=[1, 3])
    assert torch.allclose(found.selection[..., :1], alone.selection, atol=1e-12)
    assert arbitrate(model, inputs, ["saliency"], mode="prime", labels=2).labels.shape == (2, 2)


def test_prime_over_all_classes_refuses_maps_that_are_the_same_for_each() -> None:
    """The changes of all probabilities of a softmax sum to 0, so rounding alone would choose."""
    model, inputs = zoo.build("hf_vit")
    agnostic = ["rollout", "raw_attention"]
    with pytest.raises(InputError, match=rf"mean over all {zoo.CLASSES} classes.*\(rollout, raw_attention\): pass labels="):
        arbitrate(model, inputs, agnostic, mode="prime", target=1)
    with pytest.raises(InputError, match=r"\(rollout\)"):
        arbitrate(model, inputs, ["saliency", "rollout"], mode="prime", target=1, labels=zoo.CLASSES)
    # what is left: fewer classes, maps of a class each, or classes that do not exclude one another
    found = arbitrate(model, inputs, agnostic, "comprehensiveness", mode="prime", target=1, labels=zoo.CLASSES - 1)
    assert found.selection.mean(-1).abs().min() > 1e-6
    arbitrate(model, inputs, ["saliency", "input_x_gradient"], mode="prime", target=1)
    model.config.problem_type = "multi_label_classification"
    found = arbitrate(model, inputs, agnostic, mode="prime", target=1)
    assert found.labels.shape == (2, zoo.CLASSES)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_criterion_is_the_metric(criterion: str) -> None:
    """Everything in one part: what ``evaluate`` says, in ten steps."""
    model, inputs = zoo.build("bert")
    e = whyformer.explain(model, inputs, "input_x_gradient", 1)
    found = arbitrate(model, inputs, [e], criterion, holdout=0, target=1, fill_id=FILL)
    steps = {"steps": 10} if criterion in ("deletion", "insertion") else {}
    wanted = whyformer.evaluate(model, inputs, e, criterion, baseline=FILL, **steps)
    assert found.heldout[0, :, 0].numpy() == pytest.approx(wanted.values, abs=1e-9)
    assert found.higher_is_better == (wanted.better == "higher")


def test_mean_baseline() -> None:
    model, inputs = zoo.build("bert")
    found = arbitrate(model, inputs, NAMES, mode="mean_baseline", fill_id=FILL, target=1)
    wanted = whyformer.explain(model, inputs, "raw_attention", aggregation={"layers": "mean"}, target=1)
    assert all(alike(e.scores, wanted[b].scores) for b, e in enumerate(found.explanations))
    assert found.winners.eq(len(NAMES)).all()
    assert len(found.candidates) == len(NAMES) + 1


# -- candidates ----------------------------------------------------------------------------------------------------
def test_pixels_and_other_grids_are_averaged_over_cells() -> None:
    model, x = zoo.build("hf_vit")
    pixel = whyformer.explain(model, x, "saliency", target=1)
    assert pixel.level == "pixel"
    cells = pixel.scores.reshape(2, 4, 8, 4, 8).mean((2, 4)).reshape(2, 16)
    patch = Explanation(cells, "patch", "by hand", {}, pixel.target, pixel.logits, features=Features(grid=(4, 4), image_size=(32, 32)))
    found = arbitrate(model, x, [pixel, patch], target=1)
    assert torch.allclose(found.selection[0], found.selection[1], atol=1e-12)
    assert found.candidates == ["given saliency", "given by hand"]
    coarse = Explanation(
        cells[:, :4], "patch", "by hand", {}, pixel.target, pixel.logits, features=Features(grid=(2, 2), image_size=(32, 32))
    )
    assert torch.isfinite(arbitrate(model, x, [coarse], target=1).heldout).all()
    # cells of another size than the model's patches, cut off at the border
    assert arbitrate(model, x, [pixel, patch], target=1, patch=12).cost["perturbed"] == 2 * 9


def test_on_swin_and_through_a_tokenizer() -> None:
    model, x = zoo.build("hf_swin")
    found = arbitrate(model, x, ["saliency", "gradcam"], patch=8)
    assert found.cost["perturbed"] == 2 * 16
    text = ["a gripping and moving film", "the plot is thin and nothing in it works"]
    found = arbitrate("bundled:sst2", text, ["raw_attention", "saliency"])
    assert found.settings["baseline"] == "unk"
    tokens = [t for row in found.explanations for t in (row.tokens or [[]])[0] if t not in ("[CLS]", "[SEP]", "[PAD]")]
    assert found.cost["perturbed"] == len(tokens)


def test_prints_a_table() -> None:
    model, inputs = zoo.build("hf_vit")
    found = arbitrate(model, inputs, NAMES)
    assert found.candidates == ["raw_attention", "rollout", "raw_attention(block=0)", "saliency", "input_x_gradient"]
    text = str(found)
    assert text.startswith("rft (higher is better), mode instance: ")
    assert all(name in text for name in found.candidates)
    assert "32 perturbed forwards; 160 without sharing" in text
    assert sum(row["chosen"] for row in found.table()) == 2
    assert arbitrate(model, inputs, ["rollout", "rollout"]).candidates == ["rollout", "rollout #2"]


# -- what is refused -----------------------------------------------------------------------------------------------
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
        ({"labels": 0}, "labels"),
        ({"baseline": "mask"}, "is not for a picture"),
        ({"target": value, "mode": "label"}, "must be a class, not a callable"),
        ({"target": 9}, "class 9 is out of range"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], match: str) -> None:
    model, inputs = zoo.build("hf_vit")
    with pytest.raises(InputError, match=match):
        arbitrate(model, inputs, **{"candidates": ["rollout"], **settings})


def test_finished_explanations_of_something_else() -> None:
    model, x = zoo.build("hf_vit")
    other = whyformer.explain(model, x, "saliency", target=2)
    with pytest.raises(InputError, match=r"is for the classes \[2, 2\], and the targets are \[1, 1\]"):
        arbitrate(model, x, [other], target=1)
    with pytest.raises(InputError, match="has 2 samples, and there are 1 inputs"):
        arbitrate(model, x[:1], [other], target=2)
    # one that is the same for every class fits any target
    assert arbitrate(model, x, [whyformer.explain(model, x, "rollout", target=2)], target=1).winners.eq(0).all()
    text = given([[1.0, 2.0]] * 2)
    with pytest.raises(InputError, match=r"token scores \[2, 2\], and each input has 16 features"):
        arbitrate(model, x, [text], target=value)


def test_outputs_that_are_not_finite() -> None:
    class Fragile(Bag):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) / (input_ids != 0).all(1, keepdim=True)

    model = Fragile([1.0, 2.0]).eval()
    with pytest.raises(ModelError, match="choose another baseline"):
        arbitrate(model, {"input_ids": torch.tensor([[1, 2]])}, [given([1, 2])], target=value, fill_id=0)


def test_result_type() -> None:
    model, inputs = bag([1, 2])
    found = arbitrate(model, inputs, [given([1, 2])], target=value, fill_id=0)
    assert isinstance(found, Arbitration)
    assert found.labels.tolist() == [[-1]]
    assert found.by_label[0][-1] is found.explanations[0]
