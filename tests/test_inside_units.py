"""Relevance of values inside functions that a model writes as several calls, which the walk treats as one unit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import listed
from whyformer.errors import InputError
from whyformer.recording import Record, record
from whyformer.rules.multipliers import COMPOSITES


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    deviation = x - x.mean(-1, keepdim=True)
    return deviation / (deviation.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight * 0.5


def softmax(x: Tensor, weight: Tensor) -> Tensor:
    shifted = x * weight
    exponentials = (shifted - shifted.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def gelu(x: Tensor, weight: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.pow(3)))) * weight


def swish(x: Tensor, weight: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x)) + x * weight


FUNCTIONS = [layer_norm, rms_norm, softmax, gelu, swish]


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function
        self.weight = nn.Parameter(torch.rand(6) + 0.5)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x), self.weight)).sum(1)


def recorded(function: Callable[[Tensor, Tensor], Tensor]) -> Record:
    return record(Written(function), torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def inside(r: Record) -> list[int]:
    """The values that a unit of several calls computes and reads itself."""
    results = {n for unit in r.units for call in unit.calls for n in r.tape.calls[call].results if n not in unit.exits}
    return [n for n in sorted(results) if r.tape.floating(n)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradient_at_every_value_equals_the_difference_quotient(function: Any) -> None:
    r = recorded(function)
    assert inside(r)
    every = [n for n in range(len(r.tape)) if r.tape.floating(n)]
    step = 1e-5
    for value, gradient in r.walk_back(every, 1).items():
        direction = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(value.number))
        above, below = (r.replay({value: value.tensor + sign * step * direction}, 1)[:, 1].sum() for sign in (1, -1))
        torch.testing.assert_close((gradient * direction).sum(), (above - below) / (2 * step), rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(r.walk_back([value], 1)[value], gradient)


@pytest.mark.parametrize(("family", "scaled"), [("t5", "decoder"), ("umt5", "decoder"), ("longt5", "decoder")])
def test_gradient_at_the_output_of_a_decoder_that_is_scaled_equals_autograd(family: str, scaled: str) -> None:
    """The model scales the output of its last norm, so that the decoder's output lies inside a unit."""
    model, inputs = next(a for a in listed() if a.name == f"sequence to sequence/{family}").build()
    model.config.tie_word_embeddings = model.config.scale_decoder_outputs = True
    r, outputs = record(model, inputs), list[Tensor]()
    assert r[scaled].number in inside(r)
    handle = model.get_submodule(scaled).register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    logits = model(**inputs).logits
    handle.remove()
    (expected,) = torch.autograd.grad(logits[:, -1, 1].sum(), outputs)
    actual = r.walk_back([scaled], lambda logits: logits[:, 1])[r[scaled]]
    torch.testing.assert_close(actual, expected)
    for composite in ("attnlrp", "lrp"):
        assert r.relevance(scaled, 1, composite).any()


@pytest.mark.parametrize("composite", [c for c in (*COMPOSITES, "deep_taylor", "lrp") if c != "plain"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rules_answer_inside_a_unit_or_name_values_that_work(function: Any, composite: str) -> None:
    r = recorded(function)
    for n in inside(r):
        alone, refused = None, ""
        try:
            alone = r.relevance(n, 1, composite)
        except InputError as error:
            refused = str(error)
        if alone is None:
            before, after = map(int, re.findall(r"value (\d+), (?:the in|its out)put", refused))
            assert before < n < after and 'composite "plain"' in refused
            assert r.relevance(before, 1, composite).shape == r.value(before).shape
            assert r.relevance(after, 1, composite).any() and r.relevance(n, 1, "plain").any()
        else:
            others = [r.roots[0], *(u.exit for u in r.units), "first"]
            together = r.relevances([n, *others], 1, composite)
            torch.testing.assert_close(together[r.value(n)], alone)
            for value, relevance in r.relevances(others, 1, composite).items():
                torch.testing.assert_close(together[value], relevance)


def test_deviation_and_scale_of_a_norm_have_the_relevance_of_its_output() -> None:
    """With the deviation held constant, the norm is linear in x − mean x, and so is the scale after it."""
    for function in (layer_norm, rms_norm):
        r = recorded(function)
        (unit,) = (u for u in r.units if u.kind == "norm")
        expected = r.relevance(unit.exit, 1, "ln")
        wide = [n for n in inside(r) if r.value(n).shape == r.value(unit.exit).shape and r.tape.maker[n].name != "pow"]
        assert wide
        for n in wide:
            torch.testing.assert_close(r.relevance(n, 1, "ln"), expected)


@pytest.mark.parametrize("composite", ["lrp", "attnlrp"])
def test_weights_do_not_change_the_relevance_of_other_values(composite: str) -> None:
    r = recorded(gelu)
    weights = [n for n in r.tape.leaves if r.tape.floating(n) and n != r.roots[0].number]
    together = r.relevances([*weights, r.roots[0]], 1, composite)
    for value, relevance in together.items():
        torch.testing.assert_close(relevance, r.relevance(value, 1, composite))
