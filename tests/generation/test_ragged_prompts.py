"""Prompts with unequal numbers or shapes of images, which make no batch: one result that equals single explanations."""

from __future__ import annotations

import pickle
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import processors
import prompting
import whyformer
from prompting import square
from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.explanation.joining import joined
from whyformer.explanation.mosaic import spread
from whyformer.explanation.result import Explanation
from whyformer.inputs.prompts import separate_prompts
from whyformer.inputs.stacking import are_stackable
from whyformer.targets import LogProbability, Token

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
TARGET = Token(-1, LogProbability(7))
BUILT = {**processors.BUILT, **{n: m for n, m in prompting.BUILT.items() if n != "inkling2"}}  # float32


def picture(high: int, wide: int) -> Image.Image:
    return square((high, wide), (wide // 2, high // 8, wide // 2 + wide // 4, high // 8 + high // 4))


WIDE, TALL, EVEN = picture(40, 100), picture(100, 36), picture(64, 64)
CASES: dict[str, list[list[Image.Image]]] = {
    "unlike shapes": [[WIDE], [EVEN], [TALL]],
    "a picture more": [[WIDE, EVEN], [EVEN]],
    "none, one and two": [[], [EVEN], [WIDE, EVEN]],
}
WORDS = ["what is here", "what is on the left", "is the left"]


@cache
def built(name: str) -> tuple[Any, Any]:
    return BUILT[name]()


def prompt_of(words: str, pictures: list[Image.Image], processor: Any) -> str:
    return " and ".join([processor.image_token] * len(pictures)) + " " + words if pictures else words


@pytest.mark.part
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BUILT)
def test_ragged_prompts_equal_single_prompts(name: str, case: str) -> None:
    model, processor = built(name)
    pictures = CASES[case]
    texts = [prompt_of(w, images, processor) for w, images in zip(WORDS, pictures, strict=False)]
    for method in ("input_x_gradient", "rollout"):
        if (name, method) == ("qwen2_vl", "rollout") and case != "unlike shapes":
            continue  # its vision tower has maps of unequal sizes for unequal images, also in a single prompt
        e = whyformer.explain(model, {"text": texts, "images": pictures}, method, TARGET, processor)
        assert len(e) == len(texts) and set(e.inputs) - {"input_ids"} == {
            "pixel_values" if case == "unlike shapes" else f"pixel_values[{k}]" for k in range(max(map(len, pictures)))
        }
        for i, (text, images) in enumerate(zip(texts, pictures, strict=True)):
            alone = whyformer.explain(model, {"text": text, "images": images} if images else text, method, TARGET, processor)
            assert_equals_alone(name, e[i], alone)


def assert_equals_alone(name: str, e: Explanation, alone: Explanation) -> None:
    close = 1e-5 if name == "internvl" else 1e-10  # left padding, and rotary embeddings in float32
    assert torch.allclose(e.logits, alone.logits, atol=close)
    assert e.target_names == alone.target_names
    words, alone_words = e.part("input_ids"), alone.part("input_ids")
    assert words.tokens is not None and alone_words.tokens is not None
    real = [k for k, t in enumerate(words.tokens[0]) if t != "<pad>"]
    assert [words.tokens[0][k] for k in real] == alone_words.tokens[0]
    assert torch.allclose(words.scores[0][real], alone_words.scores[0], atol=close * float(alone_words.scores.abs().max()))
    image_names = [n for n in e.inputs if n != "input_ids"]
    alone_names = [n for n in alone.inputs if n != "input_ids"]
    for k, n in enumerate(image_names):
        part = e.part(n)
        if k >= len(alone_names):
            assert not bool(part.scores.any()) and "this prompt does not have this picture" in part.diagnostics["input"][0]
            continue
        alone_part = alone.part(alone_names[k])
        assert part.geometry == alone_part.geometry and part.originals is not None and alone_part.originals is not None
        assert part.originals[0].tobytes() == alone_part.originals[0].tobytes()
        expected = spread(alone_part._maps()[0], *part._maps().shape[1:])
        assert torch.allclose(part._maps()[0].double(), expected.double(), atol=close * float(expected.abs().max()))


def test_targets_per_prompt() -> None:
    """Lists of targets have one target per prompt."""
    model, processor = built("gemma3")
    texts, pictures = ["what is here", "is the left", "what is"], [[EVEN], [WIDE], [EVEN]]
    inputs = {"text": texts, "images": pictures}
    for target in ([5, 6, 7], Token(-1, [5, 6, 7]), [Token(-1, LogProbability(i)) for i in (5, 6, 7)]):
        e = whyformer.explain(model, inputs, "saliency", target, processor)
        assert e.target.tolist() == [5, 6, 7]
        for i, token in enumerate((5, 6, 7)):
            kind: Any = target[i] if isinstance(target, list) else Token(-1, token)
            alone = whyformer.explain(model, {"text": texts[i], "images": pictures[i]}, "saliency", kind, processor)
            assert_equals_alone("gemma3", e[i], alone)
    with pytest.raises(InputError, match="4 targets for 3 samples"):
        whyformer.explain(model, inputs, "saliency", [5, 6, 7, 8], processor)


def test_ragged_prompts_are_compared_and_saved(tmp_path: Any) -> None:
    model, processor = built("gemma3")
    inputs = {"text": ["what is here", "is the left"], "images": [[EVEN], [WIDE, EVEN]]}
    result = whyformer.compare(model, inputs, ["saliency", "input_x_gradient"], processor=processor)
    assert [e.method for e in result.explanations] == ["saliency", "input_x_gradient"] and not result.refusals
    e = result.explanations[1]
    loaded = Explanation.load(e.save(tmp_path / "e.safetensors"))
    assert all(torch.equal(loaded.part(n).scores, e.part(n).scores) for n in e.inputs)
    likely = whyformer.compare(model, inputs, ["saliency"], processor=processor, likeliest=2)
    assert [e.target.tolist() for e in likely.explanations] == e.logits.argsort(descending=True, stable=True)[:, :2].T.tolist()
    with pytest.raises(InputError, match="one sample"):
        whyformer.arbitrate(model, inputs, ["saliency", e], processor=processor)
    chosen = whyformer.arbitrate(model, inputs, ["saliency", "input_x_gradient"], processor=processor)
    for i, (text, images) in enumerate(zip(inputs["text"], inputs["images"], strict=True)):
        prompt = {"text": text, "images": images}
        one = whyformer.arbitrate(model, prompt, ["saliency", "input_x_gradient"], processor=processor)
        assert torch.allclose(chosen.heldout[:, i], one.heldout[:, 0]) and torch.equal(chosen.winners[i], one.winners[0])


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["qwen2_vl", "internvl"])  # the second uses left padding
def test_attention_maps_of_ragged_prompts_equal_single_prompts(name: str, gradient: bool) -> None:
    model, processor = built(name)
    groups = [[EVEN], [WIDE, EVEN], [], [EVEN]]
    texts = [prompt_of(w, images, processor) for w, images in zip([*WORDS, "what is"], groups, strict=True)]
    result = whyformer.attention_maps(model, {"text": texts, "images": groups}, processor, target=TARGET, gradient=gradient)
    result = pickle.loads(pickle.dumps(result))  # results hold no model
    row = result.explanation(0, 1)
    assert result.tokens is not None and len({len(images) for images in result.tokens}) == 1
    for i, (text, images) in enumerate(zip(texts, groups, strict=True)):
        alone = whyformer.attention_maps(model, {"text": text, "images": images} if images else text, processor, target=TARGET, gradient=gradient)
        assert alone.tokens is not None
        real = [k for k, t in enumerate(result.tokens[i]) if t != "<pad>"]
        assert [result.tokens[i][k] for k in real] == alone.tokens[0]
        assert torch.equal(result.readout[i, real], alone.readout[0])
        for block in range(result.blocks):
            own_map = result.maps[block][i]
            assert torch.allclose(own_map[:, real][:, :, real], alone.maps[block][0], atol=1e-5)
            assert float(own_map[:, real].sum()) == pytest.approx(float(alone.maps[block].sum()), rel=1e-4)
        assert_equals_alone("internvl", row[i], alone.explanation(0, 1))


