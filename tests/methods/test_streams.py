"""Models of several inputs: whose rows each attention mixes, and that a score stands at the input that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from streams import Built, Words, bart, llava, siamese, t5, vilt
from zoo import randomise

BUILT: dict[str, Callable[[], Built]] = {"bart": bart, "t5": t5, "llava": llava, "siamese": siamese}
INPUTS = {
    "bart": ("input_ids", "decoder_input_ids"), "t5": ("input_ids", "decoder_input_ids"), "llava": ("pixel_values", "input_ids"),
    "siamese": ("first", "second"), "vilt": ("pixel_values", "input_ids"),
}  # fmt: skip
EMBEDDINGS = {"bart": 0, "t5": 0, "llava": 0, "siamese": 0}
TARGETS = [1, 3]


def by_hand(model: nn.Module, inputs: dict[str, Tensor], entries: dict[str, str]) -> dict[str, Tensor]:
    """Σ x ⊙ ∂f/∂x at the pixels, and at what enters these modules, caught with hooks: call n of a module is "name@n"."""
    kept: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    handles = []

    def hook(module: str) -> Callable[..., Any]:
        def pre(m: nn.Module, args: Any, kwargs: Any) -> Any:
            number = counts[module] = counts.get(module, -1) + 1
            name = next((n for n, place in entries.items() if place == f"{module}@{number}"), None)
            if name is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            kept[name] = hidden.requires_grad_() if hidden.is_leaf else hidden
            kept[name].retain_grad()
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return pre

    for module in {place.partition("@")[0] for place in entries.values()}:
        handles.append(model.get_submodule(module).register_forward_pre_hook(hook(module), with_kwargs=True))
    given = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in inputs.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    out = model(**given)
    logits = getattr(out, "logits", out)
    logits = logits[:, -1] if logits.dim() == 3 else logits
    logits.gather(1, torch.tensor(TARGETS)[:, None]).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    scores = {name: (x * x.grad).sum(-1).detach() for name, x in kept.items() if x.grad is not None}
    return scores | {n: (v * v.grad).sum(1).detach() for n, v in given.items() if v.grad is not None}


FIRST_BLOCKS = {
    "bart": {"input_ids": "model.encoder.layers.0@0", "decoder_input_ids": "model.decoder.layers.0@0"},
    "t5": {"input_ids": "encoder.block.0@0", "decoder_input_ids": "decoder.block.0@0"},
    "llava": {"input_ids": "model.language_model.layers.0@0"},
    "siamese": {"first": "encoder.layers.0@0", "second": "encoder.layers.0@1"},
}


@pytest.mark.parametrize("name", BUILT)
def test_gradient_times_input_stands_at_its_input(name: str) -> None:
    model, inputs = BUILT[name]()
    wanted = by_hand(model, inputs, FIRST_BLOCKS[name])
    e = whyformer.explain(model, inputs, "input_x_gradient", TARGETS)
    assert e.inputs == INPUTS[name]
    assert torch.equal(e.scores, e.part(e.inputs[0]).scores)
    for part in e.inputs:
        own = wanted[part]
        if name == "llava" and part == "input_ids":  # rows of the picture are no words
            own = own.masked_fill(inputs["input_ids"] == 100, 0)
        mask = inputs.get("attention_mask") if part == "input_ids" else None
        own = own if mask is None else own.masked_fill(mask == 0, 0)
        if name == "bart" and part == "decoder_input_ids":
            own = own.masked_fill(torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool(), 0)
        assert own.abs().max() > 1e-4
        assert torch.allclose(e.part(part).scores, own, atol=1e-10)


ROUTES = ["input_x_gradient", "saliency", "rollout", "raw_attention", "gae"]
METHODS = [*ROUTES, "lrp_ah", "transformer_attribution", "partial_lrp", "lrp", "norm_attention", "value_zeroing", "gradcam_attention"]


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bart", "t5", "siamese"])
def test_a_batch_is_single_runs(method: str, name: str) -> None:
    model, inputs = BUILT[name]()
    whole = whyformer.explain(model, inputs, method, TARGETS)
    for i, target in enumerate(TARGETS):
        one = {n: v[i : i + 1] for n, v in inputs.items()}
        if "attention_mask" in one:
            length = int(one["attention_mask"].sum())
            one |= {n: one[n][:, :length] for n in ("input_ids", "attention_mask")}
        alone = whyformer.explain(model, one, method, target)
        assert alone.inputs == whole.inputs
        for part in whole.inputs:
            both = whole.part(part).scores[i], alone.part(part).scores[0]
            width = len(both[1])
            assert torch.allclose(both[0][:width], both[1], rtol=1e-6, atol=1e-9 * float(both[1].abs().max()))
            assert not bool(both[0][width:].any())


@pytest.mark.parametrize("method", [*ROUTES, "gradcam_attention", "norm_attention", "transformer_attribution", "lrp_ah_ln"])
def test_a_prompt_with_a_picture_alone_and_in_a_batch(method: str) -> None:
    model, inputs = llava()
    whole = whyformer.explain(model, inputs, method, TARGETS)
    for i, target in enumerate(TARGETS):
        alone = whyformer.explain(model, {n: v[i : i + 1] for n, v in inputs.items()}, method, target)
        for part in ("pixel_values", "input_ids"):
            assert torch.allclose(whole.part(part).scores[i], alone.part(part).scores[0], atol=1e-9)
        words = whole.part("input_ids").scores[i]
        assert not bool(words[inputs["input_ids"][i] == 100].any())
        assert method == "gradcam_attention" or bool(words[inputs["input_ids"][i] != 100].any())  # which clamps
    assert whole.scores.abs().max() > 0


def qwen2_vl() -> Built:
    """Patches of both pictures packed into one tensor; its tower merges 2×2 of them into a row."""
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    special = {"image_token_id": 100, "vision_start_token_id": 101, "vision_end_token_id": 102, "video_token_id": 103}
    config = hf.Qwen2VLConfig(vision_config=tower, text_config=text, **special)
    ids = torch.tensor([[1, 2, 101, *[100] * 4, 102, 5, 6], [1, 101, *[100] * 4, 102, 5, 6, 7]])
    patches = torch.randn(32, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0)).double()
    model = randomise(hf.Qwen2VLForConditionalGeneration(config)).double()
    grid = torch.tensor([[1, 4, 4]] * 2)
    return model, {
        "input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 100).long(),
    }  # fmt: skip


@pytest.mark.parametrize("method", [*ROUTES, "integrated_gradients", "norm_attention", "gradcam", "gradcam_attention", "occlusion", "value_zeroing", "transformer_attribution"])
def test_packed_patches(method: str) -> None:
    model, inputs = qwen2_vl()
    few = {"integrated_gradients": {"steps": 3}, "occlusion": {"fill_id": 9}}.get(method, {})
    whole = whyformer.explain(model, inputs, method, TARGETS, **few)
    assert whole.inputs == (("input_ids",) if method == "occlusion" else ("input_ids", "pixel_values"))
    for i, target in enumerate(TARGETS):
        one = {n: v[16 * i : 16 * i + 16] if n == "pixel_values" else v[i : i + 1] for n, v in inputs.items()}
        alone = whyformer.explain(model, one, method, target, **few)
        for part in whole.inputs:
            both = whole.part(part).scores[i], alone.part(part).scores[0]
            assert torch.allclose(*both, rtol=1e-6, atol=1e-9 * float(both[1].abs().max()))
    if method == "occlusion":
        return
    patches = whole.part("pixel_values").scores
    assert patches.shape == (2, 16)
    if method in ("rollout", "raw_attention", "gae"):  # four patches stand in one row
        assert torch.equal(patches.unflatten(1, (4, 4)).amax(-1), patches.unflatten(1, (4, 4)).amin(-1))
        assert not bool(whole.scores[inputs["input_ids"] == 100].any())


@pytest.mark.parametrize("method", ["rollout", "norm_attention", "value_zeroing", "gae", "transformer_attribution", "input_x_gradient"])
def test_a_block_that_is_called_again_and_again(method: str) -> None:
    """ALBERT against a BERT-like stack of blocks with the same weights: each call is a block."""
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    stack = randomise(Words(False)).double().eval()

    class Again(Words):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.words(input_ids)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x[:, 0])

    again = Again(False).double().eval()
    again.load_state_dict(stack.state_dict())
    again.blocks = again.blocks[:1].eval()
    for block in stack.blocks:
        block.load_state_dict(again.blocks[0].state_dict())
    for settings in ({}, {"start_layer": 1}) if method in ("rollout", "gae", "transformer_attribution") else ({},):
        one, other = (whyformer.explain(model, ids, method, TARGETS, **settings).scores for model in (again, stack))
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_written_and_fused_attention_agree(method: str) -> None:
    made = [whyformer.explain(*bart(attention), method, TARGETS) for attention in ("sdpa", "eager")]
    for part in INPUTS["bart"]:
        one, other = (e.part(part).scores for e in made)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", [0, 1])
def test_a_loop_over_heads_is_one_layer(method: str, start: int) -> None:
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    looped, whole = randomise(Words(True)).double(), randomise(Words(False)).double()
    given = {"start_layer": start} if method in ("rollout", "gae", "transformer_attribution") else {}
    one, other = (whyformer.explain(model, ids, method, TARGETS, **given).scores for model in (looped, whole))
    assert torch.allclose(one, other, rtol=1e-7, atol=1e-9 * float(other.abs().max()))


def test_rollout_across_by_hand() -> None:
    """The decoder's row [1, 0 ...] of [self | cross] attention plus identity, layer by layer; the encoder's below it."""
    model, inputs = bart("eager")
    one = {n: v[:1] for n, v in inputs.items()}
    with torch.no_grad():
        out = model(**one, output_attentions=True)
    row = torch.zeros(6, dtype=torch.float64)
    row[5] = 1  # the <eos> row is classified
    source = torch.zeros(6, dtype=torch.float64)
    for own, cross in zip(reversed(out.decoder_attentions), reversed(out.cross_attentions), strict=True):
        row = row / 2
        source = source + row @ cross[0].mean(0)
        row = (row + row @ own[0].mean(0)) / 2
    for own in reversed(out.encoder_attentions):
        source = (source + source @ own[0].mean(0)) / 2
    e = whyformer.explain(model, one, "rollout")
    assert torch.allclose(e.scores[0], source, atol=1e-6)
    assert torch.allclose(e.part("decoder_input_ids").scores[0], row, atol=1e-6)


def test_words_and_patches_of_one_sequence() -> None:
    model, inputs = vilt()
    e = whyformer.explain(model, inputs, "rollout")
    assert e.inputs == ("pixel_values", "input_ids")
    assert (e.level, e.grid, e.part("input_ids").level) == ("patch", (2, 2), "token")
    both = torch.cat([e.scores, e.part("input_ids").scores], 1)
    assert bool((both > 0).all())
    assert bool((both.sum(1) < 1).all())  # the picture's [CLS] row has the rest


def test_parts_are_kept(tmp_path: Any) -> None:
    e = whyformer.explain(*bart(), "gae", TARGETS)
    again = whyformer.Explanation.load(e.save(tmp_path / "e.safetensors"))
    plain = whyformer.Explanation.from_dict(e.to_dict())
    for other in (again, plain):
        assert other.inputs == e.inputs
        for part in e.inputs:
            assert torch.allclose(other.part(part).scores.double(), e.part(part).scores, atol=1e-6)
    assert e[1].part("decoder_input_ids").scores.shape == (1, 6)
    with pytest.raises(whyformer.WhyformerError, match="'pixels' has no scores; inputs with scores: input_ids, decoder_input_ids"):
        e.part("pixels")
