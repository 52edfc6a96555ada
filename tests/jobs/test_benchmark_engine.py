"""A benchmark on the engine of jobs writes the same files for any number of workers and after kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_builders import exit_code, picture_model, run_in_child, text_model
from typer.testing import CliRunner

from waiting import HANG
from whyformer.apps.cli import app
from whyformer.benchmarks import BENCHMARKS
from whyformer.benchmarks.runner import run_benchmark
from whyformer.errors import InputError, LoadError
from whyformer.jobs import lines
from zoo_evaluate import picture_folder, sentence_file

METHODS = "transformer_attribution,gae,rollout"
TABLES = ("table.md", "table.csv", "report.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    picture_model(folder / "vit")
    picture_folder(folder / "data", count=7)
    return folder


def run(inputs: Path, out: Path, **more):
    return run_benchmark("segmentation", str(inputs / "vit"), inputs / "data", out, methods=METHODS, samples_per_batch=2, **more)


def read_files(out: Path, names: tuple[str, ...] = (*TABLES, "records.jsonl")) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def expected_files(inputs: Path) -> dict[str, bytes]:
    run(inputs, inputs / "whole")
    return read_files(inputs / "whole")


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_number_of_workers_does_not_change_files(inputs, expected_files, workers, tmp_path):
    run(inputs, tmp_path / "out", workers=workers)
    assert read_files(tmp_path / "out") == expected_files


def kill_in_write(when: int) -> None:
    """Kill this process in its ``when``-th write of records, after a number of bytes that depends on ``when``."""
    append, count = os.write, 0

    def torn(file: int, data) -> int:
        nonlocal count
        count += 1
        if count == when:
            append(file, bytes(data)[: random.Random(when).randrange(len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
        return append(file, data)

    lines.os.write = torn


@pytest.mark.parametrize("when", [1, 2, 4])
def test_write_interrupted_by_kill_is_remeasured_in_same_pieces(inputs, expected_files, when, tmp_path):
    def work() -> None:
        kill_in_write(when)
        run(inputs, tmp_path / "out")

    assert exit_code(run_in_child(work)) == -signal.SIGKILL
    assert not (tmp_path / "out" / "table.md").exists()
    resumed = run(inputs, tmp_path / "out")
    assert resumed.resumed == (when - 1) * 2 * 5  # three methods, floor and ceiling
    assert read_files(tmp_path / "out") == expected_files


@pytest.mark.slow
def test_benchmark_killed_at_random_times_writes_same_files(inputs, expected_files, tmp_path):
    started = time.monotonic()
    run(inputs, tmp_path / "timed")
    duration, kills = time.monotonic() - started, 0
    for seed in range(120):  # until there were enough kills; how many there are depends on the machine's speed
        generator, out = random.Random(seed), tmp_path / str(seed)
        for attempt in range(20):
            tear = generator.choice([0, generator.randint(1, 4)]) if attempt < 6 else 0

            def work(tear=tear, out=out) -> None:
                if tear:
                    kill_in_write(tear)
                run(inputs, out)

            child = run_in_child(work)
            if not tear and attempt < 6:
                time.sleep(generator.uniform(0.02, duration))
                os.kill(child, signal.SIGKILL)
            status = exit_code(child)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            kills += 1
        assert read_files(out) == expected_files, seed
        if kills >= 12 and seed >= 11:
            break
    assert kills >= 12


def test_only_the_piece_of_a_damaged_record_is_remeasured(inputs, expected_files, tmp_path):
    run(inputs, tmp_path / "out")
    path, messages = tmp_path / "out" / "records.jsonl", []
    path.write_bytes(expected_files["records.jsonl"].replace(b'"values": {"', b'"values": {"x', 1))
    resumed = run(inputs, tmp_path / "out", say=messages.append)
    assert resumed.measured == 2 * 5
    assert messages[0].startswith("1 damaged line of records.jsonl ignored: these records, and records measured with them,")
    assert read_files(tmp_path / "out", TABLES) == {name: expected_files[name] for name in TABLES}
    assert sorted(path.read_bytes().splitlines()) == sorted(expected_files["records.jsonl"].splitlines())


def test_unreadable_sample_is_reported_and_others_are_scored(inputs, tmp_path):
    data = picture_folder(tmp_path / "data", count=5)
    broken = data / "images" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    results = {}
    for workers in (1, 3):
        out = tmp_path / str(workers)
        report = run_benchmark("perturbation", str(inputs / "vit"), data, out, methods=METHODS, samples_per_batch=2, workers=workers).report
        assert report.counts["gae"] == {"scored": 4, "failed": 1, "constant": 0, "nan": 0}
        results[workers] = read_files(out)
    assert results[1] == results[3]
    failed = [r for r in map(json.loads, (out / "records.jsonl").read_text().splitlines()) if "error" in r]
    assert {r["sample"] for r in failed} == {failed[0]["sample"]}
    assert failed[0]["sample"].endswith(broken.name)


def test_failure_of_one_method_on_one_sample_affects_nothing_else(inputs, tmp_path, monkeypatch):
    from dataclasses import replace

    row = BENCHMARKS["segmentation"]

    def measure(batch, configurations):
        for sample, c, values in row.measure(batch, configurations):
            if c.label == "gae" and sample.endswith("3.png"):
                raise RuntimeError("not this one")
            yield sample, c, values

    monkeypatch.setitem(BENCHMARKS, "segmentation", replace(row, measure=measure))
    report = run(inputs, tmp_path / "out").report
    assert report.counts["gae"] == {"scored": 6, "failed": 1, "constant": 0, "nan": 0}
    assert report.counts["rollout"]["scored"] == 7


def test_full_disk_raises_load_error_and_rerun_resumes(inputs, expected_files, tmp_path, monkeypatch):
    append, count = os.write, 0

    def full(file: int, data) -> int:
        nonlocal count
        count += 1
        if count > 2:
            raise OSError(28, "No space left on device")
        return append(file, data)

    monkeypatch.setattr(lines.os, "write", full)
    with pytest.raises(LoadError, match=r"records\.jsonl: No space left on device. Written files remain"):
        run(inputs, tmp_path / "out")
    monkeypatch.undo()
    run(inputs, tmp_path / "out")
    assert read_files(tmp_path / "out") == expected_files


@pytest.mark.parametrize(
    ("options", "message"),
    [({"engine": "spark"}, "engine must be one of local, ray"), ({"workers": 0}, "workers must be"), ({"actors": 0}, "actors must be"), ({"address": 3}, "address must be")],
)
def test_invalid_engine_options_raise_before_work(inputs, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        run(inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_command_has_engine_option(inputs, tmp_path):
    command = ["benchmark", "segmentation", "--model", str(inputs / "vit"), "--data", str(inputs / "data"), "--method", METHODS, "--out", str(tmp_path / "out")]
    invalid = CliRunner().invoke(app, [*command, "--engine", "spark"])
    assert (invalid.exit_code, invalid.stderr) == (2, "error: engine must be one of local, ray, not 'spark'\n")
    assert CliRunner().invoke(app, [*command, "--engine", "local", "--workers", "3", "--quiet"]).exit_code == 0
    run_benchmark("segmentation", str(inputs / "vit"), inputs / "data", tmp_path / "same", methods=METHODS)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "same")


# -- Ray -------------------------------------------------------------------------------------------------------------
SCRIPT = """
import os, signal
from pathlib import Path
from whyformer.benchmarks import measuring
from whyformer.benchmarks.runner import run_benchmark

