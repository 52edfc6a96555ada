"""ViT-CX of vaynexie/CausalX-ViT on the zoo's timm ViT, one picture and class at a time, its noise seeded with 0.

Its clustering calls scikit-learn with a word that has been renamed since; here it says the new one.
"""

from __future__ import annotations

import sys
from typing import Any

import sklearn.cluster
import torch
from making import checkout, picture, save, stand_ins
from torch import Tensor, nn

torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
sys.path.insert(0, str(checkout() / "ViT_CX"))
# OpenCV resizes a Grad-CAM that is computed on the way and thrown away
with stand_ins("cv2", "ttach", resize=lambda picture, size: picture):
    import ViT_CX as peer


def clustering(affinity: str, **settings: Any) -> Any:
    return sklearn.cluster.AgglomerativeClustering(metric=affinity, **settings)


def grid(tokens: Tensor) -> Tensor:
    return peer.reshape_function_vit(tokens, 4, 4)


peer.AgglomerativeClustering = clustering
model, pictures = picture()
found = {}
for threshold in (0.1, 0.3):
    rows = []
    for one in pictures.split(1):
        for target in (1, 2):
            torch.manual_seed(0)
            rows.append(torch.from_numpy(peer.ViT_CX(model, one, model.blocks[-1].norm1, target, threshold, grid)))
    found[f"saliency_{threshold}"] = torch.stack(rows).unflatten(0, (2, 2))  # [picture, target, H, W]
save("vit_cx", logits=model(pictures), **found)
