"""Measure the memory of values, so that a session can limit what it remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn


def held(value: Any) -> dict[int, int]:
    """Return the bytes of each tensor, array, picture and text in a value, by identity, so that two values that share
    memory share an entry. Models are not counted: all sessions share them."""
    found: dict[int, int] = {}
    _weigh(value, found)
    return found


def _weigh(value: Any, found: dict[int, int]) -> None:
    if id(value) in found or value is None or isinstance(value, nn.Module | type | int | float):
        return
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return
    found[id(value)] = 0
    if isinstance(value, np.ndarray):
        found[id(value)] = value.nbytes
    elif isinstance(value, Image.Image):
        found[id(value)] = value.width * value.height * len(value.getbands())
    elif isinstance(value, str | bytes):
        found[id(value)] = len(value)
    elif is_dataclass(value):
        for field in fields(value):
            _weigh(getattr(value, field.name), found)
    elif isinstance(value, Mapping):
        for own in value.values():
            _weigh(own, found)
    elif isinstance(value, Iterable) and hasattr(value, "__len__"):
        for own in value:
            _weigh(own, found)
