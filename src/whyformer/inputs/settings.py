"""The settings of a processor as a digest, for cached results and files that depend on them."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.dtype)
# a tokenizer's records of its origin and of its calls
_HISTORY = {"name_or_path", "vocab_file", "merges_file", "files_loaded", "init_inputs", "init_kwargs", "verbose",
            "cache", "deprecation_warnings"}
_CACHED = type(functools.cache(len))
# globals of a function that are not read: classes, modules, and functions of other modules
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType)
# libraries whose code is not read, so that files can be used with another version of them
_LIBRARIES = {"builtins", "transformers", "tokenizers", "timm", "torchvision", "torch", "numpy", "PIL"}
_MOST_VALUES, _MOST_PARTS = 1_000_000, 1_000_000  # of an array; of a processor


class _UnknownError(Exception):
    """A setting has state that cannot be compared."""


def settings_of(processor: Any) -> str | None:
    """Return a digest of everything that a processor's output depends on: its attributes, the code of its class, and
    for functions their code, closures and the global constants and functions that they use; of a tokenizer also its
    vocabulary. Two processors with equal digests give equal outputs with the same version of their library, in other
    processes too.

    None if this is unknown, such as for a processor that holds a random generator, a network or an open file.
    """
    try:
        return hashlib.sha256(repr(_Reading().of(processor)).encode()).hexdigest()[:16]
    except _UnknownError:
        return None


class _Reading:
    """One traversal of the parts of a processor."""

    def __init__(self) -> None:
        self.parts = 0
        self.inside: dict[int, int] = {}  # id of a part being read -> its number, for parts that contain themselves

    def of(self, part: Any) -> Any:
        """Return nested tuples of plain values, whose text is the same in all processes."""
        self.parts += 1
        if self.parts > _MOST_PARTS:
            raise _UnknownError
        if isinstance(part, enum.Enum):
            return _name(type(part)), part.name
        if isinstance(part, _PLAIN):
            return _name(type(part)), repr(part)
        if isinstance(part, types.ModuleType | logging.Logger):
            return _name(type(part)), part.__name__ if isinstance(part, types.ModuleType) else part.name
        if isinstance(part, types.CodeType):
            return _code(part)
        if isinstance(part, re.Pattern):
            return "pattern", part.pattern, part.flags
        if id(part) in self.inside:
            return "itself", self.inside[id(part)]
        self.inside[id(part)] = self.parts
        try:
            return self._within(part)
        finally:
            del self.inside[id(part)]

    def _within(self, part: Any) -> Any:
        if isinstance(part, Tensor | np.ndarray | np.generic):
            return _name(type(part)), _array(part.detach().cpu() if isinstance(part, Tensor) else part)
        if isinstance(part, Mapping):
            return _name(type(part)), tuple((self.of(k), self.of(v)) for k, v in part.items())
        if isinstance(part, list | tuple):
            return ("list", "tuple")[isinstance(part, tuple)], tuple(map(self.of, part))
        if isinstance(part, set | frozenset):
            return _name(type(part)), tuple(sorted(map(self.of, part), key=repr))
        if isinstance(part, type):
            return self._class(part)
        if isinstance(part, types.FunctionType):
            return self._function(part)
        if isinstance(part, types.MethodType):
            return self.of(part.__func__), self.of(part.__self__)
        if isinstance(part, types.BuiltinFunctionType):
            return _name(part), self.of(part.__self__)
        if _uncached(part) is not part:
            return self.of(_uncached(part))
        if isinstance(part, functools.partial):
            return "partial", self.of(part.func), self.of(part.args), self.of(part.keywords)
        if type(part).__module__.partition(".")[0] == "tokenizers":
            return _name(type(part)), _state(part)
        if not hasattr(part, "__dict__") or hasattr(type(part), "__next__"):
            raise _UnknownError
        return self._object(part)

    def _object(self, part: Any) -> Any:
        values, vocabulary = vars(part), None
        if hasattr(part, "get_vocab"):
            vocabulary = _digest(sorted(part.get_vocab().items()))
            values = {name: value for name, value in values.items() if name not in _HISTORY}
        attributes = tuple(sorted((name, self.of(value)) for name, value in values.items()))
        return self.of(type(part)), vocabulary, attributes

    def _class(self, kind: type) -> Any:
        """Return the functions and the constants of a class and its bases, without those of libraries."""
        bases = (base for base in kind.__mro__ if not _is_of_library(base))
        members = [(n, getattr(m, "__func__", getattr(m, "fget", m))) for b in bases for n, m in vars(b).items()]
        read = [(n, self.of(m)) for n, m in members if isinstance(m, types.FunctionType)]
        constants = [(n, self.of(m)) for n, m in members if isinstance(m, _PLAIN) and not n.startswith("__")]
        return _name(kind), tuple(read), tuple(constants)

    def _function(self, function: types.FunctionType) -> Any:
        """Return the code of a function, its closure, defaults, and the globals that it uses; for a function of a
        library, its name, closure and defaults."""
        try:
            enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:  # an empty cell
            raise _UnknownError from error
        if _is_of_library(function):
            return _name(function), *map(self.of, (enclosed, function.__defaults__, function.__kwdefaults__))
        used = [_uncached(function.__globals__[n]) for n in sorted(_names(function.__code__) & {*function.__globals__})]
        used = [v for v in used if not isinstance(v, _FIXED) or getattr(v, "__globals__", 0) is function.__globals__]
        parts = (enclosed, function.__defaults__, function.__kwdefaults__, used)
        return (_code(function.__code__), *map(self.of, parts))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_of_library(part: Any) -> bool:
    return str(part.__module__).partition(".")[0] in _LIBRARIES


def _uncached(value: Any) -> Any:
    """Return the function of ``functools.cache``; anything else is returned as it is."""
    return value.__wrapped__ if isinstance(value, _CACHED) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _array(values: Any) -> tuple[str, ...]:
    """Return the dtype, the shape and a digest of the values of a tensor or an array."""
    if np.prod(values.shape) > _MOST_VALUES:
        raise _UnknownError
    try:
        raw = np.ascontiguousarray(values.view(torch.uint8) if isinstance(values, Tensor) else values)
    except (TypeError, RuntimeError) as error:  # sparse, or another layout without memory to view
        raise _UnknownError from error
    if raw.dtype.hasobject:
        raise _UnknownError
    return str(values.dtype), str(tuple(values.shape)), hashlib.sha256(raw.tobytes()).hexdigest()


def _state(part: Any) -> str:
    """Return a digest of an object of the tokenizers library, without the padding and truncation of its last call."""
    state = part.__getstate__()
    if isinstance(state, bytes):
        read = json.loads(state)
        state = {name: read[name] for name in sorted(read) if name not in ("padding", "truncation")}
    return _digest(state)


def _code(code: types.CodeType) -> Any:
    """Return what code does, without the file and the lines where it is written."""
    constants = (
        _code(c) if isinstance(c, types.CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    )
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, tuple(constants)


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function uses, also in the functions defined inside it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
