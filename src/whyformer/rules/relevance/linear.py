"""Relevance rules for linear layers and convolutions. I input width, O output width, M rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import grad

from whyformer.rules.core import Call, Grads, safe_divide


def live_rows(flow: Tensor) -> Tensor | None:
    """Indices of the rows of ``[M, O]`` that are not all zero, or None where most are alive.

    Behind the last attention only the readout rows carry anything, so most of that block's products can be left out.
    """
    probes = flow[:: max(1, flow.shape[0] // 4)]
    if int(probes.ne(0).any(-1).sum()) * 2 > probes.shape[0]:
        return None
    alive = flow.ne(0).any(-1)
    count = int(alive.sum())
    return alive.nonzero()[:, 0] if count * 2 <= flow.shape[0] else None


def _by_rows(flow: Tensor, inputs: Sequence[Tensor], product: Callable[..., Tensor], width: int) -> Tensor:
    """Apply ``product(flow, *inputs)`` on the live rows only; the others stay 0."""
    lead = flow.shape[:-1]
    flow = flow.reshape(-1, flow.shape[-1])
    inputs = [i.reshape(-1, i.shape[-1]) for i in inputs]
    rows = live_rows(flow)
    if rows is None:
        return product(flow, *inputs).reshape(*lead, width)
    result = flow.new_zeros(flow.shape[0], width)
    result[rows] = product(flow[rows], *(i[rows] for i in inputs))
    return result.reshape(*lead, width)


def linear_gradient(call: Call, flow: Tensor) -> Grads:
    """flow · W."""
    weight = call.operands[1]
    back = _by_rows(flow, (), lambda f: f @ weight, weight.shape[1])
    return [back, *(None for _ in call.operands[1:])]


_ROWS = {"cpu": 256}
"""Output units whose weights are split by sign at a time, elsewhere 4096: what is made of them is small, and stays in
the cache of a CPU."""


def _parts(weight: Tensor, copies: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(which output units, their weights, ``[copies, units, I]`` to write on; the same memory each time)."""
    step = _ROWS.get(weight.device.type, 4096)
    scratch = weight.new_empty(copies, min(step, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], step):
        some = weight[start : start + step]
        yield slice(start, start + step), some, scratch[:, : some.shape[0]]


def _share(relevance: Tensor, total: Tensor, magnitude: Tensor) -> Tensor:
    """R / Σ(positive z), with Σ(positive z) = (Σ z + Σ |z|) / 2; where that is 0 or cancellation noise, 0."""
    noise = 8 * torch.finfo(total.dtype).eps
    positive = total.add(magnitude).div_(2)
    return relevance / positive.masked_fill_(positive <= magnitude * noise, float("inf"))


def linear_alpha_beta(alpha: float = 1.0) -> Callable[[Call, Tensor], Grads]:
    """αβ rule with one shared denominator (TA Eq. 5 for α = 1; β = α − 1; the bias takes no relevance).

    R_j = α Σ_o (x_j W_oj)⁺ / Σ_j' (x_j' W_oj')⁺ R_o − β Σ_o (x_j W_oj)⁻ / Σ_j' (x_j' W_oj')⁻ R_o, with
    Σ(xW)⁺ = (Σ xW + Σ |x||W|) / 2: one matrix product forward and two backward instead of eight.
    """

    def rule(call: Call, relevance: Tensor) -> Grads:
        x, weight, *bias = call.operands
        if call.output is None:
            raise ValueError("the αβ rule reads the output")

        def product(r: Tensor, x: Tensor, y: Tensor) -> Tensor:
            width = x.abs()
            by_x, by_width = torch.zeros_like(x), torch.zeros_like(x)
            for part, w, (size,) in _parts(weight, 1):
                torch.abs(w, out=size)
                total = y[:, part] - bias[0][part] if bias else y[:, part]
                magnitude = width @ size.T
                s = _share(r[:, part], total, magnitude).mul_(alpha / 2)
                by_x.addmm_(s, w)
                by_width.addmm_(s, size)
                if alpha != 1:
                    s = _share(r[:, part], -total, magnitude).mul_((alpha - 1) / 2)
                    by_x.addmm_(s, w)
                    by_width.addmm_(s, size, alpha=-1)
            return by_x.mul_(x).addcmul_(by_width, width)

        parts = _by_rows(relevance, (x, call.output), product, weight.shape[1])
        return [parts, *(None for _ in call.operands[1:])]

    return rule


