"""Composite calls are recorded as their elementary operations, with the same values, gradients and unit kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whyformer.rules.multipliers import COMPOSITES
from whyformer.tape.program import read_program
from whyformer.tape.recording import record, record_call
from whyformer.tape.walking import GRADIENT, replay, walk_back

TABLE = torch.randn(5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
VARIANTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "glu": (functional.glu, lambda x: x[..., :3] * torch.sigmoid(x[..., 3:]), "activated gate"),
    "glu along another axis": (lambda x: functional.glu(x, 1), lambda x: x[:, :2] * torch.sigmoid(x[:, 2:]), "activated gate"),
    "addcmul": (
        lambda x: torch.addcmul(x, x[..., :1].exp(), x.sin()), lambda x: x + x[..., :1].exp() * x.sin(), "add",
    ),
    "addcmul of a row": (
        lambda x: torch.addcmul(x, x[:, :1].exp(), x.sin(), value=-0.5),
        lambda x: x - 0.5 * x[:, :1].exp() * x.sin(),
        "add",
    ),
    "distances": (
        lambda x: torch.cdist(x[:, :2], x[:, 2:]), lambda x: torch.linalg.vector_norm(x[:, :2, None] - x[:, None, 2:], dim=-1), "statistic",
    ),
    "distances of many, p=1": (
        lambda x: torch.cdist(torch.cat([x] * 9, -2), x, p=1.0),
        lambda x: (torch.cat([x] * 9, -2)[..., None, :] - x[..., None, :, :]).abs().sum(-1),
        "add",
    ),
    "product of two": (lambda x: x.unflatten(-1, (2, 3)).prod(-2), lambda x: x[..., :3] * x[..., 3:], "gate"),
    "product of two, axis kept": (lambda x: x.unflatten(-1, (3, 2)).prod(-1, keepdim=True), lambda x: (x[..., ::2] * x[..., 1::2])[..., None], "gate"),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_composite_call_equals_its_decomposition(variant: str) -> None:
    function, written, kind = VARIANTS[variant]
    x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for f in (function, written):
        tape, y = record(f, x)
        root, end = tape.number(x), tape.number(y)
        program, seed = read_program(tape, [root], end), torch.ones_like(y)
        runs = [(composite, {end: seed}) for composite in (GRADIENT, COMPOSITES["attnlrp"], COMPOSITES["cp_lrp"])]
        gradients = walk_back(program, tape, runs, observed=[root])
        assert kind in {u.kind for u in program.units}
        results.append((y, *(gradients_[root] for gradients_ in gradients)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(results[0][1], torch.autograd.grad(written(leaf).sum(), leaf)[0])


def test_gradient_of_product_over_axis() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tape, y = record(lambda x: x.prod(1), x)
    root, end = tape.number(x), tape.number(y)
    (gradients,) = walk_back(read_program(tape, [root], end), tape, [(GRADIENT, {end: torch.ones_like(y)})], observed=[root])
    torch.testing.assert_close(gradients[root], y[:, None] / x)


DECOMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: functional.scaled_dot_product_attention(x, x.sin(), x.cos()).exp(),
    "attention of fewer keys": lambda x: functional.scaled_dot_product_attention(x, x[:, :1], x[:, 1:2], enable_gqa=True).exp(),
    **{variant: (lambda x, f=functions[0]: f(x).exp()) for variant, functions in VARIANTS.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("variant", DECOMPOSED)
def test_intervention_on_inner_value_of_composite_call(variant: str) -> None:
    """An intervention on each inner value of a composite call equals the replay of its parts."""
    x = torch.randn(2, 4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tape, y = record(DECOMPOSED[variant], x)
    root, end = tape.number(x), tape.number(y)
    program = read_program(tape, [root], end)
    inner = [u.exit for u in program.units if u.exit != end]
    assert len(inner) > 2
    for n in inner:
        (expected,) = replay(tape, {n: tape[n] * 1.5}, [end])
        changed, result = record_call(DECOMPOSED[variant], (x,), change={n: lambda t: t * 1.5})
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(changed[n], tape[n] * 1.5)
        torch.testing.assert_close(changed[end], result)
