"""Occlusion of tokens for heads that read a fixed token: sequence classification at <eos>, token classification, multiple choice."""

from __future__ import annotations

import torch
import transformers as hf

import whyformer
from streams import bart
from zoo import randomise

_TINY = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "pad_token_id": 1}


@torch.no_grad()
def test_occlusion_keeps_eos_token() -> None:
    model, inputs = bart()
    e = whyformer.explain(model, inputs, "occlusion", [1, 3])
    clean = model(**inputs).logits[0, 1]
    for token in range(1, 5):
        remaining = [i for i in range(6) if i != token]
        occluded = model(**{n: v[:1, remaining] for n, v in inputs.items()}).logits[0, 1]
        assert torch.isclose(e.scores[0, token], clean - occluded)
    assert not bool(e.scores[0, 5].any())


@torch.no_grad()
def test_occlusion_of_token_target_uses_pad_token_of_config() -> None:
    model = randomise(hf.BertForTokenClassification(hf.BertConfig(**_TINY, num_labels=3))).double()
    ids = torch.randint(4, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    e = whyformer.explain(model, {"input_ids": ids}, "occlusion", whyformer.targets.Token(2, 1))
    clean = model(input_ids=ids).logits[:, 2, 1]
    for token in range(6):
        occluded = model(input_ids=ids.index_fill(1, torch.tensor([token]), 1)).logits[:, 2, 1]
        assert torch.allclose(e.scores[:, token], clean - occluded)


@torch.no_grad()
def test_occlusion_of_multiple_choice_scores_tokens_of_chosen_answer() -> None:
    model = randomise(hf.BertForMultipleChoice(hf.BertConfig(**_TINY))).double()
    ids = torch.randint(4, 50, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    e = whyformer.explain(model, {"input_ids": ids}, "occlusion", [2, 0])
    clean = model(input_ids=ids).logits
    assert e.scores.shape == (2, 6)
    for sample, choice in enumerate([2, 0]):
        for token in range(6):
            occluded_ids = ids.clone()
            occluded_ids[sample, choice, token] = 1
            occluded = model(input_ids=occluded_ids).logits
            assert torch.isclose(e.scores[sample, token], (clean - occluded)[sample, choice])
