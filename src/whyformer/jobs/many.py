"""``explain_many``: explain any number of inputs, as a stream or to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from whyformer.comparing import method_list
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, check_type
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import WINDOW, Failure, RowResult, Session, open_session, prefetch, read_one
from whyformer.jobs.description import check_values, make_job
from whyformer.jobs.manifest import FAILURES
from whyformer.jobs.reading import Maps
from whyformer.jobs.sources import open_source
from whyformer.jobs.tables import check_data
from whyformer.jobs.trial import TRIED, run_trial
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
    """Explain many inputs, as a stream in the order of the inputs, or to files if ``out`` is set.

    Args:
        model, processor: as for :func:`whyformer.explain`; the model is loaded once.
        data: any iterable of pictures, files, texts, tensors of one sample, mappings, or (input, label) pairs; a
            ``Dataset``, a ``DataLoader``, a pandas DataFrame or Series, an Arrow table, a Hugging Face data set, a
            folder, a glob, a .jsonl, .csv or .parquet file, ``"hf:NAME"``, or a URL.
        method: a name, or a list of names, (name, settings) pairs or ``{"method": name, setting: value}``.
        targets: ``"predicted"``, ``"top-K"``, ``"all"``, ``"column:NAME"`` (the true class; the label of an
            (input, label) pair is in the column "label"), or a list of classes and of targets from
            :mod:`whyformer.targets`, as objects or as text. Positions are those of each input.
        batch_size: inputs in one batch, or ``"auto"`` as for :class:`~whyformer.jobs.description.Job`.
        out: output folder; another call with the same folder resumes. :func:`whyformer.read` reads the explanations.
        workers: number of threads that read the inputs.
        on_error: ``"record"`` adds an input that fails to ``failures`` and continues; ``"raise"`` raises its error.
        column: column, or key of a mapping, that holds the input; by default the first existing of text, sentence,
            input, prompt, image, picture, path and file.
        id_column: column that identifies a row; by default "id", if it exists.
        **options_and_keys: options as for :func:`whyformer.explain`; with ``out``, also keys of a job such as
            ``scores``, ``rows_per_part`` and ``max_failures``. With ``engine="ray"``, the model and the data must be
            names, which each actor opens.

    Returns:
        An :class:`ExplanationStream`, an iterator over one explanation for each input, method and target; its
        ``failures`` grow during iteration. With ``out``, :class:`~whyformer.jobs.reading.Maps`.

    Raises:
        WhyformerError: the model, the methods, the targets or the columns are wrong, or an input is and ``on_error`` is
            ``"raise"``. If no input can be explained, the error of the first input is raised at the end.
    """
    options, keys = split(options_and_keys)
    check_type("method", method, Iterable, "a name, or a list of methods")
    check_type("out", out, str | Path | None, "a folder")
    if on_error not in ON_ERROR:
        raise InputError(f"on_error must be one of {', '.join(ON_ERROR)}, not {on_error!r}")
    check_values({"batch_size": batch_size, "workers": workers})
    methods = method_list(method)
    if not methods:
        raise InputError("there are no methods: name at least one")
    check_data(data, column, id_column)
    more = {**keys, "batch_size": batch_size, "workers": workers, "column": column, "id_column": id_column}
    if on_error == "raise":
        more["max_failures"] = 0
    if out is not None and keys.get("engine") == "ray":
        return _checked(_on_ray(model, data, out, processor, methods=methods, targets=targets, **options, **more))
    session = open_session(model, processor, methods, targets, **options)
    source = open_source(data, column, id_column, files=not session.reads_text)
    if out is not None:
        from whyformer.jobs.local import explain_into

        if isinstance(data, Iterator):  # check the columns of its first row before a folder is created
            next(source.rows(0), None)
        return _checked(explain_into(session, source, out, **more))
    if keys:
        raise InputError(f"{', '.join(keys)}: these settings need out=, the output folder")
    return ExplanationStream(session, source.rows(0), batch_size, workers, on_error == "raise")


def _on_ray(model: Any, data: Any, out: str | Path, processor: Any, **keys: Any) -> Maps:
    """Run a job whose actors open the model and the input by name."""
    from whyformer.jobs.engines import run_job

    names = {"model": model, "input": str(data) if isinstance(data, Path) else data, "processor": processor}
    if unnamed := [name for name, value in names.items() if not isinstance(value, str | None)]:
        raise InputError(f'engine="ray" needs the name of the {unnamed[0]}, which each actor opens')
    return run_job(make_job({**keys, **names, "out": str(out)}))


def _checked(maps: Maps) -> Maps:
    """Return the maps; raise an error if no input could be explained."""
    failed = maps.manifest["failed"]
    if failed and not maps.manifest["written"]:
        first = Failure(**maps.failures().slice(0, 1).to_pylist()[0])
        raise InputError(f"no input could be explained (see {maps.path / FAILURES}). The first: {_sentence(first)}")
    return maps


def _sentence(failure: Failure) -> str:
    return f"input {failure.place}: {failure.reason}"


class ExplanationStream(Iterator[Explanation]):
    """An iterator that computes explanations in the order of the inputs.

    Attributes:
        failures: inputs so far that could not be explained, with the reasons.
    """

    def __init__(self, session: Session, rows: Any, batch_size: int | str, workers: int, strict: bool) -> None:
        self.failures: list[Failure] = []
        self._explanations = self._explained(explained_rows(session, rows, batch_size, workers), strict)

    def __next__(self) -> Explanation:
        return next(self._explanations)

    def _explained(self, rows: Iterator[RowResult], strict: bool) -> Iterator[Explanation]:
        any_explained = False
        for row in rows:
            if row.failures and strict:
                raise InputError(_sentence(row.failures[0]))
            self.failures += row.failures
            any_explained |= bool(row.explanations)
            yield from row.explanations
        if self.failures and not any_explained:
            raise InputError(f"no input could be explained. The first: {_sentence(self.failures[0])}")


def explained_rows(session: Session, rows: Any, batch_size: int | str, workers: int) -> Iterator[RowResult]:
    """Yield the result of each row, in order. If a batch does not fit into memory, the batch size is halved.

    Raises:
        WhyformerError: a method is not applicable to this model.
    """
    rows = iter(rows)
    first = [read_one(row) for row in islice(rows, TRIED)]
    session.check_column(first)
    size = run_trial(session, first).size if batch_size == "auto" else int(batch_size)
    reads = prefetch(rows, read_one, workers, 2 * size)
    while window := [*first, *islice(reads, max(0, size * WINDOW - len(first)))]:
        first = []
        results, size = session.explain_in_memory(window, size)
        yield from results
