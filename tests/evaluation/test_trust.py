"""``trust``: the deletion curve compared with random maps, warnings, and a verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import whyformer
import zoo
from whyformer.errors import InputError
from whyformer.evaluation import evaluate
from whyformer.explanation.result import Explanation
from whyformer.explanation.warnings import incomplete
from whyformer.models.loading import load

TEXTS = ["a gripping and moving film", "the plot is thin and nothing in it works"]


class Bag(nn.Module):
    """logits (0, Σ_t w[id_t]), so that the best order is known; the padding token 0 weighs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0, 4, 3, 2, 1, -1, -2, -3, -4, 0.5], dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        total = (self.weights[input_ids] * attention_mask).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


IDS = torch.tensor([[1, 2, 3, 4, 9, 5, 6], [2, 9, 3, 1, 0, 0, 0]])
BAG = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def choice_model() -> nn.Module:
    config = hf.BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24)
    return hf.BertForMultipleChoice(config).double()


def explanation_of(scores: Any, target: int = 1, **more: Any) -> Explanation:
    scores = torch.as_tensor(scores, dtype=torch.float64)
    return Explanation(scores, "token", "by hand", {}, torch.full((len(scores),), target), torch.zeros(len(scores), 2), **more)


def weights(model: Bag) -> Tensor:
    return (model.weights.detach()[IDS]) * (IDS > 0)


@pytest.fixture(scope="module")
def digits() -> Any:
    return load("bundled:digits")


