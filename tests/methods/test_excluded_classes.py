"""Classes that a model excludes by a logit of -inf: other classes are explained as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, ModelError
from whyformer.targets import Contrast, LogProbability
from zoo import build, text

METHODS = ["auto", "input_x_gradient", "occlusion", "smoothgrad", "gae", "rollout", "gradcam", "lrp", "transformer_attribution", "decompx", "legrad"]


class ExcludingClassifier(nn.Module):
    """A classifier that sets the last logits to ``value``, by a mask or by a concatenation."""

    def __init__(self, value: float, count: int = 1, by_mask: bool = True) -> None:
        super().__init__()
        self.classifier, self.value, self.count, self.by_mask = build("bert")[0], value, count, by_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.classifier(input_ids, attention_mask=attention_mask).logits
        kept = logits.shape[1] - self.count
        if self.by_mask:
            return logits.masked_fill(torch.arange(logits.shape[1]) >= kept, self.value)
        return torch.cat([logits[:, :kept], torch.full_like(logits[:, kept:], self.value)], 1)


def explained(model: nn.Module, method: str, target: Any) -> Any:
    inputs = {k: v for k, v in text().items() if k in ("input_ids", "attention_mask")}
    return whyformer.explain(model.eval(), inputs, method, target, **({"baseline": 1} if method == "occlusion" else {"samples": 2} if method == "smoothgrad" else {}))


@pytest.mark.parametrize("by_mask", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_excluded_class_does_not_change_other_explanations(method: str, by_mask: bool) -> None:
    """A logit of -800 has a probability of 0 as well."""
    target = Contrast(1, 0) if by_mask else LogProbability(1)
    e, finite = (explained(ExcludingClassifier(value, by_mask=by_mask), method, target) for value in (-torch.inf, -800.0))
    torch.testing.assert_close(e.scores, finite.scores, rtol=1e-7, atol=1e-10)
    assert e.scores.abs().amax() > 0 and e.logits[:, -1].isneginf().all()


@pytest.mark.parametrize("method", METHODS[:5])
def test_target_without_a_finite_value_is_refused(method: str) -> None:
    last = build("bert")[0].config.num_labels - 1
    for target in (last, Contrast(0, last), LogProbability(last)):
        with pytest.raises(InputError, match="finite logit"):
            explained(ExcludingClassifier(-torch.inf), method, target)


def test_model_without_a_finite_logit_is_refused() -> None:
    for value, count in ((-torch.inf, build("bert")[0].config.num_labels), (torch.inf, 1), (torch.nan, 1)):
        with pytest.raises(ModelError, match="not finite"):
            explained(ExcludingClassifier(value, count), "input_x_gradient", 0)


class Comparing(ExcludingClassifier):
    """A classifier that reads further numbers."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, attention_mask) + numbers.sum(-1, keepdim=True)


@pytest.mark.parametrize("value", [-torch.inf, 0.0])
def test_inputs_without_scores_are_named_despite_excluded_classes(value: float) -> None:
    inputs = {k: v for k, v in text().items() if k in ("input_ids", "attention_mask")}
    e = whyformer.explain(Comparing(value).eval(), {**inputs, "numbers": torch.rand(2, 3).double()}, "occlusion", 1, baseline=1)
    assert e.diagnostics["unscored"] == ["numbers"]
