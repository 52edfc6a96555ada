"""Implementations of residual sums, gates, embeddings, readouts and outputs."""

from __future__ import annotations

import functools
import math
import operator
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import (
    CLASSES,
    COLUMNS,
    INNER,
    PATCH,
    PATCHES,
    ROWS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Way,
    kernel,
    linear,
    matrix,
    noise,
    shift,
)


# -- residual sums: (x, branch) -> Tensor ----------------------------------------------------------------------------------
def stream_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x += y
    return x


def stream_itself(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def branch_in_place(x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


def dropped_path(x: Tensor, y: Tensor) -> Tensor:
    return x + nn.Dropout(0.2).eval()(y)


RESIDUAL: dict[str, Way] = {
    "x + f(x)": lambda x, y: x + y,
    "f(x) + x": lambda x, y: y + x,
    "torch.add": lambda x, y: torch.add(x, y),
    "method": lambda x, y: x.add(y),
    "operator.add": operator.add,
    "alpha of 1": lambda x, y: torch.add(x, y, alpha=1.0),
    "x += f(x)": stream_itself,
    "copy += f(x)": stream_in_place,
    "f(x) += x": branch_in_place,
    "add_ to the branch": lambda x, y: y.add_(x),
    "add_ to the stream": lambda x, y: x.add_(y),
    "sum of a list": lambda x, y: sum([x, y]),
    "stack, sum": lambda x, y: torch.stack([x, y]).sum(0),
    "stack, sum of the last": lambda x, y: torch.stack((x, y), dim=-1).sum(dim=-1),
    "twice the mean": lambda x, y: torch.stack([x, y]).mean(0) * 2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.5) * 2,
    "reduce": lambda x, y: functools.reduce(torch.add, [x, y]),
    "minus minus": lambda x, y: x - (-y),
    "torch.sub": lambda x, y: torch.sub(x, y.neg()),
    "times 1": lambda x, y: x * 1.0 + y * 1.0,
    "ones": lambda x, y: x + y * torch.ones(WIDTH, dtype=y.dtype),
    "addcmul": lambda x, y: torch.addcmul(x, y, torch.ones_like(y)),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, torch.ones_like(y)),
    "dropout in eval": dropped_path,
    "dropout of the sum": lambda x, y: F.dropout(x + y, 0.3, training=False),
    "einsum": lambda x, y: torch.einsum("sbnd->bnd", torch.stack([x, y])),
    "cumsum": lambda x, y: torch.stack([x, y]).cumsum(0)[-1],
    "pair of identities": lambda x, y: torch.cat([x, y], dim=-1) @ torch.eye(WIDTH, dtype=x.dtype).repeat(2, 1),
    "transposed": lambda x, y: (x.mT + y.mT).mT,
    "token by token": lambda x, y: torch.stack([a + b for a, b in zip(x.unbind(1), y.unbind(1), strict=True)], 1),
    "where": lambda x, y: torch.where(torch.ones_like(x, dtype=torch.bool), x + y, x),
    "index_add": lambda x, y: x.index_add(1, torch.arange(x.shape[1]), y),
}

SCALED: dict[str, Way] = {
    "f(x) + a x": lambda x, y: y + 1.5 * x,
    "a x + f(x)": lambda x, y: x * 1.5 + y,
    "alpha": lambda x, y: torch.add(y, x, alpha=1.5),
    "in place, alpha": lambda x, y: y.add_(x, alpha=1.5),
    "add of mul": lambda x, y: torch.mul(x, 1.5).add(y),
    "tensor": lambda x, y: torch.tensor(1.5, dtype=x.dtype) * x + y,
    "vector": lambda x, y: torch.full([WIDTH], 1.5, dtype=x.dtype) * x + y,
    "addcmul": lambda x, y: torch.addcmul(y, x, torch.full([1], 1.5, dtype=x.dtype)),
    "addcmul, value": lambda x, y: torch.addcmul(y, x, torch.ones(1, dtype=x.dtype), value=1.5),
    "in place": lambda x, y: (x * 1.5).add_(y),
    "over a scale": lambda x, y: 1.5 * (x + y / 1.5),
    "einsum": lambda x, y: torch.einsum("sbnd,s->bnd", torch.stack([x, y]), torch.tensor([1.5, 1.0], dtype=x.dtype)),
    "tensordot": lambda x, y: torch.tensordot(torch.tensor([1.5, 1.0], dtype=x.dtype), torch.stack([x, y]), dims=1),
}

