"""Every registered metric on a model with known values: p = (64 + Σ weights of the present features)/256.

Seven features weigh 4, 64, 1, 16, 8, 2, 32, all different powers of two, so that a wrong set of them changes the value. The
scores are 3, −1, 2, ½, 0, −2, 1, which is not the order of the weights. The expected values below are derived by hand.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from whyformer.errors import InputError
from whyformer.evaluation import METRICS, evaluate

WEIGHTS = [4, 64, 1, 16, 8, 2, 32]
SCORES = [3, -1, 2, 0.5, 0, -2, 1]
# probability · 256 without the first k features, and with only these, highest scores (features 0 2 6 3 4 1 5) first
WITHOUT = [191, 187, 186, 154, 138, 130, 66, 64]
ALONE = [64, 68, 69, 101, 117, 125, 189, 191]
# as the smallest |scores| are removed (features 4 3 1 6 2 5 0; ties by index), at ⌈f · 7⌉ = 0 1 2 3 3 4 5 5 6 7 7
PRUNED = [191, 183, 167, 103, 103, 71, 70, 70, 68, 64, 64]


def area(values: list[Any], width: Any) -> Any:
    return width * (sum(values) - Fraction(values[0] + values[-1], 2))


def au_mse() -> float:
    squares = [math.log(p / 191) ** 2 + math.log((256 - p) / 65) ** 2 for p in PRUNED]
    return 0.1 * (sum(squares) - squares[-1] / 2)


EXPECTED: dict[str, tuple[dict[str, Any], Any]] = {
    # ⌊f · 7⌋ = 0 1 2 2 3 4 4 5 6 are removed: correct while p > ½, so wrong at the last step only
    "positive": ({}, 85),
    # the lowest first: 191 189 125 ... 0.1 (1 + 1 + 1 − ½)
    "negative": ({}, 25),
    "deletion": ({"steps": 7}, area(WITHOUT, Fraction(1, 7)) / 256),
    "insertion": ({"steps": 7}, area(ALONE, Fraction(1, 7)) / 256),
    "aopc": ({}, Fraction(sum(191 - WITHOUT[k] for k in (0, 1, 2, 2, 3, 4, 4, 5, 6)), 9 * 256)),
    "log_odds": ({}, sum(math.log(WITHOUT[k] / 191) for k in (0, 1, 2, 2, 3, 4, 4, 5, 6)) / 9),
    # 1, 5, 10, 20, 50 % of 7 are 0.07, 0.35, 0.7, 1.4, 3.5: rounded, and at least one
    "comprehensiveness": ({}, Fraction(sum(191 - WITHOUT[k] for k in (1, 1, 1, 1, 4)), 5 * 256)),
    "sufficiency": ({}, Fraction(sum(191 - ALONE[k] for k in (1, 1, 1, 1, 4)), 5 * 256)),
    "auac": ({}, area([ALONE[k] for k in (0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7)], Fraction(1, 10)) / 256),
    "au_mse": ({}, au_mse()),
    # every subset is the whole, so Σ scores = 3½ is compared with ln(191/64)
    "infidelity": ({"share": 1.0, "scale": False}, (3.5 / math.log(191 / 64) - 1) ** 2),
    "conservation": ({}, abs(3.5 / math.log(191 / 256) - 1)),
    # |scores| 3 1 2 ½ 0 2 1 have the worst ranks 1 5 3 6 7 3 5
    "rft": ({}, (Fraction(4) - Fraction(64, 5) + Fraction(1, 3) + Fraction(16, 6) - Fraction(8, 7) - Fraction(2, 3) + Fraction(32, 5)) / 256),
    # of the highest three, 0 2 6, two are in the rationale 0 2 5
    "token_f1": ({"rationale": [1, 0, 1, 0, 0, 1, 0], "k": 3}, Fraction(2, 3)),
    # precision 1 up to recall 2/3, then down to 2/6, and 3/7 at recall 1
    "auprc": ({"rationale": [1, 0, 1, 0, 0, 1, 0]}, Fraction(2, 3) + Fraction(1, 3) * (Fraction(2, 6) + Fraction(3, 7)) / 2),
}

# a map of 2×3 pixels and an object of two pixels: above the mean, 16/6, are 7 5 4; scaled it is 1 1/8 0 · 6/8 2/8 5/8
MAP = [[7, 0, -1], [5, 1, 4]]
OBJECT = [[1, 0, 0], [0, 1, 0]]
AGREEMENT = {
    "pixel_accuracy": 50,  # 1 of the object, 2 of the background
    "miou": 100 * (Fraction(1, 4) + Fraction(2, 5)) / 2,
    # (1 − s, s) by falling thresholds 1, 7/8, 6/8, 5/8, 3/8, 2/8: 2 of 2, 3 of 3, 3 of 5, 3 of 6, 4 of 7, 6 of 9 are correct
    "map": 100 * (Fraction(3, 6) + Fraction(1, 6) * Fraction(4, 7) + Fraction(2, 6) * Fraction(6, 9)),
    "pointing_game": 1,
    "energy": Fraction(7 + 1, 7 + 5 + 1 + 4),
}


class AdditiveModel(nn.Module):
    """p of class 1 by the weights of the present features; token 0 weighs nothing, and pixels multiply their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0, *WEIGHTS], dtype=torch.float64))

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, pixels: Tensor | None = None) -> Tensor:
        if input_ids is None:
            assert pixels is not None
            total = pixels.flatten(1) @ self.weights[1:]
        else:
            total = (self.weights[input_ids] * (1 if attention_mask is None else attention_mask)).sum(1)
        p = (64 + total) / 256
        return torch.stack([torch.log(1 - p), torch.log(p)], 1)


