"""Compare current scores with stored scores: ``python -m tests.frozen.compare [--method METHOD] [--model NAME]``.

Prints every cell that differs by more than 1e-6 of the maximum of the stored map, that had scores and is now refused, or that
raises an error of another library; then the number of compared cells, and of refusals that became scores.

A cell is a model, a method with its settings, and a form of the inputs: ``hf_vit | lrp rule=gamma | batch``. The cells ``inputs``
and ``output`` of a model store its inputs and plain output: if these differ, the model is different (for example because of
other versions of the libraries that build it), and its scores say nothing about the methods.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
# isort: off
import conftest  # noqa: E402, F401  one thread, no network, an importable torchvision
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor  # noqa: E402

import whyformer  # noqa: E402
from frozen import models  # noqa: E402
from frozen.models import BATCH, GENERATION, MODELS, SINGLE, Model  # noqa: E402
from whyformer.methods import METHODS  # noqa: E402
# isort: on

SCORES = Path(__file__).with_name("scores.safetensors")
REFUSALS = Path(__file__).with_name("refusals.json")
TOLERANCE = 1e-6
# cell, or a substring of cells -> (larger tolerance, reason)
TOLERANCES: dict[str, tuple[float, str]] = {
    "semantic segmentation/segformer | lrp rule=alpha_beta alpha=2.0 | batch": (
        1e-4, "the stored numbers move by 4e-5 if the weights move by 1e-15 of themselves; those of a tape by 3e-12",
    ),
    "mamba | lrp rule=epsilon": (1e-2, "parts of the model compute in float32, whose rounding differs between processors; lrp divides"),
    "causal language model/mamba": (1e-4, "parts of the model compute in float32, whose rounding differs between processors"),
    "hf_vit/eager": (1e-4, "the model takes its softmax in float32, whose rounding differs between processors; lrp divides by it"),
}  # fmt: skip
# numbers below are rounding errors: lower limit of the maximum that differences are divided by
ROUNDING = 1e-7

# -- settings ----------------------------------------------------------------------------------------------------------
FAST: dict[str, Any] = {"samples": 2, "steps": 2, "masks": 4, "patch": 8}
# settings that select another formula; computed for the batch only
FORMULA_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("lrp", {"rule": "shared"}),
    ("lrp", {"rule": "alpha_beta", "alpha": 2.0}),
    ("lrp", {"rule": "epsilon"}),
    ("lrp", {"rule": "gamma"}),
    ("lrp_ah", {"secant": True}),
    ("lrp_ah_ln", {"secant": True}),
    ("attnlrp", {"share": 0.8}),
    ("libragrad", {"share": 0.5}),
    ("partial_lrp", {"rule": "epsilon"}),
    ("saliency", {"norm": "sum"}),
    ("rollout", {"discard_ratio": 0.5, "head_fusion": "max"}),
    ("rollout", {"gradient_weighted": True}),
    ("transformer_attribution", {"weighting": "attention"}),
    ("norm_attention", {"scope": "attention"}),
    ("gae", {"composite": "ah_ln"}),
    ("gae", {"affinity": True}),
    ("attcat", {"composite": "gim"}),
    ("gradcam", {"composite": "libra"}),
    ("beyond_intuition", {"variant": "head"}),
]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in sorted(METHODS)},
    **{" ".join([name, *(f"{k}={v}" for k, v in settings.items())]): (name, settings) for name, settings in FORMULA_SETTINGS},
}
GENERATION_METHODS = [
    "attnlrp", "auto", "gae", "input_x_gradient", "integrated_gradients", "lrp", "lrp_ah_ln", "occlusion", "rollout",
    "transformer_attribution",
]  # fmt: skip
ANSWER = "answer"
PROMPT, CONTINUATION = [2, 9, 5, 17, 30], [8, 11, 4, 25]


# -- storage -----------------------------------------------------------------------------------------------------------
MAX_STORED = 256
POSITIONS = 62


@dataclass(frozen=True)
class StoredMap:
    """Shape and numbers of a map. For more than 256 numbers: 62 evenly spaced numbers, then sum and norm of the whole map."""

    shape: tuple[int, ...]
    numbers: Tensor

    @staticmethod
    def of(values: Tensor) -> StoredMap:
        flat = values.detach().double().flatten()
        if len(flat) <= MAX_STORED:
            return StoredMap(tuple(values.shape), flat)
        positions = torch.arange(POSITIONS) * (len(flat) - 1) // (POSITIONS - 1)
        return StoredMap(tuple(values.shape), torch.cat([flat[positions], flat.sum()[None], flat.norm()[None]]))

    def difference(self, read_stored: StoredMap) -> float:
        """max |Δ| / max |stored|; if sum and norm are stored, also their |Δ| / norm. Infinite for another shape."""
        if self.shape != read_stored.shape:
            return float("inf")
        if not len(read_stored.numbers):
            return 0.0
        is_complete = len(read_stored.numbers) == math.prod(read_stored.shape)
        differences, size = (self.numbers - read_stored.numbers).abs(), read_stored.numbers.abs()
        groups = [slice(None)] if is_complete else [slice(POSITIONS), slice(POSITIONS, None)]
        sizes = [size.max()] if is_complete else [size[:POSITIONS].max(), size[-1]]
        largest = max(float(differences[g].max() / s.clamp(min=ROUNDING)) for g, s in zip(groups, sizes, strict=True))
        return largest if math.isfinite(largest) else float("inf")


Parts = dict[str, StoredMap]
Answer = Parts | str  # maps of all parts of an explanation, or class name of the error
FOREIGN = "foreign "


def cell(model: str, setting: str, form: str) -> str:
    return f"{model} | {setting} | {form}"


def read_stored() -> dict[str, Answer]:
    """Read the stored answers: cell -> maps or class name of the error."""
    answers: dict[str, Answer] = dict(json.loads(REFUSALS.read_text(encoding="utf-8")))
    with safe_open(SCORES, "pt") as file:
        shapes = json.loads(file.metadata()["shapes"])  # shapes of maps that are stored in part
        for key in file.keys():  # noqa: SIM118  not a mapping
            name, _, part = key.rpartition(" | ")
            numbers = file.get_tensor(key)
            shape = tuple(shapes.get(key, numbers.shape))
            answers.setdefault(name, {})[part] = StoredMap(shape, numbers.flatten())  # type: ignore[index]
    return answers


# -- computing ---------------------------------------------------------------------------------------------------------
def answer(compute: Callable[[], Parts]) -> Answer:
    """Return maps, or the class name of the error."""
    torch.manual_seed(0)
    try:
        return compute()
    except whyformer.WhyformerError as error:
        return type(error).__name__
    except Exception as error:
        return FOREIGN + type(error).__name__


def explain(model: Model, setting: str, form: str) -> Parts:
    method, settings = SETTINGS[setting]
    fast = {name: value for name, value in FAST.items() if name in METHODS[method].settings}
    explanation = whyformer.explain(model.module, model.inputs[form], method, model.targets[form], **fast, **settings)
    return {name: StoredMap.of(explanation.part(name).scores) for name in explanation.inputs}


def explain_generation(model: Model, method: str) -> Parts:
    fast = {name: value for name, value in FAST.items() if name in METHODS[method].settings}
    explanation = whyformer.explain_generation(model.module, PROMPT, CONTINUATION, method, **fast)
    return {"matrix": StoredMap.of(explanation.matrix), "value": StoredMap.of(explanation.value)}


def inputs_and_output(model: Model) -> Iterator[tuple[str, Parts]]:
    """Inputs and plain output of the model."""
    inputs = model.inputs[BATCH]
    inputs = inputs if isinstance(inputs, dict) else {"": inputs}
    yield "inputs", {name: StoredMap.of(value) for name, value in inputs.items()}
    yield "output", {"": StoredMap.of(model.output())}


def compute_model(name: str, method: str | None = None) -> Iterator[tuple[str, Answer]]:
    """Yield (cell, current answer) of a model, optionally for one method only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = models.build(name)
        if name in GENERATION:
            for cell_method in GENERATION_METHODS:
                if method in (None, cell_method):
                    yield cell(name, cell_method, ANSWER), answer(lambda cell_method=cell_method: explain_generation(model, cell_method))
            return
        for part_name, parts in inputs_and_output(model):
            yield cell(name, part_name, BATCH), parts
        for setting, (cell_method, settings) in SETTINGS.items():
            for form in (BATCH,) if settings else (BATCH, SINGLE):
                if method in (None, cell_method):
                    yield cell(name, setting, form), answer(lambda s=setting, f=form: explain(model, s, f))


