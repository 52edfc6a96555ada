"""Explain rows in batches of similar length with a model that is loaded once; failures concern single rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar, Unpack

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.comparing import Refusal, explain_each, read_method
from whyformer.errors import FOREIGN_ERRORS, InputError, LoadError, TooLarge
from whyformer.explaining import OpenedModel, open_model
from whyformer.explanation.joining import without_padding
from whyformer.explanation.result import Explanation
from whyformer.inputs.sounds import Sound
from whyformer.jobs.description import as_list, check_values, top_count
from whyformer.jobs.rows import PAIR, Row, digest_of
from whyformer.methods import Method
from whyformer.models.loading import load, load_processor
from whyformer.models.memory import is_out_of_memory
from whyformer.models.structure import class_count, class_names
from whyformer.options import Keywords
from whyformer.prepared import Prepared
from whyformer.targets import check_target, class_index

Item = TypeVar("Item")
Result = TypeVar("Result")
WINDOW = 8
"""Number of batches that are read ahead and sorted by length."""


class OutOfMemory(Exception):  # noqa: N818 - the caller reduces the batch size
    """A batch did not fit into memory."""


@dataclass(frozen=True)
class Failure:
    """The reason why a row, or one method for a row, has no explanation; ``kind`` is the class of the error."""

    row: int
    id: str
    method: str | None
    kind: str
    reason: str

    @property
    def place(self) -> str:
        """The row, and in parentheses its id, unless this is the row's number, and the method."""
        details = [text for text in (self.id, self.method) if text not in (None, str(self.row))]
        return f"{self.row} ({', '.join(details)})" if details else str(self.row)


@dataclass(frozen=True)
class RowContent:
    """The content of a row with its digest, or the error of reading it."""

    row: Row
    content: Any = None
    digest: str = ""
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class RowResult:
    """The result of one row: an explanation for each method and target, and failures."""

    row: Row
    digest: str
    explanations: list[Explanation]
    failures: list[Failure]


