"""Every tensor of a forward pass taken apart into what is owed to each of the rows that entered the first block.

x = Σ_j x_←j. What is linear acts on each share by itself; what is not acts through what it did to the whole (a norm's
true deviation, an activation's slope from zero, the true attention map); what does not depend on x is shared out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.isolation import here
from whyformer.engine.operations import is_in_place, operation, out_of_place
from whyformer.engine.parts import Lost, Maker, Parts, parts_of
from whyformer.engine.readings import attention_scores, bind, is_statistic, norm, tensors
from whyformer.engine.regions import kind_row
from whyformer.rules.core import NATIVE, Composite, Rule

_KINDS = (
    "view", "selection", "linear", "matrix product", "activation", "power", "normalisation", "statistic",
    "softmax", "log_softmax", "attention",
)  # fmt: skip
# rules of their own only so that hand-written activations and norms run as the operations that they are
FORWARD = Composite(
    "shares",
    "multiplier",
    {**dict.fromkeys(_KINDS, NATIVE), **{n: Rule(n, backward=False) for n in ("gelu", "layer_norm", "rms_norm")}},
)


@dataclass(eq=False)
class GraphShares:
    """A probe: follows the shares of the rows that enter the first block through one pass.

    Attributes:
        real: ``[B, N]`` which rows are no padding, or None.
        at_once: rows j whose shares go through an operation together.
    """

    real: Tensor | None
    at_once: int
    chunks: list[slice] = field(default_factory=list)
    largest: int = 0

    # -- the pass ----------------------------------------------------------------------------------------------
    def __call__(self, mode: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What an operation made of shared tensors has shares too."""
        if here.run is not mode or mode.muted or not torch.is_grad_enabled():
            return result
        given = tensors((*args, *kwargs.values()))
        for leaf in given:
            if id(leaf) in mode.own and parts_of(leaf) is None:
                leaf._whyformer_parts = self._root(leaf)  # type: ignore[attr-defined]
        if any(parts_of(t) is not None for t in given):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._follow(name, func, args, kwargs, result)
        return result

    def settle(self, tensor: Tensor) -> None:
        """Compute a block's output now, so that what is inside the block can be let go of."""
        parts = parts_of(tensor)
        if parts is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                parts.settle()

    def _root(self, leaf: Tensor) -> Parts:
        """x_i←j = x_j where i = j, else 0."""
        rows, value = leaf.shape[1], leaf.detach()
        self.chunks = [slice(i, min(rows, i + self.at_once)) for i in range(0, rows, self.at_once)]
        self.largest = leaf.numel()
        if self.real is None or self.real.shape != leaf.shape[:2]:
            self.real = torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)

        def make(chunk: int) -> Tensor:
            numbers = torch.arange(rows, device=value.device)
            own = (numbers[self.chunks[chunk], None] == numbers).to(value.dtype)
            return own[:, None, :, None] * value

        return Parts(make, self.chunks, self.real, alone=True)

    def _parts(
        self, like: Tensor, make: Maker, bias: Callable[[], Tensor] | None = None,
        *, keep: bool = False, late: bool = False, alone: bool = False,
    ) -> Parts:  # fmt: skip
        assert self.real is not None
        kept: dict[int, Tensor] | None = {} if keep and like.numel() <= self.largest else None
        return Parts(make, self.chunks, self.real, bias, late, alone, kept)

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        row, item = kind_row(name), isinstance(result, list | tuple)
        changed = is_in_place(name) or kwargs.get("inplace") is True
        made: list[Any] = [args[0]] if changed else tensors((result,))
        if not changed and any(parts_of(m) is not None for m in made):
            return  # what it is made of was seen, or it returned what it was given
        new = row.kind == "silent" and name not in ("detach", "data")  # zeros_like and the like
        if new or row.kind in ("softmax", "log_softmax", "statistic") or any(map(is_statistic, made)):
            return  # held constant
        how = _HOW.get(row.kind)
        if changed:
            func = _set if name == "__setitem__" else out_of_place(name)
            known = name == "__setitem__" or (parts_of(args[0]) is not None and name not in _WRITTEN)
            two = row.name in _BILINEAR and parts_of(args[1]) is not None
            how = how if func is not None and row.kind in ("view", "linear") and known and not two else None
            if parts_of(args[0]._base) is not None:  # what other views of it hold is known no more
                vars(args[0]._base)["_whyformer_parts"] = self._lost(name)
        for i, one in enumerate(made):
            if not one.is_floating_point() and not one.is_complex():
                continue
            try:
                parts = None if how is None else how(self, row.name, func, args, kwargs, one, i if item else None)
            except Lost:
                parts = None
            one._whyformer_parts = self._lost(name) if parts is None else parts

    def _lost(self, name: str) -> Parts:
        def make(_: int) -> Tensor:
            raise Lost(name)

        assert self.real is not None
        return Parts(make, self.chunks, self.real)

    # -- by kind of operation ------------------------------------------------------------------------------------
    def _affine(self, name: str, func: Any, args: Any, kwargs: Any, one: Tensor, item: int | None) -> Parts:
        """f(x_←j …) − f(0), and f(0) as a bias; of a product of two that carry, half through each."""
        if name.startswith(("dropout", "feature_dropout")):
            return parts_of(args[0])
        held = [args[1]] if name == "div" and parts_of(args[0]) is not None else []
        carriers = [t for t in tensors((*args, *kwargs.values())) if parts_of(t) is not None and not _among(t, held)]
        carried: list[Parts] = [parts_of(t) for t in carriers]
        values = [t.detach() for t in carriers]
        if not carried or (name in _BILINEAR and len(carried) > 2):
            raise Lost(name)

        def call(*given: Tensor) -> Tensor:
            new = iter(given)
            filled = _put(args, new, held)
            made = func(*filled, **dict(zip(kwargs, _put(kwargs.values(), new, held), strict=True)))
            return made if item is None else made[item]

        if name in _BILINEAR and len(carried) == 2:

            def halves(chunk: int) -> Tensor:
                one, other = (p.at(chunk) for p in carried)
                through_one = _each_share(lambda x: call(x, values[1]), one)
                return (through_one + _each_share(lambda x: call(values[0], x), other)) / 2

            return self._parts(one, halves, keep=True)
        # a view, and what is behind an attention up to the sum, leaves a bias as it is
        apart = [p.late or operation(name).kind == "view" for p in carried]
        zeros = [torch.zeros_like(v) for v in values]

        def make(chunk: int) -> Tensor:
            found = _each_share(
                call, *(p.raw(chunk) if a else p.at(chunk) for p, a in zip(carried, apart, strict=True))
            )
            return found - call(*zeros)

        def bias() -> Tensor:
            left = [p.remainder() if a else None for p, a in zip(carried, apart, strict=True)]
            return call(*(z if x is None else x.expand_as(z) for x, z in zip(left, zeros, strict=True)))

        late, alone = all(p.late for p in carried), all(p.alone for p in carried)
        view = operation(name).kind == "view"
        parts = self._parts(one, make, bias, late=late, alone=alone, keep=not view)
        if view and (name in _JOINING if len(carried) == len(tensors(args)) > 1 else name not in _INSERTING):
            parts.shown = lambda chunk: _each_share(call, *(p.at(chunk) for p in carried))
        return parts

    def _mixed(self, name: str, func: Any, args: Any, kwargs: Any, one: Tensor, item: int | None) -> Parts | None:
        """A x_←j with the true attention map A, of the fused call and of the written product."""
        if operation(name).kind == "attention":
            scores, v, repeats = attention_scores(args, kwargs)
            weights = lambda: scores().softmax(-1).nan_to_num(0.0)  # noqa: E731
        elif parts_of(args[0]) is None and len(args) == 2 and args[1].dim() > 2:
            v, repeats, weights = args[1], 1, args[0].detach
        else:
            return self._affine(name, func, args, kwargs, one, item)
        carried = parts_of(v)
        if carried is None:
            return None
        known: list[Tensor] = []

        def mix(value: Tensor) -> Tensor:
            known[:] = known or [weights()]
            return known[0] @ (value.repeat_interleave(repeats, -3) if repeats > 1 else value)

        def make(chunk: int) -> Tensor:
            shares = carried.at(chunk) if carried.alone else carried.raw(chunk)
            joined = shares.movedim(0, -1).flatten(-2)  # one product for all shares: the map is not copied for each
            return mix(joined).unflatten(-1, (-1, len(shares))).movedim(-1, 0)

        def bias() -> Tensor:
            left = None if carried.alone else carried.remainder()
            return torch.zeros_like(one) if left is None else mix(left.expand_as(v))

        return self._parts(one, make, bias, late=True)

    def _scaled(self, name: str, func: Any, args: Any, kwargs: Any, one: Tensor, item: int | None) -> Parts | None:
        """x_←j ⊙ (g(z) − g(0)) / z at the whole z, and g(0) as a bias."""
        carried, z = parts_of(args[0]), args[0].detach()
        if carried is None or len([t for t in tensors((*args, *kwargs.values())) if parts_of(t) is not None]) > 1:
            return None
        origin = func(torch.zeros_like(z), *args[1:], **kwargs)
        if not bool(origin.isfinite().all()):
            return None
        slope = torch.where(z != 0, (one.detach() - origin) / torch.where(z != 0, z, 1), 0)
        return self._parts(one, lambda chunk: carried.at(chunk) * slope, lambda: origin, alone=carried.alone)

    def _normed(self, name: str, func: Any, args: Any, kwargs: Any, one: Tensor, item: int | None) -> Parts | None:
        """(x_←j − its own mean) ⊙ γ / σ with the σ of the whole; β as a bias."""
        if name not in ("layer_norm", "rms_norm") or parts_of(args[0]) is None:
            return None
        info = norm(operation(name), func, args, kwargs).info
        bias = bind("input normalized_shape weight bias", args, kwargs).get("bias") if info["centred"] else None
        carried, z, weight = parts_of(args[0]), args[0].detach(), info["weight"]
        axes = tuple(range(-info["axes"], 0))

        def centred(x: Tensor) -> Tensor:
            return x - x.mean(axes, keepdim=True) if info["centred"] else x

        scale = (centred(z).square().mean(axes, keepdim=True) + info["eps"]).rsqrt()
        scale = scale if weight is None else scale * weight.detach()
        shift = None if bias is None else partial(bias.detach().expand_as, z)
        return self._parts(one, lambda c: centred(carried.at(c)) * scale, shift, alone=carried.alone, keep=True)


