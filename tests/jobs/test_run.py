"""The table of a job equals ``explain`` row by row; a second run resumes, and another job in its folder is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from job_builders import contents, picture_model, pictures, sentences, text_model, text_table

import whyformer
from whyformer.benchmarks import run_benchmark
from whyformer.errors import InputError, LoadError, MethodNotApplicable, WhyformerError
from whyformer.explaining import OpenedModel
from whyformer.jobs import local, trial
from whyformer.jobs.batching import read_one
from whyformer.jobs.costs import estimate
from whyformer.jobs.description import Job, make_job, read_job
from whyformer.jobs.engines import run_job
from whyformer.jobs.local import OpenedJob, Run, TooManyFailures, open_job
from whyformer.methods import find


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return picture_model(tmp_path_factory.mktemp("vit"))


def job_of(model: str, input_path: Path, out: Path, **more) -> Job:
    return Job(model=model, input=str(input_path), out=str(out), **{"methods": ("transformer_attribution", "gae"), "rows_per_part": 7, **more})


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_table_equals_explain_in_input_order(bert, tmp_path, suffix):
    table = text_table(tmp_path / f"data.{suffix}", 20)
    maps = run_job(job_of(bert, table, tmp_path / "out", id_column="id", targets="all", batch_size=4))
    rows = maps.table().to_pylist()
    expected = [(i, m, t) for i in range(20) for m in ("transformer_attribution", "gae") for t in (0, 1)]
    assert [(r["row"], r["method"], r["target"]) for r in rows] == expected
    assert [r["id"] for r in rows[::4]] == [f"r{i}" for i in range(20)]
    assert maps.complete
    assert len(maps) == 80
    for row, e in zip(rows[::9], list(maps)[::9], strict=True):
        text = sentences(20)[row["row"]]
        reference = whyformer.explain(bert, text, row["method"], row["target"])
        for scores in (e.scores[0], torch.tensor(row["scores"])):
            torch.testing.assert_close(scores, reference.scores[0], rtol=1e-4, atol=1e-6)
        assert row["tokens"] == reference.tokens[0]
        assert e.offsets == reference.offsets
        assert (e.texts, e.level, e.labels, e.settings, e.target_names) == ([text], reference.level, reference.labels, reference.settings, reference.target_names)
        words = reference.scores[0].index_fill(0, torch.tensor(reference.special[0]), 0).abs()
        assert row["top"][0]["name"] == reference.tokens[0][int(words.argmax())]
        assert e.special == reference.special
        assert row["probability"] == pytest.approx(float(reference.probabilities()[0, row["target"]]), abs=1e-5)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_later_parts_do_not_reread_table_from_first_row(bert, tmp_path, suffix):
    opened, starts = open_job(job_of(bert, text_table(tmp_path / f"data.{suffix}", 30), tmp_path, rows_per_part=6)), []
    source = replace(opened.source, rows=lambda start: starts.append(start) or opened.source.rows(start))
    counted = OpenedJob(opened.job, opened.session, source)
    for number in (0, 2, 4, 1):
        with counted.attempts(number, 1) as attempts:
            rows = counted.part(number, attempts)
        assert [(row.index, row.read()) for row in rows] == [(i, sentences(30)[i]) for i in range(6 * number, 6 * number + 6)]
    assert starts == ([0, 12, 24, 6] if suffix == "parquet" else [0, 6])


@pytest.mark.parametrize("batch_size", ["auto", 2])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "folder"])
def test_missing_column_of_targets_is_refused_at_once(bert, vit, tmp_path, suffix, batch_size):
    data = pictures(tmp_path / "in") if suffix == "folder" else text_table(tmp_path / f"data.{suffix}", 5)
    model = vit if suffix == "folder" else bert
    job = job_of(model, data, tmp_path / "out", targets="column:NOPE", batch_size=batch_size)
    for work in (run_job, estimate, lambda job: list(whyformer.explain_many(model, data, "gae", job.targets, batch_size=batch_size))):
        with pytest.raises(InputError, match="has no column 'NOPE' for the true class"):
            work(job)
    if suffix != "folder":  # and the corrected command runs in the same folder
        assert run_job(job_of(model, data, tmp_path / "out", targets="column:label")).manifest["failed"] == 0


def test_rows_without_the_column_of_targets_fail_alone(bert):
    rows = [{"text": text, **({"label": 1} if i else {})} for i, text in enumerate(sentences(4))]
    stream = whyformer.explain_many(bert, rows, "gae", "column:label", batch_size=2)
    assert [e.target.tolist() for e in stream] == [[1]] * 3 and [f.row for f in stream.failures] == [0]


@pytest.mark.parametrize("setting", [{"actors": 2}, {"address": "auto"}])
def test_settings_of_ray_need_its_engine(setting):
    keys = {"model": "m", "input": "i.csv", "out": "o"}
    with pytest.raises(InputError, match=next(iter(setting))):
        make_job({**keys, **setting})
    assert make_job({**keys, **setting, "engine": "ray"}).engine == "ray" and make_job({**keys, "actors": 1}).actors == 1
    with pytest.raises(InputError, match=next(iter(setting))):
        run_benchmark("segmentation", "m", "nowhere", "o", **setting)


def test_job_over_folder_of_pictures_equals_explain(vit, tmp_path):
    maps = run_job(job_of(vit, pictures(tmp_path / "in" / "deep"), tmp_path / "out", methods=("gae", "input_x_gradient"), rows_per_part=2))
    assert [r["id"] for r in maps.table(["id"]).to_pylist()] == [f"{i}.png" for i in range(5) for _ in range(2)]
    for e, i in zip(list(maps)[::2], range(5), strict=True):
        expected = whyformer.explain(vit, tmp_path / "in" / "deep" / f"{i}.png", "gae")
        torch.testing.assert_close(e.scores, expected.scores, rtol=1e-4, atol=1e-6)
        assert e.grid == expected.grid == (4, 4)
        assert e.geometry == expected.geometry
    assert maps[1].scores.shape == (1, 32, 32)
    assert maps[-1].method == "input_x_gradient"


def test_bad_rows_are_only_in_failure_table(bert, tmp_path):
    table = text_table(tmp_path / "data.jsonl", 12, bad=(2, 9))
    lines = table.read_text().splitlines()
    lines[5] = '{"id": "torn", "te'
    lines[7] = json.dumps({"id": "long", "text": " ".join(["film"] * 200), "label": 0})
    lines[8] = json.dumps({"id": "no label", "text": "a film"})
    table.write_text("\n".join(lines) + "\n")
    maps = run_job(job_of(bert, table, tmp_path / "out", targets="column:label", id_column="id"))
    assert [r["row"] for r in maps.table(["row"]).to_pylist()] == [i for i in range(12) if i not in (2, 5, 7, 8, 9) for _ in range(2)]
    failures = maps.failures().to_pylist()
    assert [f["row"] for f in failures] == [2, 5, 7, 8, 9]
    for failure, words in zip(failures, ("empty", "not valid JSON", "200 tokens|202 tokens", "no column 'label'", "empty"), strict=True):
        assert any(w in failure["reason"] for w in words.split("|")), failure
    assert maps.manifest["failed"] == 5
    assert [r["target"] for r in maps.table(["row", "target"]).to_pylist()[::2]] == [i % 2 for i in (0, 1, 3, 4, 6, 10, 11)]


def test_job_stops_after_max_failures_and_resumes_with_higher_limit(bert, tmp_path):
    table = text_table(tmp_path / "data.csv", 30, bad=(1, 8, 15, 22))
    with pytest.raises(TooManyFailures, match=r"stopped after 3 failures; max_failures is 2.*The first: r1: the text is empty"):
        run_job(job_of(bert, table, tmp_path / "out", max_failures=2))
    assert pq.read_table(tmp_path / "out" / "failures.parquet").num_rows == 3
    maps = run_job(job_of(bert, table, tmp_path / "out"))
    whole = run_job(job_of(bert, table, tmp_path / "whole"))
    assert maps.failures().num_rows == 4
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert whole.manifest["rows"] == 30


def test_second_run_recomputes_only_damaged_parts(bert, tmp_path, monkeypatch):
    table, out, messages = text_table(tmp_path / "data.jsonl", 20), tmp_path / "out", []
    run_job(job_of(bert, table, out))
    before, computed = contents(out), []
    original = local.make_part
    monkeypatch.setattr(local, "make_part", lambda opened, number, *rest: computed.append(number) or original(opened, number, *rest))
    run_job(job_of(bert, table, out))
    assert computed == []
    content = bytearray(before["part-000001.parquet"])
    content[len(content) // 2] ^= 1
    (out / "part-000001.parquet").write_bytes(content)
    job_id = json.loads(before["manifest.json"])["id"]
    with pytest.raises(LoadError, match=r"part-000001.parquet is missing or damaged"):
        whyformer.read(out).table()
    (out / "part-000002.parquet").unlink()
    (out / "failures.parquet").write_bytes(b"")
    (out / f"part-000000.parquet.{job_id}.77.partial").write_bytes(b"torn")
    run_job(job_of(bert, table, out), say=messages.append)
    assert computed == [1, 2]
    assert "part-000001.parquet is damaged and will be rewritten" in messages
    assert contents(out) == before


CHANGES = {
    "methods": {"methods": ("gae",)},
    "targets": {"targets": "all"},
    "batch_size": {"batch_size": 3},
    "scores": {"scores": "float16"},
    "rows_per_part": {"rows_per_part": 8},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_option_raises_and_names_difference(bert, tmp_path, name):
    table = text_table(tmp_path / "data.jsonl", 8)
    run_job(job_of(bert, table, tmp_path / "out"))
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=rf"contains another job: {name} was .* and is .*another folder"):
        run_job(job_of(bert, table, tmp_path / "out", **CHANGES[name]))
    assert contents(tmp_path / "out") == before


def test_changed_input_or_model_raises_but_moved_input_does_not(bert, tmp_path):
    table = text_table(tmp_path / "data.jsonl", 8)
    run_job(job_of(bert, table, tmp_path / "out"))
    table = table.rename(tmp_path / "moved.jsonl")
    run_job(job_of(bert, table, tmp_path / "out"))
    table.write_text(table.read_text() + '{"text": "more", "id": "x", "label": 1}\n')
    with pytest.raises(InputError, match="the source's rows was 8 and is 9"):
        run_job(job_of(bert, table, tmp_path / "out"))
    text_table(table, 8)
    with pytest.raises(InputError, match="the model's fingerprint was"):
        run_job(job_of("bundled:sst2", table, tmp_path / "out"))


def test_concurrent_jobs_in_one_folder_raise(bert, tmp_path):
    table = text_table(tmp_path / "data.jsonl", 4)
    opened = open_job(job_of(bert, table, tmp_path / "out"))
    with Run(opened, lambda text: None), pytest.raises(InputError, match="another job is writing"):
        Run(opened, lambda text: None)
    run_job(opened.job)


def test_full_disk_raises_load_error_and_job_resumes(bert, tmp_path, monkeypatch):
    table = text_table(tmp_path / "data.jsonl", 20)
    whole = run_job(job_of(bert, table, tmp_path / "whole"))
    original, calls = pq.write_table, []

    def full(arrow_table, path, **options):
        calls.append(path)
        original(arrow_table, path, **options)
        if len(calls) == 2:
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(LoadError, match=r"No space left on device. Written files remain"):
        run_job(job_of(bert, table, tmp_path / "out"))
    assert "part-000001.parquet" not in contents(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial"))
    partial = whyformer.read(tmp_path / "out")
    assert not partial.complete
    assert len(partial) == 14
    monkeypatch.undo()
    run_job(job_of(bert, table, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(whole.path)


def test_out_of_memory_halves_batches_permanently_and_rerun_is_identical(bert, tmp_path, monkeypatch):
    table = text_table(tmp_path / "data.jsonl", 28)
    original, sizes = OpenedModel.prepare, []

    def small(opened, inputs):
        sizes.append(len(inputs))
        if len(inputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(opened, inputs)

    run_job(job_of(bert, table, tmp_path / "large", batch_size=6, limit=14))
    monkeypatch.setattr(OpenedModel, "prepare", small)
    maps = run_job(job_of(bert, table, tmp_path / "out", batch_size=6))
    assert maps.manifest["batch_sizes"] == [[0, 3]]
    assert max(sizes[2:]) <= 6
    assert sum(size > 3 for size in sizes) == 1
    (tmp_path / "out" / "part-000002.parquet").unlink()
    before = contents(tmp_path / "out")
    run_job(job_of(bert, table, tmp_path / "out", batch_size=6))
    assert {k: v for k, v in contents(tmp_path / "out").items() if k in before} == before

    def never(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OpenedModel, "prepare", never)
    maps = run_job(job_of(bert, table, tmp_path / "none", batch_size=2))
    assert len(maps) == 0
    assert {f["reason"][:30] for f in maps.failures().to_pylist()} == {"the row alone does not fit int"}


def test_scores_as_float16_or_top_k(bert, tmp_path):
    table = text_table(tmp_path / "data.jsonl", 6)
    whole = list(run_job(job_of(bert, table, tmp_path / "a")))
    half = run_job(job_of(bert, table, tmp_path / "b", scores="float16"))
    top = run_job(job_of(bert, table, tmp_path / "c", scores="top-2"))
    assert str(half.table().schema.field("scores").type) == "list<element: halffloat>"
    assert half.manifest["job"]["scores"] == "float16"
    for e, h, t in zip(whole, half, top, strict=True):
        torch.testing.assert_close(h.scores, e.scores, rtol=2e-3, atol=1e-6)
        words = e.scores[0].index_fill(0, torch.tensor(e.special[0]), 0)  # special tokens are not counted
        best = words.abs().topk(2).indices
        expected = torch.zeros_like(e.scores[0])
        expected[best] = words[best]
        torch.testing.assert_close(t.scores[0], expected)


def test_overlays_are_png_for_pictures_and_html_for_texts(bert, vit, tmp_path):
    for model, data, kind in [(vit, pictures(tmp_path / "in", 2), "png"), (bert, text_table(tmp_path / "data.jsonl", 2), "html")]:
        maps = run_job(job_of(model, data, tmp_path / kind, methods=("gae",), targets="top-2", overlays=True))
        names = sorted(p.name for p in (maps.path / "overlays").iterdir())
        assert [name[:11] for name in names] == ["00000000-0-", "00000000-1-", "00000001-0-", "00000001-1-"]
        assert all(name.endswith(f".{kind}") and "gae" in name for name in names)
        before = contents(maps.path)
        (maps.path / "part-000000.parquet").unlink()
        run_job(job_of(model, data, tmp_path / kind, methods=("gae",), targets="top-2", overlays=True))
        assert contents(maps.path) == before


def test_inapplicable_method_raises_before_work(bert, tmp_path):
    table = text_table(tmp_path / "data.jsonl", 6)
    with pytest.raises(InputError, match="vit_cx explains pictures, and the input is text"):
        run_job(job_of(bert, table, tmp_path / "out", methods=("gae", "vit_cx")))
    config = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2, num_labels=3)
    model = transformers.SwinForImageClassification(config).eval()
    for out in (None, tmp_path / "swin"):
        with pytest.raises(MethodNotApplicable, match="rollout has no meaning on this model"):
            list(whyformer.explain_many(model, [torch.randn(3, 32, 32)] * 3, ["input_x_gradient", "rollout"], out=out))


def test_paths_in_job_file_are_relative_to_it(bert, tmp_path, monkeypatch):
    text_table(tmp_path / "data.jsonl", 4)
    (tmp_path / "JOB.toml").write_text(f'model = "{bert}"\ninput = "data.jsonl"\nmethods = ["gae", {{method = "rollout", start_layer = 1}}]\nout = "maps/"\n')
    monkeypatch.chdir("/")
    job = read_job(tmp_path / "JOB.toml", limit=3)
    assert (job.batch_size, job.engine, job.options.dtype, job.targets) == ("auto", "local", None, "predicted")
    maps = run_job(job)
    assert maps.path == tmp_path / "maps"
    assert len(maps) == 6
    assert [e.settings["start_layer"] for e in maps] == [0, 1] * 3
    assert read_job(tmp_path / "JOB.toml", out="elsewhere").out == "elsewhere"


BAD = {
    "no key": ({"modle": "x"}, "no key 'modle'. Did you mean 'model'"),
    "no model": ({"model": ""}, "lacks the key model"),
    "methods is text": ({"methods": "gae"}, "methods must be a list"),
    "no methods": ({"methods": []}, "methods must be a list"),
    "unknown method": ({"methods": ["gea"]}, "Did you mean 'gae'"),
    "twice": ({"methods": ["gae", ("gae", {})]}, "settings twice"),
    "targets": ({"targets": "bottom-3"}, "targets must be"),
    "top-0": ({"targets": "top-0"}, "targets must be"),
    "targets list": ({"targets": [[1]]}, "list of targets"),
    "batch": ({"batch_size": 0}, "batch_size must be"),
    "batch flag": ({"batch_size": True}, "batch_size must be"),
    "dtype": ({"dtype": "int8"}, "dtype must be one of"),
    "engine": ({"engine": "spark"}, "engine must be one of local, ray"),
    "scores": ({"scores": "int8"}, "scores must be"),
    "failures": ({"max_failures": -1}, "max_failures must be"),
    "url": ({"out": "s3://bucket/maps"}, "out must be a local or mounted folder"),
    "truncate": ({"truncate": "yes"}, "truncate must be True or False"),
    "column": ({"column": 3}, "column must be a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_settings_raise_before_loading(name):
    change, message = BAD[name]
    with pytest.raises(WhyformerError) as error:
        make_job({"model": "bundled:sst2", "input": "x.jsonl", "out": "maps", **change})
    assert message in str(error.value)


@pytest.mark.parametrize("content", ["model = ", "[" * 5000, "\x00", "a = " + "[" * 2000 + "]" * 2000], ids=["torn", "brackets", "nul", "deep"])
def test_invalid_job_file_raises_library_error(tmp_path, content):
    (tmp_path / "JOB.toml").write_text(content)
    with pytest.raises(WhyformerError):
        read_job(tmp_path / "JOB.toml")
    with pytest.raises(LoadError, match="cannot read the job"):
        read_job(tmp_path / "none.toml")
    with pytest.raises(LoadError, match="it is a folder; use --input"):
        read_job(tmp_path)


def test_missing_or_unsupported_input_raises(bert, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xyz").write_text("x")
    (tmp_path / "no_column.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bare.csv").write_text("text\n")
    (tmp_path / "bad.parquet").write_text("PAR1")
    for name, message in {"none": "does not exist", "empty": "holds no picture", "a.xyz": "is not supported", "no_column.csv": "no column",
                         "bare.csv": "has no rows", "bad.parquet": "cannot read", "*.png": "holds no picture"}.items():  # fmt: skip
        with pytest.raises(WhyformerError, match=message):
            run_job(job_of(bert, tmp_path / name, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_automatic_batch_size_fits_a_quarter_of_memory(bert, vit, tmp_path, monkeypatch):
    for model, data, values in ((bert, text_table(tmp_path / "data.jsonl", 4), 12 * 8), (vit, pictures(tmp_path / "in", 2), 17 * 16)):
        opened = open_job(job_of(model, data, tmp_path / "out", methods=("gae",)))
        reads = [read_one(row) for row in opened.rows(0)]
        result = trial.run_trial(opened.session, reads)
        assert result.size == 32
        assert result.pass_bytes > 10 * 4 * values  # several values of each row in each block
        for batch, size in ((1, 1), (5, 4), (8, 8), (100, 32)):
            monkeypatch.setattr(trial, "total_memory", lambda device, batch=batch, held=result.pass_bytes: 4 * batch * held)
            assert trial.run_trial(opened.session, reads).size == size
        monkeypatch.undo()
        long = replace(opened.session, opened=opened.session.opened.using(checkpoint=True), methods=((find("lrp_ah_ln"), {}),))
        assert 0 < trial.run_trial(long, reads).pass_bytes < result.pass_bytes
