"""Each reader on a tiny folder of its layout, on wrong layouts, and on the real data if available."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from whyformer.datasets import (
    LayoutError,
    bace,
    class_folders,
    eraser,
    imagenet_samples,
    imagenet_segmentation,
    imagenet_validation,
    imdb,
    indexed_masks,
    meld,
    mnist,
    open_pictures,
    open_texts,
    oxford_pets,
    saved_pictures,
    saved_texts,
    scene_objects,
    sst2,
    tweeteval,
)
from whyformer.datasets.readers import modality_of
from whyformer.errors import InputError, LoadError, MissingExtra

ALL = [bace, class_folders, eraser, imagenet_samples, imagenet_segmentation, imagenet_validation, imdb, indexed_masks, meld,
       mnist, oxford_pets, saved_pictures, saved_texts, sst2, tweeteval]  # fmt: skip


def picture(path: Path, value: int = 100, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 10, 20)).save(path)
    return path


@pytest.mark.parametrize("reader", ALL, ids=lambda r: r.__name__)
def test_missing_or_empty_folder_error_names_expected_layout(reader, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"[Ee]xpected"):
        reader(tmp_path / "nowhere")
    with pytest.raises(LayoutError, match=r"expected .*found .*an empty folder"):
        reader(tmp_path)


def test_imagenet_samples(tmp_path: Path) -> None:
    picture(tmp_path / "0282_n02123159.jpg")
    picture(tmp_path / "0006_n01498041.jpg")
    samples = imagenet_samples(tmp_path)
    assert [(p.id, p.label) for p in samples] == [("0006_n01498041.jpg", 6), ("0282_n02123159.jpg", 282)]
    assert samples[0].load().size == (6, 4)
    assert open_pictures(tmp_path)[0] == "imagenet_samples"
    picture(tmp_path / "cat.jpg")
    with pytest.raises(LayoutError, match=r"cat\.jpg"):
        imagenet_samples(tmp_path)


def test_class_folders(tmp_path: Path) -> None:
    picture(tmp_path / "3" / "a.png")
    picture(tmp_path / "12" / "b.png")
    assert {(p.id, p.label) for p in class_folders(tmp_path)} == {("3/a.png", 3), ("12/b.png", 12)}
    assert open_pictures(tmp_path)[0] == "class_folders"
    picture(tmp_path / "5" / "c.GIF")
    picture(tmp_path / "5" / "d.tiff")
    assert sum(p.label == 5 for p in class_folders(tmp_path)) == 2
    picture(tmp_path / "cats" / "c.png")
    with pytest.raises(LayoutError, match="names do not identify"):
        class_folders(tmp_path)
    assert len(class_folders(tmp_path, {"3": 3, "12": 12, "5": 5, "cats": 1})) == 5


def test_labels_of_thousand_synset_folders_follow_sorted_order(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / f"n{i * 7:08d}").mkdir()
    picture(tmp_path / f"n{41 * 7:08d}" / "a.jpg")
    assert [p.label for p in class_folders(tmp_path)] == [41]


def test_imagenet_validation_maps_devkit_ids_to_sorted_synsets(tmp_path: Path) -> None:
    from scipy.io import savemat

    images, devkit = tmp_path / "val", tmp_path / "ILSVRC2012_devkit_t12" / "data"
    for n in (1, 2, 3):
        picture(images / f"ILSVRC2012_val_{n:08d}.JPEG")
    devkit.mkdir(parents=True)
    with pytest.raises(LayoutError, match="cannot be scored"):
        imagenet_validation(images)
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n")
    synsets = np.array(
        [(1, "n00000009"), (2, "n00000004"), (1001, "n00000001")], dtype=[("ILSVRC2012_ID", "i4"), ("WNID", "O")]
    )
    savemat(devkit / "meta.mat", {"synsets": synsets})
    # ID 2 is n00000004, the first of the sorted synsets, and ID 1 the second; 1001 is not a class
    assert [p.label for p in imagenet_validation(images)] == [0, 1, 0]
    assert [p.label for p in imagenet_validation(images, tmp_path / "ILSVRC2012_devkit_t12")] == [0, 1, 0]


def test_unlabelled_pictures_raise(tmp_path: Path) -> None:
    picture(tmp_path / "holiday.jpg")
    with pytest.raises(LayoutError, match="pictures without labels"):
        open_pictures(tmp_path)


def test_broken_picture_is_named_on_load(tmp_path: Path) -> None:
    (tmp_path / "0001_n00000001.jpg").write_bytes(b"no picture")
    (sample,) = imagenet_samples(tmp_path)
    with pytest.raises(LoadError, match="0001_n00000001"):
        sample.load()


def test_indexed_masks(tmp_path: Path) -> None:
    picture(tmp_path / "i.png")
    Image.fromarray(np.array([[0, 255, 255], [0, 0, 255]], dtype=np.uint8)).save(tmp_path / "m.png")
    rows = [{"image": "i.png", "mask": "m.png", "imagenet_class": 7}]
    (tmp_path / "index.json").write_text(json.dumps(rows))
    (sample,) = indexed_masks(tmp_path)
    assert sample.label == 7
    assert sample.mask is not None
    assert sample.mask().tolist() == [[False, True, True], [False, False, True]]
    (tmp_path / "index.json").write_text(json.dumps([{**rows[0], "mask": "gone.png"}]))
    with pytest.raises(LayoutError, match=r"gone\.png"):
        indexed_masks(tmp_path)
    for text in ("{}", "[]", "nonsense", '[{"image": "i.png"}]'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(LayoutError, match="expected"):
            indexed_masks(tmp_path)


def test_gtsegs_in_matlab_order(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="reading gtsegs_ijcv.mat needs h5py, which is not installed")
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)  # height 5, width 4
    mask = np.zeros((5, 4), dtype=np.uint8)
    mask[1:3, 2:] = 1
    file = tmp_path / "gtsegs_ijcv.mat"
    with h5py.File(file, "w") as data:
        images = data.create_dataset("value/img", (2, 1), dtype=h5py.ref_dtype)
        truths = data.create_dataset("value/gt", (2, 1), dtype=h5py.ref_dtype)
        for i in range(2):
            data[f"refs/i{i}"] = (pixels + i).transpose(2, 1, 0)  # columns first, as MATLAB writes
            data[f"refs/m{i}"] = mask.T
            cell = data.create_dataset(f"refs/c{i}", (1, 1), dtype=h5py.ref_dtype)
            cell[0, 0] = data[f"refs/m{i}"].ref
            images[i, 0], truths[i, 0] = data[f"refs/i{i}"].ref, cell.ref
    samples = imagenet_segmentation(tmp_path)
    assert len(samples) == 2
    assert (np.asarray(samples[1].load()) == pixels + 1).all()
    assert samples[0].mask is not None
    assert (samples[0].mask() == mask.astype(bool)).all()
    assert open_pictures(file)[0] == "gtsegs"
    (tmp_path / "other").mkdir()
    with h5py.File(tmp_path / "other" / "gtsegs_ijcv.mat", "w") as data:
        data["wrong"] = 1
    with pytest.raises(LayoutError, match="found wrong"):
        imagenet_segmentation(tmp_path / "other")
    file.write_bytes(b"MATLAB 5.0")
    with pytest.raises(LayoutError, match="not HDF5"):
        imagenet_segmentation(tmp_path)


def test_oxford_pets(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "Abyssinian_1.jpg")
    trimaps = tmp_path / "annotations" / "trimaps"
    trimaps.mkdir(parents=True)
    Image.fromarray(np.array([[1, 2, 3]], dtype=np.uint8)).save(trimaps / "Abyssinian_1.png")
    with pytest.raises(LayoutError, match="expected"):
        oxford_pets(tmp_path)
    (tmp_path / "annotations" / "test.txt").write_text("# a comment\nAbyssinian_1 1 1 1\n")
    (sample,) = oxford_pets(tmp_path)
    assert (sample.id, sample.label) == ("Abyssinian_1", None)
    assert sample.mask is not None
    assert sample.mask().tolist() == [[True, False, False]]
    assert oxford_pets(tmp_path, classes={"Abyssinian": 4})[0].label == 4
    assert open_pictures(tmp_path)[0] == "pets"


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_mnist(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([7, 2], dtype=np.uint8)))
    samples = mnist(tmp_path)
    assert [p.label for p in samples] == [7, 2]
    assert (np.asarray(samples[1].load())[..., 0] == pixels[1]).all()
    assert open_pictures(tmp_path)[0] == "mnist"
    with pytest.raises(LayoutError, match="expected"):
        mnist(tmp_path, "train")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([7], dtype=np.uint8)))
    with pytest.raises(LayoutError, match="as many labels"):
        mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"nonsense")
    with pytest.raises(LayoutError, match="idx file"):
        mnist(tmp_path)


def test_sst2_keeps_quotes(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text('sentence\tlabel\nan " odd " film \t1\nbad\t0\n')
    samples = sst2(tmp_path)
    assert [(t.id, t.text, t.label) for t in samples] == [("dev-0", 'an " odd " film', 1), ("dev-1", "bad", 0)]
    assert samples.labels == ("negative", "positive")
    for text, message in (
        ("text\ty\nx\t1\n", "columns"),
        ("sentence\tlabel\nx\t5\n", "labels 0 to 1"),
        ("sentence\tlabel\n", "rows"),
    ):
        (tmp_path / "dev.tsv").write_text(text)
        with pytest.raises(LayoutError, match=message):
            sst2(tmp_path)


def test_imdb(tmp_path: Path) -> None:
    for name, text in (("neg/1_2.txt", "dull<br />film"), ("pos/0_9.txt", "great")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert [(t.id, t.text, t.label) for t in imdb(tmp_path)] == [
        ("neg/1_2.txt", "dull film", 0),
        ("pos/0_9.txt", "great", 1),
    ]
    (tmp_path / "pos" / "0_9.txt").unlink()
    with pytest.raises(LayoutError, match="no pos"):
        imdb(tmp_path)


def test_bace(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_text("smiles,CID,Class,Model\nCC,B1,1,Train\nCO,B2,0,Test\n")
    assert [(t.id, t.text, t.label) for t in bace(tmp_path)] == [("B2", "CO", 0)]
    assert len(bace(tmp_path, None)) == 2
    with pytest.raises(LayoutError, match="Valid"):
        bace(tmp_path, "Valid")


def test_tweeteval(tmp_path: Path) -> None:
    (tmp_path / "mapping.txt").write_text("0\tanger\n1\tjoy\n")
    (tmp_path / "test_text.txt").write_text("so happy \u2028 today\nargh\n")
    (tmp_path / "test_labels.txt").write_text("1\n0\n")
    samples = tweeteval(tmp_path)
    assert samples.labels == ("anger", "joy")
    assert [t.label for t in samples] == [1, 0]
    assert len(samples) == 2  # a line separator inside a tweet does not end it
    (tmp_path / "mapping.txt").write_text("1\tjoy\n0\tanger\n")
    with pytest.raises(LayoutError, match="order"):
        tweeteval(tmp_path)
    (tmp_path / "mapping.txt").write_text("0\tanger\n1\tjoy\n")
    (tmp_path / "test_labels.txt").write_text("1\n")
    with pytest.raises(LayoutError, match="2 texts and 1 labels"):
        tweeteval(tmp_path)
    with pytest.raises(LayoutError, match="val_text"):
        tweeteval(tmp_path, "val")


def test_meld(tmp_path: Path) -> None:
    head = "Sr No.,Utterance,Speaker,Emotion,Sentiment,Dialogue_ID,Utterance_ID\n"
    (tmp_path / "test_sent_emo.csv").write_text(head + '1,"Oh, no",Joey,sadness,negative,0,3\n')
    (sample,) = meld(tmp_path).items
    assert (sample.id, sample.text, sample.label) == ("test-0-3", "Oh, no", 0)
    assert meld(tmp_path, task="emotion")[0].label == 5
    (tmp_path / "test_sent_emo.csv").write_text(head + "1,x,Joey,sadness,cheerful,0,3\n")
    with pytest.raises(LayoutError, match="cheerful"):
        meld(tmp_path)


def test_eraser_rationale_is_union_of_all_evidence(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "negR_1.txt").write_text("a b c\nd e f\n")

    def write(*spans: tuple[int, int], doc: str = "negR_1.txt") -> None:
        evidences = [[{"docid": doc, "start_token": a, "end_token": b}] for a, b in spans]
        (tmp_path / "val.jsonl").write_text(
            json.dumps({"annotation_id": "negR_1.txt", "classification": "NEG", "evidences": evidences}) + "\n"
        )

    write((0, 2), (1, 4))
    (sample,) = eraser(tmp_path).items
    assert sample.words == tuple("abcdef")
    assert sample.rationale == (True, True, True, True, False, False)
    write((4, 9))
    with pytest.raises(LayoutError, match="6 tokens"):
        eraser(tmp_path)
    write((0, 1), doc="other.txt")
    with pytest.raises(LayoutError, match="evidence"):
        eraser(tmp_path)
    (tmp_path / "val.jsonl").write_text("{}\n")
    with pytest.raises(LayoutError, match="line 1"):
        eraser(tmp_path)


def _library():  # type: ignore[no-untyped-def]
    """The package datasets, or None; the folder of this test is importable under the same name."""
    import importlib

    try:
        module = importlib.import_module("datasets")
    except ImportError:
        return None
    return module if hasattr(module, "load_from_disk") else None


def test_saved_data_set_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(MissingExtra, match="datasets"):
        saved_texts(tmp_path)


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = _library()
    if datasets is None:
        pytest.skip("reading saved data sets needs the package datasets, which is not installed")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    datasets.Dataset.from_dict({"sentence": ["good", "bad"], "label": [1, 0]}, features=features).save_to_disk(
        str(tmp_path / "t")
    )
    samples = saved_texts(tmp_path / "t")
    assert [(t.text, t.label) for t in samples] == [("good", 1), ("bad", 0)]
    assert samples.labels == ("no", "yes")
    for labels, expected in (([-1, 0], [None, 0]), ([None, 1], [None, 1])):  # −1 stands for hidden labels
        folder = tmp_path / str(expected)
        datasets.Dataset.from_dict({"text": ["good", "bad"], "label": labels}).save_to_disk(str(folder))
        assert [t.label for t in saved_texts(folder)] == expected
    datasets.Dataset.from_dict({"text": ["good"], "label": [0.7]}).save_to_disk(str(tmp_path / "scores"))
    with pytest.raises(LayoutError, match="indices"):
        saved_texts(tmp_path / "scores")
    with pytest.raises(LayoutError, match="image"):
        saved_pictures(tmp_path / "t")
    with pytest.raises(InputError, match="no splits"):
        saved_texts(tmp_path / "t", split="test")
    datasets.DatasetDict({n: datasets.Dataset.from_dict({"text": [n]}) for n in ("a", "b")}).save_to_disk(str(tmp_path / "ab"))
    assert [t.text for t in saved_texts(tmp_path / "ab", split="b")] == ["b"]
    for split in (None, "c"):
        with pytest.raises(InputError, match="a, b"):
            saved_texts(tmp_path / "ab", split=split)


def test_scenes_have_a_sample_for_each_digit() -> None:
    samples = scene_objects(3)
    assert len({p.id for p in samples}) == len(samples) > 3
    for p in samples:
        assert p.mask is not None
        assert p.mask().any()
        assert p.id.endswith(f"digit{p.label}")
    assert open_pictures("scenes:3")[0] == "scenes"
    with pytest.raises(InputError, match="COUNT"):
        open_pictures("scenes:many")


@pytest.mark.parametrize(
    ("path", "reader", "count"),
    [("imagenet_samples", "imagenet_samples", 500), ("coco_objects", "index", 29), ("mnist", "mnist", 10000), ("sst2", "sst2", 872),
     ("imdb", "imdb", 1000), ("bace", "bace", 1265), ("tweeteval/emotion", "tweeteval", 1421), ("tweeteval/hate", "tweeteval", 2970),
     ("tweeteval/sentiment", "tweeteval", 12284), ("meld", "meld", 2610), ("eraser_movies", "eraser", 200)],
)  # fmt: skip
def test_number_of_samples_in_real_data(shared: Path, path: str, reader: str, count: int) -> None:
    folder = shared / "data" / path
    open_data = open_pictures if modality_of(folder) == "image" else open_texts
    name, samples = open_data(folder)
    assert (name, len(samples)) == (reader, count)
    assert all(s.label is not None for s in samples)
    assert len({s.id for s in samples}) == count
