"""A job on one machine: threads that read, this process that explains, and a thread that writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from whyformer.errors import InputError
from whyformer.jobs.attempts import Attempts, ProcessEnded, notes_name, set_aside
from whyformer.jobs.batching import WINDOW, Failure, OutOfMemory, Session, open_session, read_one
from whyformer.jobs.columns import Rows, failures_table
from whyformer.jobs.description import Job
from whyformer.jobs.fitting import TRIED, Trial, tried
from whyformer.jobs.folder import Folder
from whyformer.jobs.manifest import FAILURES, Part, described, job_id, part_name
from whyformer.jobs.monitoring import Monitor
from whyformer.jobs.overlays import write_overlays
from whyformer.jobs.parts import PartFacts, failures_of, write_part
from whyformer.jobs.reading import Maps
from whyformer.jobs.rows import Row, Source, needed
from whyformer.jobs.sources import open_source
from whyformer.jobs.threads import Behind, ahead
from whyformer.models.loading import fingerprint
from whyformer.models.structure import class_names

Track = Callable[..., Iterable[Any]]


class TooManyFailures(InputError):  # noqa: N818 - reads better at the call site
    """More rows failed than ``max_failures`` allows."""


@dataclass(eq=False)
class Cursor:
    """How far the input was read: the rows after ``index``, and the rows of the part that was read last."""

    rest: Iterator[Row] = field(default_factory=lambda: iter(()))
    index: int = -1
    number: int = -1
    part: list[Row] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Opened:
    """A job whose model is loaded and whose input is open."""

    job: Job
    session: Session
    source: Source
    cursor: Cursor = field(default_factory=Cursor)

    @property
    def count(self) -> int | None:
        """How many rows there are, None where that is not known beforehand."""
        known, limit = self.source.count, self.job.limit
        return known if limit is None else limit if known is None else min(known, limit)

    def rows(self, start: int) -> Iterator[Row]:
        """The rows from one on, as far as the job goes."""
        limit = self.job.limit
        return islice(self.source.rows(start), None if limit is None else max(0, limit - start))

    def part(self, number: int, attempts: Attempts) -> list[Row]:
        """The rows of one part; the input is read on where the part before ended."""
        cursor, step = self.cursor, self.job.rows_per_part
        if cursor.number != number:
            if cursor.index != number * step:
                cursor.rest, cursor.index = self.rows(number * step), number * step
            cursor.number, cursor.part = number, list(self._fetched(step, attempts))
            attempts.fetch(None)
        return [attempts.admitted(row) for row in cursor.part]

    def _fetched(self, count: int, attempts: Attempts) -> Iterator[Row]:
        """The next rows of the input; one that ends the process when it is taken from the input is passed over."""
        cursor = self.cursor
        for index in range(cursor.index, cursor.index + count):
            if index in attempts.unfetched:
                cursor.rest, row = self.rows(index + 1), set_aside(index, str(index))
            else:
                attempts.fetch(index)
                taken = next(cursor.rest, None)
                if taken is None:
                    return
                row = taken
            cursor.index = index + 1
            yield row

    @cached_property
    def id(self) -> str:
        """What every file of the job says."""
        return job_id(self.facts)

    def attempts(self, number: int, size: int) -> Attempts:
        """The attempts to make one part, with the notes of those before."""
        return Attempts(Path(self.job.out) / notes_name(part_name(number)), self.id, size)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the manifest says before any work."""
        model, session = self.session.model, self.session
        labels, multi_label = class_names(model)
        config = getattr(model, "config", None)
        known = {"name": session.name, "fingerprint": fingerprint(model), "multi_label": multi_label,
                 "revision": getattr(config, "_commit_hash", None),
                 "labels": None if labels is None else {str(k): v for k, v in labels.items()}}  # fmt: skip
        # which files they are, not where they lie: the folder may be moved and the job go on
        job = {k: v for k, v in self.job.identity().items() if k not in ("model", "input")}
        source = {"rows": self.count, "sha256": self.source.digest}
        return described(job, known, source)

    def trial(self, attempts: Attempts) -> Trial:
        """What came of explaining one row, the largest of the first few of the first part."""
        rows = self.part(0, attempts)[:TRIED]
        try_alone(self.session, rows, attempts)
        return tried(self.session, [attempts.reading(row) for row in rows], attempts.work).checked()


