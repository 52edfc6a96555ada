"""Write the stored scores: ``python -m tests.frozen.write [--model NAME]``.

It stores the scores of every registered method, and of some settings that select another formula, on about 40 tiny models with
seeded random weights, in float64: for a padded batch of two samples and, with the default settings of each method, for its first
sample; and ``explain_generation`` of some methods for two language models. All parts of an explanation, and the inputs and the
output of each model, are stored. Slow methods use few steps (``FAST``). Of a map with more than 256 numbers, 62 evenly spaced
numbers, the sum and the norm are stored. ``scores.safetensors`` has the maps, and ``refusals.json`` the class name of the error
if a method does not apply to a model.

``test_frozen.py`` compares current scores with these. Update them only if scores change for a reason that the CHANGELOG states,
or if a method, a setting or a model is added. ``python -m tests.frozen.compare`` shows the changes before.
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
from frozen.compare import FOREIGN, MODELS, REFUSALS, SCORES, compute_model, read_stored
from safetensors.torch import save_file
from torch import Tensor
# isort: on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="only this model; the scores of other models stay unchanged")
    only = parser.parse_args().model
    unchanged = {name: answer for name, answer in read_stored().items() if not name.startswith(f"{only} | ")} if only else {}
    maps: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    refusals: dict[str, str] = {}
    for name, answer in chain(unchanged.items(), *map(compute_model, [only] if only else MODELS)):
        if isinstance(answer, str):
            refusals[name] = answer
            if answer.startswith(FOREIGN):
                sys.stderr.write(f"{name}: {answer}\n")
            continue
        for part, stored_map in answer.items():
            key, is_complete = f"{name} | {part}", len(stored_map.numbers) == math.prod(stored_map.shape)
            maps[key] = stored_map.numbers.reshape(stored_map.shape) if is_complete else stored_map.numbers
            if not is_complete:
                shapes[key] = stored_map.shape
    save_file(maps, SCORES, {"shapes": json.dumps(shapes, sort_keys=True)})
    REFUSALS.write_text(json.dumps(refusals, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    sys.stderr.write(f"{len(maps)} maps, {len(refusals)} refusals, {time.process_time():.0f} s\n")


if __name__ == "__main__":
    main()
