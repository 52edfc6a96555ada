"""Every input that a target depends on has scores: each text of a multiple choice, and each text compared with an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from architectures import listed
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.methods import METHODS
from whyformer.targets import Contrast, LogProbability, Probability
from zoo import HEADS, VOCABULARY, WIDTH, Choice, build, pixels, randomise, to

Inputs = dict[str, Tensor]
FAST = {"samples": 2, "steps": 3, "noise": 0.0}
TEXT_METHODS = [m for m in sorted(METHODS) if METHODS[m].modality != "image"]


def fast_settings(method: str) -> dict[str, Any]:
    return {name: value for name, value in FAST.items() if name in METHODS[method].settings}


# -- models ----------------------------------------------------------------------------------------------------------
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Bert": lambda: transformers.BertConfig(**SIZES, max_position_embeddings=32, pad_token_id=0),
    "DebertaV2": lambda: transformers.DebertaV2Config(**SIZES, max_position_embeddings=32, relative_attention=True, pos_att_type=["c2p", "p2c"],
                                                      position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    "XLNet": lambda: transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS, d_inner=48, summary_type="last"),
}  # fmt: skip
ENTRIES = {"Bert": "bert.encoder.layer.0", "DebertaV2": "deberta.encoder.layer.0", "XLNet": "transformer.layer.0"}


def choices(kind: str = "Bert", count: int = 5, length: int = 8, padded: bool = True) -> tuple[nn.Module, Inputs]:
    """A model and two questions with five choices of unequal length."""
    model = randomise(getattr(transformers, f"{kind}ForMultipleChoice")(CONFIGS[kind]())).double()
    ids = torch.randint(4, VOCABULARY, (2, count, length), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    if padded:
        for row, (i, m) in enumerate(zip(ids.flatten(0, 1), mask.flatten(0, 1), strict=True)):
            i[length - row % 4 :], m[length - row % 4 :] = 0, 0
    return model, {"input_ids": ids, "attention_mask": mask}


def towers(kind: str = "CLIP", images: int = 1, texts: int = 3) -> tuple[nn.Module, Inputs]:
    text = SIZES | {"projection_size": WIDTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    ids = torch.randint(4, VOCABULARY, (texts, 6), generator=torch.Generator().manual_seed(3))
    ids[:, -1] = 2
    config: Any
    if kind == "CLIP":
        config = transformers.CLIPConfig(text_config={**text, "max_position_embeddings": 20}, vision_config=vision, projection_dim=16)
    else:
        config = transformers.SiglipConfig(text_config={**text, "max_position_embeddings": 6}, vision_config=vision)
    model = randomise(getattr(transformers, f"{kind}Model")(config)).double()
    with torch.no_grad():
        model.logit_scale.fill_(1.0)
    return model, {"input_ids": ids, "pixel_values": pixels()[:images].double()}


# -- reference implementations ---------------------------------------------------------------------------------------
def value_of(target: Any, logits: Tensor) -> Tensor:
    """``[B]`` value of a target, computed from logits."""
    rows = range(len(logits))

    def at(index: Any, values: Tensor) -> Tensor:
        return torch.stack([values[b, index if isinstance(index, int) else index[b]] for b in rows])

    match target:
        case Contrast():
            return at(target.index, logits) - at(target.other, logits)
        case LogProbability():
            return at(target.index, logits.log_softmax(-1))
        case Probability():
            return at(target.index, logits.softmax(-1))
        case int() | list():
            return at(target, logits)
    return target(logits)


def reference(model: nn.Module, inputs: Inputs, target: Any, entry: str, output: str) -> tuple[Tensor, Tensor, Tensor]:
    """(∂target/∂logits ``[B, C]``, Σ_d x ⊙ ∂target/∂x of the input of a block, the same of the pixels or an empty tensor)."""
    block_inputs: list[Tensor] = []

    def make_leaf(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        block_inputs.append(x)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    handle = model.get_submodule(entry).register_forward_pre_hook(make_leaf, with_kwargs=True)
    inputs_ = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in inputs.items()}
    logits = getattr(model(**inputs_), output)
    handle.remove()
    (x,) = block_inputs
    leaf = logits.detach().requires_grad_()
    (seed,) = torch.autograd.grad(value_of(target, leaf).sum(), leaf)
    leaves = [x, *([inputs_["pixel_values"]] if "pixel_values" in inputs_ else [])]
    grads = torch.autograd.grad(value_of(target, logits).sum(), leaves)
    products = [(leaf * grad).detach() for leaf, grad in zip(leaves, grads, strict=True)]
    return seed, products[0].sum(-1), products[1].sum(1) if len(products) > 1 else torch.zeros(0)


def parts_of(e: Explanation) -> dict[str, Tensor]:
    return {name: e.part(name).scores for name in e.inputs}


def expected_parts(seed: Tensor, scores: Tensor, name: str = "input_ids") -> dict[str, Tensor]:
    """The expected parts of texts, from their scores ``[B, C, N]``."""
    first = [max(range(len(row)), key=lambda k, row=row: (row[k] != 0, row[k])) for row in seed.tolist()]
    rows = range(len(seed))
    parts = {name: torch.stack([scores[b, first[b]] for b in rows])}
    for k in range(seed.shape[1]):
        selected = [bool(seed[b, k] != 0) and first[b] != k for b in rows]
        if any(selected):
            parts[f"{name}[{k}]"] = torch.stack([scores[b, k] * selected[b] for b in rows])
    return parts


def assert_same_parts(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    scale = max(float(v.abs().max()) for v in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-9 * scale)


TARGETS: dict[str, Any] = {
    "contrast": Contrast(3, 4), "contrasts": Contrast([3, 0], [4, 1]), "crossed": Contrast([3, 4], [4, 3]), "log probability": LogProbability(2),
    "probability": Probability([1, 0]), "product": lambda logits: logits[:, 2] * logits[:, 0], "negative": lambda logits: -logits[:, 3],
    "logit": 3, "logits": [4, 0],
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ENTRIES)
def test_choices_equal_reference(kind: str, target: str) -> None:
    model, inputs = choices(kind)
    e = whyformer.explain(model, inputs, "input_x_gradient", TARGETS[target])
    seed, scores, _ = reference(model, inputs, TARGETS[target], ENTRIES[kind], "logits")
    scores = scores.T if kind == "XLNet" else scores  # XLNet has the token axis first
    scores = scores.unflatten(0, (2, 5)) * inputs["attention_mask"]
    assert_same_parts(parts_of(e), expected_parts(seed, scores))
    torch.testing.assert_close(sum(v.sum(1) for v in parts_of(e).values()), scores.sum((1, 2)))


@pytest.mark.parametrize("padded", [True, False])
def test_integrated_gradients_of_all_choices_are_complete(padded: bool) -> None:
    """Integrated gradients over all texts sum to f(x) − f(x′), where x′ are zero vectors at the first block."""
    model, inputs = choices(padded=padded)
    target = LogProbability([1, 4])
    e = whyformer.explain(model, inputs, "integrated_gradients", target, steps=60)

    def zero_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (torch.zeros_like(args[0]), *args[1:])

    clean = value_of(target, model(**inputs).logits)
    handle = model.bert.encoder.layer[0].register_forward_pre_hook(zero_input)
    at_baseline = value_of(target, model(**inputs).logits)
    handle.remove()
    real = inputs["attention_mask"].sum((1, 2))
    total = sum(v.sum(1) for v in parts_of(e).values())
    if not padded:
        torch.testing.assert_close(total, (clean - at_baseline).detach(), rtol=1e-2, atol=1e-3)
    assert real.shape == total.shape and len(e.parts) == 5  # all texts but one of each sample, which differs between the samples
    assert not e.warnings


@pytest.mark.part
@pytest.mark.parametrize("kind", ["Bert", "DebertaV2"])
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_texts_of_contrast_have_scores_of_single_texts(method: str, kind: str) -> None:
    """The second choice of a contrast has the scores of −1 times its logit."""
    model, inputs = choices(kind)
    options = fast_settings(method) | ({"baseline": 7} if method == "occlusion" else {})
    try:
        e = whyformer.explain(model, inputs, method, Contrast(3, 4), **options)
    except whyformer.errors.MethodNotApplicable:
        assert kind == "DebertaV2"
        return
    assert e.inputs == ("input_ids", "input_ids[4]")
    for b in range(2):
        for name, k, sign in (("input_ids", 3, 1), ("input_ids[4]", 4, -1)):
            sample = {n: v[b : b + 1, k] for n, v in inputs.items()}
            length = int(sample["attention_mask"].sum())
            sample = {n: v[:, :length] for n, v in sample.items()}
            target: Any = 0 if sign == 1 else lambda logits: -logits[:, 0]
            single = whyformer.explain(Choice(model).eval(), sample, method, target, **options).scores[0]
            result = e.part(name).scores[b]
            torch.testing.assert_close(result[:length], single, rtol=1e-6, atol=1e-9 * float(single.abs().max()))
            assert not result[length:].any()


@pytest.mark.part
@pytest.mark.parametrize("target", ["contrasts", "log probability", "product"])
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_batch_of_choices_equals_single_runs(method: str, target: str) -> None:
    model, inputs = choices()
    options = fast_settings(method) | ({"baseline": 7} if method == "occlusion" else {})
    assert_equals_single_runs(model, inputs, inputs.keys(), method, TARGETS[target], options)


def of_sample(target: Any, b: int) -> Any:
    if isinstance(target, Contrast):
        return Contrast(*(v if isinstance(v, int) else v[b] for v in (target.index, target.other)))
    return target[b] if isinstance(target, list) else target


def assert_equals_single_runs(model: nn.Module, inputs: Inputs, sample_inputs: Any, method: str, target: Any, options: dict[str, Any]) -> None:
    """Assert that each sample's parts equal a single run; parts of other samples are 0, without warning, with a reason."""
    e = whyformer.explain(model, inputs, method, target, **options)
    singles = []
    for b, explanation in enumerate(e):
        sample = {n: v[b : b + 1] if n in sample_inputs else v for n, v in inputs.items()}
        single = whyformer.explain(model, sample, method, of_sample(target, b), **options)
        singles.append(single)
        expected = parts_of(single)
        assert set(expected) <= set(explanation.inputs)
        for name, scores in parts_of(explanation).items():
            if name in expected:
                scale = float(expected[name].abs().max())
                torch.testing.assert_close(scores, expected[name], rtol=1e-5, atol=1e-9 * scale)
            else:
                part = explanation.part(name)
                assert not scores.any() and part.diagnostics["input"][0] and not part.warnings
        assert explanation.warnings == single.warnings
    rejoined = joined(singles)
    for name, scores in parts_of(rejoined).items():
        torch.testing.assert_close(scores, e.part(name).scores, rtol=1e-5, atol=1e-9 * float(scores.abs().max()))


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_logit_of_choice_depends_on_its_text_only(method: str) -> None:
    model, inputs = choices(padded=False)
    options = fast_settings(method) | ({"baseline": 7} if method == "occlusion" else {})
    e = whyformer.explain(model, inputs, method, [3, 1], **options)
    assert e.inputs == ("input_ids",) and "unscored" not in e.diagnostics


