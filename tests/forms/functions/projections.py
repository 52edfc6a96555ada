"""Implementations of query, key and value projections, the output projection, and whole attention modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import HEAD, HEADS, WIDTH, Way, heads, linear, matrix, merged, shift
from .attentions import plain


# -- whole attention modules: [B, N, D] -> [B, N, D] ----------------------------------------------------------------------------
def stacked(name: str) -> tuple[Tensor, Tensor]:
    """Fused weights and biases of queries, keys and values, ``[3 D, D]`` and ``[3 D]``."""
    weights = [matrix(f"{name}.{p}.weight", WIDTH, WIDTH) for p in "qkv"]
    return torch.cat(weights), torch.cat([shift(f"{name}.{p}.bias", WIDTH) for p in "qkv"])


class Fused(nn.Module):
    """One layer for queries, keys and values, and a function that splits its output."""

    def __init__(self, name: str, taken_apart: Way) -> None:
        super().__init__()
        self.qkv, self.proj, self.taken_apart = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64), linear(f"{name}.o", WIDTH, WIDTH), taken_apart
        with torch.no_grad():
            weight, bias = stacked(name)
            self.qkv.weight.copy_(weight)
            self.qkv.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(merged(plain(*self.taken_apart(self.qkv(x)))))


def interleaved(y: Tensor) -> list[Tensor]:
    """Split by indices of channels."""
    return [heads(y[..., i * WIDTH + torch.arange(WIDTH)]) for i in range(3)]


def by_window(y: Tensor) -> list[Tensor]:
    q = y.narrow(-1, 0, WIDTH)
    k = y.narrow(-1, WIDTH, WIDTH)
    return [heads(t.contiguous()) for t in (q, k, y.narrow(-1, 2 * WIDTH, WIDTH))]


FUSED: dict[str, Way] = {
    "reshape, permute, index": lambda y: [y.reshape(*y.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)[i] for i in range(3)],
    "reshape, permute, unbind": lambda y: y.reshape(*y.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0),
    "chunk": lambda y: [heads(t) for t in y.chunk(3, dim=-1)],
    "split": lambda y: [heads(t) for t in y.split(WIDTH, dim=2)],
    "split of sizes": lambda y: [heads(t) for t in torch.split(y, [WIDTH] * 3, -1)],
    "tensor_split": lambda y: [heads(t) for t in y.tensor_split(3, dim=-1)],
    "slices": lambda y: (heads(y[..., :WIDTH]), heads(y[..., WIDTH : 2 * WIDTH]), heads(y[..., 2 * WIDTH :])),
    "narrow": by_window,
    "unflatten, unbind": lambda y: [t.transpose(1, 2) for t in y.unflatten(-1, (3, HEADS, HEAD)).unbind(2)],
    "unflatten, movedim": lambda y: y.unflatten(-1, (3, HEADS, HEAD)).movedim(2, 0).transpose(2, 3),
    "indices": interleaved,
    "select": lambda y: [y.view(*y.shape[:2], 3, WIDTH).select(2, i).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for i in range(3)],
    "heads taken out by chunk": lambda y: [torch.stack(t.chunk(HEADS, -1), 1) for t in y.chunk(3, -1)],
    "heads taken out by split, cat": lambda y: [
        torch.cat(t.split(HEAD, 2), 0).unflatten(0, (HEADS, -1)).transpose(0, 1) for t in y.split(WIDTH, 2)
    ],
    "swapaxes": lambda y: y.view(*y.shape[:2], 3 * HEADS, HEAD).swapaxes(1, 2).split(HEADS, dim=1),
}


class Projected(nn.Module):
    """Parameters and a function x, [3 D, D], [3 D] -> q, k, v, each [B, H, N, d]."""

    def __init__(self, name: str, way: Way) -> None:
        super().__init__()
        weight, bias = stacked(name)
        self.weight, self.bias, self.proj, self.way = nn.Parameter(weight), nn.Parameter(bias), linear(f"{name}.o", WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(merged(plain(*self.way(x, self.weight, self.bias))))


def by_head_einsum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bnd,thed->tbhne", x, w.view(3, HEADS, HEAD, WIDTH)) + b.view(3, 1, HEADS, 1, HEAD)


def three_einsums(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    parts = zip(w.view(3, HEADS, HEAD, WIDTH), b.view(3, HEADS, 1, HEAD), strict=True)
    return [torch.einsum("bnd,hed->bhne", x, weight) + bias for weight, bias in parts]


def biases_concatenated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    bias = torch.cat((b[:WIDTH], b[WIDTH : 2 * WIDTH], b[2 * WIDTH :]))
    return F.linear(input=x, weight=w, bias=bias).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)


def queries_beside(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    q = F.linear(x, w[:WIDTH], b[:WIDTH])
    k, v = F.linear(x, w[WIDTH:], b[WIDTH:]).chunk(2, dim=-1)
    return [heads(t) for t in (q, k, v)]


def three_slices(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    return [heads(F.linear(x, weight, bias)) for weight, bias in zip(w.chunk(3), b.chunk(3), strict=True)]


def by_head_bmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x.unsqueeze(1) @ w.view(3, 1, HEADS, HEAD, WIDTH).mT) + b.view(3, 1, HEADS, 1, HEAD)


def list_of_heads(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    projections = []
    for weight, bias in zip(w.chunk(3), b.chunk(3), strict=True):
        projections.append(torch.stack([F.linear(x, a, c) for a, c in zip(weight.chunk(HEADS), bias.chunk(HEADS), strict=True)], dim=1))
    return projections


def old_convolution(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    y = torch.addmm(b, x.view(-1, WIDTH), w.t()).view(*x.shape[:-1], 3 * WIDTH)
    return [t.view(*t.shape[:2], HEADS, HEAD).permute(0, 2, 1, 3) for t in y.split(WIDTH, dim=2)]


def head_major(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Query, key and value of each head are adjacent, as in some fused weights."""
    order = torch.arange(3 * WIDTH).view(3, HEADS, HEAD).transpose(0, 1).flatten()
    y = F.linear(x, w[order], b[order]).view(*x.shape[:2], HEADS, 3 * HEAD).transpose(1, 2)
    return list(y.chunk(3, dim=-1))


