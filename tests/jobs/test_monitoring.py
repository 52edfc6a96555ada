"""What a run says of itself while it works."""

from __future__ import annotations

import json
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from made import text_model, text_table

from whyformer.errors import InputError, MissingExtra
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job
from whyformer.jobs.monitoring import Monitor


def test_the_log_and_the_figures_for_prometheus(tmp_path, free_port):
    port, seen = free_port(), []
    place = text_table(tmp_path / "data.jsonl", 20, bad=(1,))
    job = Job(model=text_model(tmp_path / "bert"), input=str(place), out=str(tmp_path / "out"), methods=("gae",), rows_per_part=8, metrics_port=port)

    def track(work, title, total):
        assert total == 3
        for one in work:
            yield one
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                seen.append(answer.read().decode())

    run_job(job, track=track)
    assert "whyformer_rows_total 8.0" in seen[0]
    assert "whyformer_rows_total 20.0" in seen[-1]
    assert "whyformer_failures_total 1.0" in seen[-1]
    assert "whyformer_rows_left 0.0" in seen[-1]
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log] == ["started", "part", "part", "part", "finished"]
    assert log[-1]["written"] == 19
    assert log[1]["seconds_left"] > 0
    assert {"file", "first", "rows", "written", "failed", "bytes", "sha256"} <= log[1].keys()
    with open(tmp_path / "out" / "log.jsonl", "a") as file:
        file.write('{"job": "')  # a kill cut off a line
    run_job(job)  # the port is free again, and the log goes on
    with open(tmp_path / "out" / "log.jsonl") as file:
        lines = file.readlines()
        assert len(lines) == 8
        assert [json.loads(line)["event"] for line in lines[-1:]] == ["finished"]


def test_a_port_that_is_taken_is_told(tmp_path, free_port):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as door:
        place = text_table(tmp_path / "data.jsonl", 2)
        job = Job(model=text_model(tmp_path / "bert"), input=str(place), out=str(tmp_path / "out"), metrics_port=door.getsockname()[1])
        with pytest.raises(InputError, match="metrics_port"):
            run_job(job)


def test_without_prometheus_the_extra_that_installs_it_is_named(tmp_path, free_port, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"whyformer\[serve\]"):
        Monitor(SimpleNamespace(path=tmp_path, job="0" * 16), free_port)
