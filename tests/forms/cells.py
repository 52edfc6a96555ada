"""A cell: one form explained by one method. What came of it, and whether it is what the group's first form has."""

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
# outcomes; NOWHERE: refused in all forms of a group, so that nothing can differ
AGREE, REFUSED, SILENT, FOREIGN, NOWHERE = "agree", "refused", "silent", "foreign", "nowhere"

# a refusal that hands on an error of another kind, not the model's own on inputs that a method changed
DISGUISED = re.compile(r"(?<!changed \()\b(Index|Runtime|Attribute|Type|Key|Assertion|ZeroDivision)Error: ")


# -- settings of methods -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Setting:
    """A method with settings; quick ones where it is slow."""

    method: str
    chosen: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.chosen)])


QUICK: dict[str, Any] = {"steps": 2, "samples": 2, "masks": 4}
# a small ε: what is scaled by a constant has other sums to add it to
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
    """Every method, and further settings of some."""
    return [Setting(m.name) for m in sorted(whyformer.list_methods(), key=lambda m: m.name)] + list(FURTHER)


def named(ids: Sequence[str]) -> list[Setting]:
    known = {s.id: s for s in all_settings()}
    return [known[name] for name in ids]


def given(setting: Setting, inputs: Inputs) -> dict[str, Any]:
    taken = next(m for m in whyformer.list_methods() if m.name == setting.method).settings
    quick = {name: value for name, value in QUICK.items() if name in taken}
    if "fill_id" in taken and not _floats(inputs):
        quick["fill_id"] = 0
    return {**quick, **dict(setting.chosen)}


def signed(setting: Setting) -> bool:
    """Whether its scores have a sign."""
    method = next(m for m in whyformer.list_methods() if m.name == setting.method)
    return method.signs(method.complete(dict(setting.chosen)))


def comparable(form: Form, setting: Setting) -> bool:
    """Whether the forms of its group have the same scores, or signs, by this method."""
    return setting.method not in form.undefined and (form.compared == SCORES or signed(setting))


def _floats(inputs: Inputs) -> bool:
    tensors = inputs.values() if isinstance(inputs, dict) else [inputs]
    return any(t.is_floating_point() for t in tensors)


# -- explaining -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answer:
    """Scores, or what was said instead; ``foreign`` is an error that is not the library's own."""

    scores: Tensor | None
    said: str = ""
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
    settings = given(setting, inputs)
    count, length = (inputs["input_ids"] if isinstance(inputs, dict) else inputs).transpose(0, axis).shape[:2]
    batches = [rows(inputs, i, axis) for i in range(count)] if form.single else [inputs]
    targets = form.target if isinstance(form.target, list) and form.single else [form.target] * len(batches)
    found = []
    for batch, target in zip(batches, targets, strict=True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores = whyformer.explain(model, copied(batch), setting.method, target, **settings).scores.detach()
        except WhyformerError as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Answer(None, said, foreign=DISGUISED.search(said) is not None)
        except Exception as error:  # what this counts
            return Answer(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", foreign=True)
        if form.single and isinstance(batch, dict):
            scores = F.pad(scores, (0, length - scores.shape[1]))
        found.append(scores.T if form.single and form.rows_first and len(scores) > 1 else scores)
    return Answer(torch.cat(found))


# -- comparing --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """``difference`` is max |Δ| over max |s| of the reference, where both were answered."""

    form: Form = field(repr=False)
    setting: Setting
    outcome: str
    difference: float = 0.0
    said: str = ""


def difference(form: Form, wanted: Tensor, got: Tensor) -> float:
    """Max |Δ| over max |s|; of signs the share of those that are turned. Where a model takes ``[N, B]``, scores may stand so too."""
    if form.rows_first and not form.single and wanted.shape == got.T.shape:
        return min(distance(form.compared, wanted, t) for t in (got, got.T))
    return distance(form.compared, wanted, got)


def distance(compared: str, wanted: Tensor, got: Tensor) -> float:
    if wanted.shape != got.shape or not bool(got.isfinite().all()):
        return float("inf")
    size = wanted.abs().max()
    if compared == SCORES:
        away = float((got - wanted).abs().max())
        return away / float(size) if away > 0 and float(size) > 0 else float("inf") if away > 0 else 0.0
    clear = (wanted.abs() > TOLERANCE * size) & (got.abs() > TOLERANCE * got.abs().max())
    turned = (wanted.sign() != got.sign()) & clear
    return float(turned.sum() / clear.sum().clamp(min=1))


def compare(answers: Sequence[tuple[Form, Answer]], setting: Setting) -> list[Cell]:
    """The cells of one group and one setting; compared with the first form that was answered, and with further references."""
    answered = [(form, a.scores) for form, a in answers if a.scores is not None]
    references = [scores for i, (form, scores) in enumerate(answered) if i == 0 or form.reference]
    cells = []
    for form, answer in answers:
        if answer.foreign:
            cells.append(Cell(form, setting, FOREIGN, said=answer.said))
        elif answer.scores is None:
            cells.append(Cell(form, setting, REFUSED if references else NOWHERE, said=answer.said))
        else:
            away = 0.0 if form.reference else min(difference(form, wanted, answer.scores) for wanted in references)
            cells.append(Cell(form, setting, AGREE if away <= TOLERANCE else SILENT, away))
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
    """The tensor that a model returns, bare or as the first of several."""
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(output, dict):
        output = next(iter(output.values()))
    output = getattr(output, "logits", output)
    while isinstance(output, list | tuple):
        output = output[0]
    return output


def wrong_forms(forms: Sequence[Form]) -> list[str]:
    """Forms of one group whose output, or its derivative, is not the first one's: mistakes of this suite."""
    output, slope = _value_and_slope(forms[0])
    wrong = []
    for form in forms[1:]:
        if not form.same_output:
            continue
        own, own_slope = _value_and_slope(form)
        if not torch.allclose(own.view_as(output), output, rtol=FORWARD, atol=FORWARD):
            wrong.append(f"{form.id}: its output differs")
        elif slope is not None and own_slope is not None and not torch.allclose(own_slope, slope, rtol=1e-6, atol=1e-8):
            wrong.append(f"{form.id}: its derivative differs")
    return wrong


def _value_and_slope(form: Form) -> tuple[Tensor, Tensor | None]:
    """The output, and the derivative of some sum of it; None for ids, and where something is changed in place."""
    given, model = copied(form.inputs()), built(form).requires_grad_(False)
    if isinstance(given, dict):
        batches = [rows(given, i) for i in range(len(given["input_ids"]))] if form.single else [given]
        return torch.cat([first_output(model, batch) for batch in batches]), None
    if not given.is_floating_point():
        return first_output(model, given), None
    output = first_output(model, given.requires_grad_())
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
    try:
        slope = torch.autograd.grad((output.flatten() * weights).sum(), given)[0]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return output.detach(), None
    return output.detach(), slope.transpose(0, 1) if form.rows_first else slope


def cells_of(forms: Sequence[Form], settings: Sequence[Setting]) -> Iterator[Cell]:
    """All cells of forms of one group."""
    models = [built(form) for form in forms]
    for setting in settings:
        if not comparable(forms[0], setting):
            continue
        answers = [(form, explained(form, model, setting)) for form, model in zip(forms, models, strict=True)]
        yield from compare(answers, setting)
