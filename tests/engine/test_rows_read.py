"""In a last block the layers' gradients are computed at the rows that the target reads, and are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import whyformer
from whyformer.engine.rows import LayerOfRows, layer_of_rows
from zoo import build

DOUBLE = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("reached", [[], [0], [31], [2, 3, 17], list(range(32))], ids=lambda r: str(len(r)))
@pytest.mark.parametrize(
    ("name", "bias", "shape"),
    [("linear", bias, shape) for bias in (True, False) for shape in ((32, 6), (1, 32, 6), (2, 16, 6), (2, 4, 4, 6))]
    + [("addmm", True, (32, 6))],
    ids=str,
)
def test_it_is_the_gradient_row_by_row(name: str, bias: bool, shape: tuple[int, ...], reached: list[int]) -> None:
    weight, x, flow = drawn(5, 6), drawn(*shape).requires_grad_(), torch.zeros(32, 5, dtype=DOUBLE)
    flow[reached] = drawn(len(reached), 5)
    args = (drawn(5), x, weight.T) if name == "addmm" else (x, weight, drawn(5) if bias else None)
    func = torch.addmm if name == "addmm" else functional.linear
    made = layer_of_rows(name, func, args, {})
    assert type(made.grad_fn).__name__ == "LayerOfRowsBackward"
    assert torch.equal(made, func(*args))
    (found,) = torch.autograd.grad(made, x, flow.reshape(made.shape), retain_graph=True)
    # g W, written out row by row
    wanted = torch.stack([sum(flow[i, o] * weight[o] for o in range(5)) for i in range(32)]).reshape(shape)
    assert (found - wanted).abs().max() <= 1e-14 * max(1, wanted.abs().max())
    assert torch.equal(torch.autograd.grad(made, x, flow.reshape(made.shape))[0], found)  # a second time too


def test_a_first_channel_that_nothing_reaches_hides_no_row() -> None:
    weight, x, flow = drawn(5, 6), drawn(32, 6).requires_grad_(), drawn(32, 5)
    flow[:, 0] = 0
    made = layer_of_rows("linear", functional.linear, (x, weight), {})
    assert torch.allclose(torch.autograd.grad(made, x, flow)[0], flow @ weight, rtol=1e-14)


def test_other_calls_are_left_alone() -> None:
    x, weight = drawn(32, 6).requires_grad_(), drawn(5, 6)
    for args in (
        (drawn(32, 6), weight),
        (x, weight.requires_grad_()),
        (x, drawn(6)),
        (drawn(4, 6).requires_grad_(), drawn(5, 6)),
    ):
        assert layer_of_rows("linear", functional.linear, args, {}) is NotImplemented
    assert layer_of_rows("matmul", torch.matmul, (x, drawn(6, 5)), {}) is NotImplemented


class Halting(nn.Module):
    """A block that writes to what its layer returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h += 1
        h.mul_(0.5)
        y: Tensor = self.down(functional.relu(h, inplace=True))
        y += x
        return y


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Halting(), Halting()]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x[:, -1])
        return logits


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp_ah_ln", "attnlrp"])
def test_what_a_layer_returned_may_be_changed_in_place(method: str) -> None:
    torch.manual_seed(0)
    model, x = Chain().double().eval(), drawn(2, 20, 8)
    found = whyformer.explain(model, x, method, target=1)
    assert torch.equal(found.logits, model(x).detach())
    free = x.clone().requires_grad_()
    if method == "input_x_gradient":
        (gradient,) = torch.autograd.grad(model(free)[:, 1].sum(), free)
        assert torch.allclose(found.scores, (x * gradient).sum(-1), rtol=1e-12)
    assert (found.scores[:, -1] != 0).all()
    assert (found.scores[:, :-1] == 0).all()  # no row sees another one


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.total += left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


def counted(work: Any) -> int:
    with Products() as products:
        work()
    return products.total


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "hf_vit"])
def test_fewer_products_for_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)

    def explained() -> whyformer.Explanation:
        return whyformer.explain(copy.deepcopy(model), inputs, "attnlrp", target=1, share=0.0)

    few, found = counted(explained), explained()
    monkeypatch.setattr("whyformer.engine.mode.layer_of_rows", lambda *_: NotImplemented)
    all_rows, wanted = counted(explained), explained()
    assert (found.scores - wanted.scores).abs().max() <= 1e-12 * wanted.scores.abs().max()
    assert few < all_rows


def test_where_all_rows_are_read_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Chain().double().eval(), drawn(2, 20, 8)
    model.forward = lambda x: model.head(model.blocks[1](model.blocks[0](x)).mean(1))  # type: ignore[method-assign]
    seen: list[int] = []
    plain = LayerOfRows.backward
    monkeypatch.setattr(LayerOfRows, "backward", staticmethod(lambda ctx, *f: seen.append(1) or plain(ctx, *f)))
    found = whyformer.explain(model, x, "input_x_gradient", target=1)
    free = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(free)[:, 1].sum(), free)
    assert len(seen) == 2  # the last block's two layers
    assert torch.allclose(found.scores, (x * gradient).sum(-1), rtol=1e-12)
