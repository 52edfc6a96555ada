"""A row that ends the process is set aside by name, and the job goes on; rows beside it lose nothing."""

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
from made import contents, ended, in_a_process, text_model, text_table
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
    place = tmp_path_factory.mktemp("attempts")
    table = text_table(place / "data.jsonl", 30)
    return open_job(Job(model=text_model(place / "bert"), input=str(table), out=str(place / "whole"), methods=("gae",), rows_per_part=12, batch_size=4, id_column="id"))


def into(opened: OpenedJob, out: Path, **changes) -> OpenedJob:
    return OpenedJob(Job(**{**vars(opened.job), "out": str(out), **changes}), opened.session, opened.source)


def runs_until_the_end(work, most: int = 12) -> int:
    """How many processes die before one ends well."""
    for deaths in range(most):
        status = ended(in_a_process(work))
        if status == 0:
            return deaths
        assert status in (-signal.SIGSEGV, -signal.SIGKILL, 7)
    raise AssertionError(f"{most} processes died")


def segfault() -> None:
    faulthandler.disable()  # pytest's: it would print where
    ctypes.string_at(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG)  # until it comes


def dying_in_the_model(monkeypatch, rows: set[int], die=segfault) -> None:
    original = batching.Session._one_pass

    def together(session, reads):
        if rows & {one.row.index for one in reads}:
            die()
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", together)


def dying_in_reading(monkeypatch, rows: set[int], die=segfault) -> None:
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
@pytest.mark.parametrize("where", [dying_in_the_model, dying_in_reading])
@pytest.mark.parametrize("row", [0, 17])
def test_the_third_run_goes_on_without_a_row_that_ends_the_process(opened, tmp_path, monkeypatch, die, where, row):
    if die is DEATHS["sys.exit"]:
        monkeypatch.setattr(os, "_exit", lambda status, leave=os._exit: leave(7 if status else 0))  # of the child, after an exception
    where(monkeypatch, {row}, die)
    assert runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)) == 2
    maps = whyformer.read(tmp_path / "out")
    assert maps.table(["row"]).column("row").to_pylist() == [i for i in range(30) if i != row]
    (failure,) = maps.failures().to_pylist()
    assert (failure["row"], failure["id"], failure["kind"]) == (row, f"r{row}", "ProcessEnded")
    assert not list((tmp_path / "out").glob("*.attempts.jsonl"))


def test_rows_beside_it_are_as_in_a_job_where_it_failed(opened, tmp_path, monkeypatch):
    """Batches of the rows that are left are those of a job in which the row could not be read."""
    dying_in_the_model(monkeypatch, {5})
    runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None))
    monkeypatch.undo()
    table = text_table(tmp_path / "bad.jsonl", 30, bad=(5,))
    bad = OpenedJob(into(opened, tmp_path / "bad", input=str(table)).job, opened.session, whyformer.jobs.sources.open_source(str(table), None, "id"))
    explain_opened(bad, None, lambda text: None)
    found, wanted = (whyformer.read(tmp_path / name).table().to_pylist() for name in ("out", "bad"))
    assert found == wanted


def test_several_rows_are_set_aside_one_after_the_other(opened, tmp_path, monkeypatch):
    rows = {1, 2, 9, 25}
    dying_in_the_model(monkeypatch, rows)
    deaths = runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None))
    assert deaths <= 2 * len(rows)
    maps = whyformer.read(tmp_path / "out")
    assert {f["row"] for f in maps.failures().to_pylist()} == rows
    assert len(maps) == 30 - len(rows)


def test_batches_of_one_row(opened, tmp_path, monkeypatch):
    dying_in_the_model(monkeypatch, {3})
    assert runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out", batch_size=1), None, lambda text: None)) == 2
    assert [f["row"] for f in whyformer.read(tmp_path / "out").failures().to_pylist()] == [3]


