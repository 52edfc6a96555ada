"""The remedies that errors and warnings name work, and ``auto`` falls back to its next choice."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from test_end_functions import Block, Model, pictures
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer import explain, targets
from whyformer.errors import InputError, LoadError, MethodNotApplicable, ModelError, WhyformerError
from whyformer.methods import METHODS
from whyformer.models.loading import load
from zoo import VOCABULARY, build, rows, text


class AttentionHalf(nn.Module):
    """The attention of a block without its residual connection."""

    def __init__(self, block: Block, norm: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.apart = block.norm1, block, norm

    def forward(self, x: Tensor) -> Tensor:
        b = self.inner
        q, k, v = b.qkv(self.norm(x) if self.apart else x).unflatten(-1, (3, b.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return b.project((weights @ v).transpose(1, 2).flatten(2))


class FeedForwardHalf(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class PreNorm(nn.Module):
    """One wrapper class for both halves."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class HalvesOfBlocks(Model):
    """``ModuleList([attention, feed-forward])`` for each block, as in vit-pytorch."""

    def __init__(self, wrapped: bool = False, detached: bool = False) -> None:
        super().__init__()
        halves = [(AttentionHalf(copy.deepcopy(b), True), FeedForwardHalf(copy.deepcopy(b))) for b in self.blocks]
        del self.blocks
        self.layers = nn.ModuleList(nn.ModuleList(map(PreNorm, h) if wrapped else h) for h in halves)
        self.detached = detached

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.detach() if self.detached else pixels
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for attention, forward in self.layers:
            x = x + attention(x)
            x = x + forward(x)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "lrp", "cp_lrp", "occlusion"])
def test_halves_of_blocks_have_the_scores_of_blocks(method: str, wrapped: bool) -> None:
    model = HalvesOfBlocks(wrapped)
    actual, expected = (explain(m, pictures(), method, 1) for m in (model, Model()))
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_halves_of_blocks_equal_blocks_or_are_refused(wrapped: bool) -> None:
    for method, row in METHODS.items():
        if row.family == "perturbation":
            continue
        try:
            actual = explain(HalvesOfBlocks(wrapped), pictures(), method, 1)
        except WhyformerError:
            continue
        if method != "auto":
            torch.testing.assert_close(
                actual.scores, explain(Model(), pictures(), method, 1).scores, rtol=1e-7, atol=1e-10
            )


class PatchAverage(Model):
    """A model without blocks, which averages the patches."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        del self.blocks
        self.detached = detached

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.detach() if self.detached else pixels
        return self.head(self.norm(self.patches(pixels).relu().flatten(2).mean(2)))


class TokenMixer(Model):
    """A model that mixes tokens by fixed weights without attention; the halves of its block are attributes."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.tokens, self.channels = nn.Linear(17, 17).double(), nn.Linear(16, 16).double()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        x = x + self.tokens(x.mT).mT
        return self.head(self.norm(x + self.channels(x).relu())[:, 0])


def suggested_methods(error: Exception) -> list[str]:
    return str(error).partition("Methods that apply: ")[2].replace(" ", "").split(",")


@pytest.mark.parametrize("method", ["libragrad", "gae", "transformer_attribution", "partial_lrp", "gradcam"])
def test_suggested_methods_apply(method: str) -> None:
    model = PatchAverage()
    with pytest.raises(MethodNotApplicable) as caught:
        explain(model, pictures(), method, 1)
    others = suggested_methods(caught.value)
    assert {"auto", "input_x_gradient", "lrp_ah_ln", "occlusion"} <= set(others)
    assert "gradcam" not in others
    for second in others:
        assert explain(model, pictures(), second, 1).scores.any()


@pytest.mark.parametrize("method", ["libragrad", "gradcam"])
def test_token_mixer_is_explained(method: str) -> None:
    assert explain(TokenMixer(), pictures(), method, 1).scores.any()


def test_suggested_methods_apply_to_detached_inputs() -> None:
    model = PatchAverage(detached=True)
    with pytest.raises(MethodNotApplicable) as caught:
        explain(model, pictures(), "gradcam", 1)
    others = suggested_methods(caught.value)
    assert {"auto", "input_x_gradient", "lrp", "lrp_ah_ln", "occlusion"} <= set(others)
    for second in others:
        assert explain(model, pictures(), second, 1).scores.any()


