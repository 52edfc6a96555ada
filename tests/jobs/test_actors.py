"""What actors write and say of it, without Ray: the driver's part of a job on a cluster."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from made import contents, text_model, text_table

from whyformer.jobs import ray as engine
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.local import Run, open_job
from whyformer.jobs.ray import PartActor, noted


def test_what_actors_say_of_a_part_becomes_its_entry(tmp_path):
    """The step from an actor's columns to a ``Part``, without Ray."""
    model, place = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 20, bad=(4,))
    job = Job(model=model, input=str(place), out=str(tmp_path / "ray"), methods=("gae",), rows_per_part=6, batch_size=4)
    local = run_job(Job(**{**vars(job), "out": str(tmp_path / "local")}))
    with Run(open_job(job), lambda text: None) as run:
        columns = PartActor(job)({"number": np.arange(5), "size": np.full(5, 4)})
        table = pa.table(columns)  # as Ray carries them from one process to another
        assert noted(run, table.to_pylist()) is None
        assert [run.folder.parts[part.file] for part in local.parts] == local.parts
        assert len(local.parts) == len(run.folder.parts) == 4
        run.finish()
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_parts_beside_one_that_did_not_fit_into_memory_are_kept(tmp_path, monkeypatch):
    model, place = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 12)
    job = Job(model=model, input=str(place), out=str(tmp_path / "out"), methods=("gae",), rows_per_part=6, batch_size=4)
    with Run(open_job(job), lambda text: None) as run:
        maker = PartActor(job)
        first = maker({"number": np.array([0]), "size": np.array([4])})
        monkeypatch.setattr(engine, "make_part", lambda *given: None)
        second = maker({"number": np.array([1]), "size": np.array([4])})
        records = [*pa.table(second).to_pylist(), *pa.table(first).to_pylist()]
        assert noted(run, records) == 1
        assert list(run.folder.parts) == ["part-000000.parquet"]
        run.halve(1)
        assert list(run.todo(None)) == [1]
