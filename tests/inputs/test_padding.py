"""A list is explained as its samples are alone, also by models for which padding changes the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import nn
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

import whyformer
from processors import tokenizer
from whyformer.benchmarks.batches import read_batch
from whyformer.benchmarks.configurations import parse_methods
from whyformer.benchmarks.study import Study
from whyformer.datasets.samples import Text
from whyformer.errors import InputError, ModelError
from whyformer.methods import padding
from whyformer.targets import Query
from zoo import randomise

TEXTS = ["what is", "what is here on the left and is", "the left on"]
SIZES = {"vocab_size": 120, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "pad_token_id": 0}


def words(side: str, mask: bool = True) -> Any:
    reads = tokenizer()
    reads.padding_side, reads.model_input_names = side, ["input_ids", "attention_mask"][: 1 + mask]
    return reads


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=120, n_embd=24, n_layer=2, n_head=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return hf.GPT2ForSequenceClassification(config)


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES))


def tagger() -> nn.Module:
    return hf.BertForTokenClassification(hf.BertConfig(**SIZES))


def fnet() -> nn.Module:
    return hf.FNetForSequenceClassification(hf.FNetConfig(**SIZES))


def convbert() -> nn.Module:
    return hf.ConvBertForSequenceClassification(hf.ConvBertConfig(**{**SIZES, "num_attention_heads": 4}, embedding_size=24))


def bart() -> nn.Module:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return hf.BartModel(hf.BartConfig(vocab_size=120, d_model=24, encoder_ffn_dim=48, decoder_ffn_dim=48, **layers, **tokens))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=3))


def canine() -> nn.Module:
    rates = {"local_transformer_stride": 8, "downsampling_rate": 4, "upsampling_kernel_size": 4}
    return hf.CanineForSequenceClassification(hf.CanineConfig(**SIZES, **rates, max_position_embeddings=64))


CASES: dict[str, tuple[Callable[[], nn.Module], str, Any, bool]] = {
    "gpt2 left": (gpt2, "left", 1, True), "gpt2 right": (gpt2, "right", 1, False),
    "bert left": (bert, "left", 1, True), "bert right": (bert, "right", 1, False),
    "tagger left": (tagger, "left", whyformer.targets.Token(1, 1), True),
    "tagger right": (tagger, "right", whyformer.targets.Token(1, 1), False),
    "fnet right": (fnet, "right", 1, True), "convbert right": (convbert, "right", 1, True),
    "bart left": (bart, "left", lambda output: output.last_hidden_state[:, -1, 3], True),
    "llama left": (llama, "left", 5, False),
}  # fmt: skip


def same(e: whyformer.Explanation, alone: whyformer.Explanation, left: bool) -> None:
    """The scores are those of the sample alone, with zeros at padding."""
    count = alone.scores.shape[1]
    own = e.scores[0, -count:] if left else e.scores[0, :count]
    assert torch.allclose(e.logits, alone.logits, rtol=1e-5, atol=1e-6) and e.target_names == alone.target_names
    assert torch.allclose(own, alone.scores[0], rtol=1e-4, atol=1e-6 * float(alone.scores.abs().max()))
    assert torch.isclose(e.scores.abs().sum(), alone.scores.abs().sum(), rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_texts_of_a_list_are_explained_as_alone(name: str) -> None:
    build, side, target, separate = CASES[name]
    model, reads = randomise(build()).double(), words(side, "fnet" not in name)
    ready = whyformer.Explainer(model, reads).prepare(TEXTS)
    assert len(ready.singles) == (len(TEXTS) if separate else 0)
    alone = [whyformer.explain(model, text, "input_x_gradient", target, reads) for text in TEXTS]
    for one, single in zip(whyformer.explain(model, TEXTS, "input_x_gradient", target, reads), alone, strict=True):
        same(one, single, side == "left")
    if target == 1:
        many = whyformer.explain_many(model, TEXTS, "input_x_gradient", [1], reads)
        for one, single in zip(many, alone, strict=True):
            assert one.tokens == single.tokens
            same(one, single, False)


def test_padding_may_change_the_prediction_of_one_text_and_not_of_another() -> None:
    model, reads = randomise(canine()), words("right")
    known = (TEXTS[1] + " " + TEXTS[1]).split()
    texts = [" ".join(known[:count]) for count in (10, 4, 14)]
    both = whyformer.explain(model, texts, "input_x_gradient", 1, reads)
    for one, text in zip(both, texts, strict=True):
        same(one, whyformer.explain(model, text, "input_x_gradient", 1, reads), False)


def test_pairs_and_lists_of_ids_are_explained_as_alone() -> None:
    model, reads = randomise(bert()).double(), words("left")
    pairs = {"text": TEXTS, "text_pair": TEXTS[::-1]}
    ids = [torch.tensor(reads(text)["input_ids"]) for text in TEXTS]
    for batch, singles in (
        ({"text": TEXTS[:2], "text_pair": ["on", "is"]}, [{"text": a, "text_pair": b} for a, b in zip(TEXTS[:2], ["on", "is"], strict=True)]),
        (pairs, [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]), (ids, [i[None] for i in ids]),
    ):  # fmt: skip
        for one, single in zip(whyformer.explain(model, batch, "saliency", 1, reads), singles, strict=True):
            same(one, whyformer.explain(model, single, "saliency", 1, reads), True)


def test_tensors_that_the_user_padded_stay_a_batch() -> None:
    model, reads = randomise(bert()).double(), words("left")
    given = dict(reads(TEXTS, padding=True, return_tensors="pt"))
    e = whyformer.explain(model, given, "saliency", 1, reads)
    assert torch.allclose(e.logits.double(), model(**given).logits)


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs, forward = randomise(llama()), [], padding.forward
    measure = lambda *given: runs.append(1) or forward(*given)  # noqa: E731
    monkeypatch.setattr(padding, "forward", measure)
    explainer = whyformer.Explainer(model, words("right"))
    explainer.prepare(["what is", "on the"])
    assert runs == []
    for _ in range(3):
        explainer.prepare(TEXTS)
    assert len(runs) == 4  # the most and the least padded text


@pytest.mark.parametrize("given", [TEXTS[0], TEXTS, {"text": TEXTS, "text_pair": TEXTS[::-1]}], ids=["one", "list", "pairs"])
def test_model_is_checked_and_inputs_are_read_once(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads, calls = randomise(bert()), words("left"), []
    check, read = whyformer.models.loading.refuse_unfit, whyformer.explaining.normalized
    for place in (whyformer.explaining, whyformer.explainer, whyformer.models.loading, whyformer.inputs.prepare):
        monkeypatch.setattr(place, "refuse_unfit", lambda model: calls.append("check") or check(model), raising=False)
        monkeypatch.setattr(place, "normalized", lambda *args: calls.append("read") or read(*args), raising=False)
    whyformer.explain(model, given, "saliency", 1, reads)
    assert sorted(calls) == ["check", "read"]


@pytest.mark.parametrize("work", ["explain", "prepare", "compare", "explain_generation", "explain_many", "record"])
def test_model_is_checked_each_time_an_explainer_is_used(work: str) -> None:
    model = randomise(llama())
    model.add_module("noise", nn.Dropout(0.5))
    explainer = whyformer.Explainer(model.eval(), words("right"))
    call = getattr(explainer, work, None) or (lambda text: getattr(whyformer, work)(explainer, text))
    model.train()
    with pytest.raises(ModelError, match="eval"):
        next(iter(call(TEXTS[0] if work != "explain_many" else TEXTS)))


@pytest.mark.parametrize("work", ["explain", "Explainer", "explain_many", "explain_generation", "record", "attention_maps", "compare", "maximize_activation"])
def test_model_in_training_mode_is_refused(work: str) -> None:
    model, reads = randomise(llama()).train(), words("right")
    model.add_module("noise", nn.Dropout(0.5).train())
    arguments = {"Explainer": (model,), "maximize_activation": (model, 0), "explain_many": (model, TEXTS)}.get(work, (model, TEXTS[0]))
    with pytest.raises(ModelError, match="eval"):
        result = getattr(whyformer, work)(*arguments, **({} if work == "maximize_activation" else {"processor": reads}))
        next(iter(result))


def test_work_on_a_batch_names_the_way_out() -> None:
    model, reads = randomise(bert()), words("left")
    with pytest.raises(InputError, match=r"record needs a batch.*padding.*pass one sample"):
        whyformer.record(model, TEXTS, reads)
    e = whyformer.explain(model, TEXTS, "saliency", 1, reads)
    whole = whyformer.evaluate(model, TEXTS, e, "deletion", reads, baseline="unk")
    alone = [whyformer.evaluate(model, t, whyformer.explain(model, t, "saliency", 1, reads), "deletion", reads, baseline="unk") for t in TEXTS]
    assert np.allclose(whole.values, [float(one) for one in alone], atol=1e-6)


@pytest.mark.parametrize("name", ["bert left", "gpt2 left", "fnet right", "convbert right"])
def test_trust_in_a_list_is_that_in_its_samples(name: str) -> None:
    (build, side, _, _), settings = CASES[name], {"steps": 4, "seeds": [0, 1], "baseline": "unk"}
    model, reads = randomise(build()).double(), words(side, "fnet" not in name)
    for given in (TEXTS, {"text": TEXTS, "text_pair": TEXTS[::-1]}):
        samples = TEXTS if given is TEXTS else [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
        whole = whyformer.trust(whyformer.explain(model, given, "saliency", [1, 0, 1], reads), model, given, reads, **settings)
        alone = [whyformer.trust(whyformer.explain(model, s, "saliency", c, reads), model, s, reads, **settings) for s, c in zip(samples, (1, 0, 1), strict=True)]
        assert len(whole) == 3 and whole.forwards == sum(t.forwards for t in alone)
        for i, one in enumerate(alone):
            assert (whole.followed[i], whole.verdict(i), whole.warnings[i], whole.better(i)) == (one.followed[0], one.verdict(), one.warnings[0], one.better())
            assert np.allclose(whole.curves[i], one.curves[0], atol=1e-9) and np.allclose(whole.random[:, i], one.random[:, 0], atol=1e-9)
        json.dumps(whole.to_dict(), allow_nan=False)


@pytest.mark.parametrize("mode", ["instance", "prime", "class"])
@pytest.mark.parametrize("name", ["bert left", "fnet right"])
def test_arbitration_of_a_list_measures_its_samples_alone(name: str, mode: str) -> None:
    build, side, _, _ = CASES[name]
    model, reads = randomise(build()).double(), words(side, "fnet" not in name)
    given = whyformer.explain(model, TEXTS, "saliency", [1, 0, 1], reads)
    candidates = ["input_x_gradient", given, ("occlusion", {"baseline": "unk"})]
    whole = whyformer.arbitrate(model, TEXTS, candidates, mode=mode, processor=reads, target=[1, 0, 1], labels=1)
    for i, (text, target) in enumerate(zip(TEXTS, (1, 0, 1), strict=True)):
        own = ["input_x_gradient", whyformer.explain(model, text, "saliency", target, reads), candidates[2]]
        one = whyformer.arbitrate(model, text, own, mode=mode, processor=reads, target=target, labels=1)
        assert torch.allclose(whole.selection[:, i], one.selection[:, 0], atol=1e-9)
        assert torch.allclose(whole.heldout[:, i], one.heldout[:, 0], atol=1e-9)
        if mode != "class":
            assert torch.equal(whole.winners[i], one.winners[0])
            same(whole.explanations[i], one.explanations[0], False)
    assert whole.cost["clean"] == 3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("build", [convbert, fnet, bert])
def test_texts_of_a_benchmark_are_explained_as_alone(build: Callable[[], nn.Module], side: str) -> None:
    """A text whose prediction would change by padding, as on the left of a model with learned positions, is explained alone."""
    model, reads = randomise(build()).double(), words(side)
    (configuration,) = parse_methods("input_x_gradient", {})

    def batch(*numbers: int) -> Any:
        samples = [Text(id=str(i), text=TEXTS[i]) for i in numbers]
        return read_batch(Study(model, reads, "text", samples, [configuration], {"longest": None}), samples)

    whole = batch(0, 1, 2)
    assert bool(whole.ready.singles) == (build is not bert or side == "left")
    removed = [np.arange(len(e.ids)) == 1 for e in whole.encoded]
    without = whole.run((i, removed[i], "delete") for i in range(3))
    for i, map_ in enumerate(whole.scores(configuration, [1, 0, 1])):
        alone = batch(i)
        (expected,) = alone.scores(configuration, [[1, 0, 1][i]])
        assert np.allclose(whole.logits[i], alone.logits[0]) and np.allclose(map_, expected) and map_.any()
        assert np.allclose(without[i], alone.run([(0, removed[i], "delete")])[0])


def ear_and_model(norm: str, masked: bool, stable: bool = False) -> tuple[nn.Module, Any]:
    config = hf.Wav2Vec2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, conv_dim=(8, 8), conv_stride=(5, 4), num_labels=3,
        conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm=norm,
        do_stable_layer_norm=stable,
    )  # fmt: skip
    return randomise(hf.Wav2Vec2ForSequenceClassification(config)), hf.Wav2Vec2FeatureExtractor(return_attention_mask=masked)


def noise(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in lengths]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_sounds_of_a_list_are_explained_as_alone(norm: str, masked: bool) -> None:
    model, ear = ear_and_model(norm, masked)
    sounds = noise(700, 1100)
    both = whyformer.explain(model, sounds, "saliency", 1, ear)
    assert both.features.durations == [700 / 16000, 1100 / 16000]
    for one, sound in zip(both, sounds, strict=True):
        same(one, whyformer.explain(model, sound, "saliency", 1, ear), False)


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("method", ["auto", "gae", "rollout", "transformer_attribution", "gradcam", "attnlrp"])
def test_moments_of_masked_sounds_have_the_same_frames_as_alone(method: str, stable: bool) -> None:
    """A model that sets the rows of padding to 0 fills them with its convolution over positions; frames overlap."""
    model, ear = ear_and_model("layer", True, stable)
    model, lengths = model.double(), (700, 1100, 410)
    both = whyformer.explain(model, noise(*lengths), method, 1, ear)
    for one, sound in zip(both, noise(*lengths), strict=True):
        alone = whyformer.explain(model, sound, method, 1, ear)
        assert one.diagnostics.get("auto") == alone.diagnostics.get("auto")
        assert float(alone.scores.abs().sum()) > 0
        torch.testing.assert_close(one.scores[:, : len(sound)], alone.scores, rtol=1e-9, atol=1e-12)
        assert not one.scores[:, len(sound) :].any()


def test_padding_after_every_sound_changes_no_scores() -> None:
    model, ear = ear_and_model("layer", True)
    inputs = dict(ear(noise(700, 900), sampling_rate=16000, return_tensors="pt", padding=True))
    longer = {name: torch.nn.functional.pad(value, (0, 300)) for name, value in inputs.items()}
    expected, padded = (whyformer.explain(model.double(), given, "libragrad", 1).scores for given in (inputs, longer))
    torch.testing.assert_close(padded[:, :900], expected, rtol=1e-9, atol=1e-12)
    assert not padded[:, 900:].any()


def test_pictures_of_a_list_are_explained_as_alone() -> None:
    sizes = {"image_size": [48, 64], "patch_size": 16, "num_detection_tokens": 4}
    config = hf.YolosConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, num_labels=3, **sizes)
    model = randomise(hf.YolosForObjectDetection(config))
    processor = YolosImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 96})
    draws = np.random.default_rng(0)
    pictures = [Image.fromarray(draws.integers(0, 255, (*size, 3), np.uint8)) for size in ((60, 60), (60, 90), (90, 60))]
    for method in ("input_x_gradient", "gae"):
        both = whyformer.explain(model, pictures, method, Query(0, 1), processor)
        for one, picture in zip(both, pictures, strict=True):
            alone = whyformer.explain(model, picture, method, Query(0, 1), processor)
            assert torch.allclose(one.logits, alone.logits, atol=1e-6)
            assert torch.isclose(one.scores.sum(), alone.scores.sum(), rtol=1e-4, atol=1e-6)
            assert one.originals == [picture]


@pytest.mark.parametrize("modes", [("L", "RGB"), ("RGBA", "RGB"), ("LA", "L")])
def test_pictures_of_several_modes_and_sizes_are_explained_as_alone(modes: tuple[str, str]) -> None:
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8)
    model, processor = randomise(hf.ViTForImageClassification(config)), ViTImageProcessorPil(size={"height": 16, "width": 16})
    draws = np.random.default_rng(0)
    pictures = [
        Image.fromarray(draws.integers(0, 255, (*size, 4), np.uint8)).convert(mode)
        for size, mode in zip(((20, 12), (9, 30)), modes, strict=True)
    ]
    both = whyformer.explain(model, pictures, "input_x_gradient", 1, processor)
    for one, picture in zip(both, pictures, strict=True):
        alone = whyformer.explain(model, picture, "input_x_gradient", 1, processor)
        torch.testing.assert_close(one.scores, alone.scores)
