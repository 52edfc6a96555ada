"""A list holds samples, a tuple holds the arguments of forward; a list is explained like its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import whyformer
from processors import tokenizer
from whyformer.errors import InputError
from zoo import hf_vit, randomise

LENGTHS = [(7, 7), (9, 4), (3, 10, 6)]
SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}


def bert() -> nn.Module:
    return randomise(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=5, pad_token_id=0))).double()


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, num_labels=5, pad_token_id=1)
    return randomise(hf.GPT2ForSequenceClassification(config)).double()


def llama() -> nn.Module:
    return randomise(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=3, pad_token_id=0))).double()


TEXTS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama}


def ids(lengths: tuple[int, ...]) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(4, 50, (n,), generator=draws) for n in lengths]


def assert_equals_alone(e: whyformer.Explanation, alone: whyformer.Explanation) -> None:
    """The first samples are equal, whatever the side of the padding."""
    count = alone.scores.shape[1:].numel()
    assert torch.allclose(e.logits, alone.logits)
    padded = e.scores[0].flatten()
    ends = [padded[:count], padded[-count:]]
    assert any(torch.allclose(part, alone.scores[0].flatten(), rtol=1e-5, atol=1e-8) for part in ends)
    assert torch.isclose(padded.abs().sum(), alone.scores.abs().sum())


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda row: row,
    "with a batch axis": lambda row: row[None],
    "mappings": lambda row: {"input_ids": row, "attention_mask": torch.ones_like(row)},
    "mappings with a batch axis": lambda row: {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]},
    "mappings without a mask": lambda row: {"input_ids": row},
    "arrays": lambda row: row.numpy(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", TEXTS)
def test_list_of_token_ids_equals_single_samples(name: str, lengths: tuple[int, ...], form: str) -> None:
    model, rows = TEXTS[name](), ids(lengths)
    e = whyformer.explain(model, [FORMS[form](row) for row in rows], "input_x_gradient", 2)
    assert len(e) == len(rows)
    for single, row in zip(e, rows, strict=True):
        assert_equals_alone(single, whyformer.explain(model, row[None], "input_x_gradient", 2))


def test_tuple_is_the_arguments_of_forward() -> None:
    model, row = bert(), ids((8,))[0][None]
    mask = torch.tensor([[1] * 5 + [0] * 3])
    positional = whyformer.explain(model, (row, mask), "input_x_gradient", 1)
    named = whyformer.explain(model, {"input_ids": row, "attention_mask": mask}, "input_x_gradient", 1)
    assert torch.equal(positional.scores, named.scores) and not positional.scores[0, 5:].any()


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 3, 32, 32)])
@pytest.mark.parametrize("kind", ["tensors", "arrays", "mappings"])
def test_list_of_images_equals_a_batch(kind: str, shape: tuple[int, ...]) -> None:
    model = hf_vit()[0].double()
    pixels = torch.randn(3, *shape, dtype=torch.float64)
    form = {"tensors": lambda x: x, "arrays": np.asarray, "mappings": lambda x: {"pixel_values": x}}[kind]
    e = whyformer.explain(model, [form(x) for x in pixels], "gradcam", [0, 3, 1])
    whole = whyformer.explain(model, pixels.reshape(3, 3, 32, 32), "gradcam", [0, 3, 1])
    assert torch.equal(e.scores, whole.scores) and torch.equal(e.logits, whole.logits)


def test_list_of_vectors_equals_a_batch() -> None:
    model = nn.Sequential(MeanPooled(), nn.Linear(24, 5)).double().eval()
    vectors = torch.randn(2, 6, 24, dtype=torch.float64)
    for positional in (list(vectors), [v[None] for v in vectors]):
        e = whyformer.explain(model, positional, "saliency", 0)
        assert torch.equal(e.scores, whyformer.explain(model, vectors, "saliency", 0).scores)


class MeanPooled(nn.Module):
    """A Transformer layer and the mean over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.block = randomise(nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).mean(1)


class Unmasked(nn.Module):
    """A model whose forward has no attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids).logits


def without_padding_token() -> nn.Module:
    model = gpt2()
    model.config.pad_token_id = None
    return model


@pytest.mark.parametrize("model", [lambda: Unmasked().eval(), without_padding_token], ids=["no mask", "no padding token"])
def test_list_of_token_ids_without_padding_equals_single_samples(model: Callable[[], nn.Module]) -> None:
    short, long = ids((4, 9))
    e = whyformer.explain(model(), [short, long], "input_x_gradient", [2, 1])
    for single, row, target in zip(e, (short, long), (2, 1), strict=True):
        assert_equals_alone(single, whyformer.explain(model(), row[None], "input_x_gradient", target))


def test_texts_without_padding_token_equal_single_samples() -> None:
    words, texts = tokenizer(), ["the cat", "the cat sat on the mat"]
    words.pad_token = None
    e = whyformer.explain(without_padding_token(), texts, "input_x_gradient", 2, words)
    for single, text in zip(e, texts, strict=True):
        assert_equals_alone(single, whyformer.explain(without_padding_token(), text, "input_x_gradient", 2, words))


class Pooled(nn.Module):
    """A convolution and the mean over its positions, for pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu().mean((2, 3)))


