"""A cell: one form explained by one method. What came of it, and whether it is what the group's first form has."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import WhyformerError

from .form import SCORES, SIGNS, Form, Group, Inputs

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
FURTHER = (
    ("attnlrp", "share", 0.8),
    ("cp_lrp", "share", 0.8),
    ("lrp_ah", "secant", True),
    ("lrp_ln", "secant", True),
    ("lrp_ah_ln", "secant", True),
    ("lrp", "rule", "shared"),
    ("lrp", "rule", "epsilon"),
    ("lrp", "rule", "gamma"),
    ("lrp", "rule", "alpha_beta"),
    ("partial_lrp", "rule", "epsilon"),
    ("input_x_gradient", "composite", "libra"),
    ("gradcam", "composite", "libra"),
    ("attcat", "composite", "gim"),
    ("gae", "composite", "ah_ln"),
    ("rollout", "gradient_weighted", True),
    ("norm_attention", "scope", "attention"),
)


def all_settings() -> list[Setting]:
    """Every method, and further settings of some."""
    plain = [Setting(m.name) for m in sorted(whyformer.methods(), key=lambda m: m.name)]
    return plain + [Setting(method, ((name, value),)) for method, name, value in FURTHER]


def named(ids: Sequence[str]) -> list[Setting]:
    known = {s.id: s for s in all_settings()}
    return [known[name] for name in ids]


def given(setting: Setting, inputs: Inputs) -> dict[str, Any]:
    taken = next(m for m in whyformer.methods() if m.name == setting.method).settings
    quick = {name: value for name, value in QUICK.items() if name in taken}
    if "fill_id" in taken and not _floats(inputs):
        quick["fill_id"] = 0
    if setting.method == "tis":
        quick["tokens_ratio"] = 0.5
    return {**quick, **dict(setting.chosen)}


def signed(setting: Setting) -> bool:
    """Whether its scores have a sign."""
    method = next(m for m in whyformer.methods() if m.name == setting.method)
    return method.signs(method.complete(dict(setting.chosen)))


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
    """One sample as a batch of one."""
    if isinstance(inputs, dict):
        return {name: value.narrow(axis, index, 1) for name, value in inputs.items()}
    return inputs.narrow(axis, index, 1)


def copied(inputs: Inputs) -> Inputs:
    return {n: t.clone() for n, t in inputs.items()} if isinstance(inputs, dict) else inputs.clone()


def explained(form: Form, model: nn.Module, setting: Setting) -> Answer:
    inputs, axis = form.inputs(), int(form.rows_first)
    settings = given(setting, inputs)
    count = next(iter(inputs.values())).shape[axis] if isinstance(inputs, dict) else inputs.shape[axis]
    batches = [rows(inputs, i, axis) for i in range(count)] if form.single else [inputs]
    found = []
    for batch in batches:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = whyformer.explain(model, copied(batch), setting.method, form.target, **settings)
        except WhyformerError as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Answer(None, said, foreign=DISGUISED.search(said) is not None)
        except Exception as error:  # what this counts
            return Answer(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", foreign=True)
        found.append(result.scores.detach())
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
    """0 where they agree wholly; more than the tolerance where they do not. Of signs: the share of those that are turned."""
    if form.rows_first and got.shape != wanted.shape and got.T.shape == wanted.shape:
        got = got.T
    if wanted.shape != got.shape or not bool(got.isfinite().all()):
        return float("inf")
    size = wanted.abs().max()
    if form.compared == SCORES:
        away = (got - wanted).abs().max()
        return float(away / size) if float(size) > 0 else float("inf") * float(away > 0) if float(away) > 0 else 0.0
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
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(output, dict):
        output = next(iter(output.values()))
    output = getattr(output, "logits", output)
    while isinstance(output, list | tuple):
        output = output[0]
    return output


def wrong_forms(forms: Sequence[Form]) -> list[str]:
    """Forms of one group whose output is not the first one's: mistakes of this suite."""
    wanted = first_output(built(forms[0]), copied(forms[0].inputs()))
    wrong = []
    for form in forms[1:]:
        if form.same_output:
            got = first_output(built(form), copied(form.inputs())).view_as(wanted)
            if not torch.allclose(got, wanted, rtol=FORWARD, atol=FORWARD):
                wrong.append(f"{form.id}: {float((got - wanted).abs().max()):.1e}")
    return wrong


def cells_of(forms: Sequence[Form], settings: Sequence[Setting]) -> Iterator[Cell]:
    """All cells of forms of one group."""
    models = [built(form) for form in forms]
    for setting in settings:
        if forms[0].compared == SIGNS and not signed(setting):
            continue
        answers = [(form, explained(form, model, setting)) for form, model in zip(forms, models, strict=True)]
        yield from compare(answers, setting)
