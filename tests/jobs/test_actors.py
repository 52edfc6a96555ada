"""Actors and the driver of a job on a cluster, without Ray."""

from __future__ import annotations

import json

import pyarrow as pa
from job_builders import contents, text_model, text_table

from whyformer.jobs import engines as engine
from whyformer.jobs.description import Job
from whyformer.jobs.engines import PartActor, record_parts, run_job
from whyformer.jobs.local import Run, open_job


def test_actor_results_are_recorded_as_parts(tmp_path):
    """The conversion of an actor's record to a ``Part``."""
    model, table_path = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 20, bad=(4,))
    job = Job(model=model, input=str(table_path), out=str(tmp_path / "ray"), methods=("gae",), rows_per_part=6, batch_size=4)
    local = run_job(Job(**{**vars(job), "out": str(tmp_path / "local")}))
    with Run(open_job(job), lambda text: None) as run:
        actor = PartActor(job)
        # a table is the format in which Ray transfers records between processes
        table = pa.Table.from_pylist([actor({"number": number, "size": 4}) for number in range(5)])
        assert record_parts(run, table.to_pylist()) is None
        assert [run.folder.parts[part.file] for part in local.parts] == local.parts
        assert len(local.parts) == len(run.folder.parts) == 4
        run.finish()
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_other_parts_are_kept_when_one_does_not_fit_into_memory(tmp_path, monkeypatch):
    model, table = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 12)
    job = Job(model=model, input=str(table), out=str(tmp_path / "out"), methods=("gae",), rows_per_part=6, batch_size=4)
    with Run(open_job(job), lambda text: None) as run:
        actor = PartActor(job)
        first = actor({"number": 0, "size": 4})
        monkeypatch.setattr(engine, "make_part", lambda *args: None)
        second = actor({"number": 1, "size": 4})
        assert record_parts(run, [second, first]) == 1
        assert list(run.folder.parts) == ["part-000000.parquet"]
        run.halve(1)
        assert list(run.todo(None)) == [1]


def test_row_skipped_by_an_actor_is_reported(tmp_path):
    model, table = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 6)
    job = Job(model=model, input=str(table), out=str(tmp_path / "out"), methods=("gae",), batch_size=4)
    messages: list[str] = []
    with Run(open_job(job), messages.append) as run:
        run.opened.attempts(0, 4).__enter__().alone(3)  # the process ends while it works on this row
        record_parts(run, [PartActor(job)({"number": 0, "size": 4})])
        run.finish()
    assert any("row 3" in message for message in messages)
    log = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    assert [line["row"] for line in log if line["event"] == "set aside"] == [3]
