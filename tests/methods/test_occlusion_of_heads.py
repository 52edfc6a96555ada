"""Occlusion where tokens cannot simply go: a text whose end is read, a target at a token's number, a multiple choice."""

from __future__ import annotations

import torch
import transformers as hf

import whyformer
from streams import bart
from zoo import randomise

_TINY = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "pad_token_id": 1}


@torch.no_grad()
def test_the_end_of_a_text_stays() -> None:
    model, inputs = bart()
    e = whyformer.explain(model, inputs, "occlusion", [1, 3])
    clean = model(**inputs).logits[0, 1]
    for token in range(1, 5):
        kept = [i for i in range(6) if i != token]
        gone = model(**{n: v[:1, kept] for n, v in inputs.items()}).logits[0, 1]
        assert torch.isclose(e.scores[0, token], clean - gone)
    assert not bool(e.scores[0, 5].any())


@torch.no_grad()
def test_a_target_at_a_tokens_number_takes_the_id_that_the_config_knows() -> None:
    model = randomise(hf.BertForTokenClassification(hf.BertConfig(**_TINY, num_labels=3))).double()
    ids = torch.randint(4, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    e = whyformer.explain(model, {"input_ids": ids}, "occlusion", whyformer.targets.Token(2, 1))
    clean = model(input_ids=ids).logits[:, 2, 1]
    for token in range(6):
        gone = model(input_ids=ids.index_fill(1, torch.tensor([token]), 1)).logits[:, 2, 1]
        assert torch.allclose(e.scores[:, token], clean - gone)


@torch.no_grad()
def test_tokens_of_the_choice_that_is_explained() -> None:
    model = randomise(hf.BertForMultipleChoice(hf.BertConfig(**_TINY))).double()
    ids = torch.randint(4, 50, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    e = whyformer.explain(model, {"input_ids": ids}, "occlusion", [2, 0])
    clean = model(input_ids=ids).logits
    assert e.scores.shape == (2, 6)
    for sample, choice in enumerate([2, 0]):
        for token in range(6):
            other = ids.clone()
            other[sample, choice, token] = 1
            gone = model(input_ids=other).logits
            assert torch.isclose(e.scores[sample, token], (clean - gone)[sample, choice])
