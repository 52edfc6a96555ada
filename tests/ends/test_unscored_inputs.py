"""An input that the prediction depends on gets scores or is named in the result; numeric tables get scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_end_functions import Block
from torch import Tensor, nn

from whyformer import explain
from whyformer.errors import InputError

SCORING = ["input_x_gradient", "lrp", "lrp_ah_ln", "attnlrp", "libragrad", "gae", "rollout", "integrated_gradients",
           "smoothgrad", "transformer_attribution"]  # fmt: skip


class TableTransformer(nn.Module):
    """An FT-Transformer with one token per number and per category."""

    def __init__(self, numbers: int = 4, sizes: tuple[int, ...] = (3, 5), width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(numbers, width)), nn.Parameter(torch.randn(numbers, width))
        self.table = nn.Embedding(sum(sizes), width)
        self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0))
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)
        self.double().eval().requires_grad_(False)

    def read(self, *tokens: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(tokens[0]), -1, -1), *tokens], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def numbers(self, x_num: Tensor) -> Tensor:
        return x_num[..., None] * self.weight + self.bias


class NumbersAndCategories(TableTransformer):
    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        return self.read(self.numbers(x_num), self.table(x_cat + self.offsets))


class NumbersOnly(TableTransformer):
    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.numbers(x))


class NumbersAsVectors(TableTransformer):
    """A model that takes the numbers as vectors of width 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x * self.weight + self.bias)


def rows(count: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_num = torch.randn(count, 4, dtype=torch.float64, generator=generator)
    return {"x_num": x_num, "x_cat": torch.tensor([[1, 4], [2, 0], [0, 3]])[:count]}


@pytest.mark.parametrize("method", SCORING)
def test_numbers_and_categories_have_scores(method: str) -> None:
    e = explain(NumbersAndCategories(), rows(), method, 1)
    parts = {e.input: e.scores, **{name: part.scores for name, part in e.parts.items()}}
    assert parts["x_num"].shape == (2, 4) and parts["x_cat"].shape == (2, 2)
    assert all(bool(scores.any()) for scores in parts.values()) and "unscored" not in e.diagnostics
    for i in range(2):  # equal to single samples
        alone = explain(NumbersAndCategories(), {n: t[i : i + 1] for n, t in rows().items()}, method, 1)
        torch.testing.assert_close(alone.parts["x_num"].scores[0], parts["x_num"][i])


@pytest.mark.parametrize("method", [*SCORING, "occlusion", "saliency", "auto", "gradcam"])
def test_numbers_have_the_scores_of_vectors(method: str) -> None:
    x = rows()["x_num"]
    actual, expected = explain(NumbersOnly(), x, method, 1), explain(NumbersAsVectors(), x[..., None], method, 1)
    assert actual.scores.shape == (2, 4)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)


def test_tokens_without_batch_axis_raise() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)

    class TokenClassifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    with pytest.raises(InputError, match="leading axis"):
        explain(TokenClassifier().eval(), torch.randn(5, 16), "input_x_gradient", 1)


def test_unscored_input_is_named_with_remedy() -> None:
    """Occlusion removes features of one input only."""
    model, inputs = NumbersAndCategories(), rows()
    e = explain(model, inputs, "occlusion", 1, baseline=0)
    assert e.diagnostics["unscored"] == ["x_num"]
    assert any("x_num" in warning and "input_x_gradient" in warning for warning in e.warnings)
    assert "unscored" not in explain(model, inputs, "input_x_gradient", 1).diagnostics  # the remedy of the warning


class DecisionTransformer(nn.Module):
    """A decision transformer with three tokens per step: return, state and action."""

    def __init__(self, width: int = 16, returns: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_return, self.of_state, self.of_action = (nn.Linear(n, width) for n in (1, 5, 2))
        self.time, self.returns = nn.Embedding(20, width), returns
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.head = nn.Linear(width, 3)
        self.eval()

    def forward(self, rtg: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor) -> Tensor:
        when = self.time(timesteps)
        first = self.of_return(rtg if self.returns else rtg * 0) + when
        x = torch.stack([first, self.of_state(states) + when, self.of_action(actions) + when], 2).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -2])


def steps() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(2, 6, n, generator=generator) for name, n in (("rtg", 1), ("states", 5), ("actions", 2))}
    return {**inputs, "timesteps": torch.arange(6).expand(2, -1)}


def test_occlusion_of_decision_transformer_names_unscored_inputs() -> None:
    e = explain(DecisionTransformer(), steps(), "occlusion", 1)
    scored = {e.input, *e.parts}
    assert set(e.diagnostics["unscored"]) == {"rtg", "states", "actions"} - scored
    whole = explain(DecisionTransformer(), steps(), "input_x_gradient", 1)
    assert {whole.input, *whole.parts} == {"rtg", "states", "actions"} and "unscored" not in whole.diagnostics


def test_unused_input_is_not_named() -> None:
    inputs = dict(sorted(steps().items(), reverse=True))  # states come first and are occluded
    assert explain(DecisionTransformer(), inputs, "occlusion", 1).diagnostics["unscored"] == ["rtg", "actions"]
    assert explain(DecisionTransformer(returns=False), inputs, "occlusion", 1).diagnostics["unscored"] == ["actions"]


class ClassConditioned(nn.Module):
    """An image model with a class label as second input, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.which = nn.Conv2d(3, 16, 4, 4), nn.Embedding(4, 16)
        self.blocks, self.head = nn.ModuleList([Block(16, 2) for _ in range(2)]), nn.Linear(16, 3)
        self.eval()

    def forward(self, pixels: Tensor, y: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.which(y)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_condition_per_sample_is_named() -> None:
    e = explain(ClassConditioned(), {"pixels": torch.randn(2, 3, 16, 16), "y": torch.tensor([1, 2])}, "input_x_gradient", 1)
    assert e.diagnostics["unscored"] == ["y"] and any("wrap the model" in warning for warning in e.warnings)


class Prompted(nn.Module):
    """An image model with boxes as prompts, and a text model with a box for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.box, self.word = nn.Conv2d(3, 16, 4, 4), nn.Linear(4, 16), nn.Embedding(9, 16)
        self.blocks, self.head = nn.ModuleList([Block(16, 2) for _ in range(2)]), nn.Linear(16, 3)
        self.eval()

    def forward(self, pixels: Tensor | None = None, boxes: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            x = self.word(ids) + self.box(boxes)
        else:
            x = torch.cat([self.patches(pixels).flatten(2).transpose(1, 2), self.box(boxes)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_prompts_are_named_and_boxes_of_tokens_are_not() -> None:
    pictures = {"pixels": torch.randn(2, 3, 16, 16), "boxes": torch.rand(2, 1, 4)}
    assert explain(Prompted(), pictures, "input_x_gradient", 1).diagnostics["unscored"] == ["boxes"]
    words = {"ids": torch.tensor([[1, 5, 2], [4, 3, 8]]), "boxes": torch.rand(2, 3, 4)}
    assert "unscored" not in explain(Prompted(), words, "input_x_gradient", 1).diagnostics
