"""``explain_many``: explanations of any number of inputs, as a stream or as files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import WINDOW, Explained, Failure, OutOfMemory, Session, open_session, read_one
from whyformer.jobs.fitting import TRIED, tried
from whyformer.jobs.manifest import FAILURES
from whyformer.jobs.reading import Maps
from whyformer.jobs.sources import open_source
from whyformer.jobs.tables import check_data
from whyformer.jobs.threads import ahead
from whyformer.options import shows_options, split

ON_ERROR = ("record", "raise")


@shows_options
def explain_many(
    model: Any,
    data: Any,
    method: str | Sequence[Any] = DEFAULT_METHOD,
    targets: Any = "predicted",
    processor: Any = None,
    *,
    batch_size: int | str = "auto",
    out: str | Path | None = None,
    workers: int = 2,
    on_error: str = "record",
    column: str | None = None,
    id_column: str | None = None,
    **options_and_keys: Any,
) -> ExplanationStream | Maps:
    """Explain many inputs: a stream of explanations in the order of the inputs, or with ``out`` files and their reader.

    Args:
        model, processor: as for :func:`whyformer.explain`; the model is loaded once.
        data: any iterable (of pictures, files, texts, tensors of one sample, mappings, or (one of these, label)), a
            ``Dataset``, a ``DataLoader``, a DataFrame or a Series of pandas, an Arrow table, a Hugging Face data set, a
            folder, a glob, a .jsonl, .csv or .parquet file, ``"hf:NAME"``, a URL.
        method: a name, or a list of names, (name, settings) or ``{"method": name, setting: value}``.
        targets: ``"predicted"``, ``"top-K"``, ``"all"``, ``"column:NAME"`` (the true class; a label given beside an
            input is in the column "label"), or a list of classes.
        batch_size: inputs explained at once, ``"auto"`` as for :class:`~whyformer.jobs.description.Job`.
        out: a folder to write, where a second call goes on; the explanations are then read with :func:`whyformer.read`.
        workers: threads that read the inputs.
        on_error: ``"record"`` keeps what went wrong with an input in ``failures`` and goes on; ``"raise"`` raises it.
        column: which column, or entry of a mapping, is the input; by default the first of text, sentence, input,
            prompt, image, picture, path and file that is there.
        id_column: which one names a row; by default "id", where there is one.
        **options_and_keys: options as for :func:`whyformer.explain`; with ``out``, further keys of a job:
            ``scores``, ``rows_per_part``, ``max_failures`` ...

    Returns:
        An :class:`ExplanationStream`: an iterator of explanations, each of one input, one for each method and target;
        its ``failures`` grow as it goes. With ``out``, :class:`~whyformer.jobs.reading.Maps`.

    Raises:
        WhyformerError: the model, the methods, the targets or the columns are wrong, or with ``on_error="raise"`` an
            input is. Where no input can be explained, the reason of the first is raised at the end.
    """
    options, keys = split(options_and_keys)
    if on_error not in ON_ERROR:
        raise InputError(f"on_error must be one of {', '.join(ON_ERROR)}, not {on_error!r}")
    _check_size(batch_size, workers)
    methods = [method] if isinstance(method, str | dict | tuple) else list(method)
    if not methods:
        raise InputError("there are no methods")
    check_data(data, column, id_column)
    session = open_session(model, processor, methods, targets, **options)
    source = open_source(data, column, id_column, files=not session.reads_text)
    if out is not None:
        from whyformer.jobs.local import explain_into

        more = {**keys, "batch_size": batch_size, "workers": workers, "column": column, "id_column": id_column}
        if on_error == "raise":
            more["max_failures"] = 0
        if isinstance(data, Iterator):  # only its first row says its columns, and a folder is begun before it is read
            next(source.rows(0), None)
        maps = explain_into(session, source, out, **more)
        _check_some(maps)
        return maps
    if keys:
        raise InputError(f"{', '.join(keys)}: only with out=, the folder to write")
    return ExplanationStream(session, source.rows(0), batch_size, workers, on_error == "raise")


def _check_some(maps: Maps) -> None:
    failed = maps.manifest["failed"]
    if failed and not maps.manifest["written"]:
        first = Failure(**maps.failures().slice(0, 1).to_pylist()[0])
        raise InputError(f"no input could be explained (see {maps.path / FAILURES}). The first: {_sentence(first)}")


def _sentence(failure: Failure) -> str:
    by = "" if failure.method is None else f", {failure.method}"
    return f"input {failure.row} ({failure.id}{by}): {failure.reason}"


def _check_size(batch_size: Any, workers: Any) -> None:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    if batch_size != "auto" and not whole(batch_size):
        raise InputError(f'batch_size must be "auto" or a whole number of at least 1, not {batch_size!r}')
    if not whole(workers):
        raise InputError(f"workers must be a whole number of at least 1, not {workers!r}")


class ExplanationStream(Iterator[Explanation]):
    """Explanations in the order of the inputs, made as they are asked for.

    Attributes:
        failures: of the inputs so far, why there is no explanation.
    """

    def __init__(self, session: Session, rows: Any, batch_size: int | str, workers: int, strict: bool) -> None:
        self.failures: list[Failure] = []
        self._explanations = self._explained(explained_rows(session, rows, batch_size, workers), strict)

    def __next__(self) -> Explanation:
        return next(self._explanations)

    def _explained(self, rows: Iterator[Explained], strict: bool) -> Iterator[Explanation]:
        some = False
        for one in rows:
            if one.failures and strict:
                raise InputError(_sentence(one.failures[0]))
            self.failures += one.failures
            some |= bool(one.explanations)
            yield from one.explanations
        if self.failures and not some:
            raise InputError(f"no input could be explained. The first: {_sentence(self.failures[0])}")


def explained_rows(session: Session, rows: Any, batch_size: int | str, workers: int) -> Iterator[Explained]:
    """What comes of each row, in order; a batch that does not fit is halved, for this and all later ones.

    Raises:
        WhyformerError: a method has no meaning on this model.
    """
    rows = iter(rows)
    first = [read_one(row) for row in islice(rows, TRIED)]
    size = tried(session, first).checked().size if batch_size == "auto" else int(batch_size)
    reads = ahead(rows, read_one, workers, 2 * size)
    while window := [*first, *islice(reads, max(0, size * WINDOW - len(first)))]:
        first = []
        done = False
        while not done:
            try:
                yield from session.explain(window, size)
                done = True
            except OutOfMemory:
                size = max(1, size // 2)
