"""Attention rollout and gradient rollout of jacobgil/vit-explain on the zoo's timm ViT, one picture at a time.

vit-explain divides column j by the sum of row j. What the arrays named ``rows_*`` hold was computed by the same code
with sums that keep their dimension, so that rows are divided by their sums.
"""

from __future__ import annotations

import warnings

import torch
from making import checkout, load, picture, save, stand_ins
from torch import Tensor

warnings.filterwarnings("ignore")


class KeepsDimension(Tensor):
    """A tensor whose sums along an axis keep that axis."""

    def sum(self, dim: int) -> Tensor:  # type: ignore[override]
        return super().sum(dim, keepdim=True)


def rows(maps: list[Tensor]) -> list[Tensor]:
    return [m.clone().as_subclass(KeepsDimension) for m in maps]


def first_is_small(maps: list[Tensor], share: float, head_fusion: str) -> bool:
    """Whether the attention of [CLS] to itself, which is spared, is among the smallest in any block."""
    fused = [m.mean(1) if head_fusion == "mean" else getattr(m, "a" + head_fusion)(1) for m in maps]
    return any(0 in f.flatten().argsort()[: int(f.numel() * share)] for f in fused)


CLASS = 2
SHARES = (0.0, 0.1, 0.5, 0.9)
root = checkout()
with stand_ins("cv2"):
    attention = load(root / "vit_rollout.py", "vit_rollout")
    gradient = load(root / "vit_grad_rollout.py", "vit_grad_rollout")
model, pictures = picture()
out: dict[str, list[Tensor]] = {}
for one in pictures.split(1):
    found = {"logits": model(one)[0].detach()}
    for head_fusion in ("mean", "max", "min"):
        opened = attention.VITAttentionRollout(model, head_fusion=head_fusion, discard_ratio=0.0)
        found[f"published_{head_fusion}"] = torch.from_numpy(opened(one))
        maps = opened.attentions
        for share in SHARES:
            found[f"rows_{head_fusion}_{share}"] = torch.from_numpy(attention.rollout(rows(maps), share, head_fusion))
        found[f"spared_{head_fusion}"] = torch.tensor([first_is_small(maps, share, head_fusion) for share in SHARES])
    # its own collector pairs a block's map with another block's gradient: here each map has its own
    kept: list[Tensor] = []
    handles = [m.attn_drop.register_forward_hook(lambda _m, _a, o: kept.append(o)) for m in model.blocks.modules() if hasattr(m, "attn_drop")]
    flows = torch.autograd.grad(model(one)[0, CLASS], kept)
    for handle in handles:
        handle.remove()
    for share in (0.0, 0.9):
        found[f"gradient_{share}"] = torch.from_numpy(gradient.grad_rollout(rows([m.detach() for m in kept]), rows(list(flows)), share))
    for key, value in found.items():
        out.setdefault(key, []).append(value.as_subclass(Tensor))
save("vit_explain", **{key: torch.stack(values) for key, values in out.items()})
