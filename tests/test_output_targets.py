"""Targets over a model's raw output: their values and gradients by hand, and the errors if a target is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from whyformer import targets
from whyformer.errors import InputError
from whyformer.targets import Contrast, Pixel, Query, Similarity, Span, Token
from zoo import VOCABULARY, build, pixels, randomise, rows, text

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PATCHES = {"image_size": [32, 32], "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}


def random_model(kind: str, config: Any) -> nn.Module:
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    return randomise(model).double()


def bert(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (random_model(kind, transformers.BertConfig(**{**SMALL, **options})), text())


def yolos() -> tuple[nn.Module, Any]:
    config = transformers.YolosConfig(**PATCHES, num_detection_tokens=4, num_labels=5)
    return random_model("YolosForObjectDetection", config), pixels().double()


def detr() -> tuple[nn.Module, Any]:
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, use_pretrained_backbone=False, backbone=None, d_model=24, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=4,
        num_labels=5, dropout=0.0,
    )  # fmt: skip
    return random_model("DetrForObjectDetection", config), {"pixel_values": pixels().double()}


def segformer() -> tuple[nn.Module, Any]:
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[12, 24], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 3], mlp_ratios=[2, 2], decoder_hidden_size=24, num_labels=5,
    )  # fmt: skip
    return random_model("SegformerForSemanticSegmentation", config), pixels().double()


def depth() -> tuple[nn.Module, Any]:
    backbone = {**PATCHES, "image_size": 32, "out_indices": [1, 2], "reshape_hidden_states": False, "apply_layernorm": False}
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(**backbone, mlp_ratio=2), reassemble_hidden_size=24, patch_size=8,
        neck_hidden_sizes=[8, 8], reassemble_factors=[2, 1], fusion_hidden_size=8, head_hidden_size=8,
    )  # fmt: skip
    return random_model("DepthAnythingForDepthEstimation", config), pixels().double()


class SegmentingDetector(nn.Module):
    """Outputs like those of MaskFormer or of DETR for segmentation: a class and a mask for each of 4 queries. The model
    excludes the last class by a logit of -inf, as Grounding DINO excludes texts that were not passed."""

    def __init__(self, classes: str, masks: str, more: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.detector, self.names, self.more = MODELS["yolos"]()[0], (classes, masks), more

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        found = self.detector(pixel_values)
        excluded = torch.arange(found.logits.shape[-1]) == found.logits.shape[-1] - 1
        maps = {self.names[1]: found.pred_boxes[..., None] * found.pred_boxes[..., None, :]}
        return {self.names[0]: found.logits.masked_fill(excluded, -torch.inf), **maps, **{name: found[name] for name in self.more}}


def towers(kind: str) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        words = {k: v for k, v in SMALL.items() if "dropout" not in k} | {"projection_size": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        patches = {**PATCHES, "image_size": 32}
        ids = torch.randint(4, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(3))
        ids[:, -1] = 2
        config: Any
        if kind == "CLIPModel":
            config = transformers.CLIPConfig(text_config=words, vision_config=patches, projection_dim=16)
        else:
            config = transformers.SiglipConfig(text_config={**words, "max_position_embeddings": 6}, vision_config=patches)
        return random_model(kind, config), {"input_ids": ids, "pixel_values": pixels().double()}

    return build


def owl() -> tuple[nn.Module, Any]:
    """A detector whose classes are two texts per image."""
    words = {k: v for k, v in SMALL.items() if "dropout" not in k} | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.OwlViTConfig(text_config=words, vision_config={**PATCHES, "image_size": 32}, projection_dim=24)
    ids = torch.randint(4, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(3))
    return random_model("OwlViTForObjectDetection", config), {"input_ids": ids, "pixel_values": pixels().double()}


def t5() -> tuple[nn.Module, Any]:
    model, inputs = build("t5")
    return model, {**inputs, "decoder_input_ids": inputs["input_ids"][:, :6].flip(1)}


def bart() -> tuple[nn.Module, Any]:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    inputs = text()
    return random_model("BartForConditionalGeneration", config), {**inputs, "decoder_input_ids": inputs["input_ids"][:, :6].flip(1)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "masked": bert("BertForMaskedLM"),
    "words": bert("BertForTokenClassification", num_labels=5),
    "answers": bert("BertForQuestionAnswering"),
    "headless": bert("BertModel"),
    "two heads": bert("BertForPreTraining"),
    "discriminator": lambda: (random_model("ElectraForPreTraining", transformers.ElectraConfig(**SMALL, embedding_size=24)), text()),
    "yolos": yolos,
    "detr": detr,
    "owl": owl,
    "maskformer": lambda: (SegmentingDetector("class_queries_logits", "masks_queries_logits").eval(), pixels().double()),
    "segmenting detr": lambda: (SegmentingDetector("logits", "pred_masks", ("pred_boxes",)).eval(), pixels().double()),
    "segformer": segformer,
    "depth": depth,
    "clip": towers("CLIPModel"),
    "siglip": towers("SiglipModel"),
    "classifier": lambda: build("bert"),
    "gpt2": lambda: build("gpt2_lm"),
    "t5": t5,
    "bart": bart,
}
LOGP = "log-probabilities"


def by_hand(output: Any, inputs: Any, target: Any) -> Tensor:
    """The value of a target by indexing, ``[B]``; both samples have these positions."""
    match target:
        case Token() if output.logits.dim() == 2:
            return output.logits[:, target.position]
        case Token():
            return output.logits[:, target.position, target.token]
        case Span() if "start_logits" in output:
            return output.start_logits[:, target.start] + output.end_logits[:, target.end]
        case Span():
            ids = inputs.get("decoder_input_ids", inputs["input_ids"])
            logp = output.logits.log_softmax(-1)
            return sum(logp[torch.arange(2), i - 1, ids[:, i]] for i in range(target.start, target.end + 1))
        case Query():
            return output.logits[:, target.index, target.label]
        case Pixel() if target.label is None:
            return output.predicted_depth[:, target.row, target.column]
        case Pixel():
            return output.logits[:, target.label, target.row, target.column]
        case Similarity():
            return output.logits_per_image.diagonal()
    return target(output)


def gradient_by_hand(model: nn.Module, inputs: Any, target: Any) -> Tensor:
    """Σ x ⊙ ∂f/∂x over the channels of the pixels, or over the hidden dimension at the input of the first block."""
    arguments = dict(inputs) if isinstance(inputs, dict) else {"pixel_values": inputs}
    leaves: list[Tensor] = []
    if "pixel_values" in arguments:
        arguments["pixel_values"] = arguments["pixel_values"].clone().requires_grad_()
        leaves.append(arguments["pixel_values"])
        value = by_hand(model(**arguments), arguments, target)
    else:
        core = getattr(model, "base_model", model)
        layers = core.encoder.layer if hasattr(core, "encoder") else core.h

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            leaves.append(args[0].detach().requires_grad_())
            return (leaves[0], *args[1:])

        handle = layers[0].register_forward_pre_hook(enter)
        value = by_hand(model(**arguments), arguments, target)
        handle.remove()
    (gradient,) = torch.autograd.grad(value.sum(), leaves)
    return (leaves[0].detach() * gradient).sum(1 if "pixel_values" in arguments else -1)


def pooled(output: Any) -> Tensor:
    return output.pooler_output[:, 3].tanh()


CASES: list[tuple[str, Any]] = [
    ("discriminator", Token(3, 0)),
    ("masked", Token(5, 17)),
    ("words", Token(3, 2)),
    ("answers", Span(2, 5)),
    ("headless", pooled),
    ("headless", lambda output: output.last_hidden_state[:, 2, 1] * output.pooler_output[:, 0]),
    ("two heads", lambda output: output.seq_relationship_logits[:, 1]),
    ("yolos", Query(1, 3)),
    ("detr", Query(2, 4)),
    ("owl", Query(3, 1)),
    ("segformer", Pixel(4, 6, 2)),
    ("depth", Pixel(31, 20)),
    ("clip", Similarity()),
    ("siglip", Similarity()),
    ("gpt2", Token(4, 9)),
    ("gpt2", Span(2, 4)),
]


def case_id(case: Any) -> str | None:
    return case if isinstance(case, str) else type(case).__name__


@pytest.mark.parametrize(("name", "target"), CASES, ids=case_id)
def test_input_times_gradient_equals_autograd(name: str, target: Any) -> None:
    model, inputs = MODELS[name]()
    expected = gradient_by_hand(model, inputs, target)
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert expected.abs().amax() > 0
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    expected = expected if mask is None else expected * mask
    torch.testing.assert_close(e.scores, expected, rtol=1e-7, atol=1e-10)
    with torch.no_grad():
        value = by_hand(model(**inputs) if isinstance(inputs, dict) else model(inputs), inputs, target)
    reported = e.logits[torch.arange(2), e.target]
    torch.testing.assert_close(reported, value)
    torch.testing.assert_close(torch.tensor(e.diagnostics["conservation"]["start"], dtype=torch.float64), value.double())


FITTING = {
    "masked": "Token", "words": "Token", "answers": "Span", "headless": "lambda", "two heads": "lambda", "discriminator": "Token", "yolos": "Query",
    "detr": "Query", "owl": "Query", "segformer": "Pixel", "depth": "Pixel", "clip": "Similarity", "siglip": "Similarity",
}  # fmt: skip


def suggested_targets(error: Exception) -> list[str]:
    """The targets that an error message names, as written there."""
    return re.findall(r"targets\.\w+\([^()]*\)|(?<=target=)(?:lambda \w+: [\w.]+(?:\[.*?\])*|\d+)", str(error))


@pytest.mark.parametrize("name", FITTING)
def test_output_other_than_class_logits_requires_a_target(name: str) -> None:
    """Every target that the error suggests can be explained."""
    model, inputs = MODELS[name]()
    for method in ("input_x_gradient", "occlusion"):
        with pytest.raises(InputError) as caught:
            whyformer.explain(model, inputs, method)
        assert any(FITTING[name] in way for way in suggested_targets(caught.value))
        assert "\n" not in str(caught.value)
    for way in suggested_targets(caught.value):
        if name != "depth":  # its map ends with a ReLU that is 0 there
            assert whyformer.explain(model, inputs, "input_x_gradient", eval(way)).scores.any(), way
    if name not in ("clip", "siglip"):
        with pytest.raises(InputError, match="a target must select a number"):
            whyformer.explain(model, inputs, "input_x_gradient", target=1)


@pytest.mark.parametrize("target", [Token(5, 3), Span(1, 2), Query(0, 1), Pixel(0, 0), Similarity()], ids=case_id)
@pytest.mark.parametrize("name", ["bert", "hf_vit", "gpt2_lm"])
def test_target_for_another_output_raises_with_fitting_targets(name: str, target: Any) -> None:
    model, inputs = build(name)
    try:
        whyformer.explain(model, inputs, "input_x_gradient", target)
    except InputError as error:
        ways = suggested_targets(error)
        assert len(ways) >= 2
        for way in ways:
            assert whyformer.explain(model, inputs, "input_x_gradient", eval(way)).scores.any(), way
    else:
        assert name == "gpt2_lm"


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart"])
def test_default_target_of_language_model_is_the_next_token(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.no_grad():
        logits = model(**inputs).logits
    e = whyformer.explain(model, inputs, "input_x_gradient")
    last = [5, 5] if "decoder_input_ids" in inputs else [9, 6]
    torch.testing.assert_close(e.logits, logits[torch.arange(2), last])
    same = whyformer.explain(model, inputs, "input_x_gradient", Token(-1))
    torch.testing.assert_close(same.scores, e.scores)
    assert torch.equal(same.target, e.target)


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", ["lrp", "transformer_attribution", "lrp_ah_ln", "gae", "rollout", "occlusion", "smoothgrad", "integrated_gradients"])
@pytest.mark.parametrize(("name", "target"), [("masked", Token([5, 2], [17, 8])), ("words", Token([1, -1], 2)), ("answers", Span([1, 2], [4, 2])),
                                              ("headless", pooled), ("gpt2", Token([3, -2], [5, 6])), ("yolos", Query([1, 3], [2, 0])), ("segformer", Pixel(4, [6, 2], 1)),
                                              ("siglip", Similarity())], ids=case_id)  # fmt: skip
def test_batch_equals_single_samples(name: str, target: Any, method: str) -> None:
    if name == "segformer" and method in ("transformer_attribution", "gae", "rollout"):
        return  # no map over all tokens
    options: dict[str, Any] = {"smoothgrad": {"samples": 2}, "integrated_gradients": {"steps": 2}, "occlusion": {"baseline": 1}}.get(method, {})
    model, inputs = MODELS[name]()
    if method == "occlusion" and (isinstance(inputs, Tensor) or "pixel_values" in inputs):
        options = {}
    both = whyformer.explain(model, inputs, method, target, **options)
    for i in range(2):
        written = targets.Resolver(target, None, None, 2).as_text()
        alone = rows(inputs, i, crop=name not in ("siglip",))
        single = whyformer.explain(model, alone, method, written[i] if written else target, **options)
        n = single.scores.shape[1]
        torch.testing.assert_close(both.scores[i, :n], single.scores[0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(both.logits[i], single.logits[0])
        assert single.target_names == both[i].target_names


# -- names, texts and spellings of targets -----------------------------------------------------------------------------
class LetterTokenizer:
    """A tokenizer with one token per letter: ``a`` is token 4."""

    vocab_size = VOCABULARY
    mask_token_id, pad_token_id, cls_token_id, sep_token_id, bos_token_id, eos_token_id, unk_token_id = 1, 0, 2, 3, None, None, None
    _names = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", *(chr(ord("a") + i) for i in range(VOCABULARY - 4))]

    def __len__(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._names)}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return [self._names[i] for i in ids] if isinstance(ids, list) else self._names[ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def encode(self, string: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self._names.index(letter) for letter in string if letter in self._names]


def test_token_target_by_text() -> None:
    model, inputs = MODELS["masked"]()
    e = whyformer.explain(model, inputs, "input_x_gradient", Token([5, -1], "n"), LetterTokenizer())
    assert e.target.tolist() == [17, 17]
    assert e.target_names == ["'n' at position 5", "'n' at position -1"]
    alone = whyformer.explain(model, inputs, "input_x_gradient", Token(5, 17)).scores
    torch.testing.assert_close(e.scores[0], alone[0])
    best = int(e.logits[0].argmax())
    assert e.top(0, 1)[0][:2] == (best, f"'{LetterTokenizer._names[best]}'")
    assert whyformer.explain(model, inputs, "input_x_gradient", Token(5, "[MASK]"), LetterTokenizer()).target.tolist() == [1, 1]
    with pytest.raises(InputError, match="'an' is 2 tokens"):
        whyformer.explain(model, inputs, "input_x_gradient", Token(5, "an"), LetterTokenizer())
    with pytest.raises(InputError, match="needs a tokenizer"):
        whyformer.explain(model, inputs, "input_x_gradient", Token(5, "n"))


def test_token_class_target_by_name() -> None:
    model, inputs = MODELS["words"]()
    model.config.id2label = {0: "O", 1: "PER", 2: "LOC", 3: "ORG", 4: "MISC"}
    e = whyformer.explain(model, inputs, "input_x_gradient", Token(3, "loc"), LetterTokenizer())
    assert e.target_names == ["LOC at position 3"] * 2
    assert e.labels == model.config.id2label
    assert whyformer.explain(model, inputs, "input_x_gradient", Token(3)).target.tolist() == e.logits.argmax(-1).tolist()
    with pytest.raises(InputError, match="no class 'n'"):
        whyformer.explain(model, inputs, "input_x_gradient", Token(3, "n"), LetterTokenizer())


NAMES = [
    ("answers", Span([1, 2], [4, 2]), ["span 1 to 4", "span 2 to 2"]),
    ("yolos", Query([1, 3], 2), ["cat at query 1", "cat at query 3"]),
    ("yolos", Query(None, "cat"), ["cat at its best query"] * 2),
    ("segformer", Pixel(4, [6, 1], "Cat"), ["cat at row 4, column 6", "cat at row 4, column 1"]),
    ("clip", Similarity(), ["similarity to the text"] * 2),
    ("masked", Token(2, Contrast(8, [9, 7])), ["8 rather than 9 at position 2", "8 rather than 7 at position 2"]),
    ("headless", pooled, ["custom target"] * 2),
]


@pytest.mark.parametrize(("name", "target", "names"), NAMES, ids=case_id)
def test_target_is_named_saved_and_restored(name: str, target: Any, names: list[str], tmp_path: Any) -> None:
    model, inputs = MODELS[name]()
    model.config.id2label = {0: "no", 1: "dog", 2: "cat", 3: "cow", 4: "bee"}
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert e.target_names == names
    assert len(e.logits) == len(e) == 2 and e.numeric == (e.logits.shape[1] == 1)
    assert ("prob" in str(e)) == (e.logits.shape[1] > 1)  # spans, similarities and functions have a value but no probability
    assert whyformer.Explanation.from_dict(e.to_dict()).target_names == names
    e.save(tmp_path / "e.safetensors")
    loaded = whyformer.Explanation.load(tmp_path / "e.safetensors")
    if callable(target):
        assert "target" not in e.diagnostics
        return
    repeated = whyformer.explain(model, inputs, "input_x_gradient", loaded.diagnostics["target"])
    assert torch.equal(repeated.scores, e.scores)
    assert repeated.target_names == names
    single = loaded[1].diagnostics["target"]
    assert whyformer.explain(model, rows(inputs, 1), "input_x_gradient", single).target_names == names[1:]


def test_contrast_of_tokens_is_a_difference() -> None:
    model, inputs = MODELS["masked"]()

    def scores(token: Any) -> Tensor:
        return whyformer.explain(model, inputs, "input_x_gradient", Token(2, token)).scores

    torch.testing.assert_close(scores(Contrast(8, 9)), scores(8) - scores(9))


@pytest.mark.parametrize(("written", "target"), [
    ("Token(5, 17)", Token(5, 17)), (" Token(position=5, token=17) ", Token(5, 17)), ("Token(-1)", Token(-1)),
    ("Token(2, Contrast(8, 9))", Token(2, Contrast(8, 9))), ("Contrast(8, 9)", Contrast(8, 9)), ("Token([5, 2], 17)", Token([5, 2], 17)),
])  # fmt: skip
def test_target_written_as_text(written: str, target: Any) -> None:
    model, inputs = MODELS["gpt2"]()
    a, b = (whyformer.explain(model, inputs, "input_x_gradient", t) for t in (written, target))
    assert torch.equal(a.scores, b.scores)
    assert a.target_names == b.target_names


UNREADABLE = "cannot be read: put names in quotes|no class"


@pytest.mark.parametrize(("wrong", "message"), [
    ("Token()", UNREADABLE), ("Token(5, 17, 3)", "of must be one of .* not 3"), ("Token(__import__('os'))", UNREADABLE), ("Token(x)", UNREADABLE),
    ("Span(3)", UNREADABLE), ("Token(5, 17", UNREADABLE),
])  # fmt: skip
def test_malformed_target_text_raises(wrong: str, message: str) -> None:
    model, inputs = MODELS["gpt2"]()
    with pytest.raises(InputError, match=message):
        whyformer.explain(model, inputs, "input_x_gradient", wrong)


WRONG = [
    ("masked", Token(7, 3), "position 7 is outside sample 1, which has 7 tokens: 0 to 6"),
    ("masked", Token(-8, 3), "position -8 is outside sample 1"),
    ("masked", Token(2, VOCABULARY), "class 50 is out of range"),
    ("masked", Token(2.0, 3), "position must be a whole number or one per sample, not 2.0"),
    ("masked", Token([1, 2, 3], 3), "3 targets for 2 samples"),
    ("masked", Span(1, 2), "neither a question-answering model nor a language model"),
    ("masked", Query(1, 2), "has no logits of queries"),
    ("classifier", Token(1, 2), "has no logits of single tokens"),
    ("classifier", Token(1, "a"), "logits of each token"),
    ("classifier", Token(1, 99), "logits of each token"),
    ("classifier", Pixel(1, 2, 0), "has no value per pixel and class"),
    ("masked", Similarity(), "has no similarities"),
    ("answers", Span(4, 2), "ends at 2, before its start at 4"),
    ("gpt2", Span(0, 2), "must start at 1 or later"),
    ("yolos", Token(1, 2), "has no logits of single tokens"),
    ("yolos", Query(9, 2), "query 9 is outside the output, whose indices are 0 to 3"),
    ("yolos", Query(1, 9), "class 9 is out of range"),
    ("yolos", Query(None, 9), "class 9 is outside"),
    ("maskformer", Pixel(1, 2, 0), "has no value per pixel and class"),
    ("segmenting detr", Pixel(1, 2, 0), "has no value per pixel and class"),
    ("maskformer", Token(1, 2), "has no logits of single tokens"),
    ("segformer", Pixel(99, 0, 2), "row 99 is outside"),
    ("segformer", Pixel(0, -1, 2), "column -1 is outside"),
    ("headless", lambda output: 3.0, "must return a tensor"),
    ("headless", lambda output: output.pooler_output, "one number per sample"),
    ("headless", [Token(1, 2), Span(1, 2)], "of one kind, not Token, Span"),
]


@pytest.mark.parametrize(("name", "target", "message"), WRONG, ids=case_id)
def test_target_that_does_not_fit_raises(name: str, target: Any, message: str) -> None:
    model, inputs = MODELS[name]()
    for method, options in (("input_x_gradient", {}), ("occlusion", {"baseline": 1} if isinstance(inputs, dict) else {})):
        with pytest.raises(InputError) as caught:
            whyformer.explain(model, inputs, method, target, **options)
        assert message in str(caught.value)


def test_best_query_requires_a_class() -> None:
    with pytest.raises(InputError, match="pass the class"):
        Query(None)


def test_unequal_numbers_of_images_and_texts_raise() -> None:
    model, inputs = MODELS["clip"]()
    with pytest.raises(InputError, match="2 pictures and 1 texts"):
        whyformer.explain(model, {**inputs, "input_ids": inputs["input_ids"][:1]}, "input_x_gradient", Similarity())
    three = {**inputs, "input_ids": inputs["input_ids"][[0, 1, 0]]}
    for arguments, suggested in ((inputs, True), (three, False)):
        with pytest.raises(InputError, match="compares pictures with texts") as error:
            whyformer.explain(model, arguments, "input_x_gradient")
        assert ("Similarity()" in str(error.value)) == suggested


# -- targets of perturbed copies, in metrics and in checks --------------------------------------------------------------
PERTURBED = [("masked", Token([5, 2], 17)), ("answers", Span([1, 2], 4)), ("headless", pooled), ("yolos", Query([1, 3], 2)), ("clip", Similarity()),
             ("clip", [1, 0]), ("segformer", Pixel(4, 6, 2))]  # fmt: skip


@pytest.mark.parametrize(("name", "target"), PERTURBED, ids=case_id)
def test_occlusion_equals_manual_occlusion(name: str, target: Any) -> None:
    """One feature of the second sample is removed by hand."""
    model, inputs = MODELS[name]()
    arguments = dict(inputs) if isinstance(inputs, dict) else {"pixel_values": inputs}
    kind = "pixel_values" if "pixel_values" in arguments else "input_ids"
    e = whyformer.explain(model, inputs, "occlusion", target, **({"patch": 8} if kind == "pixel_values" else {"baseline": 1}))
    occluded = arguments[kind].clone()
    if kind == "pixel_values":
        occluded[1, :, 8:16, :8] = 0
    else:
        occluded[1, 3] = 1
    with torch.no_grad():
        clean, without = (model(**{**arguments, kind: value}) for value in (arguments[kind], occluded))

    def value(output: Any) -> Tensor:
        match target:
            case Token():
                return output.logits[[0, 1], target.position, target.token][1]
            case Span():
                return output.start_logits[1, 2] + output.end_logits[1, 4]
            case Query():
                return output.logits[1, 3, 2]
            case Pixel():
                return output.logits[1, 2, 4, 6]
            case Similarity():
                return output.logits_per_image[1, 1]
            case [_, text]:
                return output.logits_per_image[1, text]
        return target(output)[1]

    torch.testing.assert_close(e.scores[1, 4 if kind == "pixel_values" else 3], value(clean) - value(without))


def test_positional_target_forbids_deletion_of_tokens() -> None:
    model, inputs = MODELS["gpt2"]()
    known = whyformer.explain(model, inputs, "occlusion", Token(4, 9), baseline=model.config.pad_token_id)
    torch.testing.assert_close(whyformer.explain(model, inputs, "occlusion", Token(4, 9)).scores, known.scores)
    with pytest.raises(InputError, match="would change"):
        whyformer.explain(model, inputs, "occlusion", Token(4, 9), baseline="delete")
    last = whyformer.explain(model, inputs, "occlusion", Token(-1, 9))
    torch.testing.assert_close(last.scores, whyformer.explain(model, inputs, "occlusion", 9).scores)


@pytest.mark.parametrize(
    ("read", "positional"),
    [
        (lambda o: o["start"][:, 3] - o["end"][:, 1], True),
        (lambda o: o["states"][:, 2, 0], True),
        (lambda o: o["states"].mean((1, 2)), True),  # a mean over padding too
        (lambda o: o["pooled"][:, 0], False),
    ],
    ids=["span", "state", "mean", "pooled"],
)
def test_function_of_tokens_forbids_their_deletion(read: Callable[[Any], Tensor], positional: bool) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.answers, inputs = MODELS["answers"]()
            self.config, self.inputs = self.answers.config, inputs

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            output = self.answers(input_ids, attention_mask, output_hidden_states=True)
            states = output.hidden_states[-1]
            return {"start": output.start_logits, "end": output.end_logits, "states": states, "pooled": states[:, 0, :2]}

    model = Pooled().eval()
    ids, mask = model.inputs["input_ids"][:1, :6], torch.ones(1, 6, dtype=torch.long)
    given = {"input_ids": ids, "attention_mask": mask}
    e = whyformer.explain(model, given, "occlusion", read)
    fill = model.config.pad_token_id
    expected = []
    for j in range(6):
        kept = [i for i in range(6) if i != j or positional]
        changed = ids.clone()
        changed[0, j] = fill
        expected.append(read(model(ids, mask)) - read(model(changed[:, kept], mask[:, kept])))
    torch.testing.assert_close(e.scores, torch.stack(expected, 1))
    if positional:
        with pytest.raises(InputError, match="would change"):
            whyformer.explain(model, given, "occlusion", read, baseline="delete")


@pytest.mark.parametrize("shown", [1, 2])
def test_perturbed_images_are_compared_with_all_texts(shown: int) -> None:
    """The texts are the classes of each image, and are not repeated for its copies."""
    model, inputs = MODELS["clip"]()
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:1].flip(1)])
    arguments = {"input_ids": ids[: 1 + shown], "pixel_values": inputs["pixel_values"][:shown]}
    for method, options in (("integrated_gradients", {"steps": 3}), ("smoothgrad", {"samples": 1, "noise": 0.0, "norm": "sum"})):
        batch = whyformer.explain(model, arguments, method, 1, **options)
        for i in range(shown):
            single = whyformer.explain(model, {**arguments, "pixel_values": arguments["pixel_values"][i : i + 1]}, method, 1, **options)
            torch.testing.assert_close(batch.scores[i], single.scores[0])
            assert single.scores.abs().amax() > 0
    plain = whyformer.explain(model, arguments, "saliency", 1, norm="sum")
    torch.testing.assert_close(batch.scores, plain.scores)


@pytest.mark.parametrize(("name", "target"), [("masked", Token([5, 2], 17)), ("answers", Span([1, 2], 4)), ("yolos", Query([1, 3], 2))], ids=case_id)
def test_metrics_and_checks_measure_the_target(name: str, target: Any) -> None:
    model, inputs = MODELS[name]()
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    kind = "pixel_values" if isinstance(inputs, Tensor) else "input_ids"
    options = {} if kind == "pixel_values" else {"baseline": 1}
    result = whyformer.evaluate(model, inputs, e, "deletion", **options)
    assert result.curves is not None
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(target, Span):
        clean = output.start_logits[[0, 1], [1, 2]] + output.end_logits[:, 4]
    else:
        row = output.logits[[0, 1], [5, 2] if name == "masked" else [1, 3]]
        clean = row.softmax(-1)[:, target.token if isinstance(target, Token) else 2]
    torch.testing.assert_close(torch.from_numpy(result.curves[:, 0]), clean)
    same = whyformer.evaluate(model, inputs, e.scores, "deletion", target=target, **options)
    assert (same.values == result.values).all()
    if kind == "pixel_values":
        checked = whyformer.trust(e, model, inputs, steps=2, seeds=(0,))
        torch.testing.assert_close(torch.from_numpy(checked.curves[:, 0]), clean)
    chosen = whyformer.arbitrate(model, inputs, ["saliency", "input_x_gradient"], target=target, **({} if kind == "pixel_values" else {"baseline": 1}))
    assert [c.target_names for c in chosen.explanations] == [[n] for n in e.target_names or ()]


def test_class_agnostic_methods_still_depend_on_the_position() -> None:
    """Rollout is equal for all classes at a position, but not for all positions."""
    model, inputs = MODELS["gpt2"]()
    result = whyformer.compare(model, inputs, ["rollout"], [Token(3, 7), Token(3, 8), Token(5, 7)]).explanations
    assert torch.equal(result[0].scores, result[1].scores)
    assert [e.target_names for e in result] == [["7 at position 3"] * 2, ["8 at position 3"] * 2, ["7 at position 5"] * 2]
    for e, position in zip(result, (3, 3, 5), strict=True):
        assert torch.equal(e.scores, whyformer.explain(model, inputs, "rollout", Token(position, 7)).scores)
    assert not torch.allclose(result[0].scores, result[2].scores)


# -- several inputs --------------------------------------------------------------------------------------------------
# model, target -> input: the module that its tokens enter (None: the input itself)
PLACES: list[tuple[str, Any, dict[str, str | None]]] = [
    ("t5", Token(2, 7), {"input_ids": "encoder.block.0", "decoder_input_ids": "decoder.block.0"}),
    ("bart", Token(3, 7), {"input_ids": "model.encoder.layers.0", "decoder_input_ids": "model.decoder.layers.0"}),
    ("bart", Span(2, 4), {"input_ids": "model.encoder.layers.0", "decoder_input_ids": "model.decoder.layers.0"}),
    ("clip", Similarity(), {"pixel_values": None, "input_ids": "text_model.encoder.layers.0"}),
    ("siglip", Similarity(), {"pixel_values": None, "input_ids": "text_model.encoder.layers.0"}),
]


@pytest.mark.parametrize(("name", "target", "places"), PLACES, ids=case_id)
def test_scores_of_every_input_equal_autograd(name: str, target: Any, places: dict[str, str | None]) -> None:
    model, inputs = MODELS[name]()
    arguments, leaves, handles = dict(inputs), {}, []

    def entering(source: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first = args[0] if args else kwargs["hidden_states"]
            leaves[source] = first.detach().requires_grad_()
            return ((leaves[source], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaves[source]})

        return enter

    for source, path in places.items():
        if path is None:
            leaves[source] = arguments[source] = arguments[source].clone().requires_grad_()
        else:
            handles.append(model.get_submodule(path).register_forward_pre_hook(entering(source), with_kwargs=True))
    # the inputs are independent, so each is a leaf
    value = by_hand(model(**arguments), arguments, target)
    for handle in handles:
        handle.remove()
    flows = dict(zip(leaves, torch.autograd.grad(value.sum(), list(leaves.values())), strict=True))
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert e.inputs == tuple(places)
    for source, flow in flows.items():
        expected = (leaves[source].detach() * flow).sum(1 if places[source] is None else -1)
        if source == "input_ids" and "attention_mask" in inputs:
            expected = expected * inputs["attention_mask"]
        assert expected.abs().amax() > 0
        torch.testing.assert_close(e.part(source).scores, expected, rtol=1e-7, atol=1e-10)
    total = sum((leaves[s].detach() * f).flatten(1).sum(1) for s, f in flows.items())
    torch.testing.assert_close(torch.tensor(e.diagnostics["conservation"]["sum"], dtype=torch.float64), total)


@pytest.mark.parametrize("method", ["rollout", "gae", "gradcam", "raw_attention", "partial_lrp"])
def test_hidden_states_collected_by_hooks_are_recorded(method: str) -> None:
    """The head of a depth estimator reads hidden states that the hooks of transformers collected."""
    model, inputs = MODELS["depth"]()
    e = whyformer.explain(model, inputs, method, Pixel(31, 20))
    assert (e.level, e.grid) == ("patch", (4, 4))
    assert e.scores.abs().sum(1).min() > 0


class BoxDetector(nn.Module):
    """Outputs like those of torchvision detectors: one mapping per image, whose tensors have any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = build("hf_vit")[0]

    def forward(self, pixel_values: Tensor) -> list[dict[str, Tensor]]:
        logits = self.classifier(pixel_values).logits
        return [{"boxes": row.expand(3, -1), "scores": row.sigmoid()} for row in logits]