@pytest.fixture(scope="module")
def scene() -> Image.Image:
    return Image.open(Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png").convert("RGB")


# -- the curve -----------------------------------------------------------------------------------------------------
def processor() -> Any:
    """A stub of a tokenizer, of which only the replacement token is read."""
    from types import SimpleNamespace

    return SimpleNamespace(convert_ids_to_tokens=lambda ids: [str(i) for i in ids], pad_token_id=0, cls_token_id=None)


def test_true_weights_are_better_than_chance_and_reversed_ones_are_not() -> None:
    model = Bag().eval()
    good = whyformer.trust(explanation_of(weights(model)), model, BAG, processor(), steps=5)
    assert good.baseline == "pad"
    assert good.curves.shape == (2, 6)
    assert good.random.shape == (3, 2, 6)
    # by hand: of the 4 tokens of the second text ⌊4k/5⌋ are removed, 4 3 2 first
    totals = np.array([9.5, 9.5, 5.5, 2.5, 0.5, 0.0])
    assert good.curves[1] == pytest.approx(1 / (1 + np.exp(-totals)))
    assert good.areas[1] == pytest.approx((good.curves[1].sum() - (good.curves[1, 0] + good.curves[1, -1]) / 2) / 5)
    bad = whyformer.trust(explanation_of(-weights(model)), model, BAG, processor(), steps=5, known=[good])
    assert np.array_equal(bad.random, good.random)
    for b in range(2):
        assert good.better(b) is True
        assert good.verdict(b).startswith("Better than each random map (area ")
        assert bad.better(b) is False
        assert "do not trust this map here" in bad.verdict(b)
    for other in (good, ["good"], [None]):  # a single result in no list, and no results
        with pytest.raises(InputError, match="known"):
            whyformer.trust(explanation_of(weights(model)), model, BAG, processor(), known=other)  # type: ignore[arg-type]
    # four maps of two texts with 6 points each, and two clean passes
    assert good.forwards == 2 * 4 * 6 + 2
    assert bad.forwards == 2 * 6 + 2


@pytest.mark.parametrize("token", [0, 3])
def test_token_id_is_the_baseline(token: int) -> None:
    model, inputs = zoo.ZOO["bert"]()
    inputs = zoo.rows(inputs, 0, crop=True)
    result = whyformer.trust(whyformer.explain(model, inputs, "gae"), model, inputs, baseline=token, steps=1, seeds=[0])
    changed = {**inputs, "input_ids": torch.full_like(inputs["input_ids"], token)}
    with torch.no_grad():
        clean, without = (zoo.call(model, given)[0].softmax(-1) for given in (inputs, changed))
    assert result.curves[0][-1] == pytest.approx(float(without[clean.argmax()]), abs=1e-6)


def test_token_of_the_config_is_the_baseline_without_a_tokenizer() -> None:
    model, inputs = zoo.build("bert")
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        e = whyformer.explain(model, given, "input_x_gradient")
        result, same = (whyformer.trust(e, model, given, baseline=b, steps=3, seeds=[0]) for b in (None, model.config.pad_token_id))
        assert result.baseline == "pad" and np.array_equal(result.curves, same.curves)


def test_area_between_chance_and_best_is_weak_evidence() -> None:
    model = Bag().eval()
    result = whyformer.trust(explanation_of(weights(model)), model, BAG, processor())
    some = replace(result, areas=result.chance.min(0) * 0.5 + result.chance.mean(0) * 0.5)
    assert some.better() is None
    assert "weak evidence" in some.verdict()


def test_areas_equal_the_deletion_metric() -> None:
    model = Bag().eval()
    e = explanation_of(torch.randn(2, 7) * (IDS > 0))
    result = whyformer.trust(e, model, BAG, processor())
    expected = evaluate(model, BAG, e, "deletion", processor(), steps=10, baseline="pad")
    assert result.areas == pytest.approx(expected.values)
    assert expected.curves is not None
    assert result.curves == pytest.approx(expected.curves)


def test_batch_equals_single_samples() -> None:
    model, inputs = zoo.build("bert")
    e = whyformer.explain(model, inputs, "input_x_gradient")
    both = whyformer.trust(e, model, inputs, processor())
    for b, length in enumerate(zoo.LENGTHS):
        alone = whyformer.explain(model, zoo.rows(inputs, b, crop=True), "input_x_gradient")
        single = whyformer.trust(alone, model, zoo.rows(inputs, b, crop=True), processor(), batch_size=3)
        assert alone.scores.shape[1] == length
        assert both.curves[b] == pytest.approx(single.curves[0], abs=1e-9)
        assert both.random[:, b] == pytest.approx(single.random[:, 0], abs=1e-9)
        assert both.verdict(b) == single.verdict()


def test_inputs_are_restored_from_the_explanation(digits: Any, scene: Image.Image) -> None:
    e = whyformer.explain(digits.model, scene, processor=digits.processor, target="3")
    result = whyformer.trust(e, digits.model, processor=digits.processor)
    assert result.followed == (3,)
    assert result.baseline == "zero"
    assert result.better() is True
    assert result.curves[0, 0] == pytest.approx(float(e.probabilities()[0, 3]), abs=1e-5)
    # random maps are drawn on the cells of the map
    same = whyformer.trust(e, digits.model, scene, digits.processor, seeds=[1])
    assert np.array_equal(same.random[0], result.random[1])
    texts = whyformer.explain("bundled:sst2", TEXTS, "raw_attention")
    text_result = whyformer.trust(texts, "bundled:sst2")
    assert text_result.baseline == "mask"
    assert len(text_result) == 2
    assert str(text_result).count("raw_attention, sample ") == 2


def test_scores_in_bfloat16_are_followed() -> None:
    e = whyformer.explain("bundled:sst2", TEXTS[0], "input_x_gradient", dtype="bfloat16")
    assert e.scores.dtype == torch.bfloat16
    ready = whyformer.Explainer("bundled:sst2", dtype="bfloat16")
    assert np.array_equal(whyformer.trust(e, ready).curves, whyformer.trust(replace(e, scores=e.scores.double()), ready).curves)


def test_scores_of_another_input_are_refused() -> None:
    ids = torch.randint(5, 50, (1, 3, 6), generator=torch.Generator().manual_seed(0))
    model, choices = zoo.randomise(choice_model()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    e = whyformer.explain(model, choices, "input_x_gradient", "Contrast(0, 1)")
    followed = whyformer.trust(e, model, choices).curves
    assert np.array_equal(whyformer.trust(e.part("input_ids"), model, choices).curves, followed)
    with pytest.raises(InputError, match="pass the whole explanation"):
        whyformer.trust(e.part("input_ids[1]"), model, choices)
    with pytest.raises(InputError, match="pass inputs="):
        whyformer.trust(e.with_features(texts=["one of its inputs"]), model)


def test_trust_figures_are_saved_with_the_explanation(tmp_path: Any) -> None:
    model = Bag().eval()
    result = whyformer.trust(explanation_of(weights(model)), model, BAG, processor(), steps=5)
    noted = result.noted_in(explanation_of(weights(model)))
    loaded = whyformer.Explanation.load(noted.save(tmp_path / "e.safetensors"))
    for e in (noted, loaded, whyformer.Explanation.from_dict(json.loads(json.dumps(noted.to_dict())))):
        (second,) = e[1].diagnostics["trust"]
        assert second == result.figures(1)
        assert second["curve"] == pytest.approx(result.curves[1])
        assert second["highest"] == pytest.approx(result.random[:, 1].max(0))
        assert second["verdict"] in str(e[1])
        assert result.verdict(0) not in str(e[1])


# -- warnings ------------------------------------------------------------------------------------------------------
def test_warnings_of_diagnostics() -> None:
    model = Bag().eval()
    facts = {
        "conservation": {"error": [0.2, 0.001], "promised": True},
        "completeness": {"difference": [1.0, 1.0], "error": [0.01, 30.0]},
        "class_specific": False,
    }
    result = whyformer.trust(explanation_of(weights(model), diagnostics=facts), model, BAG, processor())
    first, second = result.warnings
    assert len(first) == len(second) == 2
    assert "relevance is not conserved" in first[0]
    assert "20%" in first[0]
    assert "add up to f(x) − f(baseline) only within" in second[0]
    assert "the same for every class" in first[1]
    assert all(line in str(result) for line in first)
    assert whyformer.trust(explanation_of(weights(model)), model, BAG, processor()).warnings == ((), ())


@pytest.mark.parametrize(
    ("difference", "error", "warned"),
    [
        (0.3, 0.4, True),  # the sum may have the wrong sign, although the error is only 4 % of Σ|score|
        (0.3, 0.14, False),
        (0.01, 0.09, False),  # both are below 1 % of Σ|score|
        (8.0, 0.6, True),
    ],
)
def test_error_of_completeness_is_compared_with_the_difference(difference: float, error: float, warned: bool) -> None:
    facts = {"completeness": {"difference": [difference], "error": [error]}}
    assert bool(incomplete(facts, 0, size=10.0)) == warned


def test_constant_map_is_not_measurable() -> None:
    model = Bag().eval()
    scores = weights(model)
    scores[0] = 0
    result = whyformer.trust(explanation_of(scores), model, BAG, processor())
    assert result.better(0) is None
    assert result.verdict(0).startswith("Not measurable here: all scores are equal")
    assert "all scores are 0" in result.warnings[0][0]
    assert result.better(1) is True
    assert np.isfinite(result.random).all()


def test_improbable_class_is_not_measurable() -> None:
    """From a probability of 1 % every curve decreases alike, so the area does not depend on the map."""
    model = Bag().eval()
    ids = torch.tensor([[1, 8, 7, 6, 9]])  # 4 − 4 − 3 − 2 + 0.5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for sign in (1, -1):
        result = whyformer.trust(explanation_of(sign * model.weights.detach()[ids]), model, inputs, processor())
        assert result.curves[0, 0] == pytest.approx(1 / (1 + np.exp(4.5)))
        assert not result.measurable()
        assert result.better() is None
        assert result.verdict().startswith("Not measurable here: the probability of the class is 1.1%")
        assert result.figures()["curve"] == pytest.approx(result.curves[0])
    likely = whyformer.trust(explanation_of(-model.weights.detach()[ids], target=0), model, inputs, processor())
    assert likely.measurable()
    assert likely.better() is not None


def test_few_tokens_have_a_warning() -> None:
    model = Bag().eval()
    inputs = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    result = whyformer.trust(explanation_of([[1.0, 2.0]]), model, inputs, processor())
    assert "one or two tokens" in result.warnings[0][0]


# -- invalid arguments ---------------------------------------------------------------------------------------------
def test_invalid_arguments_raise() -> None:
    model = Bag().eval()
    e = explanation_of(weights(model))
    with pytest.raises(InputError, match="pass inputs="):
        whyformer.trust(e, model)
    with pytest.raises(InputError, match="has 2 samples, and there are 1 inputs"):
        whyformer.trust(e, model, {k: v[:1] for k, v in BAG.items()})
    for steps in (0, -1, True, 2.5):
        with pytest.raises(InputError, match="steps must be"):
            whyformer.trust(e, model, BAG, steps=steps)
        with pytest.raises(InputError, match="batch_size must be"):
            whyformer.trust(e, model, BAG, batch_size=steps)
        with pytest.raises(InputError, match="batch_size must be"):
            whyformer.evaluate(model, BAG, e, batch_size=steps)
    for seeds in ((), (True,), (2**70,)):
        with pytest.raises(InputError, match=r"seeds(: each of them)? must be"):
            whyformer.trust(e, model, BAG, seeds=seeds)
    with pytest.raises(InputError, match="there is no tokenizer: choose another baseline"):
        whyformer.trust(e, model, BAG, baseline="mask")
