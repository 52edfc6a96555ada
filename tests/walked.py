"""The relevance at the input of a function under a composite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leading_axis import walk_back
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.walking import Composite


def walked(function: Callable[[Tensor], Tensor], x: Tensor, composite: Composite, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(value of the function at x, relevance at x); the walk starts with ``seed``, or with random numbers."""
    tape, value = record(function, x)
    if seed is None:
        seed = torch.randn(value.shape, generator=torch.Generator().manual_seed(20), dtype=value.dtype)
    root, end = tape.number(x), tape.number(value)
    program = read_program(tape, [root], end)
    return value.detach(), walk_back(program, tape, [(composite, {end: seed})], observed=[root])[0][root]
