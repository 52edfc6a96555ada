"""Composite operations opened into primitive ones compute the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whyformer.composites.chefer import deep_taylor
from whyformer.composites.gradient import GRADIENT
from whyformer.composites.named import conservative
from whyformer.engine import decompositions
from whyformer.engine.probes import AttentionCall, Maps
from whyformer.engine.run import record
from whyformer.errors import UnknownOperation
from whyformer.rules.core import Composite

B, N, E, H = 2, 4, 6, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i))
    return module


class Wrapped(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.inner, self.batch_first, self.options = inner, batch_first, options
        self.weights: Tensor | None = None
        self.eval()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, self.weights = self.inner(q, k, v, **self.options)
        return out.flatten(1) if self.batch_first else out.transpose(0, 1).flatten(1)


UPPER = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * N, [False] * (N - 1) + [True]])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": UPPER},
    "float": {"attn_mask": random(N, N, seed=30)},
    "float, each head": {"attn_mask": random(B * H, N, N, seed=31)},
    "causal hint": {"attn_mask": UPPER, "is_causal": True},
    "key padding": {"key_padding_mask": PADDING},
    "key padding, float": {"key_padding_mask": torch.zeros(B, N, dtype=torch.float64).masked_fill(PADDING, float("-inf"))},
    "both": {"attn_mask": torch.zeros(N, N, dtype=torch.float64).masked_fill(UPPER, float("-inf")), "key_padding_mask": torch.zeros(B, N, dtype=torch.float64).masked_fill(PADDING, float("-inf"))},
    "both, bool": {"attn_mask": UPPER, "key_padding_mask": PADDING},
}  # fmt: skip


@pytest.mark.part(times=2)
@pytest.mark.parametrize(("batch_first", "need_weights"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("composite", ["gradient", "deep Taylor"])
def test_multi_head_attention(composite: str, mask: str, batch_first: bool, need_weights: bool) -> None:
    """Value, returned weights and gradient of ``nn.MultiheadAttention``, with every kind of mask."""
    inner = attention(batch_first=batch_first)
    model = Wrapped(inner, batch_first, need_weights=need_weights, **MASKS[mask])
    shape = (B, N, E) if batch_first else (N, B, E)
    q, k, v = (random(*shape, seed=s) for s in (1, 2, 3))
    leaf = q.clone().requires_grad_()
    wanted = model(leaf, k, v)
    wanted_weights = model.weights
    table = {"gradient": GRADIENT, "deep Taylor": deep_taylor()}[composite]
    recording = record(model, ((q, k, v), {}), table, root="input", root_input=0)
    assert torch.allclose(recording.logits, wanted, atol=1e-12)
    if need_weights:
        assert model.weights is not None and wanted_weights is not None
        assert torch.allclose(model.weights, wanted_weights, atol=1e-12)
    else:
        assert model.weights is None
    flow = random(*wanted.shape, seed=4)
    (got,) = recording.backward(flow, keep=True)
    (gradient,) = torch.autograd.grad(wanted, leaf, flow)
    assert torch.allclose(got, gradient, atol=1e-11)
    if composite == "deep Taylor":
        assert recording.backward(flow, relevance=True)[0].isfinite().all()


@pytest.mark.parametrize("average", [True, False])
def test_returned_weights(average: bool) -> None:
    model = Wrapped(attention(batch_first=True), True, need_weights=True, average_attn_weights=average)
    x = random(B, N, E)
    model(x, x, x)
    wanted = model.weights
    record(model, ((x, x, x), {}), GRADIENT)
    assert wanted is not None and model.weights is not None
    assert wanted.shape == ((B, N, N) if average else (B, H, N, N))
    assert torch.allclose(model.weights, wanted, atol=1e-12)


def test_its_map_is_captured_whichever_way_it_is_called() -> None:
    x = random(B, N, E)
    maps: list[Tensor] = []

    def watch(call: AttentionCall) -> None:
        maps.append(call.map().detach())

    for options in ({"need_weights": False}, {"need_weights": True}):
        record(Wrapped(attention(batch_first=True), True, **options), ((x, x, x), {}), GRADIENT, Maps(watch))
    assert len(maps) == 2
    assert torch.allclose(*maps, atol=1e-12)
    assert maps[0].shape == (B, H, N, N)


@pytest.mark.parametrize("options", [{"bias": False}, {"kdim": 4, "vdim": 5}])
def test_other_projections(options: dict[str, Any]) -> None:
    inner = attention(batch_first=True, **options)
    model = Wrapped(inner, True, need_weights=False)
    q, k, v = random(B, N, E), random(B, N, options.get("kdim", E), seed=1), random(B, N, options.get("vdim", E), seed=2)
    recording = record(model, ((q, k, v), {}), deep_taylor(), root="input", root_input=0)
    assert torch.allclose(recording.logits, model(q, k, v), atol=1e-12)
    assert recording.backward(torch.ones_like(recording.logits), relevance=True)[0].isfinite().all()


def test_cross_attention_of_other_length() -> None:
    model = Wrapped(attention(batch_first=True), True, need_weights=True)
    q, k = random(B, 2, E), random(B, 7, E, seed=1)
    recording = record(model, ((q, k, k), {}), deep_taylor(), root="input", root_input=0)
    assert torch.allclose(recording.logits, model(q, k, k), atol=1e-12)


def test_unbatched() -> None:
    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    model, x = Unbatched().eval(), random(N, E)
    assert torch.allclose(record(model, ((x,), {}), GRADIENT).logits, model(x), atol=1e-12)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_keys_that_are_no_tokens_are_refused(options: dict[str, Any]) -> None:
    model, x = Wrapped(attention(batch_first=True, **options), True), random(B, N, E)
    with pytest.raises(UnknownOperation, match="add_bias_kv"):
        record(model, ((x, x, x), {}), deep_taylor(), root="input", root_input=0)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_encoder_layers_fast_path_computes_the_same(norm_first: bool, padded: bool) -> None:
    """Never taken while an interception is active; without one it is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(E, H, 8, batch_first=True, norm_first=norm_first, dtype=torch.float64)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=PADDING if padded else None)[:, 0]

    model, x = Model(), random(B, N, E)
    with torch.no_grad():
        wanted = model(x)
    recording = record(model, ((x,), {}), deep_taylor(), root="input", root_input=0)
    assert torch.allclose(recording.logits, wanted, atol=1e-12)


