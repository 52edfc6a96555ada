"""Grad-CAM against a reference with hooks, which averages over image tokens only."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from whyformer.explanation.views import resize
from whyformer.methods.gradients.gradcam import BlockList
from zoo import IMAGES, WINDOWED, build, randomise

# the first norm of each block, and the number of rows that are not patches
NORMS: dict[str, tuple[Callable[[Any, int], nn.Module], int]] = {
    "hf_vit": (lambda m, b: m.vit.layers[b].layernorm_before, 1),
    "hf_vit_wide": (lambda m, b: m.vit.layers[b].layernorm_before, 1),
    "hf_deit": (lambda m, b: m.deit.layers[b].layernorm_before, 2),
    "hf_deit_teacher": (lambda m, b: m.deit.layers[b].layernorm_before, 2),
    "hf_dinov2": (lambda m, b: m.dinov2.encoder.layer[b].norm1, 1),
    "timm_vit": (lambda m, b: m.blocks[b].norm1, 1),
    "timm_vit_mean": (lambda m, b: m.blocks[b].norm1, 0),
    "timm_deit": (lambda m, b: m.blocks[b].norm1, 2),
    "torchvision_vit": (lambda m, b: m.encoder.layers[b].ln_1, 1),
}


def cam(model: nn.Module, x: Tensor, norm: nn.Module, prefix: int, target: int) -> Tensor:
    """``[B, P]`` (Σ_k F_k mean_p ∂f/∂F_k)⁺ over patches p; features as rows or as an image."""
    features_list: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, output: features_list.append(output))
    try:
        output = model(x)
    finally:
        hook.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    (gradient,) = torch.autograd.grad(logits[:, target].sum(), features_list[0])
    features, gradient = (t.detach().flatten(1, -2)[:, prefix:] for t in (features_list[0], gradient))
    return (features @ gradient.mean(1)[..., None])[..., 0].clamp(min=0)


@pytest.mark.parametrize("name", IMAGES)
def test_gradcam_equals_reference(name: str) -> None:
    model, x = build(name)
    norm, prefix = NORMS[name]
    last = whyformer.explain(model, x, "gradcam", target=2)
    assert torch.allclose(last.scores, cam(model, x, norm(model, -1), prefix, 2), atol=1e-12)
    mean_of_blocks = whyformer.explain(model, x, "gradcam", target=2, blocks=[0, -1])
    maps = [cam(model, x, norm(model, b), prefix, 2) for b in (0, -1)]
    expected = sum(m / m.amax(1, keepdim=True).clamp(min=1e-300) for m in maps) / 2
    assert torch.allclose(mean_of_blocks.scores, expected, atol=1e-12)


LAST_OF_SWIN: dict[str, Callable[[Any], nn.Module]] = {
    "hf_swin": lambda m: m.swin.encoder.layers[-1].blocks[-1].layernorm_before,
    "timm_swin": lambda m: m.layers[-1].blocks[-1].norm1,
    "torchvision_swin": lambda m: m.features[-1][-1].norm1,
}


@pytest.mark.parametrize("name", WINDOWED)
def test_gradcam_of_swin_uses_last_block_of_last_stage(name: str) -> None:
    model, x = build(name)
    norm = LAST_OF_SWIN[name](model)
    gradcam = whyformer.explain(model, x, "gradcam", target=2)
    assert gradcam.grid == (8, 8)
    assert torch.allclose(gradcam.scores, cam(model, x, norm, 0, 2), atol=1e-12)
    # ViT-CX builds its masks from the same features
    features: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, output: features.append(output.detach()))
    with torch.no_grad():
        model(x)
    hook.remove()
    maps = features[0].flatten(1, -2).transpose(1, 2).unflatten(2, (8, 8))
    scaled = (r := resize(maps[0], (32, 32))) - r.amin((1, 2), keepdim=True)
    scaled = scaled / scaled.amax((1, 2), keepdim=True)
    with torch.no_grad():
        logits = torch.cat([o if isinstance(o := model(x[:1] * m), Tensor) else o.logits for m in scaled])
    expected = torch.einsum("k,khw->hw", logits.softmax(-1)[:, 2], scaled) / scaled.sum(0) / len(scaled)
    vit_cx = whyformer.explain(model, x, "vit_cx", target=2, distance_threshold=0.0, noise=0.0)
    assert torch.allclose(vit_cx.scores[0], expected, atol=1e-10)


@pytest.mark.parametrize(("blocks", "allowed"), [(0, True), (-1, True), ([0, -1], True), ((1,), True), ([], False), ((), False), ([0.5], False), ([True], False), (1.5, False), ("0", False), (None, False)])
def test_valid_values_of_blocks(blocks: Any, allowed: bool) -> None:
    _, check = get_args(BlockList)[1]
    assert check(blocks) is allowed


@pytest.mark.parametrize("length", [3, 8, 11])
def test_gradcam_leaves_out_padding_that_the_model_adds(length: int) -> None:
    """Longformer pads a text to a multiple of its window: gradients are averaged over the tokens alone, with a mask or without."""
    config = transformers.LongformerConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, attention_window=[8, 8], max_position_embeddings=40
    )
    model = randomise(transformers.LongformerForSequenceClassification(config).eval()).double()
    ids = torch.randint(3, 50, (2, length))
    alone = whyformer.explain(model, {"input_ids": ids}, "gradcam", target=1)
    masked = whyformer.explain(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "gradcam", target=1)
    assert masked.scores.abs().max() > 0
    assert torch.allclose(alone.scores, masked.scores, atol=1e-12)


class FirstToken(torch.nn.Module):
    """The class tokens of all samples are that of the first, as in TimeSformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.positions = (torch.nn.Parameter(torch.randn(1, n, 16)) for n in (1, 6))
        self.encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        first = rows[:1, :1].expand(len(x), -1, -1)
        return self.head(self.encoder(torch.cat([first, rows[:, 1:]], 1))[:, 0])


@pytest.mark.parametrize("method", ["gradcam", "libragrad", "gae"])
def test_class_tokens_of_the_first_sample_are_rows_of_each_sample(method: str) -> None:
    model, x = FirstToken().eval().double(), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    e, alone = (whyformer.explain(model, inputs, method, 1) for inputs in (x, x[1:]))
    torch.testing.assert_close(e.scores[1:], alone.scores)
    assert e.scores.any()
