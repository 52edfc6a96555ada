"""A benchmark runs on the jobs' engine: the same files whatever the number of workers, and whatever was killed."""

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
from made import ended, in_a_process, picture_model, text_model
from typer.testing import CliRunner

from waiting import HANG
from whyformer.apps.cli import app
from whyformer.benchmarks import BENCHMARKS
from whyformer.benchmarks.runner import run_benchmark
from whyformer.errors import InputError, LoadError
from whyformer.jobs import lines
from whyformer.jobs.records import RecordFile
from zoo_evaluate import picture_folder, sentence_file

METHODS = "transformer_attribution,gae,rollout"
TABLES = ("table.md", "table.csv", "report.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    picture_model(folder / "vit")
    picture_folder(folder / "data", count=7)
    return folder


def run(place: Path, out: Path, **more):
    return run_benchmark("segmentation", str(place / "vit"), place / "data", out, methods=METHODS, samples_per_batch=2, **more)


def files(out: Path, names: tuple[str, ...] = (*TABLES, "records.jsonl")) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, bytes]:
    run(place, place / "whole")
    return files(place / "whole")


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_writes_the_same_bytes(place, whole, workers, tmp_path):
    run(place, tmp_path / "out", workers=workers)
    assert files(tmp_path / "out") == whole


def tearing(when: int) -> None:
    """Kill this process in the middle of its ``when``-th write of records, at a place that the number decides."""
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
def test_a_write_that_a_kill_tears_is_measured_again_in_the_same_pieces(place, whole, when, tmp_path):
    def work() -> None:
        tearing(when)
        run(place, tmp_path / "out")

    assert ended(in_a_process(work)) == -signal.SIGKILL
    assert not (tmp_path / "out" / "table.md").exists()
    again = run(place, tmp_path / "out")
    assert again.resumed == (when - 1) * 2 * 5  # three methods, floor and ceiling
    assert files(tmp_path / "out") == whole


@pytest.mark.slow
def test_a_benchmark_killed_at_any_moment_ends_with_the_same_bytes(place, whole, tmp_path):
    started = time.monotonic()
    run(place, tmp_path / "timed")
    takes, kills = time.monotonic() - started, 0
    for seed in range(120):  # until there were enough kills, which depends on the machine's speed
        generator, out = random.Random(seed), tmp_path / str(seed)
        for attempt in range(20):
            tear = generator.choice([0, generator.randint(1, 4)]) if attempt < 6 else 0

            def work(tear=tear, out=out) -> None:
                if tear:
                    tearing(tear)
                run(place, out)

            child = in_a_process(work)
            if not tear and attempt < 6:
                time.sleep(generator.uniform(0.02, takes))
                os.kill(child, signal.SIGKILL)
            status = ended(child)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            kills += 1
        assert files(out) == whole, seed
        if kills >= 12 and seed >= 11:
            break
    assert kills >= 12


def test_one_damaged_record_takes_with_it_what_was_measured_beside_it_alone(place, whole, tmp_path):
    run(place, tmp_path / "out")
    path, said = tmp_path / "out" / "records.jsonl", []
    path.write_bytes(whole["records.jsonl"].replace(b'"values": {"', b'"values": {"x', 1))
    again = run(place, tmp_path / "out", say=said.append)
    assert again.measured == 2 * 5
    assert said[0].startswith("1 damaged line of records.jsonl ignored: these records, and records measured with them,")
    assert files(tmp_path / "out", TABLES) == {name: whole[name] for name in TABLES}
    assert sorted(path.read_bytes().splitlines()) == sorted(whole["records.jsonl"].splitlines())


def test_records_of_an_older_file_which_do_not_tell_their_piece_count(tmp_path):
    old = [{"sample": s, "key": "k", "values": {"x": 1.0}} for s in "ab"]
    (tmp_path / "r.jsonl").write_bytes(b"".join(map(lines.encoded, old)))
    with RecordFile(tmp_path / "r.jsonl") as store:
        assert (len(store.records), store.dropped, store.torn) == (2, 0, 0)


def test_a_sample_that_cannot_be_read_is_told_and_the_others_have_their_figures(place, tmp_path):
    data = picture_folder(tmp_path / "data", count=5)
    broken = data / "images" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    found = {}
    for workers in (1, 3):
        out = tmp_path / str(workers)
        report = run_benchmark("perturbation", str(place / "vit"), data, out, methods=METHODS, samples_per_batch=2, workers=workers).report
        assert report.counts["gae"] == {"scored": 4, "failed": 1, "constant": 0, "nan": 0}
        found[workers] = files(out)
    assert found[1] == found[3]
    failed = [r for r in map(json.loads, (out / "records.jsonl").read_text().splitlines()) if "error" in r]
    assert {r["sample"] for r in failed} == {failed[0]["sample"]}
    assert failed[0]["sample"].endswith(broken.name)


