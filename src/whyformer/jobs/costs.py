"""What a job will cost, before it is run: a trial on some of its rows, and whether memory and disk suffice."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

from whyformer.errors import InputError
from whyformer.explanation.counts import amount, in_bytes
from whyformer.inputs.feed import place_of
from whyformer.jobs.batching import OutOfMemory, Read, read_one
from whyformer.jobs.columns import Rows
from whyformer.jobs.description import Job
from whyformer.jobs.disk import write_parquet
from whyformer.jobs.fitting import tried
from whyformer.jobs.local import Opened, open_job
from whyformer.jobs.ownership import holdings
from whyformer.models.memory import total_memory
from whyformer.models.structure import class_names

SAMPLE = 64


@dataclass(frozen=True)
class Cost:
    """What is known of a job before it runs.

    Attributes:
        rows: of the input, None where it does not say; there: of them that an earlier run has done.
        explanations: for each row that could be read, as on trial.
        failed: rows of the trial that failed; sampled: rows of the trial.
        batch_size: that it would take; memory: bytes that a batch keeps; available: bytes that there are.
        seconds, bytes: for all rows that are still to do, None where the number of rows is unknown.
        disk: bytes that are free where it would write.
    """

    rows: int | None
    there: int
    sampled: int
    failed: int
    reason: str | None
    explanations: float
    batch_size: int
    memory: int
    available: int
    seconds: float | None
    bytes: int | None
    disk: int

    @property
    def warnings(self) -> list[str]:
        """What speaks against starting it."""
        said = []
        if self.failed:
            said.append(f"{self.failed} of {self.sampled} rows on trial failed; the first: {self.reason}")
        if self.bytes is not None and self.bytes > self.disk:
            said.append(f"it would write {in_bytes(self.bytes)}, and {in_bytes(self.disk)} are free")
        if self.memory > self.available:
            said.append(
                f"a batch keeps {in_bytes(self.memory)}, and there are {in_bytes(self.available)}: it will be halved"
            )
        return said

    def sentence(self) -> str:
        """The cost in words."""
        rows = "an unknown number of rows" if self.rows is None else amount(self.rows, "row")
        done = f", {self.there:,} of them done" if self.there else ""
        long = (
            ""
            if self.seconds is None
            else f": about {_duration(self.seconds)} and {in_bytes(self.bytes or 0)} on the disk"
        )
        each = f"{self.explanations:.3g} explanations a row, batches of {self.batch_size}"
        return (
            f"{rows}{done}{long} ({each}, which keep {in_bytes(self.memory)} of {in_bytes(self.available)} of memory)"
        )


def estimate(job: Job) -> Cost:
    """Check a job, and time the explanations of :data:`SAMPLE` rows, spread over the first thousand.

    Raises:
        WhyformerError: the job would be refused.
    """
    opened = open_job(job)
    there = _there(opened)
    spread = list(islice(opened.rows(0), 1000))
    chosen = spread[:: max(1, len(spread) // SAMPLE)][:SAMPLE]
    reads = [read_one(row) for row in chosen]
    if not reads:
        raise InputError(f"the input {opened.source.name} has no rows")
    trial = tried(opened.session, reads).checked()
    size = trial.size if job.batch_size == "auto" else int(job.batch_size)
    seconds, rows = _timed(opened, reads, size)
    table = rows.table()
    written = BytesIO()
    write_parquet(table, written)
    part = written.tell()
    left = None if opened.count is None else max(0, opened.count - there)
    place = place_of(opened.session.model)
    reason = f"{rows.failures[0].id}: {rows.failures[0].reason}" if rows.failures else None
    return Cost(
        rows=opened.count, there=there, sampled=len(reads), failed=len({f.row for f in rows.failures}), reason=reason,
        explanations=table.num_rows / len(reads), batch_size=size, memory=trial.kept * size,
        available=total_memory(place),
        seconds=None if left is None else seconds / len(reads) * left,
        bytes=None if left is None else part * left // len(reads),
        disk=shutil.disk_usage(_existing(Path(job.out))).free,
    )  # fmt: skip


def _there(opened: Opened) -> int:
    """Rows that an earlier run has done; a folder that holds another job is refused."""
    there = holdings(Path(opened.job.out), opened.facts)
    return sum(part.rows for part in there.parts.values())


def _timed(opened: Opened, reads: list[Read], size: int) -> tuple[float, Rows]:
    """(seconds, rows) of reading the rows once more and explaining them in batches."""
    while True:
        rows = Rows(opened.job.scores, class_names(opened.session.model)[0])
        start = time.perf_counter()
        try:
            for explained in opened.session.explain([read_one(one.row) for one in reads], size):
                rows.add(explained)
        except OutOfMemory:
            size = max(1, size // 2)
            continue
        return time.perf_counter() - start, rows


def _existing(path: Path) -> Path:
    return next(p for p in (path.resolve(), *path.resolve().parents) if p.exists())


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
