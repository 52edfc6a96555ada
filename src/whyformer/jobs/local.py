"""The local engine: threads that read, and this process, which explains and writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, import_optional
from whyformer.explanation.counts import amount
from whyformer.inputs.feed import dtype_of
from whyformer.inputs.settings import settings_of
from whyformer.jobs.attempts import Attempts, ProcessEnded, notes_name, skipped_row
from whyformer.jobs.batching import WINDOW, Failure, OutOfMemory, RowResult, Session, open_session, prefetch, read_one
from whyformer.jobs.columns import Rows, failures_table
from whyformer.jobs.description import Job
from whyformer.jobs.folder import Folder
from whyformer.jobs.manifest import FAILURES, Part, job_facts, job_id, part_name
from whyformer.jobs.monitoring import Monitor
from whyformer.jobs.ownership import OVERLAYS
from whyformer.jobs.parts import PartFacts, UnwrittenPart, failures_of
from whyformer.jobs.reading import Maps
from whyformer.jobs.rows import Row, Source
from whyformer.jobs.sources import open_source
from whyformer.jobs.trial import TRIED, Trial, run_trial
from whyformer.models.loading import fingerprint
from whyformer.models.structure import class_names
from whyformer.progress import Track, tracking
from whyformer.show import encode, figure, html
from whyformer.show.files import slug, write_all
from whyformer.show.words import target_name


class TooManyFailures(InputError):  # noqa: N818 - reads better where it is raised
    """More rows failed than ``max_failures`` allows."""


class OpenedJob:
    """A job with its loaded model and its open input, whose parts are read one after another."""

    def __init__(self, job: Job, session: Session, source: Source) -> None:
        self.job, self.session, self.source = job, session, source
        # number and rows of the part that was read last, and the rows of the input from index ``_next`` on
        self._number, self._part = -1, list[Row]()
        self._next, self._rest = -1, iter(list[Row]())

    @property
    def count(self) -> int | None:
        """Number of rows; None if it is unknown."""
        available, limit = self.source.count, self.job.limit
        return available if limit is None else limit if available is None else min(available, limit)

    def rows(self, start: int) -> Iterator[Row]:
        """Return the rows from ``start`` up to the limit of the job."""
        limit = self.job.limit
        return islice(self.source.rows(start), None if limit is None else max(0, limit - start))

    def part(self, number: int, attempts: Attempts) -> list[Row]:
        """Return the rows of one part; reading continues where the previous part ended."""
        if self._number != number:
            self._move_to(number * self.job.rows_per_part)
            self._number, self._part = number, list(self._fetched(self.job.rows_per_part, attempts))
            attempts.fetch(None)
        return [attempts.admitted(row) for row in self._part]

    def _move_to(self, start: int) -> None:
        if self.source.sequential and 0 <= self._next < start:
            next(islice(self._rest, start - self._next - 1, None), None)  # skip the rows between
        elif self._next != start:
            self._rest = self.rows(start)
        self._next = start

    def _fetched(self, count: int, attempts: Attempts) -> Iterator[Row]:
        """Yield the next rows of the input, without fetching rows that crashed the process when they were fetched."""
        for index in range(self._next, self._next + count):
            row: Row | None
            if index in attempts.unfetched:
                self._rest, row = self.rows(index + 1), skipped_row(index, str(index))
            else:
                attempts.fetch(index)
                row = next(self._rest, None)
                if row is None:
                    return
            self._next = index + 1
            yield row

    @cached_property
    def id(self) -> str:
        """Id of the job, which every file of the job contains."""
        return job_id(self.facts)

    def attempts(self, number: int, size: int) -> Attempts:
        """Return the attempts to compute one part, with the notes of earlier attempts."""
        return Attempts(Path(self.job.out) / notes_name(part_name(number)), self.id, size)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts of the manifest that are known before the run."""
        model, session = self.session.model, self.session
        labels, multi_label = class_names(model)
        config = getattr(model, "config", None)
        description = {"name": session.name, "fingerprint": fingerprint(model), "multi_label": multi_label,
                 "processor": settings_of(session.processor),
                 "revision": getattr(config, "_commit_hash", None),
                 "labels": None if labels is None else {str(k): v for k, v in labels.items()}}  # fmt: skip
        # without paths: a job may resume after its files were moved
        job = {k: v for k, v in self.job.identity().items() if k not in ("model", "input", "processor")}
        source = {"rows": self.count, "sha256": self.source.digest}
        return job_facts(job, description, source)

    def trial(self, attempts: Attempts) -> Trial:
        """Explain the largest of the first :data:`TRIED` rows as a trial."""
        rows = self.part(0, attempts)[:TRIED]
        try_alone(self.session, rows, attempts)
        return run_trial(self.session, [attempts.reading(row) for row in rows], attempts.work)


