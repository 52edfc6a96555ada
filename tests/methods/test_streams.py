"""Models with several inputs: each input has its own scores, for every family of methods."""

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

BUILDERS: dict[str, Callable[[], Built]] = {"bart": bart, "t5": t5, "llava": llava, "siamese": siamese}
INPUTS = {
    "bart": ("input_ids", "decoder_input_ids"), "t5": ("input_ids", "decoder_input_ids"), "llava": ("pixel_values", "input_ids"),
    "siamese": ("first", "second"), "vilt": ("pixel_values", "input_ids"),
}  # fmt: skip
EMBEDDINGS = {"bart": 0, "t5": 0, "llava": 0, "siamese": 0}
TARGETS = [1, 3]


def reference_scores(model: nn.Module, inputs: dict[str, Tensor], entries: dict[str, str]) -> dict[str, Tensor]:
    """Σ x ⊙ ∂f/∂x at the pixels and at the inputs of these modules, with hooks; "name@n" is call n of a module."""
    block_inputs: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    handles = []

    def hook(module: str) -> Callable[..., Any]:
        def save_input(m: nn.Module, args: Any, kwargs: Any) -> Any:
            number = counts[module] = counts.get(module, -1) + 1
            name = next((n for n, entry in entries.items() if entry == f"{module}@{number}"), None)
            if name is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            block_inputs[name] = hidden.requires_grad_() if hidden.is_leaf else hidden
            block_inputs[name].retain_grad()
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return save_input

    for module in {entry.partition("@")[0] for entry in entries.values()}:
        handles.append(model.get_submodule(module).register_forward_pre_hook(hook(module), with_kwargs=True))
    leaves = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in inputs.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    out = model(**leaves)
    logits = getattr(out, "logits", out)
    logits = logits[:, -1] if logits.dim() == 3 else logits
    logits.gather(1, torch.tensor(TARGETS)[:, None]).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    scores = {name: (x * x.grad).sum(-1).detach() for name, x in block_inputs.items() if x.grad is not None}
    return scores | {n: (v * v.grad).sum(1).detach() for n, v in leaves.items() if v.grad is not None}


