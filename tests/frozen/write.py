"""Writes the stored scores: ``python -m tests.frozen.write [--model NAME]``.

Stored are the scores of every registered method, and of some settings that choose another formula, on about 40 tiny models with
random weights from seeds, in float64: for a padded batch of two samples and, with each method's default settings, for its first
sample alone; and ``explain_generation`` of some methods for two language models. Every part of an explanation is stored, and so
are the inputs and the output of each model. Slow methods make few steps (``FEW``). Of a map of more than 256 numbers, 62 numbers
at evenly spread positions, the sum and the norm are stored. ``scores.safetensors`` holds the maps, and ``refusals.json`` the class
name of the error where a method does not apply to a model.

``test_frozen.py`` compares the scores of today with these. Write them anew only if scores change for a reason that the CHANGELOG
gives, or if a method, a setting or a model is added. ``python -m tests.frozen.compare`` shows before what will change.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# isort: off
from frozen.compare import FOREIGN, MODELS, REFUSALS, SCORES, computed, stored
from safetensors.torch import save_file
from torch import Tensor
# isort: on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="only this model; those of the others stay as they are")
    only = parser.parse_args().model
    kept = {name: own for name, own in stored().items() if not name.startswith(f"{only} | ")} if only else {}
    maps: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    refusals: dict[str, str] = {}
    for name, answer in chain(kept.items(), *map(computed, [only] if only else MODELS)):
        if isinstance(answer, str):
            refusals[name] = answer
            if answer.startswith(FOREIGN):
                sys.stderr.write(f"{name}: {answer}\n")
            continue
        for part, own in answer.items():
            key, whole = f"{name} | {part}", len(own.numbers) == math.prod(own.shape)
            maps[key] = own.numbers.reshape(own.shape) if whole else own.numbers
            if not whole:
                shapes[key] = own.shape
    save_file(maps, SCORES, {"shapes": json.dumps(shapes, sort_keys=True)})
    REFUSALS.write_text(json.dumps(refusals, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    sys.stderr.write(f"{len(maps)} maps, {len(refusals)} refusals, {time.process_time():.0f} s\n")


if __name__ == "__main__":
    main()
