"""The table of operations: what is declared linear is, and every row of that kind has an example here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from whyformer.engine import operations as ops

B, N, D = 2, 4, 6


def constant(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def picture(x: Tensor) -> Tensor:
    return x.reshape(B, N, 2, 3)


def channels(x: Tensor) -> Tensor:
    return x.reshape(B, N, D // 2, 2)


MASK = constant(B, N, D) > 0
PLACES = torch.tensor([[[0, 3, 1, 2, 0, 1]]]).expand(B, 2, D)


def written(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """What is in a copy of x after a change in place; zeros where nothing of x is left."""
    copy = x * 1
    change(copy)
    return copy


def _assign(x: Tensor) -> Tensor:
    whole = torch.zeros(B, N + 1, D, dtype=x.dtype)
    whole[:, 1:] = x
    return whole


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "H": lambda x: x[0].H,
    "T": lambda x: x[0].T,
    "atleast_1d": lambda x: torch.atleast_1d(x),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "atleast_3d": lambda x: torch.atleast_3d(x[0]),
    "diagonal_scatter": lambda x: x[0].diagonal_scatter(x[1, 0, :N]),
    "dropout3d": lambda x: F.dropout3d(picture(x), 0.5, training=False),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([0]), x[:, :1] * 2),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0]), 0),
    "masked_scatter": lambda x: x.masked_scatter(MASK, x.flip(1)),
    "real": lambda x: torch.view_as_complex(picture(x)[..., :2].contiguous()).real,
    "rot90": lambda x: x.rot90(),
    "select_scatter": lambda x: x.select_scatter(x[:, 1], 1, 0),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2], 1, 2),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(channels(x))),
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(channels(x))),
    "__getitem__": lambda x: x[:, [0, 2], 1:],
    "__setitem__": _assign,
    "adjoint": lambda x: x.adjoint(),
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1)),
    "bfloat16": lambda x: x.bfloat16(),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, B, N, D)),
    "cat": lambda x: torch.cat([x, x], 1),
    "channel_shuffle": lambda x: F.channel_shuffle(picture(x), 2),
    "chunk": lambda x: x.chunk(2, -1),
    "clone": lambda x: x.clone(),
    "concat": lambda x: torch.concat([x, x]),
    "concatenate": lambda x: torch.concatenate([x, x]),
    "contiguous": lambda x: x.contiguous(),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "cpu": lambda x: x.cpu(),
    "cuda": lambda x: x.cuda(),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "double": lambda x: x.double(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout1d": lambda x: F.dropout1d(x, 0.5, training=False),
    "dropout2d": lambda x: F.dropout2d(picture(x), 0.5, training=False),
    "dstack": lambda x: torch.dstack([x, x]),
    "expand": lambda x: x[:, :1].expand(B, 3, D),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, False),
    "fill_": lambda x: written(x, lambda y: y.fill_(0)),
    "flatten": lambda x: x.flatten(1),
    "flip": lambda x: x.flip(1),
    "float": lambda x: x.float(),
    "gather": lambda x: x.gather(1, PLACES),
    "half": lambda x: x.half(),
    "hsplit": lambda x: torch.hsplit(x, 2),
    "hstack": lambda x: torch.hstack([x, x]),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[:1] * 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "mH": lambda x: x.mH,
    "mT": lambda x: x.mT,
    "masked_fill": lambda x: x.masked_fill(MASK, 0),
    "masked_select": lambda x: x.masked_select(MASK),
    "moveaxis": lambda x: x.moveaxis(1, 2),
    "movedim": lambda x: x.movedim(1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "pad": lambda x: F.pad(x, (1, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(picture(x), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(B, 3, 2, 4), 2),
    "ravel": lambda x: x.ravel(),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "reshape": lambda x: x.reshape(B, D, N),
    "reshape_as": lambda x: x.reshape_as(constant(B, D, N)),
    "roll": lambda x: x.roll(1, 1),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, PLACES[:, :1], x),
    "select": lambda x: x.select(1, 0),
    "split": lambda x: x.split(2, -1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "stack": lambda x: torch.stack([x, x]),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "swapdims": lambda x: x.swapdims(1, 2),
    "t": lambda x: x[0].t(),
    "take": lambda x: x.take(torch.tensor([0, 5, 7])),
    "take_along_dim": lambda x: x.take_along_dim(PLACES, 1),
    "tensor_split": lambda x: x.tensor_split(2, 1),
    "tile": lambda x: x.tile(2),
    "to": lambda x: x.to(torch.float32),
    "transpose": lambda x: x.transpose(1, 2),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.ones(1)),
    "unbind": lambda x: x.unbind(1),
    "unflatten": lambda x: x.unflatten(-1, (2, 3)),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "view": lambda x: x.view(B, -1),
    "view_as": lambda x: x.view_as(constant(B, D, N)),
    "vsplit": lambda x: torch.vsplit(x, 2),
    "vstack": lambda x: torch.vstack([x, x]),
    "where": lambda x: torch.where(MASK, x, -x),
    "zero_": lambda x: written(x, lambda y: y.zero_()),
}
LINEAR: dict[str, Callable[[Tensor], Any]] = {
    "_grouped_mm": lambda x: torch._grouped_mm(
        F.pad(x[0], (0, 2)).bfloat16(), constant(2, 8, 8).bfloat16().mT, torch.tensor([2, 4], dtype=torch.int32)
    ),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(picture(x), 2),
    "add": lambda x: x + x.flip(1),
    "addbmm": lambda x: torch.addbmm(x[0], x, constant(B, D, D), alpha=2),
    "addcmul": lambda x: torch.addcmul(x, x, constant(D), value=2),
    "addmm": lambda x: torch.addmm(x[0], x[1], constant(D, D)),
    "addmv": lambda x: torch.addmv(x[0, :, 0], x[1], constant(D)),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(picture(x), 2),
    "baddbmm": lambda x: torch.baddbmm(x, x, constant(B, D, D), beta=0.5),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(N, dtype=x.dtype), torch.ones(N, dtype=x.dtype), constant(N)),
    "bmm": lambda x: torch.bmm(x, constant(B, D, 3)),
    "conv1d": lambda x: F.conv1d(x, constant(3, N, 2)),
    "conv2d": lambda x: F.conv2d(picture(x), constant(3, N, 2, 2)),
    "conv3d": lambda x: F.conv3d(picture(x)[:, None], constant(3, 1, 2, 2, 2)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(picture(x), constant(N, 3, 2, 2)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(picture(x)[:, None], 2),
    "avg_pool3d": lambda x: F.avg_pool3d(picture(x)[:, None], 2),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, constant(N, 3, 2)),
    "conv_transpose3d": lambda x: F.conv_transpose3d(picture(x)[:, None], constant(1, 3, 2, 2, 2)),
    "cumsum": lambda x: x.cumsum(1),
    "fold": lambda x: F.fold(x, (3, 4), 2),
    **{
        f"fft_{name}": lambda x, _name=name: torch.view_as_real(getattr(torch.fft, _name)(x).resolve_conj())
        for name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn")
    },
    "grid_sample": lambda x: F.grid_sample(picture(x), constant(B, 3, 3, 2).tanh(), align_corners=False),
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(constant(N, N).triu() + 2 * torch.eye(N), x, upper=True),
    "div": lambda x: x / constant(D),
    "einsum": lambda x: torch.einsum("bnd,od->bno", x, constant(5, D)),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 2]), x[0]),
    "index_add": lambda x: x.index_add(1, torch.tensor([1, 1]), x[:, :2]),
    "interpolate": lambda x: F.interpolate(picture(x), scale_factor=2, mode="bilinear"),
    "lerp": lambda x: torch.lerp(x, x.flip(1), 0.3),
    "linear": lambda x: F.linear(x, constant(5, D)),
    "matmul": lambda x: constant(3, N) @ x,
    "mean": lambda x: x.mean(1),
    "mm": lambda x: torch.mm(x[0], constant(D, 3)),
    "mul": lambda x: x * constant(D),
    "mv": lambda x: torch.mv(x[0], constant(D)),
    "nansum": lambda x: x.nansum(1),
    "neg": lambda x: -x,
    "rsub": lambda x: torch.rsub(x, x.flip(1)),
    "scatter_add": lambda x: x.scatter_add(1, PLACES, x[:, :2]),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, PLACES, x[:, :2], "amax", include_self=False),
    "sub": lambda x: x - x.flip(1),
    "sum": lambda x: x.sum(-1),
    "tensordot": lambda x: torch.tensordot(x, constant(D, 3), 1),
}
EXAMPLES = {**VIEWS, **LINEAR}
NAMES = sorted(ops.names("view", "linear", "matrix product"))


class Names(TorchFunctionMode):
    """Remembers which operations were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(ops.operation_name(func))
        return func(*args, **(kwargs or {}))


