"""Implementations of attention: products, biases, soft capping, shared keys, norms and rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import HEAD, HEADS, Way, gain, matrix, noise, shift

ROOT = math.sqrt(HEAD)


# -- products: (q, k, v), each [B, H, N, d] -> [B, H, N, d] -----------------------------------------------------------------
def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)), dim=-1), v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / ROOT, dim=-1), v).view(b, h, n, d)


def baddbmm_of_empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    start = torch.empty(b * h, n, n, dtype=q.dtype)
    scores = torch.baddbmm(start, q.reshape(b * h, n, d), k.reshape(b * h, n, d).transpose(1, 2), beta=0.0, alpha=1 / ROOT)
    return torch.bmm(scores.view(b, h, n, n).softmax(-1).view(b * h, n, n), v.reshape(b * h, n, d)).view(b, h, n, d)


def baddbmm_of_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    scores = q.new_zeros(flat[0].shape[0], 1, 1).baddbmm(flat[0], flat[1].mT, alpha=HEAD**-0.5)
    return torch.baddbmm(q.new_zeros(1, 1, 1), scores.softmax(dim=-1), flat[2]).unflatten(0, q.shape[:2])


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = []
    for h in range(q.shape[1]):
        weights = (q[:, h] @ k[:, h].transpose(-2, -1) / ROOT).softmax(dim=-1)
        mixed.append(weights @ v[:, h])
    return torch.stack(mixed, dim=1)


def head_by_head_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        out[:, h] = torch.softmax(q[:, h] @ k[:, h].mT / ROOT, -1) @ v[:, h]
    return out


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([plain(q[i], k[i], v[i]) for i in range(q.shape[0])])


def query_by_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [(one.unsqueeze(-2) @ k.mT / ROOT).softmax(-1) @ v for one in q.unbind(-2)]
    return torch.cat(rows, dim=-2)


def queries_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([plain(part, k, v) for part in q.split(2, dim=2)], dim=2)


def flash_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two blocks of keys, with a running maximum, sum and product."""
    top = torch.full((*q.shape[:-1], 1), float("-inf"), dtype=q.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
        scores = q @ keys.mT / ROOT
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        e, old = (scores - new).exp(), (top - new).exp()
        total, out, top = total * old + e.sum(-1, keepdim=True), out * old + e @ values, new
    return out / total


def divided_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT / ROOT)
    return (e @ v) / e.sum(-1, keepdim=True)


def ones_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum of the weights as an additional column of the values."""
    both = torch.exp(q @ k.mT / ROOT) @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return both[..., :-1] / both[..., -1:]


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))  # [N, B, H, d]
    weights = F.softmax(torch.einsum("ibnd,jbnd->ijbn", q, k) * (1 / ROOT), dim=1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, v).permute(1, 2, 0, 3)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Five axes: [B, groups, heads of a group, N, d]."""
    q, k, v = (t.unflatten(1, (HEADS, 1)) for t in (q, k, v))
    return ((q @ k.mT / ROOT).softmax(-1) @ v).flatten(1, 2)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bghid,bgjd->bghij", q.unsqueeze(2) / ROOT, k).softmax(-1)
    return torch.einsum("bghij,bgjd->bghid", weights, v).squeeze(2)


def sdpa_by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, N, H, d], the layout of some kernels."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.einsum("bthd,bshd->bhts", q * HEAD**-0.5, k).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).transpose(1, 2)


def sdpa_flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, q.shape[:2])


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= ROOT
    return scores.softmax(-1) @ v


def both_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = 1 / math.sqrt(ROOT)
    return torch.einsum("bhts,bhsc->bhtc", torch.einsum("bhtc,bhsc->bhts", q * scale, k * scale).softmax(-1), v)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = nn.Dropout(0.1).eval()(nn.Softmax(dim=-1)(torch.matmul(q, k.permute(0, 1, 3, 2)) / ROOT))
    return torch.matmul(weights, v)


def product_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / ROOT
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.transpose(-2, -1) @ (k @ q.transpose(-2, -1) / ROOT).softmax(dim=-2)).transpose(-2, -1)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(torch.einsum("bhjd,bhid->bhji", k, q) / ROOT, dim=2)
    return torch.einsum("bhji,bhjd->bhid", weights, v)


