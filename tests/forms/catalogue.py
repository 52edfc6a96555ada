"""The catalogue of all forms."""

from __future__ import annotations

from functools import cache

from . import containers, ends, functions, layouts
from .form import Form


@cache
def all_forms() -> tuple[Form, ...]:
    catalogue = (*functions.forms(), *containers.forms(), *layouts.forms(), *ends.forms())
    assert len({form.id for form in catalogue}) == len(catalogue)
    return catalogue
