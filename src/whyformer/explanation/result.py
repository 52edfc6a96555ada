"""The result of an explanation: scores, what they belong to, and how they were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation import storage, views
from whyformer.explanation.displayed import Displayed
from whyformer.explanation.features import Features
from whyformer.explanation.geometry import Box, Geometry
from whyformer.explanation.per_sample import of_sample
from whyformer.explanation.seconds import over_time, unrolled

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from rich.console import RenderableType

LEVELS = ("patch", "token", "pixel")
ACTIVATIONS = ("softmax", "sigmoid", "identity")


@dataclass(frozen=True, eq=False)
class Explanation(Displayed):
    """Scores of one method for a batch of samples, with everything needed to read, draw and repeat them.

    Attributes:
        scores: attribution, on the CPU. ``[B, P]`` patches row by row (``level="patch"``; prefix tokens left out),
            ``[B, N]`` tokens in order (``level="token"``; padding is 0) or ``[B, H, W]``
            pixels of the model's input (``level="pixel"``). Of a video, patches step by step of time, and pixels
            ``[B, T, H, W]``: see :meth:`frame`.
        level: ``"patch"``, ``"token"`` or ``"pixel"``.
        method, settings: registry name and the full settings (defaults filled in).
        target: ``[B]`` class index explained (the first one of a contrast).
        target_names: a readable name of the target of each sample.
        logits: ``[B, C]`` the model's output for the batch. Of more than 1,000 classes, such as a vocabulary,
            ``[B, K]``: the 20 highest and those of the classes that are explained, the highest first.
        classes: ``[B, K]`` which classes these are; None where ``logits`` has all.
        normalizer: ``[B]`` log Σ exp over the logits of all classes: logits − normalizer are log-probabilities; None
            where ``logits`` has all.
        features: what the scores belong to; all of it can be read here too (``e.tokens``, ``e.grid`` ...).
        labels: class index -> name, where the model's config names its classes.
        activation: what makes probabilities of the logits: ``"softmax"``; ``"sigmoid"``, where the classes do not
            exclude one another; ``"identity"``, where the output is a number (a regression) and has none.
        model: name of the model: as it was given, as its config has it, or its class.
        input: name of the model's input that these scores are of; parts: explanations of its other inputs, by name
            (see :attr:`inputs` and :meth:`part`).
        diagnostics: measured facts about the run, e.g. ``conservation`` for propagation methods; ``input``, what
            reading did to each picture; ``warnings``, sentences for each sample (see :attr:`warnings`). Which ones
            have an entry for each sample: :mod:`whyformer.explanation.per_sample`.
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
        for name, known in (("level", LEVELS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        if any(isinstance(own, str) for own in self.diagnostics.get("warnings") or ()):
            raise InputError("diagnostics['warnings'] holds a list of sentences for each sample")
        # of the extremes: a NaN is one too, and testing each score would take the memory of all once more
        if self.scores.numel() and not torch.isfinite(torch.stack(torch.aminmax(self.scores))).all():
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
        tensors: dict[str, Any] = {n: own[i : i + 1] for n, own in storage.result_tensors(self).items()}
        names = None if self.target_names is None else [self.target_names[i]]
        diagnostics = of_sample(self.diagnostics, i)
        parts = {name: part[i] for name, part in self.parts.items()}
        features = self.features.sample(i)
        return replace(self, **tensors, target_names=names, features=features, diagnostics=diagnostics, parts=parts)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs of the model that were scored, the one of :attr:`scores` first."""
        return (self.input or "", *self.parts)

    def part(self, name: str) -> Explanation:
        """The explanation of one of :attr:`inputs` alone: its own level, grid or tokens, and scores.

        Raises:
            InputError: no input of that name was scored.
        """
        if name != self.inputs[0] and name not in self.parts:
            raise InputError(f"no input '{name}' was scored; these were: {', '.join(self.inputs)}")
        return replace(self, parts={}) if name == self.inputs[0] else self.parts[name]

    @property
    def tokens(self) -> list[list[str]] | None:
        """Token strings of each sample (padding included), for text."""
        return self.features.tokens

    @property
    def offsets(self) -> list[list[tuple[int, int]]] | None:
        """(start, end) characters of each token in ``texts``; (0, 0) for special tokens."""
        return self.features.offsets

    @property
    def texts(self) -> list[str] | None:
        """The raw sentences, where given."""
        return self.features.texts

    @property
    def extent(self) -> list[tuple[int, int]] | None:
        """(begin, end) characters of each text that the model read, where a part was cut off."""
        return self.features.extent

    @property
    def unknown(self) -> list[list[int]] | None:
        """Places of the tokens of each sample that are unknown to the model ([UNK]), if there are any."""
        return self.features.unknown

    @property
    def special(self) -> list[list[int]] | None:
        """Places of the special tokens of each sample ([CLS], [SEP], <s> ...), where the tokenizer is known.

        They have scores as all tokens do. Pictures, pages and :func:`print` show what they hold together.
        """
        return self.features.special

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) in pixels of the model's input, for pictures."""
        return self.features.image_size

    @property
    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of patches, for ``level="patch"``."""
        return self.features.grid

    @property
    def cells(self) -> Box | None:
        """(left, top, right, bottom) of that grid in pixels of the model's input; None for all of it."""
        return self.features.cells

    @property
    def read(self) -> Box | None:
        """(left, top, right, bottom) of the pixels of its input that the model reads; None for all of it."""
        return self.features.read

    @property
    def frames(self) -> int | None:
        """How many steps of time have a map of their own, for a video; None for a picture."""
        return self.features.frames

    @property
    def pictures(self) -> Tensor | None:
        """``[B, H, W, 3]`` uint8, the pictures as the model saw them."""
        return self.features.pictures

    @property
    def sounds(self) -> Tensor | None:
        """``[B, T]`` the waves of sounds, 0 behind the end."""
        return self.features.sounds

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second of the waves, for sounds."""
        return self.features.sampling_rate

    @property
    def durations(self) -> list[float] | None:
        """How many seconds each sound lasts."""
        return self.features.durations

    @property
    def rate(self) -> float | None:
        """Of a sound, how many scores a second has; None for anything else."""
        return self.features.rate

    @property
    def originals(self) -> list[Image.Image] | None:
        """The pictures as they were given (RGB, any size), where it is known what the model saw of them."""
        return self.features.originals

    @property
    def geometry(self) -> list[Geometry] | None:
        """For each original, where the model's input lies on it."""
        return self.features.geometry

    def with_features(self, **changes: Any) -> Explanation:
        """The same with some of the features' facts changed."""
        return replace(self, features=replace(self.features, **changes))

    @property
    def warnings(self) -> list[str]:
        """What speaks against this result, in sentences that every view shows; with the sample where they differ."""
        found, said = self.diagnostics.get("warnings") or [], []
        for line in dict.fromkeys(line for own in found for line in own):
            where = [str(i) for i, own in enumerate(found) if line in own]
            said.append(line if len(where) == len(found) else f"sample {', '.join(where)}: {line}")
        return said

    @property
    def multi_label(self) -> bool:
        """Whether the classes do not exclude one another, so that each has a probability of its own."""
        return self.activation == "sigmoid"

    @property
    def numeric(self) -> bool:
        """Whether the output is a number, as of a regression, and no row of classes."""
        return self.activation == "identity"

    def probabilities(self) -> Tensor:
        """``[B, C]`` softmax of the logits, or sigmoid where the classes do not exclude one another; where only some
        logits are kept, ``[B, K]`` of these, their softmax over all classes.

        Raises:
            InputError: the output is a number.
        """
        if self.numeric:
            raise InputError("the output is a number and has no probability: its value is in .logits")
        logits = self.logits.double()
        if self.multi_label:
            return torch.sigmoid(logits)
        return torch.softmax(logits, -1) if self.normalizer is None else (logits - self.normalizer[:, None]).exp()

    def column(self, index: int, sample: int = 0) -> int | None:
        """Where the logit of a class stands in the row of a sample; None if there is none."""
        if self.classes is None:
            return index if 0 <= index < self.logits.shape[-1] else None
        return next(iter((self.classes[sample] == index).nonzero()[:, 0].tolist()), None)

    def logit(self, index: int, sample: int = 0) -> float | None:
        """The logit of a class; None if it is none of the model's, or was not kept."""
        column = self.column(index, sample)
        return None if column is None else float(self.logits[sample, column])

    def probability(self, index: int, sample: int = 0) -> float | None:
        """The probability of a class; None of a number, and where :meth:`logit` is."""
        column = None if self.numeric else self.column(index, sample)
        return None if column is None else float(self.probabilities()[sample, column])

    def label(self, index: int) -> str:
        """Name of a class, or its number as text where the model names none."""
        return (self.labels or {}).get(int(index), str(int(index)))

    def top(self, sample: int = 0, k: int = 5) -> list[tuple[int, str, float, float | None]]:
        """The k classes with the highest logits of a sample: (index, name, logit, probability; None of a number)."""
        shares = None if self.numeric else self.probabilities()[sample].tolist()
        logits = self.logits[sample]
        best = logits.argsort(descending=True, stable=True)[:k].tolist()
        numbers = range(len(logits)) if self.classes is None else self.classes[sample].tolist()
        return [
            (numbers[i], self.label(numbers[i]), float(logits[i]), None if shares is None else shares[i]) for i in best
        ]

    def words(self, sample: int = 0) -> list[tuple[str, float]]:
        """(word, score) of a text in order: the score is the sum of those of its tokens. Special tokens are left out;
        where the sentence is not known each token is a word.

        Raises:
            InputError: these are no scores of tokens.
        """
        from whyformer.show.words import words

        if self.level != "token":
            raise InputError("words() is for texts; for pictures use .heatmap() or .placed()")
        return [(word.text, word.score) for word in words(self, sample)[0]]

    def heatmap(self, size: tuple[int, int] | None = None, *, nearest: bool = False) -> Tensor:
        """``[B, height, width]`` map of the model's input, bilinear from the patch grid (Chefer et al. 2021, section
        3.4), 0 where the model does not read it.

        Of a video ``[B, T, height, width]``, a map for each step of time.

        Args:
            size: (height, width) to draw the whole input at; the model's input size by default.
            nearest: each pixel takes the score of the patch that it lies in, and nothing is mixed.
        """
        maps, seen = self._maps(), self.image_size
        size = size or seen
        if seen is not None and size is not None and (self.features.cells or self.features.read):
            whole = Geometry.whole(seen).scaled(size)
            cells, read = (whole.part(box, seen) for box in (self.features.cells, self.features.read))
            return views.place(maps, cells, size, read, nearest=nearest).nan_to_num(0).to(maps)
        made = views.resize(maps.flatten(0, -3), size, nearest=nearest)
        return made.unflatten(0, maps.shape[:-2])

    def frame(self, index: int) -> Explanation:
        """The explanation of one step of time of a video, a picture: one frame, or those that share a row of tokens
        (a tube), of which the middle one is shown.

        Raises:
            InputError: it is no video, or has no such step.
        """
        if self.frames is None:
            raise InputError("frame() is for videos, whose scores have steps of time")
        if not -self.frames <= index < self.frames:
            raise InputError(f"step {index} is outside the video, which has {self.frames} steps of time")
        at, seen = index % self.frames, self.pictures
        if seen is not None and seen.dim() == 5:
            seen = seen[:, min(int((at + 0.5) * seen.shape[1] / self.frames), seen.shape[1] - 1)]
        scores = self._maps()[:, at]
        scores = scores if self.level == "pixel" else scores.flatten(1)
        return replace(self, scores=scores, parts={}).with_features(frames=None, pictures=seen)

    def over_time(self, step: float | None = None) -> Explanation:
        """A sound's scores added up over stretches of time, ``[B, S]``, with tokens that name each stretch's seconds.

        Args:
            step: seconds of a stretch; by default the shortest of 0.01, 0.02, 0.05, 0.1 ... that makes at most 50.

        Raises:
            InputError: it is no sound of known rate, or the step is shorter than the time between two scores.
        """
        return over_time(self, step)

    def unrolled(self, columns: int | None = None) -> Explanation:
        """A video as one picture: its steps of time from left to right, in lines of ``columns`` (by default about
        twice as many as lines), on one scale.

        Patches become pixels, bilinear within each step (as :meth:`heatmap`). Anything but a video is an InputError.
        """
        return unrolled(self, columns)

    def placed(self, sample: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """``[height, width]`` map of one sample on the original picture, NaN where the model did not see it.

        The inverse of the processor's resizing, cropping and padding, and of what the model leaves out or pads itself;
        bilinear from the patch grid. Where the geometry is unknown, the picture is taken as it was fed to the model.

        Args:
            size: (height, width) to draw the whole picture at; the original's own by default.
        """
        maps = self._maps()
        if maps.dim() == 4:
            raise InputError("a video has a map for each step of time: take one with .frame(i)")
        cells, read = self.boxes(sample, size)
        known = self._geometry(sample, size)
        return views.place(maps[sample], cells, known.size, read)

    def boxes(self, sample: int = 0, size: tuple[int, int] | None = None) -> tuple[Box, Box]:
        """(left, top, right, bottom) of one sample's map on the original picture, and of what the model read of it.
        Both may reach beyond the picture.

        Args:
            size: as for :meth:`placed`.
        """
        known, features = self._geometry(sample, size), self.features
        seen = self.image_size or (1, 1)
        return known.part(features.cells, seen), known.part(features.read, seen)

    def _geometry(self, sample: int, size: tuple[int, int] | None) -> Geometry:
        """Where the model's input lies on a picture drawn at a size."""
        maps = self._maps()
        known = Geometry.whole(self.image_size or (int(maps.shape[-2]), int(maps.shape[-1])))
        known = known if self.geometry is None else self.geometry[sample]
        return known if size is None else known.scaled(size)

    def _maps(self) -> Tensor:
        """``[B, rows, columns]`` of patches or pixels; of a video ``[B, T, rows, columns]``."""
        if self.level == "token":
            raise InputError("a heatmap is for pictures; for text use .scores and .tokens")
        if self.level == "patch" and self.grid is None:
            raise InputError("these patch scores have no grid, so they cannot be laid out as a picture")
        if self.level == "pixel":
            return self.scores
        steps = () if self.frames is None else (self.frames,)
        return self.scores.reshape(len(self), *steps, *(self.grid or ()))

    # -- keeping ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values (lists, numbers, strings), pictures left out: ready for JSON."""
        return {
            **storage.to_plain(self),
            **{name: tensor.tolist() for name, tensor in storage.result_tensors(self).items()},
            "probabilities": None if self.numeric else self.probabilities().tolist(),
            "multi_label": self.multi_label,
            **({"parts": {name: part.to_dict() for name, part in self.parts.items()}} if self.parts else {}),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Explanation:
        """What :meth:`to_dict` gave, e.g. after a way through JSON; without the pictures, which are not in it.

        Raises:
            InputError: keys are missing or unknown, or their values are of another kind.
        """
        whole, parts = storage.from_dict(facts)
        return cls(**whole, parts={name: cls(**part) for name, part in parts.items()})

    def save(self, path: str | Path) -> Path:
        """Write one ``.safetensors`` file (tensors, and the rest as JSON in its header); no pickle.

        The file appears whole or not at all.
        """
        return storage.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read what :meth:`save` wrote; a file that is damaged, or of another kind, is a LoadError."""
        whole, parts = storage.load(path)
        with storage.told(path, "a saved explanation"):
            return cls(**whole, parts={name: cls(**facts) for name, facts in parts.items()})

    # -- showing ---------------------------------------------------------------------------------------------
    def plot(self, ax: Axes | None = None, sample: int = 0, k: int = 10, **look: Any) -> Axes:
        """Draw one sample on matplotlib axes: the map on its picture; of a text or sound the strongest words as bars.

        Args:
            ax: the axes to draw on; those of pyplot by default.
            k: how many words.
            **look: options of :class:`whyformer.show.Look`, for pictures.

        Returns:
            The axes.
        """
        from whyformer.show import axes

        return axes.plot(self, ax, sample, k, **look)

    def to_html(self, title: str = "whyformer", **look: Any) -> str:
        """A whole HTML document: :func:`whyformer.show.page`."""
        from whyformer.show import html

        return html.page(self, title, **look)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each score, with ``sample``, ``method``, ``target``, what it belongs to and ``score``.

        Of tokens ``position``, ``token`` and ``special``; of patches and pixels ``row`` and ``column``, of a video
        ``frame`` too. Where the model has several inputs, ``input`` says which one.

        Raises:
            MissingExtra: pandas is not installed.
        """
        from whyformer.explanation import tables

        return tables.to_pandas(self)

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