def value(name: str, x: Tensor) -> Tensor:
    result = EXAMPLES[name](x)
    return torch.cat([part.flatten() for part in (result if isinstance(result, list | tuple) else [result])])


drawn = given(seed=st.integers(0, 10**6), factor=st.sampled_from([-2.0, 0.5, 4.0]))


def linear(name: str, seed: int, factor: float) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no such device")
    x, y = constant(B, N, D, seed=seed), constant(B, N, D, seed=seed + 1)
    whole = value(name, x + factor * y)
    parts = value(name, x) + factor * value(name, y)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[whole.dtype]
    assert torch.allclose(whole, parts, rtol=rounding, atol=rounding * float(parts.abs().max() + 1))


@pytest.mark.parametrize("name", NAMES)
@drawn
@settings(max_examples=5)
def test_what_is_declared_linear_is(name: str, seed: int, factor: float) -> None:
    """f(x + c y) = f(x) + c f(y): gradient × input shares such an operation's value out among its inputs."""
    linear(name, seed, factor)


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
@drawn
def test_the_same_of_many_more(name: str, seed: int, factor: float) -> None:
    linear(name, seed, factor)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_calls_its_operation(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no such device")
    with Names() as names:
        EXAMPLES[name](constant(B, N, D))
    assert name in names.called


def test_an_operation_that_is_not_linear_would_be_found() -> None:
    for name, function in {"logcumsumexp": lambda x: x.logcumsumexp(1), "prod": lambda x: x.prod(1), "cumprod": lambda x: x.cumprod(1)}.items():
        assert ops.operation(name).kind == ""
        EXAMPLES[name] = function
        try:
            with pytest.raises(AssertionError):
                test_what_is_declared_linear_is.hypothesis.inner_test(name, 0, 0.5)
        finally:
            del EXAMPLES[name]


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda x: x + x, "add"), (lambda x: x.add(x), "add"), (lambda x: 1 - x, "rsub"), (lambda x: 2 / x, "rdiv"),
     (lambda x: torch.clip(x, 0, 1), "clamp"), (lambda x: x**2, "pow"), (lambda x: x.mT, "mT"), (lambda x: x.shape, "shape")],
)  # fmt: skip
def test_an_operation_has_one_name(function: Callable[[Tensor], Any], name: str) -> None:
    with Names() as names:
        function(constant(2, 2))
    assert name in names.called


def test_what_works_in_place_has_the_row_of_what_it_does() -> None:
    assert ops.operation("relu_").name == "relu"
    assert ops.operation("copy_").kind == ops.operation("masked_fill_").kind == "view"
    assert ops.operation("requires_grad_").kind == "silent"
    assert not ops.is_in_place("__add__")
    assert ops.is_in_place("__setitem__")
    for name in ("add_", "sub_", "tanh_"):  # before and after requires_grad_ in the alphabet
        assert ops.is_in_place(name)
        assert ops.operation(name).name == name[:-1]
    assert ops.operation("no_such_thing").kind == ""


def test_the_function_that_another_does_in_place() -> None:
    assert ops.out_of_place("relu_") is torch.relu
    assert not hasattr(torch, "type_as")
    assert ops.out_of_place("type_as_") is Tensor.type_as  # a method where torch has no function
    assert ops.out_of_place("no_such_thing_") is None
