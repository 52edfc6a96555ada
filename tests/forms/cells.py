"""Cells: one form explained by one method, compared with the reference form of its group."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import WhyformerError

from .form import SCORES, Form, Group, Inputs

TOLERANCE = 1e-6
FORWARD = 1e-9
# outcomes; NOWHERE: refused for all forms of a group, so that nothing can differ
AGREE, REFUSED, SILENT, FOREIGN, NOWHERE = "agree", "refused", "silent", "foreign", "nowhere"

# a refusal whose message contains a foreign error, except errors of the model on perturbed inputs
DISGUISED = re.compile(r"(?<!changed \()\b(Index|Runtime|Attribute|Type|Key|Assertion|ZeroDivision)Error: ")


# -- settings of methods -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Setting:
    """A method with settings."""

    method: str
    chosen: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.chosen)])


QUICK: dict[str, Any] = {"steps": 2, "samples": 2, "masks": 4}
# a small ε, because scaled forms add it to sums of other size
SMALL = ("epsilon", 1e-10)
FURTHER = (
    Setting("attnlrp", (("share", 0.8),)),
    Setting("lrp_ah", (("secant", True),)),
    Setting("lrp_ah_ln", (("secant", True),)),
    Setting("lrp", (("rule", "shared"),)),
    Setting("lrp", (("rule", "epsilon"), SMALL)),
    Setting("lrp", (("rule", "gamma"),)),
    Setting("partial_lrp", (("rule", "epsilon"), SMALL)),
    Setting("gradcam", (("composite", "libra"),)),
    Setting("attcat", (("composite", "gim"),)),
    Setting("gae", (("composite", "ah_ln"),)),
    Setting("rollout", (("gradient_weighted", True),)),
    Setting("norm_attention", (("scope", "attention"),)),
)


def all_settings() -> list[Setting]:
    """Every method, and further settings of some methods."""
    return [Setting(m.name) for m in sorted(whyformer.list_methods(), key=lambda m: m.name)] + list(FURTHER)


def settings_named(ids: Sequence[str]) -> list[Setting]:
    known = {s.id: s for s in all_settings()}
    return [known[name] for name in ids]


def model_inputs(setting: Setting, inputs: Inputs) -> dict[str, Any]:
    available = next(m for m in whyformer.list_methods() if m.name == setting.method).settings
    quick = {name: value for name, value in QUICK.items() if name in available}
    if setting.method == "occlusion" and not _floats(inputs):
        quick["baseline"] = 0
    return {**quick, **dict(setting.chosen)}


def is_signed(setting: Setting) -> bool:
    """Return True if the scores have a sign."""
    method = next(m for m in whyformer.list_methods() if m.name == setting.method)
    return method.signs(method.complete(dict(setting.chosen)))


def comparable(form: Form, setting: Setting) -> bool:
    """Return True if the forms of the group must have equal scores, or signs, by this method."""
    return setting.method not in form.undefined and (form.compared == SCORES or is_signed(setting))


def _floats(inputs: Inputs) -> bool:
    tensors = inputs.values() if isinstance(inputs, dict) else [inputs]
    return any(t.is_floating_point() for t in tensors)


# -- explaining -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answer:
    """Scores, or an error message; ``foreign`` is True for an error that is no WhyformerError."""

    scores: Tensor | None
    message: str = ""
    foreign: bool = False


def rows(inputs: Inputs, index: int, axis: int = 0) -> Inputs:
    """One sample as a batch of one, without its padding."""
    if not isinstance(inputs, dict):
        return inputs.narrow(axis, index, 1)
    length = int(inputs["attention_mask"][index].sum())
    return {name: value[index : index + 1, :length] for name, value in inputs.items()}


def copied(inputs: Inputs) -> Inputs:
    return {n: t.clone() for n, t in inputs.items()} if isinstance(inputs, dict) else inputs.clone()


def explained(form: Form, model: nn.Module, setting: Setting) -> Answer:
    inputs, axis = form.inputs(), int(form.rows_first)
    settings = model_inputs(setting, inputs)
    count, length = (inputs["input_ids"] if isinstance(inputs, dict) else inputs).transpose(0, axis).shape[:2]
    batches = [rows(inputs, i, axis) for i in range(count)] if form.single else [inputs]
    targets = form.target if isinstance(form.target, list) and form.single else [form.target] * len(batches)
    parts = []
    for batch, target in zip(batches, targets, strict=True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores = whyformer.explain(model, copied(batch), setting.method, target, **settings).scores.detach()
        except WhyformerError as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Answer(None, message, foreign=DISGUISED.search(message) is not None)
        except Exception as error:  # counted as foreign
            return Answer(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", foreign=True)
        if form.single and isinstance(batch, dict):
            scores = F.pad(scores, (0, length - scores.shape[1]))
        parts.append(scores.T if form.single and form.rows_first and len(scores) > 1 else scores)
    return Answer(torch.cat(parts))


# -- comparing --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """``difference`` is max |Δ| / max |s| of the reference, if both have scores."""

    form: Form = field(repr=False)
    setting: Setting
    outcome: str
    difference: float = 0.0
    message: str = ""


def difference(form: Form, expected: Tensor, actual: Tensor) -> float:
    """Max |Δ| / max |s|, or the share of opposite signs. Scores of a model that takes ``[N, B]`` may be transposed."""
    if form.rows_first and not form.single and expected.shape == actual.T.shape:
        return min(distance(form.compared, expected, t) for t in (actual, actual.T))
    return distance(form.compared, expected, actual)


def distance(compared: str, expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape or not bool(actual.isfinite().all()):
        return float("inf")
    size = expected.abs().max()
    if compared == SCORES:
        largest = float((actual - expected).abs().max())
        return largest / float(size) if largest > 0 and float(size) > 0 else float("inf") if largest > 0 else 0.0
    clear = (expected.abs() > TOLERANCE * size) & (actual.abs() > TOLERANCE * actual.abs().max())
    opposite = (expected.sign() != actual.sign()) & clear
    return float(opposite.sum() / clear.sum().clamp(min=1))


def compare(answers: Sequence[tuple[Form, Answer]], setting: Setting) -> list[Cell]:
    """The cells of one group and setting, compared with the first form that has scores and with further references."""
    answered = [(form, a.scores) for form, a in answers if a.scores is not None]
    references = [scores for i, (form, scores) in enumerate(answered) if i == 0 or form.reference]
    cells = []
    for form, answer in answers:
        if answer.foreign:
            cells.append(Cell(form, setting, FOREIGN, message=answer.message))
        elif answer.scores is None:
            cells.append(Cell(form, setting, REFUSED if references else NOWHERE, message=answer.message))
        else:
            distance_to_reference = 0.0 if form.reference else min(difference(form, expected, answer.scores) for expected in references)
            cells.append(Cell(form, setting, AGREE if distance_to_reference <= TOLERANCE else SILENT, distance_to_reference))
    return cells


def grouped(forms: Sequence[Form]) -> dict[Group, list[Form]]:
    groups: dict[Group, list[Form]] = {}
    for form in forms:
        groups.setdefault(form.group, []).append(form)
    return groups


def built(form: Form) -> nn.Module:
    torch.manual_seed(0)
    model = form.build()
    assert not model.training
    return model


def first_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """The output tensor of a model, or the first one of several."""
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(output, dict):
        output = next(iter(output.values()))
    output = getattr(output, "logits", output)
    while isinstance(output, list | tuple):
        output = output[0]
    return output


def wrong_forms(forms: Sequence[Form]) -> list[str]:
    """Forms whose output or derivative differs from the first form of the group, which are errors of this suite."""
    output, slope = _value_and_slope(forms[0])
    wrong = []
    for form in forms[1:]:
        if not form.same_output:
            continue
        form_output, form_slope = _value_and_slope(form)
        if not torch.allclose(form_output.view_as(output), output, rtol=FORWARD, atol=FORWARD):
            wrong.append(f"{form.id}: its output differs")
        elif slope is not None and form_slope is not None and not torch.allclose(form_slope, slope, rtol=1e-6, atol=1e-8):
            wrong.append(f"{form.id}: its derivative differs")
    return wrong


def _value_and_slope(form: Form) -> tuple[Tensor, Tensor | None]:
    """The output and the derivative of a weighted sum of it; the derivative is None for ids and in-place changes."""
    model_inputs, model = copied(form.inputs()), built(form).requires_grad_(False)
    if isinstance(model_inputs, dict):
        batches = [rows(model_inputs, i) for i in range(len(model_inputs["input_ids"]))] if form.single else [model_inputs]
        return torch.cat([first_output(model, batch) for batch in batches]), None
    if not model_inputs.is_floating_point():
        return first_output(model, model_inputs), None
    output = first_output(model, model_inputs.requires_grad_())
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
    try:
        slope = torch.autograd.grad((output.flatten() * weights).sum(), model_inputs)[0]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return output.detach(), None
    return output.detach(), slope.transpose(0, 1) if form.rows_first else slope


def cells_of(forms: Sequence[Form], settings: Sequence[Setting]) -> Iterator[Cell]:
    """All cells of the forms of one group."""
    models = [built(form) for form in forms]
    for setting in settings:
        if not comparable(forms[0], setting):
            continue
        answers = [(form, explained(form, model, setting)) for form, model in zip(forms, models, strict=True)]
        yield from compare(answers, setting)
