"""The number of classes follows from the output of the model, not from its config."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from whyformer import explain
from whyformer.errors import InputError
from whyformer.models.structure import class_count


def patchtst(classes: int) -> nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForClassification

    torch.manual_seed(0)
    sizes = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "ffn_dim": 32, "num_input_channels": 1}
    model = PatchTSTForClassification(PatchTSTConfig(**sizes, **heads, num_targets=classes)).eval()
    nn.init.normal_(model.head.linear.weight)
    return model


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp", "auto"])
def test_predicted_class_beyond_num_labels_is_a_valid_target(method: str) -> None:
    """``num_labels`` of the config is 2, but the head has ``num_targets`` rows."""
    model, series = patchtst(5), torch.randn(8, 32, 1, generator=torch.Generator().manual_seed(1))
    predicted = model(series).prediction_logits.argmax(-1).tolist()
    assert max(predicted) > 1 and class_count(model) is None
    actual, expected = explain(model, series, method, predicted), explain(model, series, method)
    torch.testing.assert_close(actual.scores, expected.scores)
    assert actual.target.tolist() == predicted
    with pytest.raises(InputError, match="5 classes"):
        explain(model, series, method, 5)


def test_class_beyond_the_head_raises() -> None:
    with pytest.raises(InputError, match="class 2"):
        explain(patchtst(2), torch.randn(1, 32, 1), "input_x_gradient", 2)
