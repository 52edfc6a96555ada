"""Job files, lines of records and what a job wrote, damaged in any way: a clear error or the right answer."""

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
def test_any_values_make_a_job_or_a_clear_error(changes):
    with contextlib.suppress(WhyformerError):  # anything else is no answer
        job = make_job({**GOOD, **changes})
        assert make_job({**GOOD, **changes}) == job
        json.dumps(job.identity())  # it can stand in a manifest


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | st.integers(1, 4000).map(lambda n: b"a=" + b"[" * n))
def test_any_bytes_are_a_job_file_or_a_clear_error(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "JOB.toml"
    file.write_bytes(content)
    with pytest.raises(WhyformerError):
        read_job(file)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), min_size=1, max_size=4), st.integers(0, 10_000), st.integers(1, 255))
def test_a_line_with_one_changed_byte_is_no_record(record, place, change):
    whole = lines.encoded(record)
    assert lines.read(whole) == record
    damaged = bytearray(whole)
    damaged[place % (len(damaged) - 1)] ^= change
    assert lines.read(bytes(damaged)) is None
    assert lines.read(whole[: place % (len(whole) - 1)]) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("fuzzed") / "maps"
    whyformer.explain_many("bundled:sst2", ["A charming film.", "", "Dull."], "rollout", out=out)
    return out, {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}, everything(out)


def everything(out):
    """All that can be read of a folder."""
    maps = whyformer.read(out)
    return maps.table().to_pylist(), maps.failures().to_pylist(), [e.to_dict() for e in maps], maps.labels


@given(data=st.data())
def test_a_damaged_file_of_a_job_is_told_or_read_rightly(written, data):
    """Bytes of any file changed, cut off, doubled: never anything else than what was written."""
    out, files, whole = written
    name = data.draw(st.sampled_from(["manifest.json", "part-000000.parquet", "failures.parquet"]))
    content = data.draw(damaged(files[name]))
    for own, kept in files.items():
        Path(out, own).write_bytes(content if own == name else kept)
    with contextlib.suppress(WhyformerError):
        assert everything(out) == whole


@given(data=st.data())
def test_a_manifest_of_any_values_is_told_or_what_it_says_can_be_read(written, data):
    """Without its checksum, as one that an older version wrote, or that was written by hand."""
    out, files, _ = written
    facts = {k: v for k, v in json.loads(files["manifest.json"]).items() if k != "sha256"}
    for own, kept in files.items():
        Path(out, own).write_bytes(kept)
    Path(out, "manifest.json").write_text(json.dumps(data.draw(mutated(facts))))
    with contextlib.suppress(WhyformerError):
        everything(out)
    with contextlib.suppress(WhyformerError):
        write_report(out, out.parent / "report.html")


def test_a_manifest_with_another_word_is_told(written):
    out, files, whole = written
    for own, kept in files.items():
        Path(out, own).write_bytes(kept.replace(b'"positive"', b'"negative"') if own == "manifest.json" else kept)
    with pytest.raises(LoadError, match=r"manifest\.json is damaged \(its content does not match its checksum\)"):
        whyformer.read(out)
    Path(out, "manifest.json").write_bytes(files["manifest.json"])
    assert everything(out) == whole


def test_an_entry_of_a_part_that_names_another_file_is_told(written):
    out, files, _ = written
    facts = {k: v for k, v in json.loads(files["manifest.json"]).items() if k != "sha256"}
    facts["parts"][0]["file"] = "../part-000000.parquet"
    Path(out, "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(LoadError, match=r"parts\.0\.file is invalid"):
        whyformer.read(out)


# -- what a report is made of ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A benchmark's files, and what the command line prints of explanations."""
    place = tmp_path_factory.mktemp("results")
    run_benchmark("segmentation", "bundled:digits", "scenes:2", place / "bench", methods="gae")
    for given_, model in ((str(PICTURE), "bundled:digits"), ("A charming film.", "bundled:sst2")):
        told = CliRunner().invoke(app, ["explain", given_, "--model", model, "--method", "gae", "--format", "json", "--out", str(place / model[-4:])])
        assert told.exit_code == 0
    found = {"picture.json": next((place / "gits").rglob("*.json")), "sentence.json": next((place / "sst2").rglob("*.json"))}
    return {name: (place / "bench" / name).read_bytes() for name in ("report.json", "table.csv", "records.jsonl")} | {n: p.read_bytes() for n, p in found.items()}


@given(data=st.data())
@settings(max_examples=60)
def test_no_damaged_file_ends_a_report(results, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "whole.json").write_bytes(results["sentence.json"])
    for name in data.draw(st.lists(st.sampled_from(sorted(results)), min_size=1, max_size=2, unique=True)):
        if name.endswith(".json") and data.draw(st.booleans()):
            content = json.dumps(data.draw(mutated(json.loads(results[name])))).encode()
        else:
            content = data.draw(damaged(results[name]))
        (folder / name).write_bytes(content)
    made = write_report(folder, folder / "made.html")
    assert made.explanations >= 1
    assert made.path.read_bytes().decode()  # UTF-8, whatever the files held
