"""Rows explained in batches: a model loaded once, batches of like length, and what failed told from what did not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Unpack

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.comparing import Refusal, each, read_method
from whyformer.errors import FOREIGN_ERRORS, InputError, LoadError, TooLarge
from whyformer.explaining import OpenedModel, open_model
from whyformer.explanation.result import Explanation
from whyformer.inputs.sounds import Sound
from whyformer.jobs.description import check_targets, numbered
from whyformer.jobs.rows import PAIR, Row, digest_of
from whyformer.methods import Method
from whyformer.models.loading import load
from whyformer.models.memory import is_out_of_memory
from whyformer.models.structure import class_count, class_names
from whyformer.options import Keywords
from whyformer.prepared import Prepared
from whyformer.targets import class_index

WINDOW = 8
"""So many batches are read ahead and sorted by length."""


class OutOfMemory(Exception):  # noqa: N818 - the caller makes the batches smaller
    """A batch did not fit."""


@dataclass(frozen=True)
class Failure:
    """Why there is no explanation of a row, or of a row by one method: ``kind`` is the error's class."""

    row: int
    id: str
    method: str | None
    kind: str
    reason: str


@dataclass(frozen=True)
class Read:
    """A row that was read, or why it could not be."""

    row: Row
    content: Any = None
    digest: str = ""
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Explained:
    """What came of one row: explanations method by method and target by target, and failures."""

    row: Row
    digest: str
    explanations: list[Explanation]
    failures: list[Failure]


@dataclass(frozen=True, eq=False)
class Session:
    """A model, opened once, and what is asked of every row.

    Attributes:
        targets: as :class:`whyformer.jobs.description.Job` has them.
        progress: as for :func:`whyformer.explain`; it may raise, to stop the work on a batch.
    """

    opened: OpenedModel
    methods: tuple[tuple[Method, dict[str, Any]], ...]
    targets: Any = "predicted"
    progress: Any = False

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.opened.model

    @property
    def processor(self) -> Any:
        """Its processor."""
        return self.opened.processor

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name

    @property
    def reads_text(self) -> bool:
        """Whether the processor is a mere tokenizer."""
        return hasattr(self.processor, "convert_ids_to_tokens") and not hasattr(self.processor, "image_processor")

    def explain(
        self, reads: Sequence[Read], size: int, begun: Callable[[Iterable[int]], None] = lambda rows: None
    ) -> list[Explained]:
        """What comes of rows, in their order; texts of like length share a batch of ``size``.

        Args:
            begun: called with the numbers of the rows of a batch before it is explained.

        Raises:
            OutOfMemory: a batch of more than one row did not fit.
        """
        found: dict[int, Explained] = {}
        usable = []
        for place, one in enumerate(reads):
            if one.error is None:
                usable.append(place)
            else:
                found[place] = Explained(one.row, one.digest, [], [_failure(one.row, None, one.error)])
        for places in self._batches([reads[place] for place in usable], size):
            chosen = [usable[i] for i in places]
            found |= zip(chosen, self._batch([reads[i] for i in chosen], begun), strict=True)
        return [found[place] for place in range(len(reads))]

    def _batches(self, reads: Sequence[Read], size: int) -> Iterator[list[int]]:
        """Numbers of those that make a batch: tensors of one shape, and texts from the shortest to the longest."""
        keys = [_shape(one.content) for one in reads]
        texts = [i for i, one in enumerate(reads) if keys[i][0] in ("text", "pair")]
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if texts and len(reads) > 1 and callable(tokenizer):
            with suppress(*FOREIGN_ERRORS):  # what is wrong with a text is found when it is explained
                said = [one if isinstance(one := reads[i].content, str) else " ".join(one.values()) for i in texts]
                for i, ids in zip(texts, tokenizer(said)["input_ids"], strict=True):
                    keys[i] = (keys[i][0], len(ids))
        order = sorted(range(len(reads)), key=lambda i: (repr(keys[i][:1]), keys[i][1], i))
        for _, alike in groupby(order, key=lambda i: keys[i] if keys[i][0] == "tensors" else keys[i][0]):
            listed = list(alike)
            yield from (listed[i : i + size] for i in range(0, len(listed), size))

    def _batch(self, reads: Sequence[Read], begun: Callable[[Iterable[int]], None]) -> list[Explained]:
        """One batch; if anything is wrong with it, row by row, so that one bad row is a failure of its own."""
        begun([one.row.index for one in reads])
        try:
            return self._together(reads)
        except Exception as error:
            if is_out_of_memory(error):
                if len(reads) > 1:
                    raise OutOfMemory from error
                error = TooLarge(f"it does not fit into memory, even alone: {_first_line(error)}")
            if len(reads) == 1:
                return [Explained(reads[0].row, reads[0].digest, [], [_failure(reads[0].row, None, error)])]
        return [explained for one in reads for explained in self._batch([one], begun)]

    def _together(self, reads: Sequence[Read]) -> list[Explained]:
        rows, alone = [one.row for one in reads], len(reads) == 1
        ready = self.opened.prepare(_collated([one.content for one in reads]))
        targets = self._targets(ready, rows)
        made: list[list[Explanation]] = [[] for _ in reads]
        failures: list[Failure] = []
        for one in each(ready, self.methods, targets, progress=self.progress):
            if isinstance(one, Refusal):
                if not alone or is_out_of_memory(one.error):
                    raise one.error
                failures.append(_failure(rows[0], one.method, one.error))
                continue
            for place, part in enumerate(one):
                made[place].append(replace(_unpadded(part, ready, place), model=self.name))
        digests = [one.digest for one in reads]
        return [Explained(row, digest, es, failures) for row, digest, es in zip(rows, digests, made, strict=True)]

    def _targets(self, ready: Prepared, rows: Sequence[Row]) -> list[Any]:
        asked = self.targets
        if asked == "predicted":
            return [None]
        if isinstance(asked, list | tuple):
            return list(asked)
        if asked == "all":
            count = ready.classes or int(ready.logits().shape[-1])
            return list(range(count))
        if str(asked).startswith("column:"):
            return [[self._true(row, asked.removeprefix("column:"), ready) for row in rows]]
        count = min(numbered("targets", asked, '"top-K"'), int(ready.logits().shape[-1]))
        return [None] if count == 1 else ready.likeliest(count)

    def _true(self, row: Row, column: str, ready: Prepared) -> int:
        if column not in row.columns:
            there = ", ".join(map(repr, row.columns)) or "none"
            raise InputError(f"there is no column {column!r} with the true class beside this row; there are {there}")
        value = row.columns[column]
        if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
            value = int(value)  # a .csv file holds text alone
        return class_index(value, ready.labels, ready.classes)