@pytest.mark.part(times=2)
@pytest.mark.parametrize("scales", [{}, {"beta": 0.5}, {"alpha": 2.0}, {"beta": 0.5, "alpha": 2.0}])
@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("trained", [False, True])
def test_addmm_as_a_linear_operation(scales: dict[str, float], rows: int | None, trained: bool) -> None:
    bias = torch.randn(5) if rows is None else torch.randn(rows, 5)
    x, weight = torch.randn(3, 4), torch.randn(4, 5, requires_grad=trained)
    torch.testing.assert_close(decompositions.affine_addmm(bias, x, weight, **scales), torch.addmm(bias, x, weight, **scales))


@pytest.mark.parametrize("composite", [deep_taylor(), conservative("AH", "LN")], ids=["relevance", "multiplier"])
def test_glu_and_prelu_are_what_they_are_written_out(composite: Composite) -> None:
    """The same scores as of the gate and the slopes by hand."""
    linear, slopes = nn.Linear(E, 2 * E, dtype=torch.float64), torch.rand(E, dtype=torch.float64)

    class Gate(nn.Module):
        def __init__(self, written: bool) -> None:
            super().__init__()
            self.linear, self.written, self.slopes = linear, written, nn.Parameter(slopes)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            if not self.written:
                return nn.functional.prelu(nn.functional.glu(hidden), self.slopes)
            left, right = hidden.chunk(2, -1)
            return nn.functional.prelu(left * torch.sigmoid(right), self.slopes)

    x, seed = random(B, E), torch.eye(B, E, dtype=torch.float64)
    flows = []
    for written in (False, True):
        recording = record(Gate(written).eval(), ((x,), {}), composite, root="input", root_input=0)
        flows.append(recording.backward(seed, relevance=composite.carrier == "relevance")[0])
    assert torch.allclose(*flows) and flows[0].any()