def open_job(job: Job) -> OpenedJob:
    """Load the model and open the input of a job.

    Raises:
        WhyformerError: the model or the input is missing or invalid.
    """
    import_optional("pyarrow", "a job")
    source = open_source(job.input, job.column, job.id_column)
    session = open_session(job.model, job.processor, job.methods, job.targets, **job.options.named)
    return OpenedJob(job, session, source)


def explain_into(session: Session, source: Source, out: str | Path, **options: Any) -> Maps:
    """Run a job (see :func:`whyformer.jobs.engines.run_job`) for an opened model and an open input."""
    names: dict[str, Any] = {"model": session.name, "input": source.name, "out": str(out)}
    methods = tuple((m.name, s) for m, s in session.methods)
    dtype = str(dtype_of(session.model)).removeprefix("torch.")
    recorded = replace(session.opened.options, device=None, dtype=dtype)
    job = Job(**names, methods=methods, targets=session.targets, options=recorded, **options)
    return explain_opened(OpenedJob(job, session, source), None, lambda text: None)


def explain_opened(opened: OpenedJob, track: Track | None, say: Callable[[str], None]) -> Maps:
    """Compute the missing parts in order."""
    with Run(opened, say) as run:
        for number in run.todo(track):
            while (part := make_part(opened, number, run.size(number), run.may_fail)) is None:
                run.halve(number)
            if not part.facts.rows and number:  # the input ended with the previous part
                break
            run.check_failures(part.rows.failures)
            run.add(part.write(run.folder.path), part.rows.warned)
        run.finish()
    return Maps(run.folder.path)


def make_part(opened: OpenedJob, number: int, size: int, may_fail: int | None = None) -> UnwrittenPart | None:
    """Explain the rows of one part.

    Args:
        opened: the job.
        number: number of the part.
        size: rows in one batch.
        may_fail: number of failed rows above which the part ends early.

    Returns:
        The part; None if a batch of this size did not fit into memory, or crashed the process.
    """
    with opened.attempts(number, size) as attempts:
        part_rows = opened.part(number, attempts)
        if attempts.max_size is not None and size > attempts.max_size:
            return None
        try_alone(opened.session, part_rows, attempts)
        try:
            rows = _explain(opened, part_rows, size, may_fail, attempts)
        except OutOfMemory:
            return None
    first, failures = number * opened.job.rows_per_part, list(map(vars, rows.failures))
    return UnwrittenPart(PartFacts(opened.id, number, first, len(part_rows), size, failures), rows)


def try_alone(session: Session, rows: Iterable[Row], attempts: Attempts) -> None:
    """Read and explain suspect rows one at a time: a process died while working on them."""
    for row in rows:
        if row.index in attempts.suspects:
            attempts.alone(row.index)
            read = read_one(row)
            if read.error is None:
                session.explain([read], 1)
            attempts.survived(row.index)


def _explain(opened: OpenedJob, part_rows: list[Row], size: int, may_fail: int | None, attempts: Attempts) -> Rows:
    job, session = opened.job, opened.session
    rows = Rows(job.scores, class_names(session.model)[0])
    # after a crash a single thread reads, as concurrent reading may be the cause
    reads = prefetch(part_rows, attempts.reading, 1 if attempts.died else job.workers, 2 * size)
    while waiting := list(islice(reads, size * WINDOW)):
        attempts.work([read.row.index for read in waiting], durable=True)
        for explained in session.explain(waiting, size, attempts.work):
            rows.add(explained)
            if job.overlays and explained.explanations:
                attempts.work([explained.row.index])
                write_overlays(Path(job.out), explained)
        attempts.work([])
        if may_fail is not None and len(rows.failures) > may_fail:
            break
    return rows


def write_overlays(out: Path, explained: RowResult) -> None:
    """Write the overlays of one row atomically; names consist of the row's index, the method and the class.

    Raises:
        LoadError: the disk is full or not writable.
    """
    contents = {}
    for number, e in enumerate(explained.explanations):
        name = f"{explained.row.index:08d}-{number}-{slug(e.method, target_name(e), limit=60)}"
        if e.level == "token":
            contents[f"{name}.html"] = html.page([e], explained.row.id).encode()
        else:
            contents[f"{name}.png"] = encode(figure(e), "png")
    write_all(out / OVERLAYS, contents)


