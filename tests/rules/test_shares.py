"""Share rules against dense references: linear maps, biases, norms, activations, gates; and equivalent implementations of heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import UnknownOperation
from whyformer.rules.shares import DROPPED, ShareRules
from whyformer.tape.labelling import find_rows
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.sources import find_sources
from whyformer.tape.walking import walk_forward

B, N, D = 2, 4, 6


class Function(nn.Module):
    """A function of ``[B, N, D]`` with some weights."""

    def __init__(self, function: Callable[[Function, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.layer, self.rows = nn.Linear(D, D).double(), torch.randn(N, N).double()
        self.scale, self.shift = nn.Parameter(torch.rand(D).double()), nn.Parameter(torch.randn(D).double())
        self.conv = nn.Conv1d(D, D, 3, padding=1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def shares(function: Callable[[Function, Tensor], Tensor], x: Tensor, at_once: int = 3) -> tuple[Function, Tensor, Tensor]:
    """(model, output, shares ``[N, ...]`` of the rows of x)."""
    model = Function(function)
    tape, raw = record(model, x)
    entry, out = tape.number(x), tape.number(raw)
    rows = find_rows(tape, find_sources(tape, {"x": x}), [out])
    queries = rows.families[1].numbers
    rules = ShareRules(tape, rows, torch.ones(B, N, dtype=torch.bool), at_once)
    result = walk_forward(read_program(tape, [entry], out), {entry: rules.begin(entry, queries)}, [out], rules, DROPPED)
    return model, raw, rules.distribute_rest(out, result[out]).totals()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(0)).double()


def single_rows(x: Tensor) -> Tensor:
    """``[N, B, N, D]`` where entry i has only row i of x, and 0 elsewhere."""
    return torch.eye(N).double()[:, None, :, None] * x


LINEAR: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "layer": lambda m, x: x @ m.layer.weight,
    "rows": lambda m, x: m.rows @ x,
    "convolution": lambda m, x: m.conv(x.mT).mT,
    "heads": lambda m, x: x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1),
    "pieces": lambda m, x: torch.cat([x[:, 1:], x[:, :1] * 2], 1),
    "sum": lambda m, x: x + (x @ m.layer.weight) / 3 - x.mean(1, keepdim=True),
    "filled": lambda m, x: x.masked_fill(torch.tensor([True, False] * 3), 0.0),
    "written in place": lambda m, x: x.clone().mul_(2).add_(x.flip(1)),
}


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_map_applies_to_each_share(name: str, at_once: int, x: Tensor) -> None:
    model, out, parts = shares(LINEAR[name], x, at_once)
    torch.testing.assert_close(parts, torch.stack([model(row) for row in single_rows(x)]))
    torch.testing.assert_close(parts.sum(0), out)


def test_bias_is_distributed_by_product_with_shares(x: Tensor) -> None:
    mixed = lambda m, x: F.relu(m.layer(m.rows @ x)) * 0 + m.layer(m.rows @ x)  # noqa: E731  the relu branch is 0, so the only bias is that of the layer
    model, out, parts = shares(mixed, x)
    contributions = torch.stack([(model.rows @ row) @ model.layer.weight.T for row in single_rows(x)])
    sizes = (contributions * model.layer.bias).sum(-1, keepdim=True).abs()
    torch.testing.assert_close(parts, contributions + sizes / sizes.sum(0) * model.layer.bias)
    torch.testing.assert_close(parts.sum(0), out)


def test_bias_without_shares_is_distributed_equally(x: Tensor) -> None:
    model, _, parts = shares(lambda m, x: m.layer(x * 0) + x * 0, x)
    torch.testing.assert_close(parts, (model.layer.bias / N).expand(N, B, N, D))


@pytest.mark.parametrize("bias", [torch.ones(D), torch.tensor([-1.0, 1] * (D // 2))], ids=["of norms", "of equal features"])
def test_bias_that_is_orthogonal_to_all_shares_is_distributed_equally(bias: Tensor, x: Tensor) -> None:
    """Their inner products are not exactly 0, and the quotients of their rounding errors would be the weights."""
    x = x - x.mean(-1, keepdim=True) if bool((bias == 1).all()) else x[..., :1].expand_as(x).contiguous()
    _, _, parts = shares(lambda m, x: m.rows @ x * 0.3 + bias.double(), x)
    model = Function(lambda m, x: m.rows @ x * 0.3)
    torch.testing.assert_close(parts, torch.stack([model(row) for row in single_rows(x)]) + bias.double() / N)


NORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "layer norm": lambda m, x: F.layer_norm(x, (D,), m.scale, m.shift),
    "layer norm written out": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * m.scale + m.shift
    ),
    "rms norm": lambda m, x: F.rms_norm(x, (D,), m.scale, 1e-5),
    "rms norm written out": lambda m, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * m.scale,
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_divides_shares_by_deviation_of_total(name: str, x: Tensor) -> None:
    mixed = lambda m, x: NORMS[name](m, m.rows @ x)  # noqa: E731
    model, out, parts = shares(mixed, x)
    total, contributions = model.rows @ x, model.rows @ single_rows(x)
    centred = (lambda t: t - t.mean(-1, keepdim=True)) if "layer" in name else (lambda t: t)
    contributions = centred(contributions) / (centred(total).square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.scale
    if "layer" in name:
        sizes = (contributions * model.shift).sum(-1, keepdim=True).abs()
        contributions = contributions + sizes / sizes.sum(0) * model.shift
    torch.testing.assert_close(parts, contributions)
    torch.testing.assert_close(parts.sum(0), out)


@pytest.mark.parametrize("curve", [F.gelu, torch.tanh, F.relu, F.softplus])
def test_activation_multiplies_shares_by_secant_slope(curve: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model, out, parts = shares(lambda m, x: curve(m.rows @ x), x)
    z, origin = model.rows @ x, curve(torch.zeros(()).double())
    contributions = (model.rows @ single_rows(x)) * (curve(z) - origin) / z
    sizes = (contributions * origin).sum(-1, keepdim=True).abs()
    contributions = contributions + (sizes / sizes.sum(0) * origin if bool(origin) else 0)
    torch.testing.assert_close(parts, contributions)
    torch.testing.assert_close(parts.sum(0), out)


def test_product_passes_half_of_shares_through_each_branch(x: Tensor) -> None:
    model, out, parts = shares(lambda m, x: (m.rows @ x) * (x @ m.layer.weight), x)
    left, right = model.rows @ x, x @ model.layer.weight
    expected = torch.stack([((model.rows @ p) * right + left * (p @ model.layer.weight)) / 2 for p in single_rows(x)])
    torch.testing.assert_close(parts, expected)
    torch.testing.assert_close(parts.sum(0), out)


def test_divisor_is_constant(x: Tensor) -> None:
    model, out, parts = shares(lambda m, x: (m.rows @ x) / (x.exp() + 2), x)
    torch.testing.assert_close(parts, (model.rows @ single_rows(x)) / (x.exp() + 2))
    torch.testing.assert_close(parts.sum(0), out)


def test_operation_that_is_not_a_sum_of_shares_is_refused(x: Tensor) -> None:
    with pytest.raises(UnknownOperation, match="cumprod"):
        shares(lambda m, x: x.cumprod(1), x)


# -- equivalent implementations of heads -----------------------------------------------------------------------------
class HeadLayoutBlock(nn.Module):
    """A block with one of several implementations of attention heads, norms and an MLP."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.q, self.kv, self.out = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(12, 12)
        self.before, self.attention_norm, self.last = nn.LayerNorm(12), nn.LayerNorm(12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attend(x))
        return self.last(x + self.down(F.gelu(self.up(x))))

    def attend(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x).unflatten(-1, (3, 4)), self.kv(x).chunk(2, -1)  # three heads share one key and value
        if self.variant == "one by one":
            mixed = torch.cat([(q[:, :, h] @ k.mT / 2).softmax(-1) @ v for h in range(3)], -1)
        elif self.variant == "folded into queries":
            maps = (q.transpose(1, 2).flatten(1, 2) @ k.mT / 2).softmax(-1)
            mixed = (maps @ v).unflatten(1, (3, -1)).transpose(1, 2).flatten(2)
        else:
            q, k, v = q.transpose(1, 2), k[:, None].expand(-1, 3, -1, -1), v[:, None].expand(-1, 3, -1, -1)
            if self.variant == "fused":
                mixed = F.scaled_dot_product_attention(q, k, v)
            elif self.variant == "values first":
                mixed = (v.mT @ (k @ q.mT / 2).softmax(-2)).mT
            elif self.variant == "samples last":
                q, k, v = (t.movedim(0, 1).flatten(0, 1) for t in (q, k, v))
                mixed = ((q @ k.mT / 2).softmax(-1) @ v).unflatten(0, (3, -1)).movedim(1, 0)
            else:
                mixed = (q @ k.mT / 2).softmax(-1) @ v
            mixed = mixed.transpose(1, 2).flatten(2)
        return self.out(mixed)


class HeadLayoutModel(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.blocks = nn.Embedding(20, 12), nn.ModuleList([HeadLayoutBlock(variant), HeadLayoutBlock(variant)])
        self.head = nn.Linear(12, 3)
        self.double().eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


IDS = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])}
VECTORS = ["norm_attention", "globenc", "alti", "decompx", "value_zeroing", "legrad", "gradcam"]


VARIANTS = ["fused", "folded into queries", "values first", "samples last"]
ONE_BY_ONE = ["norm_attention", "value_zeroing", "gradcam"]


@pytest.mark.parametrize(
    ("method", "variant"), [*((m, w) for m in VECTORS for w in VARIANTS), *((m, "one by one") for m in ONE_BY_ONE)]
)
def test_equivalent_head_layouts_have_same_scores(method: str, variant: str) -> None:
    plain, result = (whyformer.explain(HeadLayoutModel(w), IDS, method, 1) for w in ("plain", variant))
    torch.testing.assert_close(result.scores, plain.scores)