# -- gated layers: (x, gate weight, up weight) -> [B, N, INNER], the activation given -------------------------------------------
ACTS: dict[str, Way] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "glu": torch.sigmoid}


def split_gate(x: Tensor, g: Tensor, u: Tensor, act: Way) -> Tensor:
    gate, up = F.linear(x, torch.cat([g, u])).split(INNER, dim=-1)
    return act(gate) * up


def both_at_once(x: Tensor, g: Tensor, u: Tensor, act: Way) -> Tensor:
    gate, up = (x.unsqueeze(0) @ torch.stack([g, u]).unsqueeze(1).mT).unbind(0)
    return up * act(gate)


def multiplied_in_place(x: Tensor, g: Tensor, u: Tensor, act: Way) -> Tensor:
    gate = act(F.linear(x, g))
    gate *= F.linear(x, u)
    return gate


GATES: dict[str, Way] = {
    "two linears": lambda x, g, u, act: act(F.linear(x, g)) * F.linear(x, u),
    "up first": lambda x, g, u, act: F.linear(x, u) * act(F.linear(x, g)),
    "@": lambda x, g, u, act: act(x @ g.T) * (x @ u.T),
    "chunk": lambda x, g, u, act: act((t := F.linear(x, torch.cat([g, u])).chunk(2, dim=-1))[0]) * t[1],
    "chunk, gate second": lambda x, g, u, act: (t := F.linear(x, torch.cat([u, g])).chunk(2, dim=-1))[0] * act(t[1]),
    "split": split_gate,
    "slices": lambda x, g, u, act: act((t := F.linear(x, torch.cat([g, u])))[..., :INNER]) * t[..., INNER:],
    "narrow": lambda x, g, u, act: act((t := F.linear(x, torch.cat([g, u]))).narrow(-1, 0, INNER)) * t.narrow(-1, INNER, INNER),
    "unflatten, unbind": lambda x, g, u, act: act((t := F.linear(x, torch.cat([g, u])).unflatten(-1, (2, INNER)).unbind(-2))[0]) * t[1],
    "strides of two": lambda x, g, u, act: act((t := F.linear(x, torch.stack([g, u], 1).flatten(0, 1)))[..., ::2]) * t[..., 1::2],
    "product of one stack": lambda x, g, u, act: torch.stack([act(F.linear(x, g)), F.linear(x, u)]).prod(0),
    "both at once": both_at_once,
    "torch.mul": lambda x, g, u, act: torch.mul(act(F.linear(x, g)), F.linear(x, u)),
    "einsum": lambda x, g, u, act: torch.einsum("bnf,bnf->bnf", act(F.linear(x, g)), F.linear(x, u)),
    "in place": multiplied_in_place,
    "addcmul": lambda x, g, u, act: torch.addcmul(torch.zeros(1, dtype=x.dtype), act(F.linear(x, g)), F.linear(x, u)),
    "token by token": lambda x, g, u, act: torch.stack([act(t @ g.T) * (t @ u.T) for t in x.unbind(1)], 1),
    "channels first": lambda x, g, u, act: (act(g @ x.mT) * (u @ x.mT)).mT,
}
GATES_OF: dict[str, dict[str, Way]] = {
    "swiglu": {
        "x sigmoid(x)": lambda x, g, u: (t := F.linear(x, g)) * torch.sigmoid(t) * F.linear(x, u),
        "x over 1 + exp": lambda x, g, u: (t := F.linear(x, g)) / (1 + torch.exp(-t)) * F.linear(x, u),
        "nn.SiLU": lambda x, g, u: nn.SiLU()(F.linear(x, g)) * F.linear(x, u),
    },
    "geglu": {
        "erf by hand": lambda x, g, u: 0.5 * (t := F.linear(x, g)) * (1 + torch.erf(t / math.sqrt(2))) * F.linear(x, u),
        "cdf by hand": lambda x, g, u: F.linear(x, u) * ((t := F.linear(x, g)) * (0.5 * (1 + torch.erf(t / math.sqrt(2))))),
        "nn.GELU": lambda x, g, u: F.linear(x, u) * nn.GELU()(F.linear(x, g)),
    },
    "reglu": {
        "clamp": lambda x, g, u: F.linear(x, g).clamp(min=0) * F.linear(x, u),
        "maximum": lambda x, g, u: torch.maximum(t := F.linear(x, g), torch.zeros_like(t)) * F.linear(x, u),
        "where": lambda x, g, u: torch.where((t := F.linear(x, g)) > 0, t, torch.zeros_like(t)) * F.linear(x, u),
    },
    "glu": {
        "F.glu": lambda x, g, u: F.glu(F.linear(x, torch.cat([u, g])), dim=-1),
        "nn.GLU": lambda x, g, u: nn.GLU(-1)(torch.cat([F.linear(x, u), F.linear(x, g)], -1)),
        "1 over 1 + exp": lambda x, g, u: F.linear(x, u) / (1 + torch.exp(-F.linear(x, g))),
        "tanh": lambda x, g, u: F.linear(x, u) * (0.5 + 0.5 * torch.tanh(F.linear(x, g) / 2)),
    },
}


