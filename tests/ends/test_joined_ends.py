"""A model whose output joins sigmoids or softmaxes has the scores and probabilities of its logits, joined alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_end_functions import Model, Reader, ids, pictures
from torch import Tensor

from whyformer import explain, record, targets

Function = Callable[[Tensor], Tensor]


def written(out: Tensor, **columns: Tensor) -> Tensor:
    """The tensor with columns written into it: ``_0`` is the first."""
    for name, column in columns.items():
        out[:, int(name[1:])] = column
    return out


# name -> (end function, its logits, name of the function)
SIGMOIDS: dict[str, tuple[Function, Function]] = {
    "cat": (lambda z: torch.cat([1 - (p := z.sigmoid()), p], -1), lambda z: torch.cat([-z, z], -1)),
    "positive first": (lambda z: torch.cat([p := z.sigmoid(), 1 - p], -1), lambda z: torch.cat([z, -z], -1)),
    "stack of squeezed": (
        lambda z: torch.stack([1 - (p := z[:, 0].sigmoid()), p], 1),
        lambda z: torch.cat([-z, z], -1),
    ),
    "squeezed later": (
        lambda z: torch.stack([1 - (p := z.sigmoid())[:, 0], p[:, 0]], -1),
        lambda z: torch.cat([-z, z], -1),
    ),
    "two sigmoids": (lambda z: torch.cat([(-z).sigmoid(), z.sigmoid()], -1), lambda z: torch.cat([-z, z], -1)),
    "by hand": (
        lambda z: torch.cat([1 / (1 + z.exp()), 1 / (1 + (-z).exp())], -1),
        lambda z: torch.cat([-z, z], -1),
    ),
    "written": (
        lambda z: written(z.new_zeros(len(z), 2), _0=1 - (p := z.sigmoid()[:, 0]), _1=p),
        lambda z: torch.cat([-z, z], -1),
    ),
    "written twice": (
        lambda z: written(written(torch.ones(len(z), 2).to(z), _1=1 - (p := z[:, 0].sigmoid())), _0=1 - p, _1=p),
        lambda z: torch.cat([-z, z], -1),
    ),
    "negative class": (lambda z: 1 - z.sigmoid(), lambda z: -z),
    "negative class, squeezed": (lambda z: 1 - z.sigmoid().squeeze(-1), lambda z: -z),
}
HEADS: dict[str, tuple[Function, Function]] = {
    "cat": (lambda z: torch.cat([z[:, i : i + 1].sigmoid() for i in range(3)], -1), lambda z: z),
    "stack": (lambda z: torch.stack([z[:, i].sigmoid() for i in (2, 0, 1)], -1), lambda z: z[:, [2, 0, 1]]),
    "halves": (lambda z: torch.cat([z[:, :1].sigmoid(), z[:, 1:].sigmoid()], -1), lambda z: z),
    "of each sample": (lambda z: torch.cat([row[None].softmax(-1) for row in z]), lambda z: z),
    "log softmax of each sample": (lambda z: torch.stack([row.log_softmax(-1) for row in z]), lambda z: z),
    "written": (lambda z: written(torch.empty_like(z), _0=z[:, 0].sigmoid(), _2=z[:, 1].sigmoid(), _1=z[:, 2].sigmoid()), lambda z: z[:, [0, 2, 1]]),
    "selected": (lambda z: z.sigmoid()[:, 1:], lambda z: z[:, 1:]),
    "reordered": (lambda z: z.sigmoid()[:, [2, 0, 1]], lambda z: z[:, [2, 0, 1]]),
}
ENDS = [(1, end, logits) for end, logits in SIGMOIDS.values()] + [(3, end, logits) for end, logits in HEADS.values()]
NAMES = [*SIGMOIDS, *(f"heads: {name}" for name in HEADS)]


@pytest.mark.parametrize("kind", [Model, Reader])
@pytest.mark.parametrize(("classes", "end", "logits"), ENDS, ids=NAMES)
def test_probabilities_are_those_of_the_model(kind: type, classes: int, end: Function, logits: Function) -> None:
    model, inputs = kind(end, classes=classes), pictures() if kind is Model else ids()
    e, bare = explain(model, inputs, "input_x_gradient"), kind(classes=classes)
    returned = model(inputs)
    returned = returned.exp() if (returned < 0).any() else returned
    torch.testing.assert_close(e.probabilities(), returned.reshape(len(inputs), -1))
    torch.testing.assert_close(e.logits, logits(bare(inputs)))
    assert torch.equal(e.target, e.logits.argmax(-1))


@pytest.mark.parametrize("method", ["lrp", "attnlrp", "gae", "occlusion", "integrated_gradients"])
@pytest.mark.parametrize(("classes", "end", "logits"), ENDS[::3], ids=NAMES[::3])
def test_scores_are_those_of_the_logits(method: str, classes: int, end: Function, logits: Function) -> None:
    model, bare = Model(end, classes=classes), Model(classes=classes)
    for target in (0, -1) if logits(bare(pictures())).shape[-1] > 1 else (0,):
        index = target % logits(bare(pictures())).shape[-1]
        actual = explain(model, pictures(), method, index)
        expected = explain(bare, pictures(), method, lambda z, i=index: logits(z)[:, i])
        torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)


FUNCTIONS: list[tuple[Any, Function]] = [
    (targets.Probability(1), lambda p: p[:, 1]),
    (targets.LogProbability(0), lambda p: p[:, 0].log()),
    (lambda p: p[:, 1] ** 2, lambda p: p[:, 1] ** 2),
]


@pytest.mark.parametrize(("target", "function"), FUNCTIONS)
def test_targets_of_joined_sigmoids(target: Any, function: Function) -> None:
    end, logits = SIGMOIDS["cat"]
    model, bare = Model(end, classes=1), Model(classes=1)
    actual = explain(model, pictures(), "input_x_gradient", target)
    expected = explain(bare, pictures(), "input_x_gradient", lambda z: function(end(z)))
    torch.testing.assert_close(actual.scores, expected.scores)
    torch.testing.assert_close(record(model, pictures()).replay({}), logits(bare(pictures())))


@pytest.mark.parametrize(
    "end",
    [
        lambda z: torch.cat([z[:, :2].sigmoid(), z[:, 2:].abs()], -1),  # a raw number beside probabilities
        lambda z: torch.cat([z[:, :2].softmax(-1), z[:, 2:].sigmoid()], -1),
        lambda z: torch.cat([torch.full_like(z[:, :1], 0.5), z.sigmoid()], -1),
        lambda z: torch.cat([z[:, :2].softmax(-1), z.softmax(-1)], -1),
        lambda z: z.softmax(-1)[:, :2],
        lambda z: written(torch.zeros_like(z), _0=z[:, 0].sigmoid(), _1=z[:, 1].sigmoid()),  # the last number is a constant
        lambda z: written(z.sigmoid(), _1=z[:, 1]),
        lambda z: 1 - (-z.exp()).exp(),
        lambda z: torch.stack([1 - (p := z[:, 0].sigmoid() ** 2), p], -1),
    ],
)
def test_other_joins_are_not_taken_for_logits(end: Function) -> None:
    e = explain(Model(end), pictures(1), "input_x_gradient", 1)
    assert "end_function" not in e.diagnostics
    torch.testing.assert_close(e.logits, Model(end)(pictures(1)))
