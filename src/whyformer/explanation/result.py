"""The result of an explanation: scores, what they belong to, and how they were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.versions import versions

LEVELS = ("patch", "token", "pixel")
_FORMAT = 1
_ORIGINAL = "original."
_PLAIN = (
    "model", "level", "method", "grid", "tokens", "offsets", "texts", "target_names", "multi_label", "image_size",
)  # fmt: skip
_BATCHED_LISTS = ("tokens", "offsets", "texts", "target_names", "originals", "geometry")


@dataclass(frozen=True, eq=False)
class Explanation:
    """Scores of one method for a batch of samples, with everything needed to read, draw and repeat them.

    Attributes:
        scores: attribution, on the CPU. ``[B, P]`` patches row by row (``level="patch"``; prefix tokens left out),
            ``[B, N]`` tokens in order (``level="token"``; special tokens and padding are 0) or ``[B, H, W]``
            pixels of the model's input (``level="pixel"``).
        level: ``"patch"``, ``"token"`` or ``"pixel"``.
        method, settings: registry name and the full settings (defaults filled in).
        target: ``[B]`` class index explained (the first one of a contrast).
        target_names: a readable name of the target of each sample.
        logits: ``[B, C]`` the model's output for the batch.
        grid: (rows, columns) of patches, for ``level="patch"``.
        tokens: token strings of each sample (padding included), for text.
        offsets: (start, end) characters of each token in ``texts``; (0, 0) for special tokens.
        texts: the raw sentences, where given.
        labels: class index -> name, where the model's config names its classes.
        multi_label: True if the classes do not exclude one another (probability = sigmoid instead of softmax).
        image_size: (height, width) in pixels of the model's input, for pictures.
        pictures: ``[B, H, W, 3]`` uint8, the pictures as the model saw them.
        originals: the pictures as they were given (RGB, any size), where it is known what the model saw of them.
        geometry: for each of them, where the model's input lies on it.
        model: name of the model: as it was given, as its config has it, or its class.
        diagnostics: measured facts about the run, e.g. ``conservation`` for propagation methods.
    """

    scores: Tensor
    level: str
    method: str
    settings: dict[str, Any]
    target: Tensor
    logits: Tensor
    target_names: list[str] | None = None
    grid: tuple[int, int] | None = None
    tokens: list[list[str]] | None = None
    offsets: list[list[tuple[int, int]]] | None = None
    texts: list[str] | None = None
    labels: dict[int, str] | None = None
    multi_label: bool = False
    image_size: tuple[int, int] | None = None
    pictures: Tensor | None = None
    originals: list[Image.Image] | None = None
    geometry: list[Geometry] | None = None
    model: str | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InputError(f"level must be one of {LEVELS}, not {self.level!r}")
        if not torch.isfinite(self.scores).all():
            raise InputError(
                f"{self.method}: the scores hold NaN or infinity, so there is no explanation to show. "
                "Check the input and the weights for extreme values, or run in float32/float64."
            )

    # -- reading ---------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.scores.shape[0]

    def __getitem__(self, index: int) -> Explanation:
        """The explanation of one sample, again with a batch axis of 1."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of an explanation of {len(self)}")
        i = index % len(self)
        lists: dict[str, Any] = {n: [getattr(self, n)[i]] for n in _BATCHED_LISTS if getattr(self, n) is not None}
        tensors: dict[str, Any] = {n: getattr(self, n)[i : i + 1] for n in ("scores", "target", "logits")}
        pictures = None if self.pictures is None else self.pictures[i : i + 1]
        diagnostics = {k: _select(v, i, len(self)) for k, v in self.diagnostics.items()}
        return replace(self, **tensors, **lists, pictures=pictures, diagnostics=diagnostics)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    def probabilities(self) -> Tensor:
        """``[B, C]`` softmax of the logits, or sigmoid where the classes do not exclude one another."""
        logits = self.logits.double()
        return torch.sigmoid(logits) if self.multi_label or logits.shape[-1] == 1 else torch.softmax(logits, -1)

    def label(self, index: int) -> str:
        """Name of a class, or its number as text where the model names none."""
        return (self.labels or {}).get(int(index), str(int(index)))

    def top(self, sample: int = 0, k: int = 5) -> list[tuple[int, str, float, float]]:
        """The k classes with the highest logits of a sample: (index, name, logit, probability)."""
        probabilities, logits = self.probabilities()[sample], self.logits[sample]
        best = logits.argsort(descending=True, stable=True)[:k].tolist()
        return [(i, self.label(i), float(logits[i]), float(probabilities[i])) for i in best]

    def heatmap(self, size: tuple[int, int] | None = None) -> Tensor:
        """``[B, height, width]`` map, bilinear from the patch grid (Chefer et al. 2021, section 3.4).

        Args:
            size: (height, width) in pixels; the model's input size by default.
        """
        from whyformer.explanation import views

        return views.resize(self._maps(), size or self.image_size)

    def placed(self, sample: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """``[height, width]`` map of one sample on the original picture, NaN where the model did not see it.

        The inverse of the processor's resizing, cropping and padding, bilinear from the patch grid. Where the geometry
        is unknown, the picture is taken as the model saw it.

        Args:
            size: (height, width) to draw the whole picture at; the original's own by default.
        """
        from whyformer.explanation import views

        maps = self._maps()
        known = Geometry.whole(self.image_size or (int(maps.shape[1]), int(maps.shape[2])))
        known = known if self.geometry is None else self.geometry[sample]
        known = known if size is None else known.scaled(size)
        return views.place(maps[sample], known.box, known.size)

    def _maps(self) -> Tensor:
        """``[B, rows, columns]`` of patches or pixels."""
        if self.level == "token":
            raise InputError("a heatmap is for pictures; for text use .scores and .tokens")
        if self.level == "patch" and self.grid is None:
            raise InputError("these patch scores have no grid, so they cannot be laid out as a picture")
        return self.scores if self.level == "pixel" else self.scores.reshape(len(self), *(self.grid or ()))

    # -- keeping ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values (lists, numbers, strings), pictures left out: ready for JSON."""
        return {
            **self._facts(),
            "target": self.target.tolist(),
            "logits": self.logits.tolist(),
            "probabilities": self.probabilities().tolist(),
            "scores": self.scores.tolist(),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Explanation:
        """What :meth:`to_dict` gave, e.g. after a way through JSON; without the pictures, which are not in it.

        Raises:
            InputError: keys are missing or unknown, or their values are of another kind.
        """
        try:
            numbers: dict[str, Any] = {name: torch.tensor(facts[name]) for name in ("scores", "logits", "target")}
            plain = {k: v for k, v in facts.items() if k not in ("probabilities", *numbers)}
            made = cls(**numbers, **_typed(plain))
            logits, batch = made.logits, made.scores.shape[0]
            if made.scores.dim() < 2 or logits.dim() != 2 or not len(logits) == batch == len(made.target) > 0:
                raise ValueError("scores, logits and target are for different numbers of samples")
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise InputError(f"this is not an explanation as to_dict gives it: {error!r}") from error
        return made

    def _facts(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in _PLAIN}
        facts["geometry"] = None if self.geometry is None else [g.to_dict() for g in self.geometry]
        facts["settings"] = _plain(self.settings)
        facts["diagnostics"] = _plain(self.diagnostics)
        facts["labels"] = None if self.labels is None else {str(k): v for k, v in self.labels.items()}
        return facts

    def save(self, path: str | Path) -> Path:
        """Write one ``.safetensors`` file (tensors, and the rest as JSON in its header); no pickle.

        The file appears whole or not at all.
        """
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {"scores": self.scores, "target": self.target, "logits": self.logits}
        if self.pictures is not None:
            tensors["pictures"] = self.pictures
        for i, picture in enumerate(self.originals or ()):
            tensors[f"{_ORIGINAL}{i}"] = torch.from_numpy(np.array(picture))
        header = {"whyformer": json.dumps({"format": _FORMAT, "versions": versions(), **self._facts()})}
        partial = path.with_name(path.name + ".partial")
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata=header)
            partial.replace(path)
        except OSError as error:
            raise LoadError(f"cannot write {path}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read what :meth:`save` wrote."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise LoadError(f"no such file: {path}")
        try:
            with safe_open(str(path), "pt") as file:
                facts = json.loads((file.metadata() or {})["whyformer"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError) as error:
            raise LoadError(f"{path} is not a saved explanation: {error}") from error
        if facts.pop("format") != _FORMAT:
            raise LoadError(f"{path} was saved by another version of whyformer")
        facts.pop("versions", None)
        count = sum(name.startswith(_ORIGINAL) for name in tensors)
        originals = [Image.fromarray(tensors.pop(f"{_ORIGINAL}{i}").numpy()) for i in range(count)]
        return cls(**tensors, **_typed(facts), originals=originals or None)

    # -- showing ---------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        from whyformer.show import terminal

        return terminal.plain(self)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.scores.shape))
        return f"Explanation({self.method}, {self.level} scores {shape}, target {self.target.tolist()})"

    def _repr_html_(self) -> str:
        from whyformer.show import html

        return html.fragment(self)


def _typed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples, numbers and geometries again, where JSON has lists, text and objects."""
    made = dict(facts)
    made["labels"] = None if made["labels"] is None else {int(k): v for k, v in made["labels"].items()}
    for name in ("grid", "image_size"):
        made[name] = None if made[name] is None else tuple(made[name])
    if made.get("geometry") is not None:
        made["geometry"] = [Geometry.from_dict(g) for g in made["geometry"]]
    if made["offsets"] is not None:
        made["offsets"] = [[tuple(span) for span in sample] for sample in made["offsets"]]
    return made


def _plain(value: Any) -> Any:
    """Tensors, tuples and callables as JSON values."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _select(value: Any, index: int, count: int) -> Any:
    """One sample's part of a diagnostic: per-sample lists have the length of the batch, also inside dicts."""
    if isinstance(value, Mapping):
        return {k: _select(v, index, count) for k, v in value.items()}
    if isinstance(value, list) and len(value) == count:
        return [value[index]]
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == count:
        return value[index : index + 1]
    return value