def test_auto_falls_back_to_its_next_choice() -> None:
    e = explain(PatchAverage(), pictures(), "auto", 1)
    assert e.diagnostics["auto"]["method"] == "lrp_ah_ln"
    assert "libragrad" in e.diagnostics["auto"]["passed_over"]
    assert any("libragrad" in line for line in e.warnings)
    assert explain(Model(), pictures(), "auto", 1).warnings == []


class WithNoneModules(Model):
    """A model whose module lists contain None, as in timm and x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([None, None])
        self.others = nn.ModuleList([None, nn.Sequential(nn.Linear(2, 2))])


@pytest.mark.parametrize("method", ["lrp", "gae", "libragrad", "occlusion"])
def test_module_list_with_none_has_no_effect(method: str) -> None:
    actual, expected = (explain(m, pictures(), method, 1) for m in (WithNoneModules(), Model()))
    torch.testing.assert_close(actual.scores, expected.scores)


# -- distances and similarities ----------------------------------------------------------------------------------------
WIDTH, PLACES = 6, 3
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Comparison(nn.Module):
    """A model that compares a hidden vector with three fixed vectors by ``compare``."""

    def __init__(self, compare: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.centres = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(PLACES, WIDTH))
        self.bilinear, self.compare = nn.Bilinear(WIDTH, WIDTH, PLACES), compare
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(self, self.first(x))


def euclidean_distance(m: Any, h: Tensor) -> Tensor:
    return (h[:, None] - m.centres).norm(dim=-1)


def weighted_products(layer: nn.Bilinear, a: Tensor, b: Tensor) -> Tensor:
    rows = F.linear(a, layer.weight.transpose(1, 2).flatten(0, 1)).unflatten(-1, (PLACES, WIDTH))
    return (rows @ b[..., None])[..., 0] + layer.bias


FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "cosine_similarity": (
        lambda m, h: F.cosine_similarity(h[:, None], m.centres, -1),
        lambda m, h: (F.normalize(h[:, None].expand(-1, PLACES, -1), dim=-1) * F.normalize(m.centres, dim=-1)).sum(-1),
    ),
    "cosine_similarity of two branches": (
        lambda m, h: F.cosine_similarity(h[:, None] + m.centres, h.tanh()[:, None], -1),
        lambda m, h: (F.normalize(h[:, None] + m.centres, dim=-1) * F.normalize(h.tanh()[:, None], dim=-1)).sum(-1),
    ),
    "cdist": (lambda m, h: torch.cdist(h, m.centres), euclidean_distance),
    "cdist of many": (lambda m, h: torch.cdist(h, m.centres.repeat(30, 1))[:, :PLACES], euclidean_distance),
    "cdist of a batch": (lambda m, h: torch.cdist(h[:, None], m.centres.expand(len(h), -1, -1))[:, 0], euclidean_distance),
    "cdist, p=1": (lambda m, h: torch.cdist(h, m.centres, 1), lambda m, h: (h[:, None] - m.centres).abs().sum(-1)),
    "bilinear": (lambda m, h: m.bilinear(h, h.tanh()), lambda m, h: weighted_products(m.bilinear, h, h.tanh())),
    "bilinear with a constant": (
        lambda m, h: m.bilinear(m.centres[0].expand_as(h), h), lambda m, h: weighted_products(m.bilinear, m.centres[0].expand_as(h), h),
    ),
    "pairwise_distance": (
        lambda m, h: F.pairwise_distance(h[:, None], m.centres, eps=0.0), euclidean_distance,
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "lrp", "transformer_attribution", "occlusion"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_function_has_the_scores_of_its_definition(name: str, method: str) -> None:
    """Or both are refused, and then the suggested methods apply."""
    called, written = (Comparison(compare) for compare in FUNCTIONS[name])
    try:
        expected = explain(written, X, method, 1).scores
    except WhyformerError as error:
        with pytest.raises(type(error)) as caught:
            explain(called, X, method, 1)
        others = [second for second in METHODS if re.search(rf"\b{second}\b", str(caught.value))]
        assert {"input_x_gradient", "occlusion"} <= {*others}
        for second in others:
            assert second == method or explain(called, X, second, 1).scores.any()
    else:
        torch.testing.assert_close(explain(called, X, method, 1).scores, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["cosine_similarity", F.pairwise_distance])
def test_rule_for_an_operation_without_need_raises(rule: Any) -> None:
    model = Comparison(FUNCTIONS["cosine_similarity"][0])
    with pytest.raises(InputError, match="leave it out"):
        explain(model, X, "lrp", 1, rules={rule: "gelu"})
    assert explain(model, X, "lrp", 1).scores.any()


# -- inference mode and meta device --------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["input_x_gradient", "integrated_gradients", "lrp", "gae", "rollout", "occlusion", "decompx"])
@pytest.mark.parametrize(("in_construction", "in_explanation"), [(True, False), (False, True), (True, True)])
def test_inference_mode_has_no_effect(in_construction: bool, in_explanation: bool, method: str) -> None:
    """During the construction of a model and during its explanation."""
    inputs = text()

    def bert() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
        return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=VOCABULARY, **sizes)).eval()

    expected = explain(bert(), inputs, method, 1).scores
    with torch.inference_mode(in_construction):
        model = bert()
    with torch.inference_mode(in_explanation):
        actual = explain(model, inputs, method, 1).scores
    torch.testing.assert_close(actual, expected)


def test_model_on_meta_device_raises_and_loaded_weights_work() -> None:
    model, inputs = build("bert")
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    with pytest.raises(ModelError, match="meta device"):
        explain(empty, inputs, "input_x_gradient", 1)
    loaded = type(model)(model.config).double().eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(explain(loaded, inputs, "input_x_gradient", 1).scores, explain(model, inputs, "input_x_gradient", 1).scores)


# -- baselines -----------------------------------------------------------------------------------------------------------
class ReadsIntegers(nn.Module):
    """A linear function of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, counts: Tensor) -> Tensor:
        return self.layer(counts.to(self.layer.weight.dtype))


