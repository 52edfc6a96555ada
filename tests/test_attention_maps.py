"""Attention maps of one pass equal the explanations of single blocks and heads."""

import sys

import pytest
import torch

import whyformer
from prompting import llava, qwen2_vl, square
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.models.loading import load
from zoo import build


@pytest.mark.parametrize("name", ["hf_vit", "bert", "timm_vit"])
@pytest.mark.parametrize("head", [0, 1, "mean", "max"])
def test_map_equals_raw_attention_of_its_block_and_head(name, head):
    model, inputs = build(name)
    maps = whyformer.attention_maps(model, inputs)
    for block in range(maps.blocks):
        expected = whyformer.explain(model, inputs, "raw_attention", aggregation={"layers": block, "heads": head})
        e = maps.explanation(block, head)
        assert torch.allclose(e.scores, expected.scores, atol=1e-12)
        assert (e.grid, e.level, e.target_names, e.tokens) == (expected.grid, expected.level, expected.target_names, expected.tokens)
        assert torch.allclose(e.logits, expected.logits)
        assert e.settings == {"block": block, "head": head}
        assert e.diagnostics["class_specific"] is False


def test_matrix_rows_are_queries_and_sum_to_one():
    loaded = load("bundled:sst2")
    maps = whyformer.attention_maps(loaded.model, ["A charming film.", "Dull, dull and far too long, alas."], loaded.processor)
    matrix = maps.matrix(0, 1, sample=1)
    real = len([t for t in maps.tokens[1] if t != "[PAD]"])
    assert torch.allclose(matrix[:real].sum(-1), torch.ones(real), atol=1e-5)
    e = maps.explanation(0, 1, query=2)
    shown = e.scores[1] != 0
    assert torch.allclose(e.scores[1][shown], matrix[2][shown])
    assert e.settings["query"] == 2


def test_maps_of_pictures_of_different_sizes_are_refused():
    model, inputs = build("hf_vit")
    pictures = [inputs[0], inputs[1][:, :-8]]
    with pytest.raises(InputError, match="one sample at a time"):
        whyformer.attention_maps(model, pictures)


def test_gradient_weighted_maps_depend_on_the_class():
    model, inputs = build("hf_vit")
    first, second = (whyformer.attention_maps(model, inputs, target=t, gradient=True) for t in (0, 1))
    assert not torch.allclose(first.maps[-1], second.maps[-1])
    assert float(first.maps[0].min()) >= 0
    assert first.explanation(0).diagnostics["class_specific"] is True
    assert first.explanation(0).method == "attention_gradient"


def test_blocks_and_heads_are_in_order():
    model, inputs = build("hf_vit")
    maps = whyformer.attention_maps(model, inputs)
    assert [e.settings["block"] for e in maps.each_block()] == list(range(maps.blocks))
    assert [(e.settings["block"], e.settings["head"]) for e in maps.each_head()] == [(b, h) for b in range(maps.blocks) for h in range(maps.heads)]
    assert len(maps.each_head(1)) == maps.heads
    assert torch.equal(maps.explanation(-1).scores, maps.explanation(maps.blocks - 1).scores)


def test_missing_block_head_or_token_raises():
    model, inputs = build("hf_vit")
    maps = whyformer.attention_maps(model, inputs)
    for arguments, message in (((99,), "no block 99"), ((0, 99), "head 99"), ((0, "sum"), "'mean', 'max' or 'min'"), ((0, 0, 999), "no token 999")):
        with pytest.raises(InputError, match=message):
            maps.explanation(*arguments)
    with pytest.raises(MethodNotApplicable, match="windows or at several resolutions"):
        swin, pixels = build("hf_swin")
        whyformer.attention_maps(swin, pixels)


def test_too_many_attention_values_raise(monkeypatch):
    # `whyformer.attention` is the function; its module is only in sys.modules
    monkeypatch.setattr(sys.modules["whyformer.attention"], "MOST_VALUES", 10)
    model, inputs = build("hf_vit")
    with pytest.raises(InputError, match="raw_attention and its aggregation"):
        whyformer.attention_maps(model, inputs)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("build", [llava, qwen2_vl])
def test_image_and_text_tokens_are_scored_in_their_own_parts(build):
    model, processor = build()
    prompt = {"text": "what is here", "images": [square((32, 32), (8, 8, 24, 24))]}
    maps = whyformer.attention_maps(model, prompt, processor)
    for block in range(maps.blocks):
        result = maps.explanation(block, 1)
        expected = whyformer.explain(model, prompt, "raw_attention", processor=processor, aggregation={"layers": block, "heads": 1})
        assert set(result.inputs) == set(expected.inputs) == {"input_ids", "pixel_values"}
        for name in result.inputs:
            torch.testing.assert_close(result.part(name).scores, expected.part(name).scores)
