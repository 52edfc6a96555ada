"""Whether rows that one input should have to itself are fed by another one too."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.places import said
from whyformer.engine.probes import Edit, Reached, Until
from whyformer.engine.run import Feed, Root, record
from whyformer.models.facts import Block
from whyformer.models.readout import anything
from whyformer.rules.core import Composite

_GRADIENT = Composite("gradient", "multiplier", audit=False)
_MIXED: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def enters(model: nn.Module, feed: Feed, root: Root, call: int, blocks: list[Block], rows: Tensor) -> bool:
    """Whether an input feeds some of these rows of a block call, ``[B, N]`` (a picture added to its words).

    A forward pass up to that call, and one backward pass; kept as :func:`entering_places` keeps what it measures.
    """
    known, key = _MIXED.setdefault(model, {}), (said(feed), root.kind, root.place, call)
    if key not in known:
        constant, until = Edit(lambda weights, value, mixed: mixed.detach()), Until(call)
        with contextlib.suppress(Reached):
            record(model, feed, _GRADIENT, constant, until, roots={"": root}, blocks=blocks, read=anything)
        known[key] = False
        if until.found and until.found[0][0].requires_grad:
            ((hidden, begun),) = until.found
            with torch.inference_mode(False), torch.enable_grad():
                some = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
                seed = some * rows.to(hidden.device).reshape(*rows.shape, *[1] * (hidden.dim() - 2))
                flow = torch.autograd.grad(hidden, begun[""], seed, allow_unused=True)[0]
            known[key] = flow is not None and bool(flow.any())
    return known[key]