# -- comparing ---------------------------------------------------------------------------------------------------------
@dataclass
class Comparison:
    """Cells that differ -> description; refusals that became scores; largest difference of cells that agree."""

    differ: dict[str, str] = field(default_factory=dict)
    resolved: list[str] = field(default_factory=list)
    count: int = 0
    largest: tuple[float, str] = (0.0, "")

    def add(self, name: str, old: Answer, new: Answer) -> None:
        self.count += 1
        if isinstance(new, str):
            if isinstance(old, dict):
                self.differ[name] = f"had scores, now {new}"
            elif new.startswith(FOREIGN) and new != old:
                self.differ[name] = f"was {old}, now {new}"
        elif isinstance(old, str):
            self.resolved.append(name)
        elif new.keys() != old.keys():
            self.differ[name] = f"has the parts {sorted(new)}, not {sorted(old)}"
        else:
            difference, part = max((new[part].difference(old[part]), part) for part in old)
            if new[part].shape != old[part].shape:
                self.differ[name] = (
                    f"has the shape {new[part].shape}, not {old[part].shape}, in {part or 'its only part'}"
                )
            elif difference > tolerance(name):
                self.differ[name] = f"differs by {difference:.1e} in {part or 'its only part'}"
            else:
                self.largest = max(self.largest, (difference, name))


