"""The audit sees the same attentions however the same blocks are kept and called."""

from __future__ import annotations

import pytest

import whyformer

from .catalogue import all_forms
from .cells import built, grouped
from .form import Form

KINDS = ("containers", "attention", "qkv", "whole attention", "placement")
GROUPS = {group: forms for group, forms in grouped(all_forms()).items() if group[0] in KINDS}
FORMS = [form for forms in GROUPS.values() for form in forms[1:]]
FEW = [forms[len(forms) // 2] for group, forms in GROUPS.items() if group[0] in ("containers", "attention")]


def attentions(form: Form) -> list[tuple[list[str], list[str], int]]:
    """Whose rows look at whose, and how deep; attentions of one depth are heads of one layer."""
    seen = whyformer.audit(built(form), form.inputs(), target=1).attentions
    return sorted({(tuple(a.queries), tuple(a.keys), a.depth) for a in seen})


@pytest.mark.parametrize("form", FEW, ids=lambda form: form.id)
def test_few_audits(form: Form) -> None:
    assert attentions(form) == attentions(GROUPS[form.group][0])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_audits(form: Form) -> None:
    assert attentions(form) == attentions(GROUPS[form.group][0])
