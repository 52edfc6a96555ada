"""Compares the scores of today with the stored ones: ``python -m tests.frozen.compare [--method METHOD] [--model NAME]``.

Prints every cell that differs by more than 1e-6 of the largest number of the stored map, that was answered and is refused now, or
that raises an error which is not the library's own; then how many cells were compared, and how many refusals became answers.

A cell is one model, one method with its settings, and one form of the inputs: ``hf_vit | lrp rule=gamma | batch``. The two cells
``inputs`` and ``output`` of a model hold what it is given and what it says without an explanation: if these differ, it is
another model (other versions of the libraries that build it), and its scores say nothing about the methods.
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
import conftest  # noqa: E402, F401  one thread, no network, a torchvision that can be imported
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
# cell, or a part of one -> a larger tolerance, and why
TOLERANCES: dict[str, tuple[float, str]] = {
    "semantic segmentation/segformer | lrp rule=alpha_beta alpha=2.0 | batch": (
        1e-4, "the stored numbers move by 4e-5 if the weights move by 1e-15 of themselves; those of a tape by 3e-12",
    ),
    "mamba | lrp rule=epsilon": (1e-2, "parts of the model compute in float32, whose rounding differs between processors; lrp divides"),
    "causal language model/mamba": (1e-4, "parts of the model compute in float32, whose rounding differs between processors"),
    "hf_vit/eager": (1e-4, "the model takes its softmax in float32, whose rounding differs between processors; lrp divides by it"),
}  # fmt: skip
# numbers below it are rounding: a map whose largest number is smaller is compared with this one
ROUNDING = 1e-7

# -- what is computed --------------------------------------------------------------------------------------------------
FEW: dict[str, Any] = {"samples": 2, "steps": 2, "masks": 4, "patch": 8}
# settings that choose another formula: computed for the batch only
FURTHER: list[tuple[str, dict[str, Any]]] = [
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
    **{" ".join([name, *(f"{k}={v}" for k, v in given.items())]): (name, given) for name, given in FURTHER},
}
OF_GENERATION = [
    "attnlrp", "auto", "gae", "input_x_gradient", "integrated_gradients", "lrp", "lrp_ah_ln", "occlusion", "rollout",
    "transformer_attribution",
]  # fmt: skip
ANSWER = "answer"
PROMPT, CONTINUATION = [2, 9, 5, 17, 30], [8, 11, 4, 25]


# -- what is stored ----------------------------------------------------------------------------------------------------
WHOLE = 256
POSITIONS = 62


@dataclass(frozen=True)
class Map:
    """The shape of a map and its numbers; of a map of more than 256 numbers 62 of them, evenly spread, then their sum and norm over the whole map."""

    shape: tuple[int, ...]
    numbers: Tensor

    @staticmethod
    def of(whole: Tensor) -> Map:
        flat = whole.detach().double().flatten()
        if len(flat) <= WHOLE:
            return Map(tuple(whole.shape), flat)
        positions = torch.arange(POSITIONS) * (len(flat) - 1) // (POSITIONS - 1)
        return Map(tuple(whole.shape), torch.cat([flat[positions], flat.sum()[None], flat.norm()[None]]))

    def difference(self, stored: Map) -> float:
        """max |Δ| / max |stored|; of a part of a map, of its sum and norm |Δ| / norm too. Infinite for another shape."""
        if self.shape != stored.shape:
            return float("inf")
        if not len(stored.numbers):
            return 0.0
        whole = len(stored.numbers) == math.prod(stored.shape)
        away, size = (self.numbers - stored.numbers).abs(), stored.numbers.abs()
        groups = [slice(None)] if whole else [slice(POSITIONS), slice(POSITIONS, None)]
        sizes = [size.max()] if whole else [size[:POSITIONS].max(), size[-1]]
        found = max(float(away[g].max() / s.clamp(min=ROUNDING)) for g, s in zip(groups, sizes, strict=True))
        return found if math.isfinite(found) else float("inf")


Parts = dict[str, Map]
Answer = Parts | str  # the maps of all parts of an explanation, or the class name of the error
FOREIGN = "foreign "


def cell(model: str, setting: str, form: str) -> str:
    return f"{model} | {setting} | {form}"


def stored() -> dict[str, Answer]:
    """Cell -> what is stored of it."""
    found: dict[str, Answer] = dict(json.loads(REFUSALS.read_text(encoding="utf-8")))
    with safe_open(SCORES, "pt") as file:
        shapes = json.loads(file.metadata()["shapes"])  # of maps of which a part is stored
        for key in file.keys():  # noqa: SIM118  no mapping
            name, _, part = key.rpartition(" | ")
            numbers = file.get_tensor(key)
            shape = tuple(shapes.get(key, numbers.shape))
            found.setdefault(name, {})[part] = Map(shape, numbers.flatten())  # type: ignore[index]
    return found


# -- computing ---------------------------------------------------------------------------------------------------------
def answer(compute: Callable[[], Parts]) -> Answer:
    """The maps, or the class name of the error."""
    torch.manual_seed(0)
    try:
        return compute()
    except whyformer.WhyformerError as error:
        return type(error).__name__
    except Exception as error:
        return FOREIGN + type(error).__name__


def explained(model: Model, setting: str, form: str) -> Parts:
    method, given = SETTINGS[setting]
    few = {name: value for name, value in FEW.items() if name in METHODS[method].settings}
    found = whyformer.explain(model.module, model.inputs[form], method, model.targets[form], **few, **given)
    return {name: Map.of(found.part(name).scores) for name in found.inputs}


def generated(model: Model, method: str) -> Parts:
    few = {name: value for name, value in FEW.items() if name in METHODS[method].settings}
    found = whyformer.explain_generation(model.module, PROMPT, CONTINUATION, method, **few)
    return {"matrix": Map.of(found.matrix), "value": Map.of(found.value)}


def plain(model: Model) -> Iterator[tuple[str, Parts]]:
    """What the model is given and what it says."""
    given = model.inputs[BATCH]
    given = given if isinstance(given, dict) else {"": given}
    yield "inputs", {name: Map.of(value) for name, value in given.items()}
    yield "output", {"": Map.of(model.output())}


def computed(name: str, method: str | None = None) -> Iterator[tuple[str, Answer]]:
    """Cell -> scores of today, of one model; of one method only, if it is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = models.build(name)
        if name in GENERATION:
            for own in OF_GENERATION:
                if method in (None, own):
                    yield cell(name, own, ANSWER), answer(lambda own=own: generated(model, own))
            return
        for what, parts in plain(model):
            yield cell(name, what, BATCH), parts
        for setting, (own, given) in SETTINGS.items():
            for form in (BATCH,) if given else (BATCH, SINGLE):
                if method in (None, own):
                    yield cell(name, setting, form), answer(lambda s=setting, f=form: explained(model, s, f))


