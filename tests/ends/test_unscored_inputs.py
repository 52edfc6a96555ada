"""An input that the prediction depends on gets scores, or the result names it; tables of numbers get scores."""

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


class Table(nn.Module):
    """An FT-Transformer: one token for each number, one for each category."""

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


class Both(Table):
    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        return self.read(self.numbers(x_num), self.table(x_cat + self.offsets))


class Numbers(Table):
    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.numbers(x))


class Wide(Table):
    """The numbers as vectors, as the library takes them elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x * self.weight + self.bias)


def rows(count: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_num = torch.randn(count, 4, dtype=torch.float64, generator=generator)
    return {"x_num": x_num, "x_cat": torch.tensor([[1, 4], [2, 0], [0, 3]])[:count]}


@pytest.mark.parametrize("method", SCORING)
def test_numbers_beside_categories_get_scores(method: str) -> None:
    e = explain(Both(), rows(), method, 1)
    parts = {e.input: e.scores, **{name: part.scores for name, part in e.parts.items()}}
    assert parts["x_num"].shape == (2, 4) and parts["x_cat"].shape == (2, 2)
    assert all(bool(scores.any()) for scores in parts.values()) and "unscored" not in e.diagnostics
    for i in range(2):  # a batch is single runs
        alone = explain(Both(), {n: t[i : i + 1] for n, t in rows().items()}, method, 1)
        torch.testing.assert_close(alone.parts["x_num"].scores[0], parts["x_num"][i])


@pytest.mark.parametrize("method", [*SCORING, "occlusion", "saliency", "auto", "gradcam"])
def test_a_table_of_numbers(method: str) -> None:
    x = rows()["x_num"]
    found, wanted = explain(Numbers(), x, method, 1), explain(Wide(), x[..., None], method, 1)
    assert found.scores.shape == (2, 4)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-8, atol=1e-11)


def test_rows_that_are_no_samples_are_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    with pytest.raises(InputError, match="leading axis"):
        explain(Tokens().eval(), torch.randn(5, 16), "input_x_gradient", 1)


def test_an_input_without_scores_is_named() -> None:
    """Occlusion takes features of one input out."""
    model, inputs = Both(), rows()
    e = explain(model, inputs, "occlusion", 1, fill_id=0)
    assert e.diagnostics["unscored"] == ["x_num"]
    assert any("x_num" in said and "input_x_gradient" in said for said in e.warnings)
    assert "unscored" not in explain(model, inputs, "input_x_gradient", 1).diagnostics  # the way out


class Decision(nn.Module):
    """A decision transformer: returns, states and actions, three tokens for each step."""

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
    made = {name: torch.randn(2, 6, n, generator=generator) for name, n in (("rtg", 1), ("states", 5), ("actions", 2))}
    return {**made, "timesteps": torch.arange(6).expand(2, -1)}


def test_a_decision_transformer_under_occlusion() -> None:
    e = explain(Decision(), steps(), "occlusion", 1)
    scored = {e.input, *e.parts}
    assert set(e.diagnostics["unscored"]) == {"rtg", "states", "actions"} - scored
    whole = explain(Decision(), steps(), "input_x_gradient", 1)
    assert {whole.input, *whole.parts} == {"rtg", "states", "actions"} and "unscored" not in whole.diagnostics


def test_what_the_prediction_does_not_read_is_not_named() -> None:
    given = dict(sorted(steps().items(), reverse=True))  # states are taken out, being the first
    assert explain(Decision(), given, "occlusion", 1).diagnostics["unscored"] == ["rtg", "actions"]
    assert explain(Decision(returns=False), given, "occlusion", 1).diagnostics["unscored"] == ["actions"]


class Conditioned(nn.Module):
    """A class beside the picture, as of a diffusion transformer."""

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


def test_a_condition_of_each_sample_is_named() -> None:
    e = explain(Conditioned(), {"pixels": torch.randn(2, 3, 16, 16), "y": torch.tensor([1, 2])}, "input_x_gradient", 1)
    assert e.diagnostics["unscored"] == ["y"] and any("wrap the model" in said for said in e.warnings)