def linear_separate(call: Call, relevance: Tensor) -> Grads:
    """The published "full LRP" linear rule: the (+,+) and the (−,−) products each have their own denominator.

    R = x⁺ ⊙ (R/Z₁) W⁺ + x⁻ ⊙ (R/Z₂) W⁻ with Z₁ = x⁺W⁺, Z₂ = x⁻W⁻, so that ΣR can double (methods.md §1.2, §8 #8).
    """
    x, weight = call.operands[:2]

    def product(r: Tensor, x: Tensor) -> Tensor:
        up = x.relu()
        down = x - up
        by_up, by_down = torch.zeros_like(x), torch.zeros_like(x)
        for part, w, (plus, minus) in _parts(weight, 2):
            torch.clamp(w, min=0, out=plus)
            torch.sub(w, plus, out=minus)
            by_up.addmm_(safe_divide(r[:, part], up @ plus.T), plus)
            by_down.addmm_(safe_divide(r[:, part], down @ minus.T), minus)
        return by_up.mul_(up).addcmul_(by_down, down)

    parts = _by_rows(relevance, (x,), product, weight.shape[1])
    return [parts, *(None for _ in call.operands[1:])]


def linear_epsilon(epsilon: float = 1e-6) -> Callable[[Call, Tensor], Grads]:
    """ε rule: R_j = x_j Σ_o W_oj R_o / (y_o + ε · sign(y_o)); the bias takes its share (Bach et al. 2015)."""

    def rule(call: Call, relevance: Tensor) -> Grads:
        x, weight = call.operands[:2]
        if call.output is None:
            raise ValueError("the ε rule reads the output")

        def product(r: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return x * (safe_divide(r, y + epsilon * torch.where(y < 0, -1.0, 1.0).to(y.dtype)) @ weight)

        parts = _by_rows(relevance, (x, call.output), product, weight.shape[1])
        return [parts, *(None for _ in call.operands[1:])]

    return rule


def linear_gamma(gamma: float = 0.25) -> Callable[[Call, Tensor], Grads]:
    """γ rule for inputs of any sign: R_j = Σ_o (z_oj + γ z_oj^s) / Σ (…) R_o, s the sign of y_o; no bias."""

    def rule(call: Call, relevance: Tensor) -> Grads:
        x, weight = call.operands[:2]
        size = weight.abs()

        def product(r: Tensor, x: Tensor) -> Tensor:
            total, magnitude = x @ weight.T, x.abs() @ size.T
            sign = torch.where(total < 0, -1.0, 1.0).to(x.dtype)
            # z + γ z^s = (1 + γ/2) z + s γ/2 |z|, so that the denominator never crosses 0
            s = safe_divide(r, (1 + gamma / 2) * total + sign * (gamma / 2) * magnitude)
            return x * ((1 + gamma / 2) * s @ weight) + x.abs() * ((gamma / 2) * (s * sign) @ size)

        parts = _by_rows(relevance, (x,), product, weight.shape[1])
        return [parts, *(None for _ in call.operands[1:])]

    return rule


def _convolve_back(flow: Tensor, weight: Tensor, call: Call) -> Tensor:
    shape = call.operands[0].shape
    options = {name: call.info[name] for name in ("stride", "padding", "dilation", "groups")}
    if isinstance(options["padding"], str):  # "same", "valid": torch.nn.grad takes numbers only
        with torch.enable_grad():
            x = call.operands[0].detach().requires_grad_()
            return torch.autograd.grad(_convolve(x, weight, call), x, flow)[0]
    gradient = {3: grad.conv1d_input, 4: grad.conv2d_input, 5: grad.conv3d_input}
    return gradient[flow.dim()](shape, weight, flow, **options)


def _convolve(x: Tensor, weight: Tensor, call: Call) -> Tensor:
    options = {name: call.info[name] for name in ("stride", "padding", "dilation", "groups")}
    convolution = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}
    return convolution[x.dim()](x, weight, None, **options)


def convolution_z_box(call: Call, relevance: Tensor) -> Grads:
    """z^B rule of the input layer (Montavon et al. 2017): the box [l, h] is each sample's own range of pixel values.

    R = x ⊙ Cᵀ(S, W) − l · Cᵀ(S, W⁺) − h · Cᵀ(S, W⁻), S = R / (C(x, W) − C(l, W⁺) − C(h, W⁻)); no bias.
    """
    x, weight = call.operands[:2]
    flat = x.flatten(1)
    lead = [-1] + [1] * (x.dim() - 1)
    low = flat.amin(1).reshape(lead).expand_as(x)
    high = flat.amax(1).reshape(lead).expand_as(x)
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    z = _convolve(x, weight, call) - _convolve(low, plus, call) - _convolve(high, minus, call)
    s = safe_divide(relevance, z)
    back = x * _convolve_back(s, weight, call)
    back = back - low * _convolve_back(s, plus, call) - high * _convolve_back(s, minus, call)
    return [back, *(None for _ in call.operands[1:])]


def convolution_alpha_beta(call: Call, relevance: Tensor) -> Grads:
    """αβ rule with α = 1 and one shared denominator, as :func:`linear_alpha_beta`."""
    x, weight = call.operands[:2]
    size = weight.abs()
    s = _share(relevance, _convolve(x, weight, call), _convolve(x.abs(), size, call))
    back = (x * _convolve_back(s, weight, call) + x.abs() * _convolve_back(s, size, call)) / 2
    return [back, *(None for _ in call.operands[1:])]
