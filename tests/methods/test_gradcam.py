"""Grad-CAM against the same formula written with hooks: the tokens of the picture alone are averaged over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import IMAGES, build

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
