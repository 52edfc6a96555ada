"""A row that crashes the process is skipped and reported, and all other rows are explained."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from job_builders import contents, exit_code, run_in_child, text_model, text_table
from typer.testing import CliRunner

import whyformer
from waiting import HANG
from whyformer.apps.cli import app
from whyformer.jobs import attempts as notes
from whyformer.jobs import batching, local
from whyformer.jobs.attempts import Attempts
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.local import OpenedJob, explain_opened, open_job
from whyformer.models import load
from zoo_evaluate import tiny_vit

KILLER = "zzz kills"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attempts")
    table = text_table(folder / "data.jsonl", 30)
    return open_job(Job(model=text_model(folder / "bert"), input=str(table), out=str(folder / "whole"), methods=("gae",), rows_per_part=12, batch_size=4, id_column="id"))


def with_out(opened: OpenedJob, out: Path, **changes) -> OpenedJob:
    return OpenedJob(Job(**{**vars(opened.job), "out": str(out), **changes}), opened.session, opened.source)


def count_crashes(work, most: int = 12) -> int:
    """Run ``work`` in child processes until one succeeds; return the number of crashed processes."""
    for deaths in range(most):
        status = exit_code(run_in_child(work))
        if status == 0:
            return deaths
        assert status in (-signal.SIGSEGV, -signal.SIGKILL, 7)
    raise AssertionError(f"{most} processes died")


def segfault() -> None:
    faulthandler.disable()  # pytest enables it, and it would print a traceback
    ctypes.string_at(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG)  # until the signal arrives


def crash_in_model(monkeypatch, rows: set[int], die=segfault) -> None:
    original = batching.Session._one_pass

    def patched_pass(session, reads):
        if rows & {item.row.index for item in reads}:
            die()
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", patched_pass)


def crash_in_reading(monkeypatch, rows: set[int], die=segfault) -> None:
    original = notes.read_one

    def read_one(row):
        if row.index in rows and "ProcessEnded" not in repr(row.read):
            die()
        return original(row)

    monkeypatch.setattr(notes, "read_one", read_one)
    monkeypatch.setattr(local, "read_one", read_one)


DEATHS = {"a segmentation fault": segfault, "os._exit": lambda: os._exit(7), "sys.exit": lambda: sys.exit(7), "a kill": kill}


@pytest.mark.part
@pytest.mark.parametrize("die", DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize("crash", [crash_in_model, crash_in_reading])
@pytest.mark.parametrize("row", [0, 17])
def test_third_run_skips_row_that_crashes_process(opened, tmp_path, monkeypatch, die, crash, row):
    if die is DEATHS["sys.exit"]:
        monkeypatch.setattr(os, "_exit", lambda status, leave=os._exit: leave(7 if status else 0))  # exit status of the child after an exception
    crash(monkeypatch, {row}, die)
    assert count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)) == 2
    maps = whyformer.read(tmp_path / "out")
    assert maps.table(["row"]).column("row").to_pylist() == [i for i in range(30) if i != row]
    (failure,) = maps.failures().to_pylist()
    assert (failure["row"], failure["id"], failure["kind"]) == (row, f"r{row}", "ProcessEnded")
    assert not list((tmp_path / "out").glob("*.attempts.jsonl"))


def test_other_rows_equal_those_of_job_where_row_failed(opened, tmp_path, monkeypatch):
    """Batches of the remaining rows equal those of a job in which the row could not be read."""
    crash_in_model(monkeypatch, {5})
    count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None))
    monkeypatch.undo()
    table = text_table(tmp_path / "bad.jsonl", 30, bad=(5,))
    bad = OpenedJob(with_out(opened, tmp_path / "bad", input=str(table)).job, opened.session, whyformer.jobs.sources.open_source(str(table), None, "id"))
    explain_opened(bad, None, lambda text: None)
    result, expected = (whyformer.read(tmp_path / name).table().to_pylist() for name in ("out", "bad"))
    assert result == expected


def test_several_crashing_rows_are_skipped_one_after_another(opened, tmp_path, monkeypatch):
    rows = {1, 2, 9, 25}
    crash_in_model(monkeypatch, rows)
    deaths = count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None))
    assert deaths <= 2 * len(rows)
    maps = whyformer.read(tmp_path / "out")
    assert {f["row"] for f in maps.failures().to_pylist()} == rows
    assert len(maps) == 30 - len(rows)


def test_crashing_row_in_batches_of_one_is_skipped(opened, tmp_path, monkeypatch):
    crash_in_model(monkeypatch, {3})
    assert count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out", batch_size=1), None, lambda text: None)) == 2
    assert [f["row"] for f in whyformer.read(tmp_path / "out").failures().to_pylist()] == [3]


def test_skipped_row_is_reported_in_messages_and_log(opened, tmp_path, monkeypatch):
    crash_in_model(monkeypatch, {3})

    def work() -> None:
        messages = []
        explain_opened(with_out(opened, tmp_path / "out"), None, messages.append)
        (tmp_path / "said").write_text("\n".join(messages))

    count_crashes(work)
    assert "row 3 (r3) is skipped" in (tmp_path / "said").read_text()
    events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [(e["row"], e["id"]) for e in events if e["event"] == "set aside"] == [(3, "r3")]


def test_skipped_row_is_retried_after_its_part_is_deleted(opened, tmp_path, monkeypatch):
    crash_in_model(monkeypatch, {3})
    count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None))
    monkeypatch.undo()
    (tmp_path / "out" / "part-000000.parquet").unlink()
    explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)
    explain_opened(with_out(opened, tmp_path / "whole"), None, lambda text: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_single_crash_skips_no_row(opened, tmp_path, monkeypatch):
    explain_opened(with_out(opened, tmp_path / "whole"), None, lambda text: None)
    marker = tmp_path / "died"

    def once() -> None:
        if not marker.exists():
            marker.touch()
            segfault()

    crash_in_model(monkeypatch, {14}, once)
    assert count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)) == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_keyboard_interrupts_skip_no_row(opened, tmp_path, monkeypatch):
    explain_opened(with_out(opened, tmp_path / "whole"), None, lambda text: None)
    original = batching.Session._one_pass

    def interrupted(session, reads):
        if 14 in {item.row.index for item in reads}:
            raise KeyboardInterrupt
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)
    monkeypatch.undo()
    explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_sigterm_exits_with_130_and_skips_no_row(opened, tmp_path, monkeypatch):
    command = ["run", "--model", opened.job.model, "--input", opened.job.input, "--methods", "gae", "--batch-size", "4", "--rows-per-part", "12", "--id-column", "id"]
    assert CliRunner().invoke(app, [*command, "--out", str(tmp_path / "whole")]).exit_code == 0
    crash_in_model(monkeypatch, {14}, lambda: os.kill(os.getpid(), signal.SIGTERM))
    for _ in range(3):
        assert CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")]).exit_code == 130
    monkeypatch.undo()
    assert CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")]).exit_code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_batch_that_crashes_process_is_halved_if_its_rows_do_not(opened, tmp_path, monkeypatch):
    """The case of an operating system that kills a process which runs out of memory."""
    original = batching.Session._one_pass

    def patched_pass(session, reads):
        if len(reads) > 2:
            kill()
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", patched_pass)
    assert count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None)) == 2
    maps = whyformer.read(tmp_path / "out")
    assert len(maps) == 30
    assert maps.manifest["batch_sizes"] == [[0, 2]]


def test_reading_that_crashes_with_threads_is_done_by_one_thread(opened, tmp_path, monkeypatch):
    """Rows are read by a library that is not thread-safe; no single row crashes the process."""
    original, busy, prefetch, several = notes.read_one, threading.Lock(), local.prefetch, threading.Event()

    def by_threads(items, read, workers, most):
        if workers > 1:
            several.set()
        return prefetch(items, read, workers, most)

    def read_one(row):
        if not busy.acquire(blocking=False):
            segfault()
        try:
            if several.is_set():
                time.sleep(HANG)  # until another thread enters and crashes the process
            return original(row)
        finally:
            busy.release()

    monkeypatch.setattr(local, "prefetch", by_threads)
    monkeypatch.setattr(notes, "read_one", read_one)
    deaths = count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out"), None, lambda text: None))
    assert deaths == 3  # once in each part
    assert len(whyformer.read(tmp_path / "out")) == 30


class Pictures(torch.utils.data.Dataset):
    """Random tensors; reading item ``killer`` ends the process."""

    def __init__(self, count: int, killer: int) -> None:
        self.count, self.killer = count, killer

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.killer:
            os._exit(7)
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("killer", [0, 7])
def test_data_set_item_that_ends_process_is_skipped(tmp_path, killer):
    model = tiny_vit()

    def work() -> None:
        whyformer.explain_many(model, Pictures(10, killer), "gae", out=tmp_path / "out", rows_per_part=4)

    assert count_crashes(work) == 2
    maps = whyformer.read(tmp_path / "out")
    assert maps.table(["row"]).column("row").to_pylist() == [i for i in range(10) if i != killer]
    assert [(f["row"], f["id"]) for f in maps.failures().to_pylist()] == [(killer, str(killer))]


def test_row_whose_overlay_crashes_process_is_skipped(opened, tmp_path, monkeypatch):
    original = local.write_overlays

    def draw(out, explained):
        if explained.row.index == 6:
            segfault()
        original(out, explained)

    monkeypatch.setattr(local, "write_overlays", draw)
    count_crashes(lambda: explain_opened(with_out(opened, tmp_path / "out", overlays=True), None, lambda text: None))
    maps = whyformer.read(tmp_path / "out")
    assert [f["row"] for f in maps.failures().to_pylist()] == [6]
    assert len(maps) == 29


# -- files of attempts -------------------------------------------------------------------------------------------------
def attempts_after_crash(path: Path, *steps, size: int = 4) -> Attempts:
    """The attempts read after a process recorded ``steps`` and died."""
    attempts = Attempts(path, "job", size)
    attempts.__enter__()
    for name, *arguments in steps:
        getattr(attempts, name)(*arguments)
    os.close(attempts._file)
    return Attempts(path, "job", size)


def test_suspects_are_tried_alone_and_then_skipped(tmp_path):
    path = tmp_path / "part-000000.attempts.jsonl"
    first = attempts_after_crash(path, ("work", range(8)), ("work", [2, 5]))
    assert (first.suspects, first.skipped, first.died) == ({2, 5}, set(), True)
    second = attempts_after_crash(path, ("alone", 2), ("survived", 2), ("alone", 5))
    assert (second.suspects, second.skipped) == (set(), {5})
    with second:
        pass
    assert Attempts(path, "job", 4).skipped == {5}


def test_truncated_attempt_is_ignored(tmp_path):
    path = tmp_path / "part-000000.attempts.jsonl"
    attempts_after_crash(path, ("work", [1]), ("work", []), ("work", [7]))
    path.write_bytes(path.read_bytes()[:-20])
    assert Attempts(path, "job", 4).suspects == set()
    after = attempts_after_crash(path, ("work", [3]))
    assert after.suspects == {3}


@pytest.mark.parametrize(("size", "expected"), [(2, [2, 2]), (3, [3, 3]), (4, [4, 4, 2]), (9, [9, 9, 4, 2])])
def test_rows_that_crash_only_in_batches_end_in_batches_of_one(tmp_path, size, expected):
    """The first process ends in a batch; the second tries its rows alone, and ends in the same batch."""
    path, sizes = tmp_path / "part-000000.attempts.jsonl", []
    state = Attempts(path, "job", size)
    while (now := state.max_size or size) > 1 and len(sizes) < 9:
        sizes.append(now)
        tries = [step for row in sorted(state.suspects) for step in (("alone", row), ("survived", row))]
        assert len(tries) == (2 * size if len(sizes) == 2 else 0)
        state = attempts_after_crash(path, *tries, ("work", list(range(now))), size=now)
    assert sizes == expected
    assert (state.max_size, state.skipped, state.suspects) == (1, set(), set())
    assert attempts_after_crash(path, ("work", [1]), size=1).skipped == {1}  # in a batch of one too


def test_stream_of_model_in_memory_records_no_attempts(opened):
    loaded = load(opened.job.model)
    assert len(list(whyformer.explain_many(loaded.model, ["a film"], "gae", processor=loaded.processor))) == 1


def test_ray_actor_resumes_from_recorded_attempts(opened, tmp_path, monkeypatch):
    """A restarted actor continues from the recorded attempts, without the driver."""
    from whyformer.jobs.engines import PartActor

    crash_in_model(monkeypatch, {17})
    job = with_out(opened, tmp_path / "out").job
    (tmp_path / "out").mkdir()

    def work() -> None:
        assert json.loads(PartActor(job)({"number": 1, "size": 4})["part"])["failed"] == 1

    assert count_crashes(work) == 2
    monkeypatch.undo()
    assert run_job(job).failures().to_pylist()[0]["row"] == 17