def test_occlusion_replaces_tokens_of_every_text() -> None:
    model, inputs = choices()
    target = LogProbability(2)
    e = whyformer.explain(model, inputs, "occlusion", target, baseline=7)
    assert e.inputs == ("input_ids", *(f"input_ids[{k}]" for k in (0, 1, 3, 4)))
    clean = value_of(target, model(**inputs).logits)
    for k in range(5):
        for j in (0, 3):
            ids = inputs["input_ids"].clone()
            ids[:, k, j] = 7
            drop = clean - value_of(target, model(**{**inputs, "input_ids": ids}).logits)
            result = e.scores if k == 2 else e.part(f"input_ids[{k}]").scores
            torch.testing.assert_close(result[:, j], drop.detach())


def test_decompx_of_all_texts_sums_to_target() -> None:
    model, inputs = choices()
    e = whyformer.explain(model, inputs, "decompx", Contrast(3, 4))
    total = sum(v.sum(1) for v in parts_of(e).values())
    torch.testing.assert_close(total, value_of(Contrast(3, 4), model(**inputs).logits).detach())


def test_parts_of_texts_survive_serialization(tmp_path: Any) -> None:
    e = whyformer.explain(*choices(), "input_x_gradient", Contrast(3, 4))
    for restored in (Explanation.load(e.save(tmp_path / "e.safetensors")), Explanation.from_dict(e.to_dict())):
        assert_same_parts({n: v.double() for n, v in parts_of(restored).items()}, {n: v.float().double() for n, v in parts_of(e).items()})
    assert "input_ids[4]" in e.to_dict()["parts"]


