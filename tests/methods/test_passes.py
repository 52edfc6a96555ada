"""Methods that walk over a tape do not depend on the layout of hidden states, nor on models that ran before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
import zoo
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
BERT = {"vocab_size": 20, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 16}
LAYOUTS = ["samples first", "tokens first", "one row a token", "tokens last"]


class LayoutModel(nn.Module):
    """Two pre-norm blocks whose hidden state has one of several layouts."""

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


def build_model(layout: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return LayoutModel(layout), {"input_ids": torch.randint(1, 20, (3, 5))}


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("saliency", {}), ("input_x_gradient", {"norm": "l1"}), ("attnlrp", {}), ("lrp_ah_ln", {"secant": True}),
    ("integrated_gradients", {"steps": 5}), ("integrated_gradients", {"steps": 5, "batch_size": 100}),
    ("smoothgrad", {"samples": 5}),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["tokens first", "tokens last"])
@pytest.mark.parametrize(("method", "settings"), RUNS, ids=str)
def test_layout_of_hidden_state_does_not_change_scores(method: str, settings: dict[str, Any], layout: str) -> None:
    results = []
    for state_layout in (LAYOUTS[0], layout):
        model, inputs = build_model(state_layout)
        results.append(whyformer.explain(model, inputs, method, target=[0, 1, 2], **settings).scores)
        single = whyformer.explain(model, {"input_ids": inputs["input_ids"][1:2]}, method, target=1, **settings)
        torch.testing.assert_close(single.scores, results[-1][1:2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_block_input_is_arranged_by_sample_and_token(layout: str) -> None:
    model, inputs = build_model(layout)
    task = open_model(model).prepare(inputs).task()
    recorded = record_pass(model, task.feed(task.inputs))
    roots = find_roots(recorded, task.sources)
    (number,) = roots.numbers["input_ids"]
    state = recorded.tape[number]
    expected = model.words(inputs["input_ids"]) * 1.5
    assert torch.equal(state, model.laid_out(expected))
    assert torch.equal(roots.arranged("input_ids", recorded.tape.__getitem__), expected)
    assert torch.equal(roots.laid_out("input_ids", number, state, 2 * expected), 2 * state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integrated_gradients_sum_to_difference(layout: str) -> None:
    model, inputs = build_model(layout)
    figure = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=60).diagnostics["completeness"]
    assert figure["sum"] == pytest.approx(figure["difference"], abs=1e-6)


@pytest.mark.parametrize(("method", "setting"), [("integrated_gradients", "steps"), ("smoothgrad", "samples")])
def test_each_chunk_of_points_is_one_pass_of_the_model(method: str, setting: str) -> None:
    """One more point in a chunk of its own costs one more pass, also if the model looks up tokens."""
    model = zoo.randomise(hf.BertForSequenceClassification(hf.BertConfig(**BERT)))
    counts = []
    for points in (4, 5, 6):
        runs: list[int] = []
        handle = model.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        whyformer.explain(model, torch.arange(4, 12)[None], method, 1, batch_size=1, **{setting: points})
        handle.remove()
        counts.append(len(runs))
    assert counts[1:] == [counts[0] + 1, counts[0] + 2]


def test_user_composite_with_built_in_name_uses_its_own_rules() -> None:
    @method("an example", family="propagation", level="pixel or token", citation="an example")
    def constant_norms(task: Task) -> Scores:
        """Example method that treats norms as constants."""
        return multiply(task, *explain_roots(task, Composite("AttnLRP", {"norm": Rule(constant=(0,))})))

    try:
        model, inputs = build_model(LAYOUTS[0])
        scores = whyformer.explain(model, inputs, "constant_norms", 1).scores
        assert not torch.allclose(scores, whyformer.explain(model, inputs, "attnlrp", 1).scores)
    finally:
        METHODS.pop("constant_norms")


class ConstantAdder(nn.Module):
    """Adds a constant tensor, or a tensor computed outside torch, with the same recorded calls."""

    def __init__(self, uses_numpy: bool) -> None:
        super().__init__()
        self.uses_numpy, self.constant, self.head = uses_numpy, torch.ones(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.from_numpy(x.numpy() * 2) if self.uses_numpy else self.constant
        return self.head(x + y)


@pytest.mark.parametrize("first", [True, False])
def test_recorded_pass_of_another_model_is_not_reused(first: bool) -> None:
    x = torch.randn(2, 4)
    for uses_numpy in (first, not first, first):
        model = ConstantAdder(uses_numpy).eval()
        if not uses_numpy:
            assert whyformer.record(model, x).units
        else:
            with pytest.raises(ModelError, match="outside of torch"):
                whyformer.record(model, x)


class NeighbourEmbedding(nn.Module):
    """Concatenates the vectors of each word and its neighbours, as in MobileBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.dense = nn.Embedding(20, WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        before, after = nn.functional.pad(x[:, 1:], [0, 0, 0, 1]), nn.functional.pad(x[:, :-1], [0, 0, 1, 0])
        return self.dense(torch.cat([before, x, after], -1))


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln"])
def test_concatenated_neighbour_embeddings_have_one_score_per_word(method: str) -> None:
    torch.manual_seed(0)
    model, ids = build_model("samples first")
    model.words = NeighbourEmbedding().double()
    result = whyformer.explain(model, ids, method, 1)
    assert result.scores.shape == (3, 5)
    assert result.scores.abs().min() > 0
