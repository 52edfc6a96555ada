"""Models of other packages are explained, or refused with a WhyformerError whose remedies work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whyformer import explain
from whyformer.errors import WhyformerError

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "dim_head": 8, "mlp_dim": 32}  # fmt: skip
LAYERS = {"dim": 24, "depth": 2, "heads": 3, "attn_dim_head": 8}
METHODS = ["auto", "input_x_gradient", "attnlrp", "lrp", "lrp_ah_ln", "libragrad", "transformer_attribution", "gae", "rollout",
           "gradcam", "occlusion", "partial_lrp"]  # fmt: skip
# class attention has no map over all tokens; occlusion of text needs a fill token
EXPLAINED = {"cait": ["auto", "input_x_gradient", "attnlrp", "lrp", "lrp_ah_ln", "gradcam", "occlusion"]}


def vit_pytorch_model(module_name: str, name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip(f"vit_pytorch.{module_name}")
    return getattr(module, name)(**SIZES, **options), torch.randn(2, 3, 32, 32)


def x_transformer(kind: str, **options: Any) -> tuple[nn.Module, Tensor]:
    x = pytest.importorskip("x_transformers")
    layers = getattr(x, kind)(**LAYERS, **options)
    return x.TransformerWrapper(num_tokens=40, max_seq_len=32, attn_layers=layers), torch.randint(4, 40, (2, 8))


def x_transformer_vit() -> tuple[nn.Module, Tensor]:
    x = pytest.importorskip("x_transformers")
    layers = x.Encoder(**LAYERS)
    return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers), torch.randn(
        2, 3, 32, 32
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "vit": lambda: vit_pytorch_model("vit", "ViT"),
    "simple vit": lambda: vit_pytorch_model("simple_vit", "SimpleViT"),
    "deepvit": lambda: vit_pytorch_model("deepvit", "DeepViT"),
    "cait": lambda: vit_pytorch_model("cait", "CaiT", cls_depth=1),
    "decoder": lambda: x_transformer("Decoder"),
    "rotary decoder": lambda: x_transformer("Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x vit": x_transformer_vit,
}


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_model_is_explained_or_refused_with_applicable_methods(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    message = ""
    try:
        assert bool(explain(model, inputs, method, 1).scores.isfinite().all())
    except WhyformerError as error:
        message = str(error)
    if message:
        assert method not in EXPLAINED.get(name, [m for m in METHODS if m != "occlusion"])
        for other in filter(None, message.partition("Methods that apply: ")[2].split(", ")):
            explain(model, inputs, other, 1)
