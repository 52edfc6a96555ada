"""The noise of SmoothGrad depends on the real tokens of a sample, not on the position of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from zoo import HEADS, VOCABULARY, WIDTH, randomise

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48, "pad_token_id": 0}
SETTINGS: dict[str, Any] = {"samples": 3, "noise": 0.3, "batch_size": 4}


def xlnet() -> nn.Module:
    config = hf.XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS, d_inner=48, pad_token_id=0)
    return randomise(hf.XLNetForSequenceClassification(config)).double()


def llama() -> nn.Module:
    return randomise(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=HEADS))).double()


def bert() -> nn.Module:
    return randomise(hf.BertForSequenceClassification(hf.BertConfig(**SIZES))).double()


def roformer() -> nn.Module:
    return randomise(hf.RoFormerForSequenceClassification(hf.RoFormerConfig(**SIZES, embedding_size=WIDTH))).double()


CASES = [(xlnet, "left"), (llama, "left"), (llama, "right"), (bert, "right"), (roformer, "right")]


def pad_batch(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    def pad(sequences: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)

    return {"input_ids": pad(rows), "attention_mask": pad([torch.ones_like(row) for row in rows])}


@pytest.mark.parametrize("lengths", [(7, 4), (3, 9, 5), (6, 6)], ids=str)
@pytest.mark.parametrize(("build", "side"), CASES)
def test_padding_does_not_change_smoothgrad_scores(build: Any, side: str, lengths: tuple[int, ...]) -> None:
    model, draws = build(), torch.Generator().manual_seed(1)
    rows = [torch.randint(4, VOCABULARY, (n,), generator=draws) for n in lengths]
    e = whyformer.explain(model, pad_batch(rows, side), "smoothgrad", 1, **SETTINGS)
    for i, row in enumerate(rows):
        single = whyformer.explain(model, pad_batch([row], side), "smoothgrad", 1, **SETTINGS)
        scores = e.scores[i, -len(row) :] if side == "left" else e.scores[i, : len(row)]
        assert torch.allclose(scores, single.scores[0], rtol=1e-6, atol=1e-8 * float(single.scores.abs().max()))
        assert torch.isclose(scores.sum(), e.scores[i].sum())


def test_noise_of_multiple_choice_equals_noise_of_single_choice() -> None:
    model = randomise(hf.BertForMultipleChoice(hf.BertConfig(**SIZES))).double()
    rows = [torch.randint(4, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in (8, 5, 6)]
    inputs = {name: value[None] for name, value in pad_batch(rows, "right").items()}
    for choice, row in enumerate(rows):
        e = whyformer.explain(model, inputs, "smoothgrad", choice, **SETTINGS)
        choice_inputs = {"input_ids": row[None, None], "attention_mask": torch.ones_like(row)[None, None]}
        single = whyformer.explain(model, choice_inputs, "smoothgrad", 0, **SETTINGS)
        assert torch.allclose(e.scores[0, : len(row)], single.scores[0], rtol=1e-6, atol=1e-8)