def open_job(job: Job) -> Opened:
    """Load the model and open the input.

    Raises:
        WhyformerError: one of them is missing or wrong.
    """
    needed("pyarrow", "a job")
    source = open_source(job.input, job.column, job.id_column)
    session = open_session(job.model, job.processor, job.methods, job.targets, **job.options.named)
    return Opened(job, session, source)


def explain_into(session: Session, source: Source, out: str | Path, **options: Any) -> Maps:
    """As :func:`whyformer.jobs.engines.run_job`, for a model and an input that are there already."""
    named: dict[str, Any] = {"model": session.name, "input": source.name, "out": str(out)}
    asked = tuple((m.name, s) for m, s in session.methods)
    held = next((p.dtype for p in session.model.parameters() if p.is_floating_point()), torch.float32)
    told = replace(session.opened.options, device=None, dtype=str(held).removeprefix("torch."))
    job = Job(**named, methods=asked, targets=session.targets, options=told, **options)
    return explain_opened(Opened(job, session, source), None, lambda text: None)


def explain_opened(opened: Opened, track: Track | None, say: Callable[[str], None]) -> Maps:
    """Make the parts that are not there yet, one after the other, while the one before is written."""
    with ExitStack() as stack:
        run = stack.enter_context(Run(opened, say))
        writer = stack.enter_context(Behind())
        for number in run.todo(track):
            made = make_part(opened, number, run.size(number), run.spare)
            while made is None:  # the batches are too large
                writer.drain()
                run.halve(number)
                made = make_part(opened, number, run.size(number), run.spare)
            writer.drain()
            if not run.counted(made):
                break
            run.check_failures(made.rows.failures)
            writer.write(made.write, opened, then=run.written)
        writer.drain()
        run.finish()
    return Maps(run.folder.path)


@dataclass(frozen=True, eq=False)
class Made:
    """A part that is not written yet: ``count`` rows of the input from ``first`` on."""

    number: int
    first: int
    count: int
    size: int
    rows: Rows

    def write(self, opened: Opened) -> Part:
        """Write it whole, with its failures in its schema; once more gives the same bytes."""
        failures = [vars(one) for one in self.rows.failures]
        facts = PartFacts(
            job=opened.id, part=self.number, first=self.first, rows=self.count, batch_size=self.size, failures=failures
        )
        return write_part(Path(opened.job.out) / part_name(self.number), self.rows.table(), facts)


def make_part(opened: Opened, number: int, size: int, spare: int | None = None) -> Made | None:
    """The rows of one part, explained; None if a batch of this size did not fit into memory, or ended the process.

    Args:
        spare: end early when more than so many rows failed.
    """
    with opened.attempts(number, size) as attempts:
        listed = opened.part(number, attempts)
        if attempts.most is not None and size > attempts.most:
            return None
        try_alone(opened.session, listed, attempts)
        try:
            rows = _explained(opened, listed, size, spare, attempts)
        except OutOfMemory:
            return None
    return Made(number, number * opened.job.rows_per_part, len(listed), size, rows)


def try_alone(session: Session, rows: Iterable[Row], attempts: Attempts) -> None:
    """Read and explain those rows alone in whose middle a process died, while nothing else is done."""
    for row in rows:
        if row.index in attempts.suspects:
            attempts.alone(row.index)
            read = read_one(row)
            if read.error is None:
                session.explain([read], 1)
            attempts.survived(row.index)


def _explained(opened: Opened, listed: list[Row], size: int, spare: int | None, attempts: Attempts) -> Rows:
    job, session = opened.job, opened.session
    rows = Rows(job.scores, class_names(session.model)[0])
    # where a process died, one thread reads: threads that read together may be why
    reads = ahead(listed, attempts.reading, 1 if attempts.died else job.workers, 2 * size)
    while waiting := list(islice(reads, size * WINDOW)):
        attempts.work([read.row.index for read in waiting], durable=True)
        for explained in session.explain(waiting, size, attempts.work):
            rows.add(explained)
            if job.overlays and explained.explanations:
                attempts.work([explained.row.index])
                write_overlays(Path(job.out), explained)
        attempts.work([])
        if spare is not None and len(rows.failures) > spare:
            break
    return rows


