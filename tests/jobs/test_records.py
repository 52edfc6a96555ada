"""Record files lose and duplicate nothing: truncated lines, two writers, runs that are killed repeatedly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from waiting import wait_for
from whyformer.benchmarks.records import RecordFile
from whyformer.benchmarks.runner import run_benchmark
from whyformer.datasets.readers import TEXT_READERS
from whyformer.datasets.samples import Text, Texts
from whyformer.errors import InputError
from whyformer.jobs import lines
from zoo_evaluate import picture_folder, processor, tiny_bert, tiny_vit


def record(sample: str, key: str = "k", **values: float) -> dict:
    return {"sample": sample, "key": key, "configuration": "c", "values": values}


def test_last_record_of_a_key_wins_after_reopening(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "r.jsonl") as store:
        store.add(record("a", x=1.0))
        store.add({"sample": "b", "key": "k", "error": "boom", "kind": "failed"})
        assert ("a", "k") in store
        assert ("b", "k") not in store  # failed samples are retried
        store.add(record("b", x=float("nan")))
    with RecordFile(tmp_path / "r.jsonl") as store:
        assert store.records["b", "k"]["values"] == {"x": None}
        assert len(store.records) == 2


def test_truncated_last_line_is_dropped_and_file_stays_valid(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as store:
        store.add(record("a"))
        store.add(record("b"))
    path.write_bytes(path.read_bytes()[:-9])
    with RecordFile(path) as store:
        assert store.dropped == 1
        assert list(store.records) == [("a", "k")]
        store.add(record("b"))
    assert [json.loads(line)["sample"] for line in path.read_text().splitlines()] == ["a", "b"]


DAMAGED = {
    "missing values": lambda line: line.replace(b'"values": {"x": 1.0}, ', b""),
    "a changed digit": lambda line: line.replace(b'"x": 1.0', b'"x": 7.0'),
    "another kind": lambda line: line.replace(b'"x": 1.0', b'"x": "1.0"'),
    "no JSON": lambda line: b"\x00\xff rubbish\n",
    "no object": lambda line: b"[1, 2]\n",
    "deep JSON": lambda line: b"[" * 100_000 + b"\n",
    "deep JSON with its checksum": lambda line: (start := b'{"sample": ' + b"[" * 100_000) + b', "check": "' + lines.digest(start).encode() + b'"}\n',
    "no checksum": lambda line: line[: line.index(b', "check"')] + b"}\n",
    "another line's key": lambda line: line.replace(b'"sample": "b"', b'"sample": "a"'),
    "two lines in one": lambda line: line.rstrip() + line,
    "no sample": lambda line: lines.encoded({"key": "k", "values": {}}),
    "a sample that is no text": lambda line: lines.encoded({"sample": ["b"], "key": "k", "values": {}}),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_line_is_dropped(tmp_path: Path, damage) -> None:
    path = tmp_path / "r.jsonl"
    with RecordFile(path) as store:
        for name in "abc":
            store.add(record(name, x=1.0))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage(second) + third)
    with RecordFile(path) as store:
        assert store.dropped == 1
        assert sorted(store.records) == [("a", "k"), ("c", "k")]
        assert store.records["a", "k"]["values"] == {"x": 1.0}
        with pytest.raises(InputError, match="another run"):  # the rewritten file is locked too
            RecordFile(path)
        store.add(record("b", x=1.0))
    with RecordFile(path) as store:
        assert store.dropped == 0
    assert sorted(path.read_bytes().splitlines(keepends=True)) == [first, second, third]
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_benchmark_record_is_reported_and_remeasured(tmp_path: Path) -> None:
    data, messages = picture_folder(tmp_path / "data", count=2), list[str]()
    common = {"methods": "rollout", "processor": processor(), "say": messages.append}
    first = run_benchmark("segmentation", tiny_vit(), data, tmp_path / "out", **common)
    path = tmp_path / "out" / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"values": {"', b'"values": {"x', 1))
    assert not [line for line in messages if "damaged" in line]
    repeated = run_benchmark("segmentation", tiny_vit(), data, tmp_path / "out", **common)
    assert repeated.measured == 2 * 3  # records measured in the same batch too, so that the results are identical
    assert any(line.startswith("1 damaged line of records.jsonl") for line in messages)
    assert repeated.report.tables[0].cells == first.report.tables[0].cells
    assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


def test_concurrent_runs_in_one_folder_raise(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "r.jsonl"), pytest.raises(InputError, match="another run"):
        RecordFile(tmp_path / "r.jsonl")


SCRIPT = """
import json, sys, time
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    try: library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError: pass
torch.set_num_threads(1)
sys.path[:0] = [TESTS, SRC]
from waiting import HANG
from zoo_evaluate import processor, tiny_vit
from whyformer.benchmarks.runner import run_benchmark
def track(work, title, total):
    for item in work:
        yield item
        if len({json.loads(line)["sample"] for line in open(OUT + "/records.jsonl")}) >= 7:
            time.sleep(HANG)  # the test kills the process during this sleep, before the last sample
