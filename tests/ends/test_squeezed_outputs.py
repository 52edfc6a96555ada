"""An output that lacks the axis of samples, or that of classes, where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_end_functions import METHODS, Model, pictures
from torch import Tensor

from whyformer import evaluate, explain, targets


@pytest.mark.part
@pytest.mark.parametrize("method", [*METHODS, "value_zeroing", "tis", "vit_cx", "auto", "saliency", "alti"])
@pytest.mark.parametrize("classes", [1, 4])
def test_one_sample_squeezed(method: str, classes: int) -> None:
    """``[]`` and ``[C]`` are ``[1, 1]`` and ``[1, C]``."""
    found, wanted = (
        explain(Model(end, classes), pictures(1), method, classes - 1) for end in (lambda z: z.squeeze(), None)
    )
    assert found.logits.shape == (1, classes)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    "end",
    [lambda z: z.squeeze().sigmoid(), lambda z: z.sigmoid().squeeze(), lambda z: {"logits": z.sigmoid().squeeze()},
     lambda z: (z.squeeze(),)],
)  # fmt: skip
def test_squeezed_behind_or_before_an_end_function(end: Callable[[Tensor], Tensor]) -> None:
    wanted = explain(Model(classes=1), pictures(1), "attnlrp", 0)
    found = explain(Model(end, 1), pictures(1), "attnlrp", 0)
    torch.testing.assert_close(found.scores, wanted.scores)


def test_the_predicted_class_and_a_function() -> None:
    model, bare = Model(lambda z: z.squeeze()), Model()
    for target in (None, targets.Contrast(1, 2), lambda z: z[:, 1] ** 2):
        found, wanted = (explain(m, pictures(1), "input_x_gradient", target) for m in (model, bare))
        torch.testing.assert_close(found.scores, wanted.scores)


def test_several_samples_squeezed() -> None:
    """``[B]`` is ``[B, 1]``."""
    model, bare = Model(lambda z: z.squeeze(), 1), Model(classes=1)
    for method in ("lrp", "occlusion", "gae"):
        found, wanted = (explain(m, pictures(3), method, 0) for m in (model, bare))
        torch.testing.assert_close(found.scores, wanted.scores)


def test_evaluated() -> None:
    scores = torch.rand(1, 16, generator=torch.Generator().manual_seed(0))
    found, wanted = (evaluate(m, pictures(1), scores, target=2) for m in (Model(lambda z: z.squeeze()), Model()))
    assert str(found) == str(wanted)
