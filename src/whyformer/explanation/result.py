"""The result of an explanation: scores, the features they belong to, and the settings that produced them."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation import storage, views
from whyformer.explanation.counts import amount
from whyformer.explanation.display import Displayable
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Box, Geometry
from whyformer.explanation.per_sample import of_sample

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from rich.console import RenderableType

LEVELS = ("patch", "token", "pixel")
ACTIVATIONS = ("softmax", "sigmoid", "identity")

T = TypeVar("T")
_DOCS = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", inspect.cleandoc(Features.__doc__ or ""), re.MULTILINE))


class _Feature(property):
    """A property of an explanation that is a field of its features, with the field's documentation."""

    def __set_name__(self, owner: type, name: str) -> None:
        doc = _DOCS.get(name, "")
        self.__doc__ = doc[:1].upper() + doc[1:]


def _feature(read: Callable[[Features], T]) -> T:
    return _Feature(lambda e: read(e.features))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Explanation(Displayable):
    """Attribution scores of one method for a batch of samples, with the data needed to draw and repeat them.

    Attributes:
        scores: attribution scores, on the CPU: ``[B, P]``, one for each patch in row-major order, without prefix tokens
            (``level="patch"``); ``[B, N]``, one for each token, 0 for padding (``level="token"``); or ``[B, H, W]``,
            one for each pixel of the model's input (``level="pixel"``). For a video, P counts the patches of all time
            steps in order, and pixel scores are ``[B, T, H, W]``: see :meth:`frame`.
        level: ``"patch"``, ``"token"`` or ``"pixel"``.
        method: registry name of the method.
        settings: all settings of the method, defaults included.
        target: ``[B]`` index of the explained class (the first class of a contrast).
        target_names: readable name of each sample's target.
        logits: ``[B, C]`` the model's output for the batch. With more than 1,000 classes, such as a vocabulary,
            ``[B, K]``: the 20 highest logits and those of the explained classes, in descending order.
        classes: ``[B, K]`` class indices of ``logits``; None if ``logits`` holds all classes.
        normalizer: ``[B]`` log Σ exp over the logits of all classes, so that logits − normalizer are log-probabilities;
            None if ``logits`` holds all classes.
        features: the features that the scores belong to. Its fields are also properties of the explanation
            (``e.tokens``, ``e.grid`` ...).
        labels: class index -> name, if the model's config names its classes.
        activation: function that turns logits into probabilities: ``"softmax"``; ``"sigmoid"`` for multi-label models;
            ``"identity"`` for regression, which has no probabilities.
        model: name of the model: the name passed by the caller, the name in the model's config, or its class.
        input: name of the model input that the scores belong to.
        parts: explanations of the model's other inputs, by name (see :attr:`inputs` and :meth:`part`).
        diagnostics: measurements of the run, e.g. ``conservation`` for propagation methods; ``input``, notes on how
            each picture was preprocessed; ``warnings``, a list of sentences for each sample (see :attr:`warnings`).
            :mod:`whyformer.explanation.per_sample` lists the diagnostics that have an entry for each sample.
    """

    scores: Tensor
    level: str
    method: str
    settings: dict[str, Any]
    target: Tensor
    logits: Tensor
    target_names: list[str] | None = None
    features: Features = field(default_factory=Features)
    labels: dict[int, str] | None = None
    activation: str = "softmax"
    model: str | None = None
    input: str | None = None
    parts: Mapping[str, Explanation] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    classes: Tensor | None = None
    normalizer: Tensor | None = None

    def __post_init__(self) -> None:
        for name, valid in (("level", LEVELS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in valid:
                raise InputError(f"{name} must be one of {valid}, not {getattr(self, name)!r}")
        if any(isinstance(sentences, str) for sentences in self.diagnostics.get("warnings") or ()):
            raise InputError("diagnostics['warnings'] must hold a list of sentences for each sample")
        # aminmax propagates NaN; isfinite over all scores would allocate a second tensor of their size
        if self.scores.numel() and not torch.isfinite(torch.stack(torch.aminmax(self.scores))).all():
            raise InputError(
                f"{self.method}: the scores hold NaN or infinity, so there is no explanation to show. "
                "Check the input and the weights for extreme values, or run in float32/float64."
            )

    # -- reading ---------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.scores.shape[0]

    def __getitem__(self, index: int) -> Explanation:
        """Return the explanation of one sample, with a batch axis of 1."""
        i = self._sample(index)
        tensors: dict[str, Any] = {n: tensor[i : i + 1] for n, tensor in storage.result_tensors(self).items()}
        names = None if self.target_names is None else [self.target_names[i]]
        diagnostics = of_sample(self.diagnostics, i)
        parts = {name: part[i] for name, part in self.parts.items()}
        features = self.features.sample(i)
        return replace(self, **tensors, target_names=names, features=features, diagnostics=diagnostics, parts=parts)

    def _sample(self, index: int, more: str = "") -> int:
        """Return the index of a sample counted from the first; ``more`` ends the message of the error."""
        if not -len(self) <= operator.index(index) < len(self):
            count = amount(len(self), "sample")
            raise IndexError(f"sample {index} is out of range for an explanation of {count}{more}")
        return index % len(self)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model inputs that have scores; the input of :attr:`scores` comes first."""
        return (self.input or "", *self.parts)

    def part(self, name: str) -> Explanation:
        """Return the explanation of one of :attr:`inputs`, with its own level, features and scores.

        Raises:
            InputError: the input of that name has no scores.
        """
        if name != self.inputs[0] and name not in self.parts:
            raise InputError(f"the input '{name}' has no scores; inputs with scores: {', '.join(self.inputs)}")
        return replace(self, parts={}) if name == self.inputs[0] else self.parts[name]

    tokens = _feature(lambda f: f.tokens)
    offsets = _feature(lambda f: f.offsets)
    texts = _feature(lambda f: f.texts)
    extent = _feature(lambda f: f.extent)
    skipped = _feature(lambda f: f.skipped)
    unknown = _feature(lambda f: f.unknown)
    special = _feature(lambda f: f.special)
    image_size = _feature(lambda f: f.image_size)
    grid = _feature(lambda f: f.grid)
    cells = _feature(lambda f: f.cells)
    read = _feature(lambda f: f.read)
    frames = _feature(lambda f: f.frames)
    pictures = _feature(lambda f: f.pictures)
    sounds = _feature(lambda f: f.sounds)
    sampling_rate = _feature(lambda f: f.sampling_rate)
    durations = _feature(lambda f: f.durations)
    rate = _feature(lambda f: f.rate)
    originals = _feature(lambda f: f.originals)
    geometry = _feature(lambda f: f.geometry)

    def with_features(self, **changes: Any) -> Explanation:
        """Return a copy with some fields of :attr:`features` replaced."""
        return replace(self, features=replace(self.features, **changes))

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt this result; a sentence that does not hold for all samples names its samples."""
        samples, lines = self.diagnostics.get("warnings") or [], []
        for line in dict.fromkeys(line for sentences in samples for line in sentences):
            where = [str(i) for i, sentences in enumerate(samples) if line in sentences]
            lines.append(line if len(where) == len(samples) else f"sample {', '.join(where)}: {line}")
        return lines

    @property
    def multi_label(self) -> bool:
        """True for a multi-label model, whose class probabilities are independent (sigmoid)."""
        return self.activation == "sigmoid"

    @property
    def numeric(self) -> bool:
        """True for a regression model, whose output is a number rather than class logits."""
        return self.activation == "identity"

    def probabilities(self) -> Tensor:
        """Return the softmax of the logits, or their sigmoid for a multi-label model: ``[B, C]``, or ``[B, K]`` if only
        the highest logits are stored (the softmax is still over all classes).

        Raises:
            InputError: the model is a regression model.
        """
        if self.numeric:
            raise InputError("the output of a regression model has no probability: its value is in .logits")
        logits = self.logits.double()
        if self.multi_label:
            return torch.sigmoid(logits)
        return torch.softmax(logits, -1) if self.normalizer is None else (logits - self.normalizer[:, None]).exp()

    def column(self, index: int, sample: int = 0) -> int | None:
        """Return the column of a class in a sample's row of :attr:`logits`; None if its logit is not stored."""
        sample = self._sample(sample)
        if self.classes is None:
            return index if 0 <= index < self.logits.shape[-1] else None
        return next(iter((self.classes[sample] == index).nonzero()[:, 0].tolist()), None)

    def logit(self, index: int, sample: int = 0) -> float | None:
        """Return the logit of a class; None if there is no such class or its logit is not stored."""
        column = self.column(index, sample)
        return None if column is None else float(self.logits[sample, column])

    def probability(self, index: int, sample: int = 0) -> float | None:
        """Return the probability of a class; None for regression and where :meth:`logit` returns None."""
        column = None if self.numeric else self.column(index, sample)
        return None if column is None else float(self.probabilities()[sample, column])

    def label(self, index: int) -> str:
        """Return the name of a class, or its index as a string if the model does not name it."""
        return (self.labels or {}).get(int(index), str(int(index)))

    def top(self, sample: int = 0, k: int = 5) -> list[tuple[int, str, float, float | None]]:
        """Return (index, name, logit, probability) of a sample's k highest logits; regression has no probability."""
        sample = self._sample(sample, "; the number of classes is k=")
        shares = None if self.numeric else self.probabilities()[sample].tolist()
        logits = self.logits[sample]
        best = logits.argsort(descending=True, stable=True)[:k].tolist()
        ids = range(len(logits)) if self.classes is None else self.classes[sample].tolist()
        return [(ids[i], self.label(ids[i]), float(logits[i]), None if shares is None else shares[i]) for i in best]

    def words(self, sample: int = 0) -> list[tuple[str, float]]:
        """Return (word, score) for each word of a text in order.

        The score of a word is the sum of its tokens' scores. Special tokens are left out. If the text is unknown, each
        token is a word.

        Raises:
            InputError: the scores do not belong to tokens.
        """
        from whyformer.show.words import words

        if self.level != "token":
            raise InputError("words() is for texts; for pictures use .heatmap() or .placed()")
        return [(word.text, word.score) for word in words(self[sample])[0]]

    def heatmap(self, size: tuple[int, int] | None = None, *, nearest: bool = False) -> Tensor:
        """Return a map over the model's input, bilinear from the patch grid (Chefer et al. 2021, section 3.4).

        Args:
            size: (height, width) of the map in pixels; the size of the model's input by default.
            nearest: give each pixel the score of the patch that it lies in instead of interpolating.

        Returns:
            ``[B, height, width]``, or ``[B, T, height, width]`` for a video; 0 where the model does not read its input.
        """
        maps, input_size = self._maps(), self.image_size
        size = size or input_size
        if input_size is not None and size is not None and (self.features.cells or self.features.read):
            geometry = Geometry.whole(input_size).scaled(size)
            cells, read = (geometry.part(box, input_size) for box in (self.features.cells, self.features.read))
            return views.place(maps, cells, size, read, nearest=nearest).nan_to_num(0).to(maps)
        return views.resize(maps.flatten(0, -3), size, nearest=nearest).unflatten(0, maps.shape[:-2])

    def frame(self, index: int) -> Explanation:
        """Return the explanation of one time step of a video as that of a picture: its frame, or the middle one of
        several frames that share tokens (a tubelet).

        Raises:
            InputError: the input is not a video, or has no such time step.
        """
        if self.frames is None:
            raise InputError("frame() is for videos: these scores have no time steps")
        if not -self.frames <= index < self.frames:
            raise InputError(f"step {index} is out of range for a video of {self.frames} time steps")
        step, pictures = index % self.frames, self.pictures
        if pictures is not None and pictures.dim() == 5:
            pictures = pictures[:, min(int((step + 0.5) * pictures.shape[1] / self.frames), pictures.shape[1] - 1)]
        scores = self._maps()[:, step]
        scores = scores if self.level == "pixel" else scores.flatten(1)
        return replace(self, scores=scores, parts={}).with_features(frames=None, pictures=pictures)

    def over_time(self, step: float | None = None) -> Explanation:
        """Sum a sound's scores ``[B, N]`` over time intervals, ``[B, S]``; the tokens name the start of each interval.

        Args:
            step: length of an interval in seconds; by default the shortest of 0.01, 0.02, 0.05, 0.1 ... that gives at
                most 50 intervals.

        Raises:
            InputError: the input is not a sound of known rate, or the step is shorter than the time between two scores.
        """
        return views.over_time(self, step)

    def unrolled(self, columns: int | None = None) -> Explanation:
        """Return a video as one picture: its time steps from left to right and top to bottom, on one color scale.

        Patch scores become pixel scores, bilinear within each time step (see :meth:`heatmap`).

        Args:
            columns: time steps in a row; by default about twice the number of rows.
        """
        return views.unrolled(self, columns)

    def placed(self, sample: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """Return the map of one sample on its original picture.

        Resizing, cropping and padding, by the processor or in the model, are inverted; the map is bilinear from the
        patch grid. If the geometry is unknown, the model's input takes the place of the original.

        Args:
            sample: index of the sample.
            size: (height, width) of the map in pixels; the size of the original by default.

        Returns:
            ``[height, width]``, NaN where the model did not see the picture.
        """
        maps = self._maps()
        if maps.dim() == 4:
            raise InputError("a video has a map for each time step: choose one with .frame(i)")
        cells, read = self.boxes(sample, size)
        return views.place(maps[self._sample(sample)], cells, self._geometry(sample, size).size, read)

    def boxes(self, sample: int = 0, size: tuple[int, int] | None = None) -> tuple[Box, Box]:
        """Return two boxes on the original picture of a sample: that of its map and that of the part the model read.

        Args:
            sample: index of the sample.
            size: as for :meth:`placed`.

        Returns:
            (left, top, right, bottom) of each box in pixels; a box may extend beyond the picture.
        """
        geometry, features = self._geometry(sample, size), self.features
        input_size = self.image_size or (1, 1)
        return geometry.part(features.cells, input_size), geometry.seen or geometry.part(features.read, input_size)

    def _geometry(self, sample: int, size: tuple[int, int] | None) -> Geometry:
        """Return the position of the model's input on the original picture, scaled to a drawing size."""
        sample = self._sample(sample)
        geometry = self.geometry[sample] if self.geometry is not None else None
        if geometry is None:
            maps = self._maps()
            geometry = Geometry.whole(self.image_size or (int(maps.shape[-2]), int(maps.shape[-1])))
        return geometry if size is None else geometry.scaled(size)

    def _maps(self) -> Tensor:
        """Return the scores as maps ``[B, rows, columns]``, or ``[B, T, rows, columns]`` for a video."""
        if self.level == "token":
            raise InputError("token scores have no heatmap: use .scores and .tokens")
        if self.level == "patch" and self.grid is None:
            raise InputError("these patch scores have no grid, so they cannot be laid out as a picture")
        if self.level == "pixel":
            return self.scores
        steps = () if self.frames is None else (self.frames,)
        return self.scores.reshape(len(self), *steps, *(self.grid or ()))

    # -- storage ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return all values except pictures as JSON-compatible lists, numbers and strings."""
        return storage.to_dict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Explanation:
        """Restore an explanation, without its pictures, from the values of :meth:`to_dict`.

        Raises:
            InputError: a key is missing or unknown, or a value has the wrong type.
        """
        return storage.from_dict(cls, facts)

    def save(self, path: str | Path) -> Path:
        """Write a ``.safetensors`` file: the tensors, and all other values as JSON in its header. No pickle is used.
        The file appears complete or not at all."""
        return storage.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read a file that :meth:`save` wrote; a damaged file or one of another kind raises LoadError."""
        return storage.load(cls, path)

    # -- showing ---------------------------------------------------------------------------------------------
    def plot(self, ax: Axes | None = None, sample: int = 0, k: int = 10, **look: Any) -> Axes:
        """Draw one sample on matplotlib axes: a map over its picture, or bars for the top words of a text or sound.

        Of several inputs the first is drawn, and the title names the others: ``e.part(name).plot()`` draws one of them,
        and :func:`whyformer.show.figure` all.

        Args:
            ax: axes to draw on; pyplot's current axes by default.
            sample: index of the sample.
            k: number of words.
            **look: options of :class:`whyformer.show.Look`, for pictures.

        Returns:
            The axes.
        """
        from whyformer.show import figures

        return figures.plot(self, ax, sample, k, **look)

    def to_html(self, title: str = "whyformer", **look: Any) -> str:
        """Return an HTML document; see :func:`whyformer.show.page`."""
        from whyformer.show import html

        return html.page(self, title, **look)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row for each score.

        The columns are ``sample``, ``method``, ``target`` and ``score``; for tokens also ``position``, ``token`` and
        ``special``; for patches and pixels ``row`` and ``column``, and ``frame`` for a video; ``input`` if the model
        has several inputs.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return storage.to_pandas(self)

    def __rich__(self) -> RenderableType:
        from whyformer.show import terminal

        return terminal.render(self)

    def __str__(self) -> str:
        from whyformer.show import terminal

        return terminal.plain(self)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.scores.shape))
        return f"Explanation({self.method}, {self.level} scores {shape}, target {self.target.tolist()})"

    def _repr_html_(self) -> str:
        from whyformer.show import html

        return html.fragment(self)
