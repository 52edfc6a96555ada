"""How far the segmentation figures move when the pictures change by less than one grey level.

    python benchmarks/figure_stability.py --model M --data coco_objects [--seeds 10] [--levels 0.5]

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
from whyformer.datasets import indexed_masks
from whyformer.evaluate.pixels import pixel_spec
from whyformer.evaluate.segmentation import SegmentationCounts, counts, mean_iou, pixel_accuracy
from whyformer.models import load
from whyformer.views import resize

METHODS = {
    "raw_attention": {}, "rollout": {"start_layer": 1}, "transformer_attribution": {"start_layer": 1}, "lrp": {},
    "partial_lrp": {},
}  # fmt: skip
FIGURES = ("pixel accuracy", "mAP", "mIoU")


def figures(made: list[SegmentationCounts]) -> tuple[float, float, float]:
    """(pixel accuracy, mAP, mIoU) over all pictures."""
    accuracy = pixel_accuracy(sum(c.correct for c in made), sum(c.labelled for c in made))
    union = mean_iou(np.sum([c.intersection for c in made], 0), np.sum([c.union for c in made], 0))
    return float(accuracy), 100 * float(np.mean([c.average_precision for c in made])), float(union)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--levels", type=float, default=0.5)
    args = parser.parse_args()
    loaded = load(args.model)
    spec = pixel_spec(loaded.model, loaded.processor)
    samples = [
        (spec.pixels(s.load()), spec.mask(s.mask()), s.label) for s in indexed_masks(args.data) if s.mask is not None
    ]
    double = copy.deepcopy(loaded.model).double()

    def run(model: torch.nn.Module, method: str, seed: int | None) -> tuple[float, float, float]:
        generator = torch.Generator().manual_seed(seed or 0)
        made = []
        for pixels, mask, label in samples:
            noise = torch.zeros_like(pixels)
            if seed is not None:
                noise = (torch.rand(pixels.shape, generator=generator) * 2 - 1) * args.levels / 255
            picture = (pixels + noise / spec.std[:, None, None]).to(next(model.parameters()).dtype)[None]
            found = whyformer.explain(model, picture, method, label, **METHODS[method])
            made.append(counts(resize(torch.as_tensor(found.scores).reshape(1, *_grid(found)), spec.size)[0], mask))
        return figures(made)

    print(f"{len(samples)} pictures, noise of at most {args.levels} grey levels, {args.seeds} seeds")
    print(f"| {'method':<24} | figure | float32 | float64 | under noise: mean | lowest | highest |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for method in METHODS:
        single, exact = run(loaded.model, method, None), run(double, method, None)
        noisy = np.array([run(loaded.model, method, seed) for seed in range(args.seeds)])
        for i, name in enumerate(FIGURES):
            column = noisy[:, i]
            print(
                f"| {method:<24} | {name} | {single[i]:.2f} | {exact[i]:.2f} | {column.mean():.2f} | "
                f"{column.min():.2f} | {column.max():.2f} |",
                flush=True,
            )


def _grid(explanation: whyformer.Explanation) -> tuple[int, int]:
    size = int(np.asarray(explanation.scores).size)
    side = int(size**0.5)
    if side * side != size:
        raise SystemExit(f"{size} scores are no square grid")
    return side, side


if __name__ == "__main__":
    main()