class Run(ExitStack):
    """One run of a job: the existing parts, the missing parts, and the end of the run."""

    def __init__(self, opened: OpenedJob, say: Callable[[str], None]) -> None:
        super().__init__()
        self.opened, self.say = opened, say
        with ExitStack() as stack:  # closed if the job is refused
            self.folder = stack.enter_context(Folder(opened.job.out, opened.facts))
            self.monitor = stack.enter_context(Monitor(self.folder, opened.job.metrics_port, opened.count))
            self.failed = sum(part.failed for part in self.folder.parts.values())
            for name in self.folder.damaged:
                say(f"{name} is damaged and will be rewritten")
                self.monitor.log("damaged", file=name)
            if "batch_sizes" not in self.folder.manifest:
                with opened.attempts(0, 1) as attempts:
                    size = opened.trial(attempts).size
                self._set_size(0, size if opened.job.batch_size == "auto" else int(opened.job.batch_size))
            self.push(stack.pop_all())

    def size(self, number: int) -> int:
        """Return the batch size of one part. It is stored in the manifest, so that a rerun has the same batches."""
        return int(next(size for first, size in reversed(self.folder.manifest["batch_sizes"]) if first <= number))

    def _set_size(self, number: int, size: int) -> None:
        manifest = self.folder.manifest
        before = [entry for entry in manifest.get("batch_sizes", []) if entry[0] < number]
        manifest["batch_sizes"] = [*before, [number, size]]
        self.folder.write_manifest(manifest)

    def halve(self, number: int) -> None:
        """Halve the batch size from this part on, also for reruns; all parts before it are written."""
        self._set_size(number, max(1, self.size(number) // 2))
        self.say(f"a batch did not fit into memory: the batch size is now {self.size(number)}")
        self.monitor.log("out of memory", batch_size=self.size(number))

    def todo(self, track: Track | None) -> Iterator[int]:
        """Yield the numbers of the missing parts in order."""
        count, step, finished = self.opened.count, self.opened.job.rows_per_part, self.folder.parts
        parts = None if count is None else -(-count // step)
        if finished:
            self.say(f"{amount(len(finished), 'part')} of an earlier run found")
        self.monitor.begin(sum(part.rows for part in finished.values()))
        numbers = itertools.count() if parts is None else range(parts)
        missing = (number for number in numbers if part_name(number) not in finished)
        remaining = None if parts is None else parts - len(finished)
        yield from tracking(track or False)(missing, f"parts of {step:,} rows", remaining)

    def add(self, part: Part, warned: int) -> None:
        """Record a written part, with its number of explanations with warnings, and report rows that were skipped."""
        self.folder.add(part)
        self.failed += part.failed
        self.monitor.part(part, warned)
        for failure in failures_of(self.folder.path / part.file) if part.failed else ():
            if failure.kind == ProcessEnded.__name__:
                self.say(f"row {failure.place} is skipped: {failure.reason}")
                self.monitor.log("set aside", row=failure.row, id=failure.id)

    @property
    def may_fail(self) -> int | None:
        """Number of rows that may still fail; None if there is no limit."""
        most = self.opened.job.max_failures
        return None if most is None else max(0, most - self.failed)

    def check_failures(self, unwritten: Sequence[Failure] = ()) -> None:
        """Stop the job if more rows failed than ``max_failures``.

        Args:
            unwritten: failures of a part that is not written yet.

        Raises:
            TooManyFailures: the limit is exceeded; the table of failures lists all failures.
        """
        most, failed = self.opened.job.max_failures, self.failed + len(unwritten)
        if most is None or failed <= most:
            return
        failures = [*self._failures(), *unwritten]
        self.monitor.log("stopped", failed=failed)
        self.folder.write_failures(failures_table(failures))
        table, first = self.folder.path / FAILURES, failures[0]
        raise TooManyFailures(
            f"stopped after {failed} failures; max_failures is {most} (see {table}). The first: {first.id}: "
            f"{first.reason}"
        )

    def _failures(self) -> list[Failure]:
        """Return the failures of all written parts."""
        parts = [self.folder.parts[name] for name in sorted(self.folder.parts)]
        return [failure for part in parts if part.failed for failure in failures_of(self.folder.path / part.file)]

    def finish(self) -> None:
        """Write the failures and the complete manifest; all parts are written."""
        rows = sum(part.rows for part in self.folder.parts.values())
        if not self.folder.is_finished:
            self.folder.finish(failures_table(self._failures()), rows)
        manifest = self.folder.manifest
        self.monitor.log("finished", rows=rows, written=manifest["written"], failed=manifest["failed"])