class Gated(nn.Module):
    def __init__(self, name: str, way: Way) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(matrix(f"{name}.gate", INNER, WIDTH)), nn.Parameter(matrix(f"{name}.up", INNER, WIDTH))
        self.down, self.way = linear(f"{name}.down", WIDTH, INNER), way

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.way(x, self.gate, self.up))


# -- lookups: (ids, table [V, D]) -> [B, N, D] -------------------------------------------------------------------------------------
LOOKUPS: dict[str, Way] = {
    "F.embedding": lambda ids, w: F.embedding(ids, w),
    "torch.embedding": lambda ids, w: torch.embedding(w, ids),
    "index": lambda ids, w: w[ids],
    "index of flat ids": lambda ids, w: w[ids.flatten()].view(*ids.shape, -1),
    "index_select": lambda ids, w: w.index_select(0, ids.view(-1)).view(*ids.shape, WIDTH),
    "one_hot @": lambda ids, w: F.one_hot(ids, VOCABULARY).to(w.dtype) @ w,
    "one_hot, einsum": lambda ids, w: torch.einsum("bnv,vd->bnd", F.one_hot(ids, VOCABULARY).double(), w),
    "one_hot, linear": lambda ids, w: F.linear(F.one_hot(ids, VOCABULARY).to(w), w.t()),
    "scatter, @": lambda ids, w: torch.zeros(*ids.shape, VOCABULARY, dtype=w.dtype).scatter_(-1, ids[..., None], 1.0) @ w,
    "compared, @": lambda ids, w: (ids[..., None] == torch.arange(VOCABULARY)).to(w.dtype) @ w,
    "gather": lambda ids, w: w.gather(0, ids.view(-1, 1).expand(-1, WIDTH)).view(*ids.shape, -1),
    "take_along_dim": lambda ids, w: torch.take_along_dim(w[None], ids[..., None], 1),
    "sample by sample": lambda ids, w: torch.stack([F.embedding(row, w) for row in ids]),
    "token by token": lambda ids, w: torch.stack([F.embedding(ids[:, i], w) for i in range(ids.shape[1])], dim=1),
    "tokens first": lambda ids, w: F.embedding(ids.t(), w).transpose(0, 1),
    "two tables": lambda ids, w: F.embedding(ids, torch.cat([w[:9], w[9:]])),
    "scaled there and back": lambda ids, w: F.embedding(ids, w / math.sqrt(WIDTH)) * math.sqrt(WIDTH),
    "bags of one": lambda ids, w: F.embedding_bag(ids.view(-1, 1), w, mode="sum").view(*ids.shape, -1),
    "nn.Embedding on the fly": lambda ids, w: nn.Embedding.from_pretrained(w.detach())(ids),
}

