"""Implementations of softmax over the keys, plain and causal."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import Way


# -- plain: scores [B, H, N, N] -> weights -----------------------------------------------------------------------------
def in_place(s: Tensor) -> Tensor:
    e = s - s.amax(dim=-1, keepdim=True)
    e.exp_()
    e /= e.sum(dim=-1, keepdim=True)
    return e


def two_chunks(s: Tensor) -> Tensor:
    """Running maximum and sum, as in kernels that process the keys in parts."""
    first, second = s[..., :2], s[..., 2:]
    top = first.amax(-1, keepdim=True)
    total = (first - top).exp().sum(-1, keepdim=True)
    new = torch.maximum(top, second.amax(-1, keepdim=True))
    total = total * (top - new).exp() + (second - new).exp().sum(-1, keepdim=True)
    return torch.cat([(first - new).exp(), (second - new).exp()], -1) / total


def by_head(s: Tensor) -> Tensor:
    return torch.stack([torch.softmax(s[:, h], dim=-1) for h in range(s.shape[1])], dim=1)


def by_row(s: Tensor) -> Tensor:
    return torch.stack([F.softmax(row, dim=-1) for row in s.unbind(-2)], dim=-2)


def by_sample(s: Tensor) -> Tensor:
    return torch.cat([F.softmax(one, -1)[None] for one in s])


def ones_product(s: Tensor) -> Tensor:
    e = s.exp()
    return e / (e @ e.new_ones(s.shape[-1], 1))


def expanded(s: Tensor) -> Tensor:
    e = torch.exp(s)
    return torch.div(e, torch.sum(e, dim=-1).unsqueeze(-1).expand_as(e))


def reciprocal(s: Tensor) -> Tensor:
    e = (s - s.max(-1, keepdim=True)[0]).exp()
    return e * e.sum(-1, keepdim=True).reciprocal()


def einsummed(s: Tensor) -> Tensor:
    e = s.exp()
    return torch.einsum("bhij,bhi->bhij", e, 1 / torch.einsum("bhij->bhi", e))


def of_mean(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.mean(-1, keepdim=True) / s.shape[-1]


def of_cumsum(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.cumsum(-1)[..., -1:]


def shifted(s: Tensor, top: Tensor) -> Tensor:
    e = torch.exp(s - top)
    return e / e.sum(dim=-1, keepdim=True)


def divided(e: Tensor) -> Tensor:
    return e / e.sum(dim=-1, keepdim=True)


def log_of_sum(s: Tensor) -> Tensor:
    return torch.exp(s - torch.log(torch.sum(torch.exp(s), dim=-1, keepdim=True)))


SOFTMAX: dict[str, Way] = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "torch.softmax": lambda s: torch.softmax(s, -1),
    "method": lambda s: s.softmax(dim=-1),
    "nn.Softmax": nn.Softmax(-1),
    "torch.special": lambda s: torch.special.softmax(s, -1),
    "exp over sum": lambda s: divided(torch.exp(s)),
    "exp over expanded sum": expanded,
    "stable, amax": lambda s: shifted(s, s.amax(dim=-1, keepdim=True)),
    "stable, max values": lambda s: shifted(s, s.max(dim=-1, keepdim=True).values),
    "stable, max [0]": lambda s: shifted(s, torch.max(s, -1, keepdim=True)[0]),
    "stable, detached max": lambda s: shifted(s, s.detach().amax(-1, keepdim=True)),
    "stable, max of all": lambda s: shifted(s, s.max()),
    "log_softmax exp": lambda s: s.log_softmax(-1).exp(),
    "F.log_softmax, torch.exp": lambda s: torch.exp(F.log_softmax(s, dim=-1)),
    "special.log_softmax": lambda s: torch.special.log_softmax(s, -1).exp(),
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "torch.logsumexp": lambda s: torch.exp(s - torch.logsumexp(s, dim=-1)[..., None]),
    "log of the sum": log_of_sum,
    "softmin": lambda s: F.softmin(-s, dim=-1),
    "nn.Softmin": lambda s: nn.Softmin(dim=-1)(s.neg()),
    "normalize p=1": lambda s: F.normalize(s.exp(), p=1, dim=-1),
    "norm p=1": lambda s: (e := s.exp()) / e.norm(p=1, dim=-1, keepdim=True),
    "exp2": lambda s: divided(torch.exp2(s * math.log2(math.e))),
    "power of e": lambda s: divided(math.e**s),
    "torch.pow of e": lambda s: divided(torch.pow(math.e, s - s.amax(-1, keepdim=True))),
    "expm1": lambda s: divided(torch.expm1(s) + 1),
    "reciprocal of the sum": reciprocal,
    "einsum": einsummed,
    "ones product": ones_product,
    "mean times count": of_mean,
    "cumsum": of_cumsum,
    "over -2": lambda s: s.transpose(-1, -2).softmax(-2).transpose(-1, -2),
    "over 0": lambda s: s.permute(3, 0, 1, 2).softmax(0).permute(1, 2, 3, 0),
    "over 1": lambda s: F.softmax(s.permute(0, 3, 1, 2), dim=1).permute(0, 2, 3, 1),
    "flat rows": lambda s: F.softmax(s.reshape(-1, s.shape[-1]), dim=1).view_as(s),
    "flat batch and heads": lambda s: s.flatten(0, 1).softmax(-1).unflatten(0, s.shape[:2]),
    "dtype and back": lambda s: F.softmax(s, dim=-1, dtype=torch.float64).type_as(s),
    "upcast and back": lambda s: F.softmax(s.double(), dim=-1).to(s.dtype),
    "nan_to_num": lambda s: F.softmax(s, dim=-1).nan_to_num(0.0),
    "torch.nan_to_num": lambda s: torch.nan_to_num(torch.softmax(s, -1)),
    "times one": lambda s: s.softmax(-1) * 1.0,
    "dropout 0": lambda s: F.dropout(s.softmax(-1), p=0.0),
    "dropout in eval": lambda s: F.dropout(s.softmax(-1), p=0.1, training=False),
    "clamped at 0": lambda s: s.softmax(-1).clamp(min=0),
    "in place": in_place,
    "mask of all, where": lambda s: torch.where(torch.ones_like(s, dtype=torch.bool), s, -1e9).softmax(-1),
    "mask of none, masked_fill": lambda s: s.masked_fill(torch.zeros_like(s, dtype=torch.bool), float("-inf")).softmax(-1),
    "mask of zeros added": lambda s: (s + torch.zeros(1, 1, 1, s.shape[-1], dtype=s.dtype)).softmax(-1),
    "shifted scores": lambda s: (s - 5.0).softmax(-1),
    "temperature there and back": lambda s: F.softmax(s / 8.0 * 8.0, -1),
    "in two chunks": two_chunks,
    "head by head": by_head,
    "row by row": by_row,
    "sample by sample": by_sample,
    "contiguous": lambda s: s.contiguous().softmax(-1).contiguous(),
    "logsumexp by log and amax": lambda s: (s - (m := s.amax(-1, keepdim=True)) - (s - m).exp().sum(-1, keepdim=True).log()).exp(),
}


# -- causal: a query attends to itself and earlier keys ------------------------------------------------------------------
def keep(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril()


def added(s: Tensor, low: float) -> Tensor:
    return (s + torch.full(s.shape[-2:], low, dtype=s.dtype).triu(1)).softmax(-1)


def written_into(s: Tensor) -> Tensor:
    s = s.clone()
    s[..., ~keep(s)] = float("-inf")
    return s.softmax(-1)


def renormalised(s: Tensor, softened: Tensor) -> Tensor:
    masked = softened * keep(s)
    return masked / masked.sum(-1, keepdim=True)


def visible_only(s: Tensor) -> Tensor:
    rows = [F.pad(s[..., i, : i + 1].softmax(-1), (0, s.shape[-1] - i - 1)) for i in range(s.shape[-2])]
    return torch.stack(rows, dim=-2)


def stable_times_mask(s: Tensor) -> Tensor:
    mask = keep(s).to(s.dtype)
    e = torch.exp(s - (s * mask).amax(-1, keepdim=True)) * mask
    return e / e.sum(-1, keepdim=True)


def first_gpt(s: Tensor) -> Tensor:
    b = keep(s).to(s.dtype)[None, None]
    return F.softmax(s * b + -1e9 * (1 - b), dim=-1)


def buffer_slice(s: Tensor) -> Tensor:
    bias = torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64)
    return F.softmax(s.masked_fill(bias[:, :, : s.shape[-2], : s.shape[-1]] == 0, float("-inf")), dim=-1)


def by_index(s: Tensor) -> Tensor:
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None]
    return torch.where(i >= j, s, torch.tensor(-1e30, dtype=s.dtype)).softmax(-1)


CAUSAL: dict[str, Way] = {
    "masked_fill -inf": lambda s: s.masked_fill(~keep(s), float("-inf")).softmax(-1),
    "buffer of tril, == 0": buffer_slice,
    "where, finite": lambda s: torch.where(keep(s), s, -1e30).softmax(-1),
    "where, by index": by_index,
    "where, finfo": lambda s: torch.where(keep(s), s, torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype)).softmax(-1),
    "added -inf": lambda s: added(s, float("-inf")),
    "added -1e9": lambda s: added(s, -1e9),
    "added -1e4": lambda s: added(s, -1e4),
    "one minus mask": lambda s: (s + (1.0 - keep(s).to(s.dtype)) * torch.finfo(torch.float32).min).softmax(-1),
    "minus": lambda s: F.softmax(s - 1e10 * (~keep(s)).to(s.dtype), -1),
    "times mask, plus": first_gpt,
    "log of the mask": lambda s: (s + keep(s).to(s.dtype).log()).softmax(-1),
    "square subsequent mask": lambda s: (s + nn.Transformer.generate_square_subsequent_mask(s.shape[-1], dtype=s.dtype)).softmax(-1),
    "written into": written_into,
    "masked_fill_ in place": lambda s: s.masked_fill_(torch.ones(s.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1),
    "exp times mask": lambda s: (e := s.exp() * keep(s)) / e.sum(-1, keepdim=True),
    "stable exp times mask": stable_times_mask,
    "tril of exp": lambda s: F.normalize(s.exp().tril(), p=1, dim=-1),
    "exp of -inf": lambda s: divided(torch.exp(s.masked_fill(~keep(s), float("-inf")))),
    "softmax, mask, renormalised": lambda s: renormalised(s, s.softmax(-1)),
    "masked before and after": lambda s: renormalised(s, (s * keep(s)).softmax(-1)),
    "log_softmax of masked": lambda s: s.masked_fill(~keep(s), -1e30).log_softmax(-1).exp(),
    "masked, nan_to_num": lambda s: torch.nan_to_num(s.masked_fill(~keep(s), float("-inf")).softmax(-1)),
    "masked, then times mask": lambda s: s.masked_fill(~keep(s), -1e9).softmax(-1) * keep(s),
    "masked, filled with 0": lambda s: s.masked_fill(~keep(s), -1e9).softmax(-1).masked_fill(~keep(s), 0.0),
    "visible keys only": visible_only,
    "over -2": lambda s: s.mT.masked_fill(~keep(s).T, float("-inf")).softmax(-2).mT,
}