def test_a_method_whose_figures_cannot_be_made_of_one_sample_takes_nothing_with_it(place, tmp_path, monkeypatch):
    from dataclasses import replace

    row = BENCHMARKS["segmentation"]

    def measure(batch, configurations):
        for sample, c, values in row.measure(batch, configurations):
            if c.label == "gae" and sample.endswith("3.png"):
                raise RuntimeError("not this one")
            yield sample, c, values

    monkeypatch.setitem(BENCHMARKS, "segmentation", replace(row, measure=measure))
    report = run(place, tmp_path / "out").report
    assert report.counts["gae"] == {"scored": 6, "failed": 1, "constant": 0, "nan": 0}
    assert report.counts["rollout"]["scored"] == 7


def test_a_full_disk_is_a_sentence_and_a_rerun_goes_on(place, whole, tmp_path, monkeypatch):
    append, count = os.write, 0

    def full(file: int, data) -> int:
        nonlocal count
        count += 1
        if count > 2:
            raise OSError(28, "No space left on device")
        return append(file, data)

    monkeypatch.setattr(lines.os, "write", full)
    with pytest.raises(LoadError, match=r"records\.jsonl: No space left on device. Written records remain"):
        run(place, tmp_path / "out")
    monkeypatch.undo()
    run(place, tmp_path / "out")
    assert files(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("given", "said"),
    [({"engine": "spark"}, "engine must be one of local, ray"), ({"workers": 0}, "workers must be"), ({"actors": 0}, "actors must be"), ({"address": 3}, "address must be")],
)
def test_an_engine_that_is_none_is_refused_before_any_work(place, tmp_path, given, said):
    with pytest.raises(InputError, match=said):
        run(place, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_the_engine(place, tmp_path):
    words = ["benchmark", "segmentation", "--model", str(place / "vit"), "--data", str(place / "data"), "--method", METHODS, "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, [*words, "--engine", "spark"])
    assert (refused.exit_code, refused.stderr) == (2, "error: engine must be one of local, ray, not 'spark'\n")
    assert CliRunner().invoke(app, [*words, "--engine", "local", "--workers", "3", "--quiet"]).exit_code == 0
    run_benchmark("segmentation", str(place / "vit"), place / "data", tmp_path / "same", methods=METHODS)
    assert files(tmp_path / "out") == files(tmp_path / "same")


# -- Ray -------------------------------------------------------------------------------------------------------------
SCRIPT = """
import os, signal
from pathlib import Path
from whyformer.benchmarks import measuring
from whyformer.benchmarks.runner import run_benchmark

class Dying(measuring.Actor):
    # the first actor that reaches the third piece dies in the middle of it, once
    def __call__(self, batch):
        marker = Path(OUT).parent / "died"
        if KILL and 2 in batch["number"].tolist() and not marker.exists():
            marker.write_text(str(os.getpid()))
            measuring.Measurer.records = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)

measuring.Actor = Dying
outcome = run_benchmark(NAME, MODEL, DATA, OUT, methods=METHODS, samples_per_batch=2, engine="ray", actors=ACTORS)
print("measured", outcome.measured)
"""


def on_ray(name: str, model: str, data: Path, out: Path, *, kill: bool = False, actors: int = 2) -> str:
    given = {"NAME": name, "MODEL": model, "DATA": str(data), "OUT": str(out), "METHODS": METHODS, "KILL": kill, "ACTORS": actors}
    script = "\n".join(f"{k} = {v!r}" for k, v in given.items()) + SCRIPT
    # the tests' torchvision does not fit torch: no process of Ray's may import it
    (out.parent / "path").mkdir()
    (out.parent / "path" / "sitecustomize.py").write_text("import sys; sys.modules['torchvision'] = None")
    path = os.pathsep.join([str(out.parent / "path"), str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("actors", [pytest.param(1, marks=pytest.mark.whole), pytest.param(2, marks=pytest.mark.slow)])
def test_ray_writes_what_one_machine_writes_also_when_an_actor_is_killed(place, whole, actors, tmp_path):
    pytest.importorskip("ray")
    assert "measured 35" in on_ray("segmentation", str(place / "vit"), place / "data", tmp_path / "ray", kill=actors == 2, actors=actors)
    assert (tmp_path / "died").exists() == (actors == 2)
    assert files(tmp_path / "ray") == whole


@pytest.mark.whole
def test_texts_on_ray_are_as_on_one_machine(tmp_path):
    pytest.importorskip("ray")
    model, data = text_model(tmp_path / "bert"), sentence_file(tmp_path / "data")
    run_benchmark("activation", model, data, tmp_path / "local", methods=METHODS, samples_per_batch=2)
    on_ray("activation", model, data, tmp_path / "ray", actors=1)
    assert files(tmp_path / "ray") == files(tmp_path / "local")
