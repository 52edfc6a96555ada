"""Whose calls these are: those of the pass that this thread is in, of another one, or of a user's hook."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class _Here(threading.local):
    run: Any = None


here = _Here()
"""``here.run`` is the interception that this thread is in; hooks and interceptions act for no other."""


@contextlib.contextmanager
def inside(run: object | None) -> Iterator[None]:
    """The thread is in ``run``; with None, what is done here is no part of the run around it."""
    around, here.run = here.run, run
    try:
        yield
    finally:
        here.run = around


class Gradients:
    """Whether the model asked for gradients, which is seen from its calls; autograd itself switches them off too, while
    it runs the forward of an autograd function."""

    asked = True

    def follow(self, name: str, args: Sequence[Any]) -> None:
        """A call of the model."""
        if name == "_set_grad_enabled":
            self.asked = bool(args[0])

    def in_function(self) -> bool:
        """Whether this is the forward of an autograd function: gradients are off, and the model did not say so."""
        return self.asked and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@contextlib.contextmanager
def users_hooks_aside(mode: Any, listed: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """While a user's forward hook runs, ``mode.aside`` is positive.

    A hook may change what it is given, so its operations go by their rules; but a model that it calls, this one or
    another, adds no block and no attention to the run. ``listed`` are the modules of the mode's model.
    """
    handles = []

    def step(by: int) -> Any:
        def hook(*_: Any) -> None:
            if here.run is mode:
                mode.aside += by

        return hook

    try:
        for module in mode.model.modules() if listed is None else listed:
            if module._forward_pre_hooks:
                handles.append(module.register_forward_pre_hook(step(1), prepend=True))
                handles.append(module.register_forward_pre_hook(step(-1)))
            if module._forward_hooks:
                handles.append(module.register_forward_hook(step(1), prepend=True))
                handles.append(module.register_forward_hook(step(-1)))
        yield
    finally:
        for handle in handles:
            handle.remove()
