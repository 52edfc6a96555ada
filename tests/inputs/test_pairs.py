"""Pairs of texts, images as arrays, and errors for unusable inputs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.models.loading import Loaded, load
from whyformer.show import html
from whyformer.show.words import words

PAIRS = {"text": ["A fine film, truly.", "Dull"], "text_pair": ["It is good", "One may well sleep in it"]}


@pytest.fixture(scope="module")
def sst2() -> Loaded:
    return load("bundled:sst2")


@pytest.fixture(scope="module")
def model(sst2: Loaded) -> BertForSequenceClassification:
    """A random model that distinguishes the second text by its token types."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(sst2.processor), type_vocab_size=2, num_labels=3, initializer_range=0.3, **sizes)
    return BertForSequenceClassification(config).double().eval()


def test_scores_of_pair_cover_the_tokens_of_both_texts(model: Any, sst2: Loaded) -> None:
    e = whyformer.explain(model, PAIRS, "input_x_gradient", 1, sst2.processor)
    encoded = sst2.processor(PAIRS["text"], PAIRS["text_pair"], return_tensors="pt", padding=True)
    assert len(set(encoded["token_type_ids"][0].tolist())) == 2
    expected = whyformer.explain(model, dict(encoded), "input_x_gradient", 1).scores
    special = (encoded["input_ids"] == sst2.processor.sep_token_id) | (encoded["input_ids"] == sst2.processor.cls_token_id)
    assert e.special == [row.nonzero().flatten().tolist() for row in special]
    one_text = {**encoded, "token_type_ids": torch.zeros_like(encoded["token_type_ids"])}
    assert not torch.allclose(expected, whyformer.explain(model, one_text, "input_x_gradient", 1).scores, atol=1e-3)
    assert torch.allclose(e.scores, expected, atol=1e-12)


FIRST, SECOND = " ".join(["a warm film"] * 300), " ".join(["it is dull"] * 250)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("text", "pair"), [(FIRST, SECOND), (FIRST, "it is good"), ("a fine film", SECOND)])
def test_truncated_pair_has_scores_of_what_the_tokenizer_keeps(model: Any, sst2: Loaded, text: str, pair: str, side: str) -> None:
    reads = copy.deepcopy(sst2.processor)
    reads.truncation_side = side
    limit = min(reads.model_max_length, model.config.max_position_embeddings)
    e = whyformer.explain(model, {"text": [text, "a"], "text_pair": [pair, "b"]}, "saliency", 1, reads, truncate=True)
    kept = reads(text, pair, truncation=True, max_length=limit, return_tensors="pt")
    assert torch.allclose(e.scores[0], whyformer.explain(model, dict(kept), "saliency", 1).scores[0], atol=1e-12)
    both, (shown, rest) = f"{text} | {pair}", words(e)
    (begin, end), skipped = e.extent[0], e.features.skipped[0] if e.features.skipped else []
    unread = [both[:begin], *(both[a:b] for a, b in skipped), both[end:]]
    assert sum(len(part.split()) for part in unread) == len(both.split()) - 1 - len(shown)
    assert f"did not read {len(both.split()) - 1 - len(shown):,} of" in e.warnings[0] and "sample 0" in e.warnings[0]
    assert all(both[a:b] not in rest for a, b in skipped)
    assert sum("did not read" in word.gap for word in shown) == len(skipped) == (text is FIRST if side == "right" else pair is SECOND)
    assert Explanation.from_dict(e.to_dict()).features.skipped == e.features.skipped
    alone = whyformer.explain(model, {"text": text, "text_pair": pair}, "saliency", 1, reads, truncate=True)
    assert (e[0].warnings, e[0].features.skipped) == (alone.warnings, alone.features.skipped)


def test_trust_in_a_pair_needs_its_texts(model: Any, sst2: Loaded) -> None:
    """The joined text of an explanation is not what the model read."""
    e = whyformer.explain(model, PAIRS, "saliency", 1, sst2.processor)
    with pytest.raises(InputError, match="pass inputs"):
        whyformer.trust(e, model, processor=sst2.processor)
    assert len(whyformer.trust(e, model, PAIRS, sst2.processor, steps=2, seeds=[0])) == 2


