"""The plain forward pass: what is read off an output, and the row of a language model that is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from whyformer.models.output import Output, output_mask
from whyformer.models.readout import plain_logits, read_logits, row_of
from zoo import LANGUAGE, LENGTHS, VOCABULARY, build, call, rows


@pytest.mark.parametrize("name", ["bert", "timm_vit"])
def test_logits_are_read_from_whatever_the_model_returns(name: str) -> None:
    model, inputs = build(name)
    wanted = call(model, inputs)
    if hasattr(model, "config"):
        model.config.return_dict = False
        assert torch.equal(whyformer.explain(model, inputs).logits, wanted)
    assert torch.equal(read_logits(wanted), wanted)
    assert torch.equal(read_logits((wanted, None)), wanted)
    assert torch.equal(read_logits([None, wanted]), wanted)
    assert torch.equal(read_logits({"logits": wanted, "other": wanted * 2}), wanted)
    assert torch.equal(read_logits({"scores": wanted}), wanted)
    assert read_logits(wanted[:, 0]).shape == (2, 1)


@pytest.mark.parametrize("output", [None, 3, "logits", (), {}, {"loss": 1.0}])
def test_what_holds_no_logits(output: Any) -> None:
    with pytest.raises(ModelError, match="without logits"):
        read_logits(output)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_logits_of_more_axes_than_a_language_model_has(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="logits of shape"):
        read_logits(torch.zeros(shape))


# -- a language model ----------------------------------------------------------------------------------------------
def test_the_last_real_token_is_read() -> None:
    output = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    assert torch.equal(read_logits(output), output[:, 3])
    left, right = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert torch.equal(read_logits(output, left), output[:, 3])
    for mask in (right, right.bool(), right.float()):
        assert torch.equal(read_logits(output, mask), torch.stack([output[0, 1], output[1, 2]]))
    # a mask of other tokens (a picture's, an encoder's) says nothing about these
    assert torch.equal(read_logits(output, right[:, :3]), output[:, 3])


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_padded_batch_says_the_same_as_each_sentence_alone(name: str) -> None:
    model, inputs = build(name)
    both = plain_logits(model, (), inputs)
    assert both.shape == (2, VOCABULARY)
    for b in range(2):
        alone = rows(inputs, b, crop=True)
        wanted = call(model, alone)[:, -1]
        assert torch.allclose(both[b], wanted[0], atol=1e-10)
        assert torch.allclose(plain_logits(model, (), alone), wanted, atol=1e-12)
    assert whyformer.explain(model, inputs, "occlusion").logits.sub(both).abs().max() < 1e-10


def test_the_mask_may_be_given_by_position() -> None:
    class Model(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return nn.functional.one_hot(ids, 9).double()

    ids, mask = torch.tensor([[4, 5, 6], [7, 8, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert plain_logits(Model(), (ids, mask)).argmax(-1).tolist() == [6, 8]
    assert plain_logits(Model(), (ids,), {"attention_mask": mask}).argmax(-1).tolist() == [6, 8]
    assert plain_logits(Model(), (ids,)).argmax(-1).tolist() == [6, 0]


def test_an_encoder_decoder_is_read_by_its_decoders_mask() -> None:
    model, inputs = build("t5")
    ids = inputs["input_ids"].flip(1)
    mask = torch.tensor([[1] * 4 + [0] * 6, [1] * 10])
    given = {**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert output_mask(model, (), given) is mask
    output = call(model, given)
    assert torch.equal(plain_logits(model, (), given), torch.stack([output[0, 3], output[1, 9]]))
    # the encoder's padding is not the decoder's
    del given["decoder_attention_mask"]
    assert output_mask(model, (), given) is None
    assert torch.equal(plain_logits(model, (), given), call(model, given)[:, -1])


def test_no_graph_is_built_and_the_logits_may_enter_one() -> None:
    model, inputs = build("bert")
    found = plain_logits(model, (), inputs)
    assert not found.requires_grad
    assert not found.is_inference()
    assert LENGTHS[1] < inputs["input_ids"].shape[1]


class Prefixed(nn.Module):
    """A language model whose logits begin with rows of a picture (GIT)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, VOCABULARY)

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        hidden = self.words(input_ids).cumsum(1)
        return (torch.cat([hidden[:, :1] * 0, hidden[:, :1] * 0, hidden], 1),)


def test_rows_of_a_picture_stand_before_the_text() -> None:
    model = Prefixed().eval()
    inputs = {"input_ids": torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    with torch.no_grad():
        raw = model(**inputs)
    assert torch.equal(row_of(Output(model, raw, (), inputs)), raw[0][[0, 1], [5, 3]])