def test_list_of_images_of_different_sizes_equals_single_samples() -> None:
    model, images = Pooled().double().eval(), [torch.randn(3, 32, 32).double(), torch.randn(3, 40, 48).double()]
    e = whyformer.explain(model, images, "saliency", 1)
    for single, image in zip(e, images, strict=True):
        alone = whyformer.explain(model, image[None], "saliency", 1)
        assert torch.allclose(single.scores.sum(), alone.scores.sum()) and torch.allclose(single.logits, alone.logits)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids).logits * weights


@pytest.mark.parametrize("count", [1, 2, 5])
def test_mappings_may_share_an_argument_without_batch_axis(count: int) -> None:
    model, rows, weights = Weighted().eval(), ids((6,) * count), torch.rand(5).double()
    e = whyformer.explain(model, [{"input_ids": row[None], "weights": weights} for row in rows], "input_x_gradient", 1)
    batch = whyformer.explain(model, {"input_ids": torch.stack(rows), "weights": weights}, "input_x_gradient", 1)
    assert torch.allclose(e.logits, batch.logits) and torch.allclose(e.scores, batch.scores)


def test_list_of_samples_of_different_kinds_raises_with_remedy() -> None:
    short, _ = ids((4, 9))
    with pytest.raises(InputError, match="tuple"):  # positional arguments must be a tuple
        whyformer.explain(bert(), [torch.stack([short, short]), torch.ones(2, 4)], "saliency")
    with pytest.raises(InputError, match="takes 32×32"):
        whyformer.explain(hf_vit()[0], [torch.randn(3, 32, 32), torch.randn(3, 40, 32)], "saliency")
    with pytest.raises(InputError, match="keys"):
        whyformer.explain(bert(), [{"input_ids": short}, {"input_ids": short, "attention_mask": torch.ones(4).long()}], "saliency")
    with pytest.raises(InputError, match="one kind"):
        whyformer.explain(bert(), [short, "a text"], "saliency")


def test_padding_token_and_side_of_tokenizer_are_used() -> None:
    """Left padding by a custom token, for a decoder that reads the last token."""
    model, rows = llama(), ids((4, 9, 6))

    words = tokenizer()
    words.padding_side, words.pad_token = "left", "</s>"
    e = whyformer.explain(model, rows, "input_x_gradient", 2, words)
    assert e.tokens is not None and e.tokens[0][:5] == ["</s>"] * 5 and not e.scores[0, :5].any()
    for single, row in zip(e, rows, strict=True):
        assert_equals_alone(single, whyformer.explain(model, row[None], "input_x_gradient", 2))


PAIRS = [("A good film.", "It is bad."), ("Dull and far too long for me.", "Yes."), ("Fine.", "A warm and charming film.")]
NAMED = [{"text": text, "text_pair": pair} for text, pair in PAIRS]


@pytest.mark.parametrize("pairs", [PAIRS, NAMED, [PAIRS[0], *NAMED[1:]]], ids=["tuples", "mappings", "both"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_list_of_pairs_of_texts_equals_its_samples(pairs: list[Any], count: int) -> None:
    model = whyformer.Explainer("bundled:sst2", dtype="float64")
    targets = [1, 0, 1][:count]
    e = whyformer.explain(model, pairs[:count], "attnlrp", targets)
    (compared,) = whyformer.compare(model, pairs[:count], "attnlrp", [targets]).explanations
    assert len(e) == count and torch.equal(e.scores, compared.scores)
    for i in range(count):
        alone = whyformer.explain(model, NAMED[i], "attnlrp", targets[i])
        assert_equals_alone(e[i], alone)
        assert e[i].texts == alone.texts and e[i].target_names == alone.target_names


def test_long_list_of_pairs_is_explained_in_batches() -> None:
    e = whyformer.explain("bundled:sst2", PAIRS * 12, "input_x_gradient")
    assert len(e) == 36
    torch.testing.assert_close(e[34].logits, whyformer.explain("bundled:sst2", NAMED[1], "input_x_gradient").logits)


def picture(angle: int) -> Image.Image:
    return Image.open("examples/pictures/digits_37.png").rotate(angle)


PROMPTS = [("What digits?", picture(0)), ("Which numbers do you see?", picture(90))]
FORMS_OF_PROMPTS: dict[str, Callable[[str, Image.Image], Any]] = {
    "tuples": lambda text, shown: (text, shown),
    "picture first": lambda text, shown: (shown, text),
    "list of pictures": lambda text, shown: (text, [shown]),
    "mappings": lambda text, shown: {"text": text, "images": shown},
}


@pytest.mark.parametrize("form", FORMS_OF_PROMPTS)
def test_list_of_prompts_with_pictures_equals_its_samples(form: str) -> None:
    model = whyformer.Explainer("bundled:reader", dtype="float64")
    prompts = [FORMS_OF_PROMPTS[form](*prompt) for prompt in PROMPTS]
    e = whyformer.explain(model, prompts, "input_x_gradient")
    for i, (text, shown) in enumerate(PROMPTS):
        alone = whyformer.explain(model, {"text": text, "images": shown}, "input_x_gradient")
        assert torch.equal(whyformer.explain(model, prompts[i : i + 1], "input_x_gradient").scores, alone.scores)
        for name in alone.inputs:
            assert_equals_alone(e[i].part(name), alone.part(name))


@pytest.mark.parametrize("samples", [[PAIRS[0], "A film."], [("a", "b", "c")], [PAIRS[0], {"text": "a", "images": "b"}]])
def test_list_of_different_samples_is_refused(samples: list[Any]) -> None:
    with pytest.raises(InputError, match="not a list of"):
        whyformer.explain("bundled:sst2", samples, "input_x_gradient")
