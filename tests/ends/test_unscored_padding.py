"""Padding has scores of 0; if the prediction depends on it, the result says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from architectures import listed
from whyformer import explain
from zoo import randomise

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
MASK = (IDS != 0).long()


class Encoder(nn.Module):
    """An encoder whose attention ignores padding, and a head."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.embed, self.head, self.pooling = nn.Embedding(20, 12, padding_idx=0), nn.Linear(12, 3), pooling
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def pool(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        real = attention_mask[..., None]
        pooled = {
            "first": lambda: x[:, 0], "last": lambda: x[:, -1], "mean": lambda: x.mean(1), "maximum": lambda: x.amax(1),
            "real mean": lambda: (x * real).sum(1) / real.sum(1), "zeroed": lambda: (x * real).mean(1),
            "real last": lambda: x[torch.arange(len(x)), attention_mask.sum(1) - 1],
        }  # fmt: skip
        return self.head(pooled[self.pooling]())


class OfIds(Encoder):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pool(self.embed(input_ids), attention_mask)


class OfVectors(Encoder):
    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pool(inputs_embeds, attention_mask)


def given(kind: type[Encoder], rows: slice, columns: slice, dtype: torch.dtype) -> dict[str, Tensor]:
    vectors = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=dtype)
    first = {"input_ids": IDS} if kind is OfIds else {"inputs_embeds": vectors}
    return {name: value[rows, columns] for name, value in {**first, "attention_mask": MASK}.items()}


@pytest.mark.parametrize(("pooling", "reads"), [
    ("mean", True), ("last", True), ("maximum", True), ("first", False), ("real mean", False), ("zeroed", False), ("real last", False),
])  # fmt: skip
@pytest.mark.parametrize(("kind", "method", "dtype"), [
    (OfIds, "input_x_gradient", torch.float32), (OfIds, "occlusion", torch.float64), (OfIds, "gae", torch.float32),
    (OfVectors, "saliency", torch.float64), (OfVectors, "attnlrp", torch.float32),
])  # fmt: skip
def test_padding_is_named_if_the_prediction_depends_on_it(kind: Any, method: str, pooling: str, reads: bool, dtype: Any) -> None:
    model = randomise(kind(pooling)).to(dtype)
    settings = {"baseline": 1} if method == "occlusion" else {}
    e = explain(model, given(kind, slice(None), slice(None), dtype), method, 1, **settings)
    name = "padding of input_ids" if kind is OfIds else "padding of inputs_embeds"
    assert e.diagnostics.get("unscored", []) == ([name] if reads else [])
    assert any(name.removeprefix("padding of ") in w and "without padding" in w for w in e[1].warnings) == reads
    assert not e.scores[1, 3:].any()
    for i, count in enumerate((5, 3)):  # the way out of the warning
        alone = explain(model, given(kind, slice(i, i + 1), slice(count), dtype), method, 1, **settings)
        assert "unscored" not in alone.diagnostics
        if i == 0 or (not reads and pooling != "zeroed"):  # the prediction is the same
            torch.testing.assert_close(e.scores[i, :count], alone.scores[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("target", "reads"), [(lambda logits: logits[:, 0], True), (lambda logits: logits[:, 1], False)])
def test_another_target_may_not_depend_on_it(target: Any, reads: bool) -> None:
    class Two(Encoder):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
            return torch.stack([self.head(x.mean(1))[:, 0], self.head(x[:, 0])[:, 1]], 1)

    e = explain(randomise(Two("")), {"input_ids": IDS, "attention_mask": MASK}, "input_x_gradient", target)
    assert ("unscored" in e.diagnostics) == reads


FAMILIES = ["bert", "distilbert", "deberta-v2", "modernbert", "gpt2", "llama", "qwen2_moe", "bart", "t5", "mobilebert"]


@pytest.mark.parametrize("family", FAMILIES)
def test_of_known_models_only_those_that_read_padding_are_named(family: str) -> None:
    """MobileBERT joins each token with the one after it, so that it reads the first token of the padding."""
    model, inputs = next(a for a in listed() if a.name == f"sequence classification/{family}").build()
    inputs = {**inputs, "input_ids": inputs["input_ids"].clone(), "attention_mask": torch.ones_like(inputs["input_ids"])}
    inputs["input_ids"][1, -3:] = model.config.pad_token_id or 0
    inputs["attention_mask"][1, -3:] = 0
    e = explain(model, inputs, "input_x_gradient", 1)
    assert ("unscored" in e.diagnostics) == (family == "mobilebert")


def test_a_text_tower_that_reads_its_last_position() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    model = randomise(hf.SiglipTextModel(hf.SiglipTextConfig(vocab_size=20, max_position_embeddings=8, **sizes)))
    target = lambda output: output.pooler_output[:, 1]  # noqa: E731
    e = explain(model, {"input_ids": IDS, "attention_mask": MASK}, "input_x_gradient", target)
    assert e.diagnostics["unscored"] == ["padding of input_ids"]
    unmasked = explain(model, {"input_ids": IDS}, "input_x_gradient", target)
    assert "unscored" not in unmasked.diagnostics and unmasked.scores[1, 3:].all()
