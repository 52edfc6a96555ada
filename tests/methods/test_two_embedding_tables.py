"""Token ids that are looked up in two embedding tables, as in Gemma 3n: scores include the vectors of both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable
from zoo import randomise

WIDTH, IDS = 12, torch.tensor([[3, 5, 7, 9], [2, 4, 6, 8]])


class TwoTables(nn.Module):
    """A Transformer that adds vectors of a second table to its states, with or without attention among these."""

    def __init__(self, attend: bool) -> None:
        super().__init__()
        self.attend, self.first, self.second = attend, nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.encoder(self.first(ids))
        side = self.second(ids)
        side = self.encoder(side) if self.attend else side.tanh()
        return self.head((states + side)[:, -1])


def build_model(attend: bool) -> TwoTables:
    return randomise(TwoTables(attend)).double().eval()


def vectors_and_gradients(model: TwoTables, target: int) -> list[tuple[Tensor, Tensor]]:
    embeddings: list[Tensor] = []

    def make_leaf(module: nn.Module, args: object, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    handles = [table.register_forward_hook(make_leaf) for table in (model.first, model.second)]
    gradients = torch.autograd.grad(model(IDS)[:, target].sum(), embeddings)
    for handle in handles:
        handle.remove()
    return list(zip((vectors.detach() for vectors in embeddings), gradients, strict=True))


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("target", [0, 2])
def test_gradient_methods_sum_over_both_tables(attend: bool, target: int) -> None:
    model = build_model(attend)
    pairs = vectors_and_gradients(model, target)
    product = sum((x * g).sum(-1) for x, g in pairs)
    size = sum(g.square().sum(-1) for _, g in pairs).sqrt()
    e = whyformer.explain(model, IDS, method="input_x_gradient", target=target)
    torch.testing.assert_close(e.scores, product, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(whyformer.explain(model, IDS, method="saliency", target=target).scores, size, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attend", [False, True])
def test_integrated_gradients_of_two_tables_are_complete(attend: bool) -> None:
    e = whyformer.explain(build_model(attend), IDS, method="integrated_gradients", target=1, steps=200)
    figures = e.diagnostics["completeness"]
    torch.testing.assert_close(torch.tensor(figures["sum"]), torch.tensor(figures["difference"]), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", ["gae", "rollout", "transformer_attribution"])
def test_attention_over_second_table_is_refused(method: str) -> None:
    assert bool(whyformer.explain(build_model(False), IDS, method=method).scores.any())
    with pytest.raises(MethodNotApplicable, match="two tables"):
        whyformer.explain(build_model(True), IDS, method=method)
