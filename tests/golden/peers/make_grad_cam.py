"""Grad-CAM of jacobgil/pytorch-grad-cam on the first norm of each block of the zoo's timm ViT, before it is scaled and resized."""

from __future__ import annotations

import sys

import numpy as np
import torch
from peer_tools import checkout, image_model, save, stand_ins
from torch import Tensor

sys.path.insert(0, str(checkout()))
with stand_ins("cv2", "ttach", Multiply=lambda factors: None, Compose=list):
    from pytorch_grad_cam import GradCAM


def grid(tokens: Tensor) -> Tensor:
    """Remove the class token and put channels first, as the peer requires of its users."""
    return tokens[:, 1:].transpose(1, 2).unflatten(2, (4, 4))


model, images = image_model()
out = {"logits": model(images)}
for block, module in enumerate(model.blocks):
    cams = []
    for target in (1, 2):
        cam = GradCAM(model, [module.norm1], grid)
        cam.activations_and_grads(images)[:, target].sum().backward()
        (features,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
        cams.append(np.maximum(cam.get_cam_image(images, module, None, features.numpy(), gradients.numpy()), 0))
        cam.activations_and_grads.release()
    out[f"block_{block}"] = torch.from_numpy(np.stack(cams, 1))  # [image, target, row, column]
save("grad_cam", **out)
