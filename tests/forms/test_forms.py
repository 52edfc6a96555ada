"""However a function is written, and wherever its parts are kept: the same scores, or a refusal.

All forms by all methods take an hour: ``python -m tests.forms.measure`` counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from torch import nn

from .catalogue import all_forms
from .cells import (
    FOREIGN,
    SILENT,
    Answer,
    Cell,
    Setting,
    all_settings,
    built,
    comparable,
    compare,
    explained,
    grouped,
    named,
    wrong_forms,
)
from .conftest import FAULTS
from .form import Form, Group
from .measure import chosen_groups

GROUPS = grouped(all_forms())
SAMPLED = chosen_groups(None, sample=True)
# they differ where others do, too; each form is explained by two of them in turn
FOUR = (("lrp", "lrp_ah_ln secant=True"), ("attnlrp", "transformer_attribution"))


def id_of(group: Group) -> str:
    return " / ".join(dict.fromkeys(group))


def faults(cells: Sequence[Cell]) -> list[str]:
    """What is neither the same nor refused."""
    silent = [c for c in cells if c.outcome == SILENT and not c.form.regroups]
    found = [f"{c.form.id} [{c.setting.id}]: differs by {c.difference:.1e}" for c in silent]
    return found + [f"{c.form.id} [{c.setting.id}]: {c.said}" for c in cells if c.outcome == FOREIGN]


@cache
def model_of(form: Form) -> nn.Module:
    return built(form)


@cache
def first_answers(group: Group, setting: Setting) -> tuple[tuple[Form, Answer], ...]:
    """Of the forms that others are compared with."""
    forms = [form for i, form in enumerate(GROUPS[group]) if i == 0 or form.reference]
    return tuple((form, explained(form, model_of(form), setting)) for form in forms)


def cells(form: Form, settings: Sequence[Setting]) -> list[Cell]:
    """Of one form, compared with its group's first."""
    found, model = [], built(form)
    for setting in settings:
        if comparable(form, setting):
            first = first_answers(form.group, setting)
            found += compare([*first, (form, explained(form, model, setting))], setting)[len(first) :]
    return found


def some() -> list[tuple[Form, tuple[str, str]]]:
    """In one model: all ways of the first function of a kind, and every third of further ones."""
    found: list[tuple[Form, tuple[str, str]]] = []
    kinds: set[str] = set()
    for group in SAMPLED:
        forms = GROUPS[group][1 :: 3 if group[0] in kinds else 1]
        kinds.add(group[0])
        found += [(form, FOUR[i % 2]) for i, form in enumerate(forms)]
    return found


def few() -> list[Form]:
    """Of the first function of each kind two ways, from the middle and the end."""
    found = []
    for kind in dict.fromkeys(kind for kind, _, _ in SAMPLED):
        forms = [form for form in GROUPS[next(group for group in SAMPLED if group[0] == kind)][1:] if not form.regroups]
        found += dict.fromkeys([forms[len(forms) // 2], forms[-1]])
    return found


def is_known(test: str, form: Form) -> bool:
    """Whether it is listed as a fault of all that the test compares; a part of that may be right."""
    return f"test_forms.py::{test}[{form.id}]" in FAULTS


@pytest.mark.parametrize("group", SAMPLED, ids=id_of)
def test_the_forms_compute_the_same(group: Group) -> None:
    """Or they are wrong, not the library."""
    assert not wrong_forms(GROUPS[group])


@pytest.mark.whole
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in SAMPLED], ids=id_of)
def test_the_forms_compute_the_same_in_further_models(group: Group) -> None:
    assert not wrong_forms(GROUPS[group])


# each way by one method of its two, the four of them in turn
@pytest.mark.parametrize(
    ("form", "setting"), [pytest.param(f, pair[i // 2 % 2], id=f.id) for i, (f, pair) in enumerate(some()) if not is_known("test_forms_by_four_methods", f)]
)
def test_forms_by_one_of_four_methods(form: Form, setting: str) -> None:
    assert not faults(cells(form, named([setting])))


@pytest.mark.parametrize(
    ("form", "settings"), [pytest.param(f, pair, id=f.id, marks=() if is_known("test_forms_by_four_methods", f) else pytest.mark.whole) for f, pair in some()]
)
def test_forms_by_four_methods(form: Form, settings: tuple[str, str]) -> None:
    assert not faults(cells(form, named(settings)))


METHODS = [setting for setting in all_settings() if not setting.chosen]


# six methods in turn
@pytest.mark.parametrize(
    ("form", "number"), [pytest.param(f, i, id=f.id) for i, f in enumerate(few()) if not is_known("test_few_forms_by_every_method", f)]
)
def test_few_forms_by_methods_in_turn(form: Form, number: int) -> None:
    assert not faults(cells(form, METHODS[number % 6 :: 6]))


@pytest.mark.whole
@pytest.mark.parametrize("form", few(), ids=lambda form: form.id)
def test_few_forms_by_every_method(form: Form) -> None:
    assert not faults(cells(form, METHODS))


def test_there_are_many_ways() -> None:
    """Of each kind at least twelve."""
    ways: dict[str, set[tuple[str, str]]] = {}
    for form in all_forms():
        ways.setdefault(form.kind, set()).add((form.function, form.way))
    assert {kind: len(own) for kind, own in ways.items() if len(own) < 12 and kind not in ("placement", "whole attention")} == {}
    assert len({form.way for form in GROUPS["containers", "four blocks", "pre-norm, vectors"]}) >= 15
