"""Arguments without a batch axis are shared by all samples, all perturbed copies and single samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from zoo import randomise

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
FEW = {"integrated_gradients": {"steps": 4}, "smoothgrad": {"samples": 3}, "occlusion": {"baseline": 3}, "gradcam": {}, "input_x_gradient": {}}


class WeightedLogits(nn.Module):
    """Logits multiplied by an argument, which is shared by all samples or has one row per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.model = randomise(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=4, pad_token_id=0)))

    def forward(self, input_ids: Tensor, w: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.model(input_ids=input_ids, position_ids=position_ids).logits * w


def ids(count: int) -> Tensor:
    return torch.randint(4, 50, (count, 7), generator=torch.Generator().manual_seed(5))


W = torch.tensor([1.0, -0.5, 2.0, 0.3])
ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shared weights": lambda b: {"w": W},
    "weights of each sample": lambda b: {"w": W.roll(1) + torch.arange(b)[:, None]},
    "positions for all": lambda b: {"w": torch.tensor(2.0), "position_ids": torch.arange(6, -1, -1)[None]},
    "positions of each": lambda b: {"w": torch.ones(()), "position_ids": torch.stack([torch.arange(7).roll(i) for i in range(b)])},
    "both": lambda b: {"w": W, "position_ids": torch.arange(7)[None] + 2},
}


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("method", FEW)
@pytest.mark.part(times=4)
def test_batch_equals_single_samples(method: str, given: str, batch: int) -> None:
    model, rows, others = WeightedLogits().double().eval(), ids(batch), ARGUMENTS[given](batch)
    e = whyformer.explain(model, {"input_ids": rows, **others}, method, 1, **FEW[method])
    for i in range(batch):
        row = {n: v[i : i + 1] if v.dim() == 2 and len(v) == batch else v for n, v in others.items()}
        alone = whyformer.explain(model, {"input_ids": rows[i : i + 1], **row}, method, 1, **FEW[method])
        assert torch.allclose(e.scores[i], alone.scores[0], rtol=1e-6, atol=1e-9 * float(alone.scores.abs().max()))
        assert torch.allclose(e.logits[i], alone.logits[0])


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_shared_argument_by_position_equals_by_name(batch: int) -> None:
    model, rows = WeightedLogits().double().eval(), ids(batch)
    e = whyformer.explain(model, (rows, W), "integrated_gradients", 1, steps=4)
    named = whyformer.explain(model, {"input_ids": rows, "w": W}, "integrated_gradients", 1, steps=4)
    assert torch.equal(e.scores, named.scores)


def test_shared_position_ids_of_bert() -> None:
    model = randomise(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=4, pad_token_id=0))).double()
    both = whyformer.explain(model, {"input_ids": ids(2), "position_ids": torch.arange(7)[None]}, "integrated_gradients", 1, steps=4)
    plain = whyformer.explain(model, {"input_ids": ids(2)}, "integrated_gradients", 1, steps=4)
    assert torch.allclose(both.scores, plain.scores)


class BiasedLogits(WeightedLogits):
    """Logits plus a function of a matrix that all samples share."""

    def forward(self, input_ids: Tensor, bias: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.model(input_ids=input_ids).logits + bias.diagonal() * bias.sum()


@pytest.mark.parametrize("method", ["input_x_gradient", "integrated_gradients"])
def test_shared_square_matrix_is_no_table_of_the_samples(method: str) -> None:
    model = BiasedLogits().double().eval()
    bias = torch.rand(4, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    e = whyformer.explain(model, {"input_ids": ids(4), "bias": bias}, method, 1)
    assert e.inputs == ("input_ids",)
    assert e.diagnostics["unscored"] == ["bias"]
