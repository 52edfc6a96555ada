"""Other layouts of axes: heads before samples, tokens before samples, the head axis last.

Each model is explained as a batch and sample by sample; all forms of a group have equal scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    CLASSES,
    FEATURES,
    HEAD,
    HEADS,
    VOCABULARY,
    WIDTH,
    FeedForward,
    Parts,
    Way,
    heads,
    layer_norm,
    linear,
    merged,
    noise,
)
from .form import Form
from .functions.attentions import plain
from .functions.projections import multihead

ROOT = math.sqrt(HEAD)


def some_inputs(kind: str, batch: int, tokens: int, rows_first: bool = False) -> Tensor:
    if kind == "ids":
        ids = torch.randint(1, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(3))
        return ids.T.contiguous() if rows_first else ids
    x = noise(f"{batch} samples of {tokens}", batch, tokens, FEATURES)
    return x.transpose(0, 1).contiguous() if rows_first else x


# -- products of q, k, v [B, H, N, d] with samples, heads and tokens on other axes ----------------------------------------------
def heads_before_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads split from the channels and concatenated along the batch, ``[H·B, N, d]``."""
    batch = q.shape[0]
    q, k, v = (torch.cat(merged(t).split(HEAD, dim=2), dim=0) for t in (q, k, v))
    mixed = torch.softmax(q.bmm(k.transpose(1, 2)) / ROOT, 2).bmm(v)
    return heads(torch.cat(mixed.split(batch, dim=0), dim=2))


def heads_before_samples_by_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat(torch.chunk(merged(t), HEADS, dim=2), dim=0) for t in (q, k, v))
    weights = F.softmax(torch.matmul(q, k.permute(0, 2, 1)) * HEAD**-0.5, dim=-1)
    return heads(torch.cat(torch.chunk(torch.matmul(weights, v), HEADS, dim=0), dim=2))


def heads_before_samples_by_permute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = q.shape
    q, k, v = (t.transpose(0, 1).reshape(-1, *shape[2:]) for t in (q, k, v))
    mixed = (q @ k.mT / ROOT).softmax(-1) @ v
    return mixed.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)


def heads_before_samples_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def heads_before_samples_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[H, B, N, N]``"""
    weights = torch.einsum("bhid,bhjd->hbij", q, k).div(ROOT).softmax(-1)
    return torch.einsum("hbij,bhjd->bhid", weights, v)


def samples_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    return (torch.bmm(flat[0], flat[1].mT).div(ROOT).softmax(-1) @ flat[2]).view(q.shape)


def axis_of_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, N, N, H]``"""
    q, k, v = (t.permute(0, 2, 3, 1) for t in (q, k, v))
    weights = F.softmax(torch.einsum("bidh,bjdh->bijh", q, k) / ROOT, dim=2)
    return torch.einsum("bijh,bjdh->bidh", weights, v).permute(0, 3, 1, 2)


def tokens_before_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[N, N, B, H]``"""
    q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
    weights = torch.einsum("ibhd,jbhd->ijbh", q, k).div(ROOT).softmax(1)
    return torch.einsum("ijbh,jbhd->ibhd", weights, v).permute(1, 2, 0, 3)


def keys_before_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, H, keys, queries]``"""
    weights = (k @ q.mT / ROOT).softmax(2)
    return weights.transpose(2, 3) @ v


def queries_before_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[N, B·H, N]``"""
    shape = q.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    weights = torch.einsum("bid,bjd->ibj", q, k).div(ROOT).softmax(-1)
    return torch.einsum("ibj,bjd->ibd", weights, v).transpose(0, 1).view(shape)


def one_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All samples in one sequence, separated by a mask."""
    batch, tokens = q.shape[0], q.shape[2]
    q, k, v = (t.transpose(0, 1).flatten(1, 2) for t in (q, k, v))
    same_sample = torch.block_diag(*[torch.ones(tokens, tokens)] * batch).bool()
    mixed = (q @ k.mT / ROOT).masked_fill(~same_sample, float("-inf")).softmax(-1) @ v
    return mixed.unflatten(1, (batch, tokens)).transpose(0, 1)


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([plain(*(t[i : i + 1] for t in (q, k, v))) for i in range(len(q))])