def test_function_target_of_nested_output() -> None:
    model, x = BoxDetector().eval(), build("hf_vit")[1]

    def score(output: Any) -> Tensor:
        return torch.stack([detection["scores"][2] for detection in output])

    for method in ("input_x_gradient", "transformer_attribution", "occlusion"):
        e = whyformer.explain(model, x, method, score)
        for i in range(2):
            torch.testing.assert_close(whyformer.explain(model, x[i : i + 1], method, score).scores[0], e.scores[i], rtol=1e-6, atol=1e-9)
    for target in (Token(1, 2), Query(1, 2), Pixel(1, 2, 0), Span(1, 2), Similarity()):
        with pytest.raises(InputError, match="a function of the output"):
            whyformer.explain(model, x, "input_x_gradient", target)
    with pytest.raises(whyformer.errors.ModelError, match="without logits"):
        whyformer.explain(model, x, "input_x_gradient")


def test_only_the_text_of_the_target_class_has_scores() -> None:
    """Each image has two texts as classes."""
    model, inputs = MODELS["owl"]()
    for method in ("input_x_gradient", "gae", "lrp", "smoothgrad"):
        options: dict[str, Any] = {"samples": 2} if method == "smoothgrad" else {}
        both = whyformer.explain(model, inputs, method, Query(3, [1, 0]), **options)
        assert both.part("input_ids").scores.shape == (2, 6)
        for i, expected in enumerate((1, 0)):
            arguments = {"input_ids": inputs["input_ids"][2 * i : 2 * i + 2], "pixel_values": inputs["pixel_values"][i : i + 1]}
            single = whyformer.explain(model, arguments, method, Query(3, expected), **options)
            for name in both.inputs:
                torch.testing.assert_close(both.part(name).scores[i], single.part(name).scores[0], rtol=1e-6, atol=1e-9)
            assert single.part("input_ids").scores.abs().amax() > 0


