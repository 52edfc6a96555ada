"""Tiny seeded models that are not in the zoo, with inputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zoo

EOS = 3
EPSILON = 1e-12
QUERIES, CLASS = 5, 1
_TOWER = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}


def clip(attention: str = "sdpa") -> tuple[nn.Module, dict[str, Tensor]]:
    """CLIP with two images and two texts of unequal length."""
    text = {**_TOWER, "hidden_size": 24, "vocab_size": 50, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    vision = {**_TOWER, "hidden_size": 36, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = zoo.randomise(transformers.CLIPModel._from_config(config, attn_implementation=attention))
    words = zoo.text(first=1)
    for ids, length in zip(words["input_ids"], zoo.LENGTHS, strict=True):
        ids[length - 1] = EOS
    return model, {**words, "pixel_values": zoo.pixels()}


class QueryLogits(nn.Module):
    """Class logits of one query of a detector."""

    def __init__(self, model: nn.Module, query: int) -> None:
        super().__init__()
        self.model, self.query = model, query
        self.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).logits[:, self.query]


def detr(attention: str = "sdpa") -> tuple[nn.Module, Tensor]:
    """DETR with 4 × 4 positions; with this seed, a row of one image's queries has no positive gradient."""
    backbone: Any = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=24, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=QUERIES,
        num_labels=zoo.CLASSES, dropout=0.0,
    )  # fmt: skip
    model = transformers.DetrForObjectDetection(config)
    model.set_attn_implementation({"backbone_config": "eager", "": attention})
    return zoo.randomise(model, seed=1), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class PooledModel(nn.Module):
    """A linear model of the mean colours of an image in 4 × 4 cells."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(16 * channels, zoo.CLASSES, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(zoo.CLASSES, 16 * channels, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
        self.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(pixel_values, 4).flatten(1))


def photographs() -> Tensor:
    """``[6, 3, 224, 224]`` smooth seeded images in 0 .. 1, as in the published protocols."""
    coarse = torch.rand(6, 3, 7, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return nn.functional.interpolate(coarse, size=224, mode="bicubic").clamp(0, 1)


class FirstClasses(nn.Module):
    """Logits of the first classes of a text model."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, : self.count]


class AttentionOnly(nn.Module):
    """The classifier of Ali et al.: attention without scaling, no feed-forward layers, and a LayerNorm without weights.

    Modules are named as in their code, which loads these weights.
    """

    def __init__(self, blocks: int = 3, width: int = 24) -> None:
        super().__init__()
        self.embeds = nn.Embedding(zoo.VOCABULARY, width)
        self.attention_layers = nn.ModuleList(_AttentionOnlyBlock(width) for _ in range(blocks))
        self.pooler = nn.Module()
        self.pooler.dense = nn.Linear(width, width)
        self.classifier = nn.Linear(width, zoo.CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embeds(input_ids)
        for block in self.attention_layers:
            hidden = block(hidden)
        return self.classifier(self.pooler.dense(hidden[:, 0]).tanh())


class _AttentionOnlyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Module()
        self.output.dense = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (part(hidden).unflatten(-1, (zoo.HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        total = self.output.dense(mixed.transpose(1, 2).flatten(2)) + hidden
        return (total - total.mean(-1, keepdim=True)) / (total.std(-1, keepdim=True) + EPSILON)


def attention_only() -> tuple[nn.Module, dict[str, Tensor]]:
    """The classifier of Ali et al., and two sentences of ten tokens."""
    return zoo.randomise(AttentionOnly()), {"input_ids": torch.randint(4, zoo.VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(3))}