class Dying(measuring.Actor):
    # the first actor that reaches the third piece dies in the middle of it, once
    def __call__(self, item):
        marker = Path(OUT).parent / "died"
        if KILL and item["number"] == 2 and not marker.exists():
            marker.write_text(str(os.getpid()))
            measuring.Measurer.records = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(item)

measuring.Actor = Dying
outcome = run_benchmark(NAME, MODEL, DATA, OUT, methods=METHODS, samples_per_batch=2, engine="ray", actors=ACTORS)
print("measured", outcome.measured)
"""


def on_ray(name: str, model: str, data: Path, out: Path, *, kill: bool = False, actors: int = 2) -> str:
    variables = {"NAME": name, "MODEL": model, "DATA": str(data), "OUT": str(out), "METHODS": METHODS, "KILL": kill, "ACTORS": actors}
    script = "\n".join(f"{k} = {v!r}" for k, v in variables.items()) + SCRIPT
    # the tests' torchvision does not fit torch: no process of Ray's may import it
    (out.parent / "path").mkdir()
    (out.parent / "path" / "sitecustomize.py").write_text("import sys; sys.modules['torchvision'] = None")
    path = os.pathsep.join([str(out.parent / "path"), str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"}
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=HANG, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout


@pytest.mark.parametrize("actors", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.whole)])
def test_ray_writes_same_files_as_local_engine_despite_killed_actor(inputs, expected_files, actors, tmp_path):
    pytest.importorskip("ray")
    assert "measured 35" in on_ray("segmentation", str(inputs / "vit"), inputs / "data", tmp_path / "ray", kill=True, actors=actors)
    assert (tmp_path / "died").exists()
    assert read_files(tmp_path / "ray") == expected_files


@pytest.mark.whole
def test_ray_writes_same_files_as_local_engine_for_texts(tmp_path):
    pytest.importorskip("ray")
    model, data = text_model(tmp_path / "bert"), sentence_file(tmp_path / "data")
    run_benchmark("activation", model, data, tmp_path / "local", methods=METHODS, samples_per_batch=2)
    on_ray("activation", model, data, tmp_path / "ray", actors=1)
    assert read_files(tmp_path / "ray") == read_files(tmp_path / "local")
