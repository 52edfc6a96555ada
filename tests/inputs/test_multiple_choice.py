"""Multiple choice: ids ``[B, choices, N]``; the scores belong to the text of the target choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import processors
import whyformer
from whyformer.errors import InputError
from whyformer.methods import METHODS
from zoo import HEADS, LENGTHS, TOKENS, VOCABULARY, WIDTH, Choice, randomise, text

FEW = {"samples": 2, "steps": 3}
TARGETS = [1, 0]


def built(model: str = "Bert") -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
    config = getattr(transformers, f"{model}Config")(**sizes, max_position_embeddings=32, pad_token_id=0)
    multiple_choice = randomise(getattr(transformers, f"{model}ForMultipleChoice")(config)).double()
    return multiple_choice, {name: torch.stack([value, value.flip(0)], 1) for name, value in text().items()}


@pytest.mark.part
@pytest.mark.parametrize("model", ["Bert", "Electra"])
@pytest.mark.parametrize("method", [m for m in sorted(METHODS) if METHODS[m].modality != "image" and METHODS[m].family != "perturbation"])
def test_choice_has_the_scores_of_its_text_alone(method: str, model: str) -> None:
    multiple_choice, pairs = built(model)
    few = {name: FEW[name] for name in METHODS[method].settings if name in FEW}
    if "noise" in METHODS[method].settings:
        few["noise"] = 0.0  # would be drawn for all choices at once
    e = whyformer.explain(multiple_choice, pairs, method, TARGETS, **few)
    assert e.scores.shape == (2, TOKENS)
    assert e.logits.shape == (2, 2)
    for b, choice in enumerate(TARGETS):
        length = LENGTHS[choice if b == 0 else 1 - choice]
        single = {name: value[b : b + 1, choice, :length] for name, value in pairs.items()}
        alone = whyformer.explain(Choice(multiple_choice).eval(), single, method, 0, **few)
        assert torch.allclose(e.scores[b, :length], alone.scores[0], rtol=1e-6, atol=1e-9 * float(alone.scores.abs().max()))
        assert not bool(e.scores[b, length:].any())


def test_attention_maps_have_a_row_for_each_text() -> None:
    model, pairs = built()
    maps = whyformer.attention_maps(model, pairs, processors.tokenizer())
    names = processors.tokenizer().convert_ids_to_tokens
    assert maps.tokens == [names(row.tolist()) for row in pairs["input_ids"].flatten(0, 1)]
    assert "2 samples with 2 texts" in repr(maps)
    assert maps.tokens[0][0] in repr(maps) and maps.maps[0].shape[0] == len(maps.readout) == 4
    for i, tokens in enumerate(maps.tokens):
        b, choice, real = i // 2, i % 2, int(pairs["attention_mask"].flatten(0, 1)[i].sum())
        single = {name: value[b : b + 1, [choice], :real] for name, value in pairs.items()}
        alone = whyformer.attention_maps(model, single, processors.tokenizer())
        assert "1 sample:" in repr(alone)
        torch.testing.assert_close(maps.maps[1][i, :, :real, :real], alone.maps[1][0])
        assert tokens[:real] == alone.tokens[0]
    e = whyformer.explain(model, pairs, "raw_attention", processor=processors.tokenizer(), aggregation={"layers": 1, "heads": "mean"})
    torch.testing.assert_close(maps.explanation(1).scores, e.scores)


@pytest.mark.parametrize("named", [True, False])
def test_texts_without_axis_of_choices_raise(named: bool) -> None:
    model, pairs = built()
    ids = pairs["input_ids"][:, 0]
    for work in (whyformer.attention_maps, whyformer.explain, whyformer.record):
        with pytest.raises(InputError, match=r"choices of one sample.*\[1, 2, N\]"):
            work(model, {"input_ids": ids} if named else ids)


def test_deleting_tokens_of_a_choice_raises() -> None:
    with pytest.raises(InputError, match="does not work for multiple choice"):
        whyformer.explain(*built(), "occlusion", baseline="delete")


class Document(nn.Module):
    """Several texts that are encoded one by one and classified by their mean."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
        self.texts = randomise(transformers.BertModel(transformers.BertConfig(**sizes, pad_token_id=0)))
        self.head = randomise(nn.Linear(WIDTH, classes))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        encoded = self.texts(input_ids.flatten(0, 1), attention_mask=mask).pooler_output
        return self.head(encoded.unflatten(0, input_ids.shape[:2]).mean(1))


