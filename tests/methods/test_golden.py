"""Parity with the authors' code, to 1e-6 of each map's maximum (golden/README.md describes the scripts that wrote the arrays)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.recording import Record, Value
from whyformer.tape.walking import Composite

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
# transformers' eager ViT computes its softmax in float32 for any dtype of the model
ROUNDED = 1e-3


@cache
def golden(family: str, name: str) -> Tensor:
    return torch.from_numpy(np.load(GOLDEN / family / f"{name}.npy"))


def weights(family: str, name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(GOLDEN / family / f"{name}.safetensors")


def config(family: str) -> dict[str, Any]:
    return json.loads((GOLDEN / family / "config.json").read_text())


def hf_vit(attention: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(**{k: v for k, v in config("vit").items() if k not in ("model_type", "transformers_version")})
    model = ViTForImageClassification._from_config(settings, attn_implementation=attention)
    model.load_state_dict(weights("vit", "hf"))
    return model


def timm_vit(attention: str) -> nn.Module:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=48, num_heads=3, num_classes=10
    )
    model.load_state_dict(weights("vit", "timm"))
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = attention == "sdpa"
    return model


def bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings = BertConfig(**{k: v for k, v in config("bert").items() if k not in ("model_type", "transformers_version")})
    model = BertForSequenceClassification._from_config(settings, attn_implementation=attention)
    # the buffers of position numbers are not saved by every version
    missing = model.load_state_dict(weights("bert", "hf"), strict=False)
    assert not missing.missing_keys
    return model


def _convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The weights are float64; a model built in float32 would round them on loading."""
    return model.to(dtype).eval()


