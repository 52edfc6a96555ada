"""prepare() converts user inputs to model inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import whyformer
from whyformer.errors import InputError
from whyformer.inputs import Inputs, prepare
from whyformer.inputs.normalize import wants_processor
from whyformer.inputs.pictures import without_normalisation
from whyformer.inputs.prepare import check_vocabulary, longest_text
from whyformer.models.loading import Loaded, load
from zoo import build, rows

SENTENCES = ["A fine film!", "dull, dull and far too long"]


@cache
def sst2() -> Loaded:
    return load("bundled:sst2")


@cache
def digits() -> Loaded:
    return load("bundled:digits")


# -- modules of one's own ---------------------------------------------------------------------------------------------
class Own(torch.nn.Module):
    """A model inside a module with another forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class Named(Own):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask).logits


class First(Own):
    def forward(self, x: Tensor, train: bool = False) -> Tensor:
        return self.model(x).logits


class Positional(Own):
    def forward(self, *given: Tensor) -> Tensor:
        return self.model(*given).logits


class AnyName(Own):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.model(*args, **kwargs).logits


@pytest.mark.parametrize("method", ["input_x_gradient", "gae", "occlusion"])
@pytest.mark.parametrize("kind", [Named, First, Positional, AnyName])
def test_module_of_ones_own_reads_what_a_tokenizer_or_processor_makes(kind: type[Own], method: str) -> None:
    given: list[tuple[Loaded, list[Any]]] = [(sst2(), SENTENCES)]
    if kind is not Named and method != "occlusion":  # whose squares depend on the patch size in the model's config
        given.append((digits(), [Image.linear_gradient("L")]))
    for loaded, inputs in given:
        e = whyformer.explain(kind(loaded.model).eval(), inputs, method, 1, loaded.processor)
        expected = whyformer.explain(loaded.model, inputs, method, 1, loaded.processor)
        torch.testing.assert_close(e.scores, expected.scores)


# -- text -------------------------------------------------------------------------------------------------------------
def test_text_becomes_tokens_with_offsets() -> None:
    inputs = prepare(sst2().model, SENTENCES, sst2().processor)
    assert inputs.modality == "text"
    assert inputs.batch == 2
    assert inputs.features.texts == SENTENCES
    assert inputs.features.tokens is not None and inputs.features.offsets is not None and inputs.mask is not None and inputs.special is not None
    for sentence, tokens, offsets, special in zip(SENTENCES, inputs.features.tokens, inputs.features.offsets, inputs.special.tolist(), strict=True):
        assert tokens[0] == "[CLS]" and special[0]
        for token, (start, end), hidden in zip(tokens, offsets, special, strict=True):
            if not hidden:
                assert sentence[start:end].lower() == token.removeprefix("##")
            else:
                assert (start, end) == (0, 0)
    assert inputs.mask.sum(1).tolist() == [sum(t != "[PAD]" for t in row) for row in inputs.features.tokens]


def test_special_tokens_have_scores_and_padding_has_none() -> None:
    result = whyformer.explain(sst2().model, SENTENCES, "input_x_gradient", processor=sst2().processor)
    assert result.tokens is not None and result.special is not None
    for tokens, scores, special in zip(result.tokens, result.scores, result.special, strict=True):
        assert special == [0, tokens.index("[SEP]")]
        for token, score in zip(tokens, scores.tolist(), strict=True):
            assert (score == 0) == (token == "[PAD]")


def test_batch_of_sentences_equals_single_sentences() -> None:
    model, tokenizer = sst2().model, sst2().processor
    batch = whyformer.explain(model, SENTENCES, processor=tokenizer)
    for i, sentence in enumerate(SENTENCES):
        single = whyformer.explain(model, sentence, processor=tokenizer)
        assert torch.allclose(single.scores[0], batch.scores[i, : single.scores.shape[1]], atol=1e-4 * float(batch.scores[i].abs().max()))
        assert batch.tokens is not None and single.tokens is not None
        assert single.tokens[0] == batch.tokens[i][: len(single.tokens[0])]


def test_encoded_mapping_equals_text() -> None:
    """The scores are equal, and with the processor the tokens are named too."""
    model, tokenizer = sst2().model, sst2().processor
    encoded = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    from_text = whyformer.explain(model, SENTENCES, processor=tokenizer)
    from_ids = whyformer.explain(model, encoded, processor=tokenizer)
    assert torch.equal(from_ids.scores, from_text.scores)
    assert from_ids.tokens == from_text.tokens
    bare = whyformer.explain(model, dict(encoded))
    assert bare.tokens is None
    assert bare.scores[:, 0].ne(0).any()  # [CLS] is unknown without a tokenizer


def test_ids_by_position_equal_by_name() -> None:
    model, inputs = build("bert")
    by_name = whyformer.explain(model, {"input_ids": inputs["input_ids"]})
    assert torch.equal(by_name.scores, whyformer.explain(model, inputs["input_ids"]).scores)
    both = whyformer.explain(model, (inputs["input_ids"], inputs["attention_mask"]))
    assert torch.allclose(both.logits, whyformer.explain(model, inputs).logits)


def test_int32_ids_and_none_arguments() -> None:
    model, inputs = build("bert")
    expected = whyformer.explain(model, inputs).scores
    arguments = {**{k: v.int() for k, v in inputs.items()}, "token_type_ids": None}
    assert torch.equal(whyformer.explain(model, arguments).scores, expected)