# -- positions: (x, positions [N, D]) -> Tensor -------------------------------------------------------------------------------
POSITIONS: dict[str, Way] = {
    "added": lambda x, p: x + p,
    "positions first": lambda x, p: p + x,
    "one more axis": lambda x, p: x + p[None],
    "expanded": lambda x, p: x + p.unsqueeze(0).expand_as(x),
    "repeated": lambda x, p: x + p.repeat(x.shape[0], 1, 1),
    "embedding of arange": lambda x, p: x + F.embedding(torch.arange(x.shape[1]), p),
    "embedding of expanded arange": lambda x, p: x + F.embedding(torch.arange(x.shape[1]).expand(x.shape[:2]), p),
    "slice of a longer table": lambda x, p: x + F.pad(p, (0, 0, 0, 4))[: x.shape[1]],
    "buffer with a batch axis": lambda x, p: x + p.detach()[None][:, : x.size(1)],
    "in place": lambda x, p: x.add_(p),
    "torch.add": lambda x, p: torch.add(x, p),
    "tokens first": lambda x, p: (x.transpose(0, 1) + p[:, None]).transpose(0, 1),
    "dropout": lambda x, p: F.dropout(x + p, 0.1, training=False),
    "sum of three": lambda x, p: x + 0.5 * p + 0.5 * p,
    "token by token": lambda x, p: torch.stack([x[:, i] + p[i] for i in range(x.shape[1])], 1),
    "one_hot": lambda x, p: x + F.one_hot(torch.arange(x.shape[1])).to(p.dtype) @ p,
}


class LookedUp(nn.Module):
    def __init__(self, lookup: Way, position: Way) -> None:
        super().__init__()
        self.table, self.lookup, self.positioned = nn.Parameter(noise("words", VOCABULARY, WIDTH)), lookup, position
        self.position = nn.Parameter(shift("position", TOKENS * WIDTH).view(TOKENS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.positioned(self.lookup(ids, self.table), self.position)


# -- patches: (pixels [B, C, H, W], kernel [D, C, P, P], bias) -> [B, patches, D] ---------------------------------------------------
def patches(x: Tensor) -> Tensor:
    """``[B, rows, columns, C, P, P]``"""
    return x.view(x.shape[0], 3, ROWS, PATCH, COLUMNS, PATCH).permute(0, 2, 4, 1, 3, 5)


def unfolded_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2), w.flatten(1), b)


def channels_last_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    flat = x.view(x.shape[0], 3, ROWS, PATCH, COLUMNS, PATCH).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], PATCHES, -1)
    return F.linear(flat, w.permute(0, 2, 3, 1).flatten(1), b)


def cut_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    tokens = []
    for i in range(ROWS):
        for j in range(COLUMNS):
            patch = x[:, :, i * PATCH : (i + 1) * PATCH, j * PATCH : (j + 1) * PATCH]
            tokens.append(F.linear(patch.flatten(1), w.flatten(1), b))
    return torch.stack(tokens, dim=1)


