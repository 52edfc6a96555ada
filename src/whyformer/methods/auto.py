"""``auto``: the method that measured best for the kind of input and the purpose of the map."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any, Literal

from whyformer.errors import InputError, MethodNotApplicable, ModelError, UnknownOperation
from whyformer.methods.applicability import UNSUPPORTED
from whyformer.methods.registry import METHODS, method
from whyformer.methods.task import Scores, Task
from whyformer.models.kinds import is_known_language_model

Purpose = Literal["faithful", "localise"]

# occlusion needs no derivatives, but many forward passes
_LAST: list[tuple[str, dict[str, Any]]] = [("input_x_gradient", {}), ("occlusion", {})]
_CONSERVING: list[tuple[str, dict[str, Any]]] = [("lrp_ah_ln", {"secant": True}), *_LAST]
_FAITHFUL: list[tuple[str, dict[str, Any]]] = [("libragrad", {}), *_CONSERVING]
_LANGUAGE: list[tuple[str, dict[str, Any]]] = [("attnlrp", {"share": 0.8}), ("attnlrp", {}), *_CONSERVING]
CHOICES: dict[tuple[str, Purpose], list[tuple[str, dict[str, Any]]]] = {
    ("image", "faithful"): _FAITHFUL,
    ("image", "localise"): [
        ("gae", {"composite": "libra", "affinity": True}),
        ("gae", {"composite": "libra"}),
        ("gradcam", {}),
        *_LAST,
    ],
    ("text", "faithful"): _FAITHFUL,
    ("text", "localise"): _FAITHFUL,
    ("language model", "faithful"): _LANGUAGE,
    ("language model", "localise"): _LANGUAGE,
    # sums over blocks were measured only on decoders of a single text
    ("language model of several inputs", "faithful"): _LANGUAGE[1:],
    ("language model of several inputs", "localise"): _LANGUAGE[1:],
}
"""(kind of input, purpose) -> methods with settings, best first; if one does not apply, the next is run.
docs/measurements/results.md has the measurements behind this order."""


@method(
    "the method that measured best for this kind of input and purpose; the result names it",
    family="propagation",
    level="patch, pixel or token",
    citation="measured: docs/measurements/results.md",
    anywhere=True,
    checkpoint=True,
)
def auto(task: Task, *, purpose: Purpose = "faithful") -> Scores:
    """Run the first method of :data:`whyformer.methods.auto.CHOICES` for this kind of input that applies to the model.

    Args:
        purpose: "faithful" (removing features with high scores changes the prediction most) or "localise" (the map
            covers the object).

    ``diagnostics["auto"]`` holds the method, its settings, its name with the settings that differ from the defaults,
    and why better methods were passed over, which is also a warning.
    """
    kind = "image" if task.inputs.modality == "image" else "text"
    reads_text = any(side.modality != "image" for side in task.scored_inputs.values())
    if reads_text:
        task.forward_pass().logits(task.read_logits)  # measures whether this is a language model
    if reads_text and is_known_language_model(task.model):
        kind = "language model" if task.structure.is_plain else "language model of several inputs"
    passed_over: dict[str, str] = {}
    choices = CHOICES[kind, purpose]
    for name, settings in choices:
        candidate = METHODS[name]
        named = f"{name} ({', '.join(f'{k}={v}' for k, v in settings.items())})" if settings else name
        full = candidate.complete(settings)
        try:
            scores = candidate.function(replace(task, method=name), **full)
        except (MethodNotApplicable, UnknownOperation, ModelError) as error:
            if isinstance(error, ModelError) and (name, settings) == choices[-1]:  # an error of the model itself
                raise
            passed_over[named] = str(error)
            continue
        except InputError as error:
            if (name, settings) != choices[-1]:
                raise
            passed_over[named] = str(error)  # occlusion may not fit an input that a gradient would fit
            continue
        except Exception as error:
            # out of memory, or an error of the model itself
            if type(error) not in UNSUPPORTED or (name, settings) == choices[-1]:
                raise
            passed_over[named] = f"{name} is not supported yet on this model: {type(error).__name__}: {error}"
            continue
        choice = {"method": name, "name": named, "settings": full, "purpose": purpose, "passed_over": passed_over}
        facts = {**candidate.claims(full), **scores.diagnostics, "auto": choice}
        ran = f"auto ran {named}, because the methods that measured better do not apply here"
        warnings = [f"{ran}: {_reasons(passed_over)}"] if passed_over else []
        return replace(scores, diagnostics=facts, warnings=[*scores.warnings, *warnings])
    raise task.refuse(f"none of its choices applies: {_reasons(passed_over)}")


def _reasons(passed_over: dict[str, str]) -> str:
    """Return the names of methods and why they were passed over."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in passed_over.items():
        by_reason.setdefault(textwrap.shorten(reason, 160, placeholder="…"), []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