@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad"])
def test_paths_and_noise_of_several_texts_per_image(method: str) -> None:
    """Copies of a sample hold its own texts at the same point of the path, so that scores add up, in a batch as alone."""
    model, inputs = MODELS["owl"]()
    settings = {"steps": 80} if method == "integrated_gradients" else {"samples": 5}
    inputs["attention_mask"] = torch.tensor([[1] * 6, [1] * 6, [1] * 4 + [0] * 2, [1] * 6])
    batch = whyformer.explain(model, inputs, method, Query(3, [1, 0]), **settings)
    for b, label in enumerate((1, 0)):
        sample = {n: t[b : b + 1] if n == "pixel_values" else t[2 * b : 2 * b + 2] for n, t in inputs.items()}
        single = whyformer.explain(model, sample, method, Query(3, label), **settings)
        for name in ("input_ids", "pixel_values"):
            assert torch.allclose(batch.part(name).scores[b], single.part(name).scores[0], rtol=1e-7, atol=1e-9)
    if method == "integrated_gradients":
        figures = batch.diagnostics["completeness"]
        assert all(error < 0.01 * abs(d) for error, d in zip(figures["error"], figures["difference"], strict=True))


def test_depth_lists_no_token_as_target() -> None:
    model, inputs = MODELS["depth"]()
    with pytest.raises(InputError, match="Pixel") as error:
        whyformer.explain(model, inputs, "input_x_gradient")
    assert "Token" not in str(error.value)


