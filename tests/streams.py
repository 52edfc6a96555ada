"""Small models of several inputs, and one that computes its heads in a loop."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor, nn

from zoo import HEADS, WIDTH, build, randomise

_TOWER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
Built = tuple[nn.Module, dict[str, Tensor]]


def bart(attention: str = "sdpa") -> Built:
    """A classifier whose decoder reads the same tokens, shifted right by a start token."""
    config = hf.BartConfig(
        vocab_size=50, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40, pad_token_id=1, eos_token_id=2, bos_token_id=0, num_labels=4,
    )  # fmt: skip
    ids = torch.tensor([[0, 5, 6, 7, 8, 2], [0, 9, 10, 2, 1, 1]])
    model = randomise(hf.BartForSequenceClassification._from_config(config, attn_implementation=attention))
    return model.double(), {"input_ids": ids, "attention_mask": (ids != 1).long()}


def t5() -> Built:
    model, inputs = build("t5")
    return model, {**inputs, "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])}


def llava() -> Built:
    """Image and text tokens in one sequence, at different positions in the two prompts."""
    vision = hf.CLIPVisionConfig(**_TOWER, image_size=16, patch_size=4)
    text = hf.LlamaConfig(**{**_TOWER, "num_attention_heads": 2}, num_key_value_heads=2, vocab_size=120)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=100, vision_feature_layer=-1)
    ids = torch.tensor([[1, 7, *[100] * 16, 8, 9, 5], [1, *[100] * 16, 8, 9, 5, 4]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    return randomise(hf.LlavaForConditionalGeneration(config)).double(), {"pixel_values": pixels, "input_ids": ids}


def vilt() -> Built:
    config = hf.ViltConfig(**_TOWER, vocab_size=50, image_size=16, patch_size=8, max_position_embeddings=20, num_labels=4, max_image_length=-1)
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 4, 2]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    return randomise(hf.ViltForQuestionAnswering(config)).double(), {"input_ids": ids, "pixel_values": pixels}


class Siamese(nn.Module):
    """One encoder applied to two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(3 * WIDTH, 4)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        u, v = (self.encoder(self.words(ids))[:, 0] for ids in (first, second))
        return self.head(torch.cat([u, v, (u - v).abs()], -1))


def siamese() -> Built:
    ids = torch.randint(4, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    return randomise(Siamese()).double(), {"first": ids[:, :5], "second": ids[:, 3:]}


class HeadByHead(nn.Module):
    """A layer that computes its heads in a loop if ``loop`` is true."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop, self.first, self.second = loop, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention
        if self.loop:
            mixed = torch.cat([attention(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h in range(HEADS)], 1)
        else:
            mixed = attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x)).tanh()


class Words(nn.Module):
    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(HeadByHead(loop) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])
