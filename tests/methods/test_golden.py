"""Parity with the authors' own code, to 1e-6 of each map's maximum (golden/README.md says what made the arrays)."""

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
# transformers' eager ViT takes its softmax in float32 whatever the model's precision
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


def _exact(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The weights are float64; a model built in float32 would round them on loading."""
    return model.to(dtype).eval()


@cache
def built(which: str, attention: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    make = {"hf": hf_vit, "timm": timm_vit, "bert": bert}[which]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _exact(make(attention), dtype)
    finally:
        torch.set_default_dtype(before)


def inputs(which: str, dtype: torch.dtype = torch.float64) -> Any:
    if which == "bert":
        return {name: golden("bert", name) for name in ("input_ids", "attention_mask")}
    return golden("vit", "inputs").to(dtype)


def limit(which: str, attention: str) -> float:
    return ROUNDED if (which, attention) == ("hf", "eager") else TOLERANCE[torch.float64]


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE[torch.float64]) -> None:
    wanted = wanted.reshape(got.shape)
    error = float((got.detach().double() - wanted).abs().max() / wanted.abs().max())
    assert error <= tolerance, f"differs by {error:.2e} of the maximum"


def min_max(maps: Tensor) -> Tensor:
    """Each sample scaled to 0 .. 1, as the reference does inside its Grad-CAM."""
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
# the reference's BERT code normalises the rows of TA, unlike its ViT code, and averages Grad-CAM's weights over padding too
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
    got = whyformer.explain(built(which, attention), inputs(which), method=method, target=classes, **settings)
    assert_close(got.logits, golden("vit", "logits_ours"), limit(which, attention))
    scores, wanted = got.scores, golden("vit", file)[:, target]
    if method == "gradcam_attention":
        scores, wanted = min_max(scores), wanted.flatten(1)
    assert_close(scores, wanted, limit(which, attention))


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("file", BERT)
def test_bert_with_padding(file: str, attention: str, target: int) -> None:
    """[CLS] is left out: the reference overwrites it (with 0 or the row's minimum). So is padding: it is not masked there."""
    method, settings = BERT[file]
    classes = golden("bert", "targets")[:, target].tolist()
    got = whyformer.explain(built("bert", attention), inputs("bert"), method=method, target=classes, **settings)
    assert_close(got.logits, golden("bert", "logits"))
    wanted = golden("bert", file)[:, target]
    wanted = wanted[:, 0] if file == "GAE_R" else wanted.reshape(2, -1)
    real = golden("bert", "attention_mask").bool()
    assert got.scores[~real].eq(0).all()
    if method == "gradcam_attention":
        # the reference's min–max runs over the whole matrix: compare what an affine map cannot change
        for b, keep in enumerate(real[:, 1:]):
            assert_close(min_max(got.scores[b, 1:][keep][None]), min_max(wanted[b, 1:][keep][None]))
        return
    assert_close((got.scores * real)[:, 1:], (wanted * real)[:, 1:])


def test_gae_keeps_the_class_token() -> None:
    """The one array whose [CLS] entry the reference leaves alone."""
    classes = golden("bert", "targets")[:, 0].tolist()
    got = whyformer.explain(built("bert", "sdpa"), inputs("bert"), method="gae", target=classes)
    assert_close(got.scores, golden("bert", "GAE_R")[:, 0, 0] * golden("bert", "attention_mask"))


@pytest.mark.parametrize("file", [f for f in VIT if f.startswith(("TA", "full", "partialLRP_orig", "GAE", "GradCAM"))])
@pytest.mark.parametrize("which", ["hf", "timm"])
def test_vit_in_single_precision(file: str, which: str) -> None:
    method, settings = VIT[file]
    classes = golden("vit", "targets")[:, 0].tolist()
    model = built(which, "sdpa", torch.float32)
    got = whyformer.explain(model, inputs(which, torch.float32), method=method, target=classes, **settings)
    assert got.scores.dtype == torch.float32
    scores, wanted = got.scores, golden("vit", file)[:, 0]
    if method == "gradcam_attention":
        scores, wanted = min_max(scores), wanted.flatten(1)
    assert_close(scores, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("file", [f for f in BERT if f.startswith(("TA", "full", "partialLRP_orig"))])
def test_bert_in_single_precision(file: str) -> None:
    method, settings = BERT[file]
    classes = golden("bert", "targets")[:, 0].tolist()
    got = whyformer.explain(built("bert", "sdpa", torch.float32), inputs("bert"), method=method, target=classes, **settings)
    real = golden("bert", "attention_mask").bool()
    wanted = golden("bert", file)[:, 0].reshape(2, -1)
    assert_close((got.scores * real)[:, 1:], (wanted * real)[:, 1:], TOLERANCE[torch.float32])


# -- inside -------------------------------------------------------------------------------------------------------
def maps(record: Record, block: int, target: list[int], composite: str | Composite) -> Tensor:
    """What arrives at the map of a block."""
    attention = record.attentions[block]
    arrived = {value.number: flow for value, flow in record.walk_back(attention.maps, target, composite).items()}
    return record.attention_map(attention, arrived.__getitem__)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("which", ["hf", "timm", "bert"])
def test_attention_gradient_and_relevance_of_every_block(which: str, attention: str, target: int) -> None:
    family = "bert" if which == "bert" else "vit"
    record, classes = whyformer.record(built(which, attention), inputs(which)), golden(family, "targets")[:, target].tolist()
    assert len(record.attentions) == 3
    for block, own in enumerate(record.attentions):
        assert_close(record.attention_map(own), golden(family, f"internal_attn_block{block}")[:, target], limit(which, attention))
        gradient, relevance = (maps(record, block, classes, rules) for rules in ("plain", "deep_taylor"))
        assert_close(gradient, golden(family, f"internal_attn_grad_block{block}")[:, target], limit(which, attention))
        assert_close(relevance, golden(family, f"internal_attn_cam_ours_block{block}")[:, target], limit(which, attention))


@pytest.mark.parametrize("which", ["hf", "timm"])
def test_attention_relevance_of_the_plain_rules(which: str) -> None:
    """``layers_lrp`` of the reference: separate denominators in linear layers, plain additions."""
    record, classes = whyformer.record(built(which, "sdpa"), inputs(which)), golden("vit", "targets")[:, 0].tolist()
    for block in range(3):
        assert_close(maps(record, block, classes, "lrp"), golden("vit", f"internal_attn_cam_orig_block{block}")[:, 0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_relevance_of_the_values(attention: str) -> None:
    record = whyformer.record(built("hf", attention), inputs("hf"))
    values: list[Value] = [record[name] for name in record.modules if name.endswith("v_proj")]
    flows = record.walk_back(values, golden("vit", "targets")[:, 0].tolist(), "deep_taylor")
    assert len(flows) == 3
    for block, value in enumerate(sorted(values, key=lambda v: v.number)):
        wanted = golden("vit", f"internal_v_cam_ours_block{block}")[:, 0].flatten(0, 1).transpose(1, 2)  # [B, N, H, d]
        assert_close(flows[value], wanted.flatten(2), limit("hf", attention))


@pytest.mark.parametrize(("name", "composite"), [("ours", "deep_taylor"), ("orig", "lrp")])
def test_full_relevance_of_every_embedding_value(name: str, composite: str) -> None:
    """Before the sum over the width and before the reference sets [CLS] to 0."""
    record = whyformer.record(built("bert", "sdpa"), inputs("bert"))
    entry = record.value(record.blocks[0].entry)
    flow = record.relevance(entry, golden("bert", "targets")[:, 0].tolist(), composite)
    real = golden("bert", "attention_mask")[..., None]
    assert_close(flow * real, golden("bert", f"fullLRP_{name}_hidden")[:, 0, 0] * real)
