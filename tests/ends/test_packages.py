"""Models as they come from other packages: answered, or refused by an error of ours whose way out works."""

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
# class attention has no map over all tokens; words are left out by a token that stands for nothing
ANSWERED = {"cait": ["auto", "input_x_gradient", "attnlrp", "lrp", "lrp_ah_ln", "gradcam", "occlusion"]}


def of_vit(place: str, name: str, **more: Any) -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip(f"vit_pytorch.{place}")
    return getattr(module, name)(**SIZES, **more), torch.randn(2, 3, 32, 32)


def of_x(kind: str, **more: Any) -> tuple[nn.Module, Tensor]:
    x = pytest.importorskip("x_transformers")
    layers = getattr(x, kind)(**LAYERS, **more)
    return x.TransformerWrapper(num_tokens=40, max_seq_len=32, attn_layers=layers), torch.randint(4, 40, (2, 8))


def of_x_vit() -> tuple[nn.Module, Tensor]:
    x = pytest.importorskip("x_transformers")
    layers = x.Encoder(**LAYERS)
    return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers), torch.randn(
        2, 3, 32, 32
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "vit": lambda: of_vit("vit", "ViT"),
    "simple vit": lambda: of_vit("simple_vit", "SimpleViT"),
    "deepvit": lambda: of_vit("deepvit", "DeepViT"),
    "cait": lambda: of_vit("cait", "CaiT", cls_depth=1),
    "decoder": lambda: of_x("Decoder"),
    "rotary decoder": lambda: of_x("Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x vit": of_x_vit,
}


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_answered_or_refused_truly(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    said = ""
    try:
        assert bool(explain(model, inputs, method, 1).scores.isfinite().all())
    except WhyformerError as error:
        said = str(error)
    if said:
        assert method not in ANSWERED.get(name, [m for m in METHODS if m != "occlusion"])
        for other in filter(None, said.partition("Methods that apply: ")[2].split(", ")):
            explain(model, inputs, other, 1)
