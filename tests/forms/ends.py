"""Forms of the end of a model, and of scales, gates and norms after the output projection of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whyformer import targets

from .base import (
    EPS,
    HEADS,
    WIDTH,
    Attention,
    FeedForward,
    Model,
    Parts,
    Way,
    build,
    gain,
    inputs,
    layer_norm,
    linear,
    matrix,
    merged,
    shift,
)
from .form import SIGNS, Form

# -- functions of the logits: signs equal those of the model without them -----------------------------------------------------
LAST: dict[str, dict[str, Way]] = {
    "sigmoid": {
        "torch.sigmoid": torch.sigmoid,
        "nn.Sigmoid": nn.Sigmoid(),
        "1 over 1 + exp": lambda y: 1 / (1 + torch.exp(-y)),
        "special.expit": torch.special.expit,
    },
    "softmax": {
        "F.softmax": lambda y: F.softmax(y, dim=-1),
        "nn.Softmax": nn.Softmax(dim=1),
        "exp over sum": lambda y: y.exp() / y.exp().sum(-1, keepdim=True),
    },
    "log_softmax": {
        "F.log_softmax": lambda y: F.log_softmax(y, dim=-1),
        "nn.LogSoftmax": nn.LogSoftmax(dim=1),
        "log of softmax": lambda y: torch.log(torch.softmax(y, -1)),
        "minus logsumexp": lambda y: y - y.logsumexp(-1, keepdim=True),
    },
    "logsigmoid": {"F.logsigmoid": F.logsigmoid, "log of sigmoid": lambda y: y.sigmoid().log(), "minus softplus": lambda y: -F.softplus(-y)},
    "tanh": {"torch.tanh": torch.tanh, "nn.Tanh": nn.Tanh(), "sigmoid": lambda y: 2 * torch.sigmoid(2 * y) - 1},
    "temperature": {"over 2": lambda y: y / 2.0, "times exp": lambda y: y * torch.tensor(0.7, dtype=y.dtype).exp()},
    "soft capping": {"30 tanh": lambda y: 30 * torch.tanh(y / 30), "method": lambda y: (y / 30).tanh() * 30},
}
ANOTHER: dict[str, Callable[[Any], Any]] = {"softmax": targets.Probability, "log_softmax": targets.LogProbability}


def negative_classes(base: dict[str, Any]) -> list[int]:
    """The class with the lowest logit of each sample."""
    with torch.no_grad():
        logits = build(Parts(**base))(inputs(base.get("inputs", "vectors")))
    assert bool((logits.amin(1) < 0).all())
    return logits.argmin(1).tolist()


def positive_classes(base: dict[str, Any]) -> list[int]:
    with torch.no_grad():
        logits = build(Parts(**base))(inputs(base.get("inputs", "vectors")))
    return logits.argmax(1).tolist()


# the slope of such a function varies along a path
UNDEFINED = ("integrated_gradients",)


def _signs() -> Iterator[Form]:
    for name, base in {"pre-norm, vectors": {}, "post-norm, ids": {"inputs": "ids", "post": True}}.items():
        model_inputs = partial(inputs, base.get("inputs", "vectors"))
        logits = partial(build, Parts(**base))
        for sort, classes in (("negative", negative_classes), ("positive", positive_classes)):
            labels = classes(base)
            for function, ways in LAST.items():
                form = partial(Form, "signs", f"{function}, {sort} logit", base=name, inputs=model_inputs, compared=SIGNS, undefined=UNDEFINED)
                yield form("logits", build=logits, target=labels)
                if function in ANOTHER:
                    yield form("target of the logits", build=logits, target=ANOTHER[function](labels), reference=True)
                for way, end in ways.items():
                    yield form(way, build=partial(build, Parts(**base, end=end)), target=labels, same_output=False)


# -- squeezed axes --------------------------------------------------------------------------------------------------------------
class OneNumber(Model):
    """A head of one class."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.head = linear("one", 1, WIDTH)


SQUEEZED: dict[str, Way] = {
    "[B, 1]": lambda y: y,
    "squeeze(-1)": lambda y: y.squeeze(-1),
    "squeeze()": lambda y: y.squeeze(),
    "squeeze(1)": lambda y: y.squeeze(1),
    "[:, 0]": lambda y: y[:, 0],
    "[..., 0]": lambda y: y[..., 0],
    "view(-1)": lambda y: y.view(-1),
    "flatten": lambda y: y.flatten(),
    "sum": lambda y: y.sum(-1),
    "mean": lambda y: y.mean(dim=1),
    "select": lambda y: y.select(1, 0),
}
ONE_SAMPLE: dict[str, Way] = {
    "[1, C]": lambda y: y,
    "squeeze()": lambda y: y.squeeze(),
    "squeeze(0)": lambda y: y.squeeze(0),
    "[0]": lambda y: y[0],
    "view(-1)": lambda y: y.view(-1),
    "flatten": lambda y: y.flatten(),
    "mean over samples": lambda y: y.mean(0),
    "[C] in a tuple": lambda y: (y[0],),
    "[C] in a dict": lambda y: {"logits": y.squeeze(0)},
}


