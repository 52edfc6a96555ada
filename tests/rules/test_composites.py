"""Every composite on every operation that it supports: value, gradient and conservation of relevance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walked import walked
from whyformer.errors import UnknownOperation
from whyformer.rules.multipliers import COMPOSITES, WITH_SECANTS
from whyformer.rules.propagation import LINEAR_RULES, deep_taylor, layerwise
from whyformer.tape.tables import KINDS
from whyformer.tape.walking import GRADIENT, Composite

B, N, D = 2, 4, 6


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class OneOperation(nn.Module):
    """A model that consists of one operation, with parameters."""

    def __init__(self, operation: Callable[[OneOperation, Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.weight = nn.Parameter(random_tensor(5, D, seed=1))
        self.bias = nn.Parameter(random_tensor(5, seed=2))
        self.scale = nn.Parameter(1 + random_tensor(D, seed=3) / 10)
        self.shift = nn.Parameter(random_tensor(D, seed=4))
        self.positions = nn.Parameter(random_tensor(N, D, seed=5))
        self.kernel = nn.Parameter(random_tensor(3, N, 2, 3, seed=6))
        self.register_buffer("running", torch.ones(N, dtype=torch.float64))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self, x).flatten(1)


def stretch(x: Tensor) -> Tensor:
    return x[:, :, None, :].expand(B, N, 4, D)


def _is_function(name: str) -> bool:
    return name not in ("prelu", "rrelu_with_noise", "logaddexp", "logaddexp2") and (hasattr(F, name) or hasattr(torch, name))


# operation -> function of a model and x [B, N, D] that calls it
EXAMPLES: dict[str, Callable[[OneOperation, Tensor], Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "linear, no bias": lambda m, x: F.linear(x, m.weight),
    "addmm": lambda m, x: torch.addmm(m.bias, x.flatten(0, 1), m.weight.T).unflatten(0, (B, N)),
    "matmul, parameter": lambda m, x: x @ m.weight.T,
    "matmul": lambda m, x: x @ (2 * x).mT,
    "matmul, constant": lambda m, x: x @ random_tensor(B, D, 3, seed=7),
    "bmm": lambda m, x: torch.bmm(x, x.mT),
    "baddbmm": lambda m, x: torch.baddbmm(random_tensor(B, N, N, seed=8), x, x.mT, beta=0.5, alpha=2),
    "einsum": lambda m, x: torch.einsum("bnd,od->bno", x, m.weight),
    "einsum, two branches": lambda m, x: torch.einsum("bnd,bmd->bnm", x, x.tanh()),
    "einsum, list": lambda m, x: torch.einsum("bnd,bmd->bnm", [x, x.tanh()]),
    "conv2d": lambda m, x: F.conv2d(stretch(x * 2), m.kernel),
    "input": lambda m, x: F.conv1d(x, m.kernel[:, :, 0]),
    "conv1d": lambda m, x: F.conv1d(x * 2, m.kernel[:, :, 0], padding="same"),
    "add": lambda m, x: x + x.tanh(),
    "add, method": lambda m, x: x.add(x.tanh(), alpha=2),
    "add, positions": lambda m, x: x + m.positions,
    "add, bias": lambda m, x: x + m.shift,
    "add, number": lambda m, x: 1 + x,
    "sub": lambda m, x: x - x.tanh(),
    "sub, number": lambda m, x: x - 1,
    "mul_two": lambda m, x: x.flip(-1) * x.sigmoid(),
    "gate": lambda m, x: x * x.roll(1, -1),
    "clamp": lambda m, x: x.clamp(-0.5, 0.5),
    "mul": lambda m, x: x * m.scale,
    "mul, number": lambda m, x: 2 * x,
    "mul, constant first": lambda m, x: m.scale * x,
    "div": lambda m, x: x / 3,
    "neg": lambda m, x: -x,
    "softmax": lambda m, x: x.softmax(-1),
    "softmax, function": lambda m, x: F.softmax(x, dim=-1),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None].tanh(), x[:, None] * 2),
    "attention, eager": lambda m, x: (x @ x.tanh().mT * D**-0.5).softmax(-1) @ (x * 2),
    "attention, activated": lambda m, x: torch.sigmoid(x @ x.mT / 3) @ x,
    "attention, activated and normalized late": lambda m, x: (e := (x @ x.mT).relu()) @ x / (e.sum(-1, keepdim=True) + 1e-6),
    "attention, normalized late": lambda m, x: (e := (x @ x.tanh().mT).exp()) @ x / e.sum(-1, keepdim=True),
    "attention, bias outside the exponential": lambda m, x: F.normalize((x @ x.tanh().mT).exp() * m.positions[:, :N].exp(), p=1, dim=-1) @ (x * 2),
    "attention, masked": lambda m, x: F.scaled_dot_product_attention(
        x[:, None], x[:, None].tanh(), x[:, None] * 2, attn_mask=torch.ones(N, N).tril().bool()
    ),
    "attention, causal": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None].tanh(), x[:, None] * 2, is_causal=True),
    "attention, grouped": lambda m, x: F.scaled_dot_product_attention(
        x.unflatten(-1, (2, 3)).transpose(1, 2), x[:, None, :, :3].tanh(), x[:, None, :, 3:], is_causal=True, enable_gqa=True
    ),
    "layer_norm": lambda m, x: F.layer_norm(x, (D,), m.scale, m.shift),
    "layer_norm, two axes": lambda m, x: F.layer_norm(x, (N, D)),
    "rms_norm": lambda m, x: F.rms_norm(x, (D,), m.scale, 1e-6),
    "group_norm": lambda m, x: F.group_norm(x, 2),
    "instance_norm": lambda m, x: F.instance_norm(x),
    "batch_norm": lambda m, x: F.batch_norm(x, m.running * 0, m.running),
    "mean": lambda m, x: x.mean(1),
    "mean, axis by name": lambda m, x: torch.mean(x, dim=(1, 2), keepdim=True),
    "sum": lambda m, x: x.sum(-1),
    "cumsum": lambda m, x: x.cumsum(1),
    "conv_transpose2d": lambda m, x: F.conv_transpose2d(stretch(x * 2), m.kernel.transpose(0, 1)),
    "conv_transpose1d": lambda m, x: F.conv_transpose1d(x * 2, m.kernel[:, :, 0].transpose(0, 1)),
    "conv_transpose3d": lambda m, x: F.conv_transpose3d(stretch(x * 2)[:, None], m.kernel[:1, :2, None]),
    "grid_sample": lambda m, x: F.grid_sample(stretch(x), x[:, :, None, :2].tanh(), align_corners=False),
    "linalg_solve_triangular": lambda m, x: torch.linalg.solve_triangular(x @ x.mT + 9 * torch.eye(N), x, upper=True),
    "fft_fft": lambda m, x: torch.fft.fft(x).real,
    "fft_ifft2": lambda m, x: torch.fft.ifft2(x).real,
    "interpolate": lambda m, x: F.interpolate(stretch(x), scale_factor=2, mode="bilinear"),
    "avg_pool1d": lambda m, x: F.avg_pool1d(x, 2),
    "avg_pool2d": lambda m, x: F.avg_pool2d(stretch(x), 2),
    "adaptive_avg_pool1d": lambda m, x: F.adaptive_avg_pool1d(x, 2),
    "adaptive_avg_pool2d": lambda m, x: F.adaptive_avg_pool2d(stretch(x), 2),
    "avg_pool3d": lambda m, x: F.avg_pool3d(stretch(x)[:, None], 2),
    "adaptive_avg_pool3d": lambda m, x: F.adaptive_avg_pool3d(stretch(x)[:, None], 2),
    "fold": lambda m, x: F.fold(x, (3, 4), 2),
    "addcmul": lambda m, x: torch.addcmul(x, x, m.scale, value=2),
    "lerp": lambda m, x: torch.lerp(x, x.tanh(), 0.3),
    "rsub": lambda m, x: 2 - x,
    "sub, bias first": lambda m, x: m.shift - x,
    "rdiv": lambda m, x: 1 / (1 + x.square().flip(-1)),
    "reciprocal": lambda m, x: (1 + x.square().flip(-1)).reciprocal(),
    "pow": lambda m, x: x.pow(3),
    "pow, of another": lambda m, x: x.abs().pow(x.flip(-1)),
    "pow, root": lambda m, x: (1 + x.square().flip(-1)).pow(-0.5),
    "sqrt": lambda m, x: (1 + x.square().flip(-1)).sqrt(),
    "rsqrt": lambda m, x: (1 + x.square().flip(-1)).rsqrt(),
    "std": lambda m, x: x.std(-1),
    "var": lambda m, x: x.var(-1, unbiased=False),
    "std_mean": lambda m, x: torch.cat(torch.std_mean(x, -1, keepdim=True)),
    "var_mean": lambda m, x: torch.cat(torch.var_mean(x, dim=1)),
    "norm": lambda m, x: x.norm(dim=-1),
    "linalg_norm": lambda m, x: torch.linalg.norm(x, dim=-1),
    "linalg_vector_norm": lambda m, x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda m, x: F.normalize(x, dim=-1),
    "exp, of a logarithm": lambda m, x: (x.square().log() + m.shift).exp(),
    "log_softmax": lambda m, x: x.log_softmax(-1),
    "quotient": lambda m, x: x / (1 + x.square().flip(-1)),
    "layer_norm, scale of its own": lambda m, x: F.layer_norm(x, (N, D), x[0].tanh()),
    "linear, weights of its own": lambda m, x: F.linear(x, x[0].tanh()),
    "matmul, parameter for each": lambda m, x: x @ m.weight.T.expand(B, D, 5),
    "clamp, bounds of its own": lambda m, x: torch.clamp(x, min=x.mean(1, keepdim=True)),
    "normalize, of nothing": lambda m, x: F.normalize(x * torch.eye(N, D, dtype=x.dtype)[:, :1], dim=-1),
    "where, by name": lambda m, x: torch.where(condition=x < 0, input=x.tanh(), other=x),
    "input by name": lambda m, x: F.gelu(input=x) + torch.mul(x, other=m.scale),
    "in place add": lambda m, x: x.clone().add_(x.tanh()),
    "in place mul": lambda m, x: (x * 1).mul_(m.scale),
    "in place div": lambda m, x: x.clone().div_(2),
    "in place activation": lambda m, x: x.clone().relu_(),
    "in place after linear": lambda m, x: F.linear(x, m.weight, m.bias).relu_(),
    "in place add after linear": lambda m, x: _add_in_place(F.linear(x, m.weight, m.bias), x[..., :5]),
    "in place argument": lambda m, x: F.relu(F.linear(x, m.weight, m.bias), inplace=True),
    "in place argument, smooth": lambda m, x: F.silu(x * 1, inplace=True),
    "in place item": lambda m, x: _assign(x),
    "in place fill": lambda m, x: x.clone().masked_fill_(x < 0, 0),
    "in place slice": lambda m, x: _add_to_slice(x),
    "multi_head_attention_forward": lambda m, x: _multi_head(m, x),
    **{
        name: (lambda m, x, _name=name: _activation(_name)(_in_domain(_name, x)))
        for name in sorted(name for name, kind in KINDS.items() if kind == "activation" and _is_function(name))
    },
    "prelu": lambda m, x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype)),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "__getitem__": lambda x: x[:, 1:, ::2],
    "index list": lambda x: x[:, [0, 2]],
    "cat": lambda x: torch.cat([x, x.tanh()], 1),
    "chunk": lambda x: torch.stack(x.chunk(2, -1), 1),
    "expand": lambda x: x[:, :1].expand(B, 3, D),
    "flip": lambda x: x.flip(1),
    "gather": lambda x: x.gather(1, torch.zeros(B, 1, D, dtype=torch.long)),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "where": lambda x: torch.where(x < 0, x.tanh(), x),
    "pad": lambda x: F.pad(x, (0, 1)),
    "permute": lambda x: x.permute(0, 2, 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "reshape": lambda x: x.reshape(B, D, N),
    "roll": lambda x: x.roll(1, 1),
    "select": lambda x: x.select(1, 0),
    "split": lambda x: x.split(2, -1)[0],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "transpose": lambda x: x.mT.contiguous(),
    "unbind": lambda x: x.unbind(1)[2],
    "unflatten": lambda x: x.unflatten(-1, (2, 3)).flatten(2),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "to": lambda x: x.to(torch.float64).clone(),
    "tril": lambda x: x.tril(),
    "stack": lambda x: torch.stack([x, x * 1], 1),
}
SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "aminmax": lambda x: torch.cat(torch.aminmax(x, dim=-1, keepdim=True), -1),
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1).values,
    "fmax": lambda x: torch.fmax(x, x.tanh()),
    "fmin": lambda x: torch.fmin(x, x.tanh()),
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "max": lambda x: x.max(1).values,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "median": lambda x: x.median(1).values,
    "min": lambda x: x.min(1, keepdim=True)[0],
    "minimum": lambda x: torch.minimum(x, x.tanh()),
    "mode": lambda x: x.mode(1).values,
    "msort": lambda x: x.msort(),
    "nanmedian": lambda x: x.nanmedian(1).values,
    "logsumexp": lambda x: x.logsumexp(1),
    "scatter_reduce": lambda x: torch.zeros_like(x[:, :2]).scatter_reduce(1, torch.arange(x.shape[1])[None, :, None].expand_as(x) % 2, x, "amax", include_self=False),
    "scatter_reduce, sums": lambda x: torch.zeros_like(x[:, :2]).scatter_reduce(1, torch.arange(x.shape[1])[None, :, None].expand_as(x) % 2, x, "mean", include_self=False),
    "sort": lambda x: x.sort(1, descending=True).values,
    "topk": lambda x: x.topk(2, 1).values,
    **{
        f"{start}max_pool{n}d{end}": (
            lambda x, _name=f"{start}max_pool{n}d{end}", _n=n, _rest=(2,) if start else (2, 1): _first(
                getattr(F, _name)(x.reshape(B, N, D, *(1,) * (_n - 1)), (2, *(1,) * (_n - 1)), *_rest[1:])
            )
        )
        for n in (1, 2, 3)
        for start in ("", "adaptive_")
        for end in ("", "_with_indices")
    },
}
EXAMPLES.update({name: (lambda m, x, _select=select: _select(x)) for name, select in SELECTIONS.items()})
EXAMPLES.update({f"view: {name}": (lambda m, x, _view=view: _view(x)) for name, view in VIEWS.items()})

RELEVANCE: dict[str, Composite] = {
    "deep Taylor": deep_taylor(),
    "deep Taylor, alpha 2": deep_taylor(2.0),
    **{f"layerwise {rule}": layerwise(rule) for rule in LINEAR_RULES},
    "layerwise, normalised": layerwise("epsilon", normalise_add=True),
}
MULTIPLIER: dict[str, Composite] = {
    **{str(name): table for name, table in COMPOSITES.items() if name != "plain"},
    "ah with secants": WITH_SECANTS["ah"],
    "ln with secants": WITH_SECANTS["ln"],
}
# operations without a rule of relevance, which raise an error
REFUSED = {
    "rdiv", "reciprocal", "pow, of another", "pow, root", "sqrt", "rsqrt", "std", "var", "std_mean", "var_mean", "norm", "linalg_norm",
    "linalg_vector_norm", "log_softmax", "quotient", "attention, normalized late", "attention, activated and normalized late", "attention, bias outside the exponential",
}  # fmt: skip


def _in_domain(name: str, x: Tensor) -> Tensor:
    """Map x to the domain of a function."""
    return x.abs() + 0.5 if name.startswith("log") or name == "sqrt" else x.tanh() if name in ("acos", "asin") else x


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name in ("clamp", "clamp_min", "clamp_max"):
        limits = {"clamp": (-0.5, 0.5), "clamp_min": (-0.5,), "clamp_max": (0.5,)}[name]
        return lambda x: getattr(torch, name)(x, *limits)
    return getattr(F, name, None) or getattr(torch, name)


def _assign(x: Tensor) -> Tensor:
    output = torch.zeros(B, N + 1, D, dtype=x.dtype)
    output[:, 1:] = x
    output[:, 0] = x.tanh()[:, 1]
    return output


def _add_in_place(x: Tensor, increment: Tensor) -> Tensor:
    x += increment
    return x


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _add_to_slice(x: Tensor) -> Tensor:
    output = x * 1
    output[:, 1:3] += x.tanh()[:, 1:3]
    return output


def _multi_head(m: OneOperation, x: Tensor) -> Tensor:
    inner = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        inner.in_proj_weight.copy_(random_tensor(3 * D, D, seed=10))
        inner.out_proj.weight.copy_(random_tensor(D, D, seed=11))
    m.inner = [inner]  # keeps a reference outside the module tree
    return inner(x, x, x, need_weights=False)[0]


def propagate(name: str, composite: Composite) -> tuple[Tensor, Tensor]:
    """(value, gradient or relevance of x)."""
    return walked(OneOperation(EXAMPLES[name]), random_tensor(B, N, D), composite)


def by_autograd(name: str) -> tuple[Tensor, Tensor]:
    """(value, gradient of x) by autograd."""
    x = random_tensor(B, N, D).requires_grad_()
    output = OneOperation(EXAMPLES[name])(x)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(20), dtype=output.dtype)
    return output.detach(), torch.autograd.grad(output, x, seed)[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradient_composite_equals_autograd(name: str) -> None:
    value, result = propagate(name, GRADIENT)
    expected, gradient = by_autograd(name)
    assert torch.allclose(value, expected, rtol=0, atol=1e-14)
    assert torch.allclose(result, gradient, rtol=1e-10, atol=1e-12)


# these are constant under rules that hold their kind, so no relevance remains
HELD = {
    "softmax": {"softmax", "softmax, function", "logsumexp"},
    "norm": {"std", "var", "norm", "linalg_norm", "linalg_vector_norm"},
}


@pytest.mark.part
@pytest.mark.parametrize("name", [n for n in EXAMPLES if "normalized late" not in n])
@pytest.mark.parametrize("composite", MULTIPLIER)
def test_multiplier_composites_support_every_operation(composite: str, name: str) -> None:
    value, multipliers = propagate(name, MULTIPLIER[composite])
    assert torch.allclose(value, by_autograd(name)[0], rtol=0, atol=1e-14)
    assert multipliers.isfinite().all()
    constant = [names for kind, names in HELD.items() if MULTIPLIER[composite].rules.get(kind) is not None and MULTIPLIER[composite].rules[kind].constant]
    assert bool(multipliers.any()) == (not any(name in names for names in constant))


@pytest.mark.parametrize("name", ["attention, normalized late", "attention, activated and normalized late"])
@pytest.mark.parametrize("composite", MULTIPLIER)
def test_multiplier_composites_refuse_attention_that_is_normalized_late(composite: str, name: str) -> None:
    if composite == "ln":  # has no rule for attention
        assert torch.allclose(propagate(name, MULTIPLIER[composite])[1], by_autograd(name)[1])
        return
    with pytest.raises(UnknownOperation, match="softmax"):
        propagate(name, MULTIPLIER[composite])


@pytest.mark.parametrize("composite", RELEVANCE)
def test_relevance_composites_refuse_operations_without_rule(composite: str) -> None:
    for name in REFUSED:
        with pytest.raises(UnknownOperation):
            propagate(name, RELEVANCE[composite])


@pytest.mark.part
@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in REFUSED])
@pytest.mark.parametrize("composite", RELEVANCE)
def test_relevance_composites_support_every_other_operation(composite: str, name: str) -> None:
    assert propagate(name, RELEVANCE[composite])[1].isfinite().all()


# operations that lose the share of a constant operand in deep Taylor
CONSTANT_SHARE = {"add, positions", "matmul, constant", "baddbmm", "where"}
# operations that mix samples
MIXED = {"msort", "linear, weights of its own", "layer_norm, scale of its own"}
# operations that drop values
LOSSY = {"view: masked_fill", "view: tril", "in place fill", "view: pad"}
# units without a positive product lose relevance (methods.md §8 #8); here the mixed values of a token are all negative
LOSING_UNITS = {"multi_head_attention_forward", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in REFUSED])
def test_operation_conserves_relevance(name: str) -> None:
    """Σ R of each sample at the input = Σ R at the output, for every operation without a constant share."""
    if name in CONSTANT_SHARE | LOSSY | LOSING_UNITS | MIXED:
        pytest.skip("shares with a constant, or drops values, or has units that lose theirs")
    value, relevance = propagate(name, RELEVANCE["deep Taylor"])
    seed = torch.randn(value.shape, generator=torch.Generator().manual_seed(20), dtype=value.dtype)
    result, expected = relevance.flatten(1).sum(1), seed.flatten(1).sum(1)
    assert torch.allclose(result, expected, rtol=1e-8, atol=1e-8), f"{result.tolist()} of {expected.tolist()}"


# kinds of custom operations (tests/rules/test_registered.py), and kinds that are refused in any case
WITHOUT_EXAMPLE = {"identity", "adjoint", "opaque layer", "quotient", "other"}


def relevance_or_none(name: str, composite: Composite) -> Tensor | None:
    try:
        return propagate(name, composite)[1]
    except UnknownOperation:
        return None


@pytest.mark.parametrize("composite", {**RELEVANCE, **MULTIPLIER})
def test_every_rule_of_a_composite_matters(composite: str) -> None:
    """Without any rule of a composite, some example raises or changes its result."""
    table = {**RELEVANCE, **MULTIPLIER}[composite]
    results = {name: relevance_or_none(name, table) for name in EXAMPLES}

    def matters(kind: str) -> bool:
        reduced = replace(table, rules={k: rule for k, rule in table.rules.items() if k != kind})
        return any(differ(result, relevance_or_none(name, reduced)) for name, result in results.items())

    assert [kind for kind in table.rules if kind not in WITHOUT_EXAMPLE and not matters(kind)] == []


def differ(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not b if a is None or b is None else not torch.allclose(a, b, rtol=1e-6, atol=1e-9)


# -- implementations of the standard deviation in a norm -------------------------------------------------------------
EPS = 1e-5


def variance(x: Tensor) -> Tensor:
    return x.var(-1, unbiased=False, keepdim=True) + EPS


def squares(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + EPS


# x -> 1 / √(variance + ε)
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsqrt": lambda x: squares(x).rsqrt(),
    "sqrt": lambda x: 1 / torch.sqrt(variance(x)),
    "reciprocal of sqrt": lambda x: variance(x).sqrt().reciprocal(),
    "** 0.5": lambda x: 1 / squares(x) ** 0.5,
    "** -0.5": lambda x: squares(x) ** -0.5,
    "pow": lambda x: torch.pow(squares(x), -1 / 2),
    "pow, method": lambda x: 1 / variance(x).pow(exponent=0.5),
    "pow in place": lambda x: squares(x).pow_(-0.5),
    "sqrt in place": lambda x: 1 / squares(x).sqrt_(),
    "exp of half the log": lambda x: 1 / torch.exp(0.5 * torch.log(squares(x))),
    "exp of minus half the log": lambda x: torch.exp(-torch.log(squares(x)) / 2),
    "exp of half log1p": lambda x: 1 / torch.exp(torch.log1p(squares(x) - 1) * 0.5),
    "std": lambda x: 1 / ((x.std(-1, unbiased=False, keepdim=True) ** 2 + EPS) ** 0.5),
    "var_mean": lambda x: (torch.var_mean(x, -1, correction=0, keepdim=True)[0] + EPS).rsqrt(),
    "norm": lambda x: D**0.5 / torch.cat([x - x.mean(-1, keepdim=True), (D * EPS) ** 0.5 * torch.ones(B, N, 1)], -1).norm(dim=-1, keepdim=True),
}


@pytest.mark.part
@pytest.mark.parametrize("composite", MULTIPLIER)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decomposed_norm_equals_layer_norm(variant: str, composite: str) -> None:
    """With LN the deviation is constant for any implementation of the root; without, all have the ordinary gradient."""
    EXAMPLES["written"] = lambda m, x: (x - x.mean(-1, keepdim=True)) * VARIANTS[variant](x) * m.scale + m.shift
    EXAMPLES["function"] = lambda m, x: F.layer_norm(x, (D,), m.scale, m.shift, EPS)
    try:
        result, expected = (propagate(name, MULTIPLIER[composite])[1] for name in ("written", "function"))
    finally:
        del EXAMPLES["written"], EXAMPLES["function"]
    assert torch.allclose(result, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("biased", [True, False])
def test_deep_taylor_of_small_network_by_hand(biased: bool) -> None:
    """relu(x W₁ᵀ) W₂ᵀ + skip, compared with the rules applied by hand.

    x = (1, 2), W₁ = ((1, 1), (−2, 1)), hidden (3, 0), relu (3, 0); W₂ = (2, 5): y = 6, plus Σ... the skip adds x₁ = 1:
    logit 7, R = 1. Add (normalised): 6/7 and 1/7, both sums positive, so unchanged. Linear 2: the positive product 6 takes
    6/7. Linear 1, first unit: 1/3 and 2/3 of 6/7 = 2/7 and 4/7. With the skip: x₁ = 3/7, x₂ = 4/7.
    """

    class SkipNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=biased)
            self.second = nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x))) + x[:, :1]

    model = SkipNetwork().double().eval()
    with torch.no_grad():
        model.first.weight.copy_(torch.tensor([[1.0, 1.0], [-2.0, 1.0]]))
        model.second.weight.copy_(torch.tensor([[2.0, 5.0]]))
        if biased:
            model.first.bias.zero_()
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    value, relevance = walked(model, x, deep_taylor(), torch.ones(1, 1, dtype=torch.float64))
    assert value.item() == pytest.approx(7)
    assert relevance[0].tolist() == pytest.approx([3 / 7, 4 / 7])
