"""Grad-CAM against the same formula written with hooks: the tokens of the picture alone are averaged over."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explanation.views import resize
from whyformer.methods.gradients.gradcam import BlockList
from zoo import IMAGES, WINDOWED, build

# the first normalisation of each block, by name, and the rows that are no patches
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
    """``[B, P]`` (Σ_k F_k mean_p ∂f/∂F_k)⁺ over the patches p; features by rows, or laid out as the picture is."""
    kept: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        output = model(x)
    finally:
        hook.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    (gradient,) = torch.autograd.grad(logits[:, target].sum(), kept[0])
    features, gradient = (t.detach().flatten(1, -2)[:, prefix:] for t in (kept[0], gradient))
    return (features @ gradient.mean(1)[..., None])[..., 0].clamp(min=0)


@pytest.mark.parametrize("name", IMAGES)
def test_by_hand(name: str) -> None:
    model, x = build(name)
    norm, prefix = NORMS[name]
    found = whyformer.explain(model, x, "gradcam", target=2)
    assert torch.allclose(found.scores, cam(model, x, norm(model, -1), prefix, 2), atol=1e-12)
    several = whyformer.explain(model, x, "gradcam", target=2, blocks=[0, -1])
    maps = [cam(model, x, norm(model, b), prefix, 2) for b in (0, -1)]
    wanted = sum(m / m.amax(1, keepdim=True).clamp(min=1e-300) for m in maps) / 2
    assert torch.allclose(several.scores, wanted, atol=1e-12)


LAST_OF_SWIN: dict[str, Callable[[Any], nn.Module]] = {
    "hf_swin": lambda m: m.swin.encoder.layers[-1].blocks[-1].layernorm_before,
    "timm_swin": lambda m: m.layers[-1].blocks[-1].norm1,
    "torchvision_swin": lambda m: m.features[-1][-1].norm1,
}


@pytest.mark.parametrize("name", WINDOWED)
def test_swin_is_read_at_the_last_block_of_its_last_stage(name: str) -> None:
    model, x = build(name)
    norm = LAST_OF_SWIN[name](model)
    found = whyformer.explain(model, x, "gradcam", target=2)
    assert found.grid == (8, 8)
    assert torch.allclose(found.scores, cam(model, x, norm, 0, 2), atol=1e-12)
    # the masks of ViT-CX are made of the same features: without them it has none
    kept: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    with torch.no_grad():
        model(x)
    hook.remove()
    maps = kept[0].flatten(1, -2).transpose(1, 2).unflatten(2, (8, 8))
    scaled = (r := resize(maps[0], (32, 32))) - r.amin((1, 2), keepdim=True)
    scaled = scaled / scaled.amax((1, 2), keepdim=True)
    with torch.no_grad():
        logits = torch.cat([o if isinstance(o := model(x[:1] * m), Tensor) else o.logits for m in scaled])
    wanted = torch.einsum("k,khw->hw", logits.softmax(-1)[:, 2], scaled) / scaled.sum(0) / len(scaled)
    whole = whyformer.explain(model, x, "vit_cx", target=2, distance_threshold=0.0, noise=0.0)
    assert torch.allclose(whole.scores[0], wanted, atol=1e-10)


@pytest.mark.parametrize(("blocks", "allowed"), [(0, True), (-1, True), ([0, -1], True), ((1,), True), ([], False), ((), False), ([0.5], False), ([True], False), (1.5, False), ("0", False), (None, False)])
def test_what_blocks_may_be(blocks: Any, allowed: bool) -> None:
    _, check = get_args(BlockList)[1]
    assert check(blocks) is allowed