@cache
def build_model(which: str, attention: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    make = {"hf": hf_vit, "timm": timm_vit, "bert": bert}[which]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _convert(make(attention), dtype)
    finally:
        torch.set_default_dtype(before)


def inputs(which: str, dtype: torch.dtype = torch.float64) -> Any:
    if which == "bert":
        return {name: golden("bert", name) for name in ("input_ids", "attention_mask")}
    return golden("vit", "inputs").to(dtype)


def limit(which: str, attention: str) -> float:
    return ROUNDED if (which, attention) == ("hf", "eager") else TOLERANCE[torch.float64]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE[torch.float64]) -> None:
    expected = expected.reshape(actual.shape)
    error = float((actual.detach().double() - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, f"differs by {error:.2e} of the maximum"


def min_max(maps: Tensor) -> Tensor:
    """Min–max scaling of each sample to 0 .. 1, as in the Grad-CAM of the reference."""
    low, high = maps.flatten(1).amin(1), maps.flatten(1).amax(1)
    return (maps.flatten(1) - low[:, None]) / (high - low)[:, None]


# file -> (method, settings); the defaults are the published baselines
VIT: dict[str, tuple[str, dict[str, Any]]] = {
    "TA_start0": ("transformer_attribution", {}),
    "TA_start1": ("transformer_attribution", {"start_layer": 1}),
    "LRProllout_start0": ("transformer_attribution", {"weighting": "none"}),
    "LRProllout_start1": ("transformer_attribution", {"weighting": "none", "start_layer": 1}),
    "partialLRP_ours_last_layer_ablation": ("transformer_attribution", {"block": -1}),
    "partialLRP_ours_second_layer_ablation": ("transformer_attribution", {"block": 1}),
    "partialLRP_ours_last_layer": ("transformer_attribution", {"block": -1, "weighting": "none"}),
    "partialLRP_ours_second_layer": ("transformer_attribution", {"block": 1, "weighting": "none"}),
    "attn_last_layer": ("raw_attention", {}),
    "attn_rollout_start0": ("rollout", {}),
    "attn_rollout_start1": ("rollout", {"start_layer": 1}),
    "GAE": ("gae", {}),
    "GradCAM_attn": ("gradcam_attention", {}),
    "partialLRP_orig_last_layer": ("partial_lrp", {}),
    "partialLRP_orig_second_layer": ("partial_lrp", {"block": 1}),
    "fullLRP_orig": ("lrp", {}),
    "fullLRP_ours": ("lrp", {"rule": "shared"}),
}
# unlike its ViT code, the reference's BERT code normalises the rows of TA; its Grad-CAM weights include padding
BERT: dict[str, tuple[str, dict[str, Any]]] = {
    "TA_start0": ("transformer_attribution", {"normalize_rows": True}),
    "TA_start1": ("transformer_attribution", {"normalize_rows": True, "start_layer": 1}),
    "TA_start2": ("transformer_attribution", {"normalize_rows": True, "start_layer": 2}),
    "attn_last_layer": ("raw_attention", {}),
    "attn_rollout_start0": ("rollout", {}),
    "attn_rollout_start1": ("rollout", {"start_layer": 1}),
    "GAE_R": ("gae", {}),
    "GradCAM_attn": ("gradcam_attention", {"count_padding": True}),
    "partialLRP_orig": ("partial_lrp", {}),
    "partialLRP_ours": ("partial_lrp", {"rule": "shared"}),
    "fullLRP_orig": ("lrp", {}),
    "fullLRP_ours": ("lrp", {"rule": "shared"}),
}


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("which", ["hf", "timm"])
@pytest.mark.parametrize("file", VIT)
def test_vit(file: str, which: str, attention: str, target: int) -> None:
    method, settings = VIT[file]
    classes = golden("vit", "targets")[:, target].tolist()
    explanation = whyformer.explain(build_model(which, attention), inputs(which), method=method, target=classes, **settings)
    assert_close(explanation.logits, golden("vit", "logits_ours"), limit(which, attention))
    scores, expected = explanation.scores, golden("vit", file)[:, target]
    if method == "gradcam_attention":
        scores, expected = min_max(scores), expected.flatten(1)
    assert_close(scores, expected, limit(which, attention))


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("file", BERT)
def test_bert_with_padding(file: str, attention: str, target: int) -> None:
    """Excludes [CLS], which the reference overwrites with 0 or the row's minimum, and padding, which it does not mask."""
    method, settings = BERT[file]
    classes = golden("bert", "targets")[:, target].tolist()
    explanation = whyformer.explain(build_model("bert", attention), inputs("bert"), method=method, target=classes, **settings)
    assert_close(explanation.logits, golden("bert", "logits"))
    expected = golden("bert", file)[:, target]
    expected = expected[:, 0] if file == "GAE_R" else expected.reshape(2, -1)
    real = golden("bert", "attention_mask").bool()
    assert explanation.scores[~real].eq(0).all()
    if method == "gradcam_attention":
        # the reference scales the whole matrix to 0 .. 1: compare after the same scaling of both
        for b, keep in enumerate(real[:, 1:]):
            assert_close(min_max(explanation.scores[b, 1:][keep][None]), min_max(expected[b, 1:][keep][None]))
        return
    assert_close((explanation.scores * real)[:, 1:], (expected * real)[:, 1:])


def test_gae_includes_class_token() -> None:
    """GAE_R is the only array in which the reference does not overwrite [CLS]."""
    classes = golden("bert", "targets")[:, 0].tolist()
    explanation = whyformer.explain(build_model("bert", "sdpa"), inputs("bert"), method="gae", target=classes)
    assert_close(explanation.scores, golden("bert", "GAE_R")[:, 0, 0] * golden("bert", "attention_mask"))


@pytest.mark.parametrize("file", [f for f in VIT if f.startswith(("TA", "full", "partialLRP_orig", "GAE", "GradCAM"))])
@pytest.mark.parametrize("which", ["hf", "timm"])
def test_vit_in_float32(file: str, which: str) -> None:
    method, settings = VIT[file]
    classes = golden("vit", "targets")[:, 0].tolist()
    model = build_model(which, "sdpa", torch.float32)
    explanation = whyformer.explain(model, inputs(which, torch.float32), method=method, target=classes, **settings)
    assert explanation.scores.dtype == torch.float32
    scores, expected = explanation.scores, golden("vit", file)[:, 0]
    if method == "gradcam_attention":
        scores, expected = min_max(scores), expected.flatten(1)
    assert_close(scores, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("file", [f for f in BERT if f.startswith(("TA", "full", "partialLRP_orig"))])
def test_bert_in_float32(file: str) -> None:
    method, settings = BERT[file]
    classes = golden("bert", "targets")[:, 0].tolist()
    explanation = whyformer.explain(build_model("bert", "sdpa", torch.float32), inputs("bert"), method=method, target=classes, **settings)
    real = golden("bert", "attention_mask").bool()
    expected = golden("bert", file)[:, 0].reshape(2, -1)
    assert_close((explanation.scores * real)[:, 1:], (expected * real)[:, 1:], TOLERANCE[torch.float32])


# -- inner values -------------------------------------------------------------------------------------------------
def maps(record: Record, block: int, target: list[int], composite: str | Composite) -> Tensor:
    """Gradient or relevance of the attention map of a block."""
    attention = record.attentions[block]
    flows = {value.number: flow for value, flow in record.walk_back(attention.maps, target, composite).items()}
    return record.attention_map(attention, flows.__getitem__)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("which", ["hf", "timm", "bert"])
def test_attention_gradient_and_relevance_of_each_block(which: str, attention: str, target: int) -> None:
    family = "bert" if which == "bert" else "vit"
    record, classes = whyformer.record(build_model(which, attention), inputs(which)), golden(family, "targets")[:, target].tolist()
    assert len(record.attentions) == 3
    for block, attention_of_block in enumerate(record.attentions):
        assert_close(record.attention_map(attention_of_block), golden(family, f"internal_attn_block{block}")[:, target], limit(which, attention))
        gradient, relevance = (maps(record, block, classes, rules) for rules in ("plain", "deep_taylor"))
        assert_close(gradient, golden(family, f"internal_attn_grad_block{block}")[:, target], limit(which, attention))
        assert_close(relevance, golden(family, f"internal_attn_cam_ours_block{block}")[:, target], limit(which, attention))


@pytest.mark.parametrize("which", ["hf", "timm"])
def test_attention_relevance_with_plain_rules(which: str) -> None:
    """Compared with ``layers_lrp`` of the reference: separate denominators in linear layers, plain additions."""
    record, classes = whyformer.record(build_model(which, "sdpa"), inputs(which)), golden("vit", "targets")[:, 0].tolist()
    for block in range(3):
        assert_close(maps(record, block, classes, "lrp"), golden("vit", f"internal_attn_cam_orig_block{block}")[:, 0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_relevance_of_values(attention: str) -> None:
    record = whyformer.record(build_model("hf", attention), inputs("hf"))
    values: list[Value] = [record[name] for name in record.modules if name.endswith("v_proj")]
    flows = record.walk_back(values, golden("vit", "targets")[:, 0].tolist(), "deep_taylor")
    assert len(flows) == 3
    for block, value in enumerate(sorted(values, key=lambda v: v.number)):
        expected = golden("vit", f"internal_v_cam_ours_block{block}")[:, 0].flatten(0, 1).transpose(1, 2)  # [B, N, H, d]
        assert_close(flows[value], expected.flatten(2), limit("hf", attention))


@pytest.mark.parametrize(("name", "composite"), [("ours", "deep_taylor"), ("orig", "lrp")])
def test_relevance_of_each_embedding_feature(name: str, composite: str) -> None:
    """Before the sum over features, and before the reference sets [CLS] to 0."""
    record = whyformer.record(build_model("bert", "sdpa"), inputs("bert"))
    entry = record.value(record.blocks[0].entry)
    flow = record.relevance(entry, golden("bert", "targets")[:, 0].tolist(), composite)
    real = golden("bert", "attention_mask")[..., None]
    assert_close(flow * real, golden("bert", f"fullLRP_{name}_hidden")[:, 0, 0] * real)
