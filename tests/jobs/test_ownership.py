"""Nothing that a job did not write is touched, and what is lost of its manifest is read off the command and the parts."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import contents, ended, in_a_process, text_model, text_table

import whyformer
from whyformer.errors import InputError, LoadError, WhyformerError
from whyformer.jobs import lines, local
from whyformer.jobs.costs import estimate
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.local import OpenedJob, explain_opened, open_job


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A model and an input, opened once, and the files of a finished job."""
    place = tmp_path_factory.mktemp("owned")
    table = text_table(place / "data.jsonl", 20, bad=(3,))
    job = Job(model=text_model(place / "bert"), input=str(table), out=str(place / "whole"), methods=("gae",), rows_per_part=6, batch_size=4)
    opened = open_job(job)
    explain_opened(opened, None, lambda text: None)
    return opened, place / "whole", contents(place / "whole")


def run(ready, out: Path, **changes) -> list[str]:
    """Run the job into a folder; what it says."""
    opened, said = ready[0], []
    explain_opened(OpenedJob(Job(**{**vars(opened.job), "out": str(out), **changes}), opened.session, opened.source), None, said.append)
    return said


def stopped(ready, out: Path, parts: int) -> Path:
    """The folder of a job that was killed after so many parts."""

    def work() -> None:
        original, noted = local.Run.written, []

        def written(one, part) -> None:
            original(one, part)
            noted.append(part)
            if len(noted) == parts:
                os.kill(os.getpid(), signal.SIGKILL)

        local.Run.written = written
        run(ready, out)

    assert ended(in_a_process(work)) == -signal.SIGKILL
    return out


def a_table(path: Path) -> None:
    pq.write_table(pa.table({"mine": [1, 2, 3]}), path)


FOREIGN = {
    "a text": lambda out: (out / "thesis.txt").write_text("x"),
    "a table under a part's name": lambda out: a_table(out / "part-000000.parquet"),
    "a table under the name of a part that no job has": lambda out: a_table(out / "part-123456.parquet"),
    "no table under a part's name": lambda out: (out / "part-000009.parquet").write_text("x"),
    "a log": lambda out: (out / "log.jsonl").write_text('{"event": "mine"}\n'),
    "a log of text": lambda out: (out / "log.jsonl").write_text("mine\n"),
    "a journal": lambda out: (out / "journal.jsonl").write_text('{"day": 1}\n'),
    "failures": lambda out: a_table(out / "failures.parquet"),
    "a manifest": lambda out: (out / "manifest.json").write_text('{"name": "my app"}'),
    "a passing file": lambda out: (out / "thesis.partial").write_text("x"),
    "a passing file of a manifest": lambda out: (out / "manifest.json.partial").write_text("x"),
    "a passing file of a part": lambda out: (out / "part-000007.parquet.77.partial").write_text("x"),
    "notes": lambda out: (out / "part-000007.attempts.jsonl").write_text('{"day": 1}\n'),
    "a folder under the name of the failures": lambda out: ((out / "failures.parquet").unlink(missing_ok=True), (out / "failures.parquet").mkdir()),
    "a folder": lambda out: (out / "figures").mkdir(),
    "a folder under a part's name": lambda out: (out / "part-000001.parquet").mkdir(),
    "a picture among overlays": lambda out: ((out / "overlays").mkdir(), (out / "overlays" / "me.png").write_bytes(b"x")),
}


