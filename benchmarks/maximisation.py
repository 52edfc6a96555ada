"""Activation maximisation: do its pictures mean to another model what they mean to the one that made them?

    python training/digits.py --seed 1 --threads 1 --workers 0 --window-steps 400 --steps 500 \\
        --work runs/judge --out runs/judge/model
    python benchmarks/maximisation.py judge runs/judge/model
    python benchmarks/maximisation.py figure FOLDER_OF_DEIT_TINY docs/images/maximised.jpg

``judge``: the bundled digits model makes a picture for each digit, by each recipe; counted is for how many of them the
judge, the same architecture trained from another seed, gives that digit its highest score. ``figure``: the pictures of
ten ImageNet classes.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import torch
from PIL import Image

from whyformer.maximize import RECIPES, Maximized, maximize_activation
from whyformer.models import load
from whyformer.show import encode, gallery

CLASSES = (1, 130, 207, 292, 340, 945, 951, 971, 985, 988)


def judge(args: argparse.Namespace) -> None:
    """A row for each recipe: what the judge calls each digit's picture, and how many it calls by their digit."""
    model, other = load("bundled:digits"), load(args.folder)
    for recipe in RECIPES:
        made: list[Maximized] = []
        said: list[int] = []
        for digit in range(10):
            settings = {"recipe": recipe, "steps": args.steps, "processor": model.processor}
            made.append(maximize_activation(model.model, digit, **settings))
            with torch.no_grad():
                said.append(int(other.model(pixel_values=made[-1].image[None]).logits.argmax()))
        right = sum(digit == one for digit, one in enumerate(said))
        print(f"{recipe}: {right} of 10; digits 0 to 9 are called {' '.join(map(str, said))}", flush=True)
        if args.keep:
            (args.keep / f"{recipe}.png").write_bytes(encode(gallery(made, 5)))


def figure(args: argparse.Namespace) -> None:
    """Ten classes of an ImageNet model as one JPEG."""
    model = load(args.folder)
    made = []
    for unit in args.classes:
        made.append(maximize_activation(model.model, unit, steps=args.steps, processor=model.processor))
        print(f"{made[-1].unit}: {made[-1].history[0]:.2f} to {made[-1].activation:.2f}", flush=True)
    with Image.open(io.BytesIO(encode(gallery(made, 5)))) as drawn:
        drawn.convert("RGB").save(args.out, quality=80, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=128)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("judge")
    one.add_argument("folder", help="the other model")
    one.add_argument("--keep", type=Path, help="folder for the pictures")
    one.set_defaults(work=judge)
    one = commands.add_parser("figure")
    one.add_argument("folder", help="an ImageNet model")
    one.add_argument("out", type=Path)
    one.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    one.set_defaults(work=figure)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work(args)


if __name__ == "__main__":
    main()
