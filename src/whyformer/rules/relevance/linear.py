"""Relevance rules for linear layers and convolutions. I input width, O output units, M rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional, grad

from whyformer.rules.core import Call, Grads, safe_divide

RelevanceRule = Callable[[Call, Tensor], Grads]
_ROWS = {"cpu": 256}
"""Output units whose weights are split by sign at a time, elsewhere 4096: what is made of them is small, and stays in
the cache of a CPU."""


@dataclass(frozen=True)
class Layer:
    """y = W x + b of a linear layer or a convolution, as its two halves: all that a rule needs to know of it.

    Attributes:
        forward: (x, W) -> W x; x is ``[M, I]`` or ``[B, C, ...]``, output units are axis 1 of the result.
        add_back: (into, s, W): into += Wᵀ s.
        step: output units at a time.
    """

    weight: Tensor
    bias: Tensor | None
    forward: Callable[[Tensor, Tensor], Tensor]
    add_back: Callable[[Tensor, Tensor, Tensor], object]
    step: int

    def parts(self, copies: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which output units, their weights, ``[copies, units, ...]`` to write on; the same memory each time)."""
        step = min(self.step, self.weight.shape[0])
        scratch = self.weight.new_empty(copies, step, *self.weight.shape[1:])
        for start in range(0, self.weight.shape[0], step):
            some = self.weight[start : start + step]
            units = slice(None) if step == self.weight.shape[0] else slice(start, start + step)
            yield units, some, scratch[:, : some.shape[0]]

    def unbiased(self, y: Tensor, part: slice) -> Tensor:
        """W x of some output units."""
        y = y[:, part]
        return y if self.bias is None else y - self.bias[part].reshape(-1, *(1,) * (y.dim() - 2))


def _through(product: Callable[..., Tensor], *beside: Tensor) -> RelevanceRule:
    """``product(layer, R, x[, y][, beside])`` -> R of x as a rule; y where the :class:`Rule` keeps the output, and
    tensors like x ``beside`` it.

    Rows of a linear layer that carry nothing are left out.
    """

    def rule(call: Call, relevance: Tensor) -> Grads:
        x, weight, *bias = call.operands
        inputs = (x, *beside) if call.output is None else (x, call.output, *beside)
        if call.info:  # stride and so on
            back = product(_convolution(call, weight, *bias), relevance, *inputs)
        else:
            step = _ROWS.get(weight.device.type, 4096)
            layer = Layer(weight, bias[0] if bias else None, functional.linear, Tensor.addmm_, step)
            back = _by_rows(relevance, inputs, lambda *rows: product(layer, *rows), weight.shape[1])
        return [back, *(None for _ in call.operands[1:])]

    return rule


def layer_gradient(call: Call, flow: Tensor) -> Grads:
    """Wᵀ · flow."""
    weight = call.operands[1]
    if call.info:
        back = _convolve_back(flow, weight, call)
    else:
        back = _by_rows(flow, (), lambda f: f @ weight, weight.shape[1])
    return [back, *(None for _ in call.operands[1:])]


# -- the two kinds of layer ----------------------------------------------------------------------------------------
def live_rows(flow: Tensor) -> Tensor | None:
    """Indices of the rows of ``[M, O]`` that are not all zero, or None where most are alive.

    Behind the last attention only the readout rows carry anything, so most of that block's products can be left out
    (not on a GPU, where to ask takes longer).
    """
    if flow.is_cuda:
        return None
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


def _convolution(call: Call, weight: Tensor, bias: Tensor | None = None) -> Layer:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _convolve(x, weight, call)

    def add_back(into: Tensor, s: Tensor, weight: Tensor) -> Tensor:
        return into.add_(_convolve_back(s, weight, call))

    return Layer(weight, bias, forward, add_back, weight.shape[0])


_STRAIGHT: dict[int, Callable[..., Tensor]] = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
_TURNED: dict[int, Callable[..., Tensor]] = {
    3: functional.conv_transpose1d,
    4: functional.conv_transpose2d,
    5: functional.conv_transpose3d,
}


def _convolve(x: Tensor, weight: Tensor, call: Call) -> Tensor:
    table = _TURNED if "output_padding" in call.info else _STRAIGHT
    return table[x.dim()](x, weight, None, **call.info)


def _convolve_back(flow: Tensor, weight: Tensor, call: Call) -> Tensor:
    x = call.operands[0]
    # torch.nn.grad knows no transposed convolution, and of paddings numbers only
    if "output_padding" in call.info or isinstance(call.info["padding"], str):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(_convolve(x, weight, call), x, flow)[0]
    gradient = {3: grad.conv1d_input, 4: grad.conv2d_input, 5: grad.conv3d_input}
    return gradient[flow.dim()](x.shape, weight, flow, **call.info)


