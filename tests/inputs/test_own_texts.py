"""Models whose classes are the texts of the input: a text as the target is one of these, never a token's id."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import whyformer
from whyformer.errors import InputError
from whyformer.models.loading import load
from whyformer.targets import Contrast, LogProbability, Token

pytestmark = pytest.mark.filterwarnings("ignore:`max_length` is ignored")  # by CLIP's processor

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXTS = ["a dog", "a good film, truly", "good", "Café", "film"]
PICTURES = [Image.new("RGB", (40, 40), (200, 10, 10)), Image.new("RGB", (50, 40), (10, 10, 200))]
CHOICES = [["good", "bad film", "a man"], ["a man", "film", "good"]]


def tokenizer() -> Any:
    return load("bundled:sst2").processor


@cache
def clip() -> tuple[Any, Any]:
    reader = tokenizer()
    reader.model_input_names = ["input_ids", "attention_mask"]
    ends = {"bos_token_id": reader.cls_token_id, "eos_token_id": reader.sep_token_id, "pad_token_id": reader.pad_token_id}
    words = {**SIZES, **ends, "vocab_size": len(reader), "max_position_embeddings": 64}
    seen = {**SIZES, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=words, vision_config=seen, projection_dim=16)).eval()
    return model, hf.CLIPProcessor(CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False), reader)


def of_clip(target: Any, texts: Any = TEXTS, images: Any = PICTURES) -> whyformer.Explanation:
    model, processor = clip()
    return whyformer.explain(model, {"text": texts, "images": images}, "input_x_gradient", target, processor)


def bert(kind: Any, **sizes: int) -> Any:
    torch.manual_seed(0)
    return kind(hf.BertConfig(**SIZES, **sizes)).eval()


def of_choices(target: Any, samples: slice = slice(None)) -> whyformer.Explanation:
    reader, chosen = tokenizer(), CHOICES[samples]
    encoded = reader(["it is"] * 3 * len(chosen), [c for row in chosen for c in row], padding=True, return_tensors="pt")
    given = {name: value.unflatten(0, (len(chosen), 3)) for name, value in encoded.items()}
    model = bert(hf.BertForMultipleChoice, vocab_size=len(reader))
    return whyformer.explain(model, given, "input_x_gradient", target, reader)


@pytest.mark.parametrize(("said", "index"), [
    ("a dog", 0), ("good", 2), ("film", 4), ("Café", 3), ("a good film, truly", 1), ("'good'", 2), ("4", 4), ("#1", 1),
    (["good", "film"], [2, 4]), (Contrast("a dog", "film"), Contrast(0, 4)), ("Contrast('a dog', 'film')", Contrast(0, 4)),
    (LogProbability(["good", "a dog"]), LogProbability([2, 0])),
])  # fmt: skip
def test_a_picture_is_compared_with_the_text_that_is_named(said: Any, index: Any) -> None:
    e, wanted = of_clip(said), of_clip(index)
    assert e.target.tolist() == wanted.target.tolist()
    for name in wanted.inputs:
        assert torch.equal(e.part(name).scores, wanted.part(name).scores)


@pytest.mark.parametrize("said", ["g", "bad", "a", "a good film", Contrast("good", "dog"), ["good", "dog"], "a dog that is none of them"])
def test_a_text_that_the_picture_is_not_compared_with_is_refused(said: Any) -> None:
    with pytest.raises(InputError, match=r"0 \('a dog'\), 1 .* 4 \('film'\): pass one of them .* or its index"):
        of_clip(said)


def test_of_many_texts_some_are_listed() -> None:
    """The index of "g" in the tokenizer is in range here."""
    texts = [f"a {word}" for word in ["dog", "cat", "man", "film", "book", "house", "tree", "road", "ship", "bird"] * 6]
    assert tokenizer().convert_tokens_to_ids("g") < len(texts)
    with pytest.raises(InputError, match=r"0 \('a dog'\), .* \.\.\. 59 \('a bird'\)"):
        of_clip("g", texts, PICTURES[0])
    with pytest.raises(InputError, match=r"names several classes: 1 \(a cat\), 11"):
        of_clip("a cat", texts, PICTURES[0])


def test_texts_that_are_numbers() -> None:
    digits = ["7", "3", "1"]
    assert of_clip('"3"', digits).target.tolist() == [1, 1]
    assert of_clip("#1", digits).target.tolist() == [1, 1]
    with pytest.raises(InputError, match="'1' is ambiguous"):
        of_clip("1", digits)


@pytest.mark.parametrize(("said", "index"), [
    ("good", [0, 2]), ("a man", [2, 0]), (["bad film", "film"], [1, 1]), ("2", [2, 2]),
    (Contrast("good", "a man"), Contrast([0, 2], [2, 0])),
])  # fmt: skip
def test_the_choice_that_is_named_in_each_sample(said: Any, index: Any) -> None:
    e, wanted = of_choices(said), of_choices(index)
    assert e.target.tolist() == wanted.target.tolist()
    assert torch.equal(e.scores, wanted.scores)
    if isinstance(said, str):
        for i, one in enumerate([slice(0, 1), slice(1, 2)]):
            assert of_choices(said, one).target.tolist() == e.target[one].tolist(), i


@pytest.mark.parametrize("said", ["it", "it is", "bad film", "g", ["good", "bad film"]])
def test_a_text_that_is_no_choice_is_refused(said: Any) -> None:
    with pytest.raises(InputError, match=r"pass one of them .* or its index"):
        of_choices(said)


def test_tokens_keep_their_names_where_the_row_is_over_the_vocabulary() -> None:
    reader = tokenizer()
    good, size = reader.convert_tokens_to_ids("good"), len(reader)
    masked = bert(hf.BertForMaskedLM, vocab_size=size)
    assert whyformer.explain(masked, "a [MASK] film", "input_x_gradient", Token(2, "good"), reader).target.tolist() == [good]
    model = bert(hf.BertLMHeadModel, vocab_size=size, is_decoder=True)
    assert whyformer.explain(model, "a film", "input_x_gradient", "good", reader).target.tolist() == [good]


class Headed(torch.nn.Module):
    def __init__(self, inner: Any, outputs: int) -> None:
        super().__init__()
        self.inner, self.head = inner, torch.nn.Linear(32, outputs)

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        return self.head(self.inner(input_ids, attention_mask).last_hidden_state[:, 0])


def test_a_token_is_no_class_of_another_row() -> None:
    reader = tokenizer()
    model = Headed(bert(hf.BertModel, vocab_size=len(reader)), 60).eval()
    assert reader.convert_tokens_to_ids("g") < 60
    with pytest.raises(InputError, match=r"the text of a token, .* pass an index, 0 to 59"):
        whyformer.explain(model, "a film", "input_x_gradient", "g", reader)
    assert whyformer.explain(model, "a film", "input_x_gradient", "59", reader).target.tolist() == [59]