def tokenizer() -> Any:
    """Token 0 is the mask and the unknown token."""
    return SimpleNamespace(
        convert_ids_to_tokens=lambda ids: [str(i) for i in ids], mask_token_id=0, unk_token_id=0, pad_token_id=None, cls_token_id=None,
        vocab_size=8,
    )


def test_every_metric_has_an_expected_value() -> None:
    assert set(METRICS) == {*EXPECTED, *AGREEMENT}


@pytest.mark.parametrize("name", EXPECTED)
def test_metric_on_text(name: str) -> None:
    """The second sample is shorter and must not affect the first."""
    settings, expected = EXPECTED[name]
    if "rationale" in settings:
        settings = {**settings, "rationale": [settings["rationale"], [0, 1, 0, 0, 0, 0, 0]]}
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [2, 7, 4, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    scores = np.array([SCORES, [1, 3, 2, 9, 9, 9, 9]])
    result = evaluate(AdditiveModel().eval(), {"input_ids": ids, "attention_mask": mask}, scores, name, tokenizer(), target=1, **settings)
    assert result.values[0] == pytest.approx(float(expected), rel=1e-12)
    assert result.value == pytest.approx(result.values.mean())


@pytest.mark.parametrize("name", [n for n in EXPECTED if METRICS[n].modality == "both"])
def test_metric_on_image(name: str) -> None:
    settings, expected = EXPECTED[name]
    settings = {**settings, **({"baseline": "zero"} if METRICS[name].baselines else {})}
    pixels = torch.ones(1, 1, 1, 7, dtype=torch.float64)
    result = evaluate(AdditiveModel().eval(), {"pixels": pixels}, np.array(SCORES).reshape(1, 1, 7), name, target=1, **settings)
    assert result.values[0] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", AGREEMENT)
def test_localization_metric_by_hand(name: str) -> None:
    class FirstPixels(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            return pixels.flatten(1)[:, :2]

    pixels = torch.ones(1, 1, 2, 3)
    result = evaluate(FirstPixels().eval(), {"pixels": pixels}, np.array(MAP, dtype=float)[None], name, mask=np.array(OBJECT))
    assert result.value == pytest.approx(float(AGREEMENT[name]), rel=1e-12)


def test_curves_by_hand() -> None:
    """The probability after each step."""
    inputs = {"input_ids": torch.arange(1, 8)[None], "attention_mask": torch.ones(1, 7, dtype=torch.long)}

    def curve(name: str, **settings: Any) -> list[float]:
        result = evaluate(AdditiveModel().eval(), inputs, np.array([SCORES]), name, tokenizer(), target=1, **settings)
        assert result.curves is not None
        return [float(v) * 256 for v in result.curves[0]]

    assert curve("deletion", steps=7) == pytest.approx(WITHOUT)
    assert curve("insertion", steps=7) == pytest.approx(ALONE)
    assert curve("sufficiency") == pytest.approx([191 - ALONE[k] for k in (1, 1, 1, 1, 4)])
    # 28 steps of 7 features: every count four times, and the last one once
    assert curve("deletion")[::4] == pytest.approx(WITHOUT)


TARGETS = ["Logit(1)", "Contrast(1, 0)", "Probability(1)", "LogProbability(1)"]


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_compared_with_the_explained_target(target: str) -> None:
    """The second sample is shorter."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [2, 7, 4, 0, 0, 0, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    e = whyformer.explain(AdditiveModel().eval(), inputs, "occlusion", target, tokenizer(), baseline=0)
    log_p = e.logits.double().log_softmax(-1)
    values = {"Logit(1)": e.logits[:, 1], "Contrast(1, 0)": e.logits[:, 1] - e.logits[:, 0], "Probability(1)": log_p[:, 1].exp()}
    value = values.get(target, log_p[:, 1]).double()
    single_tokens = {"share": 0.1, "scale": False, "baseline": 0}
    result = evaluate(AdditiveModel().eval(), inputs, e, "infidelity", tokenizer(), **single_tokens)
    assert result.values == pytest.approx([0, 0], abs=1e-12)
    result = evaluate(AdditiveModel().eval(), inputs, e, "conservation", tokenizer())
    assert result.values == pytest.approx(((e.scores.double().sum(1) - value) / value).abs().numpy())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["lrp", "transformer_attribution"])
def test_conservation_of_relevance_that_starts_from_derivatives(method: str, target: str) -> None:
    model, inputs = zoo.build("bert")
    settings = {"rule": "shared"} if method == "lrp" else {}
    e = whyformer.explain(model, inputs, method, target, **settings)
    assert (evaluate(model, inputs, e, "conservation").values <= np.array(e.diagnostics["conservation"]["error"]) + 1e-9).all()


# -- deletion ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["auac", "deletion", "insertion"])
def test_deleting_every_token_raises_with_remedy(name: str) -> None:
    inputs = {"input_ids": torch.arange(1, 8)[None], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    for tensors in (inputs, {"input_ids": inputs["input_ids"]}):
        with pytest.raises(InputError, match=r"delete every token of sample 0.*replace them by a token"):
            evaluate(AdditiveModel().eval(), tensors, np.array([SCORES]), name, tokenizer(), baseline="delete")
    # one remaining token is enough
    special = SimpleNamespace(**{**vars(tokenizer()), "cls_token_id": 1})
    result = evaluate(AdditiveModel().eval(), inputs, np.array([SCORES]), name, special, baseline="delete", target=1)
    assert np.isfinite(result.values).all()


@pytest.mark.parametrize("model_name", zoo.LANGUAGE)
def test_deleting_every_token_of_language_model_raises(model_name: str) -> None:
    model, inputs = zoo.build(model_name)
    with pytest.raises(InputError, match="replace them by a token"):
        evaluate(model, inputs, torch.randn(2, 10), "auac", baseline="delete")


def test_token_id_as_baseline() -> None:
    inputs = {"input_ids": torch.arange(1, 8)[None], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    result = evaluate(AdditiveModel().eval(), inputs, np.array([SCORES]), "deletion", target=1, steps=7, baseline=0)
    assert result.value == pytest.approx(float(EXPECTED["deletion"][1]))
    assert result.settings["baseline"] == 0
    with pytest.raises(InputError, match="there is no tokenizer: choose another baseline, or pass the token's id"):
        evaluate(AdditiveModel().eval(), inputs, np.array([SCORES]), "deletion")


def test_metric_on_vectors() -> None:
    class FirstComponent(AdditiveModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(pixels=x[:, :, 0])

    result = evaluate(FirstComponent().eval(), torch.ones(1, 7, 3, dtype=torch.float64), np.array([SCORES]), "deletion", target=1, steps=7)
    assert result.value == pytest.approx(float(EXPECTED["deletion"][1]))
    assert result.settings["baseline"] == "zero"


def test_docs_list_every_metric_with_its_direction() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    listed: dict[str, str] = {}
    for names, _, better, *_ in (line.split("|")[1:] for line in page.splitlines() if line.startswith("| `")):
        directions, metrics = better.replace(" ", "").split(","), re.findall(r"`(\w+)`", names)
        if set(directions) <= {"lower", "higher"}:
            listed |= dict(zip(metrics, directions if len(directions) > 1 else directions * len(metrics), strict=True))
    assert listed == {name: metric.better for name, metric in METRICS.items()}
