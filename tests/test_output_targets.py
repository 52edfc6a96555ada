"""Targets over a model's raw output: what each reads, against gradients by hand; and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from whyformer import targets
from whyformer.errors import InputError
from whyformer.targets import Pixel, Query, Similarity, Span, Token
from zoo import VOCABULARY, build, pixels, randomise, rows, text

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PATCHES = {"image_size": [32, 32], "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}


def made(kind: str, config: Any) -> nn.Module:
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    return randomise(model).double()


def bert(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (made(kind, transformers.BertConfig(**{**SMALL, **options})), text())


def yolos() -> tuple[nn.Module, Any]:
    config = transformers.YolosConfig(**PATCHES, num_detection_tokens=4, num_labels=5)
    return made("YolosForObjectDetection", config), pixels().double()


def detr() -> tuple[nn.Module, Any]:
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, use_pretrained_backbone=False, backbone=None, d_model=24, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=4,
        num_labels=5, dropout=0.0,
    )  # fmt: skip
    return made("DetrForObjectDetection", config), {"pixel_values": pixels().double()}


def segformer() -> tuple[nn.Module, Any]:
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[12, 24], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 3], mlp_ratios=[2, 2], decoder_hidden_size=24, num_labels=5,
    )  # fmt: skip
    return made("SegformerForSemanticSegmentation", config), pixels().double()


def depth() -> tuple[nn.Module, Any]:
    backbone = {**PATCHES, "image_size": 32, "out_indices": [1, 2], "reshape_hidden_states": False, "apply_layernorm": False}
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(**backbone, mlp_ratio=2), reassemble_hidden_size=24, patch_size=8,
        neck_hidden_sizes=[8, 8], reassemble_factors=[2, 1], fusion_hidden_size=8, head_hidden_size=8,
    )  # fmt: skip
    return made("DepthAnythingForDepthEstimation", config), pixels().double()


def towers(kind: str) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        words = {k: v for k, v in SMALL.items() if "dropout" not in k} | {"projection_size": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        seen = {**PATCHES, "image_size": 32}
        ids = torch.randint(4, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(3))
        ids[:, -1] = 2
        config: Any
        if kind == "CLIPModel":
            config = transformers.CLIPConfig(text_config=words, vision_config=seen, projection_dim=16)
        else:
            config = transformers.SiglipConfig(text_config={**words, "max_position_embeddings": 6}, vision_config=seen)
        return made(kind, config), {"input_ids": ids, "pixel_values": pixels().double()}

    return build


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
    return made("BartForConditionalGeneration", config), {**inputs, "decoder_input_ids": inputs["input_ids"][:, :6].flip(1)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "masked": bert("BertForMaskedLM"),
    "words": bert("BertForTokenClassification", num_labels=5),
    "answers": bert("BertForQuestionAnswering"),
    "headless": bert("BertModel"),
    "two heads": bert("BertForPreTraining"),
    "discriminator": lambda: (made("ElectraForPreTraining", transformers.ElectraConfig(**SMALL, embedding_size=24)), text()),
    "yolos": yolos,
    "detr": detr,
    "segformer": segformer,
    "depth": depth,
    "clip": towers("CLIPModel"),
    "siglip": towers("SiglipModel"),
    "gpt2": lambda: build("gpt2_lm"),
    "t5": t5,
    "bart": bart,
}
LOGP = "log-probabilities"


def by_hand(output: Any, inputs: Any, target: Any) -> Tensor:
    """``[B]`` the same number written out; both samples have these positions."""
    match target:
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
    """Σ x ⊙ ∂f/∂x over the channels of the pixels, or over the width of what enters the first block."""
    fed = dict(inputs) if isinstance(inputs, dict) else {"pixel_values": inputs}
    kept: list[Tensor] = []
    if "pixel_values" in fed:
        fed["pixel_values"] = fed["pixel_values"].clone().requires_grad_()
        kept.append(fed["pixel_values"])
        value = by_hand(model(**fed), fed, target)
    else:
        core = getattr(model, "base_model", model)
        layers = core.encoder.layer if hasattr(core, "encoder") else core.h

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            kept.append(args[0].detach().requires_grad_())
            return (kept[0], *args[1:])

        handle = layers[0].register_forward_pre_hook(enter)
        value = by_hand(model(**fed), fed, target)
        handle.remove()
    (found,) = torch.autograd.grad(value.sum(), kept)
    return (kept[0].detach() * found).sum(1 if "pixel_values" in fed else -1)


def pooled(output: Any) -> Tensor:
    return output.pooler_output[:, 3].tanh()


CASES: list[tuple[str, Any]] = [
    ("masked", Token(5, 17)),
    ("words", Token(3, 2)),
    ("answers", Span(2, 5)),
    ("headless", pooled),
    ("headless", lambda output: output.last_hidden_state[:, 2, 1] * output.pooler_output[:, 0]),
    ("two heads", lambda output: output.seq_relationship_logits[:, 1]),
    ("yolos", Query(1, 3)),
    ("detr", Query(2, 4)),
    ("segformer", Pixel(4, 6, 2)),
    ("depth", Pixel(31, 20)),
    ("clip", Similarity()),
    ("siglip", Similarity()),
    ("gpt2", Token(4, 9)),
    ("gpt2", Span(2, 4)),
]


def named(case: Any) -> str | None:
    return case if isinstance(case, str) else type(case).__name__


@pytest.mark.parametrize(("name", "target"), CASES, ids=named)
def test_input_times_gradient_is_that_by_hand(name: str, target: Any) -> None:
    model, inputs = MODELS[name]()
    wanted = gradient_by_hand(model, inputs, target)
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert wanted.abs().amax() > 0
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    wanted = wanted if mask is None else wanted * mask
    torch.testing.assert_close(e.scores, wanted, rtol=1e-7, atol=1e-10)
    with torch.no_grad():
        said = by_hand(model(**inputs) if isinstance(inputs, dict) else model(inputs), inputs, target)
    read = e.logits[torch.arange(2), e.target]
    torch.testing.assert_close(read, said)
    torch.testing.assert_close(torch.tensor(e.diagnostics["conservation"]["start"], dtype=torch.float64), said)


FITTING = {
    "masked": "targets.Token(5, 17)",
    "words": "targets.Token(5, 17)",
    "answers": "targets.Span(3, 7)",
    "headless": "target=lambda output: output.last_hidden_state[:, 0, 0]",
    "two heads": "target=lambda output: output.prediction_logits[:, 0, 0]",
    "discriminator": "targets.Token(5, 0)",
    "yolos": "targets.Query(0, 3)",
    "detr": "targets.Query(0, 3)",
    "segformer": "targets.Pixel(4, 9, 2)",
    "depth": "targets.Pixel(4, 9)",
    "clip": "targets.Similarity()",
    "siglip": "targets.Similarity()",
}


@pytest.mark.parametrize("name", FITTING)
def test_an_output_that_is_no_row_of_logits_needs_a_target(name: str) -> None:
    model, inputs = MODELS[name]()
    for method in ("input_x_gradient", "occlusion"):
        with pytest.raises(InputError) as caught:
            whyformer.explain(model, inputs, method)
        assert FITTING[name] in str(caught.value)
        assert "\n" not in str(caught.value)
    if name not in ("clip", "siglip"):
        with pytest.raises(InputError, match="which number is meant"):
            whyformer.explain(model, inputs, "input_x_gradient", target=1)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart"])
def test_the_next_token_needs_none(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.no_grad():
        logits = model(**inputs).logits
    e = whyformer.explain(model, inputs, "input_x_gradient")
    last = [5, 5] if "decoder_input_ids" in inputs else [9, 6]
    torch.testing.assert_close(e.logits, logits[torch.arange(2), last])
    same = whyformer.explain(model, inputs, "input_x_gradient", Token(-1))
    torch.testing.assert_close(same.scores, e.scores)
    assert torch.equal(same.target, e.target)


@pytest.mark.parametrize("method", ["lrp", "transformer_attribution", "lrp_ah_ln", "gae", "rollout", "occlusion", "smoothgrad", "integrated_gradients"])
@pytest.mark.parametrize(("name", "target"), [("masked", Token([5, 2], [17, 8])), ("words", Token([1, -1], 2)), ("answers", Span([1, 2], [4, 2])),
                                              ("headless", pooled), ("gpt2", Token([3, -2], [5, 6])), ("yolos", Query([1, 3], [2, 0])),
                                              ("siglip", Similarity())], ids=named)  # fmt: skip
def test_a_batch_is_its_samples(name: str, target: Any, method: str) -> None:
    if name == "siglip" and method not in ("occlusion", "smoothgrad", "integrated_gradients", "lrp_ah_ln"):
        return  # several streams
    options: dict[str, Any] = {"smoothgrad": {"samples": 2}, "integrated_gradients": {"steps": 2}, "occlusion": {"fill_id": 1}}.get(method, {})
    model, inputs = MODELS[name]()
    if method == "occlusion" and (isinstance(inputs, Tensor) or "pixel_values" in inputs):
        options = {}
    both = whyformer.explain(model, inputs, method, target, **options)
    for i in range(2):
        own = targets.Resolver(target, None, None, 2).written()
        alone = rows(inputs, i, crop=name not in ("siglip",))
        one = whyformer.explain(model, alone, method, own[i] if own else target, **options)
        n = one.scores.shape[1]
        torch.testing.assert_close(both.scores[i, :n], one.scores[0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(both.logits[i], one.logits[0])
        assert one.target_names == both[i].target_names
