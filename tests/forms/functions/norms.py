"""Implementations of norms: LayerNorm, RMSNorm, unit length, groups, and norms over other axes than the last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import TOKENS, WIDTH, Way

GROUPS = 3

Hat = Callable[[Tensor, float], Tensor]


# -- LayerNorm without its affine map: (x, eps) -> Tensor ----------------------------------------------------------------
def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=-1, keepdim=True)


def over_root(c: Tensor, eps: float) -> Tensor:
    return c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + eps)


def of_var_mean(x: Tensor, eps: float) -> Tensor:
    variance, centre = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - centre) * torch.rsqrt(variance + eps)


def of_std_mean(x: Tensor, eps: float) -> Tensor:
    deviation, centre = torch.std_mean(x, -1, unbiased=False, keepdim=True)
    return (x - centre) / (deviation**2 + eps).sqrt()


def ln_in_place(x: Tensor, eps: float) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c.div_(c.pow(2).mean(-1, keepdim=True).add_(eps).sqrt_())


def of_squares(x: Tensor, eps: float) -> Tensor:
    centre = mean(x)
    variance = (x * x).mean(-1, keepdim=True) - centre * centre
    return (x - centre) / torch.sqrt(variance + eps)


def of_sums(x: Tensor, eps: float) -> Tensor:
    size = x.size(-1)
    centre = torch.sum(x, dim=-1, keepdim=True) / size
    variance = torch.sum((x - centre) ** 2, dim=-1, keepdim=True) / size
    return (x - centre) / (variance + eps) ** 0.5


def of_einsum(x: Tensor, eps: float) -> Tensor:
    c = x - (torch.einsum("bnd->bn", x) / x.shape[-1]).unsqueeze(-1)
    return c * torch.rsqrt(torch.einsum("bnd,bnd->bn", c, c) / x.shape[-1] + eps)[..., None]


def of_centring_matrix(x: Tensor, eps: float) -> Tensor:
    c = x @ (torch.eye(x.shape[-1], dtype=x.dtype) - 1 / x.shape[-1])
    return c * (c.square().mean(-1, keepdim=True) + eps).rsqrt()


def of_length(x: Tensor, eps: float) -> Tensor:
    c = centred(x)
    return c / (c.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps).sqrt()


def of_vector_norm(x: Tensor, eps: float) -> Tensor:
    c = centred(x)
    return c * (torch.linalg.vector_norm(c, dim=-1, keepdim=True).square().div(x.shape[-1]).add(eps)).pow(-0.5)


def channels_first(x: Tensor, eps: float) -> Tensor:
    x = x.transpose(1, 2)
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return ((x - u) / torch.sqrt(s + eps)).transpose(1, 2)


def tokens_one_by_one(x: Tensor, eps: float) -> Tensor:
    return torch.stack([over_root(centred(t), eps) for t in x.unbind(1)], dim=1)


def scale_and_shift(x: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
    return x * scale - x.mean(-1, keepdim=True) * scale


LAYER_HATS: dict[str, Hat] = {
    "F.layer_norm": lambda x, eps: F.layer_norm(x, (x.shape[-1],), eps=eps),
    "torch.layer_norm": lambda x, eps: torch.layer_norm(x, x.shape[-1:], None, None, eps),
    "native_layer_norm": lambda x, eps: torch.native_layer_norm(x, [x.shape[-1]], None, None, eps)[0],
    "var, sqrt": lambda x, eps: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps),
    "var with correction, rsqrt": lambda x, eps: (x - mean(x)) * torch.rsqrt(torch.var(x, dim=-1, correction=0, keepdim=True) + eps),
    "keepdims": lambda x, eps: (x - x.mean(-1, keepdims=True)) / (x.var(-1, unbiased=False, keepdims=True) + eps).sqrt(),
    "pow 2, sqrt": lambda x, eps: over_root(centred(x), eps),
    "square, rsqrt": lambda x, eps: (c := centred(x)) * (c.square().mean(-1, keepdim=True) + eps).rsqrt(),
    "** 0.5": lambda x, eps: (c := centred(x)) / ((c * c).mean(-1, keepdim=True) + eps) ** 0.5,
    "** -0.5": lambda x, eps: (c := centred(x)) * ((c**2).mean(-1, keepdim=True) + eps) ** -0.5,
    "pow -0.5": lambda x, eps: torch.mul(c := torch.sub(x, mean(x)), torch.pow(c.pow(2).mean(-1, keepdim=True) + eps, -0.5)),
    "1 over root": lambda x, eps: (c := centred(x)) * (1 / torch.sqrt(c.square().mean(-1, keepdim=True) + eps)),
    "reciprocal": lambda x, eps: (c := centred(x)) * (c.square().mean(-1, keepdim=True) + eps).sqrt().reciprocal(),
    "std, squared": lambda x, eps: (x - mean(x)) / (x.std(-1, keepdim=True, unbiased=False).pow(2) + eps).sqrt(),
    "unbiased var, corrected": lambda x, eps: centred(x) / (x.var(-1, keepdim=True) * (x.shape[-1] - 1) / x.shape[-1] + eps).sqrt(),
    "var_mean": of_var_mean,
    "std_mean": of_std_mean,
    "mean of squares": of_squares,
    "sums": of_sums,
    "einsum": of_einsum,
    "centring matrix": of_centring_matrix,
    "length": of_length,
    "vector_norm": of_vector_norm,
    "exp log": lambda x, eps: (c := centred(x)) * torch.exp(-0.5 * torch.log(c.square().mean(-1, keepdim=True) + eps)),
    "in place": ln_in_place,
    "channels first": channels_first,
    "tokens one by one": tokens_one_by_one,
    "x times scale minus shift": scale_and_shift,
    "flat rows": lambda x, eps: over_root(centred(x.reshape(-1, x.shape[-1])), eps).view_as(x),
    "squeezed means": lambda x, eps: (x - x.mean(-1)[..., None]) / (x.var(-1, correction=0) + eps).sqrt().unsqueeze(-1),
    "upcast": lambda x, eps: over_root(centred(x.double()), eps).to(x.dtype),
    "group_norm of rows": lambda x, eps: F.group_norm(x.flatten(0, 1), 1, eps=eps).view_as(x),
    "instance_norm": lambda x, eps: F.instance_norm(x, eps=eps),
    "batch_norm of rows as channels": lambda x, eps: F.batch_norm(x.reshape(1, -1, x.shape[-1]), None, None, training=True, eps=eps).view_as(x),
    "centred twice": lambda x, eps: over_root(centred(centred(x)), eps),
    "addcdiv": lambda x, eps: torch.addcdiv(torch.zeros_like(x), c := centred(x), (c.square().mean(-1, keepdim=True) + eps).sqrt().expand_as(c)),
}

# -- the affine map ----------------------------------------------------------------------------------------------------
AFFINES: dict[str, Way] = {
    "h * w + b": lambda h, w, b: h * w + b,
    "w * h + b": lambda h, w, b: w * h + b,
    "addcmul": lambda h, w, b: torch.addcmul(b, h, w),
    "mul, add": lambda h, w, b: torch.add(torch.mul(h, w), b),
    "in place": lambda h, w, b: h.mul_(w).add_(b),
    "1 + (w - 1)": lambda h, w, b: h * (1 + (w - 1)) + b,
    "b + h + h (w - 1)": lambda h, w, b: b + h + h * (w - 1),
    "expanded": lambda h, w, b: h * w.expand_as(h) + b.view(1, 1, -1),
    "diagonal matrix": lambda h, w, b: F.linear(h, torch.diag(w), b),
    "einsum": lambda h, w, b: torch.einsum("bnd,d->bnd", h, w) + b,
    "detached": lambda h, w, b: h * w.detach() + b.data,
}


def with_affine(hat: Hat) -> Way:
    return lambda x, w, b, eps: hat(x, eps) * w + b


def behind_a_hat(affine: Way) -> Way:
    return lambda x, w, b, eps: affine((c := centred(x)) / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + eps), w, b)


def folded_scale(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps) * w
    return (x - x.mean(-1, keepdim=True)) * scale + b


def folded_scale_and_shift(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    variance, centre = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    scale = w * torch.rsqrt(variance + eps)
    return x * scale + (b - centre * scale)


LAYER_NORM: dict[str, Way] = {
    "F.layer_norm, affine": lambda x, w, b, eps: F.layer_norm(x, (WIDTH,), w, b, eps),
    "torch.layer_norm, affine": lambda x, w, b, eps: torch.layer_norm(x, (WIDTH,), w, b, eps),
    "native_layer_norm, affine": lambda x, w, b, eps: torch.native_layer_norm(x, (WIDTH,), w, b, eps)[0],
    "group_norm of rows, affine": lambda x, w, b, eps: F.group_norm(x.view(-1, WIDTH), 1, w, b, eps).view(x.shape),
    "F.layer_norm, tokens first": lambda x, w, b, eps: F.layer_norm(x.transpose(0, 1), (WIDTH,), w, b, eps).transpose(0, 1),
    "weight folded into the scale": folded_scale,
    "scale and shift": folded_scale_and_shift,
    "weight before the quotient": lambda x, w, b, eps: w * (x - mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + eps) + b,
    **{name: with_affine(hat) for name, hat in LAYER_HATS.items()},
    **{f"by hand, {name}": behind_a_hat(affine) for name, affine in AFFINES.items()},
}

LAYER_PLAIN: dict[str, Way] = {name: (lambda hat: lambda x, w, b, eps: hat(x, eps))(hat) for name, hat in LAYER_HATS.items()}
LAYER_GAIN: dict[str, Way] = {name: (lambda hat: lambda x, w, b, eps: w * hat(x, eps))(hat) for name, hat in LAYER_HATS.items()}
LAYER_WIDE: dict[str, Way] = {name: (lambda hat: lambda x, w, b, eps: hat(x, 1e-3) * w + b)(hat) for name, hat in LAYER_HATS.items()}

# the deviation with n − 1 plus ε, as in a well-known tutorial
UNBIASED: dict[str, Way] = {
    "std": lambda x, w, b, eps: w * (x - mean(x)) / (x.std(-1, keepdim=True) + eps) + b,
    "hat times weight": lambda x, w, b, eps: (x - mean(x)) / (x.std(-1, keepdim=True) + eps) * w + b,
    "torch.std": lambda x, w, b, eps: w * ((x - torch.mean(x, -1, keepdim=True)) / (torch.std(x, dim=-1, keepdim=True) + eps)) + b,
    "root of var": lambda x, w, b, eps: w * (x - mean(x)) / (torch.sqrt(x.var(-1, keepdim=True)) + eps) + b,
    "var ** 0.5": lambda x, w, b, eps: w * centred(x) / (x.var(dim=-1, keepdim=True) ** 0.5 + eps) + b,
    "std_mean": lambda x, w, b, eps: w * (x - (s := torch.std_mean(x, -1, keepdim=True))[1]) / (s[0] + eps) + b,
    "sum over n - 1": lambda x, w, b, eps: w * (c := centred(x)) / (((c * c).sum(-1, keepdim=True) / (WIDTH - 1)).sqrt() + eps) + b,
    "length": lambda x, w, b, eps: w * (c := centred(x)) / (c.norm(dim=-1, keepdim=True) / (WIDTH - 1) ** 0.5 + eps) + b,
    "reciprocal": lambda x, w, b, eps: torch.addcmul(b, w, centred(x) * (x.std(-1, correction=1, keepdim=True) + eps).reciprocal()),
    "channels first": lambda x, w, b, eps: ((t := x.mT) - t.mean(1, keepdim=True)).div(t.std(1, keepdim=True) + eps).mT * w + b,
    "gain through the deviation": lambda x, w, b, eps: centred(x) * (w / (x.std(-1, keepdim=True) + eps)) + b,
    "in place": lambda x, w, b, eps: centred(x).div_(x.std(-1, keepdim=True).add_(eps)).mul_(w).add_(b),
}

# the variance with n − 1, ε inside the root
UNBIASED_INSIDE: dict[str, Way] = {
    "var": lambda x, w, b, eps: w * (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + eps) + b,
    "rsqrt": lambda x, w, b, eps: (x - mean(x)) * torch.rsqrt(torch.var(x, -1, keepdim=True) + eps) * w + b,
    "var_mean": lambda x, w, b, eps: (x - (s := torch.var_mean(x, -1, keepdim=True))[1]) / (s[0] + eps).sqrt() * w + b,
    "sum over n - 1": lambda x, w, b, eps: (c := centred(x)) / (c.square().sum(-1, keepdim=True) / (WIDTH - 1) + eps) ** 0.5 * w + b,
    "std squared": lambda x, w, b, eps: torch.addcmul(b, centred(x) / (x.std(-1, keepdim=True) ** 2 + eps).sqrt(), w),
    "einsum": lambda x, w, b, eps: (c := centred(x))
    * (torch.einsum("...d,...d->...", c, c)[..., None] / (WIDTH - 1) + eps).pow(-0.5)
    * w
    + b,
}


# -- RMSNorm -----------------------------------------------------------------------------------------------------------
def rms_upcast(x: Tensor, eps: float) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float64)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return x.to(dtype)


def rms_in_place(x: Tensor, eps: float) -> Tensor:
    x = x.clone()
    return x.mul_(x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_())


RMS_HATS: dict[str, Hat] = {
    "F.rms_norm": lambda x, eps: F.rms_norm(x, (x.shape[-1],), eps=eps),
    "torch.rms_norm": lambda x, eps: torch.rms_norm(x, x.shape[-1:], None, eps),
    "pow 2, rsqrt": lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps),
    "square, sqrt": lambda x, eps: x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps),
    "x * x, ** -0.5": lambda x, eps: x * ((x * x).mean(-1, keepdim=True) + eps) ** -0.5,
    "** 0.5": lambda x, eps: x / ((x**2).mean(-1, keepdim=True) + eps) ** 0.5,
    "sum": lambda x, eps: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.size(-1) + eps),
    "norm": lambda x, eps: x / (x.norm(2, dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps).sqrt(),
    "vector_norm": lambda x, eps: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True).pow(2) / x.shape[-1] + eps).sqrt(),
    "einsum": lambda x, eps: x * (torch.einsum("bnd,bnd->bn", x, x) / x.shape[-1] + eps).rsqrt().unsqueeze(-1),
    "vecdot": lambda x, eps: x * (torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + eps).rsqrt(),
    "product with itself": lambda x, eps: x / ((x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1) / x.shape[-1] + eps).sqrt(),
    "reciprocal": lambda x, eps: x * torch.reciprocal(torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)),
    "exp log": lambda x, eps: x * torch.exp(-0.5 * torch.log(x.pow(2).mean(-1, keepdim=True) + eps)),
    "upcast": rms_upcast,
    "float, type_as": lambda x, eps: ((y := x.double()) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).type_as(x),
    "in place": rms_in_place,
    "channels first": lambda x, eps: ((t := x.mT) * (t.square().mean(1, keepdim=True) + eps).rsqrt()).mT,
    "flat rows": lambda x, eps: ((r := x.view(-1, x.shape[-1])) / (r.square().mean(1, keepdim=True) + eps).sqrt()).view_as(x),
    "root mean square, root of squares": lambda x, eps: x / torch.hypot(
        x.square().mean(-1, keepdim=True).sqrt(), torch.full([], eps, dtype=x.dtype).sqrt()
    ),
}  # the affine map is the weight only

RMS: dict[str, Way] = {
    "F.rms_norm, weight": lambda x, w, b, eps: F.rms_norm(x, (WIDTH,), w, eps),
    **{name: (lambda hat: lambda x, w, b, eps: w * hat(x, eps))(hat) for name, hat in RMS_HATS.items()},
    "1 + w": lambda x, w, b, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + (w - 1.0)),
    "weight first": lambda x, w, b, eps: (x * w) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps),
    "weight in the scale": lambda x, w, b, eps: x * (w * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)),
    "mul": lambda x, w, b, eps: torch.mul(w, x.div(x.pow(2).mean(-1, keepdim=True).add(eps).sqrt())),
    "tokens first": lambda x, w, b, eps: ((t := x.transpose(0, 1)) * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps)).transpose(0, 1) * w,
}
RMS_WIDE: dict[str, Way] = {name: (lambda hat: lambda x, w, b, eps: hat(x, 1e-3) * w)(hat) for name, hat in RMS_HATS.items()}

# ε outside the root
RMS_OUTSIDE: dict[str, Way] = {
    "sqrt of mean": lambda x, w, b, eps: w * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps)),
    "norm over root of size": lambda x, w, b, eps: w * (x / (x.norm(2, dim=-1, keepdim=True) * WIDTH**-0.5 + eps)),
    "vector_norm": lambda x, w, b, eps: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / WIDTH**0.5 + eps) * w,
    "** 0.5": lambda x, w, b, eps: x * w / ((x * x).mean(-1, keepdim=True) ** 0.5 + eps),
    "reciprocal": lambda x, w, b, eps: x * ((x * x).mean(-1, keepdim=True).sqrt() + eps).reciprocal() * w,
    "einsum": lambda x, w, b, eps: x / ((torch.einsum("bnd,bnd->bn", x, x) / WIDTH).sqrt().unsqueeze(-1) + eps) * w,
}

# -- unit length, with a gain --------------------------------------------------------------------------------------------
UNIT: dict[str, Way] = {
    "F.normalize": lambda x, w, b, eps: F.normalize(x, dim=-1) * w * WIDTH**0.5,
    "F.normalize, p=2": lambda x, w, b, eps: F.normalize(x, p=2.0, dim=-1) * (WIDTH**0.5 * w),
    "x / x.norm": lambda x, w, b, eps: x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5 * w,
    "clamped": lambda x, w, b, eps: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8) * WIDTH**0.5 * w,
    "norm scaled, clamped": lambda x, w, b, eps: x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5).clamp(min=1e-8) * w,
    "linalg.norm": lambda x, w, b, eps: w * WIDTH**0.5 * (x / torch.linalg.norm(x, dim=-1, keepdim=True)),
    "vector_norm": lambda x, w, b, eps: w * (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)) * WIDTH**0.5,
    "root of sum": lambda x, w, b, eps: x / x.pow(2).sum(-1, keepdim=True).sqrt() * w * WIDTH**0.5,
    "rsqrt of sum": lambda x, w, b, eps: x * torch.rsqrt(x.square().sum(-1, keepdim=True)) * w * WIDTH**0.5,
    "rsqrt of mean": lambda x, w, b, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w,
    "einsum": lambda x, w, b, eps: x * torch.einsum("bnd,bnd->bn", x, x).pow(-0.5).unsqueeze(-1) * w * WIDTH**0.5,
    "expanded": lambda x, w, b, eps: x.div(x.norm(p=2, dim=-1, keepdim=True).expand_as(x)) * w * WIDTH**0.5,
    "gain and length in one": lambda x, w, b, eps: x * (WIDTH**0.5 * w / x.norm(dim=-1, keepdim=True)),
    "channels first": lambda x, w, b, eps: F.normalize(x.transpose(1, 2), dim=1).transpose(1, 2) * w * WIDTH**0.5,
    "normalised twice": lambda x, w, b, eps: F.normalize(F.normalize(x, dim=-1), dim=-1) * w * WIDTH**0.5,
    "cosine of unit vectors": lambda x, w, b, eps: F.cosine_similarity(x.unsqueeze(-2), torch.eye(WIDTH, dtype=x.dtype), dim=-1) * w * WIDTH**0.5,
}


# -- groups of channels per token ------------------------------------------------------------------------------------------
def groups_by_view(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    g = x.view(*x.shape[:2], GROUPS, -1)
    g = (g - g.mean(-1, keepdim=True)) / torch.sqrt(g.var(-1, keepdim=True, unbiased=False) + eps)
    return g.view_as(x) * w + b


def groups_by_chunk(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return torch.cat([over_root(centred(part), eps) for part in x.chunk(GROUPS, dim=-1)], -1) * w + b


def groups_var_mean(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    g = x.unflatten(-1, (GROUPS, -1))
    variance, centre = torch.var_mean(g, -1, correction=0, keepdim=True)
    return torch.addcmul(b, ((g - centre) * torch.rsqrt(variance + eps)).flatten(-2), w)


def groups_einsum(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    g = x.reshape(-1, GROUPS, WIDTH // GROUPS)
    g = g - g.sum(-1, keepdim=True) / g.shape[-1]
    g = g * (torch.einsum("tgc,tgc->tg", g, g) / g.shape[-1] + eps).rsqrt().unsqueeze(-1)
    return g.reshape(x.shape) * w + b


def groups_heads(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """A separate norm of the channels of each head."""
    g = x.view(x.shape[0], x.shape[1], GROUPS, -1).transpose(1, 2)
    return F.layer_norm(g, g.shape[-1:], eps=eps).transpose(1, 2).reshape(x.shape) * w + b


GROUP: dict[str, Way] = {
    "F.group_norm of rows": lambda x, w, b, eps: F.group_norm(x.reshape(-1, WIDTH), GROUPS, w, b, eps).view_as(x),
    "F.group_norm, then affine": lambda x, w, b, eps: F.group_norm(x.flatten(0, 1), GROUPS, eps=eps).view_as(x) * w + b,
    "torch.group_norm": lambda x, w, b, eps: torch.group_norm(x.reshape(-1, WIDTH, 1), GROUPS, w, b, eps).view_as(x),
    "F.layer_norm of groups": lambda x, w, b, eps: F.layer_norm(x.unflatten(-1, (GROUPS, -1)), (WIDTH // GROUPS,), eps=eps).flatten(-2) * w + b,
    "by view": groups_by_view,
    "by chunk": groups_by_chunk,
    "var_mean": groups_var_mean,
    "einsum": groups_einsum,
    "heads": groups_heads,
    "pow 2, rsqrt": lambda x, w, b, eps: (
        (c := centred(x.view(-1, GROUPS, WIDTH // GROUPS))) * (c.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    ).view(x.shape)
    * w
    + b,
    "instance_norm": lambda x, w, b, eps: F.instance_norm(x.reshape(-1, GROUPS, WIDTH // GROUPS), eps=eps).view_as(x) * w + b,
    "stacked groups": lambda x, w, b, eps: torch.hstack(
        [F.layer_norm(g, g.shape[-1:], eps=eps) for g in x.reshape(-1, WIDTH).split(WIDTH // GROUPS, dim=1)]
    ).view_as(x)
    * w
    + b,
}


# -- over all tokens and channels of a sample --------------------------------------------------------------------------------
def whole_by_hand(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    centre = x.mean(dim=(1, 2), keepdim=True)
    variance = (x - centre).pow(2).mean(dim=(1, 2), keepdim=True)
    return (x - centre) / torch.sqrt(variance + eps) * w + b


WHOLE: dict[str, Way] = {
    "F.group_norm of one group": lambda x, w, b, eps: F.group_norm(x.transpose(1, 2), 1, w, b, eps).transpose(1, 2),
    "F.layer_norm of both axes": lambda x, w, b, eps: F.layer_norm(x, x.shape[1:], eps=eps) * w + b,
    "by hand": whole_by_hand,
    "flat": lambda x, w, b, eps: F.layer_norm(x.flatten(1), (x[0].numel(),), eps=eps).view_as(x) * w + b,
    "flat, by hand": lambda x, w, b, eps: over_root(centred(x.flatten(1)), eps).view_as(x) * w + b,
    "var_mean": lambda x, w, b, eps: (x - (s := torch.var_mean(x, (1, 2), correction=0, keepdim=True))[1]) * (s[0] + eps).rsqrt() * w + b,
    "instance_norm": lambda x, w, b, eps: F.instance_norm(x.unsqueeze(1), eps=eps).squeeze(1) * w + b,
    "as a picture": lambda x, w, b, eps: F.group_norm(x.mT.unsqueeze(-1), 1, w, b, eps).squeeze(-1).mT,
    "mean of means": lambda x, w, b, eps: (c := x - x.mean(1, keepdim=True).mean(2, keepdim=True))
    / (c.square().mean(2, keepdim=True).mean(1, keepdim=True) + eps).sqrt()
    * w
    + b,
    "einsum": lambda x, w, b, eps: (c := x - torch.einsum("bnd->b", x)[:, None, None] / x[0].numel())
    * (torch.einsum("bnd,bnd->b", c, c) / x[0].numel() + eps).rsqrt()[:, None, None]
    * w
    + b,
    "sample by sample": lambda x, w, b, eps: torch.stack([(c := s - s.mean()) / (c.square().mean() + eps).sqrt() for s in x]) * w + b,
    "std": lambda x, w, b, eps: (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True, correction=0) ** 2 + eps).sqrt() * w + b,
}

# -- over the tokens, per channel --------------------------------------------------------------------------------------------
ALONG_TOKENS: dict[str, Way] = {
    "F.instance_norm": lambda x, w, b, eps: F.instance_norm(x.transpose(1, 2), weight=w, bias=b, eps=eps).transpose(1, 2),
    "F.instance_norm, then affine": lambda x, w, b, eps: F.instance_norm(x.mT, eps=eps).mT * w + b,
    "F.layer_norm of the other axis": lambda x, w, b, eps: F.layer_norm(x.mT, (x.shape[1],), eps=eps).mT * w + b,
    "by hand": lambda x, w, b, eps: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + eps) * w + b,
    "rsqrt": lambda x, w, b, eps: (c := x - x.mean(1, keepdim=True)) * (c.pow(2).mean(1, keepdim=True) + eps).rsqrt() * w + b,
    "var_mean": lambda x, w, b, eps: torch.addcmul(b, (x - (s := torch.var_mean(x, 1, correction=0, keepdim=True))[1]) / (s[0] + eps).sqrt(), w),
    "std_mean": lambda x, w, b, eps: (x - (s := torch.std_mean(x, 1, correction=0, keepdim=True))[1]) / (s[0] ** 2 + eps).sqrt() * w + b,
    "F.group_norm of channels": lambda x, w, b, eps: F.group_norm(x.mT, WIDTH, w, b, eps).mT,
    "tokens last": lambda x, w, b, eps: over_root(centred(x.permute(0, 2, 1)), eps).permute(0, 2, 1) * w + b,
    "einsum": lambda x, w, b, eps: (c := x - torch.einsum("bnd->bd", x)[:, None] / x.shape[1])
    * (torch.einsum("bnd,bnd->bd", c, c) / x.shape[1] + eps).rsqrt()[:, None]
    * w
    + b,
    "mean of squares": lambda x, w, b, eps: (x - (m := x.mean(1, keepdim=True))) / ((x * x).mean(1, keepdim=True) - m * m + eps).sqrt() * w + b,
    "centring matrix": lambda x, w, b, eps: (c := (torch.eye(x.shape[1], dtype=x.dtype) - 1 / x.shape[1]) @ x)
    / (c.square().mean(1, keepdim=True) + eps).sqrt()
    * w
    + b,
}


# -- batch norm with running statistics, which is a linear map ---------------------------------------------------------------
def running(x: Tensor) -> tuple[Tensor, Tensor]:
    """Constants as running mean and variance."""
    steps = torch.arange(WIDTH, dtype=x.dtype)
    return steps / 20 - 0.3, 0.5 + steps / 10


def batch_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x.transpose(1, 2), *running(x), w, b, training=False, eps=eps).transpose(1, 2)


def batch_norm_module(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    norm = nn.BatchNorm1d(WIDTH, eps=eps, dtype=x.dtype).eval()
    norm.running_mean, norm.running_var = running(x)
    norm.weight, norm.bias = nn.Parameter(w.detach()), nn.Parameter(b.detach())
    return norm(x.flatten(0, 1)).view_as(x)


BATCH_NORM: dict[str, Way] = {
    "F.batch_norm": batch_norm,
    "F.batch_norm of rows": lambda x, w, b, eps: F.batch_norm(x.reshape(-1, WIDTH), *running(x), w, b, False, 0.1, eps).view_as(x),
    "nn.BatchNorm1d": batch_norm_module,
    "by hand": lambda x, w, b, eps: (x - running(x)[0]) / torch.sqrt(running(x)[1] + eps) * w + b,
    "rsqrt": lambda x, w, b, eps: (x - running(x)[0]) * (running(x)[1] + eps).rsqrt() * w + b,
    "scale and shift": lambda x, w, b, eps: x * (s := w * (running(x)[1] + eps).rsqrt()) + (b - running(x)[0] * s),
    "addcmul": lambda x, w, b, eps: torch.addcmul(b, x - running(x)[0], w / (running(x)[1] + eps).sqrt()),
    "diagonal linear": lambda x, w, b, eps: F.linear(x - running(x)[0], torch.diag(w / (running(x)[1] + eps).sqrt()), b),
    "depthwise convolution": lambda x, w, b, eps: F.conv1d(
        (x - running(x)[0]).mT, (w / (running(x)[1] + eps).sqrt()).view(-1, 1, 1), b, groups=WIDTH
    ).mT,
    "einsum": lambda x, w, b, eps: torch.einsum("bnd,d->bnd", x - running(x)[0], w / (running(x)[1] + eps) ** 0.5) + b,
    "2d": lambda x, w, b, eps: F.batch_norm(x.mT[..., None].contiguous(), *running(x), w, b, eps=eps)[..., 0].mT,
    "in place": lambda x, w, b, eps: (x - running(x)[0]).div_((running(x)[1] + eps).sqrt()).mul_(w).add_(b),
}


# -- tanh or an affine map instead of a norm -----------------------------------------------------------------------------------
DYNAMIC_TANH: dict[str, Way] = {
    "torch.tanh": lambda x, w, b, eps: torch.tanh(0.5 * x) * w + b,
    "method": lambda x, w, b, eps: w * (x * 0.5).tanh() + b,
    "F.tanh": lambda x, w, b, eps: torch.addcmul(b, w, F.tanh(x / 2)),
    "sigmoid": lambda x, w, b, eps: (2 * torch.sigmoid(x) - 1) * w + b,
    "exp": lambda x, w, b, eps: (1 - torch.exp(-x)) / (1 + torch.exp(-x)) * w + b,
    "in place": lambda x, w, b, eps: (0.5 * x).tanh_().mul_(w).add_(b),
}

NORMS: dict[str, dict[str, Way]] = {
    "LayerNorm": LAYER_NORM,
    "LayerNorm, no affine": LAYER_PLAIN,
    "LayerNorm, no bias": LAYER_GAIN,
    "LayerNorm, eps 1e-3": LAYER_WIDE,
    "deviation of n - 1, eps outside": UNBIASED,
    "variance of n - 1": UNBIASED_INSIDE,
    "RMSNorm": RMS,
    "RMSNorm, eps 1e-3": RMS_WIDE,
    "RMSNorm, eps outside": RMS_OUTSIDE,
    "unit length": UNIT,
    "groups of channels": GROUP,
    "whole sample": WHOLE,
    "along tokens": ALONG_TOKENS,
    "running statistics": BATCH_NORM,
    "dynamic tanh": DYNAMIC_TANH,
}

assert TOKENS != GROUPS