def test_the_job_says_which_row_it_set_aside(opened, tmp_path, monkeypatch):
    dying_in_the_model(monkeypatch, {3})

    def work() -> None:
        said = []
        explain_opened(into(opened, tmp_path / "out"), None, said.append)
        (tmp_path / "said").write_text("\n".join(said))

    runs_until_the_end(work)
    assert "row 3 (r3) is skipped" in (tmp_path / "said").read_text()
    events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [(e["row"], e["id"]) for e in events if e["event"] == "set aside"] == [(3, "r3")]


def test_a_row_that_was_set_aside_is_tried_again_when_its_part_is_deleted(opened, tmp_path, monkeypatch):
    dying_in_the_model(monkeypatch, {3})
    runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None))
    monkeypatch.undo()
    (tmp_path / "out" / "part-000000.parquet").unlink()
    explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)
    explain_opened(into(opened, tmp_path / "whole"), None, lambda text: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_process_that_is_killed_once_in_a_row_costs_no_row(opened, tmp_path, monkeypatch):
    explain_opened(into(opened, tmp_path / "whole"), None, lambda text: None)
    marker = tmp_path / "died"

    def once() -> None:
        if not marker.exists():
            marker.touch()
            segfault()

    dying_in_the_model(monkeypatch, {14}, once)
    assert runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)) == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_errors_and_interrupts_do_not_count(opened, tmp_path, monkeypatch):
    explain_opened(into(opened, tmp_path / "whole"), None, lambda text: None)
    original = batching.Session._one_pass

    def interrupted(session, reads):
        if 14 in {one.row.index for one in reads}:
            raise KeyboardInterrupt
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)
    monkeypatch.undo()
    explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_sigterm_ends_the_command_as_ctrl_c_does_and_does_not_count(opened, tmp_path, monkeypatch):
    words = ["run", "--model", opened.job.model, "--input", opened.job.input, "--methods", "gae", "--batch-size", "4", "--rows-per-part", "12", "--id-column", "id"]
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "whole")]).exit_code == 0
    dying_in_the_model(monkeypatch, {14}, lambda: os.kill(os.getpid(), signal.SIGTERM))
    for _ in range(3):
        assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 130
    monkeypatch.undo()
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_batch_that_ends_the_process_though_none_of_its_rows_does_is_halved(opened, tmp_path, monkeypatch):
    """As the system does that kills a process which takes all memory."""
    original = batching.Session._one_pass

    def together(session, reads):
        if len(reads) > 2:
            kill()
        return original(session, reads)

    monkeypatch.setattr(batching.Session, "_one_pass", together)
    assert runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None)) == 2
    maps = whyformer.read(tmp_path / "out")
    assert len(maps) == 30
    assert maps.manifest["batch_sizes"] == [[0, 2]]


def test_reading_that_dies_in_several_threads_is_done_by_one(opened, tmp_path, monkeypatch):
    """A library that reads files and is not safe for threads: no row alone ends the process."""
    original, busy, ahead, several = notes.read_one, threading.Lock(), local.ahead, threading.Event()

    def by_threads(items, read, workers, most):
        if workers > 1:
            several.set()
        return ahead(items, read, workers, most)

    def read_one(row):
        if not busy.acquire(blocking=False):
            segfault()
        try:
            if several.is_set():
                time.sleep(HANG)  # until another thread comes, which ends the process
            return original(row)
        finally:
            busy.release()

    monkeypatch.setattr(local, "ahead", by_threads)
    monkeypatch.setattr(notes, "read_one", read_one)
    deaths = runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out"), None, lambda text: None))
    assert deaths == 3  # once in each part
    assert len(whyformer.read(tmp_path / "out")) == 30