_JOINING = {"cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack"}
_INSERTING = _JOINING | {
    "copy_", "diagonal_scatter", "fill_", "index_copy", "index_fill", "index_put", "masked_fill", "masked_scatter",
    "pad", "scatter", "select_scatter", "slice_scatter", "where", "__setitem__", "zero_",
}  # fmt: skip
_WRITTEN = {"copy_", "fill_", "zero_"}
_BILINEAR = {"mul", "div", "matmul", "bmm", "mm", "mv", "einsum", "linear", "conv1d", "conv2d", "conv3d", "tensordot"}
_HOW: dict[str, Callable[..., Parts | None]] = {
    "view": GraphShares._affine,
    "linear": GraphShares._affine,
    "matrix product": GraphShares._mixed,
    "attention": GraphShares._mixed,
    "activation": GraphShares._scaled,
    "power": GraphShares._scaled,
    "normalisation": GraphShares._normed,
}


def _set(target: Tensor, place: Any, value: Any) -> Tensor:
    changed = target.clone()
    changed[place] = value
    return changed


def _among(value: Tensor, listed: Sequence[Any]) -> bool:
    return any(value is other for other in listed)


def _put(values: Iterable[Any], given: Iterator[Tensor], held: Sequence[Any]) -> list[Any]:
    """The arguments with those that carry replaced, in order."""

    def one(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return type(value)([one(v) for v in value])
        if parts_of(value) is not None and not _among(value, held):
            return next(given)
        return value.detach() if isinstance(value, Tensor) else value

    return [one(value) for value in values]


def _each_share(function: Callable[..., Tensor], *shares: Tensor) -> Tensor:
    """``function`` of each share; all at once where vmap can."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.func.vmap(function)(*shares)
    except RuntimeError:
        return torch.stack([function(*one) for one in zip(*shares, strict=True)])