class Run(ExitStack):
    """One run of a job over its folder: which parts are there, what is still to do, and how it ends."""

    def __init__(self, opened: Opened, say: Callable[[str], None]) -> None:
        super().__init__()
        self.opened, self.say = opened, say
        with ExitStack() as stack:  # what was opened is closed again if the job is refused
            self.folder = stack.enter_context(Folder(opened.job.out, opened.facts))
            self.monitor = stack.enter_context(Monitor(self.folder, opened.job.metrics_port, opened.count))
            self.failed = sum(part.failed for part in self.folder.parts.values())
            for name in self.folder.damaged:
                say(f"{name} was damaged, and is made again")
                self.monitor.log("damaged", file=name)
            if "batch_sizes" not in self.folder.manifest:
                with opened.attempts(0, 1) as attempts:
                    size = opened.trial(attempts).size
                self._set_size(0, size if opened.job.batch_size == "auto" else int(opened.job.batch_size))
            self.push(stack.pop_all())

    def size(self, number: int) -> int:
        """Rows in a batch of one part. It stands in the manifest, so that a rerun makes the same batches."""
        return int(next(size for first, size in reversed(self.folder.manifest["batch_sizes"]) if first <= number))

    def _set_size(self, number: int, size: int) -> None:
        manifest = self.folder.manifest
        before = [one for one in manifest.get("batch_sizes", []) if one[0] < number]
        manifest["batch_sizes"] = [*before, [number, size]]
        self.folder.write_manifest(manifest)

    def halve(self, number: int) -> None:
        """Take smaller batches from this part on, also in a rerun; all parts before it are on the disk."""
        self._set_size(number, max(1, self.size(number) // 2))
        self.say(f"a batch took all memory: batches of {self.size(number)} from now on")
        self.monitor.log("out of memory", batch_size=self.size(number))

    def todo(self, track: Track | None) -> Iterator[int]:
        """Numbers of the parts that are not there, in order."""
        count, step, known = self.opened.count, self.opened.job.rows_per_part, self.folder.parts
        parts = None if count is None else -(-count // step)
        there = len(known)
        if there:
            self.say(f"{there} {'parts are' if there > 1 else 'part is'} there from an earlier run")
        self.monitor.begin(sum(part.rows for part in known.values()))
        numbers = itertools.count() if parts is None else range(parts)
        missing = (number for number in numbers if part_name(number) not in known)
        left = None if parts is None else parts - there
        yield from track(missing, f"parts of {step:,} rows", left) if track is not None else missing

    def counted(self, made: Made) -> bool:
        """Told of every part; False if the input ended with the one before."""
        self.monitor.part(made.count, len(made.rows), len(made.rows.failures), made.rows.warned)
        for one in made.rows.failures:
            if one.kind == ProcessEnded.__name__:
                self.say(f"row {one.row} ({one.id}) is set aside: {one.reason}")
                self.monitor.log("set aside", row=one.row, id=one.id)
        return bool(made.count) or made.number == 0

    def written(self, part: Part) -> None:
        """A part is on the disk."""
        self.folder.note(part)
        self.monitor.log("part", file=part.file, rows=part.rows, written=part.written, failed=part.failed)

    @property
    def spare(self) -> int | None:
        """How many rows may still fail."""
        most = self.opened.job.max_failures
        return None if most is None else max(0, most - self.failed)

    def check_failures(self, more: list[Failure]) -> None:
        """Stop where more rows failed than are allowed.

        Raises:
            TooManyFailures: with the first of them; all are in the table of failures.
        """
        self.failed += len(more)
        most = self.opened.job.max_failures
        if most is None or self.failed <= most:
            return
        failures = [*self._failures(), *more]
        self.monitor.log("stopped", failed=self.failed)
        self.folder.write_failures(failures_table(failures))
        table, first = self.folder.path / FAILURES, failures[0]
        raise TooManyFailures(
            f"stopped after {self.failed} failures, and max_failures is {most} (see {table}). The first: {first.id}: "
            f"{first.reason}"
        )

    def _failures(self) -> Iterator[Failure]:
        pq = needed("pyarrow.parquet", "a job")
        for name in sorted(self.folder.parts):
            if self.folder.parts[name].failed:
                yield from failures_of(pq.read_schema(self.folder.path / name))

    def finish(self) -> None:
        """Every part is there: write the failures and the whole manifest."""
        rows = sum(part.rows for part in self.folder.parts.values())
        if not self.folder.is_finished:
            self.folder.finish(failures_table(list(self._failures())), rows)
        manifest = self.folder.manifest
        self.monitor.log("finished", rows=rows, written=manifest["written"], failed=manifest["failed"])
