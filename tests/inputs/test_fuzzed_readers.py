"""Readers of damaged files return values or raise WhyformerError, without hanging or filling memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import resource
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mutations import damaged, mutated
from whyformer.datasets.labelled import mnist, read_idx
from whyformer.datasets.masks import indexed_masks, oxford_pets
from whyformer.datasets.samples import LayoutError
from whyformer.datasets.texts import bace, eraser, imdb, meld, sst2, tweeteval
from whyformer.errors import WhyformerError
from whyformer.inputs.argument import read_file
from whyformer.jobs.sources import open_source

few = settings(max_examples=30, suppress_health_check=list(HealthCheck))


def picture(kind: str, mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def sound(width: int, channels: int) -> bytes:
    with wave.open(buffer := io.BytesIO(), "wb") as file:
        file.setparams((channels, width, 800, 0, "NONE", ""))
        file.writeframes(bytes(range(240)))
    return buffer.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), buffer := io.BytesIO(), row_group_size=2)
    return buffer.getvalue()


ROWS = [{"id": f"r{i}", "text": text, "label": i % 2} for i, text in enumerate(("a good film", "dull", "fine"))]
SINGLE: dict[str, Callable[[], bytes]] = {
    **{f"picture.{kind.lower()}": (lambda kind=kind: picture(kind)) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")},
    **{f"sound{width}{channels}.wav": (lambda w=width, c=channels: sound(w, c)) for width, channels in ((1, 1), (2, 2), (3, 1), (4, 2))},
    "fractions.wav": lambda: b"RIFF\x34\0\0\0WAVEfmt \x10\0\0\0\x03\0\x01\0\x80>\0\0\0\xfa\0\0\x04\0 \0data\x10\0\0\0" + np.float32([0, 0.5, -0.5, 1]).tobytes(),
    "text.txt": lambda: "A charming film — naïve, though.\n".encode(),
}  # fmt: skip
TABLES = {
    "rows.jsonl": lambda: "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "rows.csv": lambda: b'id,text,label\nr0,"a, good",0\nr1,dull,1\n',
    "rows.parquet": lambda: parquet(ROWS),
}


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


HEAD = "Sr No.,Utterance,Speaker,Emotion,Sentiment,Dialogue_ID,Utterance_ID\n"
EVIDENCE = {"annotation_id": "d.txt", "classification": "NEG", "evidences": [[{"docid": "d.txt", "start_token": 0, "end_token": 2}]]}
DATA: dict[str, tuple[Callable[..., Any], dict[str, bytes]]] = {
    "mnist": (mnist, {"t10k-images-idx3-ubyte.gz": gzip.compress(idx(np.zeros((2, 3, 4), np.uint8)), mtime=0), "t10k-labels-idx1-ubyte": idx(np.array([7, 2], np.uint8))}),
    "index": (indexed_masks, {"i.png": picture("PNG"), "m.png": picture("PNG", "L"), "index.json": json.dumps([{"image": "i.png", "mask": "m.png", "imagenet_class": 7}]).encode()}),
    "pets": (oxford_pets, {"images/A_1.jpg": picture("JPEG"), "annotations/trimaps/A_1.png": picture("PNG", "L"), "annotations/test.txt": b"# a comment\nA_1 1 1 1\n"}),
    "sst2": (sst2, {"dev.tsv": b"sentence\tlabel\na film\t1\nbad\t0\n"}),
    "imdb": (imdb, {"neg/1_2.txt": b"dull<br />film", "pos/0_9.txt": b"great"}),
    "bace": (bace, {"bace.csv": b"smiles,CID,Class,Model\nCC,B1,1,Train\nCO,B2,0,Test\n"}),
    "tweeteval": (tweeteval, {"mapping.txt": b"0\tanger\n1\tjoy\n", "test_text.txt": b"so happy\nargh\n", "test_labels.txt": b"1\n0\n"}),
    "meld": (meld, {"test_sent_emo.csv": (HEAD + '1,"Oh, no",Joey,sadness,negative,0,3\n').encode()}),
    "eraser": (eraser, {"docs/d.txt": b"a b c\nd e f\n", "val.jsonl": json.dumps(EVIDENCE).encode() + b"\n"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _limited_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024  # kB; an image may have 64 megapixels


def read_rows(path: Path) -> None:
    with contextlib.suppress(WhyformerError):
        source = open_source(str(path), None, None)
        assert [row.index for row in source.rows(0)] == list(range(source.count))
        for row in source.rows(1):
            with contextlib.suppress(WhyformerError):
                row.read()


@pytest.mark.parametrize(("name", "make", "read"), [*((*one, read_file) for one in SINGLE.items()), *((*one, read_rows) for one in TABLES.items())])
@given(data=st.data())
@few
def test_damaged_file_is_read_or_raises(name, make, read, data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data.draw(damaged(make())))
    with contextlib.suppress(WhyformerError):
        read(path)


@given(st.lists(mutated(ROWS[0]), min_size=1, max_size=3))
@few
def test_json_lines_of_any_values_are_read_or_raise(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "values.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_rows(path)


def use(reader: Callable[..., Any], folder: Path) -> None:
    with contextlib.suppress(WhyformerError):
        for sample in reader(folder):
            for load in (getattr(sample, "load", None), getattr(sample, "mask", None)):
                with contextlib.suppress(WhyformerError):
                    if load is not None:
                        load()


@pytest.mark.parametrize("name", DATA)
@given(data=st.data())
@few
def test_damaged_data_set_is_read_or_raises(name, data, tmp_path_factory):
    reader, files = DATA[name]
    folder = tmp_path_factory.getbasetemp() / name
    broken = data.draw(st.sampled_from(sorted(files)))
    for relative_path, content in files.items():
        (folder / relative_path).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative_path).write_bytes(data.draw(damaged(content)) if relative_path == broken else content)
    use(reader, folder)


@pytest.mark.parametrize(("name", "file"), [("index", "index.json"), ("eraser", "val.jsonl")])
@given(data=st.data())
@few
def test_index_of_any_values_is_read_or_raises(name, file, data, tmp_path_factory):
    reader, files = DATA[name]
    folder = tmp_path_factory.getbasetemp() / name
    for relative_path, content in files.items():
        (folder / relative_path).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative_path).write_bytes(content if relative_path != file else json.dumps(data.draw(mutated(json.loads(content)))).encode())
    use(reader, folder)


BAD = {
    "more axes than bytes": b"\0\0\x08\xff" + b"\xff" * 40,
    "sizes that multiply beyond all numbers": b"\0\0\x08\x03" + b"\xff" * 12,
    "a gzip that holds four gigabytes": gzip.compress(b"\0" * 2**20, mtime=0) * 4096,
    "a gzip that is none behind its head": b"\x1f\x8b\x08" + b"\xff" * 50,
}


@pytest.mark.parametrize("name", BAD)
def test_hostile_idx_file_raises(name, tmp_path, monkeypatch):
    monkeypatch.setattr("whyformer.datasets.labelled._MOST_BYTES", 2**24)
    (tmp_path / "x").write_bytes(BAD[name])
    with pytest.raises(LayoutError):
        read_idx(tmp_path / "x")


@pytest.mark.parametrize("kind", ["ArrowInvalid", "ArrowNotImplementedError", "ArrowKeyError", "ArrowTypeError", "ArrowException"])
def test_arrow_errors_become_whyformer_errors(kind, tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def fails(file):
        raise getattr(arrow, kind)("Integers not in cstdint are not implemented")

    (tmp_path / "rows.parquet").write_bytes(TABLES["rows.parquet"]())
    monkeypatch.setattr(parquet, "ParquetFile", fails)
    with pytest.raises(WhyformerError, match=r"cannot read .*rows\.parquet: .*not in cstdint"):
        open_source(str(tmp_path / "rows.parquet"), None, None)
