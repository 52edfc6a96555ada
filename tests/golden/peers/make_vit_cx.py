"""ViT-CX of vaynexie/CausalX-ViT on the zoo's timm ViT, one image and class at a time, with noise of seed 0.

Its clustering passes an argument to scikit-learn that was renamed later; here the new name is used.
"""

from __future__ import annotations

import sys
from typing import Any

import sklearn.cluster
import torch
from peer_tools import checkout, image_model, save, stand_ins
from torch import Tensor, nn

torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
sys.path.insert(0, str(checkout() / "ViT_CX"))
# the peer uses OpenCV only to resize a Grad-CAM that it discards
with stand_ins("cv2", "ttach", resize=lambda image, size: image):
    import ViT_CX as peer


def clustering(affinity: str, **settings: Any) -> Any:
    return sklearn.cluster.AgglomerativeClustering(metric=affinity, **settings)


def grid(tokens: Tensor) -> Tensor:
    return peer.reshape_function_vit(tokens, 4, 4)


peer.AgglomerativeClustering = clustering
model, images = image_model()
saliency = {}
for threshold in (0.1, 0.3):
    rows = []
    for image in images.split(1):
        for target in (1, 2):
            torch.manual_seed(0)
            rows.append(torch.from_numpy(peer.ViT_CX(model, image, model.blocks[-1].norm1, target, threshold, grid)))
    saliency[f"saliency_{threshold}"] = torch.stack(rows).unflatten(0, (2, 2))  # [image, target, H, W]
save("vit_cx", logits=model(images), **saliency)
