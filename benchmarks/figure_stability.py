"""How far the segmentation or perturbation figures move when the pictures change by less than one grey level.

    python benchmarks/figure_stability.py --model M --data coco_objects [--seeds 10] [--levels 0.5] [--methods a,b]
    python benchmarks/figure_stability.py --model M --data imagenet_samples --files a.jpg,b.jpg

Each picture, squashed to the model's size, gets uniform noise of at most ``levels`` of its 256 grey levels: less than
decoding the same JPEG with another library, or squashing it with another filter, may change. A figure that moves by
more than a tolerance under this noise cannot be reproduced to that tolerance. Also printed: the unchanged pictures in
float32 and in float64.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch

import whyformer
from whyformer.benchmarks.batches import pixel_spec
from whyformer.datasets import open_pictures
from whyformer.evaluation.metrics.faithfulness import FRACTIONS, accuracy_auc, removal_masks
from whyformer.evaluation.metrics.localisation import SegmentationCounts, counts, mean_iou, pixel_accuracy
from whyformer.explanation.views import resize
from whyformer.models import load

METHODS = {
    "raw_attention": {}, "rollout": {"start_layer": 1}, "transformer_attribution": {"start_layer": 1}, "lrp": {},
    "partial_lrp": {},
}  # fmt: skip


def figures(made: list[SegmentationCounts]) -> tuple[float, float, float]:
    """(pixel accuracy, mAP, mIoU) over all pictures."""
    accuracy = pixel_accuracy(sum(c.correct for c in made), sum(c.labelled for c in made))
    union = mean_iou(np.sum([c.intersection for c in made], 0), np.sum([c.union for c in made], 0))
    return float(accuracy), 100 * float(np.mean([c.average_precision for c in made])), float(union)


def steps(pixels: torch.Tensor, masks: np.ndarray, black: torch.Tensor) -> torch.Tensor:
    """``[10, C, H, W]``: the picture, and with 10 to 90 % of its pixels black."""
    gone = torch.from_numpy(masks).reshape(len(masks), 1, *pixels.shape[-2:])
    return torch.cat([pixels[None], torch.where(gone, black, pixels)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--files", help="perturbation figures of these pictures, instead of segmentation figures")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--levels", type=float, default=0.5)
    args = parser.parse_args()
    loaded = load(args.model)
    spec = pixel_spec(loaded.model, loaded.processor)
    _, found = open_pictures(args.data)
    chosen = [s for s in found if (s.id in args.files.split(",") if args.files else s.mask is not None)]
    samples = [(spec.pixels(s.load()), s.mask and spec.mask(s.mask()), s.label) for s in chosen]
    double = copy.deepcopy(loaded.model).double()
    black = (-spec.mean / spec.std)[:, None, None]
    names = ("AUC negative", "AUC positive") if args.files else ("pixel accuracy", "mAP", "mIoU")

    def heat(model: torch.nn.Module, method: str, picture: torch.Tensor, label: int) -> torch.Tensor:
        picture = picture.to(next(model.parameters()).dtype)[None]
        scores = torch.as_tensor(whyformer.explain(model, picture, method, label, **METHODS[method]).scores)
        side = int(scores.numel() ** 0.5)
        return resize(scores.reshape(1, side, side), spec.size)[0]

    def run(model: torch.nn.Module, method: str, seed: int | None) -> tuple[float, ...]:
        generator = torch.Generator().manual_seed(seed or 0)
        made, correct = [], []
        for clean, mask, label in samples:
            noise = torch.zeros_like(clean)
            if seed is not None:
                noise = (torch.rand(clean.shape, generator=generator) * 2 - 1) * args.levels / 255
            picture = clean + noise / spec.std[:, None, None]
            scores = heat(model, method, picture, label)
            if not args.files:
                made.append(counts(scores, mask))
                continue
            with torch.inference_mode():
                masks = [removal_masks(scores, FRACTIONS, highest_first=first) for first in (False, True)]
                stacks = [steps(picture, gone, black) for gone in masks]
                tops = [loaded.model(pixel_values=s.float()).logits.argmax(-1) for s in stacks]
            correct.append([(t == label).tolist() for t in tops])
        if args.files:
            return tuple(accuracy_auc((0, *FRACTIONS), np.array(correct)).mean(0).tolist())
        return figures(made)

    print(f"{len(samples)} pictures, noise of at most {args.levels} grey levels, {args.seeds} seeds")
    print(f"| {'method':<24} | figure | float32 | float64 | under noise: mean | lowest | highest |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for method in args.methods.split(","):
        single, exact = run(loaded.model, method, None), run(double, method, None)
        noisy = np.array([run(loaded.model, method, seed) for seed in range(args.seeds)])
        for i, name in enumerate(names):
            column = noisy[:, i]
            print(
                f"| {method:<24} | {name} | {single[i]:.2f} | {exact[i]:.2f} | {column.mean():.2f} | "
                f"{column.min():.2f} | {column.max():.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
