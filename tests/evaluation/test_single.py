"""``evaluate`` on an explanation or any array, compared with reference loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

import whyformer
import zoo
from whyformer.baselines import BASELINES, Baseline, Filling
from whyformer.errors import InputError, ModelError
from whyformer.evaluation import METRICS, evaluate, list_metrics, registry
from whyformer.inputs.removal import fill
from zoo_evaluate import processor, tiny_bert, tiny_vit

MODEL_METRICS = ("positive", "negative", "deletion", "insertion", "aopc", "log_odds", "comprehensiveness", "sufficiency",
                  "auac", "au_mse", "infidelity", "conservation")  # fmt: skip


def picture(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def vit():
    return tiny_vit()


@pytest.fixture(scope="module")
def bert():
    return tiny_bert()


def reference_curve(
    model, x: torch.Tensor, scores: np.ndarray, target: int, steps: list[float], fill: torch.Tensor
) -> list[float]:
    """Remove pixels one by one in a Python loop, the highest score first."""
    order = sorted(range(scores.size), key=lambda i: (-scores.ravel()[i], i))
    curve = []
    for f in steps:
        y = x.clone()
        for i in order[: int(round(f * scores.size, 6))]:
            y[:, i // 32, i % 32] = fill[:, i // 32, i % 32]
        with torch.no_grad():
            curve.append(float(torch.softmax(model(y[None]).logits.double(), -1)[0, target]))
    return curve


def test_deletion_equals_a_reference_loop_for_any_array(vit) -> None:
    x = picture(1)
    e = whyformer.explain(vit, x, "transformer_attribution", 2, processor())
    result = evaluate(vit, x, e, "deletion", processor(), steps=4)
    expected = reference_curve(vit, x[0], e.heatmap()[0].numpy(), 2, [0, 0.25, 0.5, 0.75, 1], torch.zeros_like(x[0]))
    assert result.curves is not None
    assert result.curves[0] == pytest.approx(expected, abs=1e-6)
    n = len(expected) - 1
    assert result.value == pytest.approx((sum(expected) - expected[0] / 2 - expected[-1] / 2) / n, abs=1e-6)
    for scores in (e.heatmap(), e.heatmap().numpy(), e.heatmap()[0], e.scores):
        assert evaluate(vit, x, scores, "deletion", processor(), target=2, steps=4).value == pytest.approx(result.value)


def test_black_baseline_is_zero_before_normalisation(vit) -> None:
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    x = picture(1)
    black = fill("black", Filling(x, black=-mean / std))
    assert torch.allclose(black * std[:, None, None] + mean[:, None, None], torch.zeros_like(x), atol=1e-6)
    result = evaluate(vit, x, np.arange(1024.0).reshape(1, 32, 32), "aopc", processor())
    target = int(vit(x).logits.argmax())
    expected = reference_curve(vit, x[0], np.arange(1024.0).reshape(32, 32), target, [i / 10 for i in range(1, 10)], black[0])
    assert result.curves is not None
    assert result.curves[0] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match="black"):
        evaluate(vit, x, np.arange(1024.0).reshape(1, 32, 32), "aopc")


def test_blur_preserves_constants_and_equals_a_reference_convolution() -> None:
    x = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    assert torch.allclose(fill("blur", Filling(torch.full_like(x, 3.0))), torch.full_like(x, 3.0))
    offsets = torch.arange(11) - 5.0
    kernel = torch.exp(-(offsets**2) / 50)
    kernel = kernel / kernel.sum()
    padded = torch.nn.functional.pad(x, [5] * 4, mode="reflect")
    at = sum(kernel[i] * kernel[j] * padded[0, 1, 7 + i, 4 + j] for i in range(11) for j in range(11))
    assert float(fill("blur", Filling(x))[0, 1, 7, 4]) == pytest.approx(float(at))


@pytest.mark.parametrize("name", MODEL_METRICS)
def test_batch_of_images_equals_single_images(vit, name: str) -> None:
    x = picture(2)
    e = whyformer.explain(vit, x, "input_x_gradient", None, processor())
    both = evaluate(vit, x, e, name, processor())
    single = [evaluate(vit, x[i : i + 1], e[i], name, processor()).values[0] for i in range(2)]
    assert both.values == pytest.approx(single, abs=1e-5)
    assert both.better in ("higher", "lower")


@pytest.mark.parametrize("name", [*MODEL_METRICS, "rft"])
def test_padding_has_no_effect_on_a_metric(bert, name: str) -> None:
    model, tokenizer = bert
    texts = ["a good film is great .", "bad plot"]
    e = whyformer.explain(model, texts, "input_x_gradient", 1, tokenizer)
    both = evaluate(model, texts, e, name, tokenizer)
    alone = whyformer.explain(model, texts[1], "input_x_gradient", 1, tokenizer)
    assert both.values[1] == pytest.approx(evaluate(model, texts[1], alone, name, tokenizer).values[0], abs=1e-5)


@pytest.mark.parametrize("model_name", zoo.LANGUAGE)
@pytest.mark.parametrize("name", ["comprehensiveness", "sufficiency", "conservation"])
def test_padding_has_no_effect_on_a_metric_of_language_model(model_name: str, name: str) -> None:
    model, inputs = zoo.build(model_name)
    scores = torch.randn(inputs["input_ids"].shape)
    both = evaluate(model, inputs, scores, name)
    for b, length in enumerate(zoo.LENGTHS):
        alone = evaluate(model, zoo.rows(inputs, b, crop=True), scores[b : b + 1, :length], name)
        assert both.values[b] == pytest.approx(alone.values[0], abs=1e-9)


def test_deletion_shortens_the_text(bert) -> None:
    model, tokenizer = bert
    ids = tokenizer("good film is great", return_tensors="pt")["input_ids"]
    scores = np.array([[0.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    result = evaluate(model, {"input_ids": ids}, scores, "comprehensiveness", tokenizer, target=0)
    with torch.no_grad():
        p = torch.softmax(model(ids).logits.double(), -1)[0, 0]
        without_one = torch.softmax(model(ids[:, [0, 2, 3, 4, 5]]).logits.double(), -1)[0, 0]
        without_two = torch.softmax(model(ids[:, [0, 3, 4, 5]]).logits.double(), -1)[0, 0]
    expected = [p - without_one] * 4 + [p - without_two]  # 1, 5, 10, 20 % of four words are one word, 50 % are two
    assert result.curves is not None
    assert result.curves[0] == pytest.approx([float(w) for w in expected], abs=1e-6)


def test_perfect_masks_and_rationales(vit, bert) -> None:
    x = picture(1)
    mask = np.zeros((1, 32, 32), dtype=bool)
    mask[:, 8:20, 8:20] = True
    for name in ("pixel_accuracy", "miou", "map"):
        assert evaluate(vit, x, mask.astype(float), name, processor(), mask=mask).value == pytest.approx(100)
    assert evaluate(vit, x, mask.astype(float), "pointing_game", processor(), mask=mask).value == 1
    assert evaluate(vit, x, mask.astype(float), "energy", processor(), mask=mask).value == 1
    model, tokenizer = bert
    ids = tokenizer("good film is great", return_tensors="pt")["input_ids"]
    truth = np.array([[0, 1, 0, 0, 1, 0]])
    assert (
        evaluate(model, {"input_ids": ids}, truth.astype(float), "token_f1", tokenizer, rationale=truth, k=2).value == 1
    )
    assert evaluate(model, {"input_ids": ids}, truth.astype(float), "auprc", tokenizer, rationale=truth).value == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "delation"}, "Did you mean 'deletion'"),
        ({"stepz": 3}, "Did you mean 'steps'"),
        ({"steps": 0}, "steps"),
        ({"explanation": np.ones((1, 32, 32))}, "constant"),
        ({"explanation": np.full((1, 32, 32), np.nan)}, "NaN"),
        ({"explanation": np.arange(147.0).reshape(3, 7, 7)}, "do not fit"),
        ({"metric": "miou"}, "mask="),
        ({"metric": "miou", "mask": np.zeros((1, 32, 32))}, "empty"),
        ({"metric": "miou", "mask": np.ones((1, 5, 5))}, "shape"),
        ({"metric": "rft"}, "for text"),
        ({"target": 99}, "class 99 is out of range"),
        ({"baseline": "snow"}, "baseline 'snow' is not for a picture; its baselines are zero, black, mean, blur"),
        ({"metric": "positive", "label": 99}, "class 99 is out of range"),
        ({"metric": "positive", "label": "cat"}, "no class 'cat'"),
        ({"metric": "positive", "label": [0, 1]}, "2 targets for 1 samples"),
        ({"explanation": np.arange(3072.0).reshape(1, 32, 32, 3)}, "do not fit pictures of 3 channels"),
        ({"explanation": np.arange(1024.0).reshape(1, 32, 32) * 1j}, "array of scores"),
        ({"metric": "miou", "mask": np.full((1, 32, 32), np.nan)}, "array of flags"),
        ({"metric": "miou", "mask": np.full((1, 32, 32), "0")}, "array of flags"),
        ({"metric": "infidelity", "subsets": 0}, "subsets must be an integer of at least 1"),
        ({"metric": "infidelity", "share": 2}, "share must be a number above 0 and up to 1"),
        ({"metric": "infidelity", "seed": -1}, "seed must be an integer"),
        ({"metric": "infidelity", "scale": "no"}, "scale must be True or False"),
    ],
)
def test_invalid_argument_raises(vit, change: dict, message: str) -> None:
    arguments = {"explanation": np.arange(1024.0).reshape(1, 32, 32), "metric": "deletion", **change}
    with pytest.raises(InputError, match=message):
        evaluate(vit, picture(1), arguments.pop("explanation"), arguments.pop("metric"), processor(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rationale": [0, 0, 0, 0]}, "a rationale is empty"),
        ({"rationale": [1, 0, 0, 1]}, "a rationale is empty"),
        ({"rationale": ["good", "film"]}, "array of flags"),
        ({"rationale": [[0, 1, 1, 0], [0, 1]]}, "array of flags"),
        ({"k": -1}, "k must be an integer of at least 1"),
        ({"metric": "deletion", "baseline": True}, "baseline True is not for text"),
        ({"metric": "deletion", "baseline": -1}, "token -1 is outside the model's vocabulary"),
    ],
)
def test_invalid_argument_for_text_raises(bert, change: dict, message: str) -> None:
    settings = {"metric": "token_f1", **change}
    settings |= {"rationale": settings.get("rationale", [0, 1, 0, 0])} if settings["metric"] == "token_f1" else {}
    with pytest.raises(InputError, match=message):
        evaluate(bert[0], "good film", np.arange(4.0), settings.pop("metric"), bert[1], **settings)


def test_label_is_a_class_by_name_or_index(vit) -> None:
    """The name of a class was compared with indices, so that every prediction counted as wrong."""
    model = copy.deepcopy(vit)
    model.config.id2label = {0: "cat", 1: "dog", 2: "owl", 3: "fox"}
    model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    x, scores = picture(2), np.arange(2048.0).reshape(2, 32, 32)
    best = int(model(x).logits[0].argmax())
    by_index = evaluate(model, x, scores, "positive", processor(), label=[best, 0])
    assert by_index.values[0] > 0
    named = evaluate(model, x, scores, "positive", processor(), label=[model.config.id2label[best], "cat"])
    assert named.values.tolist() == by_index.values.tolist()


class WithoutMask(torch.nn.Module):
    """A model whose logits padding would change, so that each text runs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding.from_pretrained(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.weights(input_ids).mean(1)


def test_settings_of_samples_that_run_alone(bert) -> None:
    model, texts, tokenizer = WithoutMask().eval(), ["a good film is great .", "bad plot"], bert[1]
    e = whyformer.explain(model, texts, "input_x_gradient", None, tokenizer)
    flags = [[0, 1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    for name, setting, one in (("positive", "label", lambda i: [2, 1][i]), ("auprc", "rationale", lambda i: flags[i][: (8, 4)[i]])):
        both = evaluate(model, texts, e, name, tokenizer, **{setting: [2, 1] if setting == "label" else flags})
        for i, text in enumerate(texts):
            alone = whyformer.explain(model, text, "input_x_gradient", None, tokenizer)
            assert both.values[i] == evaluate(model, text, alone, name, tokenizer, **{setting: one(i)}).value
    with pytest.raises(InputError, match="array of flags"):
        evaluate(model, texts, e, "auprc", tokenizer, rationale=[flags[0], [0, 1]])


class Undefined(torch.nn.Module):
    """A model whose logits are NaN for a picture with a black corner."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits = pixel_values.mean((2, 3))
        return torch.where((pixel_values[:, :, 0, 0] == 0).all(1, keepdim=True), torch.nan, logits)


@pytest.mark.parametrize("name", ["positive", "deletion"])
def test_nan_logits_without_some_features_raise(name: str) -> None:
    """The class of NaN logits counted as a prediction."""
    with pytest.raises(ModelError, match=r"NaN .*choose another"):
        evaluate(Undefined().eval(), picture(1), -np.arange(1024.0).reshape(1, 32, 32), name, baseline="zero")


def test_every_metric_has_a_summary_and_a_direction() -> None:
    assert [m.name for m in list_metrics()] == sorted(METRICS)
    assert all(m.summary and m.better in ("higher", "lower") for m in list_metrics())


class SumOfWeights(torch.nn.Module):
    """One logit for each text, or for each sample: the sum of the weights of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding.from_pretrained(torch.randn(30, 1, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        total = (self.weights(input_ids)[..., 0] * attention_mask).sum(-1)
        return total if total.dim() == 2 else total[:, None]


@pytest.mark.parametrize("target", ["Logit([1, 2])", "Contrast([2, 0], 1)"])
@pytest.mark.parametrize("followed", [None, 0])
def test_metric_of_multiple_choice_equals_a_reference_loop(target: str, followed: int | None) -> None:
    """Tokens of the explained text are replaced, whichever choice's probability is measured."""
    ids = torch.randint(3, 30, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 1:, 4:] = mask[1, 0, 3:] = 0
    model, inputs = SumOfWeights().eval(), {"input_ids": ids, "attention_mask": mask}
    e = whyformer.explain(model, inputs, "occlusion", target, baseline=2)
    result = whyformer.evaluate(model, inputs, e, "comprehensiveness", baseline=2, target=followed)
    explained = [1, 2] if target.startswith("Logit") else [2, 0]
    for i, text in enumerate(explained):
        measured, n, drops = text if followed is None else followed, int(mask[i, text].sum()), []
        for share in (0.01, 0.05, 0.1, 0.2, 0.5):
            changed = ids[i : i + 1].clone()
            changed[0, text, e.scores[i, :n].argsort(descending=True)[: max(1, round(share * n))]] = 2
            p, q = (model(x, mask[i : i + 1]).softmax(-1)[0, measured] for x in (ids[i : i + 1], changed))
            drops.append(float(p - q))
        assert result.values[i] == pytest.approx(np.mean(drops))
    assert whyformer.trust(e, model, inputs, baseline=2).curves.shape == (2, 11)


@pytest.mark.parametrize("metric", ["positive", "negative", "deletion"])
def test_order_of_classes_needs_two_classes(metric: str) -> None:
    model = SumOfWeights().eval()
    model.config = PretrainedConfig(problem_type="multi_label_classification", id2label={0: "spam"})
    ids = torch.tensor([[5, 8, 6, 11]])
    inputs, scores = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randn(1, 4)
    if metric == "deletion":
        assert 0 < whyformer.evaluate(model, inputs, scores, metric, baseline=2).value < 1
        return
    with pytest.raises(InputError, match="single class"):
        whyformer.evaluate(model, inputs, scores, metric, baseline=2)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (16, 64), (40, 16)])
def test_patches_of_any_grid_equal_their_map(size: tuple[int, int]) -> None:
    """Patches of 8 pixels; 2 rows of 8 are as many as 4 rows of 4."""
    rows, columns = size[0] // 8, size[1] // 8
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * size[0] * size[1], 3)).eval()
    pictures, scores = torch.randn(2, 3, *size), torch.randn(2, rows * columns)
    flat, as_map = (evaluate(model, pictures, s, "deletion").values for s in (scores, scores.view(2, rows, columns)))
    assert flat == pytest.approx(as_map)


@pytest.mark.parametrize("result", [None, 1.0, np.ones(3), np.ones((2, 2)), ["a", "b"], (np.ones(2), np.ones((3, 4)))])
def test_metric_that_returns_no_number_for_each_sample_raises(vit, monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    monkeypatch.setitem(METRICS, "own", METRICS["conservation"])
    registry.metric("own", "a metric", better="higher")(lambda case: result)
    with pytest.raises(InputError, match="must return a number for each sample"):
        evaluate(vit, picture(2), np.arange(2048.0).reshape(2, 32, 32), "own", processor())


@pytest.mark.parametrize(
    ("masks", "score", "message"),
    [
        (lambda a: None, lambda a, clean, y: (1.0, None), "masks must return booleans"),
        (lambda a: np.eye(3, dtype=bool), lambda a, clean, y: (1.0, None), "masks must return booleans"),
        (lambda a: np.ones((1, a.size)), lambda a, clean, y: (1.0, None), "masks must return booleans"),
        (lambda a: np.ones((1, a.size), dtype=bool), lambda a, clean, y: 1.0, "score must return"),
        (lambda a: np.eye(a.size, dtype=bool), lambda a, clean, y: (1.0, y), "curves .* same length"),
    ],
)
def test_perturbation_metric_that_returns_something_else_raises(bert, monkeypatch, masks: Any, score: Any, message: str) -> None:
    monkeypatch.setitem(METRICS, "own", METRICS["rft"])
    registry.perturbation("own", "a metric", masks, score, better="higher", baselines=("zero", "unk"))
    with pytest.raises(InputError, match=message):
        evaluate(bert[0], ["a good film is great .", "bad plot"], np.arange(16.0).reshape(2, 8), "own", bert[1])


def test_metric_needs_a_direction() -> None:
    with pytest.raises(InputError, match="better must be 'higher' or 'lower'"):
        registry.metric("own", "a metric", better="up")(len)


@pytest.mark.parametrize("filler", [None, 0.0, torch.zeros(1, 3, 32, 32), np.zeros((2, 3, 32, 32))])
def test_baseline_of_another_shape_raises(vit, monkeypatch: pytest.MonkeyPatch, filler: Any) -> None:
    monkeypatch.setitem(BASELINES, "own", Baseline("own", {"image": "a baseline"}, lambda filling: filler))
    with pytest.raises(InputError, match="must return a tensor of the input's shape"):
        evaluate(vit, picture(2), np.arange(2048.0).reshape(2, 32, 32), "deletion", processor(), baseline="own")


def test_frames_of_a_video_are_summed() -> None:
    """A pixel is removed from all frames, so its score is the sum over time."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4 * 3 * 16 * 16, 3)).eval()
    video, scores = torch.randn(1, 4, 3, 16, 16), np.random.default_rng(0).normal(size=(1, 4, 16, 16))
    assert evaluate(model, video, scores, "deletion").value == evaluate(model, video, scores.sum(1), "deletion").value
