"""Attention rollout and gradient rollout of jacobgil/vit-explain on the zoo's timm ViT, one image at a time.

vit-explain divides column j by the sum of row j. The arrays named ``rows_*`` were computed by the same code with sums
that keep their dimension, so that rows are divided by their sums.
"""

from __future__ import annotations

import warnings

import torch
from peer_tools import checkout, image_model, load, save, stand_ins
from torch import Tensor

warnings.filterwarnings("ignore")


class KeepsDimension(Tensor):
    """A tensor whose sums along an axis keep that axis."""

    def sum(self, dim: int) -> Tensor:  # type: ignore[override]
        return super().sum(dim, keepdim=True)


def rows(maps: list[Tensor]) -> list[Tensor]:
    return [m.clone().as_subclass(KeepsDimension) for m in maps]


def cls_is_among_smallest(maps: list[Tensor], share: float, head_fusion: str) -> bool:
    """Return True if the attention of [CLS] to itself, which is never discarded, is among the smallest in any block."""
    fused = [m.mean(1) if head_fusion == "mean" else getattr(m, "a" + head_fusion)(1) for m in maps]
    return any(0 in f.flatten().argsort()[: int(f.numel() * share)] for f in fused)


CLASS = 2
SHARES = (0.0, 0.1, 0.5, 0.9)
root = checkout()
with stand_ins("cv2"):
    attention = load(root / "vit_rollout.py", "vit_rollout")
    gradient = load(root / "vit_grad_rollout.py", "vit_grad_rollout")
model, images = image_model()
out: dict[str, list[Tensor]] = {}
for image in images.split(1):
    result = {"logits": model(image)[0].detach()}
    for head_fusion in ("mean", "max", "min"):
        rollout = attention.VITAttentionRollout(model, head_fusion=head_fusion, discard_ratio=0.0)
        result[f"published_{head_fusion}"] = torch.from_numpy(rollout(image))
        maps = rollout.attentions
        for share in SHARES:
            result[f"rows_{head_fusion}_{share}"] = torch.from_numpy(attention.rollout(rows(maps), share, head_fusion))
        result[f"spared_{head_fusion}"] = torch.tensor([cls_is_among_smallest(maps, share, head_fusion) for share in SHARES])
    # the peer's collector pairs a block's map with another block's gradient; here each map has its own gradient
    attention_maps: list[Tensor] = []
    handles = [m.attn_drop.register_forward_hook(lambda _m, _a, o: attention_maps.append(o)) for m in model.blocks.modules() if hasattr(m, "attn_drop")]
    gradients = torch.autograd.grad(model(image)[0, CLASS], attention_maps)
    for handle in handles:
        handle.remove()
    for share in (0.0, 0.9):
        result[f"gradient_{share}"] = torch.from_numpy(gradient.grad_rollout(rows([m.detach() for m in attention_maps]), rows(list(gradients)), share))
    for key, value in result.items():
        out.setdefault(key, []).append(value.as_subclass(Tensor))
save("vit_explain", **{key: torch.stack(values) for key, values in out.items()})
