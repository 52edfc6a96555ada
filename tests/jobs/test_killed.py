"""A job that is killed, also while it writes, ends with the very files of one that was not, whenever that happens."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from made import contents, ended, in_a_process, text_model, text_table

from whyformer.jobs import disk, lines
from whyformer.jobs.attempts import Attempts, notes_of
from whyformer.jobs.description import Job
from whyformer.jobs.local import OpenedJob, explain_opened, open_job


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """The model, loaded once, and the input; and what a job that nothing happens to writes."""
    place = tmp_path_factory.mktemp("killed")
    table = text_table(place / "data.jsonl", 60, bad=(3, 31, 32))
    options = {"methods": ("transformer_attribution", "gae"), "rows_per_part": 6, "batch_size": 4, "targets": "all"}
    opened = open_job(Job(model=text_model(place / "bert"), input=str(table), out=str(place / "whole"), **options))
    explain_opened(opened, None, lambda text: None)
    started = time.monotonic()
    explain_opened(into(opened, place / "timed"), None, lambda text: None)
    return opened, contents(place / "whole"), time.monotonic() - started


def into(opened: OpenedJob, out: Path) -> OpenedJob:
    return OpenedJob(Job(**{**vars(opened.job), "out": str(out)}), opened.session, opened.source)


def costs_a_row(out: Path) -> bool:
    """Whether a process that dies now was in the middle of the same rows as one before: such rows are set aside."""
    found = [Attempts(path, "", 4) for path in notes_of(out)]
    return any(one.skipped or one.most is not None for one in found)


def tearing(out: Path, when: int) -> None:
    """Kill this process in the middle of its ``when``-th write: half of the bytes are on the disk."""
    flush, append, count = disk.flush, os.write, 0

    def torn_file(path: Path) -> None:
        nonlocal count
        count += 1
        if count == when and path.is_file() and not costs_a_row(out):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)

    def torn_line(file: int, data) -> int:
        nonlocal count
        count += 1
        if count == when and not costs_a_row(out):
            append(file, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return append(file, data)

    disk.flush, lines.os.write = torn_file, torn_line


def killed(opened: OpenedJob, generator: random.Random, out: Path, whole_job: float) -> int:
    """Run the job, which takes ``whole_job`` seconds, in a process that is killed until one ends; how often it was.

    Each is killed at some moment of that time or in some write.
    """
    kills = 0
    while True:
        tear = generator.choice([0, 0, generator.randint(1, 250)]) if kills < 12 else 0
        wait = generator.uniform(0.02, whole_job) if kills < 12 and not tear else None

        def work(tear=tear) -> None:
            if tear:
                tearing(out, tear)
            explain_opened(into(opened, out), None, lambda text: None)

        child = in_a_process(work)
        if wait is not None:
            time.sleep(wait)
            os.kill(child, signal.SIGSTOP)
            seen = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if seen is not None and seen.si_code == os.CLD_STOPPED:
                os.kill(child, signal.SIGCONT if costs_a_row(out) else signal.SIGKILL)
        status = ended(child)
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, (status, (out / "log.jsonl").read_text()[-500:])
        kills += 1
        generator.random()


def rounds(ready, tmp_path: Path, least: int, enough: int, first: int = 0) -> int:
    """Kill jobs of ``least`` seeds, and of more until there were ``enough`` kills: that depends on the machine's speed, and on
    whether it changes; kills in a write do not."""
    opened, whole, whole_job = ready
    kills = 0
    for seed in range(first, first + 40 * least):
        out = tmp_path / str(seed)
        kills += killed(opened, random.Random(seed), out, whole_job)
        found = contents(out)
        assert sorted(found) == sorted(whole), seed
        assert [name for name in whole if found[name] != whole[name]] == [], seed
        if kills >= enough and seed + 1 - first >= least:
            break
    return kills


@pytest.mark.slow
def test_a_job_killed_at_any_moment_ends_with_the_same_files(ready, tmp_path):
    assert rounds(ready, tmp_path, least=3, enough=4) >= 4


@pytest.mark.whole
def test_a_job_killed_at_any_moment_ends_with_the_same_files_in_many_rounds(ready, tmp_path):
    assert rounds(ready, tmp_path, least=35, enough=70, first=100) >= 70


@pytest.mark.parametrize(
    "when", [1, 5, 21, 89, *(pytest.param(when, marks=pytest.mark.whole) for when in (2, 3, 8, 13, 34, 55, 144))]
)
def test_a_write_that_a_kill_tears_is_made_again(ready, tmp_path, when):
    opened, whole, _ = ready

    def work() -> None:
        tearing(tmp_path / "out", when)
        explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)

    status = ended(in_a_process(work))
    assert status in (0, -signal.SIGKILL)  # a folder is flushed too, and not torn
    explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)
    assert contents(tmp_path / "out") == whole


def test_every_row_is_there_exactly_once(ready):
    from whyformer.jobs.reading import read

    opened, _, _ = ready
    maps = read(opened.job.out)
    pairs = [(r["row"], r["method"], r["target"]) for r in maps.table(["row", "method", "target"]).to_pylist()]
    bad = [r["row"] for r in maps.failures().to_pylist()]
    assert len(set(pairs)) == len(pairs) == 57 * 4
    assert bad == [3, 31, 32]
    assert {row for row, _, _ in pairs} | set(bad) == set(range(60))