PRODUCTS: dict[str, Way] = {
    "[B, H, N, N]": plain,
    "[B·H, N, N]": samples_before_heads,
    "[H·B, N, N], cat of split": heads_before_samples,
    "[H·B, N, N], cat of chunk": heads_before_samples_by_chunk,
    "[H·B, N, N], transposed": heads_before_samples_by_permute,
    "[H, B, N, N], einsum": heads_before_samples_axis,
    "[H, B, N, N], sdpa": heads_before_samples_sdpa,
    "[B, N, N, H]": axis_of_heads_last,
    "[N, N, B, H]": tokens_before_samples,
    "[N, B·H, N]": queries_before_samples,
    "[B, H, keys, queries]": keys_before_queries,
    "[H, B·N, B·N]": one_sequence,
    "sample by sample": sample_by_sample,
}


# -- relative keys and values (Shaw et al.) ---------------------------------------------------------------------------------------
def relative(tokens: int, what: str) -> Tensor:
    """``[N, N, d]``: one vector per distance."""
    table = noise(f"relative {what}", 2 * tokens - 1, HEAD) / 2
    positions = torch.arange(tokens)
    return table[positions[None] - positions[:, None] + tokens - 1]


def relative_weights(q: Tensor, k: Tensor) -> Tensor:
    keys = torch.einsum("bhid,ijd->bhij", q, relative(q.shape[2], "keys"))
    return ((q @ k.mT + keys) / ROOT).softmax(-1)


def shaw(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = relative_weights(q, k)
    return weights @ v + torch.einsum("bhij,ijd->bhid", weights, relative(q.shape[2], "values"))


def shaw_by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries first, samples and heads as rows of one product."""
    b, h, n, d = q.shape
    keys = (q.permute(2, 0, 1, 3).reshape(n, b * h, d) @ relative(n, "keys").transpose(1, 2)).view(n, b, h, n).permute(1, 2, 0, 3)
    weights = ((q @ k.transpose(-2, -1) + keys) / ROOT).softmax(-1)
    values = weights.permute(2, 0, 1, 3).reshape(n, b * h, n) @ relative(n, "values")
    return weights @ v + values.view(n, b, h, d).permute(1, 2, 0, 3)


def shaw_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    keys = (q.unsqueeze(-2) @ relative(n, "keys").transpose(-1, -2)).squeeze(-2)
    weights = ((q @ k.mT + keys) / ROOT).softmax(-1)
    return weights @ v + (weights.unsqueeze(-2) @ relative(n, "values")).squeeze(-2)


def shaw_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = relative_weights(q, k)
    return weights @ v + (weights.unsqueeze(-1) * relative(q.shape[2], "values")).sum(-2)


def shaw_flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B·H, N, N]`` times the values of every pair."""
    weights = relative_weights(q, k).flatten(0, 1)
    mixed = weights @ v.flatten(0, 1) + torch.einsum("bij,ijd->bid", weights, relative(q.shape[2], "values"))
    return mixed.view(q.shape)


def shaw_in_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One value per pair, the sum of content and position."""
    pairs = v.unsqueeze(2) + relative(q.shape[2], "values")
    return torch.einsum("bhij,bhijd->bhid", relative_weights(q, k), pairs)


SHAW: dict[str, Way] = {
    "einsum": shaw,
    "queries first, matmul": shaw_by_matmul,
    "broadcast": shaw_broadcast,
    "product and sum": shaw_summed,
    "flat": shaw_flat,
    "values of pairs": shaw_in_one,
}


class Layer(nn.Module):
    def __init__(self, name: str, product: Way) -> None:
        super().__init__()
        self.norm1, self.norm2, self.feed = layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2"), FeedForward(name, Parts())
        self.q, self.k, self.v, self.o = (linear(f"{name}.{p}", WIDTH, WIDTH) for p in "qkvo")
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(merged(self.product(heads(self.q(h)), heads(self.k(h)), heads(self.v(h)))))
        return x + self.feed(self.norm2(x))


class SetModel(nn.Module):
    """A model without positions, for any number of tokens."""

    def __init__(self, kind: str, layer: Callable[[str], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64) if kind == "ids" else linear("vectors", WIDTH, FEATURES)
        if kind == "ids":
            with torch.no_grad():
                self.embed.weight.copy_(noise("words", VOCABULARY, WIDTH))
        self.layers = nn.ModuleList([layer(f"block{i}") for i in range(3)])
        self.norm, self.head = layer_norm("norm"), linear("head", CLASSES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


# -- the whole model on [N, B, D] ---------------------------------------------------------------------------------------------------
def tokens_first_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v ``[N, B, D]`` -> ``[N, B, D]``, maps ``[B·H, N, N]``."""
    n, b, _ = q.shape
    q, k, v = (t.contiguous().view(n, b * HEADS, HEAD).transpose(0, 1) for t in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).div(ROOT).softmax(-1), v).transpose(0, 1).reshape(n, b, WIDTH)


