"""Job files, lines of records and what a job wrote, damaged in any way: a clear error or the right answer."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whyformer
from whyformer.errors import WhyformerError
from whyformer.jobs import lines
from whyformer.jobs.description import Job, make_job, read_job

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
    whole = lines.written(record)
    assert lines.read(whole) == record
    damaged = bytearray(whole)
    damaged[place % (len(damaged) - 1)] ^= change
    assert lines.read(bytes(damaged)) is None
    assert lines.read(whole[: place % (len(whole) - 1)]) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("fuzzed") / "maps"
    whyformer.explain_many("bundled:sst2", ["A charming film.", "Dull."], "rollout", out=out)
    return out, {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}, whyformer.read(out).table().to_pylist()


@given(data=st.data())
def test_a_damaged_file_of_a_job_is_told_or_read_rightly(written, data):
    """A byte changed, or the end cut off, of the manifest or a part: never other scores than those that were written."""
    out, files, rows = written
    name = data.draw(st.sampled_from(["manifest.json", "part-000000.parquet"]))
    content = bytearray(files[name])
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        content = content[:place]
    for own, whole in files.items():
        Path(out, own).write_bytes(bytes(content) if own == name else whole)
    with contextlib.suppress(WhyformerError):
        found = whyformer.read(out).table().to_pylist()
        assert found == rows
