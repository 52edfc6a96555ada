"""Rows of two texts, and rows of pictures as arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from job_builders import picture_model, pictures, sentences, text_model
from PIL import Image

import whyformer
from whyformer.jobs.description import Job
from whyformer.jobs.local import explain_opened, open_job
from whyformer.models import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def rows():
    texts = sentences(7)
    return [{"text": a, "text_pair": b, "label": 1} for a, b in zip(texts, texts[::-1], strict=True)]


def test_both_texts_of_a_pair_are_explained(folder, rows):
    bert = load(folder)
    results = list(whyformer.explain_many(folder, rows, "gae", batch_size=3))
    for row, e in zip(rows, results, strict=True):
        pair = {name: row[name] for name in ("text", "text_pair")}
        expected = whyformer.explain(bert.model, pair, "gae", processor=bert.processor)
        assert e.tokens == expected.tokens and e.texts == [f"{row['text']} | {row['text_pair']}"]
        torch.testing.assert_close(e.scores, expected.scores, rtol=1e-4, atol=1e-6)
    assert not np.allclose(results[1].logits, whyformer.explain(bert.model, rows[1]["text"], "gae", processor=bert.processor).logits)


def test_job_of_text_pairs_equals_explain_many(folder, rows, tmp_path):
    bad = {"text": "alone", "text_pair": "", "label": 0}
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad]))
    maps = explain_opened(open_job(Job(model=folder, input=str(table), out=str(tmp_path / "out"), methods=("gae",))), None, lambda text: None)
    expected = list(whyformer.explain_many(folder, rows, "gae"))
    for e, reference in zip(maps, expected, strict=True):
        assert e.texts == reference.texts and e.tokens == reference.tokens
        torch.testing.assert_close(e.scores, reference.scores, rtol=1e-4, atol=1e-6)
    (failure,) = maps.failures().to_pylist()
    assert failure["row"] == len(rows) and "text_pair is empty" in failure["reason"]


def test_arrays_and_tensors_equal_pil_images(tmp_path):
    vit = load(picture_model(tmp_path / "vit"))
    array = np.asarray(Image.open(pictures(tmp_path / "pictures", 1) / "0.png").convert("RGB"))
    images = [Image.fromarray(array), array, array / 255, torch.from_numpy(array.copy()).permute(2, 0, 1)]
    stream = whyformer.explain_many(vit.model, images, "gae", processor=vit.processor)
    first, *rest = stream
    assert len(rest) == 3 and not stream.failures
    for e in rest:
        torch.testing.assert_close(e.scores, first.scores, rtol=1e-4, atol=1e-6)