FIRST_BLOCKS = {
    "bart": {"input_ids": "model.encoder.layers.0@0", "decoder_input_ids": "model.decoder.layers.0@0"},
    "t5": {"input_ids": "encoder.block.0@0", "decoder_input_ids": "decoder.block.0@0"},
    "llava": {"input_ids": "model.language_model.layers.0@0"},
    "siamese": {"first": "encoder.layers.0@0", "second": "encoder.layers.0@1"},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_input_x_gradient_of_each_input_equals_reference(name: str) -> None:
    model, inputs = BUILDERS[name]()
    expected = reference_scores(model, inputs, FIRST_BLOCKS[name])
    e = whyformer.explain(model, inputs, "input_x_gradient", TARGETS)
    assert e.inputs == INPUTS[name]
    assert torch.equal(e.scores, e.part(e.inputs[0]).scores)
    for part in e.inputs:
        expected_part = expected[part]
        if name == "llava" and part == "input_ids":  # image rows are not words
            expected_part = expected_part.masked_fill(inputs["input_ids"] == 100, 0)
        mask = inputs.get("attention_mask") if part == "input_ids" else None
        expected_part = expected_part if mask is None else expected_part.masked_fill(mask == 0, 0)
        if name == "bart" and part == "decoder_input_ids":
            expected_part = expected_part.masked_fill(torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool(), 0)
        assert expected_part.abs().max() > 1e-4
        assert torch.allclose(e.part(part).scores, expected_part, atol=1e-10)


ROUTES = ["input_x_gradient", "saliency", "rollout", "raw_attention", "gae"]
METHODS = [*ROUTES, "lrp_ah", "transformer_attribution", "partial_lrp", "lrp", "norm_attention", "value_zeroing", "gradcam_attention"]


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bart", "t5", "siamese"])
def test_batch_equals_single_runs(method: str, name: str) -> None:
    model, inputs = BUILDERS[name]()
    batch = whyformer.explain(model, inputs, method, TARGETS)
    for i, target in enumerate(TARGETS):
        sample = {n: v[i : i + 1] for n, v in inputs.items()}
        if "attention_mask" in sample:
            length = int(sample["attention_mask"].sum())
            sample |= {n: sample[n][:, :length] for n in ("input_ids", "attention_mask")}
        single = whyformer.explain(model, sample, method, target)
        assert single.inputs == batch.inputs
        for part in batch.inputs:
            pair = batch.part(part).scores[i], single.part(part).scores[0]
            width = len(pair[1])
            assert torch.allclose(pair[0][:width], pair[1], rtol=1e-6, atol=1e-9 * float(pair[1].abs().max()))
            assert not bool(pair[0][width:].any())


@pytest.mark.parametrize("method", [*ROUTES, "gradcam_attention", "norm_attention", "transformer_attribution", "lrp_ah_ln"])
def test_image_prompt_in_batch_equals_single_sample(method: str) -> None:
    model, inputs = llava()
    batch = whyformer.explain(model, inputs, method, TARGETS)
    for i, target in enumerate(TARGETS):
        single = whyformer.explain(model, {n: v[i : i + 1] for n, v in inputs.items()}, method, target)
        for part in ("pixel_values", "input_ids"):
            assert torch.allclose(batch.part(part).scores[i], single.part(part).scores[0], atol=1e-9)
        words = batch.part("input_ids").scores[i]
        assert not bool(words[inputs["input_ids"][i] == 100].any())
        assert method == "gradcam_attention" or bool(words[inputs["input_ids"][i] != 100].any())  # which clamps negative scores
    assert batch.scores.abs().max() > 0


def qwen2_vl() -> Built:
    """A model with the patches of both images packed into one tensor; the vision tower merges 2×2 patches into a row."""
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
def test_packed_patches_in_batch_equal_single_samples(method: str) -> None:
    model, inputs = qwen2_vl()
    options = {"integrated_gradients": {"steps": 3}, "occlusion": {"baseline": 9}}.get(method, {})
    batch = whyformer.explain(model, inputs, method, TARGETS, **options)
    assert batch.inputs == (("input_ids",) if method == "occlusion" else ("input_ids", "pixel_values"))
    for i, target in enumerate(TARGETS):
        sample = {n: v[16 * i : 16 * i + 16] if n == "pixel_values" else v[i : i + 1] for n, v in inputs.items()}
        single = whyformer.explain(model, sample, method, target, **options)
        for part in batch.inputs:
            pair = batch.part(part).scores[i], single.part(part).scores[0]
            assert torch.allclose(*pair, rtol=1e-6, atol=1e-9 * float(pair[1].abs().max()))
    if method == "occlusion":
        return
    patches = batch.part("pixel_values").scores
    assert patches.shape == (2, 16)
    if method in ("rollout", "raw_attention", "gae"):  # four patches share one row
        assert torch.equal(patches.unflatten(1, (4, 4)).amax(-1), patches.unflatten(1, (4, 4)).amin(-1))
        assert not bool(batch.scores[inputs["input_ids"] == 100].any())


@pytest.mark.parametrize("method", ["rollout", "norm_attention", "value_zeroing", "gae", "transformer_attribution", "input_x_gradient"])
def test_repeated_block_equals_stack_of_blocks(method: str) -> None:
    """ALBERT-like repeated calls of one block against a stack of blocks with the same weights."""
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    stack = randomise(Words(False)).double().eval()

    class RepeatedBlock(Words):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.words(input_ids)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x[:, 0])

    repeated = RepeatedBlock(False).double().eval()
    repeated.load_state_dict(stack.state_dict())
    repeated.blocks = repeated.blocks[:1].eval()
    for block in stack.blocks:
        block.load_state_dict(repeated.blocks[0].state_dict())
    for settings in ({}, {"start_layer": 1}) if method in ("rollout", "gae", "transformer_attribution") else ({},):
        repeated_scores, stack_scores = (whyformer.explain(model, ids, method, TARGETS, **settings).scores for model in (repeated, stack))
        assert torch.allclose(repeated_scores, stack_scores, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_fused_and_decomposed_attention_have_same_scores(method: str) -> None:
    explanations = [whyformer.explain(*bart(attention), method, TARGETS) for attention in ("sdpa", "eager")]
    for part in INPUTS["bart"]:
        fused, decomposed = (e.part(part).scores for e in explanations)
        assert torch.allclose(fused, decomposed, rtol=1e-5, atol=1e-6 * float(fused.abs().max()))


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", [0, 1])
def test_loop_over_heads_equals_joint_attention(method: str, start: int) -> None:
    ids = {"input_ids": torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    looped, fused = randomise(Words(True)).double(), randomise(Words(False)).double()
    settings = {"start_layer": start} if method in ("rollout", "gae", "transformer_attribution") else {}
    looped_scores, fused_scores = (whyformer.explain(model, ids, method, TARGETS, **settings).scores for model in (looped, fused))
    assert torch.allclose(looped_scores, fused_scores, rtol=1e-7, atol=1e-9 * float(fused_scores.abs().max()))


def test_rollout_of_encoder_decoder_equals_reference() -> None:
    """A decoder row through self- and cross-attention plus identity, layer by layer, then through the encoder."""
    model, inputs = bart("eager")
    sample = {n: v[:1] for n, v in inputs.items()}
    with torch.no_grad():
        out = model(**sample, output_attentions=True)
    row = torch.zeros(6, dtype=torch.float64)
    row[5] = 1  # the <eos> row is classified
    source = torch.zeros(6, dtype=torch.float64)
    for self_map, cross in zip(reversed(out.decoder_attentions), reversed(out.cross_attentions), strict=True):
        row = row / 2
        source = source + row @ cross[0].mean(0)
        row = (row + row @ self_map[0].mean(0)) / 2
    for self_map in reversed(out.encoder_attentions):
        source = (source + source @ self_map[0].mean(0)) / 2
    e = whyformer.explain(model, sample, "rollout")
    assert torch.allclose(e.scores[0], source, atol=1e-6)
    assert torch.allclose(e.part("decoder_input_ids").scores[0], row, atol=1e-6)


def test_rollout_of_learned_vectors_that_read_the_input_first_equals_reference() -> None:
    """Perceiver: learned vectors attend to the tokens, then to themselves."""
    torch.manual_seed(0)
    sizes = {"d_latents": 16, "d_model": 12, "num_latents": 6, "num_self_attends_per_block": 2}
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    config = hf.PerceiverConfig(**sizes, **heads, num_blocks=1, vocab_size=50, max_position_embeddings=20)
    model = randomise(hf.PerceiverForSequenceClassification(config)).eval()
    inputs = {"inputs": torch.randint(5, 50, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    states: list[Tensor] = []
    handle = model.perceiver.encoder.register_forward_hook(lambda *a: states.append(a[2][0]))
    maps: list[Tensor] = []
    layers = [model.perceiver.encoder.cross_attention, *model.perceiver.encoder.self_attends]
    handles = [layer.attention.self.register_forward_hook(lambda *a: maps.append(a[2][1].mean(1))) for layer in layers]
    logits = model(**inputs, output_attentions=True).logits
    for one in (handle, *handles):
        one.remove()
    (gradient,) = torch.autograd.grad((logits**2).sum() / 2, states[0])
    row = gradient.norm(dim=-1) / gradient.norm(dim=-1).sum(1, keepdim=True)
    for attention in (maps[2], maps[1]):
        row = (row + torch.einsum("bq,bqk->bk", row, attention)) / 2
    expected = torch.einsum("bq,bqk->bk", row, maps[0]) / 2
    torch.testing.assert_close(whyformer.explain(model, inputs, method="rollout").scores, expected, rtol=1e-5, atol=1e-7)


def test_words_and_patches_of_joint_sequence_have_scores() -> None:
    model, inputs = vilt()
    e = whyformer.explain(model, inputs, "rollout")
    assert e.inputs == ("pixel_values", "input_ids")
    assert (e.level, e.grid, e.part("input_ids").level) == ("patch", (2, 2), "token")
    scores = torch.cat([e.scores, e.part("input_ids").scores], 1)
    assert bool((scores > 0).all())
    assert bool((scores.sum(1) < 1).all())  # the remainder belongs to the [CLS] row of the image


def test_parts_survive_serialization(tmp_path: Any) -> None:
    e = whyformer.explain(*bart(), "gae", TARGETS)
    loaded = whyformer.Explanation.load(e.save(tmp_path / "e.safetensors"))
    from_dict = whyformer.Explanation.from_dict(e.to_dict())
    for restored in (loaded, from_dict):
        assert restored.inputs == e.inputs
        for part in e.inputs:
            assert torch.allclose(restored.part(part).scores.double(), e.part(part).scores, atol=1e-6)
    assert e[1].part("decoder_input_ids").scores.shape == (1, 6)
    with pytest.raises(whyformer.WhyformerError, match="'pixels' has no scores; inputs with scores: input_ids, decoder_input_ids"):
        e.part("pixels")
