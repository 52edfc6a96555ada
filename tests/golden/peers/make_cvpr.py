"""Segmentation and perturbation figures of hila-chefer/Transformer-Explainability for seeded 14 × 14 maps.

Both are functions of scripts that cannot be imported; they run unedited, with the names that they use defined: `eval_batch` of
imagenet_seg_eval.py, whose method returns the seeded maps, and `eval` of pertubation_eval_from_hdf5.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from peer_tools import checkout, function, load, save, tiny_models
from torch import nn

torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
root = checkout()
figures = load(root / "utils" / "metrices.py", "metrices")
draw = np.random.default_rng(0)
maps = draw.standard_normal((6, 14, 14))
objects = draw.random((6, 14, 14)) < 0.4
out: dict[str, object] = {"maps": maps, "objects": objects}

method = SimpleNamespace()
segmentation = function(
    root / "baselines" / "ViT" / "imagenet_seg_eval.py", "eval_batch", torch=torch, np=np, batch_size=1, lrp=method,
    args=SimpleNamespace(save_img=False, method="transformer_attribution", thr=0.0, is_ablation=False),
    **{name: getattr(figures, name) for name in ("batch_pix_accuracy", "batch_intersection_union", "get_ap_scores", "get_f1_scores")},
)  # fmt: skip
rows = []
for map_, truth in zip(maps, objects, strict=True):
    method.generate_LRP = lambda *args, _map=map_, **kwargs: torch.from_numpy(_map)
    labels = torch.from_numpy(truth.repeat(16, 0).repeat(16, 1)).long()[None]
    correct, labelled, inter, union, ap, _, _, _ = segmentation(torch.zeros(1, 3, 224, 224), labels, nn.Identity(), 0)
    rows.append((correct, labelled, *inter, *union, *ap))
names = ("correct", "labelled", "intersection_background", "intersection_object", "union_background", "union_object", "average_precision")
out.update(zip(names, np.array(rows, dtype=np.float64).T, strict=True))

images, model = tiny_models.photographs(), tiny_models.PooledModel()
out["logits"] = model(images * 2 - 1)
label = out["logits"].argmax(-1)
label[-1] = (label[-1] + 1) % 5  # a wrong label
large = nn.functional.interpolate(torch.from_numpy(maps)[:, None], scale_factor=16, mode="bilinear")
normalize = function(root / "baselines" / "ViT" / "pertubation_eval_from_hdf5.py", "normalize", torch=torch)
evaluate = function(
    root / "baselines" / "ViT" / "pertubation_eval_from_hdf5.py", "eval", torch=torch, np=np, os=__import__("os"), tqdm=lambda x: x,
    device="cpu", model=model, normalize=normalize, imagenet_ds=range(6), sample_loader=[(images, large, label)], print=lambda *a: None,
)  # fmt: skip
for name, neg in (("positive", False), ("negative", True)):
    with tempfile.TemporaryDirectory() as folder:
        evaluate(SimpleNamespace(scale="per", wrong=False, neg=neg, experiment_dir=folder))
        out[f"{name}_hits"] = np.load(Path(folder) / "perturbations_hits.npy").T
        out["clean_hits"] = np.load(Path(folder) / "model_hits.npy")
save("cvpr", label=label, **out)
