"""The benchmark of planted facts: spans of its prompts, columns of known maps, and a run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whyformer.benchmarks import run_benchmark
from whyformer.benchmarks.evidence import _MOST, _places, _rendered, own_data
from whyformer.datasets.planted import Planted, planted
from whyformer.errors import InputError

PROMPTS = list(islice(planted(), 90))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p.id)
def test_clue_and_fact_spans_contain_answer(prompt: Planted) -> None:
    word, sentence = prompt.text[slice(*prompt.clue)], prompt.text[slice(*prompt.fact)]
    assert prompt.document[0] <= prompt.fact[0] <= prompt.clue[0] < prompt.clue[1] <= prompt.fact[1] <= prompt.document[1]
    if prompt.kind == "agreement":
        assert {prompt.answer, prompt.rival} == {" is", " are"}
        assert (prompt.answer == " are") == word.endswith("s")
        return
    assert word == prompt.answer.strip()
    assert sentence.endswith(f"{word}.") or f" {word} " in sentence
    assert ". " not in sentence
    if prompt.kind != "twins":
        assert prompt.text.count(word) == 1
        return
    assert prompt.twin is not None
    assert prompt.changed is not None
    assert prompt.text[slice(*prompt.twin)] == word
    changed, other = prompt.changed
    assert changed[slice(*prompt.clue)] != word == prompt.text[slice(*prompt.clue)]
    assert changed.count(word) == other.count(word) == 1


def test_draw_determines_prompts() -> None:
    assert list(islice(planted(), 20)) == PROMPTS[:20]
    assert {p.text for p in islice(planted(1), 90)} & {p.text for p in PROMPTS if len(p.text) > 60} == set()
    assert len({p.id for p in PROMPTS}) == 90
    assert len(own_data({"prompts": 3, "draw": 0})[1]) == 3 * _MOST
    with pytest.raises(InputError, match="at least 1"):
        own_data({"prompts": 0, "draw": 0})


def test_columns_of_known_scores() -> None:
    # "A is b. C is d. A is" -> " b"
    prompt = Planted("1", "k", "A is b. C is d. A is", " b", (0, 7), (5, 6), (0, 15))
    spans = [(0, 1), (1, 4), (4, 6), (6, 7), (7, 9), (9, 12), (12, 14), (14, 15), (15, 17), (17, 20)]
    scores = np.array([1.0, 0.0, 4.0, -3.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0])
    result = _places(prompt, spans, scores)
    assert result == {"hit": 1.0, "share": 5 / 8, "inside": 5 / 7}
    assert _places(prompt, spans, -scores)["hit"] == 0
    assert "share" not in _places(prompt, spans, -np.ones(10))


def test_conversation_is_rendered_by_chat_template() -> None:
    class Tokenizer:
        chat_template: Any = "yes"

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            assert (tokenize, add_generation_prompt) == (False, True)
            return f"<user>{messages[0]['content']}<reply>"

    prompt = next(p for p in PROMPTS if p.kind == "chat")
    rendered = _rendered(prompt, Tokenizer())
    assert rendered is not None
    assert rendered.text[slice(*rendered.clue)] == prompt.answer.strip()
    assert rendered.text[slice(*rendered.document)] == prompt.text[slice(*prompt.document)]
    assert rendered.text.startswith("<user>")
    Tokenizer.chat_template = None
    assert _rendered(prompt, Tokenizer()) is None


def test_run_reports_number_of_prompts(shared: Path, tmp_path: Path) -> None:
    model = str(shared / "weights" / "stories260k")
    outcome = run_benchmark("evidence", model, out=tmp_path, methods="input_x_gradient,attnlrp", prompts=5, removal=3)
    columns = {e["column"]: e for e in outcome.report.tables[0].entries() if e["row"] == "attnlrp"}
    kinds = [e for e in outcome.report.tables[1].entries() if e["row"] == "attnlrp"]
    assert 1 <= sum(e["samples"] for e in kinds) <= 5
    assert columns["removal gap"]["samples"] >= 1
    assert columns["forward + backward (median)"]["measured"] > 0
    assert "that the model answers correctly, of" in outcome.report.markdown()
    resumed = run_benchmark("evidence", model, out=tmp_path, methods="input_x_gradient,attnlrp", prompts=5, removal=3)
    assert resumed.measured == 0


def test_attributions_of_pronouns_hit_their_names(shared: Path, tmp_path: Path) -> None:
    model = str(shared / "weights" / "stories260k")
    outcome = run_benchmark("evidence", model, out=tmp_path, methods="attnlrp", source="stories", prompts=16, removal=4)
    columns = {(e["row"], e["column"]): e["measured"] for e in outcome.report.tables[0].entries()}
    assert columns["attnlrp", "twins in order"] >= 0.8  # 0.96 for 200 prompts
    assert columns["attnlrp", "hit at 1"] > 0.4 > columns["random", "hit at 1"]
    assert columns["attnlrp", "share on the fact"] > columns["random", "share on the fact"]
    assert columns["attnlrp", "kept without most"] < 0.9  # this tokenizer marks words by spaces
    kinds = {e["column"] for e in outcome.report.tables[1].entries()}
    assert kinds == {"pronoun (16)"}
    with pytest.raises(InputError, match="source must be one of planted, stories"):
        run_benchmark("evidence", model, out=tmp_path, source="fables")
