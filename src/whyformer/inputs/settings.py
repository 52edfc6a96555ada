"""What a processor does, as a value that can be compared: all of its settings, without the processor itself."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.dtype, np.generic)
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)
_MOST_VALUES, _MOST_PARTS = 1_000, 5_000


class _UnknownError(Exception):
    """Something is among the settings whose state cannot be told."""


def settings_of(processor: Any) -> Hashable | None:
    """All that a processor's work depends on: attributes, and of functions the code, what it encloses and the global
    numbers and texts that it names. Two processors with equal settings do the same.

    None where that is not known, as of one that holds a random generator, a network or an open file.
    """
    try:
        return _Reading().of(processor)
    except _UnknownError:
        return None


class _Reading:
    """One way through the parts of a processor."""

    def __init__(self) -> None:
        self.parts = 0
        self.inside: dict[int, int] = {}  # parts that are being read -> their number, for those that hold themselves

    def of(self, part: Any) -> Hashable:
        self.parts += 1
        if self.parts > _MOST_PARTS:
            raise _UnknownError
        if isinstance(part, _PLAIN):
            return type(part), part
        if isinstance(part, enum.Enum):
            return type(part), part.name
        if isinstance(part, _FIXED):
            return part
        if id(part) in self.inside:
            return "itself", self.inside[id(part)]
        self.inside[id(part)] = self.parts
        try:
            return self._within(part)
        finally:
            del self.inside[id(part)]

    def _within(self, part: Any) -> Hashable:
        if isinstance(part, Tensor | np.ndarray):
            if (part.numel() if isinstance(part, Tensor) else part.size) > _MOST_VALUES:
                raise _UnknownError
            return type(part), str(part.dtype), repr(part.tolist())
        if isinstance(part, Mapping):
            return type(part), tuple((self.of(k), self.of(v)) for k, v in part.items())
        if isinstance(part, list | tuple):
            return (list, tuple)[isinstance(part, tuple)], tuple(map(self.of, part))
        if isinstance(part, set | frozenset):
            return type(part), frozenset(map(self.of, part))
        if isinstance(part, types.FunctionType):
            return self._function(part)
        if isinstance(part, types.MethodType):
            return self.of(part.__func__), self.of(part.__self__)
        if isinstance(part, functools.partial):
            return functools.partial, self.of(part.func), self.of(part.args), self.of(part.keywords)
        if not hasattr(part, "__dict__") or hasattr(type(part), "__next__"):
            raise _UnknownError
        own = tuple((name, self.of(value)) for name, value in vars(part).items())
        shared = [(n, v) for kind in type(part).__mro__ for n, v in vars(kind).items() if isinstance(v, _PLAIN)]
        runs = [f for n in ("__call__", "forward") if isinstance(f := getattr(type(part), n, None), types.FunctionType)]
        return type(part), own, tuple((n, self.of(v)) for n, v in shared), tuple(map(self.of, runs))

    def _function(self, function: types.FunctionType) -> Hashable:
        """The code of a function, and what it is run with."""
        try:
            enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:  # a cell that is empty yet
            raise _UnknownError from error
        known = function.__globals__
        names = sorted(n for n in _names(function.__code__) if n in known)
        own = [n for n in names if isinstance(f := known[n], types.FunctionType) and f.__globals__ is known]
        plain = [n for n in names if n not in own and not isinstance(known[n], (*_FIXED, types.FunctionType))]
        parts = (enclosed, function.__defaults__, function.__kwdefaults__, [known[n] for n in (*own, *plain)])
        return (function.__code__, *map(self.of, parts))


def _names(code: types.CodeType) -> set[str]:
    """The names that a function asks for, also inside of the functions that it makes."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
