"""Convert explanations to plain values and files, and validate the values that are read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation import serialization
from whyformer.explanation.consistency import check_fit
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.versions import versions

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_FORMAT = 1
_ORIGINAL = "original."
_PART = "part."
_TENSORS = ("scores", "target", "logits")
_OPTIONAL = ("classes", "normalizer")  # if only the highest logits are stored


# -- plain values ----------------------------------------------------------------------------------------------------
def to_plain(e: Explanation) -> dict[str, Any]:
    """Return all values except tensors and pictures as JSON values."""
    from whyformer.explanation.schemas import FeaturesSchema, ResultSchema

    facts = {name: plain(getattr(e, name)) for name in ResultSchema.model_fields}
    facts |= {name: getattr(e.features, name) for name in FeaturesSchema.model_fields}
    facts["geometry"] = None if e.geometry is None else [g.to_dict() for g in e.geometry]
    return facts


def from_plain(facts: Mapping[str, Any], outputs: int) -> dict[str, Any]:
    """Return the arguments of an Explanation from the values of :func:`to_plain`.

    Args:
        facts: the values by name.
        outputs: number of logits of a sample.

    Raises:
        InputError: a value is unknown or missing, or has the wrong type.
    """
    from whyformer.explanation.schemas import ExplanationSchema, FeaturesSchema, ResultSchema, checked

    values = vars(checked(ExplanationSchema, _with_activation(facts, outputs), "this explanation"))
    arguments = {name: values[name] for name in ResultSchema.model_fields}
    features = {name: values[name] for name in FeaturesSchema.model_fields}
    if features["geometry"] is not None:
        features["geometry"] = [Geometry.from_dict(g) for g in features["geometry"]]
    return {**arguments, "features": Features(**features)}


def _with_activation(facts: Mapping[str, Any], outputs: int) -> Mapping[str, Any]:
    """Return ``facts`` with an activation; files of earlier versions have ``multi_label`` instead.

    A single logit of such a file belongs to a class if the target has the name of a class, otherwise to a regression.
    """
    if "activation" in facts:
        return {k: v for k, v in facts.items() if k != "multi_label"}
    if "multi_label" not in facts:
        return facts
    multi_label, labels, names = facts["multi_label"], facts.get("labels"), facts.get("target_names")
    if not isinstance(multi_label, bool):
        raise InputError("this explanation's multi_label is not true or false")
    known = [labels.get(0, labels.get("0"))] if isinstance(labels, Mapping) else []
    is_class = bool(known) and isinstance(names, list) and names == known * len(names)
    kind = "sigmoid" if multi_label or (outputs == 1 and is_class) else "identity" if outputs == 1 else "softmax"
    return {**{k: v for k, v in facts.items() if k != "multi_label"}, "activation": kind}


def from_dict(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the arguments of an Explanation from the values of ``to_dict``, and those of its parts by name."""
    if not isinstance(facts, Mapping) or not isinstance(parts := facts.get("parts") or {}, Mapping):
        raise InputError("this is not a dictionary of Explanation.to_dict: it, or its parts, is not a mapping")
    main = _from_dict({name: value for name, value in facts.items() if name != "parts"})
    return main, {str(name): _from_dict(part) for name, part in parts.items()}


def _from_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        tensors = {name: torch.tensor(facts[name]) for name in (*_TENSORS, *(n for n in _OPTIONAL if n in facts))}
        if "normalizer" in tensors:
            tensors["normalizer"] = torch.tensor(facts["normalizer"], dtype=torch.float64)
        rest = {k: v for k, v in facts.items() if k not in ("probabilities", *_TENSORS, *_OPTIONAL)}
        arguments = from_plain(rest, tensors["logits"].shape[-1])
        arguments = {**tensors, **arguments}
        check_fit(arguments)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError(f"this is not a dictionary of Explanation.to_dict: {error!r}") from error
    return arguments