@pytest.mark.parametrize("method", ["input_x_gradient", "auto"])
def test_integers_that_are_not_looked_up_are_explained_as_numbers(method: str) -> None:
    model, counts = ReadsIntegers().eval(), torch.tensor([[3, 0, 7, 1, 2], [1, 1, 4, 0, 9]])
    with pytest.raises(WhyformerError, match=re.escape("counts.float()")):
        explain(model, counts, method, 1)
    e = explain(model, counts.float(), method, 1)
    torch.testing.assert_close(e.scores.double(), counts * model.layer.weight[1].detach())


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_baseline_without_tokenizer_is_a_token_id(method: str) -> None:
    model, inputs = build("bert")
    with pytest.raises(InputError, match="baseline="):
        explain(model, inputs, method, 1, baseline="mask")
    actual = explain(model, inputs, method, 1, baseline=7)
    assert actual.scores.any() and actual.settings["baseline"] == 7
    second = explain(model, inputs, method, 1, baseline=8)
    assert not torch.allclose(actual.scores, second.scores)
    for wrong in (VOCABULARY, -1, True, 1.5):
        with pytest.raises(InputError):
            explain(model, inputs, method, 1, baseline=wrong)


def test_occlusion_by_token_id_equals_manual_occlusion() -> None:
    model, inputs = build("bert")
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    actual = explain(model, inputs, "occlusion", 1, baseline=7).scores
    with torch.no_grad():
        clean = model(**inputs).logits[:, 1]
        for position in range(ids.shape[1]):
            changed = ids.clone()
            changed[:, position] = 7
            decrease = clean - model(input_ids=changed, attention_mask=inputs["attention_mask"]).logits[:, 1]
            torch.testing.assert_close(actual[:, position], decrease * mask[:, position])


