"""Methods that walk over a tape: where the rows of a text lie does not matter, nor which of two models ran before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from whyformer.explaining import open_model
from whyformer.methods import METHODS
from whyformer.methods.gradients.input_gradients import explain_roots, multiply
from whyformer.methods.passes import record_pass
from whyformer.methods.registry import method
from whyformer.methods.roots import find_roots
from whyformer.methods.task import Scores, Task
from whyformer.tape.walking import Composite, Rule

WIDTH, HEADS = 8, 2
LAYOUTS = ["samples first", "tokens first", "one row a token", "tokens last"]


class Attends(nn.Module):
    """Two pre-norm blocks, whose state is kept in one of several layouts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.words = layout, nn.Embedding(20, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1.0) for _ in range(2))
        self.joint = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.double().eval()

    def laid_out(self, x: Tensor) -> Tensor:
        if self.layout == "one row a token":
            return x.flatten(0, 1)
        return x.transpose(*{"samples first": (0, 0), "tokens first": (0, 1), "tokens last": (1, 2)}[self.layout])

    def rows(self, x: Tensor, batch: int) -> Tensor:
        if self.layout == "one row a token":
            return x.unflatten(0, (batch, -1))
        return x.transpose(*{"samples first": (0, 0), "tokens first": (0, 1), "tokens last": (1, 2)}[self.layout])

    def forward(self, input_ids: Tensor) -> Tensor:
        x, batch = self.laid_out(self.words(input_ids) * 1.5), len(input_ids)
        for norm, joint, out in zip(self.norms, self.joint, self.out, strict=True):
            q, k, v = joint(norm(self.rows(x, batch))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = (q @ k.mT / 2).softmax(-1) @ v
            x = x + self.laid_out(out(mixed.transpose(1, 2).flatten(2)))
        return self.head(self.rows(x, batch)[:, 0])


def built(layout: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Attends(layout), {"input_ids": torch.randint(1, 20, (3, 5))}


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("saliency", {}), ("input_x_gradient", {"norm": "l1"}), ("attnlrp", {}), ("lrp_ah_ln", {"secant": True}),
    ("integrated_gradients", {"steps": 5}), ("integrated_gradients", {"steps": 5, "batch_size": 100}),
    ("smoothgrad", {"samples": 5}),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["tokens first", "tokens last"])
@pytest.mark.parametrize(("method", "settings"), RUNS, ids=str)
def test_a_state_in_another_layout_gets_the_same_scores(method: str, settings: dict[str, Any], layout: str) -> None:
    found = []
    for one in (LAYOUTS[0], layout):
        model, inputs = built(one)
        found.append(whyformer.explain(model, inputs, method, target=[0, 1, 2], **settings).scores)
        single = whyformer.explain(model, {"input_ids": inputs["input_ids"][1:2]}, method, target=1, **settings)
        torch.testing.assert_close(single.scores, found[-1][1:2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_enters_the_first_block_is_laid_out_by_sample_and_token(layout: str) -> None:
    model, inputs = built(layout)
    task = open_model(model).prepare(inputs).task()
    whole = record_pass(model, task.fed(task.inputs))
    roots = find_roots(whole, task.sources)
    (number,) = roots.numbers["input_ids"]
    state = whole.tape[number]
    wanted = model.words(inputs["input_ids"]) * 1.5
    assert torch.equal(state, model.laid_out(wanted))
    assert torch.equal(roots.arranged("input_ids", whole.tape.__getitem__), wanted)
    assert torch.equal(roots.laid_out("input_ids", number, state, 2 * wanted), 2 * state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_integral_sums_to_the_difference(layout: str) -> None:
    model, inputs = built(layout)
    figure = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=60).diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], abs=1e-6)


def test_a_composite_of_ones_own_is_not_taken_for_one_of_the_same_name() -> None:
    @method("an example", family="propagation", level="pixel or token", citation="an example")
    def without_branches(task: Task) -> Scores:
        """Norms hold everything constant."""
        return multiply(task, *explain_roots(task, Composite("AttnLRP", {"norm": Rule(hold=(0,))})))

    try:
        model, inputs = built(LAYOUTS[0])
        own = whyformer.explain(model, inputs, "without_branches", 1).scores
        assert not torch.allclose(own, whyformer.explain(model, inputs, "attnlrp", 1).scores)
    finally:
        METHODS.pop("without_branches")


class Remembers(nn.Module):
    """Adds a constant that is no parameter, or numbers that left torch on the way: the calls are the same."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves, self.constant, self.head = leaves, torch.ones(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.from_numpy(x.numpy() * 2) if self.leaves else self.constant
        return self.head(x + y)


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_is_not_trusted_because_another_model_made_the_same_calls(first: bool) -> None:
    x = torch.randn(2, 4)
    for leaves in (first, not first, first):
        model = Remembers(leaves).eval()
        if not leaves:
            assert whyformer.record(model, x).units
        else:
            with pytest.raises(ModelError, match="outside of torch"):
                whyformer.record(model, x)


class Joined(nn.Module):
    """Joins the vectors of each word and of those beside it, as MobileBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.dense = nn.Embedding(20, WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        before, after = nn.functional.pad(x[:, 1:], [0, 0, 0, 1]), nn.functional.pad(x[:, :-1], [0, 0, 1, 0])
        return self.dense(torch.cat([before, x, after], -1))


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln"])
def test_vectors_that_are_joined_with_those_beside_them_are_explained_word_by_word(method: str) -> None:
    torch.manual_seed(0)
    model, ids = built("samples first")
    model.words = Joined().double()
    found = whyformer.explain(model, ids, method, 1)
    assert found.scores.shape == (3, 5)
    assert found.scores.abs().min() > 0
