"""The settings of a processor as a hashable value, to cache results that depend on them."""

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
    """A setting has state that cannot be compared."""


def settings_of(processor: Any) -> Hashable | None:
    """Return everything that a processor's output depends on: its attributes, and for functions their code, closures
    and the global constants and functions that they use. Two processors with equal settings give equal outputs.

    None if this is unknown, such as for a processor that holds a random generator, a network or an open file.
    """
    try:
        return _Reading().of(processor)
    except _UnknownError:
        return None


class _Reading:
    """One traversal of the parts of a processor."""

    def __init__(self) -> None:
        self.parts = 0
        self.inside: dict[int, int] = {}  # id of a part being read -> its number, for parts that contain themselves

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
        attributes = tuple((name, self.of(value)) for name, value in vars(part).items())
        shared = [(n, v) for kind in type(part).__mro__ for n, v in vars(kind).items() if isinstance(v, _PLAIN)]
        runs = [f for n in ("__call__", "forward") if isinstance(f := getattr(type(part), n, None), types.FunctionType)]
        return type(part), attributes, tuple((n, self.of(v)) for n, v in shared), tuple(map(self.of, runs))

    def _function(self, function: types.FunctionType) -> Hashable:
        """Return the code of a function, its closure, defaults, and the globals that it uses."""
        try:
            enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:  # an empty cell
            raise _UnknownError from error
        known = function.__globals__
        names = sorted(n for n in _names(function.__code__) if n in known)
        called = [n for n in names if isinstance(f := known[n], types.FunctionType) and f.__globals__ is known]
        values = [n for n in names if n not in called and not isinstance(known[n], (*_FIXED, types.FunctionType))]
        parts = (enclosed, function.__defaults__, function.__kwdefaults__, [known[n] for n in (*called, *values)])
        return (function.__code__, *map(self.of, parts))


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function uses, also in the functions defined inside it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