# -- images and texts ------------------------------------------------------------------------------------------------
IMAGE_TEXT_TARGETS: dict[str, Any] = {
    "contrast": Contrast(0, 1), "contrasts": Contrast([0, 1], [1, 2]), "log probability": LogProbability(2, multi_label=False), "one text": 1, "own texts": [1, 0],
    "negative": lambda logits: -logits[:, 2],
}  # fmt: skip


def target_for(target: Any, image_count: int) -> Any:
    return target if image_count > 1 else of_sample(target, 0)


@pytest.mark.parametrize("target", IMAGE_TEXT_TARGETS)
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@pytest.mark.parametrize("image_count", [1, 2])
def test_image_text_targets_equal_reference(image_count: int, kind: str, target: str) -> None:
    model, inputs = towers(kind, image_count)
    e = whyformer.explain(model, inputs, "input_x_gradient", target_for(IMAGE_TEXT_TARGETS[target], image_count))
    for b in range(image_count):  # texts are encoded once for all images, so gradients of several images would add up
        sample = {**inputs, "pixel_values": inputs["pixel_values"][b : b + 1]}
        sample_target = of_sample(IMAGE_TEXT_TARGETS[target], b)
        seed, text_scores, image_scores = reference(model, sample, sample_target, "text_model.encoder.layers.0", "logits_per_image")
        expected = {"pixel_values": image_scores, **expected_parts(seed, text_scores[None])}
        result = parts_of(e[b])
        assert_same_parts({n: result[n] for n in expected}, expected)
        assert not any(v.any() for n, v in result.items() if n not in expected)