PRODUCTS: dict[str, Way] = {
    "matmul": plain,
    "@, mT": lambda q, k, v: (q @ k.mT / ROOT).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * HEAD**-0.5).softmax(-1), v),
    "einsum of uneven letters": lambda q, k, v: torch.einsum("bnqk,bnkh->bnqh", torch.einsum("bnqh,bnkh->bnqk", q, k).div(ROOT).softmax(-1), v),
    "einsum with ellipsis": lambda q, k, v: torch.einsum("...ij,...jd->...id", (torch.einsum("...id,...jd->...ij", q, k) / ROOT).softmax(-1), v),
    "bmm": bmm,
    "baddbmm, empty": baddbmm_of_empty,
    "baddbmm, zeros": baddbmm_of_zeros,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "sdpa, scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5, dropout_p=0.0),
    "sdpa, scaled before": lambda q, k, v: F.scaled_dot_product_attention(q / ROOT, k, v, scale=1.0),
    "sdpa, three axes": sdpa_flat,
    "sdpa, mask of zeros": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q.new_zeros(1, 1, q.shape[2], q.shape[2])),
    "sdpa, mask of trues": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)),
    "sdpa, contiguous": lambda q, k, v: F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous()).contiguous(),
    "tokens before heads": sdpa_by_token,
    "heads last": heads_last,
    "query scaled": lambda q, k, v: (q * HEAD**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v,
    "key scaled": lambda q, k, v: (q @ (k / ROOT).transpose(2, 3)).softmax(dim=-1) @ v,
    "both scaled": both_scaled,
    "scaled by a tensor": lambda q, k, v: (q @ k.mT / torch.sqrt(torch.tensor(HEAD, dtype=q.dtype))).softmax(-1) @ v,
    "scaled in place": scaled_in_place,
    "query scaled in place": lambda q, k, v: (q.mul(HEAD**-0.5) @ k.mT).softmax(-1) @ v,
    "softmax over -2": values_first,
    "keys first": keys_first,
    "attn * 1.0": lambda q, k, v: ((q @ k.mT / ROOT).softmax(-1) * 1.0) @ v,
    "dropout in eval": dropped,
    "dropout 0": lambda q, k, v: F.dropout((q @ k.mT / ROOT).softmax(-1), 0.0) @ v,
    "nan_to_num": lambda q, k, v: torch.nan_to_num((q @ k.mT / ROOT).softmax(-1)) @ v,
    "cast and back": lambda q, k, v: F.softmax(q @ k.mT / ROOT, dim=-1, dtype=torch.float64).to(q.dtype) @ v.to(q.dtype),
    "weights kept by view": lambda q, k, v: (q @ k.mT / ROOT).softmax(-1).view(-1, q.shape[1], q.shape[2], q.shape[2]) @ v,
    "head by head": head_by_head,
    "head by head, written": head_by_head_written,
    "heads unbound": lambda q, k, v: torch.stack([plain(*t) for t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)], dim=1),
    "sample by sample": sample_by_sample,
    "query by query": query_by_query,
    "queries in chunks": queries_in_chunks,
    "five axes": grouped,
    "five axes, einsum": grouped_einsum,
    "product and sum": product_and_sum,
    "divided behind the product": divided_behind,
    "sum as a column of values": ones_column,
    "flash-like": flash_like,
    "exp over sum": lambda q, k, v: (e := (q @ k.mT / ROOT).exp()) / e.sum(-1, keepdim=True) @ v,
    "max subtracted": lambda q, k, v: ((s := q @ k.mT / ROOT) - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v,
}


# -- further attention functions -----------------------------------------------------------------------------------------
def position_bias(n: int) -> Tensor:
    return noise(f"bias {n}", HEADS, n, n)


def biased(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / ROOT + position_bias(q.shape[2])


def bias_by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, n = q.shape[0], q.shape[2]
    start = position_bias(n).repeat(b, 1, 1)
    scores = torch.baddbmm(start, q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=1 / ROOT)
    return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, (b, HEADS))


def bias_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / ROOT
    scores += position_bias(q.shape[2])
    return scores.softmax(-1) @ v


BIASED: dict[str, Way] = {
    "added": lambda q, k, v: biased(q, k).softmax(-1) @ v,
    "bias first": lambda q, k, v: (position_bias(q.shape[2]).unsqueeze(0) + q @ k.mT / ROOT).softmax(-1) @ v,
    "in place": bias_in_place,
    "torch.add": lambda q, k, v: torch.add(position_bias(q.shape[2]), q @ k.mT, alpha=1 / ROOT).softmax(-1) @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias(q.shape[2])),
    "sdpa, expanded": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, position_bias(q.shape[2]).expand(q.shape[0], -1, -1, -1)),
    "baddbmm": bias_by_baddbmm,
    "baddbmm, expanded": lambda q, k, v: torch.stack(
        [torch.baddbmm(position_bias(q.shape[2]), q[i], k[i].mT, alpha=1 / ROOT).softmax(-1) @ v[i] for i in range(q.shape[0])]
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / ROOT + position_bias(q.shape[2])[None]).softmax(-1), v
    ),
    "looked up": lambda q, k, v: (
        q @ k.mT / ROOT + position_bias(q.shape[2]).flatten(1).T[torch.arange(q.shape[2] ** 2)].T.unflatten(1, (q.shape[2], -1))
    ).softmax(-1)
    @ v,
    "scores of one more column": lambda q, k, v: (torch.stack([q @ k.mT / ROOT, position_bias(q.shape[2]).expand(q.shape[0], -1, -1, -1)]).sum(0)).softmax(-1) @ v,
    "bias times exp": lambda q, k, v: F.normalize((q @ k.mT / ROOT).exp() * position_bias(q.shape[2]).exp(), p=1, dim=-1) @ v,
}

