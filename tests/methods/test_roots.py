"""Where relevance of several inputs ends: what enters the first block, in rows that each input has to itself."""

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


class Reads(nn.Module):
    """Words and the patches of a picture, put together in one of several ways, in one block."""

    def __init__(self, together: str) -> None:
        super().__init__()
        self.together = together
        self.words, self.patch = nn.Embedding(20, WIDTH), nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.LayerNorm(WIDTH, eps=1.0)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0, layer_norm_eps=1.0)
        self.head = nn.Linear(WIDTH, 3)
        self.double().eval()

    def parts(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(input_ids), self.patch(pixel_values).flatten(2).transpose(1, 2)

    def joined(self, words: Tensor, patches: Tensor) -> tuple[Tensor, slice]:
        """(what enters the block, where the words stand in it)"""
        if self.together == "words first":
            return self.first(torch.cat([words, patches], 1)), slice(0, WORDS)
        if self.together == "picture first":
            return self.first(torch.cat([patches, words], 1)), slice(PATCHES, None)
        return self.first(words + patches.mean(1, keepdim=True)), slice(0, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return self.head(self.block(self.joined(*self.parts(input_ids, pixel_values))[0])[:, 0])


def built(together: str) -> tuple[Reads, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids, pixels = torch.randint(1, 20, (2, WORDS)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return Reads(together), {"input_ids": ids, "pixel_values": pixels}


def by_autograd(model: Reads, inputs: dict[str, Tensor], target: int) -> tuple[Tensor, Tensor]:
    """x ⊙ ∂f/∂x of the words and of the pixels."""
    pixels = inputs["pixel_values"].clone().requires_grad_()
    words, patches = model.parts(inputs["input_ids"], pixels)
    if model.together == "added":  # the words have no rows to themselves: relevance ends where they are looked up
        x = words.detach().requires_grad_()
        entry = own = model.joined(x, patches)[0]
        own = x
    else:
        joined, where = model.joined(words.detach(), patches)
        own = joined[:, where].detach().requires_grad_()
        entry = torch.cat([joined[:, : where.start], own, joined[:, where.start + WORDS :]], 1)
    model.head(model.block(entry)[:, 0])[:, target].sum().backward()
    assert own.grad is not None and pixels.grad is not None
    return (own * own.grad).sum(-1).detach(), (pixels * pixels.grad).sum(1).detach()


@pytest.mark.parametrize("together", ["words first", "picture first", "added"])
def test_gradient_of_words_and_picture(together: str) -> None:
    model, inputs = built(together)
    words, pixels = by_autograd(model, inputs, 1)
    found = whyformer.explain(model, inputs, "input_x_gradient", target=1)
    by_name = {"pixel_values": found.scores, **{n: p.scores for n, p in found.parts.items()}}
    torch.testing.assert_close(by_name["input_ids"], words, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_name["pixel_values"], pixels, rtol=1e-9, atol=1e-12)


ANYWHERE = ["integrated_gradients", "smoothgrad", "lrp_ah_ln", "lrp"]
OF_MAPS = ["gae", "transformer_attribution", "rollout", "partial_lrp"]
CASES = [
    *((way, method) for way in ("words first", "picture first") for method in (*ANYWHERE, *OF_MAPS)),
    *(("added", method) for method in ANYWHERE),  # no row is the picture's, so there is no map over its patches
]


@pytest.mark.parametrize(("together", "method"), CASES)
def test_a_batch_gets_the_scores_of_its_samples(together: str, method: str) -> None:
    model, inputs = built(together)
    settings: dict[str, Any] = {"integrated_gradients": {"steps": 4}, "smoothgrad": {"samples": 3}}.get(method, {})

    def scores(given: dict[str, Tensor]) -> dict[str, Tensor]:
        found = whyformer.explain(model, given, method, target=1, **settings)
        return {"main": found.scores, **{n: p.scores for n, p in found.parts.items()}}

    whole = scores(inputs)
    for i in range(2):
        for name, one in scores({n: t[i : i + 1] for n, t in inputs.items()}).items():
            torch.testing.assert_close(one, whole[name][i : i + 1], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("together", ["words first", "picture first", "added"])
def test_integrals_of_both_inputs_sum_to_the_difference(together: str) -> None:
    model, inputs = built(together)
    figure = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=200).diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("together", ["words first", "picture first"])
def test_rows_of_words_are_put_into_a_value_that_holds_others(together: str) -> None:
    model, inputs = built(together)
    task = open_model(model).prepare(inputs).task(target=1)
    whole = record_pass(model, task.fed(task.inputs))
    roots = find_roots(whole, task.scored_inputs)
    (number,) = roots.numbers["input_ids"]
    state = whole.tape[number]
    entry, where = model.joined(*model.parts(**inputs))
    torch.testing.assert_close(state, entry)
    torch.testing.assert_close(roots.arranged("input_ids", whole.tape.__getitem__), entry[:, where])
    doubled = roots.laid_out("input_ids", number, state, 2 * entry[:, where])
    entry[:, where] *= 2
    torch.testing.assert_close(doubled, entry)


class Pairs(nn.Module):
    """Two texts, put behind one another into one block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0, layer_norm_eps=1.0)
        self.double().eval()

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        return self.head(self.block(torch.cat([self.words(input_ids), self.words(other_ids)], 1)).mean(1))


@pytest.mark.parametrize("order", [lambda d: d, lambda d: dict(reversed(d.items()))], ids=["as it is", "reversed"])
def test_texts_that_end_in_one_value(order: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """On a path from zeros, both texts move; their integrals sum to what the whole text's integral sums to."""
    torch.manual_seed(0)
    model = Pairs()
    inputs = {"input_ids": torch.randint(1, 20, (2, 3)), "other_ids": torch.randint(1, 20, (2, 4))}
    found = whyformer.explain(model, order(inputs), "integrated_gradients", 1, steps=200)
    figure = found.diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], rel=1e-3, abs=1e-3)
    both = model.words(torch.cat(list(inputs.values()), 1)).detach().requires_grad_()
    model.head(model.block(both).mean(1))[:, 1].sum().backward()
    assert both.grad is not None
    wanted = (both * both.grad).sum(-1).detach()
    found = whyformer.explain(model, order(inputs), "input_x_gradient", 1)
    scores = {"": found.scores, **{n: p.scores for n, p in found.parts.items()}}
    assert sorted(s.shape[1] for s in scores.values()) == [3, 4]
    for one in scores.values():
        own = wanted[:, :3] if one.shape[1] == 3 else wanted[:, 3:]
        torch.testing.assert_close(one, own, rtol=1e-9, atol=1e-12)
