"""``explain_many`` on data with columns: DataFrames, Series, lists and iterators of dicts, data sets, Arrow tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from job_builders import picture_model, pictures, sentences, text_model
from PIL import Image
from torch.utils.data import Dataset

import datasets
import whyformer
from whyformer.errors import InputError, LoadError
from whyformer.jobs import many
from whyformer.jobs.sources import open_source
from whyformer.models import load
from zoo_evaluate import tiny_vit

TEXTS = sentences(7)
LABELS = [i % 2 for i in range(7)]
NAMES = [f"r{i}" for i in range(7)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return load(text_model(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return load(picture_model(tmp_path_factory.mktemp("vit")))


def columns(text: str = "text", texts=TEXTS) -> dict[str, list]:
    return {"label": LABELS[: len(texts)], text: list(texts), "name": NAMES[: len(texts)]}


def dicts(**named) -> list[dict]:
    data = columns(**named)
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


KINDS = {
    "DataFrame": lambda **named: pd.DataFrame(columns(**named)),
    "DataFrame with an index": lambda **named: pd.DataFrame(columns(**named), index=pd.Index(range(10, 80, 10)[: len(named.get("texts", TEXTS))])),
    "list of dicts": dicts,
    "tuple of dicts": lambda **named: tuple(dicts(**named)),
    "iterator of dicts": lambda **named: iter(dicts(**named)),
    "datasets.Dataset": lambda **named: datasets.Dataset.from_dict(columns(**named)),
    "Dataset with a format": lambda **named: datasets.Dataset.from_dict(columns(**named)).with_format("numpy"),
    "datasets.IterableDataset": lambda **named: datasets.Dataset.from_dict(columns(**named)).to_iterable_dataset(),
    "Arrow table": lambda **named: pa.table(columns(**named)),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def explained(bert, data, **options):
    return list(whyformer.explain_many(bert.model, data, "gae", processor=bert.processor, **options))


@every_kind
def test_text_column_is_explained_and_label_column_is_target(bert, kind):
    expected = [whyformer.explain(bert.model, text, "gae", label, bert.processor) for text, label in zip(TEXTS, LABELS, strict=True)]
    result = explained(bert, kind(), targets="column:label", batch_size=3)
    assert [e.features.texts for e in result] == [[text] for text in TEXTS]
    assert [e.target.tolist() for e in result] == [[label] for label in LABELS]
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-4, atol=1e-6)


@every_kind
def test_named_columns_are_input_and_id(bert, tmp_path, kind):
    result = explained(bert, kind(text="review"), column="review")
    assert [e.features.texts for e in result] == [[text] for text in TEXTS]
    options = {"column": "review", "id_column": "name", "out": tmp_path / "out", "rows_per_part": 3}
    maps = whyformer.explain_many(bert.model, kind(text="review"), "gae", processor=bert.processor, **options)
    assert maps.table(["id"]).column("id").to_pylist() == NAMES
    assert maps.table(["text"]).column("text").to_pylist() == TEXTS


@every_kind
@pytest.mark.parametrize("options", [{"column": "reviews"}, {}, {"column": "review", "id_column": "names"}])
def test_missing_column_error_lists_existing_columns(bert, monkeypatch, kind, options):
    data = kind(text="review")
    if not isinstance(data, datasets.IterableDataset) and hasattr(data, "__len__"):
        monkeypatch.setattr(many, "open_session", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    monkeypatch.setattr(many, "run_trial", lambda *args, **kwargs: pytest.fail("a row was explained"))
    with pytest.raises(InputError, match="'label', 'review', 'name'"):
        list(whyformer.explain_many(bert.model, data, "gae", processor=bert.processor, **options))


@pytest.mark.parametrize("kind", [pd.Series, lambda texts: pd.Series(texts, index=range(10, 17)), lambda texts: pd.Series(texts, dtype=object),
                                  lambda texts: datasets.Dataset.from_dict({"a": texts})["a"], pa.array, lambda texts: pa.chunked_array([texts[:2], texts[2:]])])  # fmt: skip
def test_single_column_is_explained(bert, kind):
    assert [e.features.texts for e in explained(bert, kind(TEXTS))] == [[text] for text in TEXTS]


def test_frame_larger_than_one_chunk(bert, tmp_path):
    texts = [f"{'very ' * (i % 5)}good film" for i in range(600)]
    frame = pd.DataFrame({"text": texts, "id": [f"r{i}" for i in range(600)]})
    maps = whyformer.explain_many(bert.model, frame, "rollout", processor=bert.processor, out=tmp_path / "out", rows_per_part=250)
    table = maps.table(["row", "id", "text"])
    assert table.column("row").to_pylist() == list(range(600))
    assert table.column("id").to_pylist() == frame["id"].tolist()
    assert table.column("text").to_pylist() == texts


def test_missing_values_are_row_failures(bert):
    for frame in (pd.DataFrame({"text": ["a film", None, np.nan]}), pd.DataFrame({"text": ["a film", None, None]}, dtype="string"),
                  pd.DataFrame({"text": ["a film", None, np.nan]}, dtype=object), pa.table({"text": ["a film", None, None]})):  # fmt: skip
        stream = whyformer.explain_many(bert.model, frame, "gae", processor=bert.processor)
        assert len(list(stream)) == 1
        assert [(f.row, f.kind) for f in stream.failures] == [(1, "InputError"), (2, "InputError")]
        assert all("missing" in f.reason for f in stream.failures)


def test_text_pairs_and_class_names_as_labels(bert):
    frame = pd.DataFrame({"text": ["a good film"], "text_pair": ["a bad film"], "label": ["good"]})
    (e,) = explained(bert, frame, targets="column:label")
    assert "bad" in e.tokens[0]
    assert e.target_names == ["good"]


def test_columns_of_pictures_equal_explain(vit, tmp_path):
    files = sorted(pictures(tmp_path / "in", 3).glob("*.png"))
    expected = [whyformer.explain(vit.model, f, "gae", processor=vit.processor) for f in files]
    opened, raw = [Image.open(f) for f in files], [np.asarray(Image.open(f)) for f in files]
    for values in ([str(f) for f in files], files, opened, raw, [{"bytes": f.read_bytes()} for f in files]):
        series = [] if isinstance(values[0], dict) else [pd.Series(values)]
        for data in (pd.DataFrame({"image": values}), [{"image": value} for value in values], *series):
            result = list(whyformer.explain_many(vit.model, data, "gae", processor=vit.processor))
            for a, b in zip(result, expected, strict=True):
                torch.testing.assert_close(a.scores, b.scores, rtol=1e-4, atol=1e-6)


def test_data_set_whose_transform_changes_columns(vit):
    model, pixels = tiny_vit(), torch.randn(4, 3, 32, 32)
    data = datasets.Dataset.from_dict({"number": [0, 1, 2, 3]}).with_transform(lambda batch: {"pixel_values": [pixels[i] for i in batch["number"]]})
    result = list(whyformer.explain_many(model, data, "gae"))
    torch.testing.assert_close(torch.cat([e.scores for e in result]), whyformer.explain(model, pixels, "gae").scores, rtol=1e-4, atol=1e-6)


def test_rows_without_the_column_are_failures(bert):
    stream = whyformer.explain_many(bert.model, [{"name": "a"}, {"text": "a film"}, {"text": "a play"}], "gae", processor=bert.processor)
    assert len(list(stream)) == 2
    assert [f.row for f in stream.failures] == [0]


class Broken(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        raise RuntimeError(f"the disk of row {index}")


@pytest.mark.parametrize(("data", "reason"), [(["", " "], "the text is empty"), (Broken(), "the disk of row 0"), (pd.DataFrame({"text": [1.5, 2.5]}), "float")])
def test_first_reason_is_raised_if_every_row_fails(bert, tmp_path, data, reason):
    stream = whyformer.explain_many(bert.model, data, "gae", processor=bert.processor)
    with pytest.raises(InputError, match=reason):
        list(stream)
    assert [f.row for f in stream.failures] == list(range(len(data)))
    assert list(stream) == []
    for _ in range(2):  # also of a finished job
        with pytest.raises(InputError, match=reason):
            whyformer.explain_many(bert.model, data, "gae", processor=bert.processor, out=tmp_path / "out")
    maps = whyformer.read(tmp_path / "out")
    assert maps.failures().column("row").to_pylist() == list(range(len(data)))


def test_columns_of_saved_data_set(tmp_path):
    datasets.Dataset.from_dict(columns(text="review")).save_to_disk(tmp_path / "saved")
    assert [row.id for row in open_source(f"hf:{tmp_path / 'saved'}", "review", "name").rows(0)] == NAMES
    for names in ((None, None), ("text", None), ("review", "id")):
        with pytest.raises(InputError, match="'label', 'review', 'name'"):
            open_source(str(tmp_path / "saved"), *names)


def test_missing_column_creates_no_folder(bert, tmp_path):
    for name, data in {"a": iter(dicts(text="review")), "b": pd.DataFrame(columns(text="review"))}.items():
        with pytest.raises(InputError, match="'review'"):
            whyformer.explain_many(bert.model, data, "gae", processor=bert.processor, out=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_empty_data_gives_empty_result(bert):
    assert explained(bert, pd.DataFrame({"text": []})) == []
    assert explained(bert, []) == []


def test_data_set_error_without_a_message_names_the_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(LoadError, match="RuntimeError"):
        open_source("hf:reviews")