SOFT_CAPPED: dict[str, Way] = {
    "tanh": lambda q, k, v: (2.0 * torch.tanh(q @ k.mT / ROOT / 2.0)).softmax(-1) @ v,
    "method": lambda q, k, v: ((q @ k.mT / ROOT / 2.0).tanh() * 2.0).softmax(-1) @ v,
    "in steps": lambda q, k, v: torch.tanh(q @ k.mT * (1 / (2 * ROOT))).mul(2.0).softmax(-1) @ v,
    "sigmoid": lambda q, k, v: (2.0 * (2 * torch.sigmoid(q @ k.mT / ROOT) - 1)).softmax(-1) @ v,
    "in place": lambda q, k, v: (q @ k.mT / ROOT).div_(2.0).tanh_().mul_(2.0).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", (2 * torch.tanh(torch.einsum("bhid,bhjd->bhij", q, k) / (2 * ROOT))).softmax(-1), v),
}


def talk(name: str) -> Tensor:
    return matrix(f"talk {name}", HEADS, HEADS)


def talking(q: Tensor, k: Tensor, v: Tensor, mixed: Way) -> Tensor:
    return mixed(mixed(q @ k.mT / ROOT, talk("before")).softmax(-1), talk("behind")) @ v


TALKING: dict[str, Way] = {
    "einsum": lambda q, k, v: talking(q, k, v, lambda a, w: torch.einsum("gh,bhij->bgij", w, a)),
    "einsum, weight behind": lambda q, k, v: talking(q, k, v, lambda a, w: torch.einsum("bhij,hg->bgij", a, w.T)),
    "linear over the last axis": lambda q, k, v: talking(q, k, v, lambda a, w: F.linear(a.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2)),
    "conv2d": lambda q, k, v: talking(q, k, v, lambda a, w: F.conv2d(a, w[..., None, None])),
    "matmul": lambda q, k, v: talking(q, k, v, lambda a, w: (w @ a.flatten(2)).view_as(a)),
    "tensordot": lambda q, k, v: talking(q, k, v, lambda a, w: torch.tensordot(a, w, dims=([1], [1])).movedim(-1, 1)),
    "product and sum": lambda q, k, v: talking(q, k, v, lambda a, w: (w[None, :, :, None, None] * a[:, None]).sum(2)),
}


# -- multi-query attention: all heads use the keys and values of the first head -----------------------------------------------
def shared(k: Tensor) -> Tensor:
    return k[:, :1]


def shared_by_five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.view(q.shape[0], 1, HEADS, *q.shape[2:])
    weights = torch.einsum("bghid,bgjd->bghij", q, shared(k)).div(ROOT).softmax(-1)
    return torch.einsum("bghij,bgjd->bghid", weights, shared(v)).flatten(1, 2)


