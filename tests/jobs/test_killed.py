"""A job that is killed at any time, also during a write, ends with the files of an undisturbed job."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from job_builders import contents, exit_code, run_in_child, text_model, text_table

from whyformer.jobs import disk, lines
from whyformer.jobs.attempts import Attempts, notes_of
from whyformer.jobs.description import Job
from whyformer.jobs.local import OpenedJob, explain_opened, open_job


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An opened job, the contents of its undisturbed output, and the seconds that it takes."""
    folder = tmp_path_factory.mktemp("killed")
    table = text_table(folder / "data.jsonl", 60, bad=(3, 31, 32))
    options = {"methods": ("transformer_attribution", "gae"), "rows_per_part": 6, "batch_size": 4, "targets": "all"}
    opened = open_job(Job(model=text_model(folder / "bert"), input=str(table), out=str(folder / "whole"), **options))
    explain_opened(opened, None, lambda text: None)
    started = time.monotonic()
    explain_opened(with_out(opened, folder / "timed"), None, lambda text: None)
    return opened, contents(folder / "whole"), time.monotonic() - started


def with_out(opened: OpenedJob, out: Path) -> OpenedJob:
    return OpenedJob(Job(**{**vars(opened.job), "out": str(out)}), opened.session, opened.source)


def would_skip_a_row(out: Path) -> bool:
    """True if killing the process now would make the job skip a row, because an earlier process died in the same rows."""
    attempts = [Attempts(path, "", 4) for path in notes_of(out)]
    return any(a.skipped or a.max_size is not None for a in attempts)


def kill_in_write(out: Path, when: int) -> None:
    """Kill this process in its ``when``-th write, of which only half of the bytes reach the disk."""
    flush, append, count = disk.flush, os.write, 0

    def torn_file(path: Path) -> None:
        nonlocal count
        count += 1
        if count == when and path.is_file() and not would_skip_a_row(out):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)

    def torn_line(file: int, data) -> int:
        nonlocal count
        count += 1
        if count == when and not would_skip_a_row(out):
            append(file, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return append(file, data)

    disk.flush, lines.os.write = torn_file, torn_line


def run_despite_kills(opened: OpenedJob, generator: random.Random, out: Path, whole_job: float) -> int:
    """Run a job that takes ``whole_job`` seconds in child processes until one succeeds; return the number of kills.

    Each process is killed at a random time or in a random write.
    """
    kills = 0
    while True:
        tear = generator.choice([0, 0, generator.randint(1, 250)]) if kills < 12 else 0
        wait = generator.uniform(0.02, whole_job) if kills < 12 and not tear else None

        def work(tear=tear) -> None:
            if tear:
                kill_in_write(out, tear)
            explain_opened(with_out(opened, out), None, lambda text: None)

        child = run_in_child(work)
        if wait is not None:
            time.sleep(wait)
            os.kill(child, signal.SIGSTOP)
            state = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if state is not None and state.si_code == os.CLD_STOPPED:
                os.kill(child, signal.SIGCONT if would_skip_a_row(out) else signal.SIGKILL)
        status = exit_code(child)
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, (status, (out / "log.jsonl").read_text()[-500:])
        kills += 1
        generator.random()


def repeat_with_kills(reference, tmp_path: Path, least: int, enough: int, first: int = 0) -> int:
    """Kill jobs with at least ``least`` seeds, until there were ``enough`` kills. The number of kills at random times depends on
    the machine's speed, that of kills in a write does not."""
    opened, expected, whole_job = reference
    kills = 0
    for seed in range(first, first + 40 * least):
        out = tmp_path / str(seed)
        kills += run_despite_kills(opened, random.Random(seed), out, whole_job)
        result = contents(out)
        assert sorted(result) == sorted(expected), seed
        assert [name for name in expected if result[name] != expected[name]] == [], seed
        if kills >= enough and seed + 1 - first >= least:
            break
    return kills


@pytest.mark.slow
def test_job_killed_at_random_times_writes_same_files(reference, tmp_path):
    assert repeat_with_kills(reference, tmp_path, least=3, enough=4) >= 4


@pytest.mark.whole
def test_job_killed_at_random_times_writes_same_files_for_many_seeds(reference, tmp_path):
    assert repeat_with_kills(reference, tmp_path, least=35, enough=70, first=100) >= 70


@pytest.mark.parametrize(
    "when", [1, 5, 21, 89, *(pytest.param(when, marks=pytest.mark.whole) for when in (2, 3, 8, 13, 34, 55, 144))]
)
def test_write_interrupted_by_kill_is_repeated(reference, tmp_path, when):
    opened, expected, _ = reference

    def work() -> None:
        kill_in_write(tmp_path / "out", when)
        explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)

    status = exit_code(run_in_child(work))
    assert status in (0, -signal.SIGKILL)  # the write may be the flush of a folder, where nothing is killed
    explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)
    assert contents(tmp_path / "out") == expected


def test_every_row_occurs_exactly_once(reference):
    from whyformer.jobs.reading import read

    opened, _, _ = reference
    maps = read(opened.job.out)
    pairs = [(r["row"], r["method"], r["target"]) for r in maps.table(["row", "method", "target"]).to_pylist()]
    bad = [r["row"] for r in maps.failures().to_pylist()]
    assert len(set(pairs)) == len(pairs) == 57 * 4
    assert bad == [3, 31, 32]
    assert {row for row, _, _ in pairs} | set(bad) == set(range(60))