run_benchmark("segmentation", tiny_vit(), DATA, OUT, methods="raw_attention,rollout", processor=processor(), samples_per_batch=1, track=track)
print("finished")
"""


@pytest.mark.slow
def test_run_killed_twice_has_results_of_uninterrupted_run(tmp_path: Path) -> None:
    data = picture_folder(tmp_path / "data", count=8)
    out = tmp_path / "killed"
    tests = Path(__file__).parents[1]
    variables = {"TESTS": str(tests), "SRC": str(tests.parent / "src"), "DATA": str(data), "OUT": str(out)}
    script = "\n".join(f"{k} = {v!r}" for k, v in variables.items()) + SCRIPT
    records = out / "records.jsonl"
    for count in (2, 5):
        with (tmp_path / "errors.txt").open("wb") as errors:
            process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=errors)
        wait_for(lambda: len(_samples(records)) >= count or process.poll() is not None, f"{count} samples")
        assert process.poll() is None, (tmp_path / "errors.txt").read_text()[-2000:]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert count <= len(_samples(records)) < 8
    with records.open("ab") as file:  # a kill may also truncate a line
        file.write(b'{"sample": "images/7.png", "ke')
    model = tiny_vit()
    resumed = run_benchmark("segmentation", model, data, out, methods="raw_attention,rollout", processor=processor())
    uninterrupted = run_benchmark(
        "segmentation", model, data, tmp_path / "whole", methods="raw_attention,rollout", processor=processor()
    )
    assert 0 < resumed.resumed < 8 * 4
    assert resumed.resumed + resumed.measured == 8 * 4
    assert resumed.report.tables[0].cells == uninterrupted.report.tables[0].cells
    read = [json.loads(line) for line in records.read_text().splitlines()]
    assert len({(r["sample"], r["key"]) for r in read}) == len(read) == 8 * 4


def _samples(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {json.loads(line)["sample"] for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")}


def test_records_of_another_model_are_ignored(tmp_path: Path) -> None:
    import torch

    data = picture_folder(tmp_path / "data", count=2)
    run_benchmark("segmentation", tiny_vit(), data, tmp_path / "out", methods="rollout", processor=processor())
    other = tiny_vit()
    with torch.no_grad():
        other.classifier.bias[0] += 1
    repeated = run_benchmark("segmentation", other, data, tmp_path / "out", methods="rollout", processor=processor())
    assert repeated.resumed == 0
    assert repeated.report.counts["rollout"]["scored"] == 2


def test_records_of_another_processor_are_ignored(tmp_path: Path) -> None:
    data, tool = picture_folder(tmp_path / "data", count=2), processor()
    run = partial(run_benchmark, "segmentation", tiny_vit(), data, tmp_path / "out", methods="rollout")
    run(processor=tool)
    assert run(processor=SimpleNamespace(**vars(tool))).measured == 0  # equal settings
    for change in ({"image_mean": [0.1, 0.2, 0.3]}, {"rescale_factor": 0.5}):
        assert run(processor=SimpleNamespace(**{**vars(tool), **change})).resumed == 0


def test_records_of_changed_samples_are_ignored(tmp_path: Path) -> None:
    """A picture, a mask or a text that changed under the same id is measured again, and no other."""
    data, rows, read = picture_folder(tmp_path / "data", count=3), tmp_path / "rows", {"methods": "rollout"}
    run = partial(run_benchmark, "segmentation", tiny_vit(), data, tmp_path / "out", processor=processor(), **read)
    count = run().measured // 3
    for number, folder in enumerate(("images", "masks")):
        path = sorted((data / folder).glob("*"))[number]
        noise = np.random.default_rng(0).integers(0, 255, (40, 36), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        assert run().measured == count and run().measured == 0
    model, tokenizer = tiny_bert()
    rows.mkdir()
    for text in ("good", "bad"):  # as long
        (rows / "dev.tsv").write_text(f"sentence\tlabel\na {text:4} film\t1\na plot\t0\n")
        run = partial(run_benchmark, "activation", model, rows, tmp_path / "texts", processor=tokenizer, **read)
        last = run()
    assert last.measured == last.resumed > 0


def test_records_of_another_split_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of both splits have the same ids."""

    def rows(path: Path, split: str = "test") -> Texts:
        return Texts((Text("row-0", {"train": "a good film", "test": "a bad film"}[split], 0),))

    monkeypatch.setitem(TEXT_READERS, "rows", (rows, lambda place: True))
    model, tokenizer = tiny_bert()
    run = partial(run_benchmark, "activation", model, tmp_path, tmp_path / "out", methods="input_x_gradient", processor=tokenizer, reader="rows")
    run(split="train")
    assert run(split="test").resumed == 0
    assert run(split="train").measured == 0
