"""A job on Ray writes the files of a local job, also when an actor is killed in the middle of a part."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_builders import contents, text_model, text_table

from waiting import HANG, wait_for
from whyformer.jobs.description import Job
from whyformer.jobs.engines import run_job

ray = pytest.importorskip("ray")
HERE = Path(__file__).parent

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.modules["torchvision"] = None  # the tests' torchvision does not fit torch
from whyformer.jobs import engines as engine
from whyformer.jobs.description import Job

class Dying(engine.PartActor):
    def __init__(self, job):
        sys.modules["torchvision"] = None
        super().__init__(job)

    # the first actor that reaches part 2 dies in the middle of it, once
    def __call__(self, item):
        from whyformer.jobs import batching
        if HOLD and item["number"] >= 10:
            time.sleep(HANG)  # the test kills the driver during this sleep
        marker = Path(OUT).parent / "died"
        if KILL and item["number"] == 2 and not marker.exists():
            original = batching.Session.explain
            def explain(session, *arguments):
                marker.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            batching.Session.explain = explain
        return super().__call__(item)

engine.PartActor = Dying
maps = engine.run_on_ray(Job(model=MODEL, input=INPUT, out=OUT, methods=("gae",), rows_per_part=6, batch_size=4, engine="ray", actors=ACTORS))
print("finished", len(maps))
"""


def job_script(model: str, table: Path, out: Path, *, kill: bool, actors: int, hold: bool = False) -> tuple[str, dict[str, str]]:
    """A script that runs the job, and its environment variables. ``hold``: the script blocks before part 10."""
    variables = {"MODEL": model, "INPUT": str(table), "OUT": str(out), "KILL": kill, "ACTORS": actors, "HOLD": hold, "HANG": HANG}
    script = "\n".join(f"{k} = {v!r}" for k, v in variables.items()) + SCRIPT
    path = os.pathsep.join([str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return script, {**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"}


def run_on_ray(model: str, table: Path, out: Path, *, kill: bool, actors: int) -> str:
    script, env = job_script(model, table, out, kill=kill, actors=actors)
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=HANG, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout


@pytest.mark.parametrize(
    "kill", [pytest.param(False, id="undisturbed", marks=pytest.mark.whole), pytest.param(True, id="an actor killed", marks=pytest.mark.slow)]
)
def test_ray_writes_same_files_as_local_engine(tmp_path, kill):
    model, table = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 30, bad=(4,))
    run_job(Job(model=model, input=str(table), out=str(tmp_path / "local"), methods=("gae",), rows_per_part=6, batch_size=4))
    output = run_on_ray(model, table, tmp_path / "ray", kill=kill, actors=2 if kill else 1)
    assert "finished 29" in output
    assert (tmp_path / "died").exists() == kill
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    log = [json.loads(line) for line in (tmp_path / "ray" / "log.jsonl").read_text().splitlines()]
    assert all(line["rows_per_second"] > 0 for line in log if line["event"] == "part")


@pytest.mark.slow
def test_job_resumes_after_whole_process_group_is_killed(tmp_path):
    """Actors may outlive the driver for a while and must not damage its files."""
    model, table = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 66, bad=(4,))
    options = {"methods": ("transformer_attribution", "gae"), "rows_per_part": 6, "batch_size": 4}
    run_job(Job(model=model, input=str(table), out=str(tmp_path / "local"), **options))
    held, script = (
        job_script(model, table, tmp_path / "ray", kill=False, actors=1, hold=hold)[0].replace('methods=("gae",)', 'methods=("transformer_attribution", "gae")')
        for hold in (True, False)
    )
    _, env = job_script(model, table, tmp_path / "ray", kill=False, actors=1)
    process = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, start_new_session=True)
    wait_for(lambda: len([*(tmp_path / "ray").glob("part-*.parquet")]) >= 2 or process.poll() is not None, "two parts")
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not json.loads((tmp_path / "ray" / "manifest.json").read_text())["complete"]
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=HANG, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


@pytest.mark.slow
def test_too_many_failures_stops_ray_job_immediately(tmp_path):
    """The driver raises while actors still run: it shuts the cluster down without waiting for them."""
    model, table = text_model(tmp_path / "bert"), text_table(tmp_path / "data.jsonl", 60, bad=(1,))
    script, env = job_script(model, table, tmp_path / "ray", kill=False, actors=1)
    script = script.replace("actors=ACTORS", "actors=ACTORS, max_failures=0")
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=HANG, check=False)
    assert completed.returncode == 1
    # not necessarily the last line: Ray's threads may print after it
    assert any(re.match(r"whyformer\S*TooManyFailures: ", line) for line in completed.stderr.splitlines()), completed.stderr[-3000:]
