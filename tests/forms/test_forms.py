"""Equivalent implementations of a function have equal scores, or are refused.

All forms with all methods take an hour; ``python -m tests.forms.measure`` counts their outcomes.
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
    settings_named,
    wrong_forms,
)
from .conftest import FAULTS
from .form import Form, Group
from .measure import chosen_groups

GROUPS = grouped(all_forms())
SAMPLED = chosen_groups(None, sample=True)
# methods that represent the others; each form is explained by one of the two pairs in turn
FOUR = (("lrp", "lrp_ah_ln secant=True"), ("attnlrp", "transformer_attribution"))


def id_of(group: Group) -> str:
    return " / ".join(dict.fromkeys(group))


def faults(cells: Sequence[Cell]) -> list[str]:
    """Cells that are neither equal nor refused."""
    silent = [c for c in cells if c.outcome == SILENT and not c.form.regroups]
    differing = [f"{c.form.id} [{c.setting.id}]: differs by {c.difference:.1e}" for c in silent]
    return differing + [f"{c.form.id} [{c.setting.id}]: {c.message}" for c in cells if c.outcome == FOREIGN]


@cache
def model_of(form: Form) -> nn.Module:
    return built(form)


@cache
def first_answers(group: Group, setting: Setting) -> tuple[tuple[Form, Answer], ...]:
    """Answers of the reference forms of a group."""
    forms = [form for i, form in enumerate(GROUPS[group]) if i == 0 or form.reference]
    return tuple((form, explained(form, model_of(form), setting)) for form in forms)


def cells(form: Form, settings: Sequence[Setting]) -> list[Cell]:
    """Cells of one form, compared with the references of its group."""
    form_cells, model = [], built(form)
    for setting in settings:
        if comparable(form, setting):
            first = first_answers(form.group, setting)
            form_cells += compare([*first, (form, explained(form, model, setting))], setting)[len(first) :]
    return form_cells


def sampled_forms() -> list[tuple[Form, tuple[str, str]]]:
    """Forms in one model: all of the first function of each kind, and every third one of further functions."""
    sample: list[tuple[Form, tuple[str, str]]] = []
    kinds: set[str] = set()
    for group in SAMPLED:
        forms = GROUPS[group][1 :: 3 if group[0] in kinds else 1]
        kinds.add(group[0])
        sample += [(form, FOUR[i % 2]) for i, form in enumerate(forms)]
    return sample


def few_forms() -> list[Form]:
    """Two forms of the first function of each kind, from the middle and the end."""
    chosen = []
    for kind in dict.fromkeys(kind for kind, _, _ in SAMPLED):
        forms = [form for form in GROUPS[next(group for group in SAMPLED if group[0] == kind)][1:] if not form.regroups]
        chosen += dict.fromkeys([forms[len(forms) // 2], forms[-1]])
    return chosen


def is_known(test: str, form: Form) -> bool:
    """Return True if the form is a known fault of the whole test, although single methods may agree."""
    return f"test_forms.py::{test}[{form.id}]" in FAULTS


@pytest.mark.parametrize("group", SAMPLED, ids=id_of)
def test_forms_of_a_group_compute_the_same_function(group: Group) -> None:
    """Otherwise the forms are wrong and not the library."""
    assert not wrong_forms(GROUPS[group])


@pytest.mark.whole
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in SAMPLED], ids=id_of)
def test_forms_of_a_group_compute_the_same_function_in_further_models(group: Group) -> None:
    assert not wrong_forms(GROUPS[group])


# a quarter of the forms, each by one of its two methods, so that the four methods alternate
@pytest.mark.parametrize(
    ("form", "setting"),
    [
        pytest.param(f, pair[i // 2 % 2], id=f.id, marks=() if i % 4 == i // 4 % 4 else pytest.mark.whole)
        for i, (f, pair) in enumerate(sampled_forms())
        if not is_known("test_forms_by_four_methods", f)
    ],
)
def test_forms_by_one_of_four_methods(form: Form, setting: str) -> None:
    assert not faults(cells(form, settings_named([setting])))


@pytest.mark.parametrize(
    ("form", "settings"), [pytest.param(f, pair, id=f.id, marks=() if is_known("test_forms_by_four_methods", f) else pytest.mark.whole) for f, pair in sampled_forms()]
)
def test_forms_by_four_methods(form: Form, settings: tuple[str, str]) -> None:
    assert not faults(cells(form, settings_named(settings)))


METHODS = [setting for setting in all_settings() if not setting.chosen]


# every twelfth method, from another one for each form
@pytest.mark.parametrize(
    ("form", "number"), [pytest.param(f, i, id=f.id) for i, f in enumerate(few_forms()) if not is_known("test_few_forms_by_every_method", f)]
)
def test_few_forms_by_methods_in_turn(form: Form, number: int) -> None:
    assert not faults(cells(form, METHODS[number % 12 :: 12]))


@pytest.mark.whole
@pytest.mark.parametrize("form", few_forms(), ids=lambda form: form.id)
def test_few_forms_by_every_method(form: Form) -> None:
    assert not faults(cells(form, METHODS))


def test_every_kind_has_many_forms() -> None:
    """At least twelve per kind."""
    ways: dict[str, set[tuple[str, str]]] = {}
    for form in all_forms():
        ways.setdefault(form.kind, set()).add((form.function, form.way))
    assert {kind: len(names) for kind, names in ways.items() if len(names) < 12 and kind not in ("placement", "whole attention")} == {}
    assert len({form.way for form in GROUPS["containers", "four blocks", "pre-norm, vectors"]}) >= 15
