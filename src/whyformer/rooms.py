"""A room that can be called: ``whyformer.methods()`` and ``whyformer.methods.registry`` are both documented."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(room: str, function: Callable[..., Any]) -> None:
    """Let the package ``room`` be called like its function of the same name, and show that function's signature."""
    module = sys.modules[room]
    module.__class__ = _Room
    module.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