def tolerance(name: str) -> float:
    return max([TOLERANCE, *(larger for part, (larger, _) in TOLERANCES.items() if part in name)])


def compare_model(name: str, before: dict[str, Answer], method: str | None = None) -> Comparison:
    """Compare all stored cells of a model with current answers. Cells that are not stored are ignored."""
    comparison = Comparison()
    remaining = {key for key in before if key.startswith(f"{name} | ")}
    for key, new in compute_model(name, method):
        if key in remaining:
            comparison.add(key, before[key], new)
            remaining.remove(key)
    for key in sorted(remaining) if method is None else ():
        comparison.differ[key] = "is no longer computed: its method or setting was removed"
    return comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(METHODS), help="only this method, with all its settings")
    parser.add_argument("--model", choices=list(MODELS), help="only this model")
    arguments = parser.parse_args()
    before, total = read_stored(), Comparison()
    for name in [arguments.model] if arguments.model else MODELS:
        start = time.process_time()
        comparison = compare_model(name, before, arguments.method)
        for key, description in comparison.differ.items():
            sys.stdout.write(f"{key}: {description}\n")
        total.differ |= comparison.differ
        total.resolved += comparison.resolved
        total.count += comparison.count
        total.largest = max(total.largest, comparison.largest)
        sys.stderr.write(f"{name}: {comparison.count} cells in {time.process_time() - start:.1f} s\n")
    sys.stdout.write(
        f"{total.count} cells, {len(total.differ)} differ, {len(total.resolved)} refusals became scores\n"
    )
    sys.stdout.write("largest difference of cells that agree: {:.1e} ({})\n".format(*total.largest))
    return int(bool(total.differ))


if __name__ == "__main__":
    sys.exit(main())