class WithFurtherKey(nn.Module):
    """Adds a key to the output of a model, which is a dataclass without such a field."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        output["doubled"] = 2 * output.logits
        return output


@pytest.mark.parametrize("target", [1, lambda logits: logits[:, 1]], ids=["class", "function"])
@pytest.mark.parametrize("method", ["input_x_gradient", "gae", "occlusion"])
def test_output_with_further_key(method: str, target: Any) -> None:
    model, inputs = bert("BertForSequenceClassification", num_labels=3)()
    e = whyformer.explain(WithFurtherKey(model), inputs, method, target)
    torch.testing.assert_close(e.scores, whyformer.explain(model, inputs, method, target).scores, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_depth_has_no_class_whatever_the_config_names(count: int) -> None:
    model, inputs = depth()
    plain = whyformer.explain(model, inputs, "input_x_gradient", Pixel(31, 20))
    model.config.id2label = {i: f"class {i}" for i in range(count)}
    e = whyformer.explain(model, inputs, "input_x_gradient", Pixel(31, 20))
    assert e.numeric and e.target_names == plain.target_names and torch.equal(e.scores, plain.scores)
    assert not any("class" in name for name in e.target_names or [])
    with pytest.raises(InputError, match="out of range"):
        whyformer.explain(model, inputs, "input_x_gradient", Pixel(31, 20, 1))


@dataclass(frozen=True)
class Heads:
    kind: Tensor
    place: Tensor


@dataclass(slots=True)
class HeadsInSlots:
    kind: Tensor
    place: Tensor


class HeadsAsAttributes:
    def __init__(self, kind: Tensor, place: Tensor) -> None:
        self.kind, self.place = kind, place


@pytest.mark.parametrize("made", [Heads, HeadsInSlots, HeadsAsAttributes, lambda *heads: {"inner": [Heads(*heads)]}])
def test_function_target_of_attributes(made: Callable[..., Any]) -> None:
    """An output may be a dataclass, frozen or with slots, or any other object with tensors as attributes."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = build("hf_vit")[0]

        def forward(self, pixel_values: Tensor) -> Any:
            logits = self.classifier(pixel_values).logits
            return made(logits, logits[:, :4] ** 2)

    model, x = TwoHeads().eval(), build("hf_vit")[1]
    e = whyformer.explain(model, x, "input_x_gradient", lambda o: (o["inner"][0] if isinstance(o, dict) else o).place[:, 2])
    expected = whyformer.explain(model.classifier, x, "input_x_gradient", lambda logits: logits[:, 2] ** 2)
    torch.testing.assert_close(e.scores, expected.scores, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("classifier", lambda output: output.logits[:, 1], "target=lambda logits: logits[:, 0]"),
        ("masked", lambda output: output.scores[:, 1, 2], "target=lambda output: output.logits[:, 0, 0]"),
    ],
)
def test_failing_function_target_raises_with_remedy(name: str, wrong: Any, right: str) -> None:
    model, inputs = MODELS[name]()
    with pytest.raises(InputError, match="AttributeError") as error:
        whyformer.explain(model, inputs, "input_x_gradient", wrong)
    assert right in str(error.value)


