"""Implementations of linear layers: (x ``[B, N, in]``, weight ``[out, in]``, bias) -> ``[B, N, out]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from ..base import Way, linear, matrix, noise, shift


def flat_addmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x.view(-1, x.size(-1)), w.t()).view(*x.shape[:-1], w.shape[0])


def expanded_bmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(x, w.t().unsqueeze(0).expand(x.shape[0], -1, -1)) + b


def expanded_baddbmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(b.expand(x.shape[0], 1, -1), x, w.t().expand(x.shape[0], -1, -1))


def lora_parts(w: Tensor) -> tuple[Tensor, Tensor]:
    """Two constant factors whose product is a part of the weight."""
    return noise(f"lora a {w.shape[1]}", 2, w.shape[1]) / 3, noise(f"lora b {w.shape[0]}", w.shape[0], 2) / 3


def merged_lora(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    a, up = lora_parts(w)
    base = w - 0.5 * (up @ a)
    return F.linear(x, base + 0.5 * (up @ a), b)


def merged_lora_baddbmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    a, up = lora_parts(w)
    return x @ torch.addmm(w - up @ a, up, a).T + b


def beside_lora(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    a, up = lora_parts(w)
    return F.linear(x, w - up @ a, b) + F.linear(F.linear(x, a), up)


def weight_normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    length = w.norm(dim=1, keepdim=True)
    direction = 3.0 * w
    return F.linear(x, length * direction / direction.norm(dim=1, keepdim=True), b)


def torch_weight_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, torch._weight_norm(2 * w, w.norm(dim=1, keepdim=True), 0), b)


def dequantised(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    scale = w.abs().amax(dim=1, keepdim=True) / 127
    return F.linear(x, (w / scale) * scale, b)


def bias_as_column(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    ones = torch.ones(*x.shape[:-1], 1, dtype=x.dtype)
    return torch.cat([x, ones], dim=-1) @ torch.cat([w, b[:, None]], dim=1).T


def padded_column(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) @ torch.cat([w, b[:, None]], dim=1).mT


def input_halves(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    half = w.shape[1] // 2
    return x[..., :half] @ w[:, :half].T + x[..., half:] @ w[:, half:].T + b


def output_halves(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    half = w.shape[0] // 2
    return torch.cat([F.linear(x, w[:half], b[:half]), F.linear(x, w[half:], b[half:])], dim=-1)


def tensor_parallel(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    shards = zip(w.chunk(2, dim=0), b.chunk(2), strict=True)
    return torch.cat([torch.matmul(x, shard.t()) + part for shard, part in shards], dim=-1)


def by_token(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.stack([F.linear(x[:, i], w, b) for i in range(x.shape[1])], dim=1)


def by_sample(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.stack([torch.addmm(b, one, w.T) for one in x])


def vector_by_vector(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.stack([torch.stack([torch.mv(w, t) + b for t in s]) for s in x])


def module_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    layer = nn.Linear(w.shape[1], w.shape[0], dtype=w.dtype)
    return torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))


def loaded_module(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    layer = nn.Linear(w.shape[1], w.shape[0], dtype=w.dtype)
    layer.weight, layer.bias = nn.Parameter(w.detach()), nn.Parameter(b.detach())
    return layer(x)


def spectral(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The weight divided and multiplied by its largest singular value."""
    size = torch.linalg.matrix_norm(w, 2)
    return F.linear(x, w / size, b / size) * size


