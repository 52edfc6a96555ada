"""Measure the memory of values, so that a session can limit what it remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn


def memory_of(value: Any) -> dict[int, int]:
    """Return the bytes of each tensor, array, picture and text in a value, by identity, so that two values that share
    memory share an entry. Models are not counted: all sessions share them."""
    sizes: dict[int, int] = {}
    _add(value, sizes)
    return sizes


def _add(value: Any, sizes: dict[int, int]) -> None:
    if id(value) in sizes or value is None or isinstance(value, nn.Module | type | int | float):
        return
    if isinstance(value, Tensor):
        sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return
    sizes[id(value)] = 0
    if isinstance(value, np.ndarray):
        sizes[id(value)] = value.nbytes
    elif isinstance(value, Image.Image):
        sizes[id(value)] = value.width * value.height * len(value.getbands())
    elif isinstance(value, str | bytes):
        sizes[id(value)] = len(value)
    elif is_dataclass(value):
        for field in fields(value):
            _add(getattr(value, field.name), sizes)
    elif isinstance(value, Mapping):
        for item in value.values():
            _add(item, sizes)
    elif isinstance(value, Iterable) and hasattr(value, "__len__"):
        for item in value:
            _add(item, sizes)
