"""Pairs of texts that a model reads together; and what a model fails on, told in a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from whyformer.errors import InputError
from whyformer.models.loading import Loaded, load
from whyformer.show import html
from whyformer.show.words import words

PAIRS = {"text": ["A fine film, truly.", "Dull"], "text_pair": ["It is good", "One may well sleep in it"]}


@pytest.fixture(scope="module")
def reader() -> Loaded:
    return load("bundled:sst2")


@pytest.fixture(scope="module")
def model(reader: Loaded) -> BertForSequenceClassification:
    """A model of its own that knows a second text by its token types."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(reader.processor), type_vocab_size=2, num_labels=3, initializer_range=0.3, **sizes)
    return BertForSequenceClassification(config).double().eval()


def test_scores_stand_at_the_tokens_of_both(model: Any, reader: Loaded) -> None:
    e = whyformer.explain(model, PAIRS, "input_x_gradient", 1, reader.processor)
    encoded = reader.processor(PAIRS["text"], PAIRS["text_pair"], return_tensors="pt", padding=True)
    assert len(set(encoded["token_type_ids"][0].tolist())) == 2
    wanted = whyformer.explain(model, dict(encoded), "input_x_gradient", 1).scores
    special = (encoded["input_ids"] == reader.processor.sep_token_id) | (encoded["input_ids"] == reader.processor.cls_token_id)
    assert e.special == [row.nonzero().flatten().tolist() for row in special]
    one_text = {**encoded, "token_type_ids": torch.zeros_like(encoded["token_type_ids"])}
    assert not torch.allclose(wanted, whyformer.explain(model, one_text, "input_x_gradient", 1).scores, atol=1e-3)
    assert torch.allclose(e.scores, wanted, atol=1e-12)


def test_each_pair_is_shown_as_one_text_with_its_words_in_place(model: Any, reader: Loaded) -> None:
    e = whyformer.explain(model, PAIRS, "rollout", processor=reader.processor)
    assert e.texts == ["A fine film, truly. | It is good", "Dull | One may well sleep in it"]
    for i, (first, second) in enumerate(zip(PAIRS["text"], PAIRS["text_pair"], strict=True)):
        shown, _ = words(e, i)
        both = "".join(first.split()) + "".join(second.split())
        assert "".join(word.text for word in shown) == both
        assert [word.text for word in shown if word.text.isalpha()][-1] == second.split()[-1]
    assert "sleep" in html.page(e)
    alone = [whyformer.explain(model, {k: v[i] for k, v in PAIRS.items()}, "rollout", processor=reader.processor) for i in (0, 1)]
    for i, one in enumerate(alone):
        assert torch.allclose(e.scores[i, : one.scores.shape[1]], one.scores[0], atol=1e-12)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({"text": "a", "text_pair": ["b", "c"]}, {}, "1 texts and text_pair has 2"),
        ({"text": "a", "text_pair": 3}, {}, "one text each, or lists"),
        ({"text": ["a", "b"], "text_pair": ["c", " "]}, {}, "^text_pair number 1 is empty"),
        ({"text": ["a", ""], "text_pair": ["c", "d"]}, {}, "^text number 1 is empty"),
        ({"text": "a", "text_pair": ""}, {}, "^the text_pair is empty"),
        ({"text": " ", "text_pair": "b"}, {}, "^the text is empty"),
        ({"text": "a", "text_pair": "\ud800"}, {}, "^the text_pair contains lone surrogates"),
        ({"text": "a", "text_pair": "b"}, {"truncate": True}, "cannot be truncated"),
        ({"text": "a", "text_pair": "b " * 600}, {}, "the model takes at most"),
    ],
)
def test_what_is_no_pair(model: Any, reader: Loaded, given: Any, options: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        whyformer.explain(model, given, "rollout", processor=reader.processor, **options)


# -- pictures as arrays -----------------------------------------------------------------------------------------------
def shapes() -> dict[str, Any]:
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    tensor = torch.from_numpy(picture)
    return {
        "bytes": picture, "fractions": picture / 255, "fractions of 32 bits": (picture / 255).astype(np.float32),
        "channels in front": tensor.permute(2, 0, 1), "a tensor, channels last": tensor,
        "a batch": tensor.permute(2, 0, 1)[None], "a batch of arrays": picture[None], "a list": [picture / 255],
    }  # fmt: skip


@pytest.mark.parametrize("name", shapes())
def test_pictures_as_arrays(name: str) -> None:
    given = shapes()
    wanted = whyformer.explain("bundled:digits", Image.fromarray(given["bytes"]), "gae", 3)
    found = whyformer.explain("bundled:digits", given[name], "gae", 3)
    assert torch.equal(found.scores, wanted.scores)
    assert found.originals is not None and found.originals[0].size == (50, 40)


def test_what_is_no_picture_is_told() -> None:
    with pytest.raises(InputError, match=r"takes pictures, \[B, \d, H, W\], and this is \[40, 50, 3\]: .* or fractions from 0 to 1"):
        whyformer.explain("bundled:digits", shapes()["bytes"].astype(float), "gae", 3)


def test_names_that_the_forward_does_not_know_are_told() -> None:
    with pytest.raises(InputError, match="no parameter pixels; it takes pixel_values"):
        whyformer.explain("bundled:digits", {"pixels": torch.rand(1, 3, 112, 112)}, "gae", 3)


def test_strings_of_an_array() -> None:
    texts = ["A fine film", "Dull"]
    wanted = whyformer.explain("bundled:sst2", texts, "gae")
    assert torch.equal(whyformer.explain("bundled:sst2", np.array(texts), "gae").scores, wanted.scores)
    assert torch.equal(whyformer.explain("bundled:sst2", np.array(texts, dtype=object), "gae").scores, wanted.scores)


@pytest.mark.parametrize("empty", [torch.zeros(0, 3, 112, 112), torch.zeros(0, 3, 9, 9, dtype=torch.uint8), np.zeros((0, 9, 9, 3), np.uint8)])
def test_an_empty_batch(empty: Any) -> None:
    with pytest.raises(InputError, match="the batch is empty"):
        whyformer.explain("bundled:digits", empty, "gae", 3)


@pytest.mark.parametrize("damage", [{"rescale_factor": "a"}, {"image_mean": [0.5]}, {"size": {"height": 0, "width": 32}}])
def test_a_damaged_processor_is_told(damage: dict[str, Any]) -> None:
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(**{"size": {"height": 112, "width": 112}, **damage})
    picture = Image.fromarray(shapes()["bytes"])
    with pytest.raises(InputError, match=r"the image processor fails: check its preprocessor_config\.json"):
        whyformer.explain(load("bundled:digits").model, picture, "gae", 3, processor)
