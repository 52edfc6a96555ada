"""Attention written in other ways: its products, its projections, rotations, biases and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import HEAD, HEADS, WIDTH, Way, gain, heads, linear, matrix, merged, noise, shift

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
    found = []
    for h in range(q.shape[1]):
        weights = (q[:, h] @ k[:, h].transpose(-2, -1) / ROOT).softmax(dim=-1)
        found.append(weights @ v[:, h])
    return torch.stack(found, dim=1)


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
    """The sum of the weights as one more column of the values."""
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
    """[B, N, H, d], as a kernel takes it."""
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


# -- products that are another function ----------------------------------------------------------------------------------
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


# -- keys and values that heads share: of three heads, all look at the first one's --------------------------------------------
def shared(k: Tensor) -> Tensor:
    return k[:, :1]


def shared_by_five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.view(q.shape[0], 1, HEADS, *q.shape[2:])
    weights = torch.einsum("bghid,bgjd->bghij", q, shared(k)).div(ROOT).softmax(-1)
    return torch.einsum("bghij,bgjd->bghid", weights, shared(v)).flatten(1, 2)


def shared_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads as further queries of one head."""
    found = plain(q.flatten(1, 2), k[:, 0], v[:, 0])
    return found.unflatten(1, (HEADS, -1))


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


# -- rotations of queries and keys: neighbouring channels are pairs -------------------------------------------------------------
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
    """Pairs brought to the two halves, rotated there and brought back."""
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
    "every two": every_two,
    "halves": by_halves,
    "matrices, einsum": by_matrices,
    "matrices, matmul": by_matmul,
    "one matrix for each token": by_one_matrix_each,
    "written into": written_pairs,
    "unbound": unbound_pairs,
    "addcmul": addcmul_pairs,
    "tokens before heads": tokens_before_heads,
}


def rotated(turn: Way) -> Way:
    return lambda q, k, v: plain(turn(q), turn(k), v)


# -- whole attention modules: [B, N, D] -> [B, N, D] ----------------------------------------------------------------------------
def stacked(name: str) -> tuple[Tensor, Tensor]:
    """Weights and biases of queries, keys and values in one, ``[3 D, D]`` and ``[3 D]``."""
    weights = [matrix(f"{name}.{p}.weight", WIDTH, WIDTH) for p in "qkv"]
    return torch.cat(weights), torch.cat([shift(f"{name}.{p}.bias", WIDTH) for p in "qkv"])


class Fused(nn.Module):
    """One layer for queries, keys and values, and a way to take its output apart."""

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
    """Taken apart by indices of channels."""
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
    """Weights of its own, and a function x, [3 D, D], [3 D] -> q, k, v, each [B, H, N, d]."""

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
    found = []
    for weight, bias in zip(w.chunk(3), b.chunk(3), strict=True):
        found.append(torch.stack([F.linear(x, a, c) for a, c in zip(weight.chunk(HEADS), bias.chunk(HEADS), strict=True)], dim=1))
    return found


def old_convolution(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    y = torch.addmm(b, x.view(-1, WIDTH), w.t()).view(*x.shape[:-1], 3 * WIDTH)
    return [t.view(*t.shape[:2], HEADS, HEAD).permute(0, 2, 1, 3) for t in y.split(WIDTH, dim=2)]


def head_major(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Of each head its query, key and value side by side, as some fused weights lie."""
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
    """Attention whose output projection is written in another way: ([B, H, N, d], weight, bias) -> [B, N, D]."""

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


# -- torch's own attention, and others that are whole -------------------------------------------------------------------------
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
    given = (m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
    return F.multi_head_attention_forward(t, t, t, WIDTH, HEADS, *given, training=False)[0].transpose(0, 1)


def functional_separate(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    t = x.transpose(0, 1)
    q, k, v = m.in_proj_weight.chunk(3)
    given = (None, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
    weights = {"use_separate_proj_weight": True, "q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    return F.multi_head_attention_forward(t, t, t, WIDTH, HEADS, *given, training=False, need_weights=False, **weights)[0].transpose(0, 1)


class ListOfHeads(nn.Module):
    """Each head a module, as in tutorials."""

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
            own = nn.Linear(WIDTH, HEAD, dtype=torch.float64)
            with torch.no_grad():
                own.weight.copy_(matrix(f"{name}.{part}.weight", WIDTH, WIDTH)[rows])
                own.bias.copy_(shift(f"{name}.{part}.bias", WIDTH)[rows])
            setattr(self, layer, own)

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