class Pictures(torch.utils.data.Dataset):
    """Of tensors; one item ends the process when it is asked for."""

    def __init__(self, count: int, killer: int) -> None:
        self.count, self.killer = count, killer

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.killer:
            os._exit(7)
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("killer", [0, 7])
def test_an_item_that_ends_the_process_when_it_is_taken_from_the_data(tmp_path, killer):
    model = tiny_vit()

    def work() -> None:
        whyformer.explain_many(model, Pictures(10, killer), "gae", out=tmp_path / "out", rows_per_part=4)

    assert runs_until_the_end(work) == 2
    maps = whyformer.read(tmp_path / "out")
    assert maps.table(["row"]).column("row").to_pylist() == [i for i in range(10) if i != killer]
    assert [(f["row"], f["id"]) for f in maps.failures().to_pylist()] == [(killer, str(killer))]


def test_drawing_that_ends_the_process(opened, tmp_path, monkeypatch):
    original = local.write_overlays

    def draw(out, explained):
        if explained.row.index == 6:
            segfault()
        original(out, explained)

    monkeypatch.setattr(local, "write_overlays", draw)
    runs_until_the_end(lambda: explain_opened(into(opened, tmp_path / "out", overlays=True), None, lambda text: None))
    maps = whyformer.read(tmp_path / "out")
    assert [f["row"] for f in maps.failures().to_pylist()] == [6]
    assert len(maps) == 29


# -- the notes ---------------------------------------------------------------------------------------------------------
def died(path: Path, *steps, size: int = 4) -> Attempts:
    """What is known after a process died that had noted these steps."""
    one = Attempts(path, "job", size)
    one.__enter__()
    for name, *given in steps:
        getattr(one, name)(*given)
    os.close(one._file)
    return Attempts(path, "job", size)


def test_what_is_begun_and_not_ended_is_tried_alone_and_then_set_aside(tmp_path):
    path = tmp_path / "part-000000.attempts.jsonl"
    first = died(path, ("work", range(8)), ("work", [2, 5]))
    assert (first.suspects, first.skipped, first.died) == ({2, 5}, set(), True)
    second = died(path, ("alone", 2), ("survived", 2), ("alone", 5))
    assert (second.suspects, second.skipped) == (set(), {5})
    with second:
        pass
    assert Attempts(path, "job", 4).skipped == {5}


def test_a_note_that_a_kill_cut_off_was_not_begun(tmp_path):
    path = tmp_path / "part-000000.attempts.jsonl"
    died(path, ("work", [1]), ("work", []), ("work", [7]))
    path.write_bytes(path.read_bytes()[:-20])
    assert Attempts(path, "job", 4).suspects == set()
    after = died(path, ("work", [3]))
    assert after.suspects == {3}


def test_a_row_that_dies_in_company_only_is_set_aside_in_the_end(tmp_path):
    path, deaths = tmp_path / "part-000000.attempts.jsonl", 0
    state = Attempts(path, "job", 4)
    while 1 not in state.skipped:
        size = state.most or 4
        tries = [step for row in sorted(state.suspects) for step in (("alone", row), ("survived", row))]
        state = died(path, *tries, ("work", list(range(size))), size=size)
        deaths += 1
        assert deaths < 8
        if size == 1:
            break


def test_the_stream_of_a_model_in_memory_needs_no_notes(opened):
    loaded = load(opened.job.model)
    assert len(list(whyformer.explain_many(loaded.model, ["a film"], "gae", processor=loaded.processor))) == 1


def test_ray_actors_note_what_they_begin(opened, tmp_path, monkeypatch):
    """The driver's part is not needed: an actor that is made again goes on from its notes."""
    import numpy as np

    from whyformer.jobs.ray import PartActor

    dying_in_the_model(monkeypatch, {17})
    job = into(opened, tmp_path / "out").job
    (tmp_path / "out").mkdir()

    def work() -> None:
        found = PartActor(job)({"number": np.array([1]), "size": np.array([4])})
        assert json.loads(found["part"][0])["failed"] == 1

    assert runs_until_the_end(work) == 2
    monkeypatch.undo()
    assert run_job(job).failures().to_pylist()[0]["row"] == 17
