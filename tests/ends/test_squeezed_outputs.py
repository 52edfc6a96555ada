"""Squeezed outputs: without batch axis for one sample, or without class axis for one class."""

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
def test_single_sample_without_batch_axis(method: str, classes: int) -> None:
    """``[]`` and ``[C]`` have the scores of ``[1, 1]`` and ``[1, C]``."""
    actual, expected = (
        explain(Model(end, classes), pictures(1), method, classes - 1) for end in (lambda z: z.squeeze(), None)
    )
    assert actual.logits.shape == (1, classes)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    "end",
    [lambda z: z.squeeze().sigmoid(), lambda z: z.sigmoid().squeeze(), lambda z: {"logits": z.sigmoid().squeeze()},
     lambda z: (z.squeeze(),)],
)  # fmt: skip
def test_squeeze_before_or_after_an_end_function(end: Callable[[Tensor], Tensor]) -> None:
    expected = explain(Model(classes=1), pictures(1), "attnlrp", 0)
    actual = explain(Model(end, 1), pictures(1), "attnlrp", 0)
    torch.testing.assert_close(actual.scores, expected.scores)


def test_squeezed_output_with_default_contrast_and_function_target() -> None:
    model, reference = Model(lambda z: z.squeeze()), Model()
    for target in (None, targets.Contrast(1, 2), lambda z: z[:, 1] ** 2):
        actual, expected = (explain(m, pictures(1), "input_x_gradient", target) for m in (model, reference))
        torch.testing.assert_close(actual.scores, expected.scores)


def test_batch_without_class_axis() -> None:
    """``[B]`` has the scores of ``[B, 1]``."""
    model, reference = Model(lambda z: z.squeeze(), 1), Model(classes=1)
    for method in ("lrp", "occlusion", "gae"):
        actual, expected = (explain(m, pictures(3), method, 0) for m in (model, reference))
        torch.testing.assert_close(actual.scores, expected.scores)


def test_squeezed_output_has_equal_evaluation() -> None:
    scores = torch.rand(1, 16, generator=torch.Generator().manual_seed(0))
    actual, expected = (evaluate(m, pictures(1), scores, target=2) for m in (Model(lambda z: z.squeeze()), Model()))
    assert str(actual) == str(expected)
