"""Estimate the cost of a job before it runs: a trial on some of its rows, and checks of memory and disk space."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from whyformer.errors import InputError, import_optional
from whyformer.explanation.counts import amount, in_bytes
from whyformer.inputs.feed import device_of
from whyformer.jobs.batching import read_one
from whyformer.jobs.columns import Rows
from whyformer.jobs.description import Job
from whyformer.jobs.disk import write_parquet
from whyformer.jobs.local import open_job
from whyformer.jobs.ownership import job_files
from whyformer.jobs.trial import run_trial
from whyformer.models.memory import total_memory
from whyformer.models.structure import class_names

SAMPLE = 64


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a job.

    Attributes:
        rows: number of rows of the input; None if it is unknown.
        finished: number of rows that an earlier run finished.
        sampled: number of rows of the trial.
        failed: number of rows of the trial that failed.
        reason: reason of the first failure; None if none failed.
        explanations: mean number of explanations for each row of the trial.
        batch_size: batch size of the job.
        memory: memory that a batch holds, in bytes.
        available: available memory in bytes.
        seconds: expected duration for the remaining rows; None if their number is unknown.
        bytes: expected size of the output for the remaining rows; None if their number is unknown.
        disk: free disk space for the output in bytes.
    """

    rows: int | None
    finished: int
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
        """Reasons not to start the job."""
        messages = []
        if self.failed:
            messages.append(f"{self.failed} of {self.sampled} rows of the trial failed; the first: {self.reason}")
        if self.bytes is not None and self.bytes > self.disk:
            messages.append(f"the output needs {in_bytes(self.bytes)}, and {in_bytes(self.disk)} are free")
        if self.memory > self.available:
            memory, available = in_bytes(self.memory), in_bytes(self.available)
            messages.append(f"a batch needs {memory} of memory, and {available} are available: it will be halved")
        return messages

    def sentence(self) -> str:
        """Return the cost as a sentence."""
        rows = "an unknown number of rows" if self.rows is None else amount(self.rows, "row")
        done = f", {self.finished:,} of them finished" if self.finished else ""
        cost = ""
        if self.seconds is not None:
            cost = f": about {_duration(self.seconds)} and {in_bytes(self.bytes or 0)} of disk space"
        memory = f"{in_bytes(self.memory)} of {in_bytes(self.available)} of memory"
        noun = "explanation" if self.explanations == 1 else "explanations"
        details = f"{self.explanations:.3g} {noun} per row, batches of {self.batch_size}"
        return f"{rows}{done}{cost} ({details}, which use {memory})"


def estimate(job: Job) -> Cost:
    """Validate a job, and time the explanation of :data:`SAMPLE` rows, evenly spaced over the first thousand.

    Raises:
        WhyformerError: the job cannot run, or its folder contains another job.
    """
    opened = open_job(job)
    finished = sum(part.rows for part in job_files(Path(job.out), opened.facts).parts.values())
    spread = list(islice(opened.rows(0), 1000))
    sample = spread[:: max(1, len(spread) // SAMPLE)][:SAMPLE]
    reads = [read_one(row) for row in sample]
    if not reads:
        raise InputError(f"the input {opened.source.name} has no rows")
    trial = run_trial(opened.session, reads)
    size = trial.size if job.batch_size == "auto" else int(job.batch_size)
    rows, start = Rows(job.scores, class_names(opened.session.model)[0]), time.perf_counter()
    for explained in opened.session.explain_in_memory([read_one(row) for row in sample], size)[0]:
        rows.add(explained)
    seconds = time.perf_counter() - start
    table = rows.table()
    parquet = import_optional("pyarrow", "a job").MockOutputStream()  # counts the bytes
    write_parquet(table, parquet)
    rows_left = None if opened.count is None else max(0, opened.count - finished)
    place = device_of(opened.session.model)
    out = Path(job.out).resolve()
    reason = f"{rows.failures[0].id}: {rows.failures[0].reason}" if rows.failures else None
    return Cost(
        rows=opened.count, finished=finished, sampled=len(reads), failed=len({f.row for f in rows.failures}),
        reason=reason,
        explanations=table.num_rows / len(reads), batch_size=size, memory=trial.pass_bytes * size,
        available=total_memory(place),
        seconds=None if rows_left is None else seconds / len(reads) * rows_left,
        bytes=None if rows_left is None else parquet.size() * rows_left // len(reads),
        disk=shutil.disk_usage(next(path for path in (out, *out.parents) if path.exists())).free,
    )  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
