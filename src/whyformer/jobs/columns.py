"""Convert explanations to rows of a table, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from whyformer.errors import InputError, LoadError, import_optional
from whyformer.explanation import storage
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import Failure, RowResult
from whyformer.jobs.description import top_count

# fields of an explanation that have a column; the other fields are in the column "features"
_COLUMNS = (
    "level", "method", "settings", "model", "input", "target_names", "labels", "diagnostics", "tokens",
    "offsets", "texts",
)  # fmt: skip
TOP = 5
"""Number of features with the largest scores in the column "top"."""


def schema(scores: str = "float32") -> Any:
    """Return the Arrow schema of a part; docs/jobs.md describes the columns."""
    pa = import_optional("pyarrow", "a table of explanations")
    number = pa.float16() if scores == "float16" else pa.float32()
    top = pa.struct([("feature", pa.int32()), ("name", pa.string()), ("score", pa.float32())])
    return pa.schema([
        ("row", pa.int64()), ("id", pa.string()), ("method", pa.string()), ("settings", pa.string()),
        ("target", pa.int32()), ("target_name", pa.string()), ("probability", pa.float32()),
        ("level", pa.string()), ("shape", pa.list_(pa.int32())), ("scores", pa.list_(number)), ("top", pa.list_(top)),
        ("logits", pa.list_(pa.float32())), ("tokens", pa.list_(pa.string())), ("offsets", pa.list_(pa.int32())),
        ("text", pa.string()), ("features", pa.string()),
        ("warnings", pa.list_(pa.string())), ("diagnostics", pa.string()), ("labels", pa.string()),
        ("input", pa.string()), ("parts", pa.string()), ("input_sha256", pa.string()),
    ])  # fmt: skip


@dataclass
class Rows:
    """The rows of one part.

    Attributes:
        scores: "float32", "float16" or "top-K", as in a job.
        labels: class names of the model, which are stored in a row only if the explanation has others.
        rows: a row for each explanation, with the columns of :func:`schema`.
        failures: inputs, or methods of an input, that failed.
    """

    scores: str = "float32"
    labels: Mapping[int, str] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, explained: RowResult) -> None:
        """Add the explanations and failures of one input."""
        self.failures += explained.failures
        for e in explained.explanations:
            try:
                self.rows.append(self._row(explained, e))
            except InputError as error:
                row = explained.row
                self.failures.append(Failure(row.index, row.id, e.method, "InputError", str(error)))

    @property
    def warned(self) -> int:
        """Number of explanations with warnings."""
        return sum(bool(row["warnings"]) for row in self.rows)

    def table(self) -> Any:
        """Return a pyarrow table with the columns of :func:`schema`."""
        pa = import_optional("pyarrow", "a table of explanations")
        return pa.Table.from_pylist(self.rows, schema(self.scores))

    def _row(self, explained: RowResult, e: Explanation) -> dict[str, Any]:
        flat = e.scores[0].flatten().float().numpy()
        target = int(e.target[0])
        order = np.argsort(-np.abs(flat), kind="stable")
        if e.special is not None:
            order = order[~np.isin(order, e.special[0])]
        stored: Any = flat
        if self.scores == "float16":
            stored = flat.astype(np.float16)
            if not np.isfinite(stored).all():
                raise InputError(f"the scores of {e.method} are too large for float16: use float32")
        most = TOP
        if self.scores.startswith("top-"):
            stored, most = None, top_count(self.scores)
        names = e.tokens[0] if e.tokens is not None and e.level == "token" else None
        top = [{"feature": int(i), "name": None if names is None else names[i], "score": float(flat[i])}
               for i in order[:most]]  # fmt: skip
        labels = (
            None if e.labels == self.labels or not e.labels else json.dumps({str(k): v for k, v in e.labels.items()})
        )
        diagnostics = {k: v for k, v in e.diagnostics.items() if k != "warnings"}
        facts = {k: v for k, v in storage.to_plain(e).items() if k not in _COLUMNS and v is not None}
        if e.classes is not None and e.normalizer is not None:
            facts |= {"classes": e.classes[0].tolist(), "normalizer": float(e.normalizer[0])}
        return {
            "row": explained.row.index, "id": explained.row.id, "method": e.method, "settings": _json(e.settings),
            "target": target, "target_name": None if e.target_names is None else e.target_names[0],
            "probability": e.probability(target),
            "level": e.level,
            "shape": shape_of(e),
            "scores": stored, "top": top, "logits": e.logits[0].float().numpy(),
            "tokens": None if e.tokens is None else e.tokens[0],
            "offsets": None if e.offsets is None else [n for pair in e.offsets[0] for n in pair],
            "text": None if e.texts is None else e.texts[0],
            "features": _json(facts), "warnings": e.warnings,
             "diagnostics": _json(diagnostics), "labels": labels, "input": e.input,
            "parts": _json({name: part.to_dict() for name, part in e.parts.items()}) if e.parts else None,
            "input_sha256": explained.digest,
        }  # fmt: skip


def shape_of(e: Explanation) -> list[int]:
    """Return the shape of the scores of one sample; of patches (time steps,) rows and columns."""
    grid = [] if e.grid is None else [n for n in (e.features.frames, *e.grid) if n is not None]
    return grid if e.level == "patch" and math.prod(grid) == e.scores[0].numel() else list(e.scores.shape[1:])


def _json(value: Any) -> str:
    """Return compact JSON, in which NaN and infinity are null."""
    return json.dumps(storage.plain(value, finite=True), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def explanation_of(row: Mapping[str, Any], model: Mapping[str, Any]) -> Explanation:
    """Restore an explanation, without pictures, from a row of a table.

    Scores that a ``top-K`` row does not contain are 0.

    Args:
        row: values by column, plain or arrays.
        model: name and labels of the model, from the manifest.

    Raises:
        LoadError: the row is not a valid explanation.
    """
    try:
        shape, level = [int(n) for n in row["shape"]], str(row["level"])
        size = math.prod(shape)
        if row["scores"] is None:
            values = np.zeros(size, np.float32)
            for entry in row["top"]:
                values[entry["feature"]] = entry["score"]
        else:
            values = np.array(row["scores"], np.float32)  # a copy, which is writable
        scores = torch.from_numpy(values).reshape(1, *(shape if level == "pixel" else [size]))
        labels = {int(k): v for k, v in json.loads(row["labels"]).items()} if row["labels"] else model.get("labels")
        offsets = None if row["offsets"] is None else [int(n) for n in row["offsets"]]
        diagnostics = json.loads(row["diagnostics"])
        if len(row["warnings"]):
            diagnostics["warnings"] = [list(row["warnings"])]
        facts = {
            **json.loads(row["features"]), "level": level, "method": row["method"], "input": row["input"],
            "settings": json.loads(row["settings"]), "model": model.get("name"), "labels": labels,
            "target_names": None if row["target_name"] is None else [row["target_name"]], "diagnostics": diagnostics,
            "tokens": None if row["tokens"] is None else [list(row["tokens"])],
            "offsets": None if offsets is None else [list(zip(offsets[::2], offsets[1::2], strict=True))],
            "texts": None if row["text"] is None else [row["text"]],
        }  # fmt: skip
        optional: dict[str, torch.Tensor] = {}
        if "classes" in facts:
            optional["classes"] = torch.tensor([facts.pop("classes")])
            optional["normalizer"] = torch.tensor([facts.pop("normalizer")], dtype=torch.float64)
        parts = {name: Explanation.from_dict(part) for name, part in json.loads(row["parts"] or "{}").items()}
        logits = torch.from_numpy(np.array(row["logits"], np.float32))[None]
        tensors = {"scores": scores, "target": torch.tensor([row["target"]]), "logits": logits, **optional}
        return storage.restored(Explanation, facts, tensors, parts)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise LoadError(f"a row of this table is not a valid explanation: {error!r}") from error


def failures_table(failures: Sequence[Failure]) -> Any:
    """Return a pyarrow table of failures in the order of the input."""
    pa = import_optional("pyarrow", "a table of failures")
    columns = pa.schema([("row", pa.int64()), *((name, pa.string()) for name in ("id", "method", "kind", "reason"))])
    return pa.Table.from_pylist(list(map(vars, sorted(failures, key=lambda f: f.row))), columns)