def _one_number(options: dict[str, Any], end: Way) -> nn.Module:
    return OneNumber(Parts(**options, end=end)).double().eval()


def _squeezed() -> Iterator[Form]:
    for kind in ("vectors", "ids", "pixels"):
        options = {"inputs": kind}
        for batch in (2, 1):
            for way, end in SQUEEZED.items():
                model = partial(_one_number, options, end)
                yield Form("squeezed", f"one number, {batch} samples", way, kind, model, partial(inputs, kind, batch), target=None)
        for way, end in ONE_SAMPLE.items():
            yield Form("squeezed", "one sample", way, kind, partial(build, Parts(**options, end=end)), partial(inputs, kind, 1))


# -- after W_O: a scale or a gate that could be part of its weight ------------------------------------------------------------------
class Behind(nn.Module):
    """A block that applies a function to its branches before they are added."""

    def __init__(self, name: str, behind: Way | None, scale: Tensor | None, post: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2")
        self.attention, self.feed, self.behind, self.post = Attention(name, Parts()), FeedForward(name, Parts()), behind, post
        self.gamma = None
        if behind is None and scale is not None:  # in the weight of the projection
            with torch.no_grad():
                for layer in (self.attention.out, self.feed.down):
                    layer.weight.mul_(scale.view(-1, 1))
                    layer.bias.mul_(scale)
        elif scale is not None:
            self.gamma = nn.Parameter(scale.clone())

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.behind is None else self.behind(x, y, self.gamma)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(self.joined(x, self.attention(x)))
            return self.norm2(self.joined(x, self.feed(x)))
        x = self.joined(x, self.attention(self.norm1(x)))
        return self.joined(x, self.feed(self.norm2(x)))


VECTORS: dict[str, Way] = {
    "in the weight": None,  # type: ignore[dict-item]
    "x + y * g": lambda x, y, g: x + y * g,
    "x + g * y": lambda x, y, g: x + g * y,
    "g * y + x": lambda x, y, g: g * y + x,
    "in place": lambda x, y, g: x + y.mul_(g),
    "addcmul": lambda x, y, g: torch.addcmul(x, y, g),
    "torch.mul, torch.add": lambda x, y, g: torch.add(x, torch.mul(y, g)),
    "one more axis": lambda x, y, g: x + g[None, None] * y,
    "detached": lambda x, y, g: x + y * g.detach(),
    "diagonal": lambda x, y, g: x + F.linear(y, torch.diag(g)),
    "einsum": lambda x, y, g: x + torch.einsum("bnd,d->bnd", y, g),
    "dropout behind": lambda x, y, g: x + F.dropout(y * g, 0.1, training=False),
    "depthwise convolution": lambda x, y, g: x + F.conv1d(y.mT, g.view(-1, 1, 1), groups=WIDTH).mT,
    "over its inverse": lambda x, y, g: x + y / (1 / g),
    "exp of a logarithm": lambda x, y, g: x + y * g.log().exp(),
}
NUMBERS: dict[str, Way] = {
    "in the weight": None,  # type: ignore[dict-item]
    "x + a * y": lambda x, y, a: x + a * y,
    "x + y * a": lambda x, y, a: x + y * a,
    "alpha": lambda x, y, a: torch.add(x, y, alpha=float(a.detach())),
    "number": lambda x, y, a: x + y * a.item(),
    "tanh gate": lambda x, y, a: x + torch.tanh(torch.atanh(a)) * y,
    "sigmoid gate": lambda x, y, a: x + torch.sigmoid(torch.logit(a)) * y,
    "addcmul": lambda x, y, a: torch.addcmul(x, y, a),
    "in place": lambda x, y, a: x + y.mul_(a),
    "over a number": lambda x, y, a: x + y / (1 / a),
    "expanded": lambda x, y, a: x + a.expand(WIDTH) * y,
    "lerp": lambda x, y, a: x + torch.lerp(torch.zeros_like(y), y, a),
}


class Stack(nn.Module):
    def __init__(self, options: dict[str, Any], block: Callable[[str], nn.Module], depth: int = 3) -> None:
        super().__init__()
        whole = Model(Parts(**options))
        self.embed, self.norm, self.head, self.mean = whole.embed, whole.norm, whole.head, whole.mean
        self.blocks = nn.ModuleList([block(f"block{i}") for i in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.mean else x[:, 0])


def _scaled(options: dict[str, Any], behind: Way | None, number: bool) -> nn.Module:
    def block(name: str) -> nn.Module:
        scale = torch.full([1], 0.35, dtype=torch.float64) if number else 0.2 * gain(f"{name}.gamma", WIDTH).abs() + 0.02
        return Behind(name, behind, scale.expand(WIDTH) if number and behind is None else scale, options.get("post", False))

    return Stack(options, block).double().eval()


def _behind() -> Iterator[Form]:
    bases = {"pre-norm, vectors": {}, "pre-norm, ids": {"inputs": "ids"}, "post-norm, ids": {"inputs": "ids", "post": True}}
    for base, options in bases.items():
        model_inputs = partial(inputs, options.get("inputs", "vectors"))
        for function, ways, number in (("vector", VECTORS, False), ("number", NUMBERS, True)):
            for way, behind in ways.items():
                yield Form("behind W_O", function, way, base, partial(_scaled, options, behind, number), model_inputs)
        for function, norms in NORMS_BEHIND.items():
            for way, norm in norms.items():
                yield Form("behind W_O", function, way, base, partial(_normed, options, norm), model_inputs)


# -- after W_O: a norm ---------------------------------------------------------------------------------------------------------------
NORMS_BEHIND: dict[str, dict[str, Way]] = {
    "LayerNorm": {
        "F.layer_norm": lambda y, w, b: F.layer_norm(y, (WIDTH,), w, b, EPS),
        "by hand": lambda y, w, b: (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + EPS).sqrt() * w + b,
        "var_mean": lambda y, w, b: (y - (s := torch.var_mean(y, -1, correction=0, keepdim=True))[1]) * (s[0] + EPS).rsqrt() * w + b,
        "group_norm": lambda y, w, b: F.group_norm(y.reshape(-1, WIDTH), 1, w, b, EPS).view_as(y),
    },
    "RMSNorm": {
        "F.rms_norm": lambda y, w, b: F.rms_norm(y, (WIDTH,), w, EPS),
        "by hand": lambda y, w, b: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * w,
        "1 + w": lambda y, w, b: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1 + (w - 1)),
        "norm": lambda y, w, b: w * y / (y.norm(dim=-1, keepdim=True) ** 2 / WIDTH + EPS).sqrt(),
    },
}


class NormBehind(nn.Module):
    """A block with norms before and after each branch."""

    def __init__(self, name: str, norm: Way, post: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm(f"{name}.norm1"), layer_norm(f"{name}.norm2")
        self.attention, self.feed, self.way, self.post = Attention(name, Parts()), FeedForward(name, Parts()), norm, post
        for number in (3, 4):
            setattr(self, f"norm{number}_weight", nn.Parameter(gain(f"{name}.norm{number}.weight", WIDTH)))
            setattr(self, f"norm{number}_bias", nn.Parameter(shift(f"{name}.norm{number}.bias", WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.way(self.attention(x), self.norm3_weight, self.norm3_bias))
            return self.norm2(x + self.way(self.feed(x), self.norm4_weight, self.norm4_bias))
        x = x + self.way(self.attention(self.norm1(x)), self.norm3_weight, self.norm3_bias)
        return x + self.way(self.feed(self.norm2(x)), self.norm4_weight, self.norm4_bias)


def _normed(options: dict[str, Any], norm: Way) -> nn.Module:
    return Stack(options, lambda name: NormBehind(name, norm, options.get("post", False))).double().eval()


# -- definition of the norms of value vectors ------------------------------------------------------------------------------------------
def own_norms(name: str, x: Tensor, behind: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """‖v_ij‖ ``[B, N, N]`` of one pre-norm block: v_ij = g(Σ_h α^h_ij W_O^h v_j^h) + 1[i=j] x_i, with g after W_O.

    ``behind(part, whole)`` applies g to a part of the whole attention output at token i.
    """
    attention, norm = Attention(name, Parts()), layer_norm(f"{name}.norm1")
    h = norm(x)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (attention.query(h), attention.key(h), attention.value(h)))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    whole = attention.out(merged(weights @ v))
    per_head = matrix(f"{name}.o.weight", WIDTH, WIDTH).view(WIDTH, HEADS, -1)
    parts = torch.einsum("bhij,bhjd,ehd->bije", weights, v, per_head)
    vectors = behind(parts, whole[:, :, None])
    residual = torch.eye(x.shape[1], dtype=x.dtype)[None, :, :, None] * x[:, :, None]
    return (vectors + residual).norm(dim=-1)


def forms() -> Iterator[Form]:
    yield from _signs()
    yield from _squeezed()
    yield from _behind()