def test_pair_is_shown_as_one_text(model: Any, sst2: Loaded) -> None:
    e = whyformer.explain(model, PAIRS, "rollout", processor=sst2.processor)
    assert e.texts == ["A fine film, truly. | It is good", "Dull | One may well sleep in it"]
    for i, (first, second) in enumerate(zip(PAIRS["text"], PAIRS["text_pair"], strict=True)):
        shown, _ = words(e[i])
        both = "".join(first.split()) + "".join(second.split())
        assert "".join(word.text for word in shown) == both
        assert [word.text for word in shown if word.text.isalpha()][-1] == second.split()[-1]
    assert "sleep" in html.page(e)
    alone = [whyformer.explain(model, {k: v[i] for k, v in PAIRS.items()}, "rollout", processor=sst2.processor) for i in (0, 1)]
    for i, single in enumerate(alone):
        assert torch.allclose(e.scores[i, : single.scores.shape[1]], single.scores[0], atol=1e-12)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"text": "a", "text_pair": ["b", "c"]}, {}, "1 texts and text_pair has 2"),
        ({"text": "a", "text_pair": 3}, {}, "one text each, or lists"),
        ({"text": ["a", "b"], "text_pair": ["c", " "]}, {}, "^text_pair number 1 is empty"),
        ({"text": ["a", ""], "text_pair": ["c", "d"]}, {}, "^text number 1 is empty"),
        ({"text": "a", "text_pair": ""}, {}, "^the text_pair is empty"),
        ({"text": " ", "text_pair": "b"}, {}, "^the text is empty"),
        ({"text": "a", "text_pair": "\ud800"}, {}, "^the text_pair contains lone surrogates"),
        ({"text": "a", "text_pair": "b " * 600}, {}, "the model takes at most"),
    ],
)
def test_invalid_pair_raises(model: Any, sst2: Loaded, given: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        whyformer.explain(model, given, "rollout", processor=sst2.processor, **options)


# -- images as arrays -------------------------------------------------------------------------------------------------
def image_arrays() -> dict[str, Any]:
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    tensor = torch.from_numpy(picture)
    return {
        "bytes": picture, "fractions": picture / 255, "fractions of 32 bits": (picture / 255).astype(np.float32),
        "channels in front": tensor.permute(2, 0, 1), "a tensor, channels last": tensor,
        "a batch": tensor.permute(2, 0, 1)[None], "a batch of arrays": picture[None], "a list": [picture / 255],
    }  # fmt: skip


@pytest.mark.parametrize("name", image_arrays())
def test_image_arrays_have_the_scores_of_the_image(name: str) -> None:
    arrays = image_arrays()
    expected = whyformer.explain("bundled:digits", Image.fromarray(arrays["bytes"]), "gae", 3)
    actual = whyformer.explain("bundled:digits", arrays[name], "gae", 3)
    assert torch.equal(actual.scores, expected.scores)
    assert actual.originals is not None and actual.originals[0].size == (50, 40)


def test_array_that_is_no_image_raises() -> None:
    with pytest.raises(InputError, match=r"takes pictures, \[B, \d, H, W\], and this is \[40, 50, 3\]: .* or fractions from 0 to 1"):
        whyformer.explain("bundled:digits", image_arrays()["bytes"].astype(float), "gae", 3)


def test_unknown_argument_name_raises() -> None:
    with pytest.raises(InputError, match="no parameter pixels; it takes pixel_values"):
        whyformer.explain("bundled:digits", {"pixels": torch.rand(1, 3, 112, 112)}, "gae", 3)


def test_array_of_strings_equals_list() -> None:
    texts = ["A fine film", "Dull"]
    expected = whyformer.explain("bundled:sst2", texts, "gae")
    assert torch.equal(whyformer.explain("bundled:sst2", np.array(texts), "gae").scores, expected.scores)
    assert torch.equal(whyformer.explain("bundled:sst2", np.array(texts, dtype=object), "gae").scores, expected.scores)


@pytest.mark.parametrize("empty", [torch.zeros(0, 3, 112, 112), torch.zeros(0, 3, 9, 9, dtype=torch.uint8), np.zeros((0, 9, 9, 3), np.uint8)])
def test_empty_batch_of_images_raises(empty: Any) -> None:
    with pytest.raises(InputError, match="the batch is empty"):
        whyformer.explain("bundled:digits", empty, "gae", 3)


@pytest.mark.parametrize("damage", [{"rescale_factor": "a"}, {"image_mean": [0.5]}, {"size": {"height": 0, "width": 32}}])
def test_damaged_image_processor_raises(damage: dict[str, Any]) -> None:
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(**{"size": {"height": 112, "width": 112}, **damage})
    picture = Image.fromarray(image_arrays()["bytes"])
    with pytest.raises(InputError, match=r"the image processor fails: check its preprocessor_config\.json"):
        whyformer.explain(load("bundled:digits").model, picture, "gae", 3, processor)