def everything(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """All that is in a folder, with the times of its files; of the folder, so that no passing file came and went."""
    listed = [folder, *sorted(folder.rglob("*"))]
    return {p.relative_to(folder).as_posix(): (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns) for p in listed}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_something_else_is_refused_and_not_touched(ready, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    FOREIGN[name](out)
    before = everything(out)
    for work in (lambda: run(ready, out), lambda: estimate(Job(**{**vars(ready[0].job), "out": str(out)}))):
        with pytest.raises(InputError, match="another folder"):
            work()
        assert everything(out) == before


@pytest.mark.part
@pytest.mark.parametrize("name", [name for name in FOREIGN if name not in ("a log of text",)])
@pytest.mark.parametrize("finished", [False, True], ids=["killed", "finished"])
def test_a_foreign_file_in_the_folder_of_a_job_is_refused_and_nothing_is_touched(ready, tmp_path, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(ready[1], out)
    else:
        stopped(ready, out, 2)
    for one in out.glob("*part-00000[01].parquet"):
        if "under a part's name" in name:
            one.unlink()
    FOREIGN[name](out)
    before = everything(out)
    with pytest.raises(InputError, match="another folder"):
        run(ready, out)
    assert everything(out) == before


def test_an_unreadable_file_that_no_list_names_is_refused_until_it_is_deleted(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    (out / "part-000003.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(InputError, match="delete"):
        run(ready, out)
    (out / "part-000003.parquet").unlink()
    run(ready, out)
    assert contents(out) == ready[2]


def test_files_of_the_system_are_let_be(ready, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".git").mkdir()
    for name in (".DS_Store", "._part-000000.parquet", "Thumbs.db", "desktop.ini", ".nfs0001", ".git/config"):
        (out / name).write_bytes(b"system")
    run(ready, out)
    run(ready, out)
    found = contents(out)
    assert {k: v for k, v in found.items() if k in ready[2]} == ready[2]
    assert {found[name] for name in found.keys() - ready[2].keys()} == {b"system"}


LOST = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "another word": lambda path: path.write_bytes(path.read_bytes().replace(b'"good"', b'"best"')),
    "brackets": lambda path: path.write_text("[" * 100_000),
    "no text": lambda path: path.write_bytes(b"\xff\x00"),
    "no UTF-8": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut off early": lambda path: path.write_bytes(path.read_bytes()[:5]),
}


@pytest.mark.part
@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("finished", [False, True], ids=["killed", "finished"])
def test_a_manifest_that_is_lost_or_damaged_is_made_of_the_command_and_the_parts(ready, tmp_path, monkeypatch, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(ready[1], out)
    else:
        stopped(ready, out, 2)
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("part-*.parquet")}
    LOST[name](out / "manifest.json")
    with pytest.raises(LoadError, match="run the job"):
        whyformer.read(out)
    made, original = [], local.make_part
    monkeypatch.setattr(local, "make_part", lambda opened, number, *rest: made.append(number) or original(opened, number, *rest))
    run(ready, out)
    assert contents(out) == ready[2]
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert made == ([] if finished else [2, 3])


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"name": "my app"}', '{"job": {}, "model": {}}'])
@pytest.mark.parametrize("parts", [True, False])
def test_json_of_another_kind_is_no_damaged_manifest(ready, tmp_path, text, parts):
    """Reading says what running a job requires: that the file be deleted, or that another folder be used."""
    out = tmp_path / "out"
    if parts:
        shutil.copytree(ready[1], out)
    else:
        out.mkdir()
    (out / "manifest.json").write_text(text)
    with pytest.raises(LoadError, match=f"is not the manifest of a job: {'delete it, and run the job' if parts else 'read another folder'}"):
        whyformer.read(out)
    with pytest.raises(InputError, match="another folder"):
        run(ready, out)
    assert (out / "manifest.json").read_text() == text
    if parts:
        (out / "manifest.json").unlink()
        run(ready, out)
        assert contents(out) == ready[2]


def test_a_job_whose_manifest_and_log_are_lost_goes_on_from_its_parts(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    for name in ("manifest.json", "log.jsonl", ".lock"):
        (out / name).unlink()
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("part-*.parquet")}
    assert len(kept) >= 2
    run(ready, out)
    assert contents(out) == ready[2]
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept


def test_the_journal_of_an_earlier_version_is_removed(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    job = json.loads((out / "manifest.json").read_text())["id"]
    part = {"job": job, "file": "part-000000.parquet", "first": 0, "rows": 6, "written": 5, "failed": 1, "bytes": 1, "sha256": "0"}
    (out / "journal.jsonl").write_bytes(lines.encoded({"job": job}) + lines.encoded(part) + b'{"job": "' + job.encode())
    assert len(whyformer.read(out)) == 11
    run(ready, out)
    assert contents(out) == ready[2]


@pytest.mark.parametrize("lost", ["deleted", "brackets"])
def test_a_finished_job_whose_manifest_is_lost_is_not_overwritten_by_another_one(ready, tmp_path, lost):
    out = tmp_path / "out"
    shutil.copytree(ready[1], out)
    LOST[lost](out / "manifest.json")
    before = everything(out)
    with pytest.raises(InputError, match="of another job"):
        run(ready, out, methods=("rollout",))
    assert everything(out) == before


def test_parts_of_another_job_are_refused(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    run(ready, tmp_path / "other", methods=("rollout",))
    for name in ("part-000001.parquet", "part-000003.parquet"):
        kept = (out / name).read_bytes() if (out / name).exists() else None
        shutil.copy(tmp_path / "other" / name, out / name)
        before = everything(out)
        with pytest.raises(InputError, match="of another job"):
            run(ready, out)
        assert everything(out) == before
        (out / name).unlink() if kept is None else (out / name).write_bytes(kept)
    run(ready, out)
    assert contents(out) == ready[2]


def test_the_size_of_batches_is_read_off_the_parts(ready, tmp_path, monkeypatch):
    """After the batches were halved in the middle of a job, and its manifest was lost."""
    made, original = [], local.make_part

    def small(opened, number, size, *rest):
        made.append((number, size))
        return None if number >= 2 and size > 2 else original(opened, number, size, *rest)

    monkeypatch.setattr(local, "make_part", small)
    run(ready, tmp_path / "out")
    whole = contents(tmp_path / "out")
    assert json.loads(whole["manifest.json"])["batch_sizes"] == [[0, 4], [2, 2]]
    for name in ("manifest.json", "part-000003.parquet"):
        (tmp_path / "out" / name).unlink()
    run(ready, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("log", ["there", "deleted"])
@pytest.mark.parametrize("manifest", ["there", "deleted", "cut off"])
@pytest.mark.parametrize("how", ["cut off", "changed", "empty", "gone"])
def test_a_damaged_part_is_made_again_or_its_file_is_named(ready, tmp_path, log, manifest, how):
    """Where neither the part nor a manifest or log says that the file is the job's, it is the user's to delete."""
    out = tmp_path / "out"
    shutil.copytree(ready[1], out)
    part = out / "part-000001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    {"cut off": lambda: os.truncate(part, 900), "changed": lambda: part.write_bytes(content), "empty": lambda: os.truncate(part, 0), "gone": part.unlink}[how]()
    if log == "deleted":
        (out / "log.jsonl").unlink()
    if manifest != "there":
        LOST[manifest](out / "manifest.json")
        if how in ("cut off", "empty") and log == "deleted":
            before = everything(out)
            with pytest.raises(InputError, match=part.name):
                run(ready, out)
            assert everything(out) == before
            part.unlink()
    run(ready, out)
    assert contents(out) == ready[2]


@pytest.mark.parametrize("name", ["a text", "a table under the name of a part that no job has", "a passing file", "a folder", "a picture among overlays"])
@pytest.mark.parametrize("finished", [False, True], ids=["killed", "finished"])
def test_a_job_goes_on_when_the_foreign_file_is_moved_away(ready, tmp_path, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(ready[1], out)
    else:
        stopped(ready, out, 2)
    there = set(out.iterdir())
    FOREIGN[name](out)
    with pytest.raises(InputError, match="another folder"):
        run(ready, out)
    for path in set(out.iterdir()) - there:
        shutil.move(path, tmp_path / path.name)
    run(ready, out)
    assert contents(out) == ready[2]


@pytest.mark.parametrize("manifest", ["there", "deleted"])
def test_files_that_a_killed_run_left_are_taken_away(ready, tmp_path, manifest):
    out, whole = tmp_path / "out", tmp_path / "whole"
    run(ready, whole, overlays=True)
    shutil.copytree(whole, out)
    own = json.loads((out / "manifest.json").read_text())["id"]
    (out / f"part-000001.parquet.{own}.123.partial").write_bytes(b"PAR1")
    (out / f"manifest.json.{own}.123.partial").write_bytes(b"{")
    (out / "overlays" / ".00000000-0-gae-good.html-123-0a0b0c0d.partial").write_bytes(b"<html>")
    (out / "part-000002.parquet").unlink()
    if manifest == "deleted":
        (out / "manifest.json").unlink()
    run(ready, out, overlays=True)
    assert contents(out) == contents(whole)


def test_an_unfinished_job_is_read_and_a_trial_run_writes_nothing(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    before = everything(out)
    assert estimate(Job(**{**vars(ready[0].job), "out": str(out)})).there in (12, 18)
    maps = whyformer.read(out)
    assert (maps.complete, maps.failures().num_rows) == (False, 1)
    assert everything(out) == before
    run(ready, tmp_path / "other", methods=("rollout",))
    shutil.copy(tmp_path / "other" / "part-000003.parquet", out / "part-000003.parquet")
    assert {e.method for e in whyformer.read(out)} == {"gae"}


def test_whatever_is_damaged_a_rerun_ends_with_the_same_files_or_says_why_not(ready, tmp_path):
    """Bytes of any files changed or cut off, files deleted: of a finished job, and of one that was killed."""
    generator, again = random.Random(0), 0
    half = stopped(ready, tmp_path / "half", 2)
    for number in range(60):
        out = tmp_path / str(number)
        shutil.copytree(half if number % 2 else ready[1], out)
        files = sorted(p for p in out.iterdir() if p.name != ".lock")
        for path in generator.sample(files, generator.randint(1, 2)):
            content = bytearray(path.read_bytes())
            kind = generator.choice(("delete", "cut", "change"))
            if kind == "delete":
                path.unlink()
            elif kind == "cut":
                path.write_bytes(content[: generator.randrange(len(content))])
            else:
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
                path.write_bytes(content)
        before = everything(out)
        try:
            run(ready, out)
        except WhyformerError:
            assert everything(out) == before
            continue
        assert contents(out) == ready[2]
        again += 1
    assert again >= 50


def test_a_changed_digit_in_the_log_is_noticed(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    log = (out / "log.jsonl").read_text()
    entry = next(line for line in log.splitlines() if '"written": ' in line)
    digit = re.search('"written": ([0-9])', entry)
    (out / "log.jsonl").write_text(log.replace(entry, entry[: digit.start(1)] + str(int(digit[1]) ^ 1) + entry[digit.end(1) :]))
    run(ready, out)
    assert contents(out) == ready[2]


def test_options_that_do_not_change_the_files_may_change(ready, tmp_path):
    out = stopped(ready, tmp_path / "out", 2)
    (out / "manifest.json").unlink()
    run(ready, out, workers=1, max_failures=5)
    assert contents(out) == ready[2]


def test_explain_many_refuses_a_folder_of_something_else(tmp_path):
    a_table(tmp_path / "part-000000.parquet")
    before = everything(tmp_path)
    with pytest.raises(InputError, match="another folder"):
        whyformer.explain_many("bundled:sst2", ["A film."], "gae", out=tmp_path)
    assert everything(tmp_path) == before
    with pytest.raises(LoadError):
        whyformer.read(tmp_path)


def test_overlays_and_failures_of_a_stopped_job_are_its_own(ready, tmp_path):
    options = {"overlays": True, "max_failures": 0}
    with pytest.raises(InputError, match="max_failures"):
        run(ready, tmp_path / "out", **options)
    assert {"failures.parquet", "overlays"} <= {p.name for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "manifest.json").unlink()
    run(ready, tmp_path / "out", overlays=True)
    run(ready, tmp_path / "whole", overlays=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    run_job(Job(**{**vars(ready[0].job), "out": str(tmp_path / "whole"), "overlays": True}))
