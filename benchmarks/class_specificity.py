"""Does a method's map depend on the class? Two classes on one picture, for every method.

    python benchmarks/class_specificity.py [--scenes 100] [--methods a,b] [--data ../shared]

Two-object pictures of the CVPR 2021 paper with DeiT-tiny, and scenes of two to four handwritten digits with
bundled:digits. Printed: the correlation between the maps of the two classes (1 = the class changes nothing), and the
share of relevance on the named object: Σ of the positive part of class A's map on A's region, divided by its sum on A's
and B's regions together (½ = blind; a map as blind as rollout gives the same figure to both classes).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from PIL import Image

import whyformer
from whyformer.models import Loaded, load

# (class, box in a 224 × 224 picture: left, top, right, bottom), drawn by hand
PAIRS = {
    "el3.png": ((386, (0, 55, 92, 195)), (340, (92, 100, 224, 200))),
    "dogcat2.png": ((207, (35, 0, 103, 224)), (285, (105, 35, 182, 224))),
    "catdog.png": ((243, (75, 8, 165, 125)), (282, (45, 125, 205, 224))),
}
# One setting for each, small enough to run in minutes; the others keep their defaults
SETTINGS: dict[str, dict[str, Any]] = {
    "smoothgrad": {"samples": 10},
    "integrated_gradients": {"steps": 16},
    "attention_flow": {"limit": 4096},
}
SLOW = {"attention_flow", "vit_cx", "value_zeroing"}


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation of two maps; NaN where one is constant."""
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def share(values: np.ndarray, own: np.ndarray, other: np.ndarray) -> float:
    """Share of the positive relevance on both regions that lies on the own one."""
    positive = values.clip(min=0)
    total = positive[own].sum() + positive[other].sum()
    return float(positive[own].sum() / total) if total > 0 else float("nan")


def maps(loaded: Loaded, picture: Image.Image, method: str, classes: tuple[int, int]) -> list[np.ndarray]:
    """The maps of two classes of one picture, at the size of the model's input."""
    settings = SETTINGS.get(method, {})
    found = []
    for target in classes:
        explanation = whyformer.explain(
            loaded.model, picture, method, target=target, processor=loaded.processor, **settings
        )
        found.append(explanation.heatmap(explanation.image_size)[0].double().numpy())
    return found


def two_objects(data: Path, loaded: Loaded, method: str) -> Iterator[tuple[str, float, float, float]]:
    """(picture, correlation, own share of A's map, own share of B's map)."""
    for name, ((a, box_a), (b, box_b)) in PAIRS.items():
        picture = (
            Image.open(data / "data" / "two_objects" / name).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
        )
        regions = []
        for left, top, right, bottom in (box_a, box_b):
            region = np.zeros((224, 224), dtype=bool)
            region[top:bottom, left:right] = True
            regions.append(region)
        first, second = maps(loaded, picture, method, (a, b))
        yield name, correlation(first, second), share(first, *regions), share(second, *reversed(regions))


def digits(loaded: Loaded, method: str, count: int) -> tuple[float, float]:
    """(mean correlation, mean own share) over the first two digits of scenes of held-out digit images."""
    from whyformer.datasets import digit_scenes

    correlations, shares = [], []
    for scene in digit_scenes(count, seed=5, split="test", min_digits=2, max_digits=4):
        first, second = maps(loaded, scene.image, method, (scene.digits[0], scene.digits[1]))
        correlations.append(correlation(first, second))
        own, other = scene.masks[0], scene.masks[1]
        shares += [share(first, own, other), share(second, other, own)]
    return float(np.nanmean(correlations)), float(np.nanmean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--methods", help="comma-separated; default: all for pictures but the slow ones")
    arguments = parser.parse_args()
    names = [m.name for m in whyformer.list_methods() if m.modality != "text" and m.name not in SLOW]
    if arguments.methods:
        names = arguments.methods.split(",")
    scenes = load("bundled:digits")
    weights = arguments.data / "weights" / "deit_tiny_in1k"
    deit = load(str(weights)) if weights.is_dir() else None
    pictures = list(PAIRS) if deit else []
    columns = [p.removesuffix(".png") for p in pictures]
    print(
        "| method | "
        + " | ".join(f"{c} corr." for c in columns)
        + " | own share A / B | digits corr. | digits own share |"
    )
    print("|---" * (len(columns) + 4) + "|")
    for name in names:
        rows = list(two_objects(arguments.data, deit, name)) if deit else []
        corr, own = digits(scenes, name, arguments.scenes)
        pair = f"{mean(r[2] for r in rows):.2f} / {mean(r[3] for r in rows):.2f}" if rows else ""
        cells = [f"{r[1]:.2f}" for r in rows]
        print(f"| {name} | " + " | ".join(cells) + f" | {pair} | {corr:.2f} | {own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
