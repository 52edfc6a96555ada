"""``explain_many`` over all kinds of inputs, and summaries of its output."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
from job_builders import picture_model, pictures, sentences, text_model, text_table
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import datasets
import whyformer
from whyformer.errors import InputError, LoadError
from whyformer.explanation.features import Features
from whyformer.explanation.result import Explanation
from whyformer.jobs import batching, summaries
from whyformer.jobs.sources import open_source
from whyformer.models import Loaded, load
from zoo_evaluate import tiny_bert, tiny_vit


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return load(text_model(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return load(picture_model(tmp_path_factory.mktemp("vit")))


def assert_same_explanations(result, expected):
    assert len(result) == len(expected)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-4, atol=1e-6)
        assert a.target.tolist() == b.target.tolist()


def test_stream_equals_explain_for_any_batch_size(bert):
    texts = sentences(9)
    expected = [whyformer.explain(bert.model, text, "gae", processor=bert.processor) for text in texts]
    for size in (1, 4, "auto"):
        result = list(whyformer.explain_many(bert.model, texts, "gae", processor=bert.processor, batch_size=size))
        assert_same_explanations(result, expected)
        assert [e.tokens for e in result] == [e.tokens for e in expected]
        assert [e.features.texts for e in result] == [[t] for t in texts]


def test_stream_is_lazy_over_infinite_input(bert):
    def endless():
        for i in itertools.count():
            yield "" if i % 3 == 2 else f"{'very ' * (i % 5)}good film"

    stream = whyformer.explain_many(bert.model, endless(), "gae", processor=bert.processor, batch_size=2)
    first = list(itertools.islice(stream, 40))
    assert [len(e.tokens[0]) - 4 for e in first] == [i % 5 for i in range(60) if i % 3 != 2][:40]
    assert [f.row for f in stream.failures[:19]] == list(range(2, 59, 3))
    with pytest.raises(InputError, match="input 2: the text is empty"):
        list(whyformer.explain_many(bert.model, endless(), "gae", processor=bert.processor, on_error="raise"))


@pytest.mark.parametrize("size", [4, "auto"])
def test_generator_loses_no_row_to_trial(bert, tmp_path, size):
    """Rows that the trial consumes from an iterator are explained too."""
    texts = [f"{'very ' * (i % 5)}good film" for i in range(150)]
    maps = whyformer.explain_many(bert.model, iter(texts), "gae", processor=bert.processor, batch_size=size, out=tmp_path / "out", rows_per_part=70)
    assert maps.table(["row"]).column("row").to_pylist() == list(range(150))
    assert maps.table(["text"]).column("text").to_pylist() == texts
    rows = open_source(iter(texts)).rows
    assert [r.index for r in itertools.islice(rows(0), 40)] == list(range(40))
    assert [r.index for r in rows(10)] == list(range(10, 150))
    with pytest.raises(InputError, match="item 64 of an iterator cannot be read twice"):
        list(rows(0))


class Listed(Dataset):
    """A map-style data set; an item that is an exception is raised."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


