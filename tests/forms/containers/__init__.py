"""Four blocks in different containers, called in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import nn

from ..base import inputs
from ..form import Form
from .parts import PARTS
from .post import POST, SHARED
from .whole import WHOLE


def _built(make: Callable[[str], nn.Module], kind: str) -> nn.Module:
    return make(kind).double().eval()


def forms() -> Iterator[Form]:
    for function, ways, norm in (("four blocks", {**WHOLE, **PARTS}, "pre-norm"), ("four blocks", POST, "post-norm"), ("a block shared", SHARED, "pre-norm")):
        for kind in ("vectors", "ids", "pixels"):
            for way, make in ways.items():
                yield Form("containers", function, way, f"{norm}, {kind}", partial(_built, make, kind), partial(inputs, kind))