@pytest.mark.part
@pytest.mark.parametrize("target", ["contrasts", "log probability", "one text", "own texts"])
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@pytest.mark.parametrize("method", [m for m in sorted(METHODS) if METHODS[m].family != "perturbation"])
def test_batch_of_images_equals_single_runs(method: str, kind: str, target: str) -> None:
    model, inputs = towers(kind, 2)
    try:
        assert_equals_single_runs(model, inputs, ["pixel_values"], method, IMAGE_TEXT_TARGETS[target], fast_settings(method))
    except whyformer.errors.MethodNotApplicable:
        return


@pytest.mark.parametrize("target", [[1, 1], [0, 1], Contrast(0, 1), Contrast([0, 1], [1, 0])])
def test_packed_patches_with_texts_equal_single_runs(target: Any) -> None:
    """Packed patches of two images of SigLIP 2, compared with the same two texts."""
    model, inputs = next(a for a in listed() if a.name == "two towers/siglip2").build()
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert e.inputs[:2] == ("pixel_values", "input_ids") and bool(e.parts.keys() - {"input_ids"}) == isinstance(target, Contrast)
    for b in range(2):
        sample = {n: v if n in ("input_ids", "attention_mask") else v[b : b + 1] for n, v in inputs.items()}
        expected = parts_of(whyformer.explain(model, sample, "input_x_gradient", of_sample(target, b)))
        assert all(bool(v.any()) for v in expected.values())
        for name, value in expected.items():
            torch.testing.assert_close(e[b].part(name).scores, value, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_of_images_and_texts_are_complete() -> None:
    model, inputs = towers(images=2)
    target = Contrast([0, 1], [1, 2])
    e = whyformer.explain(model, inputs, "integrated_gradients", target, steps=80)
    total = sum(v.flatten(1).sum(1) for v in parts_of(e).values())

    def zero_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (torch.zeros_like(args[0]), *args[1:]), kwargs

    clean = value_of(target, model(**inputs).logits_per_image)
    handle = model.text_model.encoder.layers[0].register_forward_pre_hook(zero_input, with_kwargs=True)
    at_baseline = value_of(target, model(**{**inputs, "pixel_values": 0 * inputs["pixel_values"]}).logits_per_image)
    handle.remove()
    torch.testing.assert_close(total, (clean - at_baseline).detach(), rtol=0, atol=0.05)
    assert not e.warnings


def test_unscored_texts_are_reported() -> None:
    """Occlusion removes only image patches, although the target also depends on the texts."""
    model, inputs = towers()
    e = whyformer.explain(model, inputs, "occlusion", Contrast(0, 1), patch=16)
    assert e.inputs == ("pixel_values",) and e.diagnostics["unscored"] == ["input_ids"]
    assert any("input_ids" in message and "input_x_gradient" in message for message in e.warnings)
    gradient = whyformer.explain(model, inputs, "input_x_gradient", Contrast(0, 1))
    assert gradient.inputs == ("pixel_values", "input_ids", "input_ids[1]") and "unscored" not in gradient.diagnostics


@pytest.mark.parametrize("target", [[1, 1], Contrast(0, 1)])
def test_text_side_equals_text_parts(target: Any) -> None:
    """Also if all images have the same target text."""
    model, inputs = towers(images=2)
    e = whyformer.explain(model, inputs, "gae", target, side="text")
    both_sides = whyformer.explain(model, inputs, "gae", target)
    assert e.inputs == both_sides.inputs[1:]
    for name in e.inputs:
        torch.testing.assert_close(e.part(name).scores, both_sides.part(name).scores)


class NumberTokenizer:
    """A tokenizer whose tokens are "t" and the id."""

    cls_token_id, pad_token_id, vocab_size = 2, 0, VOCABULARY

    def __len__(self) -> int:
        return self.vocab_size

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"t{i}" for i in ids]


