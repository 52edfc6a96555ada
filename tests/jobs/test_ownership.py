"""A job never changes foreign files, and recovers a lost manifest from the command and the parts."""

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
from job_builders import contents, exit_code, run_in_child, text_model, text_table

import whyformer
from whyformer.errors import InputError, LoadError, WhyformerError
from whyformer.jobs import local
from whyformer.jobs.costs import estimate
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.local import OpenedJob, explain_opened, open_job
from whyformer.jobs.manifest import manifest_bytes


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An opened job, the folder of its finished run, and the contents of that folder."""
    folder = tmp_path_factory.mktemp("owned")
    table = text_table(folder / "data.jsonl", 20, bad=(3,))
    job = Job(model=text_model(folder / "bert"), input=str(table), out=str(folder / "whole"), methods=("gae",), rows_per_part=6, batch_size=4)
    opened = open_job(job)
    explain_opened(opened, None, lambda text: None)
    return opened, folder / "whole", contents(folder / "whole")


def run(reference, out: Path, **changes) -> list[str]:
    """Run the job with output folder ``out``; return its messages."""
    opened, messages = reference[0], []
    explain_opened(OpenedJob(Job(**{**vars(opened.job), "out": str(out), **changes}), opened.session, opened.source), None, messages.append)
    return messages


def killed_after(reference, out: Path, parts: int) -> Path:
    """Run the job in a child process that is killed after ``parts`` parts; return its folder."""

    def work() -> None:
        original, parts_written = local.Run.add, []

        def add(instance, part, warned) -> None:
            original(instance, part, warned)
            parts_written.append(part)
            if len(parts_written) == parts:
                os.kill(os.getpid(), signal.SIGKILL)

        local.Run.add = add
        run(reference, out)

    assert exit_code(run_in_child(work)) == -signal.SIGKILL
    return out


def write_foreign_table(path: Path) -> None:
    pq.write_table(pa.table({"mine": [1, 2, 3]}), path)


FOREIGN = {
    "a text": lambda out: (out / "thesis.txt").write_text("x"),
    "a table under a part's name": lambda out: write_foreign_table(out / "part-000000.parquet"),
    "a table under the name of a part that no job has": lambda out: write_foreign_table(out / "part-123456.parquet"),
    "no table under a part's name": lambda out: (out / "part-000009.parquet").write_text("x"),
    "a log": lambda out: (out / "log.jsonl").write_text('{"event": "mine"}\n'),
    "a log of text": lambda out: (out / "log.jsonl").write_text("mine\n"),
    "a journal": lambda out: (out / "journal.jsonl").write_text('{"day": 1}\n'),
    "failures": lambda out: write_foreign_table(out / "failures.parquet"),
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


def snapshot(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Contents and modification times of a folder's files; its own time also shows a temporary file that was removed."""
    listed = [folder, *sorted(folder.rglob("*"))]
    return {p.relative_to(folder).as_posix(): (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns) for p in listed}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_folder_is_refused_and_unchanged(reference, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    FOREIGN[name](out)
    before = snapshot(out)
    for work in (lambda: run(reference, out), lambda: estimate(Job(**{**vars(reference[0].job), "out": str(out)}))):
        with pytest.raises(InputError, match="another folder"):
            work()
        assert snapshot(out) == before


@pytest.mark.part
@pytest.mark.parametrize("name", [name for name in FOREIGN if name not in ("a log of text",)])
@pytest.mark.parametrize("finished", [False, True], ids=["killed", "finished"])
def test_foreign_file_in_job_folder_is_refused_and_folder_unchanged(reference, tmp_path, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(reference[1], out)
    else:
        killed_after(reference, out, 2)
    for path in out.glob("*part-00000[01].parquet"):
        if "under a part's name" in name:
            path.unlink()
    FOREIGN[name](out)
    before = snapshot(out)
    with pytest.raises(InputError, match="another folder"):
        run(reference, out)
    assert snapshot(out) == before


def test_unlisted_unreadable_part_is_refused_until_deleted(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    (out / "part-000003.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(InputError, match="delete"):
        run(reference, out)
    (out / "part-000003.parquet").unlink()
    run(reference, out)
    assert contents(out) == reference[2]


def test_system_files_are_ignored(reference, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".git").mkdir()
    for name in (".DS_Store", "._part-000000.parquet", "Thumbs.db", "desktop.ini", ".nfs0001", ".git/config"):
        (out / name).write_bytes(b"system")
    run(reference, out)
    run(reference, out)
    result = contents(out)
    assert {k: v for k, v in result.items() if k in reference[2]} == reference[2]
    assert {result[name] for name in result.keys() - reference[2].keys()} == {b"system"}


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
def test_lost_or_damaged_manifest_is_rebuilt_from_command_and_parts(reference, tmp_path, monkeypatch, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(reference[1], out)
    else:
        killed_after(reference, out, 2)
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("part-*.parquet")}
    LOST[name](out / "manifest.json")
    with pytest.raises(LoadError, match="run the job"):
        whyformer.read(out)
    computed, original = [], local.make_part
    monkeypatch.setattr(local, "make_part", lambda opened, number, *rest: computed.append(number) or original(opened, number, *rest))
    run(reference, out)
    assert contents(out) == reference[2]
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert computed == ([] if finished else [2, 3])


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"name": "my app"}', '{"job": {}, "model": {}}'])
@pytest.mark.parametrize("parts", [True, False])
def test_json_of_another_kind_is_no_damaged_manifest(reference, tmp_path, text, parts):
    """Reading says what running a job requires: that the file be deleted, or that another folder be used."""
    out = tmp_path / "out"
    if parts:
        shutil.copytree(reference[1], out)
    else:
        out.mkdir()
    (out / "manifest.json").write_text(text)
    with pytest.raises(LoadError, match=f"is not the manifest of a job: {'delete it, and run the job' if parts else 'read another folder'}"):
        whyformer.read(out)
    with pytest.raises(InputError, match="another folder"):
        run(reference, out)
    assert (out / "manifest.json").read_text() == text
    if parts:
        (out / "manifest.json").unlink()
        run(reference, out)
        assert contents(out) == reference[2]


def test_job_without_manifest_and_log_resumes_from_parts(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    for name in ("manifest.json", "log.jsonl", ".lock"):
        (out / name).unlink()
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("part-*.parquet")}
    assert len(times) >= 2
    run(reference, out)
    assert contents(out) == reference[2]
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times


@pytest.mark.parametrize("lost", ["deleted", "brackets"])
def test_finished_job_without_manifest_is_not_overwritten_by_another_job(reference, tmp_path, lost):
    out = tmp_path / "out"
    shutil.copytree(reference[1], out)
    LOST[lost](out / "manifest.json")
    before = snapshot(out)
    with pytest.raises(InputError, match="of another job"):
        run(reference, out, methods=("rollout",))
    assert snapshot(out) == before


STOPPED = {
    "refused": ({"methods": ("vit_cx",)}, InputError),
    "too many failures": ({"max_failures": 0, "rows_per_part": 20}, InputError),
    "killed": ({"methods": ("rollout",)}, None),
}


@pytest.mark.parametrize("name", STOPPED)
def test_folder_of_a_job_that_wrote_no_part_is_taken(reference, tmp_path, name):
    out, (changed, error) = tmp_path / "out", STOPPED[name]
    opened = open_job(Job(**{**vars(reference[0].job), "out": str(out), **changed}))
    if error is None:
        def work() -> None:
            local.make_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            explain_opened(opened, None, lambda text: None)

        assert exit_code(run_in_child(work)) == -signal.SIGKILL
    else:
        with pytest.raises(error):
            explain_opened(opened, None, lambda text: None)
    assert (out / "manifest.json").is_file() and not list(out.glob("part-*.parquet"))
    run(reference, out)
    assert contents(out) == reference[2]


@pytest.mark.parametrize("kept", ["part-000000.parquet", "overlays", "thesis.txt"])
def test_folder_of_another_job_with_results_or_other_files_is_refused(reference, tmp_path, kept):
    out = tmp_path / "out"
    shutil.copytree(reference[1], out)
    manifest = json.loads((out / "manifest.json").read_text())
    for path in out.glob("*.*"):
        if path.name != kept:
            path.unlink()
    started = {k: manifest[k] for k in ("format", "id", "job", "model", "source", "versions")} | {"complete": False}
    (out / "manifest.json").write_bytes(manifest_bytes(started))
    if kept == "overlays":
        (out / kept).mkdir()
        (out / kept / "00000000-0-gae-good.html").write_text("x")
    elif kept == "thesis.txt":
        (out / kept).write_text("x")
    before = snapshot(out)
    with pytest.raises(InputError, match="another folder"):
        run(reference, out, methods=("rollout",), scores="float16")
    assert snapshot(out) == before


def test_parts_of_another_job_raise(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    run(reference, tmp_path / "other", methods=("rollout",))
    for name in ("part-000001.parquet", "part-000003.parquet"):
        original = (out / name).read_bytes() if (out / name).exists() else None
        shutil.copy(tmp_path / "other" / name, out / name)
        before = snapshot(out)
        with pytest.raises(InputError, match="of another job"):
            run(reference, out)
        assert snapshot(out) == before
        (out / name).unlink() if original is None else (out / name).write_bytes(original)
    run(reference, out)
    assert contents(out) == reference[2]


def test_batch_sizes_are_recovered_from_parts(reference, tmp_path, monkeypatch):
    """Batches are halved in the middle of the job, and then its manifest is lost."""
    computed, original = [], local.make_part

    def small(opened, number, size, *rest):
        computed.append((number, size))
        return None if number >= 2 and size > 2 else original(opened, number, size, *rest)

    monkeypatch.setattr(local, "make_part", small)
    run(reference, tmp_path / "out")
    expected = contents(tmp_path / "out")
    assert json.loads(expected["manifest.json"])["batch_sizes"] == [[0, 4], [2, 2]]
    for name in ("manifest.json", "part-000003.parquet"):
        (tmp_path / "out" / name).unlink()
    run(reference, tmp_path / "out")
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("log", ["there", "deleted"])
@pytest.mark.parametrize("manifest", ["there", "deleted", "cut off"])
@pytest.mark.parametrize("damage", ["cut off", "changed", "empty", "gone"])
def test_damaged_part_is_recomputed_or_named_in_error(reference, tmp_path, log, manifest, damage):
    """The user must delete a file that neither its content nor a manifest or log identifies as the job's."""
    out = tmp_path / "out"
    shutil.copytree(reference[1], out)
    part = out / "part-000001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    {"cut off": lambda: os.truncate(part, 900), "changed": lambda: part.write_bytes(content), "empty": lambda: os.truncate(part, 0), "gone": part.unlink}[damage]()
    if log == "deleted":
        (out / "log.jsonl").unlink()
    if manifest != "there":
        LOST[manifest](out / "manifest.json")
        if damage in ("cut off", "empty") and log == "deleted":
            before = snapshot(out)
            with pytest.raises(InputError, match=part.name):
                run(reference, out)
            assert snapshot(out) == before
            part.unlink()
    run(reference, out)
    assert contents(out) == reference[2]


@pytest.mark.parametrize("name", ["a text", "a table under the name of a part that no job has", "a passing file", "a folder", "a picture among overlays"])
@pytest.mark.parametrize("finished", [False, True], ids=["killed", "finished"])
def test_job_resumes_after_foreign_file_is_moved(reference, tmp_path, name, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(reference[1], out)
    else:
        killed_after(reference, out, 2)
    before = set(out.iterdir())
    FOREIGN[name](out)
    with pytest.raises(InputError, match="another folder"):
        run(reference, out)
    for path in set(out.iterdir()) - before:
        shutil.move(path, tmp_path / path.name)
    run(reference, out)
    assert contents(out) == reference[2]


@pytest.mark.parametrize("manifest", ["there", "deleted"])
def test_partial_files_of_killed_run_are_removed(reference, tmp_path, manifest):
    out, whole = tmp_path / "out", tmp_path / "whole"
    run(reference, whole, overlays=True)
    shutil.copytree(whole, out)
    job_id = json.loads((out / "manifest.json").read_text())["id"]
    (out / f"part-000001.parquet.{job_id}.123.partial").write_bytes(b"PAR1")
    (out / f"manifest.json.{job_id}.123.partial").write_bytes(b"{")
    (out / "overlays" / ".00000000-0-gae-good.html-123-0a0b0c0d.partial").write_bytes(b"<html>")
    (out / "part-000002.parquet").unlink()
    if manifest == "deleted":
        (out / "manifest.json").unlink()
    run(reference, out, overlays=True)
    assert contents(out) == contents(whole)


def test_unfinished_job_is_readable_and_estimate_writes_nothing(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    before = snapshot(out)
    assert estimate(Job(**{**vars(reference[0].job), "out": str(out)})).finished in (12, 18)
    maps = whyformer.read(out)
    assert (maps.complete, maps.failures().num_rows) == (False, 1)
    assert snapshot(out) == before
    run(reference, tmp_path / "other", methods=("rollout",))
    shutil.copy(tmp_path / "other" / "part-000003.parquet", out / "part-000003.parquet")
    assert {e.method for e in whyformer.read(out)} == {"gae"}


def test_rerun_after_random_damage_restores_files_or_raises(reference, tmp_path):
    """Files of a finished and of a killed job are changed, truncated or deleted."""
    generator, recovered = random.Random(0), 0
    half = killed_after(reference, tmp_path / "half", 2)
    for number in range(60):
        out = tmp_path / str(number)
        shutil.copytree(half if number % 2 else reference[1], out)
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
        before = snapshot(out)
        try:
            run(reference, out)
        except WhyformerError:
            assert snapshot(out) == before
            continue
        assert contents(out) == reference[2]
        recovered += 1
    assert recovered >= 50


def test_changed_digit_in_log_is_detected(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    log = (out / "log.jsonl").read_text()
    entry = next(line for line in log.splitlines() if '"written": ' in line)
    digit = re.search('"written": ([0-9])', entry)
    (out / "log.jsonl").write_text(log.replace(entry, entry[: digit.start(1)] + str(int(digit[1]) ^ 1) + entry[digit.end(1) :]))
    run(reference, out)
    assert contents(out) == reference[2]


def test_options_without_effect_on_files_may_change(reference, tmp_path):
    out = killed_after(reference, tmp_path / "out", 2)
    (out / "manifest.json").unlink()
    run(reference, out, workers=1, max_failures=5)
    assert contents(out) == reference[2]


def test_explain_many_refuses_foreign_folder(tmp_path):
    write_foreign_table(tmp_path / "part-000000.parquet")
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="another folder"):
        whyformer.explain_many("bundled:sst2", ["A film."], "gae", out=tmp_path)
    assert snapshot(tmp_path) == before
    with pytest.raises(LoadError):
        whyformer.read(tmp_path)


def test_overlays_and_failures_of_stopped_job_are_recognized(reference, tmp_path):
    options = {"overlays": True, "max_failures": 0}
    with pytest.raises(InputError, match="max_failures"):
        run(reference, tmp_path / "out", **options)
    assert {"failures.parquet", "overlays"} <= {p.name for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "manifest.json").unlink()
    run(reference, tmp_path / "out", overlays=True)
    run(reference, tmp_path / "whole", overlays=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    run_job(Job(**{**vars(reference[0].job), "out": str(tmp_path / "whole"), "overlays": True}))