# -- rules ---------------------------------------------------------------------------------------------------------
def _with_sizes(shares: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> RelevanceRule:
    """R_j = x_j Σ_o W_oj a_o + |x_j| Σ_o |W_oj| b_o with (a, b) = shares(R, Σ z, Σ |z|), z_oj = W_oj x_j.

    What depends on the signs of the z alone needs no more: one product forward and two back beside the ordinary ones.
    """

    def product(layer: Layer, r: Tensor, x: Tensor, y: Tensor) -> Tensor:
        width = x.abs()
        by_x, by_width = torch.zeros_like(x), torch.zeros_like(x)
        for part, w, (size,) in layer.parts(1):
            torch.abs(w, out=size)
            a, b = shares(r[:, part], layer.unbiased(y, part), layer.forward(width, size))
            layer.add_back(by_x, a, w)
            layer.add_back(by_width, b, size)
        return by_x.mul_(x).addcmul_(by_width, width)

    return _through(product)


def _share(relevance: Tensor, total: Tensor, magnitude: Tensor) -> Tensor:
    """R / 2 Σ(positive z), with 2 Σ(positive z) = Σ z + Σ |z|; where that is 0 or cancellation noise, 0."""
    noise = 16 * torch.finfo(total.dtype).eps
    positive = total + magnitude
    return relevance / positive.masked_fill_(positive <= magnitude * noise, float("inf"))


def alpha_beta(alpha: float = 1.0) -> RelevanceRule:
    """αβ rule with one shared denominator (TA Eq. 5 for α = 1; β = α − 1; the bias takes no relevance).

    R_j = α Σ_o (x_j W_oj)⁺ / Σ_j' (x_j' W_oj')⁺ R_o − β Σ_o (x_j W_oj)⁻ / Σ_j' (x_j' W_oj')⁻ R_o, with
    Σ(xW)⁺ = (Σ xW + Σ |x||W|) / 2.
    """

    def shares(r: Tensor, total: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        up = _share(r, total, magnitude)
        if alpha == 1:
            return up, up
        down = _share(r, -total, magnitude).mul_(alpha - 1)
        up.mul_(alpha)
        return up + down, up - down

    return _with_sizes(shares)


def gamma(gamma: float = 0.25) -> RelevanceRule:
    """γ rule for inputs of any sign: R_j = Σ_o (z_oj + γ z_oj^s) / Σ (…) R_o, s the sign of Σ z; no bias."""

    def shares(r: Tensor, total: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        sign = torch.where(total < 0, -1.0, 1.0).to(total.dtype)
        # z + γ z^s = (1 + γ/2) z + s γ/2 |z|, so that the denominator never crosses 0
        s = safe_divide(r, (1 + gamma / 2) * total + sign * (gamma / 2) * magnitude)
        return (1 + gamma / 2) * s, (gamma / 2) * s * sign

    return _with_sizes(shares)


@_through
def separate(layer: Layer, r: Tensor, x: Tensor) -> Tensor:
    """The published "full LRP" linear rule: the (+,+) and the (−,−) products each have their own denominator.

    R = x⁺ ⊙ (R/Z₁) W⁺ + x⁻ ⊙ (R/Z₂) W⁻ with Z₁ = x⁺W⁺, Z₂ = x⁻W⁻, so that ΣR can double.
    """
    up = x.relu()
    down = x - up
    by_up, by_down = torch.zeros_like(x), torch.zeros_like(x)
    for part, w, (plus, minus) in layer.parts(2):
        torch.clamp(w, min=0, out=plus)
        torch.sub(w, plus, out=minus)
        layer.add_back(by_up, safe_divide(r[:, part], layer.forward(up, plus)), plus)
        layer.add_back(by_down, safe_divide(r[:, part], layer.forward(down, minus)), minus)
    return by_up.mul_(up).addcmul_(by_down, down)


def epsilon(epsilon: float = 1e-6) -> RelevanceRule:
    """ε rule: R_j = x_j Σ_o W_oj R_o / (y_o + ε · sign(y_o)); the bias takes its share (Bach et al. 2015)."""

    def product(layer: Layer, r: Tensor, x: Tensor, y: Tensor) -> Tensor:
        back = torch.zeros_like(x)
        layer.add_back(back, safe_divide(r, y + epsilon * torch.where(y < 0, -1.0, 1.0).to(y.dtype)), layer.weight)
        return back.mul_(x)

    return _through(product)


def box(call: Call, relevance: Tensor) -> Grads:
    """z^B rule of the input layer (Montavon et al. 2017): the box [l, h] is each sample's own range of pixel values.

    R = x ⊙ Wᵀ S − l · W⁺ᵀ S − h · W⁻ᵀ S, S = R / (W x − W⁺ l − W⁻ h); no bias.
    """
    x, count = call.operands[0], call.run.batch
    samples = count if x.shape[0] % count == 0 else x.shape[0]
    bounds = x.reshape(samples, -1).aminmax(dim=1)
    each = x.shape[0] // samples
    low, high = (b.repeat_interleave(each).reshape(-1, *(1,) * (x.dim() - 1)).expand_as(x) for b in bounds)

    def product(layer: Layer, r: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        weight = layer.weight
        plus, minus = weight.clamp(min=0), weight.clamp(max=0)
        s = safe_divide(r, layer.forward(x, weight) - layer.forward(low, plus) - layer.forward(high, minus))
        result = torch.zeros_like(x)
        for value, w in ((x, weight), (-low, plus), (-high, minus)):
            back = torch.zeros_like(x)
            layer.add_back(back, s, w)
            result.addcmul_(back, value)
        return result

    return _through(product, low, high)(call, relevance)
