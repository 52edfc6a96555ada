"""Logits of the plain forward pass, and the token whose logits are read from a language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, ModelError
from whyformer.models.output import Output
from whyformer.models.readout import plain_logits, read_logits, row_of
from zoo import LANGUAGE, LENGTHS, VOCABULARY, build, call, rows


@pytest.mark.parametrize("name", ["bert", "timm_vit"])
def test_logits_are_read_from_any_kind_of_output(name: str) -> None:
    model, inputs = build(name)
    expected = call(model, inputs)
    if hasattr(model, "config"):
        model.config.return_dict = False
        assert torch.equal(whyformer.explain(model, inputs).logits, expected)
    assert torch.equal(read_logits(expected), expected)
    assert torch.equal(read_logits((expected, None)), expected)
    assert torch.equal(read_logits([None, expected]), expected)
    assert torch.equal(read_logits({"logits": expected, "other": expected * 2}), expected)
    assert torch.equal(read_logits({"scores": expected}), expected)
    assert read_logits(expected[:, 0]).shape == (2, 1)


@pytest.mark.parametrize("output", [None, 3, "logits", (), {}, {"loss": 1.0}])
def test_output_without_logits_raises(output: Any) -> None:
    with pytest.raises(ModelError, match="without logits"):
        read_logits(output)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_logits_with_too_many_axes_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="logits of shape"):
        read_logits(torch.zeros(shape))


# -- language models -----------------------------------------------------------------------------------------------
def test_logits_of_the_last_real_token_are_read() -> None:
    output = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    assert torch.equal(read_logits(output), output[:, 3])
    left, right = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert torch.equal(read_logits(output, left), output[:, 3])
    for mask in (right, right.bool(), right.float()):
        assert torch.equal(read_logits(output, mask), torch.stack([output[0, 1], output[1, 2]]))
    # a mask of other tokens (of an image or an encoder) is ignored
    assert torch.equal(read_logits(output, right[:, :3]), output[:, 3])


@pytest.mark.parametrize("name", LANGUAGE)
def test_padded_batch_equals_single_sentences(name: str) -> None:
    model, inputs = build(name)
    both = plain_logits(model, (), inputs)
    assert both.shape == (2, VOCABULARY)
    for b in range(2):
        alone = rows(inputs, b, crop=True)
        expected = call(model, alone)[:, -1]
        assert torch.allclose(both[b], expected[0], atol=1e-10)
        assert torch.allclose(plain_logits(model, (), alone), expected, atol=1e-12)
    assert whyformer.explain(model, inputs, "occlusion").logits.sub(both).abs().max() < 1e-10


def test_mask_by_position_equals_by_name() -> None:
    class OneHotModel(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return nn.functional.one_hot(ids, 9).double()

    ids, mask = torch.tensor([[4, 5, 6], [7, 8, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert plain_logits(OneHotModel(), (ids, mask)).argmax(-1).tolist() == [6, 8]
    assert plain_logits(OneHotModel(), (ids,), {"attention_mask": mask}).argmax(-1).tolist() == [6, 8]
    assert plain_logits(OneHotModel(), (ids,)).argmax(-1).tolist() == [6, 0]


def test_encoder_decoder_is_read_by_its_decoder_mask() -> None:
    model, inputs = build("t5")
    ids = inputs["input_ids"].flip(1)
    mask = torch.tensor([[1] * 4 + [0] * 6, [1] * 10])
    arguments = {**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert torch.equal(Output(model, None, (), arguments).mask(10), mask)
    output = call(model, arguments)
    assert torch.equal(plain_logits(model, (), arguments), torch.stack([output[0, 3], output[1, 9]]))
    # padding of the encoder does not apply to the decoder
    del arguments["decoder_attention_mask"]
    assert Output(model, None, (), arguments).mask(10) is None
    assert torch.equal(plain_logits(model, (), arguments), call(model, arguments)[:, -1])


def test_plain_logits_need_no_gradient_and_are_no_inference_tensor() -> None:
    model, inputs = build("bert")
    logits = plain_logits(model, (), inputs)
    assert not logits.requires_grad
    assert not logits.is_inference()
    assert LENGTHS[1] < inputs["input_ids"].shape[1]


class ImagePrefixModel(nn.Module):
    """A language model whose logits begin with those of image tokens (GIT)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, VOCABULARY)

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        hidden = self.words(input_ids).cumsum(1)
        return (torch.cat([hidden[:, :1] * 0, hidden[:, :1] * 0, hidden], 1),)


def test_mask_is_aligned_after_image_tokens() -> None:
    model = ImagePrefixModel().eval()
    inputs = {"input_ids": torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    with torch.no_grad():
        raw = model(**inputs)
    assert torch.equal(row_of(Output(model, raw, (), inputs)), raw[0][[0, 1], [5, 3]])


class ShortLanguageModel(nn.Module):
    """A language model that computes the logits of all tokens, or of the last one alone, as nanoGPT does."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.words, self.head, self.last = nn.Embedding(50, 16), nn.Linear(16, 50), last
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        hidden = self.layer(self.words(idx), src_mask=nn.Transformer.generate_square_subsequent_mask(idx.shape[1]))
        return self.head(hidden[:, [-1]] if self.last else hidden), None


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("method", ["input_x_gradient", "gae", "occlusion"])
def test_row_of_the_last_token_alone_is_read(method: str, length: int) -> None:
    whole, last = ShortLanguageModel(False).eval(), ShortLanguageModel(True).eval()
    last.load_state_dict(whole.state_dict())
    ids, settings = torch.randint(0, 50, (2, length)), {"baseline": 3} if method == "occlusion" else {}
    expected = whyformer.explain(whole, ids, method, 7, **settings)
    assert torch.allclose(whyformer.explain(last, ids, method, 7, **settings).scores, expected.scores, atol=1e-6)


def test_generation_of_model_without_input_ids_raises_with_way_out() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ShortLanguageModel(False)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids)[0]

    model = Wrapped().eval()
    with pytest.raises(InputError, match="input_ids"):
        whyformer.explain_generation(model.model, [4, 5, 6], [7, 8])
    assert whyformer.explain_generation(model, [4, 5, 6], [7, 8], "input_x_gradient").matrix.shape == (2, 5)