def convolved(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    y = F.conv1d(x.transpose(1, 2), w.unsqueeze(-1), b)
    return [t.unflatten(1, (HEADS, HEAD)).transpose(2, 3) for t in y.chunk(3, dim=1)]


def convolved_as_picture(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    y = F.conv2d(x.mT.unsqueeze(-1), w[..., None, None], b).squeeze(-1)
    return [t.reshape(t.shape[0], HEADS, HEAD, -1).mT for t in y.chunk(3, dim=1)]


PROJECTIONS: dict[str, Way] = {
    "three slices of a weight": three_slices,
    "einsum over heads at once": by_head_einsum,
    "three einsums over heads": three_einsums,
    "biases concatenated": biases_concatenated,
    "queries beside keys and values": queries_beside,
    "matmul of each head": by_head_bmm,
    "list of heads": list_of_heads,
    "addmm": old_convolution,
    "head-major weight": head_major,
    "conv1d": convolved,
    "conv2d": convolved_as_picture,
    "tensordot": lambda x, w, b: (torch.tensordot(x, w.view(3, HEADS, HEAD, WIDTH), ([2], [3])) + b.view(3, HEADS, HEAD)).permute(2, 0, 3, 1, 4),
    "stacked input": lambda x, w, b: (torch.stack([x, x, x]) @ w.view(3, 1, WIDTH, WIDTH).mT + b.view(3, 1, 1, WIDTH)).unflatten(-1, (HEADS, HEAD)).transpose(2, 3),
    "baddbmm of the three": lambda x, w, b: torch.baddbmm(
        b.view(3, 1, WIDTH), x.reshape(1, -1, WIDTH).expand(3, -1, -1), w.view(3, WIDTH, WIDTH).mT
    ).view(3, *x.shape[:2], HEADS, HEAD).transpose(2, 3),
    "scale in the weight": lambda x, w, b: [t * s for t, s in zip(three_slices(x, w * 2, b * 2), (0.5, 0.5, 0.5), strict=True)],
}


class Mixed(nn.Module):
    """Attention with another implementation of the output projection: ([B, H, N, d], weight, bias) -> [B, N, D]."""

    def __init__(self, name: str, way: Way) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (linear(f"{name}.{p}", WIDTH, WIDTH) for p in "qkv")
        self.out_weight, self.out_bias = nn.Parameter(matrix(f"{name}.o.weight", WIDTH, WIDTH)), nn.Parameter(shift(f"{name}.o.bias", WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(plain(heads(self.to_q(x)), heads(self.to_k(x)), heads(self.to_v(x))), self.out_weight, self.out_bias)


def conv_out(y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(y.mT.flatten(1, 2), w.unsqueeze(-1), b).mT


MERGES: dict[str, Way] = {
    "transpose, reshape": lambda y, w, b: F.linear(y.transpose(1, 2).reshape(y.shape[0], -1, WIDTH), w, b),
    "transpose, contiguous, view": lambda y, w, b: F.linear(y.transpose(1, 2).contiguous().view(y.shape[0], -1, WIDTH), w, b),
    "permute, flatten": lambda y, w, b: F.linear(y.permute(0, 2, 1, 3).flatten(2), w, b),
    "cat of heads": lambda y, w, b: F.linear(torch.cat([y[:, h] for h in range(HEADS)], dim=-1), w, b),
    "cat of unbound heads": lambda y, w, b: F.linear(torch.cat(y.unbind(1), -1), w, b),
    "cat of splits": lambda y, w, b: F.linear(torch.cat(torch.split(y, 1, dim=1), dim=-1).squeeze(1), w, b),
    "hstack of tokens": lambda y, w, b: F.linear(torch.stack([torch.hstack(y[..., n, :].unbind(1)) for n in range(y.shape[2])], 1), w, b),
    "einsum over heads": lambda y, w, b: torch.einsum("bhnd,ehd->bne", y, w.view(WIDTH, HEADS, HEAD)) + b,
    "einsum, heads first": lambda y, w, b: torch.einsum("bhnd,hde->bne", y, w.T.reshape(HEADS, HEAD, WIDTH)) + b,
    "tensordot of two axes": lambda y, w, b: torch.tensordot(y, w.view(WIDTH, HEADS, HEAD), dims=([1, 3], [1, 2])) + b,
    "conv1d": conv_out,
    "movedim": lambda y, w, b: F.linear(y.movedim(1, 2).flatten(-2), w, b),
    "tokens first": lambda y, w, b: F.linear(y.permute(2, 0, 1, 3).reshape(y.shape[2], -1, WIDTH), w, b).transpose(0, 1),
    "addmm of flat rows": lambda y, w, b: torch.addmm(b, y.transpose(1, 2).reshape(-1, WIDTH), w.T).view(y.shape[0], -1, WIDTH),
}
MERGES_REGROUPED: dict[str, Way] = {
    "sum of projected heads": lambda y, w, b: (y @ w.view(WIDTH, HEADS, HEAD).permute(1, 2, 0)).sum(1) + b,
    "heads added in a loop": lambda y, w, b: sum(F.linear(y[:, h], w[:, h * HEAD : (h + 1) * HEAD]) for h in range(HEADS)) + b,
}


# -- attention of torch and other whole modules -------------------------------------------------------------------------------
def multihead(name: str, batch_first: bool = True) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64)
    with torch.no_grad():
        weight, bias = stacked(name)
        module.in_proj_weight.copy_(weight)
        module.in_proj_bias.copy_(bias)
        module.out_proj.weight.copy_(matrix(f"{name}.o.weight", WIDTH, WIDTH))
        module.out_proj.bias.copy_(shift(f"{name}.o.bias", WIDTH))
    return module


class Called(nn.Module):
    def __init__(self, module: nn.Module, way: Way) -> None:
        super().__init__()
        self.attn, self.way = module, way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.attn, x)


def functional(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    t = x.transpose(0, 1)
    arguments = (m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
    return F.multi_head_attention_forward(t, t, t, WIDTH, HEADS, *arguments, training=False)[0].transpose(0, 1)


def functional_separate(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    t = x.transpose(0, 1)
    q, k, v = m.in_proj_weight.chunk(3)
    arguments = (None, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
    weights = {"use_separate_proj_weight": True, "q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    return F.multi_head_attention_forward(t, t, t, WIDTH, HEADS, *arguments, training=False, need_weights=False, **weights)[0].transpose(0, 1)


class ListOfHeads(nn.Module):
    """One module per head, as in tutorials."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead(name, h) for h in range(HEADS)])
        self.proj = linear(f"{name}.o", WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class OneHead(nn.Module):
    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        rows = slice(number * HEAD, (number + 1) * HEAD)
        for layer, part in (("query", "q"), ("key", "k"), ("value", "v")):
            layer_module = nn.Linear(WIDTH, HEAD, dtype=torch.float64)
            with torch.no_grad():
                layer_module.weight.copy_(matrix(f"{name}.{part}.weight", WIDTH, WIDTH)[rows])
                layer_module.bias.copy_(shift(f"{name}.{part}.bias", WIDTH)[rows])
            setattr(self, layer, layer_module)

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.key(x), self.query(x)
        weights = F.softmax(q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5, dim=-1)
        return weights @ self.value(x)


WHOLE: dict[str, Way] = {
    "nn.MultiheadAttention": lambda name: Called(multihead(name), lambda m, x: m(x, x, x)[0]),
    "nn.MultiheadAttention, no weights": lambda name: Called(multihead(name), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "nn.MultiheadAttention, weights of each head": lambda name: Called(multihead(name), lambda m, x: m(x, x, x, average_attn_weights=False)[0]),
    "nn.MultiheadAttention, tokens first": lambda name: Called(
        multihead(name, False), lambda m, x: m(t := x.transpose(0, 1), t, t)[0].transpose(0, 1)
    ),
    "nn.MultiheadAttention, tokens first, no weights": lambda name: Called(
        multihead(name, False), lambda m, x: m(t := x.permute(1, 0, 2), t, t, need_weights=False)[0].permute(1, 0, 2)
    ),
    "nn.MultiheadAttention, keywords": lambda name: Called(multihead(name), lambda m, x: m(query=x, key=x, value=x, need_weights=False)[0]),
    "F.multi_head_attention_forward": lambda name: Called(multihead(name), functional),
    "F.multi_head_attention_forward, separate": lambda name: Called(multihead(name), functional_separate),
    "list of heads": lambda name: ListOfHeads(name),
}