# -- comparing ---------------------------------------------------------------------------------------------------------
@dataclass
class Comparison:
    """Cells that differ -> how; refusals that are answered now; the largest difference of what agrees."""

    differ: dict[str, str] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    count: int = 0
    largest: tuple[float, str] = (0.0, "")

    def add(self, name: str, old: Answer, new: Answer) -> None:
        self.count += 1
        if isinstance(new, str):
            if isinstance(old, dict):
                self.differ[name] = f"was answered, now {new}"
            elif new.startswith(FOREIGN) and new != old:
                self.differ[name] = f"was {old}, now {new}"
        elif isinstance(old, str):
            self.answered.append(name)
        elif new.keys() != old.keys():
            self.differ[name] = f"has the parts {sorted(new)}, not {sorted(old)}"
        else:
            away, part = max((new[part].difference(old[part]), part) for part in old)
            if new[part].shape != old[part].shape:
                self.differ[name] = (
                    f"has the shape {new[part].shape}, not {old[part].shape}, in {part or 'its only part'}"
                )
            elif away > tolerance(name):
                self.differ[name] = f"differs by {away:.1e} in {part or 'its only part'}"
            else:
                self.largest = max(self.largest, (away, name))


def tolerance(name: str) -> float:
    return max([TOLERANCE, *(larger for part, (larger, _) in TOLERANCES.items() if part in name)])


def compared(name: str, before: dict[str, Answer], method: str | None = None) -> Comparison:
    """All stored cells of one model, compared with those of today. Cells that are not stored are left out."""
    found = Comparison()
    own = {key for key in before if key.startswith(f"{name} | ")}
    for key, new in computed(name, method):
        if key in own:
            found.add(key, before[key], new)
            own.remove(key)
    for key in sorted(own) if method is None else ():
        found.differ[key] = "is computed no more: its method or setting is gone"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(METHODS), help="only this method, with all its settings")
    parser.add_argument("--model", choices=list(MODELS), help="only this model")
    given = parser.parse_args()
    before, every = stored(), Comparison()
    for name in [given.model] if given.model else MODELS:
        begun = time.process_time()
        one = compared(name, before, given.method)
        for key, said in one.differ.items():
            sys.stdout.write(f"{key}: {said}\n")
        every.differ |= one.differ
        every.answered += one.answered
        every.count += one.count
        every.largest = max(every.largest, one.largest)
        sys.stderr.write(f"{name}: {one.count} cells in {time.process_time() - begun:.1f} s\n")
    sys.stdout.write(
        f"{every.count} cells, {len(every.differ)} differ, {len(every.answered)} refusals became answers\n"
    )
    sys.stdout.write("the largest difference of those that agree: {:.1e} ({})\n".format(*every.largest))
    return int(bool(every.differ))


if __name__ == "__main__":
    sys.exit(main())