def chunked(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = [torch.stack(row.chunk(COLUMNS, dim=3), dim=1) for row in x.chunk(ROWS, dim=2)]
    return torch.cat(rows, dim=1).flatten(2) @ w.flatten(1).T + b


PATCHED: dict[str, Way] = {
    "conv2d, flatten, transpose": lambda x, w, b: F.conv2d(x, w, b, stride=PATCH).flatten(2).transpose(1, 2),
    "conv2d, permute, reshape": lambda x, w, b: F.conv2d(x, w, b, stride=PATCH).permute(0, 2, 3, 1).reshape(x.shape[0], -1, WIDTH),
    "conv2d, view, mT": lambda x, w, b: F.conv2d(x, w, b, stride=(PATCH, PATCH)).view(x.shape[0], WIDTH, -1).mT,
    "conv2d, no bias, + b": lambda x, w, b: F.conv2d(x, w, stride=PATCH).flatten(2).mT + b,
    "conv2d of a computed weight": lambda x, w, b: F.conv2d(x, w.detach() * 1.0, b, stride=PATCH).flatten(2).mT,
    "conv2d, tokens first": lambda x, w, b: F.conv2d(x, w, b, stride=PATCH).flatten(2).permute(2, 0, 1).transpose(0, 1),
    "conv3d of one frame": lambda x, w, b: F.conv3d(x.unsqueeze(2), w.unsqueeze(2), b, stride=(1, PATCH, PATCH)).squeeze(2).flatten(2).mT,
    "unfold, linear": unfolded_linear,
    "unfold, matmul": lambda x, w, b: (w.flatten(1) @ F.unfold(x, PATCH, stride=PATCH) + b[:, None]).mT,
    "rearranged, linear": lambda x, w, b: F.linear(patches(x).flatten(3).flatten(1, 2), w.flatten(1), b),
    "rearranged, channels last": channels_last_linear,
    "rearranged, einsum": lambda x, w, b: torch.einsum("bhwcpq,dcpq->bhwd", patches(x), w).flatten(1, 2) + b,
    "einsum of the picture": lambda x, w, b: torch.einsum(
        "bchpwq,dcpq->bhwd", x.view(x.shape[0], 3, ROWS, PATCH, COLUMNS, PATCH), w
    ).flatten(1, 2)
    + b,
    "tensordot": lambda x, w, b: torch.tensordot(patches(x), w, dims=([3, 4, 5], [1, 2, 3])).flatten(1, 2) + b,
    "Tensor.unfold": lambda x, w, b: x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) @ w.flatten(1).T
    + b,
    "pixel_unshuffle, conv 1 x 1": lambda x, w, b: F.conv2d(F.pixel_unshuffle(x, PATCH), w.flatten(1)[..., None, None], b).flatten(2).mT,
    "cut out": cut_out,
    "chunked": chunked,
    "two convolutions of halves": lambda x, w, b: torch.cat(
        [F.conv2d(x, w[:5], b[:5], stride=PATCH), F.conv2d(x, w[5:], b[5:], stride=PATCH)], 1
    ).flatten(2).mT,
}

# -- a class token in front: (tokens, cls [1, 1, D]) -> Tensor ---------------------------------------------------------------------
FRONT: dict[str, Way] = {
    "cat, expand": lambda x, c: torch.cat([c.expand(x.shape[0], -1, -1), x], dim=1),
    "cat, repeat": lambda x, c: torch.cat((c.repeat(x.shape[0], 1, 1), x), 1),
    "cat, expand of three": lambda x, c: torch.cat((c.expand(x.size(0), 1, WIDTH), x), dim=-2),
    "plus zeros": lambda x, c: torch.cat([c + torch.zeros(x.shape[0], 1, WIDTH, dtype=x.dtype), x], dim=1),
    "ones times": lambda x, c: torch.cat([torch.ones(x.shape[0], 1, 1, dtype=x.dtype) * c, x], dim=1),
    "hstack": lambda x, c: torch.hstack([c.expand(x.shape[0], -1, -1), x]),
    "stack of a list": lambda x, c: torch.stack([c[:, 0].expand(x.shape[0], -1), *x.unbind(1)], dim=1),
    "padded and added": lambda x, c: F.pad(x, (0, 0, 1, 0)) + F.pad(c, (0, 0, 0, x.shape[1])),
    "written into": lambda x, c: x.new_zeros(x.shape[0], x.shape[1] + 1, WIDTH).index_copy(1, torch.arange(1, x.shape[1] + 1), x).index_copy(
        1, torch.tensor([0]), c.expand(x.shape[0], -1, -1)
    ),
    "sample by sample": lambda x, c: torch.stack([torch.vstack([c[0], s]) for s in x]),
    "tokens first": lambda x, c: torch.cat([c.expand(1, x.shape[0], -1), x.transpose(0, 1)]).transpose(0, 1),
    "expand_as": lambda x, c: torch.cat([c.expand_as(x[:, :1]), x], dim=1),
}