class Streamed(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_data_sets_and_loaders_of_tensors_equal_explain():
    model = tiny_vit()
    pixels, labels = torch.randn(7, 3, 32, 32), torch.arange(7) % 4
    expected = list(whyformer.explain(model, pixels, "gae", labels.tolist()))
    options = {"targets": "column:label", "batch_size": 3}
    pairs = TensorDataset(pixels, labels)
    for data in (pairs, DataLoader(pairs, batch_size=4), list(pairs), Streamed(list(pairs)), DataLoader(Streamed(list(pairs)), batch_size=2)):
        assert_same_explanations(list(whyformer.explain_many(model, data, "gae", **options)), expected)
    expected_plain = list(whyformer.explain(model, pixels, "gae"))
    mappings = [{"pixel_values": p, "labels": n} for p, n in zip(pixels, labels, strict=True)]
    for data in (list(pixels), [p[None] for p in pixels], DataLoader(pixels, batch_size=3), mappings, DataLoader(mappings, batch_size=3)):
        assert_same_explanations(list(whyformer.explain_many(model, data, "gae", batch_size=4)), expected_plain)


def test_token_ids_of_different_lengths_equal_explain(bert):
    ids = [dict(bert.processor(text, return_tensors="pt")) for text in sentences(6)]
    expected = [whyformer.explain(bert.model, encoding, "gae") for encoding in ids]
    assert_same_explanations(list(whyformer.explain_many(bert.model, ids, "gae", batch_size=4)), expected)
    flat = [{k: v[0] for k, v in encoding.items()} for encoding in ids]
    assert_same_explanations(list(whyformer.explain_many(bert.model, flat, "gae", batch_size=4)), expected)


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("axis", [False, True])
def test_tensors_of_several_kinds_equal_explain(axis, pictures):
    """A sample may have a batch axis or none, also if its tensors have different numbers of axes."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = hf.LayoutLMv3Config(vocab_size=30, coordinate_size=5, shape_size=6, input_size=32, patch_size=8, **sizes)
    model, rows = hf.LayoutLMv3ForSequenceClassification(config).eval(), []
    for count in (4, 4, 6):
        ids = torch.randint(5, 20, (1, count))
        row = {"input_ids": ids, "bbox": torch.tensor([0, 0, 50, 60]).expand(1, count, 4), "attention_mask": torch.ones(1, count)}
        rows.append(row | ({"pixel_values": torch.randn(1, 3, 32, 32)} if pictures else {}))
    expected = [whyformer.explain(model, row, "gae", target=1) for row in rows]
    data = rows if axis else [{name: value[0] for name, value in row.items()} for row in rows]
    for size in (1, 3):
        assert_same_explanations(list(whyformer.explain_many(model, data, "gae", [1], batch_size=size)), expected)


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("axis", [False, True])
def test_each_picture_is_compared_with_the_texts_of_its_row(axis, texts):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    text = {"vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 1, **sizes}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **sizes}, projection_dim=16)).eval()
    rows = [{"input_ids": torch.cat([torch.randint(2, 40, (texts, 4)), torch.ones(texts, 1).long()], 1), "pixel_values": torch.randn(1, 3, 32, 32)} for _ in range(3)]
    expected = [whyformer.explain(model, row, "gae", target=texts - 1) for row in rows]
    data = rows if axis else [{**row, "input_ids": row["input_ids"].squeeze(0), "pixel_values": row["pixel_values"][0]} for row in rows]
    results = list(whyformer.explain_many(model, data, "gae", [texts - 1]))
    for e, same in zip(results, expected, strict=True):
        assert e.inputs == same.inputs and e.probability(texts - 1) == pytest.approx(same.probability(texts - 1), abs=1e-5)
        assert all(torch.allclose(e.part(name).scores, same.part(name).scores, atol=1e-6) for name in e.inputs)


def test_pictures_from_any_source_equal_explain(vit, tmp_path):
    folder = pictures(tmp_path / "in", 4)
    files = sorted(folder.glob("*.png"))
    expected = [whyformer.explain(vit.model, f, "gae", processor=vit.processor) for f in files]
    opened = [Image.open(f) for f in files]
    saved = datasets.Dataset.from_dict({"image": [str(f) for f in files], "label": [0, 1, 2, 3]}).cast_column("image", datasets.Image())
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "parts")
    memory = fsspec.filesystem("memory")
    for f in files:
        memory.pipe(f"/pictures/{f.name}", f.read_bytes())
    for data in (folder, str(folder), f"{folder}/*.png", files, [str(f) for f in files], opened, saved, f"hf:{tmp_path / 'saved'}",
                 str(tmp_path / "saved"), f"hf:{tmp_path / 'parts'}:train", "memory://pictures/", "memory://pictures/*.png",
                 [io.BytesIO(f.read_bytes()) for f in files], Listed([(o, 1) for o in opened])):  # fmt: skip
        assert_same_explanations(list(whyformer.explain_many(vit.model, data, "gae", processor=vit.processor)), expected)
    with pytest.raises(InputError, match=r"has the splits train, test"):
        open_source(f"hf:{tmp_path / 'parts'}")
    with pytest.raises(LoadError, match="cannot load the data set"):
        open_source("hf:no/such_data_set_of_anyone")
    pq.write_table(pa.table({"image": [{"bytes": f.read_bytes(), "path": f.name} for f in files]}), tmp_path / "pictures.parquet")
    (tmp_path / "paths.jsonl").write_text("".join(json.dumps({"path": f"in/{f.name}"}) + "\n" for f in files))
    for data in (tmp_path / "pictures.parquet", tmp_path / "paths.jsonl"):
        assert_same_explanations(list(whyformer.explain_many(vit.model, data, "gae", processor=vit.processor)), expected)


def test_exception_of_a_row_is_recorded_as_its_failure(vit, tmp_path):
    good = Image.new("RGB", (40, 40), "red")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    rows = [good, RuntimeError("the disk of row 1"), tmp_path / "broken.png", tmp_path / "none.png", 17, good, torch.full((3, 32, 32), torch.nan)]
    stream = whyformer.explain_many(vit.model, Listed(rows), "gae", processor=vit.processor)
    assert len(list(stream)) == 2
    assert [f.row for f in stream.failures] == [1, 2, 3, 4, 6]
    assert [f.kind for f in stream.failures] == ["RuntimeError", "LoadError", "LoadError", "InputError", "InputError"]

    def torn():
        yield good
        raise RuntimeError("the line is dead")

    with pytest.raises(RuntimeError, match="the line is dead"):  # a generator ends with its exception
        list(whyformer.explain_many(vit.model, torn(), "gae", processor=vit.processor))


@pytest.mark.parametrize(("row", "place"), [("", "input 0: "), ({"id": "first", "text": ""}, r"input 0 \(first\): ")])
def test_error_of_a_row_names_it_once(bert, row, place):
    with pytest.raises(InputError, match=place):
        list(whyformer.explain_many(bert.model, [row], "gae", processor=bert.processor))


def test_several_methods_and_targets_equal_explain(bert):
    methods = ["transformer_attribution", ("integrated_gradients", {"steps": 4}), {"method": "rollout", "start_layer": 1}]
    results = list(whyformer.explain_many(bert.model, sentences(3), methods, "top-2", bert.processor))
    assert len(results) == 3 * 3 * 2
    assert [e.method for e in results[:6]] == ["transformer_attribution"] * 2 + ["integrated_gradients"] * 2 + ["rollout"] * 2
    for i, e in enumerate(results):
        text, best = sentences(3)[i // 6], results[i].logits[0].argsort(descending=True).tolist()
        assert e.target.tolist() == [best[i % 2]]
        expected = whyformer.explain(bert.model, text, e.method, best[i % 2], bert.processor, **e.settings)
        torch.testing.assert_close(e.scores, expected.scores, rtol=1e-4, atol=1e-6)
    named = whyformer.explain_many(bert.model, sentences(1), targets=["good", 0], processor=bert.processor)
    assert [e.target_names for e in named] == [["good"], ["bad"]]


def test_invalid_arguments_raise_before_iteration(bert):
    model, processor = bert.model, bert.processor
    for options, message in [({"batch_size": 0}, "batch_size"), ({"workers": 0}, "workers"), ({"on_error": "skip"}, "on_error"),
                         ({"targets": "most"}, "targets must be"), ({"targets": ["ugly"]}, "ugly"), ({"method": []}, "no methods"),
                         ({"method": "gea"}, "Did you mean"), ({"scores": "float16"}, "need out=")]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            whyformer.explain_many(model, ["a film"], processor=processor, **options)
    for data in (17, {"input_ids": torch.ones(1, 3)}, torch.ones(1, 3)):
        with pytest.raises(InputError, match="data must be an iterable"):
            whyformer.explain_many(model, data, processor=processor)


# -- summaries of data sets -------------------------------------------------------------------------------------------
def test_word_summary_has_shares_intervals_and_examples(bert, tmp_path):
    texts = [f"{'good' if i % 2 else 'bad'} film {'was' if i % 3 else 'is'} fine, not slow." for i in range(30)]
    maps = whyformer.explain_many(bert.model, texts, "input_x_gradient", ["good"], bert.processor, out=tmp_path / "out")
    summary = maps.words(count=50, least=2)
    assert summary.texts == 30
    assert (summary.method, summary.target) == ("input_x_gradient", "good")
    results = {w.word: w for w in summary.words}
    assert set(results) == {"good", "bad", "film", "was", "is", "fine", "not", "slow"}
    shares = []
    for e in maps:
        word = "good" if e.tokens[0][1] == "good" else None
        if word:
            words = e.scores[0].index_fill(0, torch.tensor(e.special[0]), 0)
            shares.append(float(words[e.tokens[0].index("good")] / words.abs().sum()))
    assert results["good"].share.value == pytest.approx(np.mean(shares), abs=1e-6)
    assert results["good"].share.count == 15
    assert results["good"].share.low <= results["good"].share.value <= results["good"].share.high
    assert all("good" in text for text in results["good"].examples)
    values = [w.share.value for w in summary.words]
    assert values == sorted(values, reverse=True)
    assert str(summary).startswith("input_x_gradient, good: 30 texts\n")
    with pytest.raises(InputError, match="there is no method 'gae'"):
        maps.words(method="gae")
    with pytest.raises(InputError, match="texts have no mean map"):
        maps.mean_map()


@pytest.mark.parametrize("change", [lambda t: t.add_tokens(["anotherword"]), lambda t: setattr(t, "model_max_length", 5)])
@pytest.mark.parametrize("saved", [False, True])
def test_folder_of_another_processor_is_refused(change, saved, tmp_path):
    model, tokenizer = tiny_bert()
    words = [word for word in tokenizer.get_vocab() if word.isalpha()][:3]

    def run(processor):
        named = tmp_path / "model"
        if saved:
            model.save_pretrained(named)
            processor.save_pretrained(named)
        opened = {"model": str(named)} if saved else {"model": model, "processor": processor}
        return whyformer.explain_many(data=words, method="input_x_gradient", out=tmp_path / "out", **opened)

    first = run(tokenizer).table()
    assert run(copy.deepcopy(tokenizer)).table().equals(first)
    other = copy.deepcopy(tokenizer)
    change(other)
    with pytest.raises(InputError, match="processor was"):
        run(other)


def test_mean_map_of_videos_has_their_time_steps(monkeypatch):
    features = Features(grid=(2, 3), frames=4)
    first, second = (Explanation(torch.rand(1, 24) - 0.5, "patch", "m", {}, torch.tensor([0]), torch.zeros(1, 2), features=features) for _ in range(2))
    monkeypatch.setattr(summaries, "selected", lambda *args, **options: iter([first, second]))
    expected = sum(e.scores[0].double().numpy() / float(e.scores.double().abs().sum()) for e in (first, second)) / 2
    assert summaries.mean_map(None).mean.shape == (4, 2, 3)
    assert summaries.mean_map(None).mean.ravel() == pytest.approx(expected)


def test_mean_map_of_aligned_pictures_is_mean_of_normalized_maps(vit, tmp_path):
    pixels = list(torch.randn(5, 3, 32, 32))
    maps = whyformer.explain_many(vit.model, pixels, "gae", [1], out=tmp_path / "out")
    normalized = np.stack([e.scores[0].reshape(4, 4).double().numpy() / float(e.scores.abs().sum()) for e in maps])
    result = maps.mean_map()
    assert result.count == 5
    np.testing.assert_allclose(result.mean, normalized.mean(0), atol=1e-7)
    np.testing.assert_allclose(result.deviation, normalized.std(0), atol=1e-7)


def test_drift_measures_changed_predictions_and_scores(bert, tmp_path):
    texts = sentences(12)
    before = whyformer.explain_many(bert.model, texts, "gae", ["good"], bert.processor, out=tmp_path / "a")
    repeated = whyformer.explain_many(bert.model, texts, "gae", ["good"], bert.processor, out=tmp_path / "b")
    unchanged = before.drift(repeated)
    assert (unchanged.rows, unchanged.changed, unchanged.agreement.value, unchanged.probability.value) == (12, 0, pytest.approx(1), 0)
    other = load(text_model(tmp_path / "other")).model
    with torch.no_grad():
        other.classifier.weight.neg_()
        other.classifier.bias.neg_()
    after = whyformer.explain_many(other, texts, "gae", ["good"], bert.processor, out=tmp_path / "c")
    drift = before.drift(after)
    assert drift.changed == 12  # two classes whose logits changed places
    shift = [float(b.probabilities()[0, 1] - a.probabilities()[0, 1]) for a, b in zip(before, after, strict=True)]
    assert drift.probability.value == pytest.approx(np.mean(shift), abs=1e-6)
    assert drift.agreement.value < 1
    assert drift.largest[0][1] == min(value for _, value in drift.largest)
    elsewhere = whyformer.explain_many(bert.model, sentences(12, seed=9), "gae", ["good"], bert.processor, out=tmp_path / "d")
    with pytest.raises(InputError, match="no row in common"):
        before.drift(elsewhere)


def test_estimate_predicts_cost_without_writing(tmp_path):
    from whyformer.jobs.costs import estimate
    from whyformer.jobs.description import Job
    from whyformer.jobs.engines import run_job

    table = text_table(tmp_path / "data.jsonl", 200, bad=(0,))
    job = Job(model=text_model(tmp_path / "bert"), input=str(table), out=str(tmp_path / "out"), methods=("gae", "rollout"))
    cost = estimate(job)
    assert not (tmp_path / "out").exists()
    assert (cost.rows, cost.finished, cost.failed, cost.batch_size) == (200, 0, 1, 32)
    assert cost.memory > 0 < cost.seconds
    assert cost.warnings == ["1 of 67 rows of the trial failed; the first: r0: the text is empty"] or cost.sampled == 64
    maps = run_job(job)
    size = sum(p.stat().st_size for p in maps.path.glob("part-*"))
    assert size / 3 < cost.bytes < size * 12  # small files are mostly metadata
    assert "200 rows, 200 of them finished: about 1 s" in estimate(job).sentence()


def test_explain_many_with_ray_engine_needs_names_of_model_and_input(bert, tmp_path, monkeypatch):
    from whyformer.jobs import engines

    jobs, model = [], text_model(tmp_path / "bert")
    table = text_table(tmp_path / "data.jsonl", 4)
    monkeypatch.setattr(engines, "run_on_ray", lambda job, **more: jobs.append(job) or engines.explain_opened(engines.open_job(job), None, print))
    maps = whyformer.explain_many(model, table, "gae", out=tmp_path / "out", engine="ray", actors=3, truncate=True, batch_size=2)
    assert len(maps) == 4
    assert [(job.engine, job.actors, job.batch_size, job.options.truncate) for job in jobs] == [("ray", 3, 2, True)]
    for model_or_name, data, parameter in ((bert.model, str(table), "model"), (model, ["A film."], "input")):
        with pytest.raises(InputError, match=f"name of the {parameter}"):
            whyformer.explain_many(model_or_name, data, "gae", processor="x", out=tmp_path / "no", engine="ray")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_table_is_read_once_for_count_and_digest(tmp_path, suffix):
    from whyformer.jobs import sources

    path, chunks = text_table(tmp_path / f"data.{suffix}", 3000), []

    class Counted(io.BytesIO):
        def read(self, *count):
            chunks.append(content := super().read(*count))
            return content

    def opened():
        return Counted(path.read_bytes())

    source = sources._of_table(path.name, opened, None, None, None)
    assert (source.count, b"".join(chunks)[: path.stat().st_size]) == (3000, path.read_bytes())
    assert source.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(b"".join(chunks)) < 1.5 * path.stat().st_size


def test_word_summary_reads_only_explanations_of_its_class(bert, tmp_path, monkeypatch):
    from whyformer.jobs import reading

    maps = whyformer.explain_many(bert.model, sentences(12), ["gae", "input_x_gradient"], "all", bert.processor, out=tmp_path / "out")
    expected = [e for e in maps if (e.method, int(e.target[0])) == ("gae", 1)]
    restored, original = [], reading.explanation_of
    monkeypatch.setattr(reading, "explanation_of", lambda row, model: restored.append((row["method"], row["target"])) or original(row, model))
    assert maps.words(1, "gae").texts == len(expected) == 12
    assert restored == [("gae", 1)] * 12


def test_processor_by_name_is_of_the_modality_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vit()
    monkeypatch.setattr(batching, "load", lambda name, **options: Loaded(model, None, "sound", name))
    hf.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    session = batching.open_session("sounds", str(tmp_path), ["saliency"])
    assert isinstance(session.processor, hf.Wav2Vec2FeatureExtractor)
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "config.json")
    with pytest.raises(LoadError, match="none"):
        batching.open_session("sounds", str(tmp_path), ["saliency"])
