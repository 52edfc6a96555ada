"""Find out which methods apply to a model by trying them, so that errors can name alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whyformer.errors import WhyformerError
from whyformer.methods.registry import METHODS
from whyformer.methods.sharing import SharedPasses
from whyformer.models.cache import measured

if TYPE_CHECKING:
    from whyformer.methods.task import Task

UNSUPPORTED = (
    ArithmeticError,
    AttributeError,
    ZeroDivisionError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a method may raise on a model that it does not support."""
_LARGE = 3e8


class FirstStep(Exception):  # noqa: N818 - a signal, not shown to users
    """Signals that a method has reached the first step after its recorded pass."""


def applicable(task: Task) -> list[str]:
    """Return the names of the methods that apply to a task's model and kind of input, among those that need no
    attention over all tokens.

    The first pass of each method is run once per model and kind of input. On a large model (300 million parameters)
    only gradient × input is tried, and the methods that need the same pass are named.
    """
    inputs = task.inputs
    facts = (inputs.modality, inputs.tensor.dim(), inputs.mask is None, task.counted, task.options.checkpoint)
    kind = ("methods", *facts, inputs.name, *inputs.others)
    cached = measured(task.model)
    if kind not in cached:
        cached[kind] = []  # errors raised while trying name no alternatives
        cached[kind] = _tried(task)
    names: list[str] = cached[kind]
    return names


def _tried(task: Task) -> list[str]:
    task = replace(task, shared=SharedPasses())
    if not _applies(task, "input_x_gradient"):
        gradients = {"input_x_gradient", "saliency", "integrated_gradients", "smoothgrad"}
    else:
        gradients = set()
    if sum(p.numel() for p in task.model.parameters()) > _LARGE:
        return [] if gradients else ["auto", "input_x_gradient", "saliency"]
    fitting = {n for n, m in METHODS.items() if m.anywhere and m.modality in ("both", task.inputs.modality)}
    same = {"input_x_gradient", "saliency"}
    names = [n for n in fitting - gradients - {"auto"} if n in same or _applies(task, n)]
    has_last_choice = not {"input_x_gradient", "occlusion"}.isdisjoint(names)  # the last choices of auto
    return sorted([*names, "auto"] if has_last_choice else names)


def _applies(task: Task, name: str) -> bool:
    """Return True if a method succeeds up to its first step."""
    tried = replace(task, method=name, progress=_first)
    try:
        METHODS[name].run(tried, METHODS[name].complete({}))
    except FirstStep:
        return True
    except (WhyformerError, *UNSUPPORTED):  # includes running out of memory
        return False
    return True


def _first(items: Iterable[Any], *_: Any) -> Iterator[Any]:
    for item in items:
        yield item
        raise FirstStep