def tokens_first_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (HEADS, HEAD)) for t in (q, k, v))
    weights = torch.einsum("ibhd,jbhd->bhij", q, k).div(ROOT).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(2)


def tokens_first_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(plain(*(heads(t.transpose(0, 1)) for t in (q, k, v)))).transpose(0, 1)


def tokens_first_inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[N, N, B, H]``"""
    q, k, v = (t.unflatten(-1, (HEADS, HEAD)) for t in (q, k, v))
    weights = torch.einsum("ibnd,jbnd->ijbn", q, k).mul(1 / ROOT).softmax(dim=1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, v).flatten(2)


TOKENS_FIRST: dict[str, Way] = {
    "bmm": tokens_first_bmm,
    "einsum": tokens_first_einsum,
    "swapped": tokens_first_swapped,
    "[N, N, B, H]": tokens_first_inner,
}


class TokensFirstLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(self.product(self.q(h), self.k(h), self.v(h)))
        return x + self.feed(self.norm2(x))


class TorchLayer(nn.Module):
    def __init__(self, name: str, need_weights: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.feed = layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2"), FeedForward(name, Parts())
        self.attn, self.need_weights = multihead(name, batch_first=False), need_weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=self.need_weights)[0]
        return x + self.feed(self.norm2(x))


class TokensFirst(SetModel):
    """Tokens before samples inside the model and, if ``turned``, in its input."""

    def __init__(self, kind: str, layer: Callable[[str], nn.Module], turned: bool) -> None:
        super().__init__(kind, layer)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x if self.turned else x.transpose(0, 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(0))


def _plain(kind: str, product: Way) -> nn.Module:
    return SetModel(kind, lambda name: Layer(name, product)).double().eval()


def _turned(kind: str, layer: Callable[[str], nn.Module], turned: bool) -> nn.Module:
    return TokensFirst(kind, layer, turned).double().eval()


def _layers() -> dict[str, Callable[[str], nn.Module]]:
    layers = {name: partial(TokensFirstLayer, product=product) for name, product in TOKENS_FIRST.items()}
    return {**layers, "nn.MultiheadAttention": partial(TorchLayer, need_weights=True), "nn.MultiheadAttention, no weights": partial(TorchLayer, need_weights=False)}


def forms() -> Iterator[Form]:
    # batch and heads equal; batch × heads equal to tokens; batch equal to tokens; all different
    shapes = {"3 samples, 5 tokens": (3, 5), "2 samples, 6 tokens": (2, 6), "5 samples, 5 tokens": (5, 5), "4 samples, 6 tokens": (4, 6)}
    for base, (batch, tokens) in shapes.items():
        model_inputs = partial(some_inputs, "vectors", batch, tokens)
        for function, ways in (("maps", PRODUCTS), ("relative values", SHAW)):
            for name, product in ways.items():
                for single in (True, False):
                    way = f"{name}, one by one" if single else name
                    regroups = product is shaw_in_one  # one product of the map with a sum, not a sum of two products
                    yield Form("layouts", function, way, base, partial(_plain, "vectors", product), model_inputs, regroups, single=single)
    for kind in ("vectors", "ids"):
        for base, (batch, tokens) in list(shapes.items())[1:]:
            yield from _tokens_first(kind, base, batch, tokens)


def _tokens_first(kind: str, base: str, batch: int, tokens: int) -> Iterator[Form]:
    base_name = f"{kind}, {base}"
    yield Form("layouts", "tokens first", "samples first", base_name, partial(_plain, kind, plain), partial(some_inputs, kind, batch, tokens))
    for name, layer in _layers().items():
        for turned in (False, True):
            model_inputs = partial(some_inputs, kind, batch, tokens, turned)
            way = f"{name}, input too" if turned else name
            model = partial(_turned, kind, layer, turned)
            yield Form("layouts", "tokens first", way, base_name, model, model_inputs, rows_first=turned)
            yield Form("layouts", "tokens first", f"{way}, one by one", base_name, model, model_inputs, rows_first=turned, single=True)
