"""Saved answers in a report: drawn, merged with duplicates, and skipped with a reason if damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from apps.report.builders import build_folder
from apps.report.test_report import Page, write_page
from show.test_answers import PICTURE_MATRIX, generation_with_picture
from show.test_answers import generation as answer
from whyformer import Generation
from whyformer.apps import cli
from whyformer.apps.report import write_report

PICTURE = Path(__file__).parents[3] / "examples/pictures/digits_37.png"
ATTACK = ["<b>One", " two", " three", "</style><script>alert(1)</script>", "\n"]


def test_answers_are_drawn_with_their_matrices_and_texts(tmp_path):
    replace(answer(), model="/some/where/tiny-lm").save(tmp_path / "a.safetensors")
    generation_with_picture(PICTURE_MATRIX).save(tmp_path / "b.safetensors")
    page = write_page(tmp_path, tmp_path)
    assert "2 answers." in page.text
    assert "tiny-lm" in page.text
    assert "/some/where" not in page.text
    assert [i["alt"] for i in page.all("img")].count("rows: what was written; columns: what stands before it") == 3  # one answer also has a matrix of words
    assert len([i for i in page.all("img") if (i["alt"] or "").startswith("where on the picture: ")]) == 3  # one is for the whole answer
    assert len([i for i in page.all("input") if i.get("type") == "radio"]) == 1 + 5 + 1 + 5  # the tokens of a picture count as one
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {"attnlrp", "gae"} <= set(page.text.split())


def test_word_matrix_is_drawn_beside_token_matrix(tmp_path):
    answer([" fr", "uit", " is", " app", "le"]).save(tmp_path / "a.safetensors")
    page = write_page(tmp_path, tmp_path)
    assert "Every word of the answer by those before it" in page.text
    assert [i["alt"] for i in page.all("img")].count("rows: what was written; columns: what stands before it") == 2


@pytest.mark.parametrize(
    "wrap", [lambda g: g.to_dict(), lambda g: {"command": "explain", "generation": g.to_dict(), "explanations": []}]
)
def test_json_answers_are_drawn_like_safetensors_answers(tmp_path, wrap):
    pages = {}
    for kind in ("json", "safetensors"):
        (tmp_path / kind).mkdir()
        file = tmp_path / kind / f"a.{kind}"
        file.write_text(json.dumps(wrap(answer()))) if kind == "json" else answer().save(file)
        pages[kind] = write_page(tmp_path / kind, tmp_path / kind)
    first, second = ([i["src"] for i in page.all("img")] for page in pages.values())
    assert first == second
    for page in pages.values():
        assert "1 answer." in page.text
        assert "50.0 %" in page.text
        assert "60.0 %" in page.text


def test_answer_saved_in_both_formats_is_drawn_once(tmp_path):
    answer().save(tmp_path / "a.safetensors")
    (tmp_path / "a.json").write_text(json.dumps({"command": "explain", "generation": answer().to_dict()}))
    assert write_report(tmp_path, tmp_path / "r.html").answers == 1


def test_answer_round_trip_through_json(tmp_path):
    g = answer()
    restored = Generation.from_dict(json.loads(json.dumps(g.to_dict())))
    assert (restored.text, restored.prompt, restored.start, len(restored)) == (g.text, g.prompt, g.start, len(g))
    assert torch.equal(restored.matrix, g.matrix)
    for t in range(len(g)):
        assert restored.probability(t) == pytest.approx(g.probability(t), rel=1e-6)
        assert [c[:2] for c in restored.candidates(t, 3)] == [c[:2] for c in g.candidates(t, 3)]
    # ten tokens of a large vocabulary are listed; the others share the remaining probability, and none exceeds the listed ones
    wide = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).double()
    g = replace(g, logits=wide, labels=None)
    restored = Generation.from_dict(json.loads(json.dumps(g.to_dict())))
    for t in range(2):
        assert [c[0] for c in restored.candidates(t, 10)] == [c[0] for c in g.candidates(t, 10)]
        assert [c[3] for c in restored.candidates(t, 10)] == pytest.approx([c[3] for c in g.candidates(t, 10)], rel=1e-6)
        assert restored.probability(t) == pytest.approx(g.probability(t), rel=1e-6)
    merged = Generation.from_dict(json.loads(json.dumps(g.by("word").to_dict())))
    assert merged.unit == "word" and torch.equal(merged.value, g.by("word").value)


@pytest.mark.parametrize("damage", [
    {"probabilities": [2.0, 0.5]}, {"candidates": [[], []]}, {"ids": [0, 1, 2, 3, 2**40]}, {"matrix": [[1.0]]}, {"candidates": None},
    {"start": "x"}, {"tokens": 3}, {"unit": "letter"}, {"candidates": [[{"id": 1, "probability": 1e-320}]] * 2},
])  # fmt: skip
def test_damaged_dictionary_is_skipped(tmp_path, damage):
    answer().save(tmp_path / "good.safetensors")
    (tmp_path / "bad.json").write_text(json.dumps({**answer().to_dict(), **damage}))
    report = write_report(tmp_path, tmp_path / "r.html")
    assert report.answers == 1
    assert [(s.file, s.damaged) for s in report.skipped] == [("bad.json", True)]


def test_duplicate_answers_have_separate_radio_groups(tmp_path):
    for name in "ab":
        answer().save(tmp_path / f"{name}.safetensors")
    page = write_page(tmp_path, tmp_path)
    names = {i["name"] for i in page.all("input") if i.get("type") == "radio"}
    assert len(names) == 2


def test_answers_are_reported_beside_explanations_and_benchmarks(tmp_path):
    folder = build_folder(tmp_path / "in")
    answer().save(folder / "text/answer.safetensors")
    report = write_report(folder, tmp_path / "r.html")
    assert (report.inputs, report.explanations, report.answers, report.benchmarks) == (4, 6, 1, 1)
    assert report.skipped == []
    result = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html")])
    assert "4 inputs, 6 maps, 1 answer, 1 benchmark" in result.output
    single = CliRunner().invoke(cli.app, ["report", str(folder / "text/answer.safetensors"), "-o", str(tmp_path / "r.html"), "--json"])
    assert json.loads(single.stdout)["answers"] == 1


def test_generated_text_is_escaped(tmp_path):
    answer(ATTACK).save(tmp_path / "a.safetensors")
    source = write_report(tmp_path, tmp_path / "r.html").path.read_text(encoding="utf-8")
    assert source.count("<script") == 1  # the report's script
    assert "<b>One" not in source
    assert "alert(1)" in Page(source).text


@pytest.mark.parametrize("damage", ["truncated", "sizes"])
def test_damaged_answer_is_skipped(tmp_path, damage):
    answer().save(tmp_path / "good.safetensors")
    if damage == "truncated":
        (tmp_path / "bad.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-8])
    else:
        replace(answer(), logits=torch.zeros(2, 1)).save(tmp_path / "bad.safetensors")
    report = write_report(tmp_path, tmp_path / "r.html")
    assert report.answers == 1
    (skipped,) = report.skipped
    assert (skipped.file, skipped.damaged) == ("bad.safetensors", True)


def test_output_of_generate_command_is_reported(tmp_path):
    arguments = ["generate", "what is on the left ?", "--model", "bundled:reader", "--image", str(PICTURE), "--continuation", "7", "--method", "rollout"]
    result = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path), "--format", "safetensors,json", "--quiet"])
    assert result.exit_code == 0, result.output
    (saved,) = tmp_path.glob("*.safetensors")
    assert Generation.load(saved).text == " 7"
    assert write_report(tmp_path, tmp_path / "r.html").answers == 1
    for file in tmp_path.glob("*.json"):
        saved.unlink()
        report = CliRunner().invoke(cli.app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
        assert re.search("nothing to report", report.output.replace("\n", " ")) or file.name in report.output
