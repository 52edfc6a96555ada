"""However a function is written, and wherever its parts are kept: the same scores, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from torch import nn

from .catalogue import all_forms
from .cells import (
    FOREIGN,
    REFUSED,
    SILENT,
    Answer,
    Cell,
    Setting,
    all_settings,
    built,
    cells_of,
    compare,
    explained,
    grouped,
    named,
    wrong_forms,
)
from .form import Form, Group
from .measure import chosen_groups

GROUPS = grouped(all_forms())
SAMPLED = chosen_groups(None, sample=True)
# of each form these; they differ where others do, too
FOUR = ("attnlrp", "lrp", "lrp_ah_ln secant=True", "transformer_attribution")
# of each kind so many forms with every method
FEW = 2


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


def compared(form: Form, setting: Setting) -> list[Cell]:
    first = first_answers(form.group, setting)
    return compare([*first, (form, explained(form, built(form), setting))], setting)[len(first) :]


def few(kind: str) -> list[Form]:
    """The last way, and one from the middle, of the first function of a kind."""
    forms = GROUPS[next(group for group in SAMPLED if group[0] == kind)]
    further = [form for form in forms[1:] if not form.regroups]
    return [further[i * len(further) // FEW] for i in range(FEW)] if len(further) > FEW else further


@pytest.mark.parametrize("group", GROUPS, ids=id_of)
def test_the_forms_compute_the_same(group: Group) -> None:
    """Or they are wrong, not the library."""
    assert not wrong_forms(GROUPS[group])


@pytest.mark.parametrize("form", [form for group in SAMPLED for form in GROUPS[group][1:]], ids=lambda form: form.id)
def test_every_form_by_four_methods(form: Form) -> None:
    assert not faults([cell for setting in named(FOUR) for cell in compared(form, setting)])


@pytest.mark.parametrize("form", [form for kind in dict.fromkeys(k for k, _, _ in SAMPLED) for form in few(kind)], ids=lambda form: form.id)
def test_few_forms_by_every_method(form: Form) -> None:
    settings = all_settings() if form.compared == "scores" else named(FOUR[:3])
    assert not faults([cell for setting in settings for cell in compared(form, setting)])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=id_of)
def test_every_form_by_every_method(group: Group) -> None:
    assert not faults(list(cells_of(GROUPS[group], all_settings())))


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in GROUPS if group[0] == "containers"], ids=id_of)
def test_containers_are_hardly_ever_refused(group: Group) -> None:
    """Where the first container is answered."""
    cells = list(cells_of(GROUPS[group], all_settings()))
    refused = [f"{c.form.way} [{c.setting.id}]: {c.said}" for c in cells if c.outcome == REFUSED]
    assert len(refused) <= 0.02 * len(cells), refused


def test_there_are_many_ways() -> None:
    """Of each kind at least twelve."""
    ways: dict[str, set[tuple[str, str]]] = {}
    for form in all_forms():
        ways.setdefault(form.kind, set()).add((form.function, form.way))
    assert {kind: len(own) for kind, own in ways.items() if len(own) < 12 and kind not in ("placement", "whole attention")} == {}
    assert len({form.way for form in GROUPS["containers", "four blocks", "pre-norm, vectors"]}) >= 15
