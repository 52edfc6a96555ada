"""Saved answers in a report: drawn, told apart, and left out with a reason where they cannot be."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from apps.report.collected import collect
from apps.report.test_report import Page, made
from show.test_answers import SEEING, seeing
from show.test_answers import made as answer
from whyformer import Generation
from whyformer.apps import cli
from whyformer.apps.report import write_report

PICTURE = Path(__file__).parents[3] / "examples/pictures/digits_37.png"
ATTACK = ["<b>One", " two", " three", "</style><script>alert(1)</script>", "\n"]


def test_answers_are_drawn_with_their_matrices_and_texts(tmp_path):
    replace(answer(), model="/some/where/tiny-lm").save(tmp_path / "a.safetensors")
    seeing(SEEING).save(tmp_path / "b.safetensors")
    page = made(tmp_path, tmp_path)
    assert "2 answers." in page.text
    assert "tiny-lm" in page.text
    assert "/some/where" not in page.text
    assert [i["alt"] for i in page.all("img")].count("rows: what was written; columns: what stands before it") == 3  # of one the words too
    assert len([i for i in page.all("img") if (i["alt"] or "").startswith("where on the picture: ")]) == 3  # one of the whole answer
    assert len([i for i in page.all("input") if i.get("type") == "radio"]) == 1 + 5 + 1 + 5  # of a picture's tokens there is one
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {"attnlrp", "gae"} <= set(page.text.split())


def test_the_word_matrix_stands_beside_that_of_tokens(tmp_path):
    answer([" fr", "uit", " is", " app", "le"]).save(tmp_path / "a.safetensors")
    page = made(tmp_path, tmp_path)
    assert "Every word of the answer by those before it" in page.text
    assert [i["alt"] for i in page.all("img")].count("rows: what was written; columns: what stands before it") == 2


@pytest.mark.parametrize(
    "wrap", [lambda g: g.to_dict(), lambda g: {"command": "explain", "generation": g.to_dict(), "explanations": []}]
)
def test_answers_saved_as_json_are_drawn_as_those_of_safetensors(tmp_path, wrap):
    pages = {}
    for kind in ("json", "safetensors"):
        (tmp_path / kind).mkdir()
        file = tmp_path / kind / f"a.{kind}"
        file.write_text(json.dumps(wrap(answer()))) if kind == "json" else answer().save(file)
        pages[kind] = made(tmp_path / kind, tmp_path / kind)
    first, second = ([i["src"] for i in page.all("img")] for page in pages.values())
    assert first == second
    for page in pages.values():
        assert "1 answer." in page.text
        assert "50.0 %" in page.text
        assert "60.0 %" in page.text


def test_of_both_forms_of_one_answer_the_fuller_is_drawn(tmp_path):
    answer().save(tmp_path / "a.safetensors")
    (tmp_path / "a.json").write_text(json.dumps({"command": "explain", "generation": answer().to_dict()}))
    assert write_report(tmp_path, tmp_path / "r.html").answers == 1


def test_an_answer_read_from_json_says_the_same(tmp_path):
    g = answer()
    again = Generation.from_dict(json.loads(json.dumps(g.to_dict())))
    assert (again.text, again.prompt, again.start, len(again)) == (g.text, g.prompt, g.start, len(g))
    assert torch.equal(again.matrix, g.matrix)
    for t in range(len(g)):
        assert again.probability(t) == pytest.approx(g.probability(t), rel=1e-6)
        assert [c[:2] for c in again.candidates(t, 3)] == [c[:2] for c in g.candidates(t, 3)]
    # of a large vocabulary ten are listed: the others get what is left, and none is likelier than they
    wide = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).double()
    g = replace(g, logits=wide, labels=None)
    again = Generation.from_dict(json.loads(json.dumps(g.to_dict())))
    for t in range(2):
        assert [c[0] for c in again.candidates(t, 10)] == [c[0] for c in g.candidates(t, 10)]
        assert [c[3] for c in again.candidates(t, 10)] == pytest.approx([c[3] for c in g.candidates(t, 10)], rel=1e-6)
        assert again.probability(t) == pytest.approx(g.probability(t), rel=1e-6)
    merged = Generation.from_dict(json.loads(json.dumps(g.by("word").to_dict())))
    assert merged.unit == "word" and torch.equal(merged.value, g.by("word").value)


@pytest.mark.parametrize("damage", [
    {"probabilities": [2.0, 0.5]}, {"candidates": [[], []]}, {"ids": [0, 1, 2, 3, 2**40]}, {"matrix": [[1.0]]}, {"candidates": None},
    {"start": "x"}, {"tokens": 3}, {"unit": "letter"}, {"candidates": [[{"id": 1, "probability": 1e-320}]] * 2},
])  # fmt: skip
def test_a_damaged_dictionary_ends_no_report(tmp_path, damage):
    answer().save(tmp_path / "good.safetensors")
    (tmp_path / "bad.json").write_text(json.dumps({**answer().to_dict(), **damage}))
    written = write_report(tmp_path, tmp_path / "r.html")
    assert written.answers == 1
    assert [(s.file, s.damaged) for s in written.skipped] == [("bad.json", True)]


def test_the_same_answer_twice_has_choices_of_its_own(tmp_path):
    for name in "ab":
        answer().save(tmp_path / f"{name}.safetensors")
    page = made(tmp_path, tmp_path)
    names = {i["name"] for i in page.all("input") if i.get("type") == "radio"}
    assert len(names) == 2


def test_beside_explanations_and_benchmarks(tmp_path):
    folder = collect(tmp_path / "in")
    answer().save(folder / "text/answer.safetensors")
    written = write_report(folder, tmp_path / "r.html")
    assert (written.inputs, written.explanations, written.answers, written.benchmarks) == (4, 6, 1, 1)
    assert written.skipped == []
    said = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html")])
    assert "6 maps of 4 inputs, 1 answer, 1 benchmark" in said.output
    alone = CliRunner().invoke(cli.app, ["report", str(folder / "text/answer.safetensors"), "-o", str(tmp_path / "r.html"), "--json"])
    assert json.loads(alone.stdout)["answers"] == 1


def test_what_a_model_wrote_is_escaped(tmp_path):
    answer(ATTACK).save(tmp_path / "a.safetensors")
    source = write_report(tmp_path, tmp_path / "r.html").path.read_text(encoding="utf-8")
    assert source.count("<script") == 1  # the report's own
    assert "<b>One" not in source
    assert "alert(1)" in Page(source).text


@pytest.mark.parametrize("broken", ["truncated", "sizes"])
def test_a_damaged_answer_ends_no_report(tmp_path, broken):
    answer().save(tmp_path / "good.safetensors")
    if broken == "truncated":
        (tmp_path / "bad.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-8])
    else:
        replace(answer(), logits=torch.zeros(2, 1)).save(tmp_path / "bad.safetensors")
    written = write_report(tmp_path, tmp_path / "r.html")
    assert written.answers == 1
    (left,) = written.skipped
    assert (left.file, left.damaged) == ("bad.safetensors", True)


def test_the_command_line_writes_what_a_report_draws(tmp_path):
    given = ["generate", "what is on the left ?", "--model", "bundled:reader", "--image", str(PICTURE), "--continuation", "7", "--method", "rollout"]
    ran = CliRunner().invoke(cli.app, [*given, "--out", str(tmp_path), "--format", "safetensors,json", "--quiet"])
    assert ran.exit_code == 0, ran.output
    (saved,) = tmp_path.glob("*.safetensors")
    assert Generation.load(saved).text == " 7"
    assert write_report(tmp_path, tmp_path / "r.html").answers == 1
    for file in tmp_path.glob("*.json"):
        saved.unlink()
        told = CliRunner().invoke(cli.app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
        assert re.search("nothing to report", told.output.replace("\n", " ")) or file.name in told.output