# -- completeness of integrated gradients ----------------------------------------------------------------------------------
class MeanFunction(nn.Module):
    """A function of the mean of the pixels, which can be hard to integrate from zeros to the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.unused = function, nn.Linear(1, 1)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        value = self.function(x.flatten(1).mean(1))
        return torch.stack([value, -value], 1)


PIXELS = 0.8 + 0.4 * torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("function", "steps"), [
    (lambda t: (50 * t - 20).tanh(), 20), (lambda t: t / (t * t + 1e-6).sqrt(), 50),
], ids=["a wave", "a norm of zeros"])  # fmt: skip
def test_more_steps_are_suggested_where_they_help(function: Callable[[Tensor], Tensor], steps: int) -> None:
    few = explain(MeanFunction(function), PIXELS, "integrated_gradients", 0, steps=steps)
    assert any("set more steps" in line for line in few.warnings)
    assert explain(MeanFunction(function), PIXELS, "integrated_gradients", 0, steps=4 * steps).warnings == []


@pytest.mark.part
@pytest.mark.parametrize("function", [
    lambda t: (t > 0.5).to(t) * 3 + t, lambda t: torch.round(4 * t) + 0.1 * t, lambda t: torch.where(t < 1e-9, -t, 5 + t),
], ids=["a jump", "steps", "a jump at the baseline"])  # fmt: skip
@pytest.mark.parametrize("steps", [10, 50, 1000])
def test_other_methods_are_suggested_where_more_steps_do_not_help(function: Callable[[Tensor], Tensor], steps: int) -> None:
    model = MeanFunction(function)
    actual = explain(model, PIXELS, "integrated_gradients", 0, steps=steps)
    (warning,) = actual.warnings
    assert "set more steps" not in warning
    others = [second for second in METHODS if re.search(rf"\b{second}\b", warning)]
    assert others
    for second in others:
        assert explain(model, PIXELS, second, 0).warnings == []
    assert "another baseline" in warning
    assert explain(model, PIXELS, "integrated_gradients", 0, steps=steps, baseline="mean").warnings == []


@pytest.mark.parametrize("composite", ["ah_ln", "attnlrp", "libra"])
def test_integrated_multipliers_have_no_completeness_warning(composite: str) -> None:
    model, inputs = build("bert")
    actual = explain(model, inputs, "integrated_gradients", 1, composite=composite, steps=4)
    assert not any("add up" in line for line in actual.warnings)
    assert "completeness" not in actual.diagnostics


# -- models that take one sample at a time ---------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad", "occlusion", "value_zeroing", "decompx", "attnlrp", "lrp"])
def test_classifier_without_padding_token_runs_copies_one_by_one(method: str) -> None:
    """Transformers refuses batches of such a model."""
    model, inputs = build("llama")
    single = {name: value[:1] for name, value in inputs.items()}
    settings = {"baseline": 7} if method == "occlusion" else {"samples": 3} if method == "smoothgrad" else {}
    expected = explain(model, single, method, 1, **settings).scores
    alone = copy.deepcopy(model)
    alone.config.pad_token_id = None
    with pytest.raises(ValueError, match="batch"):
        alone(**inputs)
    tolerances = {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}  # rotary embeddings of Llama are float32
    torch.testing.assert_close(explain(alone, single, method, 1, **settings).scores, expected, **tolerances)
    if "batch_size" in METHODS[method].settings:
        torch.testing.assert_close(explain(alone, single, method, 1, **settings, batch_size=1).scores, expected, **tolerances)


# -- encoder-decoders ------------------------------------------------------------------------------------------------------
def seq2seq(name: str, words: int = VOCABULARY) -> nn.Module:
    torch.manual_seed(0)
    if name == "t5":
        sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=words, **sizes)).eval()
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=words, **sizes, **more)).eval()


IDS = torch.randint(4, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))


def seq2seq_inputs(name: str, given: bool) -> dict[str, Tensor]:
    """Inputs of a model; BART derives its decoder tokens from the text."""
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if given or name == "t5" else {})


@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad", "input_x_gradient", "occlusion"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoder_with_given_or_derived_decoder_tokens(name: str, given: bool, method: str) -> None:
    model, inputs = seq2seq(name), seq2seq_inputs(name, given)
    settings = {"integrated_gradients": {"steps": 4}, "smoothgrad": {"samples": 3}, "occlusion": {"baseline": 5}}.get(method, {})
    e = explain(model, inputs, method, 9, **settings)
    assert all(e.part(part).scores.isfinite().all() and e.part(part).scores.any() for part in e.inputs)


@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoded_texts_of_encoder_decoder(name: str, method: str) -> None:
    words = load("bundled:sst2").processor
    model = seq2seq(name, len(words))
    encoded = dict(words(["a fine film", "rather dull"], return_tensors="pt", padding=True))
    encoded.pop("token_type_ids", None)
    if name == "t5":
        encoded["decoder_input_ids"] = encoded["input_ids"][:, :3]
    few = {"steps": 4} if method == "integrated_gradients" else {"samples": 3}
    whole = explain(model, encoded, method, 9, processor=words, **few)
    assert all(whole.part(part).scores.any() for part in whole.inputs)
    if name == "bart":
        texts = explain(model, ["a fine film", "rather dull"], method, 9, processor=words, **few)
        for part in whole.inputs:
            torch.testing.assert_close(texts.part(part).scores, whole.part(part).scores)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_attention_maps_of_encoder_decoder_raise_with_applicable_methods(name: str) -> None:
    model, inputs = seq2seq(name), seq2seq_inputs(name, True)
    with pytest.raises(MethodNotApplicable) as caught:
        whyformer.attention_maps(model, inputs)
    assert "raw_attention" in str(caught.value)
    assert explain(model, inputs, "raw_attention", 9, aggregation={"layers": 0, "heads": 1}).scores.any()
    for second in suggested_methods(caught.value):
        assert explain(model, inputs, second, 9).scores.isfinite().all()


# -- models by name --------------------------------------------------------------------------------------------------------
BY_NAME: dict[str, Callable[[], nn.Module]] = {
    "t5": lambda: seq2seq("t5"),
    "bart": lambda: seq2seq("bart"),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)),
    "two heads": lambda: hf.BertForPreTraining(hf.BertConfig(vocab_size=VOCABULARY, **SMALL)),
    "multiple choice": lambda: hf.BertForMultipleChoice(hf.BertConfig(vocab_size=VOCABULARY, **SMALL)),
    "next sentence": lambda: hf.BertForNextSentencePrediction(hf.BertConfig(vocab_size=VOCABULARY, **SMALL)),
    "two towers as a classifier": lambda: hf.CLIPForImageClassification(
        hf.CLIPConfig(vision_config={"image_size": 32, "patch_size": 8, **SMALL}, text_config={"vocab_size": VOCABULARY, **SMALL}, num_labels=3)
    ),
}  # fmt: skip
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def inputs_and_target(name: str) -> tuple[Any, Any]:
    """(inputs, target) of a model of :data:`BY_NAME`."""
    if name == "two towers as a classifier":
        return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), 1
    if name == "multiple choice":
        return {"input_ids": torch.stack([IDS, IDS.flip(1), IDS.roll(1, 1)], 1)}, 1
    if name in ("t5", "bart"):
        return seq2seq_inputs(name, True), 9
    return {"input_ids": IDS}, targets.Token(2, 9) if name == "two heads" else 1


@pytest.mark.parametrize("name", BY_NAME)
def test_saved_model_folder_is_explained(name: str, tmp_path: Any) -> None:
    """The class is the architecture of the config; without a processor the inputs are tensors."""
    torch.manual_seed(0)
    model, (inputs, target) = BY_NAME[name]().eval(), inputs_and_target(name)
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert type(loaded.model) is type(model) and loaded.processor is None
    actual = explain(str(tmp_path), inputs, "input_x_gradient", target).scores
    torch.testing.assert_close(actual, explain(model, inputs, "input_x_gradient", target).scores)
    if not isinstance(inputs, Tensor):
        for source in (str(tmp_path), loaded.model):
            with pytest.raises(InputError, match="tokenizer"):
                explain(source, "a fine film", "input_x_gradient", target)


def test_image_classifier_with_clip_config_needs_no_tokenizer(tmp_path: Path) -> None:
    """Its config is that of CLIP, whose processor has a tokenizer."""
    from PIL import Image

    torch.manual_seed(0)
    model = BY_NAME["two towers as a classifier"]().eval()
    image_processor = (hf.CLIPImageProcessorPil if hasattr(hf, "CLIPImageProcessorPil") else hf.CLIPImageProcessor)(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model.save_pretrained(tmp_path)
    image_processor.save_pretrained(tmp_path)
    picture = Image.effect_noise((40, 36), 60).convert("RGB")
    actual = explain(str(tmp_path), picture, "input_x_gradient", 1).scores
    torch.testing.assert_close(actual, explain(model, picture, "input_x_gradient", 1, processor=image_processor).scores)


@pytest.mark.parametrize("name", ["t5", "gpt2", "multiple choice"])
def test_folder_without_head_weights_raises(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = BY_NAME[name]()
    base = model.base_model if name != "t5" else hf.T5Model(model.config)
    base.save_pretrained(tmp_path)
    with pytest.raises(LoadError):
        load(str(tmp_path))


# -- remedies of errors ----------------------------------------------------------------------------------------------------
Call = Callable[[], Any]
REMEDIES: dict[str, Callable[[Path], tuple[Call, list[Call]]]] = {}


def remedy(case: Callable[[Path], tuple[Call, list[Call]]]) -> Callable[[Path], tuple[Call, list[Call]]]:
    """Register a function that returns (a refused call, the calls that its error suggests)."""
    REMEDIES[case.__name__.replace("_", " ")] = case
    return case


def regression() -> nn.Module:
    torch.manual_seed(0)
    config = hf.BertConfig(vocab_size=VOCABULARY, num_labels=1, problem_type="regression", **SMALL)
    return hf.BertForSequenceClassification(config).eval()


@remedy
def the_probability_of_a_number(_: Path) -> tuple[Call, list[Call]]:
    model, ask = regression(), targets.Probability
    return lambda: explain(model, text(), "input_x_gradient", ask(0)), [
        lambda: explain(model, text(), "input_x_gradient", 0),
        lambda: explain(model, text(), "input_x_gradient", ask(0, multi_label=True)),
    ]


@remedy
def a_token_by_its_text_without_a_tokenizer(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("gpt2_lm")
    words = load("bundled:sst2").processor
    return lambda: explain(model, inputs, "lrp_ah_ln", targets.Token(-1, "film")), [
        lambda: explain(model, inputs, "lrp_ah_ln", targets.Token(-1, 5)),
        lambda: explain(model, {"input_ids": inputs["input_ids"][:1]}, "lrp_ah_ln", targets.Token(-1, "."), processor=words),
    ]


@remedy
def a_flow_over_too_many_tokens(_: Path) -> tuple[Call, list[Call]]:
    pytest.importorskip("scipy")
    model, inputs = build("bert")
    return lambda: explain(model, inputs, "attention_flow", 1, limit=5), [
        lambda: explain(model, inputs, "attention_flow", 1, limit=500), lambda: explain(model, inputs, "rollout", 1),
    ]  # fmt: skip


@remedy
def blocks_of_several_stages(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("hf_swin")
    return lambda: explain(model, inputs, "gradcam", 1, blocks=[0, -1]), [
        lambda: explain(model, inputs, "gradcam", 1, blocks=[0, 1]), lambda: explain(model, inputs, "gradcam", 1, blocks=-1),
    ]  # fmt: skip


@remedy
def checkpoints_where_nothing_goes_back(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    others = [m for m, row in METHODS.items() if row.checkpoint and m != "auto"]
    return lambda: explain(model, inputs, "gae", 1, checkpoint=True), [
        lambda: explain(model, inputs, "gae", 1), *(lambda m=m: explain(model, inputs, m, 1, checkpoint=True) for m in others),
    ]  # fmt: skip


@remedy
def a_device_for_a_module(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    return lambda: explain(model, inputs, "rollout", 1, device="cpu"), [lambda: explain(model.to("cpu"), inputs, "rollout", 1)]


@remedy
def samples_of_unlike_keys(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    one, two = (dict(rows(inputs, i)) for i in range(2))
    del two["attention_mask"]
    return lambda: explain(model, [one, two], "rollout", 1), [lambda: explain(model, [one, dict(rows(inputs, 1))], "rollout", 1)]


@remedy
def a_folder_of_pictures(folder: Path) -> tuple[Call, list[Call]]:
    from PIL import Image

    for name in "ab":
        Image.effect_noise((40, 40), 60).convert("RGB").save(folder / f"{name}.png")

    def followed() -> Any:
        with pytest.raises(InputError) as caught:
            explain("bundled:digits", folder, "rollout")
        return explain("bundled:digits", eval(re.search(r"sorted\(.*\)", str(caught.value))[0]), "rollout")  # type: ignore[index]

    return lambda: explain("bundled:digits", folder, "rollout"), [followed]


@remedy
def training_mode(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    model.config.hidden_dropout_prob = 0.1
    model.bert.embeddings.dropout.p = 0.1
    return lambda: explain(model.train(), inputs, "rollout", 1), [lambda: explain(model.eval(), inputs, "rollout", 1)]


@remedy
def black_that_is_unknown(_: Path) -> tuple[Call, list[Call]]:
    model, x = build("hf_vit")
    processor = hf.ViTImageProcessorPil(size={"height": 32, "width": 32}) if hasattr(hf, "ViTImageProcessorPil") else hf.ViTImageProcessor(size={"height": 32, "width": 32})
    ask = {"baseline": "black", "patch": 16}
    return lambda: explain(model, x, "occlusion", 1, **ask), [
        lambda: explain(model, x, "occlusion", 1, processor=processor, **ask), lambda: explain(model, x, "occlusion", 1, baseline="mean", patch=16),
    ]  # fmt: skip


@remedy
def nothing_that_stays(_: Path) -> tuple[Call, list[Call]]:
    model, _inputs = build("llama")
    one = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    return lambda: explain(model, one, "occlusion", 1, baseline="delete"), [lambda: explain(model, one, "occlusion", 1, baseline=7)]


@remedy
def tokens_that_would_move(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("gpt2_lm")
    ask = lambda **baseline: explain(model, inputs, "occlusion", targets.Token(2, 5), **baseline)  # noqa: E731
    return lambda: ask(baseline="delete"), [lambda: ask(baseline=7)]


@remedy
def a_token_out_of_one_of_several_texts(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = BY_NAME["multiple choice"]().eval(), inputs_and_target("multiple choice")[0]
    return lambda: explain(model, inputs, "occlusion", 1, baseline="delete"), [lambda: explain(model, inputs, "occlusion", 1, baseline=7)]


@remedy
def trust_in_an_explanation_without_its_inputs(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    e = explain(model, inputs, "lrp", 1)
    return lambda: whyformer.trust(e, model), [lambda: whyformer.trust(e, model, inputs=inputs, steps=2, seeds=[0], baseline=7)]


@remedy
def a_unit_of_a_model_of_unknown_size(_: Path) -> tuple[Call, list[Call]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    ask = {"steps": 2}
    return lambda: whyformer.maximize_activation(model, 1, **ask), [lambda: whyformer.maximize_activation(model, 1, shape=(3, 16, 16), **ask)]


@remedy
def a_prompt_in_words_without_a_tokenizer(_: Path) -> tuple[Call, list[Call]]:
    model, _inputs = build("gpt2_lm")
    return lambda: whyformer.explain_generation(model, "a film", max_new_tokens=2), [lambda: whyformer.explain_generation(model, [5, 9, 7], max_new_tokens=2)]


@remedy
def messages_without_a_template(_: Path) -> tuple[Call, list[Call]]:
    model, _inputs = build("llama_lm")
    words = copy.deepcopy(load("bundled:sst2").processor)
    words.chat_template = None
    model.resize_token_embeddings(len(words))
    chat = [{"role": "user", "content": "a fine film"}]
    ask = lambda prompt: whyformer.explain_generation(model, prompt, processor=words, max_new_tokens=2)  # noqa: E731
    return lambda: ask(chat), [lambda: ask("a fine film")]


@remedy
def an_answer_of_a_decoder_without_a_first_token(_: Path) -> tuple[Call, list[Call]]:
    model = seq2seq("t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None

    def set_it() -> Any:
        model.config.decoder_start_token_id = 0
        return whyformer.explain_generation(model, [5, 9, 7], [4, 8])

    return lambda: whyformer.explain_generation(model, [5, 9, 7], [4, 8]), [set_it]


@remedy
def a_model_that_writes_nothing(_: Path) -> tuple[Call, list[Call]]:
    torch.manual_seed(0)
    model = hf.BertLMHeadModel(hf.BertConfig(vocab_size=VOCABULARY, is_decoder=True, **SMALL)).eval()
    model.can_generate = lambda: False
    return lambda: whyformer.explain_generation(model, [5, 9, 7]), [
        lambda: whyformer.explain_generation(model, [5, 9, 7], [4, 8]),
        lambda: explain(model, {"input_ids": torch.tensor([[5, 9, 7]])}, "lrp_ah_ln", target=targets.Token(-1, 4)),
    ]


@remedy
def a_classifier_that_writes_nothing(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    return lambda: whyformer.explain_generation(model, [5, 9, 7]), [lambda: explain(model, inputs, "lrp_ah_ln")]


@remedy
def a_decoder_that_is_given_no_tokens(_: Path) -> tuple[Call, list[Call]]:
    model = seq2seq("t5")
    start = {"input_ids": IDS, "decoder_input_ids": torch.full((2, 1), model.config.decoder_start_token_id)}
    return lambda: explain(model, {"input_ids": IDS}, "input_x_gradient"), [
        lambda: explain(model, start, "input_x_gradient"), lambda: whyformer.explain_generation(model, IDS[0].tolist(), max_new_tokens=2),
    ]  # fmt: skip


@remedy
def a_metric_without_a_tokenizer(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    e = explain(model, inputs, "lrp", 1)
    ask = lambda **baseline: whyformer.evaluate(model, inputs, e, "deletion", **baseline)  # noqa: E731
    return ask, [lambda: ask(baseline=7)]


@remedy
def random_maps_without_a_seed(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    e = explain(model, inputs, "lrp", 1)
    ask = lambda seeds: whyformer.trust(e, model, inputs=inputs, steps=2, baseline=7, seeds=seeds)  # noqa: E731
    return lambda: ask([]), [lambda: ask([0])]


@remedy
def a_similarity_of_pictures_with_more_texts(_: Path) -> tuple[Call, list[Call]]:
    from test_output_targets import MODELS

    model, inputs = MODELS["clip"]()
    more = {name: torch.cat([value, value[:1]]) if value.dim() == 2 else value for name, value in inputs.items()}
    return lambda: explain(model, more, "input_x_gradient", targets.Similarity()), [
        lambda: explain(model, more, "input_x_gradient", 1), lambda: explain(model, inputs, "input_x_gradient", targets.Similarity()),
    ]  # fmt: skip


@remedy
def maps_of_every_class_that_are_all_the_same(_: Path) -> tuple[Call, list[Call]]:
    model, inputs = build("bert")
    ask = lambda which=("rollout", "saliency"), **more: whyformer.arbitrate(  # noqa: E731
        model, inputs, list(which), **{"mode": "prime", "labels": 5, "baseline": 7, **more}
    )
    return ask, [lambda: ask(labels=2), lambda: ask(mode="label"), lambda: ask(which=("saliency", "input_x_gradient"))]


@remedy
def one_sample_of_vectors(_: Path) -> tuple[Call, list[Call]]:
    class PerSampleRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(WIDTH, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.softmax(-2).mean(-2, keepdim=x.dim() == 2)).expand(len(x), -1)

    model = PerSampleRows().eval()
    return lambda: explain(model, X, "input_x_gradient", 1), [lambda: explain(model, X[None], "input_x_gradient", 1)]


@remedy
def tokens_before_samples(_: Path) -> tuple[Call, list[Call]]:
    class TokensFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(WIDTH, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.tanh().mean(0))

    class SamplesFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TokensFirst()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1))

    x = torch.randn(5, 2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return lambda: explain(TokensFirst().eval(), x, "input_x_gradient", 1), [lambda: explain(SamplesFirst().eval(), x.transpose(0, 1), "input_x_gradient", 1)]


@remedy
def relevance_at_an_operation_without_a_rule(_: Path) -> tuple[Call, list[Call]]:
    class LogGamma(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.lgamma()

    model, alone = Comparison(lambda m, h: h.lgamma()), Comparison(lambda m, h: LogGamma()(h))
    return lambda: explain(model, X, "lrp", 1), [
        lambda: explain(model, X, "input_x_gradient", 1), lambda: explain(model, X, "occlusion", 1), lambda: explain(alone, X, "lrp", 1, rules={LogGamma: "gelu"}),
    ]  # fmt: skip


@remedy
def dropout_that_is_always_on(_: Path) -> tuple[Call, list[Call]]:
    drawn = Comparison(lambda m, h: (torch.bernoulli(h.sigmoid()) * h)[:, :PLACES])
    return lambda: explain(drawn, X, "lrp", 1), [lambda: explain(Comparison(lambda m, h: h[:, :PLACES]), X, "lrp", 1)]


@remedy
def maps_that_take_too_much_memory(_: Path) -> tuple[Call, list[Call]]:
    import whyformer.attention as attention

    model, inputs = build("bert")

    def refused() -> Any:
        before, attention.MOST_VALUES = attention.MOST_VALUES, 100
        try:
            return whyformer.attention_maps(model, inputs)
        finally:
            attention.MOST_VALUES = before

    return refused, [lambda: explain(model, inputs, "raw_attention", aggregation={"layers": 1, "heads": 0})]


RATE = 16_000


def tone(seconds: float = 1.0) -> np.ndarray:
    return np.sin(np.arange(round(seconds * RATE)) * 0.17).astype(np.float32)


@remedy
def a_sound_of_another_rate(_: Path) -> tuple[Call, list[Call]]:
    signal = pytest.importorskip("scipy.signal")
    extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    torch.manual_seed(0)
    model = ConvolutionModel().eval()
    ask = lambda array, rate: explain(model, {"array": array, "sampling_rate": rate}, "saliency", 1, processor=extractor)  # noqa: E731
    return lambda: ask(tone(), RATE // 2), [lambda: ask(signal.resample(tone(), 2 * len(tone())).astype(np.float32), RATE)]


class ConvolutionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, 4, 16, 16), nn.Linear(4, 3)

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.first(input_values[:, None]).relu().mean(-1))


@pytest.mark.parametrize("name", REMEDIES)
def test_remedy_of_an_error_works(name: str, tmp_path: Path) -> None:
    refused, suggested = REMEDIES[name](tmp_path)
    with pytest.raises(WhyformerError):
        refused()
    for call in suggested:
        result = call()
        assert result is not None and (not isinstance(result, whyformer.Explanation) or bool(result.scores.any()))
