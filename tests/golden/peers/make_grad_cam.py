"""Grad-CAM of jacobgil/pytorch-grad-cam on the first norm of each block of the zoo's timm ViT, before it is scaled and resized."""

from __future__ import annotations

import sys

import numpy as np
import torch
from making import checkout, picture, save, stand_ins
from torch import Tensor

sys.path.insert(0, str(checkout()))
with stand_ins("cv2", "ttach", Multiply=lambda factors: None, Compose=list):
    from pytorch_grad_cam import GradCAM


def grid(tokens: Tensor) -> Tensor:
    """Without the class token, channels first: what the peer asks its users for."""
    return tokens[:, 1:].transpose(1, 2).unflatten(2, (4, 4))


model, pictures = picture()
out = {"logits": model(pictures)}
for block, module in enumerate(model.blocks):
    found = []
    for target in (1, 2):
        cam = GradCAM(model, [module.norm1], grid)
        cam.activations_and_grads(pictures)[:, target].sum().backward()
        (features,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
        found.append(np.maximum(cam.get_cam_image(pictures, module, None, features.numpy(), gradients.numpy()), 0))
        cam.activations_and_grads.release()
    out[f"block_{block}"] = torch.from_numpy(np.stack(found, 1))  # [picture, target, row, column]
save("grad_cam", **out)
