"""Actors and the driver of a job on a cluster, without Ray."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from job_builders import contents, text_model, text_table

from whyformer.jobs import engines as engine
from whyformer.jobs.description import Job
from whyformer.jobs.engines import PartActor, record_parts, run_job
from whyformer.jobs.local import Run, open_job


def test_actor_results_are_recorded_as_parts(tmp_path):
    """The conversion of an actor's columns to a ``Part``."""
    model, table_path = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 20, bad=(4,))
    job = Job(model=model, input=str(table_path), out=str(tmp_path / "ray"), methods=("gae",), rows_per_part=6, batch_size=4)
    local = run_job(Job(**{**vars(job), "out": str(tmp_path / "local")}))
    with Run(open_job(job), lambda text: None) as run:
        columns = PartActor(job)({"number": np.arange(5), "size": np.full(5, 4)})
        table = pa.table(columns)  # the format in which Ray transfers them between processes
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
        first = actor({"number": np.array([0]), "size": np.array([4])})
        monkeypatch.setattr(engine, "make_part", lambda *args: None)
        second = actor({"number": np.array([1]), "size": np.array([4])})
        records = [*pa.table(second).to_pylist(), *pa.table(first).to_pylist()]
        assert record_parts(run, records) == 1
        assert list(run.folder.parts) == ["part-000000.parquet"]
        run.halve(1)
        assert list(run.todo(None)) == [1]
