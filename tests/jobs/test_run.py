"""A job's table holds what ``explain`` gives, row by row, in order; a second run goes on, and another job is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from made import contents, picture_model, pictures, sentences, text_model, text_table

import whyformer
from whyformer.errors import InputError, LoadError, MethodNotApplicable, WhyformerError
from whyformer.explaining import OpenedModel
from whyformer.jobs import local, trial
from whyformer.jobs.batching import read_one
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


def job(model: str, place: Path, out: Path, **more) -> Job:
    return Job(model=model, input=str(place), out=str(out), **{"methods": ("transformer_attribution", "gae"), "rows_per_part": 7, **more})


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_the_table_has_what_explain_gives_in_the_order_of_the_input(bert, tmp_path, suffix):
    place = text_table(tmp_path / f"data.{suffix}", 20)
    maps = run_job(job(bert, place, tmp_path / "out", id_column="id", targets="all", batch_size=4))
    rows = maps.table().to_pylist()
    wanted = [(i, m, t) for i in range(20) for m in ("transformer_attribution", "gae") for t in (0, 1)]
    assert [(r["row"], r["method"], r["target"]) for r in rows] == wanted
    assert [r["id"] for r in rows[::4]] == [f"r{i}" for i in range(20)]
    assert maps.complete
    assert len(maps) == 80
    for row, e in zip(rows[::9], list(maps)[::9], strict=True):
        text = sentences(20)[row["row"]]
        alone = whyformer.explain(bert, text, row["method"], row["target"])
        for found in (e.scores[0], torch.tensor(row["scores"])):
            torch.testing.assert_close(found, alone.scores[0], rtol=1e-4, atol=1e-6)
        assert row["tokens"] == alone.tokens[0]
        assert e.offsets == alone.offsets
        assert (e.texts, e.level, e.labels, e.settings, e.target_names) == ([text], alone.level, alone.labels, alone.settings, alone.target_names)
        words = alone.scores[0].index_fill(0, torch.tensor(alone.special[0]), 0).abs()
        assert row["top"][0]["name"] == alone.tokens[0][int(words.argmax())]
        assert e.special == alone.special
        assert row["probability"] == pytest.approx(float(alone.probabilities()[0, row["target"]]), abs=1e-5)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_parts_far_apart_do_not_read_a_table_from_its_first_row_again(bert, tmp_path, suffix):
    opened, starts = open_job(job(bert, text_table(tmp_path / f"data.{suffix}", 30), tmp_path, rows_per_part=6)), []
    source = replace(opened.source, rows=lambda start: starts.append(start) or opened.source.rows(start))
    counted = OpenedJob(opened.job, opened.session, source)
    for number in (0, 2, 4, 1):
        with counted.attempts(number, 1) as attempts:
            rows = counted.part(number, attempts)
        assert [(row.index, row.read()) for row in rows] == [(i, sentences(30)[i]) for i in range(6 * number, 6 * number + 6)]
    assert starts == ([0, 12, 24, 6] if suffix == "parquet" else [0, 6])


def test_pictures_of_a_folder(vit, tmp_path):
    maps = run_job(job(vit, pictures(tmp_path / "in" / "deep"), tmp_path / "out", methods=("gae", "input_x_gradient"), rows_per_part=2))
    assert [r["id"] for r in maps.table(["id"]).to_pylist()] == [f"{i}.png" for i in range(5) for _ in range(2)]
    for e, i in zip(list(maps)[::2], range(5), strict=True):
        alone = whyformer.explain(vit, tmp_path / "in" / "deep" / f"{i}.png", "gae")
        torch.testing.assert_close(e.scores, alone.scores, rtol=1e-4, atol=1e-6)
        assert e.grid == alone.grid == (4, 4)
        assert e.geometry == alone.geometry
    assert maps[1].scores.shape == (1, 32, 32)
    assert maps[-1].method == "input_x_gradient"


def test_bad_rows_are_in_the_table_of_failures_and_nowhere_else(bert, tmp_path):
    place = text_table(tmp_path / "data.jsonl", 12, bad=(2, 9))
    lines = place.read_text().splitlines()
    lines[5] = '{"id": "torn", "te'
    lines[7] = json.dumps({"id": "long", "text": " ".join(["film"] * 200), "label": 0})
    lines[8] = json.dumps({"id": "no label", "text": "a film"})
    place.write_text("\n".join(lines) + "\n")
    maps = run_job(job(bert, place, tmp_path / "out", targets="column:label", id_column="id"))
    assert [r["row"] for r in maps.table(["row"]).to_pylist()] == [i for i in range(12) if i not in (2, 5, 7, 8, 9) for _ in range(2)]
    failures = maps.failures().to_pylist()
    assert [f["row"] for f in failures] == [2, 5, 7, 8, 9]
    for failure, word in zip(failures, ("empty", "not valid JSON", "200 tokens|202 tokens", "no column 'label'", "empty"), strict=True):
        assert any(w in failure["reason"] for w in word.split("|")), failure
    assert maps.manifest["failed"] == 5
    assert [r["target"] for r in maps.table(["row", "target"]).to_pylist()[::2]] == [i % 2 for i in (0, 1, 3, 4, 6, 10, 11)]


def test_a_job_stops_after_too_many_failures_and_goes_on_when_more_are_allowed(bert, tmp_path):
    place = text_table(tmp_path / "data.csv", 30, bad=(1, 8, 15, 22))
    with pytest.raises(TooManyFailures, match=r"stopped after 3 failures; max_failures is 2.*The first: r1: the text is empty"):
        run_job(job(bert, place, tmp_path / "out", max_failures=2))
    assert pq.read_table(tmp_path / "out" / "failures.parquet").num_rows == 3
    maps = run_job(job(bert, place, tmp_path / "out"))
    whole = run_job(job(bert, place, tmp_path / "whole"))
    assert maps.failures().num_rows == 4
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert whole.manifest["rows"] == 30


def test_a_second_run_makes_nothing_again_but_what_was_damaged(bert, tmp_path, monkeypatch):
    place, out, said = text_table(tmp_path / "data.jsonl", 20), tmp_path / "out", []
    run_job(job(bert, place, out))
    before, made = contents(out), []
    original = local.make_part
    monkeypatch.setattr(local, "make_part", lambda opened, number, *rest: made.append(number) or original(opened, number, *rest))
    run_job(job(bert, place, out))
    assert made == []
    content = bytearray(before["part-000001.parquet"])
    content[len(content) // 2] ^= 1
    (out / "part-000001.parquet").write_bytes(content)
    mine = json.loads(before["manifest.json"])["id"]
    with pytest.raises(LoadError, match=r"part-000001.parquet is missing or damaged"):
        whyformer.read(out).table()
    (out / "part-000002.parquet").unlink()
    (out / "failures.parquet").write_bytes(b"")
    (out / f"part-000000.parquet.{mine}.77.partial").write_bytes(b"torn")
    run_job(job(bert, place, out), say=said.append)
    assert made == [1, 2]
    assert "part-000001.parquet is damaged and will be rewritten" in said
    assert contents(out) == before


CHANGES = {
    "methods": {"methods": ("gae",)},
    "targets": {"targets": "all"},
    "batch_size": {"batch_size": 3},
    "scores": {"scores": "float16"},
    "rows_per_part": {"rows_per_part": 8},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_options_on_an_old_folder_are_refused_with_the_difference(bert, tmp_path, name):
    place = text_table(tmp_path / "data.jsonl", 8)
    run_job(job(bert, place, tmp_path / "out"))
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=rf"contains another job: {name} was .* and is .*another folder"):
        run_job(job(bert, place, tmp_path / "out", **CHANGES[name]))
    assert contents(tmp_path / "out") == before


def test_changed_input_or_model_is_refused_and_a_moved_one_is_not(bert, tmp_path):
    place = text_table(tmp_path / "data.jsonl", 8)
    run_job(job(bert, place, tmp_path / "out"))
    place = place.rename(tmp_path / "moved.jsonl")
    run_job(job(bert, place, tmp_path / "out"))
    place.write_text(place.read_text() + '{"text": "more", "id": "x", "label": 1}\n')
    with pytest.raises(InputError, match="the source's rows was 8 and is 9"):
        run_job(job(bert, place, tmp_path / "out"))
    text_table(place, 8)
    with pytest.raises(InputError, match="the model's fingerprint was"):
        run_job(job("bundled:sst2", place, tmp_path / "out"))


def test_two_jobs_do_not_write_to_one_folder(bert, tmp_path):
    place = text_table(tmp_path / "data.jsonl", 4)
    opened = open_job(job(bert, place, tmp_path / "out"))
    with Run(opened, lambda text: None), pytest.raises(InputError, match="another job is writing"):
        Run(opened, lambda text: None)
    run_job(opened.job)


def test_a_full_disk_is_a_sentence_and_the_job_goes_on_when_there_is_room(bert, tmp_path, monkeypatch):
    place = text_table(tmp_path / "data.jsonl", 20)
    whole = run_job(job(bert, place, tmp_path / "whole"))
    original, calls = pq.write_table, []

    def full(table, path, **options):
        calls.append(path)
        original(table, path, **options)
        if len(calls) == 2:
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(LoadError, match=r"No space left on device. Written files remain"):
        run_job(job(bert, place, tmp_path / "out"))
    assert "part-000001.parquet" not in contents(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial"))
    partial = whyformer.read(tmp_path / "out")
    assert not partial.complete
    assert len(partial) == 14
    monkeypatch.undo()
    run_job(job(bert, place, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(whole.path)


def test_out_of_memory_halves_the_batches_for_good_and_a_rerun_makes_the_same(bert, tmp_path, monkeypatch):
    place = text_table(tmp_path / "data.jsonl", 28)
    original, sizes = OpenedModel.prepare, []

    def small(opened, inputs):
        sizes.append(len(inputs))
        if len(inputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(opened, inputs)

    run_job(job(bert, place, tmp_path / "large", batch_size=6, limit=14))
    monkeypatch.setattr(OpenedModel, "prepare", small)
    maps = run_job(job(bert, place, tmp_path / "out", batch_size=6))
    assert maps.manifest["batch_sizes"] == [[0, 3]]
    assert max(sizes[2:]) <= 6
    assert sum(size > 3 for size in sizes) == 1
    (tmp_path / "out" / "part-000002.parquet").unlink()
    before = contents(tmp_path / "out")
    run_job(job(bert, place, tmp_path / "out", batch_size=6))
    assert {k: v for k, v in contents(tmp_path / "out").items() if k in before} == before

    def never(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OpenedModel, "prepare", never)
    maps = run_job(job(bert, place, tmp_path / "none", batch_size=2))
    assert len(maps) == 0
    assert {f["reason"][:30] for f in maps.failures().to_pylist()} == {"the row alone does not fit int"}


def test_scores_in_half_precision_or_the_top_alone(bert, tmp_path):
    place = text_table(tmp_path / "data.jsonl", 6)
    whole = list(run_job(job(bert, place, tmp_path / "a")))
    half = run_job(job(bert, place, tmp_path / "b", scores="float16"))
    top = run_job(job(bert, place, tmp_path / "c", scores="top-2"))
    assert str(half.table().schema.field("scores").type) == "list<element: halffloat>"
    assert half.manifest["job"]["scores"] == "float16"
    for e, h, t in zip(whole, half, top, strict=True):
        torch.testing.assert_close(h.scores, e.scores, rtol=2e-3, atol=1e-6)
        words = e.scores[0].index_fill(0, torch.tensor(e.special[0]), 0)  # special tokens are no words
        best = words.abs().topk(2).indices
        kept = torch.zeros_like(e.scores[0])
        kept[best] = words[best]
        torch.testing.assert_close(t.scores[0], kept)


def test_overlays_are_pictures_of_pictures_and_pages_of_texts(bert, vit, tmp_path):
    for model, place, kind in [(vit, pictures(tmp_path / "in", 2), "png"), (bert, text_table(tmp_path / "data.jsonl", 2), "html")]:
        maps = run_job(job(model, place, tmp_path / kind, methods=("gae",), targets="top-2", overlays=True))
        names = sorted(p.name for p in (maps.path / "overlays").iterdir())
        assert [name[:11] for name in names] == ["00000000-0-", "00000000-1-", "00000001-0-", "00000001-1-"]
        assert all(name.endswith(f".{kind}") and "gae" in name for name in names)
        before = contents(maps.path)
        (maps.path / "part-000000.parquet").unlink()
        run_job(job(model, place, tmp_path / kind, methods=("gae",), targets="top-2", overlays=True))
        assert contents(maps.path) == before


def test_a_method_that_has_no_meaning_on_the_model_is_refused_before_work(bert, tmp_path):
    place = text_table(tmp_path / "data.jsonl", 6)
    with pytest.raises(InputError, match="vit_cx explains pictures, and the input is text"):
        run_job(job(bert, place, tmp_path / "out", methods=("gae", "vit_cx")))
    config = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2, num_labels=3)
    model = transformers.SwinForImageClassification(config).eval()
    for out in (None, tmp_path / "swin"):
        with pytest.raises(MethodNotApplicable, match="rollout has no meaning on this model"):
            list(whyformer.explain_many(model, [torch.randn(3, 32, 32)] * 3, ["input_x_gradient", "rollout"], out=out))


def test_a_job_file_is_read_relative_to_itself(bert, tmp_path, monkeypatch):
    text_table(tmp_path / "data.jsonl", 4)
    (tmp_path / "JOB.toml").write_text(f'model = "{bert}"\ninput = "data.jsonl"\nmethods = ["gae", {{method = "rollout", start_layer = 1}}]\nout = "maps/"\n')
    monkeypatch.chdir("/")
    found = read_job(tmp_path / "JOB.toml", limit=3)
    assert (found.batch_size, found.engine, found.options.dtype, found.targets) == ("auto", "local", None, "predicted")
    maps = run_job(found)
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
    "truncate": ({"truncate": "yes"}, "truncate must be true or false"),
    "column": ({"column": 3}, "column must be a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_keys_are_told_before_anything_is_loaded(name):
    change, words = BAD[name]
    with pytest.raises(WhyformerError) as error:
        make_job({"model": "bundled:sst2", "input": "x.jsonl", "out": "maps", **change})
    assert words in str(error.value)


@pytest.mark.parametrize("content", ["model = ", "[" * 5000, "\x00", "a = " + "[" * 2000 + "]" * 2000], ids=["torn", "brackets", "nul", "deep"])
def test_a_file_that_is_no_job_is_a_sentence(tmp_path, content):
    (tmp_path / "JOB.toml").write_text(content)
    with pytest.raises(WhyformerError):
        read_job(tmp_path / "JOB.toml")
    with pytest.raises(LoadError, match="cannot read the job"):
        read_job(tmp_path / "none.toml")
    with pytest.raises(LoadError, match="it is a folder; use --input"):
        read_job(tmp_path)


def test_inputs_that_are_not_there_or_of_another_kind(bert, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xyz").write_text("x")
    (tmp_path / "no_column.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bare.csv").write_text("text\n")
    (tmp_path / "bad.parquet").write_text("PAR1")
    for place, words in {"none": "does not exist", "empty": "holds no picture", "a.xyz": "is not supported", "no_column.csv": "no column",
                         "bare.csv": "has no rows", "bad.parquet": "cannot read", "*.png": "holds no picture"}.items():  # fmt: skip
        with pytest.raises(WhyformerError, match=words):
            run_job(job(bert, tmp_path / place, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_batch_size_fits_a_quarter_of_the_memory(bert, vit, tmp_path, monkeypatch):
    for model, place, values in ((bert, text_table(tmp_path / "data.jsonl", 4), 12 * 8), (vit, pictures(tmp_path / "in", 2), 17 * 16)):
        opened = open_job(job(model, place, tmp_path / "out", methods=("gae",)))
        reads = [read_one(row) for row in opened.rows(0)]
        whole = trial.run_trial(opened.session, reads)
        assert whole.size == 32
        assert whole.pass_bytes > 10 * 4 * values  # several values of each row in each block
        for batch, size in ((1, 1), (5, 4), (8, 8), (100, 32)):
            monkeypatch.setattr(trial, "total_memory", lambda place, batch=batch, held=whole.pass_bytes: 4 * batch * held)
            assert trial.run_trial(opened.session, reads).size == size
        monkeypatch.undo()
        long = replace(opened.session, opened=opened.session.opened.using(checkpoint=True), methods=((find("lrp_ah_ln"), {}),))
        assert 0 < trial.run_trial(long, reads).pass_bytes < whole.pass_bytes