# -- pictures -----------------------------------------------------------------------------------------------------------
def test_images_are_prepared_and_kept_for_display() -> None:
    pictures = [Image.new("RGB", (60, 40), "red"), Image.new("L", (200, 100), 128)]
    inputs = prepare(digits().model, pictures, digits().processor)
    assert inputs.modality == "image"
    assert inputs.tensor.shape == (2, 3, 112, 112)
    assert inputs.image_size == (112, 112)
    assert inputs.features.pictures is not None and inputs.features.pictures.dtype == torch.uint8
    assert inputs.features.pictures.shape == (2, 112, 112, 3)
    assert inputs.features.pictures[0, 5, 5].tolist() == [255, 0, 0]
    assert inputs.features.pictures[1, 5, 5].tolist() == [128, 128, 128]


def test_function_as_processor() -> None:
    model, inputs = build("hf_vit")

    def processor(picture: Image.Image) -> Tensor:
        return inputs[0] if picture.getpixel((0, 0)) == (0, 0, 0) else inputs[1]

    pictures = [Image.new("RGB", (8, 8), "black"), Image.new("RGB", (8, 8), "white")]
    actual = whyformer.explain(model, pictures, processor=processor)
    assert torch.equal(actual.scores, whyformer.explain(model, inputs).scores)


def test_single_image_is_a_batch_of_one() -> None:
    picture = Image.new("RGB", (112, 112), "gray")
    result = whyformer.explain(digits().model, picture, processor=digits().processor)
    assert len(result) == 1
    assert result.grid == (14, 14)


def test_pixels_are_cast_to_the_precision_of_the_model() -> None:
    model, inputs = build("hf_vit")
    single = inputs.float()
    assert whyformer.explain(model, single).scores.dtype == torch.float64
    assert torch.equal(whyformer.explain(model, single).scores, whyformer.explain(model, single.double()).scores)


def test_inference_tensors_are_explained() -> None:
    model, inputs = build("hf_vit")
    with torch.inference_mode():
        frozen = inputs.clone()
    assert torch.equal(whyformer.explain(model, frozen, method="lrp_ah_ln").scores, whyformer.explain(model, inputs, method="lrp_ah_ln").scores)


# -- other tensors --------------------------------------------------------------------------------------------------------
def test_vectors_have_one_score_per_position() -> None:
    """Inputs of shape ``[B, N, D]``."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(1))

    result = whyformer.explain(Model().eval(), torch.randn(2, 5, 8))
    assert result.level == "token"
    assert result.scores.shape == (2, 5)


# -- prepared inputs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "hf_vit"])
def test_with_tensor_repeats_all_inputs(name: str) -> None:
    """``with_tensor`` repeats the other inputs as often as the tensor."""
    model, inputs = build(name)
    prepared = prepare(model, inputs)
    copies = prepared.with_tensor(prepared.tensor.repeat_interleave(3, 0))
    assert copies.batch == 6
    expected = whyformer.explain(model, rows(inputs, 1)).logits
    args, kwargs = copies.feed
    with torch.no_grad():
        logits = model(*args, **kwargs).logits
    assert torch.allclose(logits[3:], expected.expand(3, -1))


def test_select_samples() -> None:
    model, inputs = build("bert")
    prepared = prepare(model, inputs).select(slice(1, 2))
    assert isinstance(prepared, Inputs)
    assert prepared.batch == 1
    assert prepared.mask is not None and prepared.mask.shape == (1, 10)
    assert torch.equal(prepared.tensor, inputs["input_ids"][1:])


def test_prepared_inputs_are_returned_unchanged() -> None:
    model, inputs = build("bert")
    prepared = prepare(model, inputs)
    assert prepare(model, prepared) is prepared
    assert torch.equal(whyformer.explain(model, prepared).scores, whyformer.explain(model, inputs).scores)


# -- limits of texts ---------------------------------------------------------------------------------------------------
def with_config(config: Any) -> torch.nn.Module:
    """A module of which only the config is read."""
    module = torch.nn.Module()
    module.config = config
    return module


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("LEDConfig", {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 8}, (64, 8)),
        ("MptConfig", {"max_seq_len": 12}, (12, 12)),
        ("RobertaConfig", {"max_position_embeddings": 20, "pad_token_id": 1}, (18, 18)),
        ("LlamaConfig", {"max_position_embeddings": 20}, (20, 20)),
        ("LlamaConfig", {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, (None, None)),
        ("T5Config", {}, (None, None)),
    ],
)
def test_longest_text_by_config(config: str, settings: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    model = with_config(getattr(transformers, config)(**settings))
    assert (longest_text(model, None), longest_text(model, None, decoder=True)) == expected


def test_ids_outside_the_vocabulary_of_a_nested_config_raise_except_placeholders() -> None:
    model = with_config(transformers.Gemma3Config(text_config={"vocab_size": 26}, image_token_index=26))
    check_vocabulary(torch.tensor([[25, 26]]), model)
    with pytest.raises(InputError, match=r"27.*26"):
        check_vocabulary(torch.tensor([[25, 27]]), model)


def test_text_of_another_tokenizer_is_refused() -> None:
    model, processor = sst2().model, sst2().processor
    small = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(InputError, match="vocabulary of 5"):
        prepare(small.eval(), "A fine film!", processor)
    assert prepare(model, "A fine film!", processor).name == "input_ids"


def test_pictures_of_a_whole_processor_are_shown_without_normalisation() -> None:
    class Whole:
        image_processor = digits().processor

    pixels = torch.randn(1, 3, 8, 8).clamp(-1, 0.5)
    assert torch.equal(without_normalisation(pixels, Whole()), without_normalisation(pixels, digits().processor))


def test_sound_with_a_rate_needs_a_processor() -> None:
    assert wants_processor({"array": [0.0, 0.5], "sampling_rate": 16_000})
    assert not wants_processor({"input_ids": torch.ones(1, 2, dtype=torch.long)})