def shared_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads as additional queries of one head."""
    mixed = plain(q.flatten(1, 2), k[:, 0], v[:, 0])
    return mixed.unflatten(1, (HEADS, -1))


SHARED: dict[str, Way] = {
    "repeat_interleave": lambda q, k, v: plain(q, shared(k).repeat_interleave(HEADS, dim=1), shared(v).repeat_interleave(HEADS, dim=1)),
    "expand": lambda q, k, v: plain(q, shared(k).expand_as(q), shared(v).expand(-1, HEADS, -1, -1)),
    "expand and reshape": lambda q, k, v: plain(
        q, *(shared(t)[:, :, None].expand(-1, -1, HEADS, -1, -1).reshape(q.shape) for t in (k, v))
    ),
    "repeat": lambda q, k, v: plain(q, shared(k).repeat(1, HEADS, 1, 1), shared(v).repeat(1, HEADS, 1, 1)),
    "broadcast": lambda q, k, v: (q @ shared(k).mT / ROOT).softmax(-1) @ shared(v),
    "broadcast, three axes": lambda q, k, v: torch.einsum(
        "bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k[:, 0]).div(ROOT).softmax(-1), v[:, 0]
    ),
    "five axes": shared_by_five_axes,
    "heads as queries": shared_folded,
    "sdpa, expanded": lambda q, k, v: F.scaled_dot_product_attention(q, shared(k).expand_as(q), shared(v).expand_as(q)),
    "sdpa, enable_gqa": lambda q, k, v: F.scaled_dot_product_attention(q, shared(k), shared(v), enable_gqa=True),
    "stack": lambda q, k, v: plain(q, torch.stack([k[:, 0]] * HEADS, 1), torch.stack([v[:, 0]] * HEADS, 1)),
    "index": lambda q, k, v: plain(q, k[:, [0, 0, 0]], v.index_select(1, torch.zeros(HEADS, dtype=torch.long))),
}


# -- queries and keys of unit length, with a gain -----------------------------------------------------------------------------
def cosine(q: Tensor, k: Tensor, v: Tensor, unit: Way) -> Tensor:
    return (unit(q) @ unit(k).mT * 3.0).softmax(-1) @ v


COSINE: dict[str, Way] = {
    "F.normalize": lambda q, k, v: cosine(q, k, v, lambda t: F.normalize(t, dim=-1)),
    "norm": lambda q, k, v: cosine(q, k, v, lambda t: t / t.norm(dim=-1, keepdim=True)),
    "clamped norm": lambda q, k, v: cosine(q, k, v, lambda t: t / t.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-12)),
    "rsqrt of sum": lambda q, k, v: cosine(q, k, v, lambda t: t * t.pow(2).sum(-1, keepdim=True).rsqrt()),
    "vector_norm": lambda q, k, v: cosine(q, k, v, lambda t: t.div(torch.linalg.vector_norm(t, dim=-1, keepdim=True))),
    "rms": lambda q, k, v: cosine(q, k, v, lambda t: t * (t.square().mean(-1, keepdim=True)).rsqrt() / ROOT),
    "scaled after": lambda q, k, v: (3.0 * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2))).softmax(-1) @ v,
    "scaled queries": lambda q, k, v: ((F.normalize(q, dim=-1) * 3.0) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v,
    "exp of a logarithm": lambda q, k, v: (
        F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * torch.full([1, 1, 1], math.log(3.0), dtype=q.dtype).clamp(max=4.6).exp()
    ).softmax(-1)
    @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=3.0),
    "lengths behind the product": lambda q, k, v: (
        3.0 * (q @ k.mT) / (q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2))
    ).softmax(-1)
    @ v,
    "cosine_similarity": lambda q, k, v: (3.0 * F.cosine_similarity(q.unsqueeze(3), k.unsqueeze(2), dim=-1)).softmax(-1) @ v,
}


def key_norm(t: Tensor, name: str) -> Tensor:
    return F.layer_norm(t, (HEAD,), gain(f"{name}.w", HEAD), shift(f"{name}.b", HEAD))


def key_norm_by_hand(t: Tensor, name: str) -> Tensor:
    t = (t - t.mean(-1, keepdim=True)) * torch.rsqrt(t.var(-1, keepdim=True, unbiased=False) + 1e-5)
    return t * gain(f"{name}.w", HEAD) + shift(f"{name}.b", HEAD)


def normed_at(q: Tensor, k: Tensor, v: Tensor, norm: Way) -> Tensor:
    return plain(norm(q, "q"), norm(k, "k"), v)


QUERY_NORM: dict[str, Way] = {
    "F.layer_norm": lambda q, k, v: normed_at(q, k, v, key_norm),
    "by hand": lambda q, k, v: normed_at(q, k, v, key_norm_by_hand),
    "tokens before heads": lambda q, k, v: normed_at(q, k, v, lambda t, n: key_norm(t.transpose(1, 2), n).transpose(1, 2)),
    "flat": lambda q, k, v: normed_at(q, k, v, lambda t, n: key_norm(t.reshape(-1, HEAD), n).view(t.shape)),
    "head by head": lambda q, k, v: normed_at(q, k, v, lambda t, n: torch.stack([key_norm(h, n) for h in t.unbind(1)], 1)),
    "both at once": lambda q, k, v: plain(
        *(
            h * gain(f"{n}.w", HEAD) + shift(f"{n}.b", HEAD)
            for h, n in zip(F.layer_norm(torch.stack([q, k]), (HEAD,)).unbind(0), "qk", strict=True)
        ),
        v,
    ),
}


# -- rotary embeddings of queries and keys with adjacent pairs ------------------------------------------------------------------
def angles(n: int) -> Tensor:
    """``[N, d/2]``"""
    return torch.arange(n, dtype=torch.float64)[:, None] / 3.0 ** torch.arange(HEAD // 2, dtype=torch.float64)


def as_complex(t: Tensor) -> Tensor:
    pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2).contiguous())
    turn = torch.polar(torch.ones_like(angles(t.shape[2])), angles(t.shape[2]))
    return torch.view_as_real(pairs * turn).flatten(3)


def stacked_pairs(t: Tensor) -> Tensor:
    a, b, cos, sin = t[..., 0::2], t[..., 1::2], angles(t.shape[2]).cos(), angles(t.shape[2]).sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def every_two(t: Tensor) -> Tensor:
    cos, sin = (f(angles(t.shape[2])).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin))
    return t * cos + torch.stack([-t[..., 1::2], t[..., ::2]], dim=-1).reshape(t.shape) * sin


def by_halves(t: Tensor) -> Tensor:
    """Pairs are permuted to the two halves, rotated and permuted back."""
    order = torch.cat([torch.arange(0, HEAD, 2), torch.arange(1, HEAD, 2)])
    cos, sin = (torch.cat([f(angles(t.shape[2]))] * 2, dim=-1) for f in (torch.cos, torch.sin))
    t = t[..., order]
    first, second = t.chunk(2, dim=-1)
    return (t * cos + torch.cat([-second, first], dim=-1) * sin)[..., order.argsort()]


def rotation_matrices(n: int) -> Tensor:
    """``[N, d/2, 2, 2]``"""
    cos, sin = angles(n).cos(), angles(n).sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def by_matrices(t: Tensor) -> Tensor:
    return torch.einsum("npij,bhnpj->bhnpi", rotation_matrices(t.shape[2]), t.unflatten(-1, (-1, 2))).flatten(-2)


def by_matmul(t: Tensor) -> Tensor:
    return (rotation_matrices(t.shape[2]) @ t.unflatten(-1, (-1, 2)).unsqueeze(-1)).squeeze(-1).flatten(-2)


def by_one_matrix_each(t: Tensor) -> Tensor:
    blocks = torch.stack([torch.block_diag(*m) for m in rotation_matrices(t.shape[2])])
    return torch.einsum("nij,bhnj->bhni", blocks, t)


def written_pairs(t: Tensor) -> Tensor:
    out, cos, sin = torch.empty_like(t), angles(t.shape[2]).cos(), angles(t.shape[2]).sin()
    out[..., ::2] = t[..., ::2] * cos - t[..., 1::2] * sin
    out[..., 1::2] = t[..., 1::2] * cos + t[..., ::2] * sin
    return out


def unbound_pairs(t: Tensor) -> Tensor:
    a, b = t.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles(t.shape[2]).cos(), angles(t.shape[2]).sin()
    return torch.cat([(a * cos - b * sin).unsqueeze(-1), (b * cos + a * sin).unsqueeze(-1)], -1).view(t.shape)


def addcmul_pairs(t: Tensor) -> Tensor:
    cos, sin = (f(angles(t.shape[2])).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin))
    swapped = t.unflatten(-1, (-1, 2)).flip(-1) * torch.tensor([-1.0, 1.0], dtype=t.dtype)
    return torch.addcmul(t * cos, swapped.flatten(-2), sin)


def tokens_before_heads(t: Tensor) -> Tensor:
    x = t.transpose(1, 2)
    cos, sin = angles(t.shape[2]).cos()[:, None], angles(t.shape[2]).sin()[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(3).transpose(1, 2)


def complex_numbers(t: Tensor) -> Tensor:
    turned = torch.complex(t[..., ::2], t[..., 1::2]) * torch.exp(1j * angles(t.shape[2]))
    return torch.stack([turned.real, turned.imag], dim=-1).flatten(-2)


ROTATIONS: dict[str, Way] = {
    "stacked pairs": stacked_pairs,
    "complex": as_complex,
    "torch.complex": complex_numbers,
    "written into": written_pairs,
    "unbound": unbound_pairs,
    "tokens before heads": tokens_before_heads,
}
# one sum of all features, or products with matrices, instead of a sum for each of the two features of a pair
ROTATIONS_BY_OTHER_SUMS: dict[str, Way] = {
    "every two": every_two,
    "halves": by_halves,
    "addcmul": addcmul_pairs,
    "matrices, einsum": by_matrices,
    "matrices, matmul": by_matmul,
    "one matrix for each token": by_one_matrix_each,
}


def rotated(turn: Way) -> Way:
    return lambda q, k, v: plain(turn(q), turn(k), v)