def test_attention_maps_of_different_kinds_are_not_joined() -> None:
    model, processor = built("gemma3")
    with pytest.raises(InputError, match="one sample at a time"):
        whyformer.attention_maps(model, {"text": WORDS[:2], "images": [[EVEN], [WIDE, EVEN]]}, processor, target=TARGET)


def test_evaluation_on_pixels_and_tokens_raises() -> None:
    model, processor = built("gemma3")
    inputs = {"text": WORDS[:2], "images": [[EVEN], [WIDE, EVEN]]}
    with pytest.raises(InputError, match="common grid"):
        whyformer.evaluate(model, inputs, torch.ones(2, 3), "deletion", processor, baseline="unk")


@pytest.mark.part
@pytest.mark.parametrize("name", ["gemma3", "internvl"])  # the second uses left padding
@pytest.mark.parametrize("metric", ["deletion", "conservation", "sufficiency"])
def test_evaluation_of_ragged_prompts_equals_single_prompts(name: str, metric: str) -> None:
    model, processor = built(name)
    groups = [[EVEN, WIDE], [WIDE, EVEN, EVEN], [EVEN, EVEN]]
    texts = [prompt_of(w, images, processor) for w, images in zip(WORDS, groups, strict=True)]
    e = whyformer.explain(model, inputs := {"text": texts, "images": groups}, "input_x_gradient", None, processor)
    options: dict[str, Any] = {} if metric == "conservation" else {"baseline": "unk"}  # these tokenizers have no mask token
    result = whyformer.evaluate(model, inputs, e, metric, processor, **options)
    assert len(result.values) == 3
    forwards = 0
    for i, (text, images) in enumerate(zip(texts, groups, strict=True)):
        prompt = {"text": text, "images": images}
        alone = whyformer.evaluate(model, prompt, whyformer.explain(model, prompt, "input_x_gradient", None, processor), metric, processor, **options)
        assert result.values[i] == pytest.approx(alone.value, rel=1e-3, abs=1e-6)
        assert (result.curves is None) == (alone.curves is None)
        if result.curves is not None and alone.curves is not None:
            assert result.curves[i] == pytest.approx(alone.curves[0], rel=1e-3, abs=1e-6)
        forwards += alone.forwards
    assert result.forwards == forwards
    plain = whyformer.evaluate(model, inputs, e.part("input_ids").scores, "deletion", processor, target=e.target.tolist(), baseline="unk")
    if metric == "deletion":
        assert plain.values == pytest.approx(result.values)
    with pytest.raises(InputError, match="do not fit 3 samples of up to"):
        whyformer.evaluate(model, inputs, e.part("input_ids").scores[:, 1:], metric, processor, **options)