class FlatDocument(nn.Module):
    """The wrapper that the error message proposes: one row of tokens per document."""

    def __init__(self, model: nn.Module, count: int, length: int) -> None:
        super().__init__()
        self.model, self.count, self.length = model, count, length

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids.view(-1, self.count, self.length))


@pytest.mark.parametrize(("classes", "shape"), [(4, (2, 6, 9)), (6, (2, 6, 9)), (2, (1, 3, 5)), (3, (1, 3, 5))])
@pytest.mark.parametrize("position", [True, False])
def test_several_texts_per_sample_are_no_multiple_choice(classes: int, shape: tuple[int, int, int], position: bool) -> None:
    """Also if there are as many texts as classes. The wrapper of the error message gives scores to all texts."""
    model = Document(classes).double().eval()
    ids = torch.randint(4, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="one logit for each, as for multiple choice"):
        whyformer.explain(model, ids if position else {"input_ids": ids}, "input_x_gradient", 1)
    flat = FlatDocument(model, *shape[1:]).eval()
    e = whyformer.explain(flat, ids.flatten(1), "input_x_gradient", 1)
    assert torch.allclose(e.logits, model(ids).detach())
    assert (e.scores.unflatten(1, shape[1:]).abs().sum(-1) > 0).all()
    for i in range(len(ids)):
        alone = whyformer.explain(flat, ids[i : i + 1].flatten(1), "input_x_gradient", 1)
        assert torch.allclose(e.scores[i], alone.scores[0])


class SecondHead(nn.Module):
    """A model whose logits of texts are not its first output, such as GPT2DoubleHeadsModel."""

    def __init__(self, only: bool) -> None:
        super().__init__()
        self.model, self.only = built()[0], only

    def forward(self, input_ids: Tensor, **more: Tensor) -> Any:
        logits = self.model(input_ids, **more).logits
        other = logits.sum() + input_ids[..., None].double()
        return logits if self.only else {"logits": other, "mc_logits": logits}


def test_logits_of_texts_beside_other_outputs_name_the_way_out() -> None:
    pairs = built()[1]
    with pytest.raises(InputError, match="returns mc_logits only"):
        whyformer.explain(SecondHead(only=False).eval(), pairs, "input_x_gradient", lambda output: output["mc_logits"][:, 1])
    e = whyformer.explain(SecondHead(only=True).eval(), pairs, "input_x_gradient", 1)
    assert torch.equal(e.scores, whyformer.explain(built()[0], pairs, "input_x_gradient", 1).scores)


def test_multiple_choice_ids_by_position_equal_by_name() -> None:
    model, pairs = built()
    e = whyformer.explain(model, pairs["input_ids"], "input_x_gradient", TARGETS)
    named = whyformer.explain(model, {"input_ids": pairs["input_ids"]}, "input_x_gradient", TARGETS)
    assert torch.equal(e.scores, named.scores)


@pytest.mark.parametrize("count", [1, 3])
def test_texts_of_multiple_choice_name_the_way_out(count: int) -> None:
    model, tokenizer = built()[0], processors.tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    text, text_pair = ["what is"] * count, ["here on the left", "is", "on the left"][:count]
    inputs = {"text": text, "text_pair": text_pair}
    for work in (whyformer.explain, whyformer.record):
        with pytest.raises(InputError, match=rf"pass ids \[1, {count}, N\] instead of \[{count}, N\]") as error:
            work(model, inputs, processor=tokenizer)
    code = str(error.value).rpartition("N], ")[2]
    tensors = eval(code, {"tokenizer": tokenizer, "text": text, "text_pair": text_pair})
    assert whyformer.explain(model, tensors, "input_x_gradient", 0, tokenizer).logits.shape == (1, count)