@dataclass(frozen=True, eq=False)
class Session:
    """An opened model, and the methods and targets for every row.

    Attributes:
        opened: the model.
        methods: methods with their settings.
        targets: as in :class:`whyformer.jobs.description.Job`.
        progress: as for :func:`whyformer.explain`; it may raise an exception to stop a batch.
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
        """The model's processor."""
        return self.opened.processor

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.opened.name

    @property
    def reads_text(self) -> bool:
        """True if the processor is a tokenizer without an image processor."""
        return hasattr(self.processor, "convert_ids_to_tokens") and not hasattr(self.processor, "image_processor")

    def check_target(self, target: Any) -> None:
        """Raise where a target, as for :func:`whyformer.explain`, fits no row."""
        check_target(target, class_names(self.model)[0], class_count(self.model), 1, self.processor)

    def explain(
        self, reads: Sequence[RowContent], size: int, on_start: Callable[[Iterable[int]], None] = lambda rows: None
    ) -> list[RowResult]:
        """Return the results of rows in their order; texts of similar length share a batch.

        Args:
            reads: the rows.
            size: rows in one batch.
            on_start: called with the indices of the rows of each batch before it is explained.

        Raises:
            OutOfMemory: a batch of more than one row did not fit into memory.
        """
        results: dict[int, RowResult] = {}
        usable = []
        for place, read in enumerate(reads):
            if read.error is None:
                usable.append(place)
            else:
                results[place] = RowResult(read.row, read.digest, [], [_failure(read.row, None, read.error)])
        for batch in self._batches([reads[place] for place in usable], size):
            members = [usable[i] for i in batch]
            results |= zip(members, self._batch([reads[i] for i in members], on_start), strict=True)
        return [results[place] for place in range(len(reads))]

    def explain_in_memory(self, reads: Sequence[RowContent], size: int) -> tuple[list[RowResult], int]:
        """Return the results of rows, and the batch size, which is halved until the batches fit into memory."""
        while True:
            try:
                return self.explain(reads, size), size
            except OutOfMemory:
                size = max(1, size // 2)

    def _batches(self, reads: Sequence[RowContent], size: int) -> Iterator[list[int]]:
        """Yield the indices of the rows of each batch: tensors of equal shape, and texts sorted by length."""
        keys = [content_shape(read.content, i) for i, read in enumerate(reads)]
        texts = [i for i, read in enumerate(reads) if keys[i][0] in ("text", "pair")]
        tokenizer = self.opened.tokenizer
        if texts and len(reads) > 1 and tokenizer is not None:
            with suppress(*FOREIGN_ERRORS):  # errors are reported when the text is explained
                contents = [c if isinstance(c := reads[i].content, str) else " ".join(c.values()) for i in texts]
                for i, ids in zip(texts, tokenizer(contents, verbose=False)["input_ids"], strict=True):
                    keys[i] = (keys[i][0], len(ids))
        order = sorted(range(len(reads)), key=lambda i: (repr(keys[i][:1]), keys[i][1], i))
        for _, alike in groupby(order, key=lambda i: keys[i] if keys[i][0] == "tensors" else keys[i][0]):
            group = list(alike)
            yield from (group[i : i + size] for i in range(0, len(group), size))

    def _batch(self, reads: Sequence[RowContent], on_start: Callable[[Iterable[int]], None]) -> list[RowResult]:
        """Explain a batch; after an error, explain its rows one by one, so that only rows with errors fail."""
        on_start([read.row.index for read in reads])
        try:
            return self._one_pass(reads)
        except Exception as error:
            if is_out_of_memory(error):
                if len(reads) > 1:
                    raise OutOfMemory from error
                error = TooLarge(f"the row alone does not fit into memory: {first_line(error)}")
            if len(reads) == 1:
                return [RowResult(reads[0].row, reads[0].digest, [], [_failure(reads[0].row, None, error)])]
        return [explained for read in reads for explained in self._batch([read], on_start)]

    def _one_pass(self, reads: Sequence[RowContent]) -> list[RowResult]:
        ready = self.opened.prepare(collated([read.content for read in reads]))
        if ready.singles:
            pairs = zip(reads, ready.singles, strict=True)
            return [result for read, single in pairs for result in self._explained([read], single)]
        mosaics = [side.mosaic for side in ready.inputs.sides.values() if side.mosaic is not None]
        # rows with texts of their own to compare with are alone, and rows whose pictures have other grids are separate
        alone = bool(ready.task().inputs.shared)
        keys = [i if alone else tuple(mosaic.layout(i) for mosaic in mosaics) for i in range(len(reads))]
        if len(set(keys)) == 1:
            return self._explained(reads, ready)
        results: dict[int, RowResult] = {}
        for key in dict.fromkeys(keys):
            members = [i for i in range(len(reads)) if keys[i] == key]
            results |= zip(members, self._one_pass([reads[i] for i in members]), strict=True)
        return [results[i] for i in range(len(reads))]

    def _explained(self, reads: Sequence[RowContent], ready: Prepared) -> list[RowResult]:
        rows, is_single = [read.row for read in reads], len(reads) == 1
        targets = self._targets(ready, rows)
        explanations: list[list[Explanation]] = [[] for _ in reads]
        failures: list[Failure] = []
        for result in explain_each(ready, self.methods, targets, progress=self.progress):
            if isinstance(result, Refusal):
                if not is_single or is_out_of_memory(result.error):
                    raise result.error
                failures.append(_failure(rows[0], result.method, result.error))
                continue
            for place, part in enumerate(result):
                explanations[place].append(replace(_unpadded(part, ready, place), model=self.name))
        return [
            RowResult(read.row, read.digest, es, failures) for read, es in zip(reads, explanations, strict=True)
        ]

    def _targets(self, ready: Prepared, rows: Sequence[Row]) -> list[Any]:
        targets = self.targets
        if targets == "predicted":
            return [None]
        if isinstance(targets, list | tuple):
            return list(targets)
        if targets == "all":
            count = ready.classes or int(ready.logits().shape[-1])
            return list(range(count))
        if self.column is not None:
            return [[self._true_class(row, self.column, ready) for row in rows]]
        count = min(top_count(targets), int(ready.logits().shape[-1]))
        return [None] if count == 1 else ready.likeliest(count)

    @property
    def column(self) -> str | None:
        """The column of the true class, if it is the target."""
        named = isinstance(self.targets, str) and self.targets.startswith("column:")
        return self.targets.removeprefix("column:").strip() if named else None

    def check_column(self, reads: Iterable[RowContent]) -> None:
        """Raise InputError if none of the first rows of an input has the column of the true class."""
        rows = [read.row for read in reads if read.error is None]
        if self.column is not None and rows and not any(self.column in row.columns for row in rows):
            raise InputError(f"the input has no column {self.column!r} for the true class; {_listing(rows[0])}")

    def _true_class(self, row: Row, column: str, ready: Prepared) -> int:
        if column not in row.columns:
            raise InputError(f"this row has no column {column!r} for the true class; {_listing(row)}")
        value = row.columns[column]
        if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
            value = int(value)  # values of a .csv file are strings
        return class_index(value, ready.labels, ready.classes)


def _listing(row: Row) -> str:
    return f"its other columns: {', '.join(map(repr, row.columns)) or 'none'}"


def open_session(
    model: Any, processor: Any, methods: Sequence[Any], targets: Any = "predicted", **options: Unpack[Keywords]
) -> Session:
    """Load the model, and check methods and targets against it.

    Raises:
        LoadError, ModelError, InputError: as for :func:`whyformer.explain`; also if a target cannot be read, or
            names a class that the model lacks.
    """
    parsed = tuple(map(read_method, methods))
    targets = as_list(targets)
    check_values({"targets": targets})
    if isinstance(model, str) and isinstance(processor, str):
        model = load(model, device=options.get("device"), dtype=options.get("dtype"))
        processor = _processor(processor, model.modality)
    session = Session(open_model(model, processor, **options), parsed, targets)
    for target in targets if isinstance(targets, list) else ():
        session.check_target(target)
    return session


def _processor(name: str, modality: str) -> Any:
    try:
        processor = load_processor(name, modality)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise LoadError(f"cannot load the processor '{name}': {first_line(error)}") from error
    if processor is None:
        raise LoadError(f"cannot load the processor '{name}': the folder has none")
    return processor


# -- reading ---------------------------------------------------------------------------------------------------------
def read_one(row: Row) -> RowContent:
    """Read the content of a row, or return the error of reading it."""
    try:
        content = row.read()
        return RowContent(row, content, digest_of(content))
    except Exception as error:  # a user's Dataset may raise any exception
        return RowContent(row, error=error)


def prefetch(items: Iterable[Item], read: Callable[[Item], Result], workers: int, depth: int) -> Iterator[Result]:
    """Yield ``read(item)`` for each item in order, computed by ``workers`` threads, at most ``depth`` ahead."""
    with ThreadPoolExecutor(workers, "whyformer-read") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


# -- batches ---------------------------------------------------------------------------------------------------------
def content_shape(content: Any, number: int) -> tuple[str, Any]:
    """Return (kind, size): rows of a batch have the same kind. Pictures have no size: the processor resizes them. A row
    is alone if one of its tensors has another first axis than that of samples."""
    if isinstance(content, str):
        return "text", len(content)
    if isinstance(content, Image.Image):
        return "picture", 0
    if _is_pair(content):
        return "pair", sum(map(len, content.values()))
    if isinstance(content, Sound):
        return "tensors", f"sound of {len(content.wave)}"
    if any(isinstance(v, Tensor) and len(v) != 1 for v in content.values()):
        return "tensors", f"row {number}"
    return "tensors", repr([(k, v.shape if isinstance(v, Tensor) else v) for k, v in sorted(content.items())])


def _is_pair(content: Any) -> bool:
    return isinstance(content, Mapping) and PAIR in content and isinstance(content[PAIR], str)


def collated(contents: Sequence[Any]) -> Any:
    """Join the contents of rows into an input of ``explain``."""
    if not isinstance(contents[0], Mapping):
        return list(contents)
    if _is_pair(contents[0]):
        return {name: [content[name] for content in contents] for name in contents[0]}
    joined = {
        name: torch.cat([content[name] for content in contents]) if isinstance(value, Tensor) else value
        for name, value in contents[0].items()
    }
    return joined[""] if list(joined) == [""] else joined


def _unpadded(e: Explanation, ready: Prepared, place: int) -> Explanation:
    """Remove the padding of a text that was explained in a batch."""
    mask = ready.inputs.mask
    if e.level != "token" or mask is None or mask.dim() != 2 or mask.shape[1] != e.scores.shape[1]:
        return e
    return without_padding(e, mask[place].cpu())


def _failure(row: Row, method: str | None, error: Exception) -> Failure:
    return Failure(row.index, row.id, method, type(error).__name__, " ".join(str(error).split()) or repr(error))


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error; the name of its class if there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