def test_error_of_a_single_prompt_is_raised() -> None:
    model, processor = built("gemma3")
    with pytest.raises(InputError, match=r"the prompt has 2 placeholders for pictures .* and 1 picture"):
        whyformer.explain(model, {"text": ["what is", "<start_of_image> and <start_of_image>"], "images": [[WIDE], [EVEN]]}, "saliency", TARGET, processor)
    inputs = dict(processor(images=[[WIDE], [EVEN]], text=["<start_of_image> what is"] * 2, return_tensors="pt", padding=True))
    with pytest.raises(InputError, match="explain the prompts one at a time"):  # tensors do not tell which image belongs to which prompt
        whyformer.explain(model, {n: t for n, t in inputs.items() if n != "labels"}, "saliency", TARGET)
    first, second = (dict(processor(images=own, text=text, return_tensors="pt", padding="max_length", max_length=32)) for own, text in ((None, ["what is"]), ([[EVEN, EVEN]], ["<start_of_image> <start_of_image>"])))
    ids = {n: torch.cat([first[n], second[n]]) for n in ("input_ids", "attention_mask")}
    with pytest.raises(InputError, match="explain the prompts one at a time"):  # two images for two prompts, but both belong to the second
        whyformer.explain(model, {**ids, "pixel_values": second["pixel_values"]}, "saliency", TARGET)


def test_texts_of_two_tower_models_are_not_split() -> None:
    """The texts are classes; processors of two-tower models have no image placeholder."""
    processor = SimpleNamespace(image_token=None, image_processor=object(), tokenizer=object())
    assert separate_prompts({"text": ["a", "b"], "images": [WIDE, EVEN]}, processor) == []


def test_prompts_are_split_by_numbers_of_images() -> None:
    model, processor = built("gemma3")
    for groups, stackable in (([[EVEN], [EVEN]], True), ([[EVEN], [EVEN, EVEN]], False), ([[], [EVEN]], False)):
        texts = [prompt_of(w, group, processor) for w, group in zip(WORDS, groups, strict=False)]
        prompts = separate_prompts({"text": texts, "images": groups}, processor)
        assert len(prompts) == 2 and are_stackable(model, prompts, processor) is stackable


def sample(scores: list[float], tokens: list[str], **options: Any) -> Explanation:
    return Explanation(
        scores=torch.tensor([scores]), level="token", method="m", settings={}, target=torch.tensor([len(tokens)]), logits=torch.zeros(1, 4),
        target_names=[f"t{len(tokens)}"], features=Features([tokens], unknown=[[0]]), input="input_ids", **options,
    )  # fmt: skip


@pytest.mark.parametrize("left", [False, True])
def test_texts_are_padded_to_the_longest(left: bool) -> None:
    first, second = sample([1.0, 2.0], ["a", "b"], diagnostics={"warnings": [["dim"]], "completeness": {"value": [3.0]}, "cell": "2x2"}), sample([3.0], ["c"], diagnostics={"completeness": {"value": [4.0]}, "cell": "2x2"})
    e = joined([first, second], "-", left)
    assert e.scores.tolist() == ([[1, 2], [0, 3]] if left else [[1, 2], [3, 0]])
    assert e.tokens == [["a", "b"], ["-", "c"] if left else ["c", "-"]]
    assert e.unknown == [[0], [1 if left else 0]]
    assert (e.target.tolist(), e.target_names) == ([2, 1], ["t2", "t1"])
    assert e.diagnostics == {"warnings": [["dim"], []], "completeness": {"value": [3.0, 4.0]}, "cell": "2x2"}
