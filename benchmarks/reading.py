"""Where in the picture bundled:reader's digits come from: pointing game and energy in the ink of each digit it reads.

    python benchmarks/reading.py --scenes 100

Held-out scenes of 2 to 4 digits, read from left to right; the digits that the model reads rightly count, each with the
mask of its own ink. A hit: the map's largest value, at the model's input size, lies on the ink, or within --reach
pixels of it (half a patch by default: patches are wider than strokes). Energy: the share of positive scores in the ink.
Random maps are scores of patches drawn at random.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter

import whyformer
from whyformer.datasets.reading import reading_scenes
from whyformer.errors import MethodNotApplicable
from whyformer.evaluation.metrics.localisation import energy_in_mask, pointing_hit
from whyformer.explanation.views import resize
from whyformer.models import load

QUESTION = "read from left to right :"
METHODS = (
    "random", "raw_attention", "rollout", "gae", "transformer_attribution", "gradcam_attention", "gradcam", "saliency",
    "input_x_gradient", "integrated_gradients", "lrp_ah_ln", "attnlrp", "cp_lrp", "libragrad", "lrp", "partial_lrp",
)  # fmt: skip


def near(mask: np.ndarray, reach: int) -> np.ndarray:
    """The mask and what lies within ``reach`` pixels of it (in a square)."""
    grown = Image.fromarray(mask.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(2 * reach + 1))
    return np.asarray(grown) > 0


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap of a mean."""
    generator = np.random.default_rng(0)
    means = np.array(values)[generator.integers(0, len(values), (2000, len(values)))].mean(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:reader")
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--reach", type=int, default=4)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loaded = load(args.model)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    refused: dict[str, str] = {}
    seconds: dict[str, float] = defaultdict(float)
    for number, scene in enumerate(reading_scenes(args.scenes, seed=2027)):
        answer = " ".join(map(str, scene.digits))
        for method in [m for m in args.methods.split(",") if m not in refused]:
            begin = time.perf_counter()
            try:
                g = whyformer.explain_generation(
                    loaded.model, QUESTION, answer, "input_x_gradient" if method == "random" else method,
                    loaded.processor, images=scene.image,
                )  # fmt: skip
            except MethodNotApplicable as error:
                refused[method] = str(error)
                continue
            seconds[method] += time.perf_counter() - begin
            for t, mask in enumerate(scene.masks):
                if g[t].top(0, 1)[0][0] != g.ids[g.start + t]:
                    continue  # it would say another digit
                maps = g[t].part("pixel_values").heatmap()
                if method == "random":
                    drawn = torch.rand(1, 14, 14, generator=torch.Generator().manual_seed(100 * number + t))
                    maps = resize(drawn, (112, 112))
                scores = maps[0].double().numpy()
                found[method]["hit"].append(float(pointing_hit(scores, mask)))
                found[method]["near"].append(float(pointing_hit(scores, near(mask, args.reach))))
                found[method]["energy"].append(float(energy_in_mask(scores, mask)))
    print(f"| method | on the ink | within {args.reach} pixels | energy in the ink | s a scene |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for method in sorted(found, key=lambda m: -np.mean(found[m]["near"])):
        cells = []
        for name in ("hit", "near", "energy"):
            low, high = interval(found[method][name])
            cells.append(f"{np.mean(found[method][name]):.3f} [{low:.3f}, {high:.3f}]")
        print(f"| {method} | {' | '.join(cells)} | {seconds[method] / args.scenes:.2f} |")
    digits = len(next(iter(found.values()))["hit"])
    print(f"{digits} digits of {args.scenes} scenes")
    for method, why in refused.items():
        print(f"{method}: {why}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
