"""Fuzzed job files, record lines and job outputs: a library error or the correct result."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import whyformer
from mutations import damaged, mutated
from whyformer.apps.cli import app
from whyformer.apps.report import write_report
from whyformer.benchmarks.runner import run_benchmark
from whyformer.errors import LoadError, WhyformerError
from whyformer.jobs import lines
from whyformer.jobs.description import Job, make_job, read_job

PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png"
KEYS = sorted(Job.__dataclass_fields__)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(["auto", "top-3", "top--1", "column:", "all", "ray"]))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)
GOOD = {"model": "bundled:sst2", "input": "texts.jsonl", "out": "maps"}


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_arbitrary_settings_make_a_job_or_raise_library_error(changes):
    with contextlib.suppress(WhyformerError):  # other exceptions fail the test
        job = make_job({**GOOD, **changes})
        assert make_job({**GOOD, **changes}) == job
        json.dumps(job.identity())  # the manifest can store it


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | st.integers(1, 4000).map(lambda n: b"a=" + b"[" * n))
def test_arbitrary_bytes_as_job_file_raise_library_error(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "JOB.toml"
    file.write_bytes(content)
    with pytest.raises(WhyformerError):
        read_job(file)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), min_size=1, max_size=4), st.integers(0, 10_000), st.integers(1, 255))
def test_line_with_one_changed_byte_is_rejected(record, position, change):
    line = lines.encoded(record)
    assert lines.read(line) == record
    damaged = bytearray(line)
    damaged[position % (len(damaged) - 1)] ^= change
    assert lines.read(bytes(damaged)) is None
    assert lines.read(line[: position % (len(line) - 1)]) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("fuzzed") / "maps"
    whyformer.explain_many("bundled:sst2", ["A charming film.", "", "Dull."], "rollout", out=out)
    return out, {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}, read_all(out)


def read_all(out):
    """Everything that the API reads from a job's folder."""
    maps = whyformer.read(out)
    return maps.table().to_pylist(), maps.failures().to_pylist(), [e.to_dict() for e in maps], maps.labels


@given(data=st.data())
def test_damaged_output_file_raises_or_reads_original_content(written, data):
    """Bytes changed, removed or duplicated: reading raises, or returns what was written."""
    out, files, expected = written
    name = data.draw(st.sampled_from(["manifest.json", "part-000000.parquet", "failures.parquet"]))
    content = data.draw(damaged(files[name]))
    for other, original in files.items():
        Path(out, other).write_bytes(content if other == name else original)
    with contextlib.suppress(WhyformerError):
        assert read_all(out) == expected


@given(data=st.data())
def test_manifest_of_arbitrary_values_raises_library_error_or_is_read(written, data):
    """Manifests without a checksum, as older versions or users write them."""
    out, files, _ = written
    facts = {k: v for k, v in json.loads(files["manifest.json"]).items() if k != "sha256"}
    for file, content in files.items():
        Path(out, file).write_bytes(content)
    Path(out, "manifest.json").write_text(json.dumps(data.draw(mutated(facts))))
    with contextlib.suppress(WhyformerError):
        read_all(out)
    with contextlib.suppress(WhyformerError):
        write_report(out, out.parent / "report.html")


def test_manifest_with_wrong_checksum_raises(written):
    out, files, expected = written
    for file, content in files.items():
        Path(out, file).write_bytes(content.replace(b'"positive"', b'"negative"') if file == "manifest.json" else content)
    with pytest.raises(LoadError, match=r"manifest\.json is damaged \(its content does not match its checksum\)"):
        whyformer.read(out)
    Path(out, "manifest.json").write_bytes(files["manifest.json"])
    assert read_all(out) == expected


def test_part_entry_with_path_outside_folder_raises(written):
    out, files, _ = written
    facts = {k: v for k, v in json.loads(files["manifest.json"]).items() if k != "sha256"}
    facts["parts"][0]["file"] = "../part-000000.parquet"
    Path(out, "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(LoadError, match=r"parts\.0\.file is invalid"):
        whyformer.read(out)


# -- inputs of a report ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of a benchmark and the JSON files of ``whyformer explain``."""
    folder = tmp_path_factory.mktemp("results")
    run_benchmark("segmentation", "bundled:digits", "scenes:2", folder / "bench", methods="gae")
    for input_, model in ((str(PICTURE), "bundled:digits"), ("A charming film.", "bundled:sst2")):
        outcome = CliRunner().invoke(app, ["explain", input_, "--model", model, "--method", "gae", "--format", "json", "--out", str(folder / model[-4:])])
        assert outcome.exit_code == 0
    paths = {"picture.json": next((folder / "gits").rglob("*.json")), "sentence.json": next((folder / "sst2").rglob("*.json"))}
    return {name: (folder / "bench" / name).read_bytes() for name in ("report.json", "table.csv", "records.jsonl")} | {n: p.read_bytes() for n, p in paths.items()}


@given(data=st.data())
@settings(max_examples=60)
def test_report_is_written_despite_damaged_files(results, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "whole.json").write_bytes(results["sentence.json"])
    for name in data.draw(st.lists(st.sampled_from(sorted(results)), min_size=1, max_size=2, unique=True)):
        if name.endswith(".json") and data.draw(st.booleans()):
            content = json.dumps(data.draw(mutated(json.loads(results[name])))).encode()
        else:
            content = data.draw(damaged(results[name]))
        (folder / name).write_bytes(content)
    report = write_report(folder, folder / "made.html")
    assert report.explanations >= 1
    assert report.path.read_bytes().decode()  # valid UTF-8 for any content of the files
