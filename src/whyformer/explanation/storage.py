"""Explanations as plain values and as files, each value checked when it is read."""

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
from whyformer.explanation import sealing
from whyformer.explanation.features import Features
from whyformer.explanation.fitting import check_fit
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.versions import versions

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_FORMAT = 1
_ORIGINAL = "original."
_PART = "part."
_TENSORS = ("scores", "target", "logits")
_SOME = ("classes", "normalizer")  # of more classes than are kept


# -- plain values ----------------------------------------------------------------------------------------------------
def to_plain(e: Explanation) -> dict[str, Any]:
    """Everything but tensors and pictures as JSON values."""
    from whyformer.explanation.schemas import HeldFeatures, HeldResult

    facts = {name: plain(getattr(e, name)) for name in HeldResult.model_fields}
    facts |= {name: getattr(e.features, name) for name in HeldFeatures.model_fields}
    facts["geometry"] = None if e.geometry is None else [g.to_dict() for g in e.geometry]
    return facts


def from_plain(facts: Mapping[str, Any], outputs: int) -> dict[str, Any]:
    """The arguments of an Explanation out of :func:`to_plain`: tuples, numbers and geometries again.

    Args:
        outputs: number of logits of a row.

    Raises:
        InputError: a value that is unknown, missing or of another kind.
    """
    from whyformer.explanation.schemas import HeldExplanation, HeldFeatures, HeldResult, checked

    held = vars(checked(HeldExplanation, _with_activation(facts, outputs), "this explanation"))
    made = {name: held[name] for name in HeldResult.model_fields}
    features = {name: held[name] for name in HeldFeatures.model_fields}
    if features["geometry"] is not None:
        features["geometry"] = [Geometry.from_dict(g) for g in features["geometry"]]
    return {**made, "features": Features(**features)}


def _with_activation(facts: Mapping[str, Any], outputs: int) -> Mapping[str, Any]:
    """The same with an activation, also of files of earlier versions, which had ``multi_label`` instead.

    One logit of such a file is that of a class if the target has the name of one.
    """
    if "activation" in facts:
        return {k: v for k, v in facts.items() if k != "multi_label"}
    if "multi_label" not in facts:
        return facts
    several, labels, names = facts["multi_label"], facts.get("labels"), facts.get("target_names")
    if not isinstance(several, bool):
        raise InputError("this explanation's multi_label is of another kind")
    known = [labels.get(0, labels.get("0"))] if isinstance(labels, Mapping) else []
    named = bool(known) and isinstance(names, list) and names == known * len(names)
    kind = "sigmoid" if several or (outputs == 1 and named) else "identity" if outputs == 1 else "softmax"
    return {**{k: v for k, v in facts.items() if k != "multi_label"}, "activation": kind}


def from_dict(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The arguments of an Explanation out of what its ``to_dict`` gave, and by name those of its parts."""
    if not isinstance(facts, Mapping) or not isinstance(parts := facts.get("parts") or {}, Mapping):
        raise InputError("this is not an explanation as to_dict gives it: it, or its parts, are no mapping")
    whole = _from_dict({name: value for name, value in facts.items() if name != "parts"})
    return whole, {str(name): _from_dict(part) for name, part in parts.items()}


def _from_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        tensors = {name: torch.tensor(facts[name]) for name in (*_TENSORS, *(n for n in _SOME if n in facts))}
        if "normalizer" in tensors:
            tensors["normalizer"] = torch.tensor(facts["normalizer"], dtype=torch.float64)
        rest = {k: v for k, v in facts.items() if k not in ("probabilities", *_TENSORS, *_SOME)}
        made = from_plain(rest, tensors["logits"].shape[-1])
        made = {**tensors, **made}
        check_fit(made)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError(f"this is not an explanation as to_dict gives it: {error!r}") from error
    return made


def plain(value: Any) -> Any:
    """Tensors, tuples and callables as JSON values."""
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
    """One ``.safetensors`` file: tensors, and the rest as JSON in its header. It appears whole or not at all."""
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
            metadata=sealing.metadata(facts, tensors),
        )
    return path


def result_tensors(e: Explanation) -> dict[str, Tensor]:
    """Those of a result beside its features, by name."""
    found = {name: getattr(e, name) for name in (*_TENSORS, *_SOME)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def tensors_of(e: Explanation) -> dict[str, Tensor]:
    """Those of a result and of its features, by name."""
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
    """A passing name beside ``path``: what is written there takes its place at the end, or nothing is left behind.

    The passing name is this write's own, so that two processes may write one file: the later one stays, whole.

    Raises:
        LoadError: the folder is missing, the disk is full, the file cannot be written, or the name is that of a folder,
            a pipe or a device.
    """
    from safetensors import SafetensorError

    if path.exists() and not path.is_file():  # it would be replaced by a file
        raise LoadError(f"cannot write {path}: that is a folder, a pipe or a device, no file")
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
    """The arguments of an Explanation out of what :func:`save` wrote, and by name those of its parts.

    Raises:
        LoadError: it is no saved explanation, or was damaged since.
    """
    facts, tensors = sealing.opened(path, "a saved explanation")
    with told(path, "a saved explanation"):
        if facts.pop("format") != _FORMAT:
            raise LoadError(f"{path} was saved by another version of whyformer")
        facts.pop("versions", None)
        parts = dict(facts.pop("parts", {}))
        whole = loaded(facts, tensors, "")
        return whole, {name: loaded(part, tensors, f"{_PART}{i}.") for i, (name, part) in enumerate(parts.items())}


@contextmanager
def told(path: str | Path, what: str) -> Iterator[None]:
    """Whatever is wrong with the values of a file, as a LoadError that names it."""
    try:
        yield
    except LoadError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise LoadError(f"{path} is not {what}: {said}") from error


def loaded(facts: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """The arguments of an Explanation out of :func:`to_plain` and :func:`tensors_of`, whose names begin so."""
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    known = {name: own[name] for name in (*_TENSORS, *(n for n in _SOME if n in own))}
    made = from_plain(facts, known["logits"].shape[-1])
    count = sum(name.startswith(_ORIGINAL) for name in own)
    originals = [Image.fromarray(own[f"{_ORIGINAL}{i}"].numpy()) for i in range(count)]
    seen = {"pictures": own.get("pictures"), "sounds": own.get("sounds"), "originals": originals or None}
    made = {**made, **known, "features": replace(made["features"], **seen)}
    check_fit(made)
    return made
