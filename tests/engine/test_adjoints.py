"""Adjoints in fewer operations than autograd's are the same adjoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import whyformer
from whyformer.composites.gradient import GRADIENT
from whyformer.engine.adjoints import LayerOfRows, attention_of_rows, cheaper
from whyformer.engine.run import record
from whyformer.rules.core import Pass
from zoo import build

DOUBLE = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.part
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
    made = cheaper(name, func, args, {}, last=True)
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
    made = cheaper("linear", functional.linear, (x, weight), {}, last=True)
    assert torch.allclose(torch.autograd.grad(made, x, flow)[0], flow @ weight, rtol=1e-14)


def test_other_calls_are_left_alone() -> None:
    x, weight = drawn(32, 6).requires_grad_(), drawn(5, 6)
    for args in (
        (drawn(32, 6), weight),
        (x, weight.requires_grad_()),
        (x, drawn(6)),
        (drawn(4, 6).requires_grad_(), drawn(5, 6)),
    ):
        assert cheaper("linear", functional.linear, args, {}, last=True) is NotImplemented
    assert cheaper("matmul", torch.matmul, (x, drawn(6, 5)), {}, last=True) is NotImplemented


@pytest.mark.parametrize(
    ("shape", "kernel", "options"),
    [
        ((2, 3, 12, 8), (5, 3, 4, 4), {"stride": 4}), ((1, 3, 12, 8), (5, 3, 6, 2), {"stride": (6, 2), "padding": "valid"}),
        ((6, 3, 4, 4), (5, 3, 4, 4), {"stride": 4}), ((2, 3, 4, 8, 6), (5, 3, 2, 4, 3), {"stride": (2, 4, 3)}),
        ((2, 3, 12), (5, 3, 4), {"stride": (4,)}),
    ],
    ids=str,
)  # fmt: skip
def test_patches_that_do_not_overlap(shape: Any, kernel: Any, options: Any) -> None:
    name = f"conv{len(shape) - 2}d"
    func, x, weight, bias = getattr(functional, name), drawn(*shape).requires_grad_(), drawn(*kernel), drawn(5)
    made, plain = cheaper(name, func, (x, weight, bias), options, last=False), func(x, weight, bias, **options)
    assert type(made.grad_fn).__name__ == "LayerOfPatchesBackward"
    assert torch.equal(made, plain)
    flow = drawn(*made.shape)
    found, wanted = (torch.autograd.grad(y, x, flow)[0] for y in (made, plain))
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-13 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((5, 3, 4, 4), {"stride": 2}), ((5, 3, 4, 4), {"stride": 4, "padding": 2}), ((5, 3, 5, 5), {"stride": 5}),
        ((5, 3, 2, 2), {"stride": 2, "dilation": 2}), ((6, 1, 4, 4), {"stride": 4, "groups": 3}), ((5, 3, 1, 1), {}),
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_are_left_alone(kernel: Any, options: Any) -> None:
    x = drawn(2, 3, 12, 8).requires_grad_()
    assert cheaper("conv2d", functional.conv2d, (x, drawn(*kernel)), options, last=True) is NotImplemented


def attended(mask: str, heads: int) -> tuple[list[Tensor], Tensor | None, dict[str, Any]]:
    given = [drawn(2, n, 20 if i else 24, 6).requires_grad_() for i, n in enumerate((4, heads, heads))]
    masks = {
        "floats": drawn(2, 1, 24, 20), "booleans": drawn(24, 20) > -1, "of keys": drawn(2, 1, 1, 20) > -0.5,
    }  # fmt: skip
    options = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": heads < 4}
    return given, masks.get(mask), options


@pytest.mark.part(times=2)
@pytest.mark.parametrize("reached", [[], [3], [0, 23], list(range(24))], ids=lambda r: str(len(r)))
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "causal", "floats", "booleans", "of keys"])
def test_attention_of_few_queries(mask: str, heads: int, reached: list[int]) -> None:
    given, bias, options = attended(mask, heads)
    attend, run = functional.scaled_dot_product_attention, Pass(keep=True)
    made = attention_of_rows(attend, run, *given, bias, 0.3, options)
    plain = attend(*given, attn_mask=bias, **options)
    assert type(made.grad_fn).__name__ == "AttentionOfRowsBackward"
    assert torch.equal(made, plain)
    flow = torch.zeros_like(plain)
    flow[:, :, reached] = drawn(2, 4, len(reached), 6)
    wanted = torch.autograd.grad(plain, given, flow)
    for keep in (True, False):
        run.keep = keep
        found = torch.autograd.grad(made, given, flow, retain_graph=keep)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-13 * max(1, other.abs().max())


def test_attention_whose_queries_are_held_constant() -> None:
    (q, k, v), _, options = attended("none", 4)
    made = attention_of_rows(
        functional.scaled_dot_product_attention, Pass(), q.detach(), k.detach(), v, None, 0.3, options
    )
    flow = torch.zeros_like(made)
    flow[:, :, 5] = 1
    (found,) = torch.autograd.grad(made, v, flow)
    weights = (q @ k.mT * 0.3).softmax(-1)[:, :, 5]  # what comes back to v_j is A_5j
    assert torch.allclose(found, weights[..., None].expand_as(found), rtol=1e-12)


@pytest.mark.parametrize("reached", [1, 24])
def test_what_is_changed_in_place_behind_an_attention_is_told(reached: int) -> None:
    given, _, options = attended("none", 4)
    values = [t * 1 for t in given]
    made = attention_of_rows(functional.scaled_dot_product_attention, Pass(), *values, None, 0.3, options)
    values[1].mul_(2)
    flow = torch.zeros_like(made)
    flow[:, :, :reached] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(made, given, flow)


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_fewer_products_for_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)

    def explained() -> whyformer.Explanation:
        return whyformer.explain(copy.deepcopy(model), inputs, "gradcam", target=1, blocks=0, composite="attnlrp")

    monkeypatch.setattr("whyformer.methods.sources.Sources.tape_rules", lambda *_: None)  # so that the graph is used
    few, found = counted(explained), explained()
    monkeypatch.setattr("whyformer.engine.adjoints.cheaper", lambda *_: NotImplemented)
    monkeypatch.setattr("whyformer.engine.attention.attention_of_rows", lambda *_: NotImplemented)
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
    recording = record(model, ((x,), {}), GRADIENT, root="input", root_input=0)
    (found,) = recording.backward(functional.one_hot(torch.tensor([1, 1]), recording.logits.shape[-1]).double())
    free = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(free)[:, 1].sum(), free)
    assert len(seen) == 2  # the last block's two layers
    assert torch.allclose(found, gradient, rtol=1e-12)