def open_session(
    model: Any, processor: Any, methods: Sequence[Any], targets: Any = "predicted", **options: Unpack[Keywords]
) -> Session:
    """Load the model, once, and check what is asked of it.

    Raises:
        LoadError, ModelError, InputError: as for :func:`whyformer.explain`; a class that the model does not have.
    """
    asked = tuple(map(read_method, methods))
    check_targets(targets)
    if isinstance(model, str) and isinstance(processor, str):
        model = load(model, device=options.get("device"), dtype=options.get("dtype"))
        processor = _processor(processor, model.modality)
    opened = open_model(model, processor, **options)
    model = opened.model
    if isinstance(targets, list | tuple):
        for target in targets:
            class_index(target, class_names(model)[0], class_count(model))
    return Session(opened, asked, targets)


def _processor(name: str, modality: str) -> Any:
    import transformers

    try:
        if modality == "image":
            return transformers.AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LoadError(f"cannot load the processor '{name}': {_first_line(error)}") from error


# -- reading ---------------------------------------------------------------------------------------------------------
def read_one(row: Row) -> Read:
    """The content of a row, or what is wrong with it."""
    try:
        content = row.read()
        return Read(row, content, digest_of(content))
    except Exception as error:  # a user's own Dataset may raise anything
        return Read(row, error=error)


# -- batches ---------------------------------------------------------------------------------------------------------
def _shape(content: Any) -> tuple[str, Any]:
    """What rows of one batch have in common; pictures are brought to one size by the processor."""
    if isinstance(content, str):
        return "text", len(content)
    if isinstance(content, Image.Image):
        return "picture", 0
    if _is_pair(content):
        return "pair", sum(map(len, content.values()))
    if isinstance(content, Sound):
        return "tensors", f"sound of {len(content.wave)}"
    return "tensors", repr([(k, v.shape if isinstance(v, Tensor) else v) for k, v in sorted(content.items())])


def _is_pair(content: Any) -> bool:
    return isinstance(content, Mapping) and PAIR in content and isinstance(content[PAIR], str)


def _collated(contents: Sequence[Any]) -> Any:
    """What ``explain`` takes for several rows."""
    if not isinstance(contents[0], Mapping):
        return list(contents)
    if _is_pair(contents[0]):
        return {name: [own[name] for own in contents] for name in contents[0]}
    joined = {
        name: torch.cat([own[name] for own in contents]) if isinstance(value, Tensor) else value
        for name, value in contents[0].items()
    }
    return joined[""] if list(joined) == [""] else joined


def _unpadded(e: Explanation, ready: Prepared, place: int) -> Explanation:
    """A text of a batch as it is alone: without the padding that the longest one asked for."""
    mask = ready.inputs.mask
    if e.level != "token" or mask is None or mask.dim() != 2 or mask.shape[1] != e.scores.shape[1]:
        return e
    keep = mask[place].cpu()
    if bool(keep.all()):
        return e
    kept = keep.nonzero().flatten().tolist()

    def cut(values: list[Any] | None) -> Any:
        return None if values is None else [[own[i] for i in kept] for own in values]

    def moved(places: list[list[int]] | None) -> list[list[int]] | None:
        return None if places is None else [[kept.index(i) for i in own if i in kept] for own in places]

    places = {"unknown": moved(e.unknown), "special": moved(e.special)}
    return replace(e, scores=e.scores[:, keep]).with_features(tokens=cut(e.tokens), offsets=cut(e.offsets), **places)


def _failure(row: Row, method: str | None, error: Exception) -> Failure:
    return Failure(row.index, row.id, method, type(error).__name__, " ".join(str(error).split()) or repr(error))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