class Patched(nn.Module):
    def __init__(self, patch: Way, front: Way) -> None:
        super().__init__()
        self.kernel, self.bias, self.patch, self.front = nn.Parameter(kernel()), nn.Parameter(shift("pixels.bias", WIDTH)), patch, front
        self.cls = nn.Parameter(shift("cls", WIDTH).view(1, 1, WIDTH))
        self.position = nn.Parameter(shift("position of pixels", (1 + PATCHES) * WIDTH).view(1, 1 + PATCHES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.front(self.patch(x, self.kernel, self.bias), self.cls) + self.position


# -- readouts: tokens [B, N, D] -> [B, D] ----------------------------------------------------------------------------------------------
FIRST: dict[str, Way] = {
    "x[:, 0]": lambda x: x[:, 0],
    "x[:, 0, :]": lambda x: x[:, 0, :],
    "select": lambda x: x.select(1, 0),
    "narrow, squeeze": lambda x: x.narrow(1, 0, 1).squeeze(1),
    "slice, squeeze": lambda x: x[:, :1].squeeze(1),
    "slice, flatten": lambda x: x[:, :1, :].flatten(1),
    "index_select": lambda x: x.index_select(1, torch.tensor([0])).squeeze(1),
    "unbind": lambda x: x.unbind(1)[0],
    "split": lambda x: torch.split(x, [1, x.shape[1] - 1], dim=1)[0][:, 0],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.long)).squeeze(1),
    "arange and index": lambda x: x[torch.arange(x.shape[0]), torch.zeros(x.shape[0], dtype=torch.long)],
    "tokens first": lambda x: x.transpose(0, 1)[0],
    "one-hot product": lambda x: F.one_hot(torch.zeros(x.shape[0], dtype=torch.long), x.shape[1]).to(x.dtype).unsqueeze(1).bmm(x).squeeze(1),
    "one-hot einsum": lambda x: torch.einsum("bnd,n->bd", x, torch.eye(x.shape[1], dtype=x.dtype)[0]),
    "masked sum": lambda x: (x * torch.eye(x.shape[1], dtype=x.dtype)[0][:, None]).sum(1),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(x.shape[0], 1, 1, dtype=torch.long), 1)[:, 0],
    "boolean mask": lambda x: x[torch.arange(x.shape[1]).eq(0).expand(x.shape[:2])],
    "last of the flipped": lambda x: x.flip(1)[:, -1],
    "chunk of a view": lambda x: x.reshape(x.shape[0], -1)[:, : x.shape[2]],
}

MEAN: dict[str, Way] = {
    "mean(1)": lambda x: x.mean(1),
    "mean(dim=1)": lambda x: torch.mean(x, dim=1),
    "mean(-2)": lambda x: x.mean(-2),
    "sum over n": lambda x: x.sum(dim=1) / x.shape[1],
    "sum times 1 over n": lambda x: x.sum(1) * (1 / x.size(1)),
    "keepdim, squeeze": lambda x: x.mean(1, keepdim=True).squeeze(1),
    "einsum": lambda x: torch.einsum("bnd->bd", x) / x.shape[1],
    "einsum with weights": lambda x: torch.einsum("bnd,n->bd", x, torch.full([x.shape[1]], 1 / x.shape[1], dtype=x.dtype)),
    "product with ones": lambda x: (x.mT @ x.new_ones(x.shape[1], 1)).squeeze(-1) / x.shape[1],
    "ones @": lambda x: (torch.full([1, x.shape[1]], 1 / x.shape[1], dtype=x.dtype) @ x)[:, 0],
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1),
    "nn.AdaptiveAvgPool1d, flatten": lambda x: nn.AdaptiveAvgPool1d(1)(x.transpose(1, 2)).flatten(1),
    "avg_pool1d": lambda x: F.avg_pool1d(x.mT, x.shape[1])[..., 0],
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.mT.unsqueeze(-1), 1).flatten(1),
    "mask of ones": lambda x: (x * (m := torch.ones(*x.shape[:2], 1, dtype=x.dtype))).sum(1) / m.sum(1),
    "mask of ones, clamped": lambda x: (x * (m := torch.ones(x.shape[:2], dtype=x.dtype)).unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True).clamp(min=1e-9),
    "sum of a list": lambda x: sum(x.unbind(1)) / x.shape[1],
    "stack, mean": lambda x: torch.stack(x.unbind(1)).mean(0),
    "tokens first": lambda x: x.transpose(0, 1).mean(0),
    "channels first": lambda x: x.transpose(1, 2).mean(-1),
    "cumsum": lambda x: x.cumsum(1)[:, -1] / x.shape[1],
    "nanmean": lambda x: x.nanmean(1),
    "linear over tokens": lambda x: F.linear(x.mT, torch.full([1, x.shape[1]], 1 / x.shape[1], dtype=x.dtype)).squeeze(-1),
    "running mean": lambda x: functools.reduce(lambda m, t: m + (t[1] - m) / (t[0] + 1), enumerate(x.unbind(1)), torch.zeros_like(x[:, 0])),
    "weighted by softmax of zeros": lambda x: torch.einsum("bn,bnd->bd", x.new_zeros(x.shape[:2]).softmax(-1), x),
}

