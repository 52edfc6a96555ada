"""The log and the Prometheus metrics of a run."""

from __future__ import annotations

import json
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from job_builders import text_model, text_table

from whyformer.errors import InputError, MissingExtra
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.monitoring import Monitor


def test_log_and_prometheus_metrics_of_a_run(tmp_path, free_port):
    port, metrics = free_port(), []
    table = text_table(tmp_path / "data.jsonl", 20, bad=(1,))
    job = Job(model=text_model(tmp_path / "bert"), input=str(table), out=str(tmp_path / "out"), methods=("gae",), rows_per_part=8, metrics_port=port)

    def track(work, title, total):
        assert total == 3
        for item in work:
            yield item
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                metrics.append(response.read().decode())

    run_job(job, track=track)
    assert "whyformer_rows_total 8.0" in metrics[0]
    assert "whyformer_rows_total 20.0" in metrics[-1]
    assert "whyformer_failures_total 1.0" in metrics[-1]
    assert "whyformer_rows_left 0.0" in metrics[-1]
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log] == ["started", "part", "part", "part", "finished"]
    assert log[-1]["written"] == 19
    assert log[1]["seconds_left"] > 0
    assert {"file", "first", "rows", "written", "failed", "bytes", "sha256"} <= log[1].keys()
    with open(tmp_path / "out" / "log.jsonl", "a") as file:
        file.write('{"job": "')  # a line truncated by a kill
    run_job(job)  # the port is free again, and the log is continued
    with open(tmp_path / "out" / "log.jsonl") as file:
        lines = file.readlines()
        assert len(lines) == 8
        assert [json.loads(line)["event"] for line in lines[-1:]] == ["finished"]


def test_occupied_metrics_port_raises(tmp_path, free_port):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        table = text_table(tmp_path / "data.jsonl", 2)
        job = Job(model=text_model(tmp_path / "bert"), input=str(table), out=str(tmp_path / "out"), metrics_port=server.getsockname()[1])
        with pytest.raises(InputError, match="metrics_port"):
            run_job(job)


def test_missing_prometheus_error_names_extra(tmp_path, free_port, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"whyformer\[serve\]"):
        Monitor(SimpleNamespace(path=tmp_path, job="0" * 16), free_port)
