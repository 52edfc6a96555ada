"""Targets other than classes in ``explain_many``, in jobs and in their tables: as ``explain`` reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers as hf
from job_builders import sentences, text_table

import whyformer
from whyformer.errors import InputError
from whyformer.jobs.description import make_job
from whyformer.jobs.engines import run_job
from whyformer.models.loading import load
from whyformer.targets import Contrast, Logit, LogProbability, Query, Span, Token
from zoo_evaluate import tiny_bert

NAMES = {0: "O", 1: "PER", 2: "LOC"}
KINDS = {
    "words": (hf.BertForTokenClassification, {"id2label": NAMES, "label2id": {n: i for i, n in NAMES.items()}}),
    "answers": (hf.BertForQuestionAnswering, {}),
    "masked": (hf.BertForMaskedLM, {}),
    "next": (hf.BertLMHeadModel, {"is_decoder": True}),
    "classes": (hf.BertForSequenceClassification, {"num_labels": 3}),
}
TARGETS: list[tuple[str, Any]] = [
    ("words", "Token(1, 'PER')"), ("words", Token(1, "PER")), ("words", Token(-2, Contrast("LOC", 0))), ("words", "Token(0)"),
    ("answers", "Span(1, 2)"), ("answers", Span(0, -1)), ("masked", "Token(1, 'good')"), ("masked", Token(1, 7, "probability")),
    ("next", " good"), ("next", Contrast("good", "film")),
    ("classes", "Contrast(0, 2)"), ("classes", "targets.Contrast(0, 2)"), ("words", "targets.Token(1, whyformer.targets.Contrast('PER', 2))"), ("classes", LogProbability(1)), ("classes", Logit(torch.tensor(1))),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of one tiny BERT with several heads."""
    made, (base, reader) = {}, tiny_bert()
    for name, (kind, more) in KINDS.items():
        torch.manual_seed(0)
        model = kind(hf.BertConfig(**{**base.config.to_diff_dict(), **more}))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        reader.save_pretrained(folder)
        made[name] = str(folder)
    return made


@pytest.mark.parametrize(("name", "target"), TARGETS, ids=repr)
def test_each_input_is_explained_as_alone(folders: dict[str, str], name: str, target: Any) -> None:
    model = load(folders[name])
    texts = [text for text in sentences(8) if len(text.split()) > 1]
    found = list(whyformer.explain_many(model, texts, "input_x_gradient", [target], batch_size=3))
    assert len(found) == len(texts)
    for text, e in zip(texts, found, strict=True):
        alone = whyformer.explain(model, text, "input_x_gradient", target)
        torch.testing.assert_close(e.scores, alone.scores, rtol=1e-4, atol=1e-6)
        assert e.target_names == alone.target_names and e.target.tolist() == alone.target.tolist()
        assert e.diagnostics.get("target") == alone.diagnostics.get("target")


def test_one_target_without_a_list(folders: dict[str, str]) -> None:
    model = load(folders["words"])
    for target in ("Token(1, 'PER')", Token(1, 1)):
        (e,) = whyformer.explain_many(model, ["good film"], "input_x_gradient", target)
        assert e.target_names == ["PER at position 1"]


WRONG = [
    ("words", "Token(1, 'ORG')", "no class 'ORG'"), ("words", "Token(1, 3)", "out of range"), ("words", "Token(1, PER)", "cannot be read"),
    ("words", "Token('PER')", "whole number"), ("classes", "Contrast(0, 3)", "out of range"), ("classes", "Logit(None)", "a class is an index or a name"),
    ("classes", "Logit({1: 2})", "a class is an index or a name"), ("classes", "Contrast(Logit(1), 2)", "a class is an index or a name"),
    ("classes", "Probability(1, multi_label='no')", "multi_label must be"), ("classes", "Logit([1, 2])", "2 targets for 1 samples"),
    ("masked", "Token(1, 'good film')", "is 2 tokens"), ("answers", "Span('a', 2)", "whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target", "said"), WRONG)
