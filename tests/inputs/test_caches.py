"""Inputs that begin with a cache of keys and values, or hold other outputs of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from whyformer.targets import Token

BEGUN = 4


def begun(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """The rest of texts whose first tokens are in a cache."""
    with torch.no_grad():
        cache = model(input_ids=ids[:, :BEGUN], use_cache=True).past_key_values
    return {"input_ids": ids[:, BEGUN:], "past_key_values": cache}


def cached_case() -> tuple[nn.Module, Tensor]:
    model, _ = zoo.build("llama_lm")
    return model, torch.randint(4, 40, (2, 9))


def products_by_autograd(model: nn.Module, inputs: dict[str, Any], token: int) -> Tensor:
    looked_up: list[Tensor] = []

    def look_up(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        looked_up.append(output.detach().requires_grad_())
        return looked_up[0]

    handle = model.get_input_embeddings().register_forward_hook(look_up)
    logits = model(**inputs).logits[:, -1, token]
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.sum(), looked_up[0])
    return (looked_up[0] * gradient).sum(-1).detach()


def test_cache_is_not_extended() -> None:
    """So a second explanation, and one by a method without a recorded pass, read the same text."""
    model, ids = cached_case()
    inputs, expected = begun(model, ids), products_by_autograd(model, begun(model, ids), 7)
    for _ in range(2):
        assert torch.allclose(whyformer.explain(model, inputs, "input_x_gradient", 7).scores, expected, atol=1e-9)
        assert inputs["past_key_values"].get_seq_length() == BEGUN
    drop = whyformer.explain(model, inputs, "occlusion", 7, baseline=5).scores[:, 0]
    changed = {**begun(model, ids), "input_ids": ids[:, BEGUN:].index_fill(1, torch.tensor([0]), 5)}
    with torch.no_grad():
        logits = [model(**some).logits[:, -1, 7] for some in (begun(model, ids), changed)]
    assert torch.allclose(drop, logits[0] - logits[1], atol=1e-9)
    assert inputs["past_key_values"].get_seq_length() == BEGUN


@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad", "occlusion", "gae"])
def test_batch_with_cache_equals_single_texts(method: str) -> None:
    model, ids = cached_case()
    settings = {"baseline": 5} if method == "occlusion" else {}
    batch = whyformer.explain(model, begun(model, ids), method, 7, **settings)
    single = [whyformer.explain(model, begun(model, ids[i : i + 1]), method, 7, **settings).scores for i in range(2)]
    assert torch.allclose(batch.scores, torch.cat(single), atol=1e-9)


@pytest.mark.parametrize("baseline", [None, "delete"])
def test_mask_of_cache_and_text_shows_padding(baseline: str | None) -> None:
    model, ids = cached_case()
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    method, settings = ("input_x_gradient", {}) if baseline is None else ("occlusion", {"baseline": baseline})
    batch = whyformer.explain(model, {**begun(model, ids), "attention_mask": mask}, method, 7, **settings)
    short = whyformer.explain(model, {**begun(model, ids[1:, :7]), "attention_mask": mask[1:, :7]}, method, 7, **settings)
    assert torch.allclose(batch.scores[1], nn.functional.pad(short.scores[0], (0, 2)), atol=1e-9)
    assert abs(float(batch.logit(7, 1)) - float(short.logit(7))) < 1e-9


def test_cache_is_named_as_unscored() -> None:
    model, ids = cached_case()
    e = whyformer.explain(model, begun(model, ids), "attnlrp", 7)
    assert e.diagnostics["unscored"] == ["past_key_values"]
    assert "whole text" in e.warnings[0]
    assert not whyformer.explain(model, {"input_ids": ids}, "attnlrp", 7).warnings


def test_outputs_of_encoder_are_named_and_repeated() -> None:
    model, inputs = zoo.build("t5")
    ids, decoder = inputs["input_ids"][:, :6], torch.randint(4, 40, (2, 3))
    with torch.no_grad():
        encoded = model.encoder(input_ids=ids)
    given = {"encoder_outputs": encoded, "decoder_input_ids": decoder}
    for method, settings in {"input_x_gradient": {}, "occlusion": {"baseline": 5}}.items():
        e = whyformer.explain(model, given, method, Token(-1, 7), **settings)
        assert e.diagnostics["unscored"] == ["encoder_outputs"]
    whole = whyformer.explain(model, {"input_ids": ids, "decoder_input_ids": decoder}, "integrated_gradients", Token(-1, 7))
    e = whyformer.explain(model, given, "integrated_gradients", Token(-1, 7))
    assert [abs(d) > 1e-3 for d in e.diagnostics["completeness"]["difference"]] == [True, True]
    assert torch.allclose(e.logits, whole.logits, atol=1e-9)


def test_padding_is_known_by_position() -> None:
    """A mask by position marks the same tokens as one by name."""
    model, inputs = zoo.build("encoder_mean")
    by_name = whyformer.explain(model, inputs, "grad_sam", 1).scores
    by_position = whyformer.explain(model, (inputs["input_ids"], inputs["attention_mask"]), "grad_sam", 1).scores
    assert torch.allclose(by_position, by_name, atol=1e-12)
