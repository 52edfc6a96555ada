"""Relevance of several inputs ends at the first block's input, at the rows of each input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.passes import record_pass
from whyformer.methods.roots import find_roots

WIDTH, WORDS, PATCHES = 8, 5, 4


class TextImageModel(nn.Module):
    """One block over words and image patches, which are concatenated or added."""

    def __init__(self, fusion: str) -> None:
        super().__init__()
        self.fusion = fusion
        self.words, self.patch = nn.Embedding(20, WIDTH), nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.LayerNorm(WIDTH, eps=1.0)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0, layer_norm_eps=1.0)
        self.head = nn.Linear(WIDTH, 3)
        self.double().eval()

    def parts(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(input_ids), self.patch(pixel_values).flatten(2).transpose(1, 2)

    def joined(self, words: Tensor, patches: Tensor) -> tuple[Tensor, slice]:
        """(input of the block, slice of the words in it)"""
        if self.fusion == "words first":
            return self.first(torch.cat([words, patches], 1)), slice(0, WORDS)
        if self.fusion == "picture first":
            return self.first(torch.cat([patches, words], 1)), slice(PATCHES, None)
        return self.first(words + patches.mean(1, keepdim=True)), slice(0, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return self.head(self.block(self.joined(*self.parts(input_ids, pixel_values))[0])[:, 0])


def build_model(fusion: str) -> tuple[TextImageModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids, pixels = torch.randint(1, 20, (2, WORDS)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return TextImageModel(fusion), {"input_ids": ids, "pixel_values": pixels}


def gradient_times_input(model: TextImageModel, inputs: dict[str, Tensor], target: int) -> tuple[Tensor, Tensor]:
    """x ⊙ ∂f/∂x of the words and of the pixels."""
    pixels = inputs["pixel_values"].clone().requires_grad_()
    words, patches = model.parts(inputs["input_ids"], pixels)
    if model.fusion == "added":  # the words have no rows of their own: relevance ends at their embeddings
        x = words.detach().requires_grad_()
        entry = leaf = model.joined(x, patches)[0]
        leaf = x
    else:
        joined, where = model.joined(words.detach(), patches)
        leaf = joined[:, where].detach().requires_grad_()
        entry = torch.cat([joined[:, : where.start], leaf, joined[:, where.start + WORDS :]], 1)
    model.head(model.block(entry)[:, 0])[:, target].sum().backward()
    assert leaf.grad is not None and pixels.grad is not None
    return (leaf * leaf.grad).sum(-1).detach(), (pixels * pixels.grad).sum(1).detach()


@pytest.mark.parametrize("fusion", ["words first", "picture first", "added"])
def test_input_x_gradient_of_words_and_image(fusion: str) -> None:
    model, inputs = build_model(fusion)
    words, pixels = gradient_times_input(model, inputs, 1)
    explanation = whyformer.explain(model, inputs, "input_x_gradient", target=1)
    scores = {"pixel_values": explanation.scores, **{n: p.scores for n, p in explanation.parts.items()}}
    torch.testing.assert_close(scores["input_ids"], words, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scores["pixel_values"], pixels, rtol=1e-9, atol=1e-12)


INPUT_METHODS = ["integrated_gradients", "smoothgrad", "lrp_ah_ln", "lrp"]
MAP_METHODS = ["gae", "transformer_attribution", "rollout", "partial_lrp"]
CASES = [
    *((variant, method) for variant in ("words first", "picture first") for method in (*INPUT_METHODS, *MAP_METHODS)),
    *(("added", method) for method in INPUT_METHODS),  # the image has no rows of its own, so there is no map over its patches
]


@pytest.mark.parametrize(("fusion", "method"), CASES)
def test_batch_equals_single_samples(fusion: str, method: str) -> None:
    model, inputs = build_model(fusion)
    settings: dict[str, Any] = {"integrated_gradients": {"steps": 4}, "smoothgrad": {"samples": 3}}.get(method, {})

    def scores(inputs_: dict[str, Tensor]) -> dict[str, Tensor]:
        explanation = whyformer.explain(model, inputs_, method, target=1, **settings)
        return {"main": explanation.scores, **{n: p.scores for n, p in explanation.parts.items()}}

    batch = scores(inputs)
    for i in range(2):
        for name, single in scores({n: t[i : i + 1] for n, t in inputs.items()}).items():
            torch.testing.assert_close(single, batch[name][i : i + 1], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("fusion", ["words first", "picture first", "added"])
def test_integrated_gradients_of_both_inputs_sum_to_difference(fusion: str) -> None:
    model, inputs = build_model(fusion)
    figure = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=200).diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("fusion", ["words first", "picture first"])
def test_word_rows_are_read_and_replaced_in_shared_value(fusion: str) -> None:
    model, inputs = build_model(fusion)
    task = open_model(model).prepare(inputs).task(target=1)
    recorded = record_pass(model, task.feed(task.inputs))
    roots = find_roots(recorded, task.scored_inputs)
    (number,) = roots.numbers["input_ids"]
    state = recorded.tape[number]
    entry, where = model.joined(*model.parts(**inputs))
    torch.testing.assert_close(state, entry)
    torch.testing.assert_close(roots.arranged("input_ids", recorded.tape.__getitem__), entry[:, where])
    doubled = roots.laid_out("input_ids", number, state, 2 * entry[:, where])
    entry[:, where] *= 2
    torch.testing.assert_close(doubled, entry)


class TextPairModel(nn.Module):
    """One block over two concatenated texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0, layer_norm_eps=1.0)
        self.double().eval()

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        return self.head(self.block(torch.cat([self.words(input_ids), self.words(other_ids)], 1)).mean(1))


@pytest.mark.parametrize("order", [lambda d: d, lambda d: dict(reversed(d.items()))], ids=["as it is", "reversed"])
def test_two_texts_in_one_value_have_separate_scores(order: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """On the path from zeros both texts change; their scores sum to the total difference."""
    torch.manual_seed(0)
    model = TextPairModel()
    inputs = {"input_ids": torch.randint(1, 20, (2, 3)), "other_ids": torch.randint(1, 20, (2, 4))}
    result = whyformer.explain(model, order(inputs), "integrated_gradients", 1, steps=200)
    figure = result.diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], rel=1e-3, abs=1e-3)
    embeddings = model.words(torch.cat(list(inputs.values()), 1)).detach().requires_grad_()
    model.head(model.block(embeddings).mean(1))[:, 1].sum().backward()
    assert embeddings.grad is not None
    expected = (embeddings * embeddings.grad).sum(-1).detach()
    result = whyformer.explain(model, order(inputs), "input_x_gradient", 1)
    scores = {"": result.scores, **{n: p.scores for n, p in result.parts.items()}}
    assert sorted(s.shape[1] for s in scores.values()) == [3, 4]
    for part in scores.values():
        expected_part = expected[:, :3] if part.shape[1] == 3 else expected[:, 3:]
        torch.testing.assert_close(part, expected_part, rtol=1e-9, atol=1e-12)