def out_multiplied(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A width multiplier of the output, as in µP."""
    return F.linear(x, w * 4.0) / 4.0 + b


def into_buffer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.new_zeros(*x.shape[:-1], w.shape[0])
    y += x @ w.T
    y += b
    return y


def row_blocks(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.new_empty(*x.shape[:-1], w.shape[0])
    half = w.shape[0] // 2
    y[..., :half] = F.linear(x, w[:half], b[:half])
    y[..., half:] = F.linear(x, w[half:], b[half:])
    return y


LINEAR: dict[str, Way] = {
    "F.linear": lambda x, w, b: F.linear(x, w, b),
    "F.linear + b": lambda x, w, b: F.linear(x, w) + b,
    "x @ W.T + b": lambda x, w, b: x @ w.T + b,
    "x @ W.t()": lambda x, w, b: b + x @ w.t(),
    "matmul, transpose": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)).add(b),
    "method matmul, mT": lambda x, w, b: x.matmul(w.mT).add_(b),
    "W @ x": lambda x, w, b: (w @ x.mT).mT + b,
    "W @ x, column of biases": lambda x, w, b: (torch.matmul(w, x.transpose(1, 2)) + b[:, None]).transpose(1, 2),
    "W @ each vector": lambda x, w, b: (w @ x.unsqueeze(-1)).squeeze(-1) + b,
    "each vector @ W": lambda x, w, b: (x.unsqueeze(-2) @ w.T).squeeze(-2) + b,
    "einsum bnd,ed": lambda x, w, b: torch.einsum("bnd,ed->bne", x, w) + b,
    "einsum ...d,ed": lambda x, w, b: torch.einsum("...d,ed->...e", x, w) + b,
    "einsum, weight first": lambda x, w, b: torch.einsum("oi,bni->bno", w, x) + b,
    "einsum, transposed weight": lambda x, w, b: torch.einsum("bnd,de->bne", x, w.T) + b,
    "einsum without arrow": lambda x, w, b: torch.einsum("...i,oi", x, w) + b,
    "tensordot": lambda x, w, b: torch.tensordot(x, w, dims=([-1], [1])) + b,
    "tensordot of one axis": lambda x, w, b: torch.tensordot(x, w.T, dims=1) + b,
    "inner": lambda x, w, b: torch.inner(x, w) + b,
    "addmm of flat rows": flat_addmm,
    "mm of flat rows": lambda x, w, b: torch.mm(x.flatten(0, 1), w.T).unflatten(0, x.shape[:2]) + b,
    "bmm, expanded": expanded_bmm,
    "bmm, repeated": lambda x, w, b: torch.bmm(x, w.T.repeat(x.shape[0], 1, 1)) + b,
    "baddbmm": expanded_baddbmm,
    "addbmm of one": lambda x, w, b: torch.stack([torch.addbmm(b.expand(x.shape[1], -1), s[None], w.T[None]) for s in x]),
    "multi_dot": lambda x, w, b: torch.stack([torch.linalg.multi_dot([s, w.T]) for s in x]) + b,
    "product and sum": lambda x, w, b: (x.unsqueeze(-2) * w).sum(-1) + b,
    "vecdot": lambda x, w, b: torch.linalg.vecdot(x.unsqueeze(-2), w, dim=-1) + b,
    "conv1d": lambda x, w, b: F.conv1d(x.transpose(1, 2), w[..., None], b).transpose(1, 2),
    "conv2d 1 x 1": lambda x, w, b: F.conv2d(x.permute(0, 2, 1)[..., None], w[..., None, None], b)[..., 0].permute(0, 2, 1),
    "conv1d of whole vectors": lambda x, w, b: F.conv1d(x.flatten(0, 1)[:, None], w[:, None], b)[..., 0].unflatten(0, x.shape[:2]),
    "conv_transpose1d": lambda x, w, b: F.conv_transpose1d(x.mT, w.T[..., None], b).mT,
    "bilinear with one": lambda x, w, b: F.bilinear(x.new_ones(*x.shape[:-1], 1), x, w[:, None], b),
    "weight detached": lambda x, w, b: F.linear(x, w.detach(), b.detach()),
    "weight.data": lambda x, w, b: torch.matmul(x, w.data.t()) + b.data,
    "weight cloned": lambda x, w, b: F.linear(x, w.clone(), b.clone()),
    "weight cast": lambda x, w, b: F.linear(x, w.to(x.dtype).contiguous(), b.type_as(x)),
    "weight computed": lambda x, w, b: x @ (w * 0.5 * 2).T + b,
    "weight as list of rows": lambda x, w, b: F.linear(x, torch.stack(list(w)), b),
    "weight concatenated": lambda x, w, b: x @ torch.cat([w[:3], w[3:]], dim=0).T + b,
    "weight concatenated by columns": lambda x, w, b: F.linear(x, torch.cat(w.split(4, dim=1), dim=1), b),
    "weight transposed twice": lambda x, w, b: F.linear(x, w.t().contiguous().t(), b),
    "weight masked": lambda x, w, b: F.linear(x, w * torch.ones_like(w), b),
    "weight under no_grad": lambda x, w, b: F.linear(x, torch.no_grad()(lambda: w * 1)(), b),
    "LoRA merged": merged_lora,
    "LoRA merged by addmm": merged_lora_baddbmm,
    "weight norm": weight_normed,
    "torch's weight norm": torch_weight_norm,
    "dequantised": dequantised,
    "divided by its size and back": spectral,
    "multiplier at the output": out_multiplied,
    "bias as a column": bias_as_column,
    "bias as a padded column": padded_column,
    "output halves": output_halves,
    "tensor parallel": tensor_parallel,
    "token by token": by_token,
    "sample by sample": by_sample,
    "vector by vector": vector_by_vector,
    "vmap": lambda x, w, b: torch.vmap(torch.vmap(lambda t: w @ t + b))(x),
    "functional_call": module_inside,
    "module built on the fly": loaded_module,
    "added into a buffer": into_buffer,
    "written into rows": row_blocks,
    "tokens first": lambda x, w, b: F.linear(x.transpose(0, 1), w, b).transpose(0, 1),
    "tokens first, contiguous": lambda x, w, b: F.linear(x.permute(1, 0, 2).contiguous(), w, b).permute(1, 0, 2).contiguous(),
    "scaled input and weight": lambda x, w, b: F.linear(x * 4.0, w / 4.0, b),
    "batch_first einsum of a 3-d weight": lambda x, w, b: torch.einsum("bnd,dhe->bnhe", x, w.T.view(w.shape[1], 2, -1)).flatten(-2) + b,
}

# sums of partial products: an addition distributes relevance over its operands
LINEAR_REGROUPED: dict[str, Way] = {
    "input halves": input_halves,
    "LoRA beside": beside_lora,
    "columns in a loop": lambda x, w, b: sum(x[..., i : i + 1] * w[:, i] for i in range(w.shape[1])) + b,
    "partial sums stacked": lambda x, w, b: torch.stack([F.linear(a, c) for a, c in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True)]).sum(0) + b,
}


# -- modules: (name, out, in) -> nn.Module ---------------------------------------------------------------------------------
class Transposed(nn.Module):
    """A weight ``[in, out]``, as in GPT-2."""

    def __init__(self, name: str, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(f"{name}.weight", out, into).T.contiguous())
        self.bias = nn.Parameter(shift(f"{name}.bias", out))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class WidthMultiplied(nn.Linear):
    """An input divided by a width multiplier, as at the output of µP models."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2.0 * 2.0)


class CastLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Buffered(nn.Module):
    """Frozen weights in buffers."""

    def __init__(self, name: str, out: int, into: int) -> None:
        super().__init__()
        self.register_buffer("weight", matrix(f"{name}.weight", out, into))
        self.register_buffer("bias", shift(f"{name}.bias", out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.transpose(0, 1)) + self.bias


class LowRank(nn.Module):
    """A layer with LoRA, merged into the weight or separate."""

    def __init__(self, name: str, out: int, into: int, merged: bool) -> None:
        super().__init__()
        a, up = lora_parts(matrix(f"{name}.weight", out, into))
        self.base_layer, self.merged = linear(name, out, into), merged
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(up)
        with torch.no_grad():
            self.base_layer.weight.sub_(0.5 * up @ a)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base_layer.weight + 0.5 * self.lora_B @ self.lora_A, self.base_layer.bias)
        return self.base_layer(x) + 0.5 * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Pointwise(nn.Module):
    """A convolution of width 1 over the tokens."""

    def __init__(self, name: str, out: int, into: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(into, out, 1, dtype=torch.float64)
        with torch.no_grad():
            self.conv.weight.copy_(matrix(f"{name}.weight", out, into).unsqueeze(-1))
            self.conv.bias.copy_(shift(f"{name}.bias", out))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Bias(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Added(nn.Module):
    """A parametrisation: the weight plus a product of two factors."""

    def __init__(self, a: Tensor, up: Tensor) -> None:
        super().__init__()
        self.a, self.up = nn.Parameter(a), nn.Parameter(up)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.a


def refilled(layer: nn.Linear, name: str) -> nn.Linear:
    """Fill a layer with the weights of its name."""
    with torch.no_grad():
        layer.weight.copy_(matrix(f"{name}.weight", *layer.weight.shape))
        layer.bias.copy_(shift(f"{name}.bias", layer.weight.shape[0]))
    return layer


def parametrized(name: str, out: int, into: int) -> nn.Linear:
    layer = linear(name, out, into)
    a, up = lora_parts(layer.weight)
    with torch.no_grad():
        layer.weight.sub_(up @ a)
    parametrize.register_parametrization(layer, "weight", Added(a, up))
    return layer


def scaled_bias(name: str, out: int, into: int) -> nn.Sequential:
    layer = nn.Linear(into, out, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(matrix(f"{name}.weight", out, into))
    return nn.Sequential(layer, Bias(shift(f"{name}.bias", out)))


MODULES: dict[str, Way] = {
    "nn.Linear": linear,
    "transposed weight": Transposed,
    "subclass, input scaled there and back": lambda name, out, into: refilled(WidthMultiplied(into, out, dtype=torch.float64), name),
    "subclass that casts": lambda name, out, into: refilled(CastLinear(into, out, dtype=torch.float64), name),
    "buffers": Buffered,
    "weight norm": lambda name, out, into: parametrizations.weight_norm(linear(name, out, into)),
    "parametrized": parametrized,
    "pruned by nothing": lambda name, out, into: prune.identity(linear(name, out, into), "weight"),
    "LoRA merged": lambda name, out, into: LowRank(name, out, into, merged=True),
    "Conv1d": Pointwise,
    "Sequential with dropout": lambda name, out, into: nn.Sequential(linear(name, out, into), nn.Dropout(0.1)),
    "Sequential with identity": lambda name, out, into: nn.Sequential(nn.Identity(), linear(name, out, into), nn.Identity()),
    "bias in a module": scaled_bias,
}
MODULES_REGROUPED: dict[str, Way] = {"LoRA beside": lambda name, out, into: LowRank(name, out, into, merged=False)}