LAST: dict[str, Way] = {
    "x[:, -1]": lambda x: x[:, -1],
    "x[:, -1, :]": lambda x: x[:, -1, :],
    "slice": lambda x: x[:, -1:].squeeze(1),
    "select": lambda x: x.select(1, x.shape[1] - 1),
    "arange and index": lambda x: x[torch.arange(x.shape[0]), torch.full([x.shape[0]], x.shape[1] - 1)],
    "gather": lambda x: x.gather(1, torch.full([x.shape[0], 1, x.shape[2]], x.shape[1] - 1)).squeeze(1),
    "unbind": lambda x: x.unbind(1)[-1],
    "flip": lambda x: x.flip(1)[:, 0],
    "tokens first": lambda x: x.transpose(0, 1)[-1],
    "argmax of positions": lambda x: x[torch.arange(x.shape[0]), torch.arange(x.shape[1]).expand(x.shape[:2]).argmax(-1)],
    "narrow": lambda x: x.narrow(1, x.shape[1] - 1, 1)[:, 0],
    "one-hot": lambda x: torch.einsum("bnd,bn->bd", x, F.one_hot(torch.full([x.shape[0]], x.shape[1] - 1), x.shape[1]).to(x.dtype)),
}

MAXIMUM: dict[str, Way] = {
    "amax": lambda x: x.amax(1),
    "max values": lambda x: x.max(dim=1).values,
    "max [0]": lambda x: torch.max(x, 1)[0],
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.mT, 1).squeeze(-1),
    "max_pool1d": lambda x: F.max_pool1d(x.transpose(1, 2), x.shape[1]).flatten(1),
    "topk": lambda x: x.topk(1, dim=1).values.squeeze(1),
    "sort": lambda x: x.sort(1).values[:, -1],
    "gather of argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)).squeeze(1),
    "maximum of pairs": lambda x: functools.reduce(torch.maximum, x.unbind(1)),
    "cummax": lambda x: x.cummax(1).values[:, -1],
    "minus min": lambda x: -(-x).amin(1),
    "kthvalue": lambda x: x.kthvalue(x.shape[1], dim=1).values,
}

READOUTS: dict[str, dict[str, Way]] = {"first token": FIRST, "mean": MEAN, "last token": LAST, "maximum": MAXIMUM}


# -- what a model returns -----------------------------------------------------------------------------------------------------------------
class Output(OrderedDict[str, Tensor]):
    """A dictionary with attribute access."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


Returned = namedtuple("Returned", ["logits", "hidden"])

ENDS: dict[str, Way] = {
    "logits": lambda y: y,
    "tuple": lambda y: (y,),
    "tuple with None": lambda y: (y, None),
    "dict": lambda y: {"logits": y},
    "dict, out": lambda y: {"out": y},
    "dict with attributes": lambda y: Output(logits=y),
    "named tuple": lambda y: Returned(y, None),
    "object": lambda y: SimpleNamespace(logits=y),
    "list": lambda y: [y],
    "identity": lambda y: nn.Identity()(y),
    "times 1": lambda y: y * 1.0,
    "plus 0": lambda y: y + 0.0,
    "clone": lambda y: y.clone(),
    "contiguous": lambda y: y.contiguous(),
    "view": lambda y: y.view(-1, CLASSES),
    "one more axis and back": lambda y: y.unsqueeze(1).squeeze(1),
    "squeeze": lambda y: y.squeeze(),
    "upcast": lambda y: y.to(torch.float64),
    "class by class": lambda y: torch.cat([y[:, c : c + 1] for c in range(CLASSES)], 1),
}