def plain(value: Any) -> Any:
    """Convert tensors, tuples, mappings and callables to JSON values."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


# -- files -----------------------------------------------------------------------------------------------------------
def save(e: Explanation, path: str | Path) -> Path:
    """Write a ``.safetensors`` file atomically: the tensors, and all other values as JSON in its header."""
    from safetensors.torch import save_file

    path = Path(path)
    tensors = tensors_of(e)
    for i, part in enumerate(e.parts.values()):
        tensors |= {f"{_PART}{i}.{name}": tensor for name, tensor in tensors_of(part).items()}
    parts = {name: to_plain(part) for name, part in e.parts.items()}
    facts = {"format": _FORMAT, "versions": versions(), **to_plain(e), **({"parts": parts} if parts else {})}
    with written_whole(path) as partial:
        save_file(
            {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()},
            partial,
            metadata=serialization.metadata(facts, tensors),
        )
    return path


def result_tensors(e: Explanation) -> dict[str, Tensor]:
    """Return the tensors of a result by name, without those of its features."""
    tensors = {name: getattr(e, name) for name in (*_TENSORS, *_OPTIONAL)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def tensors_of(e: Explanation) -> dict[str, Tensor]:
    """Return the tensors of a result and of its features by name; the original pictures are tensors too."""
    tensors = result_tensors(e)
    if e.pictures is not None:
        tensors["pictures"] = e.pictures
    if e.sounds is not None:
        tensors["sounds"] = e.sounds
    for i, picture in enumerate(e.originals or ()):
        tensors[f"{_ORIGINAL}{i}"] = torch.from_numpy(np.array(picture))
    return tensors


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success the file there replaces ``path``, on failure it is removed.

    Each call has a temporary path of its own, so two processes may write the same file: the later write wins.

    Raises:
        LoadError: the folder is missing, the disk is full, the file cannot be written, or ``path`` is a folder, a pipe
            or a device.
    """
    from safetensors import SafetensorError

    if path.exists() and not path.is_file():
        raise LoadError(f"cannot write {path}: it is a folder, a pipe or a device, not a file")
    partial = path.with_name(f".{path.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        folder = "" if path.parent.is_dir() else f": there is no folder {path.parent}"
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(f"cannot write {path}{folder or f': {reason}'}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read a file that :func:`save` wrote: the arguments of an Explanation, and those of its parts by name.

    Raises:
        LoadError: the file is damaged, or not a saved explanation.
    """
    facts, tensors = serialization.opened(path, "a saved explanation")
    with load_errors(path, "a saved explanation"):
        if facts.pop("format") != _FORMAT:
            raise LoadError(f"{path} was saved by another version of whyformer")
        facts.pop("versions", None)
        parts = dict(facts.pop("parts", {}))
        main = loaded(facts, tensors, "")
        return main, {name: loaded(part, tensors, f"{_PART}{i}.") for i, (name, part) in enumerate(parts.items())}


@contextmanager
def load_errors(path: str | Path, expected: str) -> Iterator[None]:
    """Turn errors about the values of a file into a LoadError that names the file and its expected content."""
    try:
        yield
    except LoadError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise LoadError(f"{path} is not {expected}: {reason}") from error


def loaded(facts: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """Return the arguments of an Explanation from plain values and the tensors whose names begin with ``prefix``."""
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    results = {name: stored[name] for name in (*_TENSORS, *(n for n in _OPTIONAL if n in stored))}
    arguments = from_plain(facts, results["logits"].shape[-1])
    count = sum(name.startswith(_ORIGINAL) for name in stored)
    originals = [Image.fromarray(stored[f"{_ORIGINAL}{i}"].numpy()) for i in range(count)]
    media = {"pictures": stored.get("pictures"), "sounds": stored.get("sounds"), "originals": originals or None}
    arguments = {**arguments, **results, "features": replace(arguments["features"], **media)}
    check_fit(arguments)
    return arguments