def test_failing_function_target_of_a_sound_is_no_fault_of_the_sound() -> None:
    class Loudness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(40, 3)

        def forward(self, wave: Tensor) -> Tensor:
            return self.head(wave)

    with pytest.raises(InputError, match="target function"):
        whyformer.explain(Loudness(), torch.randn(2, 40), "input_x_gradient", lambda output: output.logits[:, 1])


def test_error_of_a_probability_names_the_target_that_works() -> None:
    model, inputs = MODELS["discriminator"]()
    with pytest.raises(InputError, match=re.escape("Token(..., Probability(0, multi_label=True))")):
        whyformer.explain(model, inputs, "input_x_gradient", Token(1, 0, of="probability"))
    target = Token(1, targets.Probability(0, multi_label=True))
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    expected = model(**inputs).logits[:, 1].sigmoid().tolist()
    assert e.diagnostics["conservation"]["start"] == pytest.approx(expected)


def test_function_target_with_numbers_of_its_own_for_each_sample() -> None:
    """Copies of the samples, as in occlusion, are passed to the function in batches of the samples."""
    model, inputs = MODELS["classifier"]()
    e = whyformer.explain(model, inputs, "occlusion", lambda logits: logits[torch.arange(2), torch.tensor([1, 0])])
    torch.testing.assert_close(e.scores, whyformer.explain(model, inputs, "occlusion", [1, 0]).scores)