def test_each_text_has_its_tokens() -> None:
    model, inputs = choices()
    inputs["input_ids"][:, :, 0] = 2
    e = whyformer.explain(model, inputs, "input_x_gradient", Contrast([3, 0], [4, 1]), processor=NumberTokenizer())
    choice_indices = {"input_ids": [3, 0], "input_ids[1]": [1, 1], "input_ids[4]": [4, 4]}
    assert set(choice_indices) == set(e.inputs)
    for name, texts in choice_indices.items():
        part = e.part(name)
        assert part.tokens == [[f"t{i}" for i in inputs["input_ids"][b, k].tolist()] for b, k in enumerate(texts)]
        assert part.special == [[0], [0]]
    clip, clip_inputs = towers()
    e = whyformer.explain(clip, clip_inputs, "input_x_gradient", Contrast(2, 1), processor=NumberTokenizer())
    for name, k in (("input_ids", 2), ("input_ids[1]", 1)):
        assert e.part(name).tokens == [[f"t{i}" for i in clip_inputs["input_ids"][k].tolist()]]


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "partial_lrp"])
@pytest.mark.parametrize("target", [Contrast(1, 2), LogProbability(1), Probability(1)], ids=lambda t: type(t).__name__)
def test_opposite_logits_do_not_cancel_under_the_normalised_add_rule(name: str, method: str, target: Any) -> None:
    """Σ ∂target/∂logits is 0, to which the rule would scale the relevance: float32 would only show its rounding."""
    model, inputs = build(name)
    rule = {} if method == "transformer_attribution" else {"rule": "shared"}
    single = whyformer.explain(model.float(), to(inputs, torch.float32), method, target, **rule).scores
    double = whyformer.explain(model.double(), to(inputs, torch.float64), method, target, **rule).scores
    assert (single - double).abs().max() <= 0.01 * double.abs().max()


def test_relevance_of_a_contrast_is_the_difference_of_two_classes() -> None:
    model, inputs = build("hf_vit")
    first, second, contrast = (whyformer.explain(model, inputs, "lrp", t, rule="shared").scores for t in (1, 2, Contrast(1, 2)))
    torch.testing.assert_close(contrast, first - second, rtol=0, atol=1e-6 * float(first.abs().max()))


class Conditioned(nn.Module):
    """A text model with a feature of each sample, and a mask of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.kinds = build("bert", torch.float32)[0], nn.Embedding(4, 2)

    def forward(self, input_ids: Tensor, valid: Tensor, is_member: Tensor, product_type: Tensor) -> Tensor:
        logits: Tensor = self.text(input_ids=input_ids, attention_mask=valid.long()).logits[:, :2]
        return logits + is_member.float() + self.kinds(product_type)


def test_features_of_samples_without_scores_are_named() -> None:
    """Also truth values, and features whose names are like those of descriptions of tokens."""
    ids = torch.randint(5, 20, (2, 6))
    features = {"is_member": torch.tensor([[True], [False]]), "product_type": torch.tensor([1, 2])}
    e = whyformer.explain(Conditioned().eval(), {"input_ids": ids, "valid": ids > 0, **features}, "input_x_gradient", 0)
    assert e.diagnostics["unscored"] == ["is_member", "product_type"]
