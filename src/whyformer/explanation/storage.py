"""Convert explanations to plain values, tables and files, and restore them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel
from torch import Tensor

from whyformer.errors import InputError, LoadError, import_optional
from whyformer.explanation import serialization
from whyformer.explanation.consistency import check_fit
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.schemas import checked, schema_of
from whyformer.explanation.serialization import errors_as

if TYPE_CHECKING:
    import pandas

    from whyformer.explanation.result import Explanation

_FORMAT = 1
_ORIGINAL = "original."
_PART = "part."
_MEDIA = ("pictures", "sounds", "originals")
_DERIVED = ("probabilities", "multi_label", "parts")

TENSORS = ("scores", "target", "logits", "classes", "normalizer")
"""Fields of an explanation that are tensors with an entry for each sample; the last two may be None."""


def schema(kind: type) -> type[BaseModel]:
    """Return the schema of the values of explanations and their features, without tensors and pictures."""
    return schema_of("ExplanationSchema", (kind, Features), (*TENSORS, *_MEDIA, "features", "parts"))


# -- plain values ----------------------------------------------------------------------------------------------------
def to_plain(e: Explanation) -> dict[str, Any]:
    """Return all values of one input except tensors and pictures as JSON values."""
    return {name: plain(getattr(e, name)) for name in schema(type(e)).model_fields}


def to_dict(e: Explanation) -> dict[str, Any]:
    """See :meth:`Explanation.to_dict`."""
    return {
        **to_plain(e),
        **{name: tensor.tolist() for name, tensor in result_tensors(e).items()},
        "probabilities": None if e.numeric else e.probabilities().tolist(),
        "multi_label": e.multi_label,
        **({"parts": {name: to_dict(part) for name, part in e.parts.items()}} if e.parts else {}),
    }


def from_dict(kind: type[Explanation], facts: Mapping[str, Any]) -> Explanation:
    """See :meth:`Explanation.from_dict`."""
    with errors_as(InputError, "this is not a dictionary of Explanation.to_dict"):
        tensors = {name: torch.tensor(facts[name]) for name in TENSORS if name in facts}
        if "normalizer" in tensors:
            tensors["normalizer"] = torch.tensor(facts["normalizer"], dtype=torch.float64)
        parts = {str(name): from_dict(kind, part) for name, part in (facts.get("parts") or {}).items()}
        return restored(kind, {k: v for k, v in facts.items() if k not in (*TENSORS, *_DERIVED)}, tensors, parts)


def restored(
    kind: type[Explanation],
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Explanation] | None = None,
) -> Explanation:
    """Return the explanation of the values of :func:`to_plain` and the tensors of :func:`tensors_of`.

    Raises:
        InputError: a value is unknown or missing, has the wrong type, or is inconsistent with another.
        KeyError: a tensor is missing.
    """
    values: dict[str, Any] = vars(checked(schema(kind), facts, "this explanation"))
    pictures = {name: Image.fromarray(t.numpy()) for name, t in tensors.items() if name.startswith(_ORIGINAL)}
    originals = [pictures.pop(f"{_ORIGINAL}{i}", None) for i in range(len(tensors["scores"]))]
    if pictures:
        raise InputError(f"it has {', '.join(pictures)}, and scores for {len(originals)} samples")
    values |= {name: tensors.get(name) for name in ("classes", "normalizer", "pictures", "sounds")}
    values["originals"] = originals if any(originals) else None
    features = Features(**{f.name: values.pop(f.name) for f in fields(Features)})
    scores, target, logits = (tensors[name] for name in ("scores", "target", "logits"))
    e = kind(**values, scores=scores, target=target, logits=logits, features=features, parts=parts or {})
    check_fit(e)
    return e


def plain(value: Any, *, finite: bool = False, digits: int | None = None) -> Any:
    """Convert tensors, arrays, tuples, mappings, geometries and callables to JSON values.

    Args:
        value: the value.
        finite: convert NaN and infinity to None.
        digits: significant digits of floats; all by default.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Geometry):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v, finite=finite, digits=digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, finite=finite, digits=digits) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if finite else value
    if isinstance(value, float) and digits is not None:
        return float(f"{value:.{digits}g}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def to_pandas(e: Explanation) -> pandas.DataFrame:
    """See :meth:`Explanation.to_pandas`."""
    pd = import_optional("pandas", "to_pandas", "data")
    parts = [e.part(name) for name in e.inputs]
    tables = [pd.DataFrame(_columns(part[i], i)) for i in range(len(e)) for part in parts]
    table: pandas.DataFrame = pd.concat(tables, ignore_index=True)
    return table if e.parts else table.drop(columns="input")


def _columns(e: Explanation, sample: int) -> dict[str, Any]:
    """Return the columns by name for one input of one sample."""
    scores = e.scores[0].float().numpy()
    count = scores.size
    columns: dict[str, Any] = {"sample": np.full(count, sample), "input": e.input or "", "method": e.method}
    columns["target"] = e.target_names[0] if e.target_names is not None else e.label(int(e.target[0]))
    if e.level == "pixel" or (e.level == "patch" and e.grid is not None):
        steps = () if e.frames is None else (e.frames,)
        shape = scores.shape if e.level == "pixel" else (*steps, *(e.grid or ()))
        names = ("frame", "row", "column")[-len(shape) :]
        columns |= dict(zip(names, np.indices(shape).reshape(len(shape), -1), strict=True))
    else:
        columns["position"] = np.arange(count)
    if e.level == "token" and e.tokens is not None:
        special = set() if e.special is None else set(e.special[0])
        columns |= {"token": e.tokens[0], "special": [i in special for i in range(count)]}
    return {**columns, "score": scores.reshape(-1)}


# -- files -----------------------------------------------------------------------------------------------------------
def save(e: Explanation, path: str | Path) -> Path:
    """See :meth:`Explanation.save`."""
    facts, tensors = to_plain(e), tensors_of(e)
    if e.parts:
        facts["parts"] = {name: to_plain(part) for name, part in e.parts.items()}
    for i, part in enumerate(e.parts.values()):
        tensors |= {f"{_PART}{i}.{name}": tensor for name, tensor in tensors_of(part).items()}
    return serialization.write(path, _FORMAT, facts, tensors)


def result_tensors(e: Explanation) -> dict[str, Tensor]:
    """Return the tensors of a result by name, without those of its features."""
    return {name: tensor for name in TENSORS if (tensor := getattr(e, name)) is not None}


def tensors_of(e: Explanation) -> dict[str, Tensor]:
    """Return the tensors of a result and of its features by name; the original pictures are tensors too."""
    media = {"pictures": e.pictures, "sounds": e.sounds}
    originals = {f"{_ORIGINAL}{i}": picture for i, picture in enumerate(e.originals or ()) if picture is not None}
    return {
        **result_tensors(e),
        **{name: tensor for name, tensor in media.items() if tensor is not None},
        **{name: torch.from_numpy(np.array(picture)) for name, picture in originals.items()},
    }


def load(kind: type[Explanation], path: str | Path) -> Explanation:
    """See :meth:`Explanation.load`."""
    expected = "a saved explanation"
    facts, tensors = serialization.read(path, _FORMAT, expected)
    with errors_as(LoadError, f"{path} is not {expected}"):
        stored = enumerate(facts.pop("parts", {}).items())
        parts = {name: restored(kind, part, of_prefix(tensors, f"{_PART}{i}.")) for i, (name, part) in stored}
        return restored(kind, facts, tensors, parts)


def of_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