def test_a_target_that_fits_no_input_is_told_before_the_first(folders: dict[str, str], name: str, target: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        whyformer.explain_many(load(folders[name]), iter(()), "input_x_gradient", [target])
    with pytest.raises(InputError, match=said):
        whyformer.explain(load(folders[name]), "good film", "input_x_gradient", target)


def test_a_target_that_is_no_text_is_told(folders: dict[str, str]) -> None:
    for targets in ([lambda logits: logits[:, 0]], [1.5], [[1, 2]], "most"):
        with pytest.raises(InputError, match="a list of targets: classes by name or index, or text such as"):
            whyformer.explain_many(load(folders["classes"]), ["good film"], "input_x_gradient", targets)
    with pytest.raises(InputError, match="cannot be read"):
        make_job({"model": "none", "input": "none.csv", "out": "maps", "targets": ["Token(1, PER)"]})


def test_a_position_that_an_input_lacks_is_a_failure_of_its_own(folders: dict[str, str]) -> None:
    stream = whyformer.explain_many(load(folders["words"]), ["good", "good film", "a good film"], "input_x_gradient", ["Token(4, 'PER')"])
    assert len(list(stream)) == 1
    assert [f.row for f in stream.failures] == [0, 1]
    assert all("position 4 is outside" in f.reason for f in stream.failures)


def test_a_query_fits_no_text(folders: dict[str, str]) -> None:
    with pytest.raises(InputError, match="has no logits of queries"):
        list(whyformer.explain_many(load(folders["classes"]), ["good film"], "input_x_gradient", [Query(0, 1)]))


def test_a_job_stores_its_targets_and_is_known_by_them(folders: dict[str, str], tmp_path: Any) -> None:
    place = text_table(tmp_path / "data.csv", 6)
    keys = {"model": folders["words"], "input": str(place), "methods": ["input_x_gradient"], "out": str(tmp_path / "maps")}
    targets = ["Token(1, 'PER')", "Token(-1,'PER')", "Token(1, Contrast('LOC', 'PER'))"]
    maps = run_job(make_job({**keys, "targets": targets}))
    table = maps.table().to_pylist()
    assert [row["target_name"] for row in table[:3]] == ["PER at position 1", "PER at position -1", "LOC rather than PER at position 1"]
    assert [row["target"] for row in table[:3]] == [1, 1, 2]
    model = load(folders["words"])
    for row, e in zip(table, maps, strict=True):
        (written,) = json.loads(row["diagnostics"])["target"]
        alone = whyformer.explain(model, e.texts[0], "input_x_gradient", written)
        torch.testing.assert_close(e.scores, alone.scores, rtol=1e-4, atol=1e-6)
        assert whyformer.Explanation.from_dict(e.to_dict()).diagnostics["target"] == [written]
    spaced = [text.replace(", ", " ,  ") for text in targets]
    assert len(run_job(make_job({**keys, "targets": spaced}))) == len(maps)  # the same targets
    with pytest.raises(InputError, match="targets was"):
        run_job(make_job({**keys, "targets": [*targets[:2], "Token(2, 'PER')"]}))


def test_summaries_tell_targets_of_one_class_apart(folders: dict[str, str], tmp_path: Any) -> None:
    texts = [f"{a} {b} film" for a in ("good", "bad") for b in ("good", "bad", "film")]
    model, targets = load(folders["words"]), ["Token(1, 'PER')", "Token(2, 'PER')"]
    maps = whyformer.explain_many(model, texts, "input_x_gradient", targets, out=tmp_path / "maps")
    with pytest.raises(InputError, match="several targets: choose one of PER at position 1, PER at position 2"):
        maps.words()
    with pytest.raises(InputError, match="several targets"):
        maps.words("PER")
    for position in (1, 2):
        name = f"PER at position {position}"
        alone = whyformer.explain_many(model, texts, "input_x_gradient", [f"Token({position}, 1)"], out=tmp_path / str(position))
        assert maps.words(name) == alone.words() == alone.words("PER")
    swapped = whyformer.explain_many(model, texts, "input_x_gradient", targets[::-1], out=tmp_path / "swapped")
    assert maps.drift(swapped).agreement.value == pytest.approx(1)


def test_a_class_is_told_from_a_target_that_names_it(folders: dict[str, str], tmp_path: Any) -> None:
    texts = [f"{a} {b} film" for a in ("good", "bad") for b in ("good", "bad", "film")]
    model = load(folders["classes"])
    maps = whyformer.explain_many(model, texts, "input_x_gradient", [0, "Contrast(0, 1)"], out=tmp_path / "maps")
    alone = whyformer.explain_many(model, texts, "input_x_gradient", [0], out=tmp_path / "alone")
    assert maps.words(0) == alone.words()
    assert maps.words("0 rather than 1").words != alone.words().words
