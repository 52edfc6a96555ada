"""Unexpected errors inside a method: those of a method become MethodNotApplicable, those of user code are passed on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, MethodNotApplicable
from zoo import build
from zoo_evaluate import tiny_bert


class FailingModel(nn.Module):
    """A model that fails on more than two samples, or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.head, self.always = nn.Linear(4, 3), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or len(x) > 2:
            raise TypeError("no such thing")
        return self.head(x.mean((1, 2)))


def test_error_in_perturbed_batch_is_not_supported_yet() -> None:
    with pytest.raises(MethodNotApplicable, match=r"smoothgrad is not supported yet on this model: .*TypeError: no such thing"):
        whyformer.explain(FailingModel(False).eval(), torch.randn(2, 3, 4, 4), method="smoothgrad")


def test_error_of_model_is_passed_on() -> None:
    with pytest.raises(TypeError, match=r"^no such thing$"):
        whyformer.explain(FailingModel(True).eval(), torch.randn(2, 3, 4, 4), method="input_x_gradient")


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("form", ["texts", "list", "tensor"])
def test_classifier_without_padding_token_is_explained_one_by_one(kind: str, form: str) -> None:
    _, tokenizer = tiny_bert()
    sizes = {"hidden_size": 32, "intermediate_size": 48} if kind == "Llama" else {"n_embd": 32}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), num_hidden_layers=1, num_attention_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    texts = form == "texts"
    batch = ["a good", "a bad"] if texts else torch.tensor([[5, 6, 7], [8, 6, 7]])
    explained = partial(whyformer.explain, model, method="input_x_gradient", target=1, processor=tokenizer if texts else None)
    if form == "tensor":
        with pytest.raises(InputError, match=r"pass them as a list, or set .*pad_token_id"):
            explained(batch)
    together = explained(list(batch))
    many = list(whyformer.explain_many(model, list(batch), "input_x_gradient", [1], tokenizer if texts else None))
    model.config.pad_token_id = tokenizer.pad_token_id
    expected = explained(batch)
    assert torch.allclose(together.scores, expected.scores, atol=1e-6) and torch.allclose(together.logits, expected.logits, atol=1e-6)
    assert torch.allclose(torch.cat([e.scores for e in many]), expected.scores, atol=1e-6)


def test_model_that_takes_few_samples_says_so() -> None:
    with pytest.raises(InputError, match="3 samples together"):
        whyformer.explain(FailingModel(False).eval(), torch.randn(3, 3, 4, 4), method="input_x_gradient")


def test_error_of_target_is_passed_on() -> None:
    def broken(logits: Tensor) -> Tensor:
        raise KeyError("mine")

    model, inputs = build("hf_vit")
    with pytest.raises((KeyError, InputError), match="mine"):
        whyformer.explain(model, inputs, method="input_x_gradient", target=broken)
