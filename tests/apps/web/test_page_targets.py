"""Targets as text on the page and its endpoint, for models whose output is not one row of logits."""

import shlex
from contextlib import suppress

import pytest
import transformers as hf

import whyformer
from apps.web.test_addresses import restored
from apps.web.visitor import SENTENCE, Visitor
from whyformer.apps.web import reproduce
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.apps.web.messages import PageError
from whyformer.targets import with_class
from whyformer.targets.reading import read_target, short_text
from zoo_evaluate import tiny_bert

WORDS = "good film bad"
NAMES = {0: "O", 1: "PER", 2: "LOC"}
KINDS = {"words": hf.BertForTokenClassification, "answers": hf.BertForQuestionAnswering, "masked": hf.BertForMaskedLM, "long": hf.BertForMaskedLM}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made, (base, tokenizer) = {}, tiny_bert()
    for name, kind in KINDS.items():
        labels = {"id2label": NAMES, "label2id": {n: i for i, n in NAMES.items()}} if name == "words" else {}
        words = {"vocab_size": 3000} if name == "long" else {}
        folder = tmp_path_factory.mktemp("models") / name
        kind(hf.BertConfig(**{**base.config.to_diff_dict(), **labels, **words})).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made[name] = folder
    return made


@pytest.fixture
def visitor(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("whyformer.apps.web.visitor_session.judge", lambda *_: iter(()))
    (tmp_path / "uploads").mkdir()
    return Visitor(Handlers(Catalogue(list(folders.values())), PageLimits(), tmp_path / "uploads"))


def looked(visitor, *args, **kwargs):
    """The last value of each part of the page after an input."""
    return {name: value for step in visitor.handlers.look(visitor.session, visitor.entered(*args, **kwargs)) for name, value in step.items()}


TARGETS = [("words", "Token(1)"), ("words", "targets.Token(-2, 'LOC')"), ("words", "Token(1, Contrast(0, 2))"), ("answers", "Span(1, 2)"), ("masked", "Token(2)")]
SHORT = [
    ("Token(2)", "Token(2, 1)"), ("targets.Token(position=2, token=0, of='logit')", "Token(2, 1)"), ("Token(-1, 'a', 'probability')", "Token(-1, 1, 'probability')"),
    ("Token(2, Contrast(3, 4))", "Token(2, 1)"), ("Query(None, 3)", "Query(None, 1)"), ("Pixel(4, 9)", "Pixel(4, 9, 1)"),
]  # fmt: skip


@pytest.mark.parametrize("method", ["input_x_gradient", "rollout"])
@pytest.mark.parametrize(("model", "target"), TARGETS)
def test_written_target_is_explained_as_in_library(visitor, folders, model, target, method):
    shown = visitor.explain(WORDS, model=f"folder:{model}", target=target, methods=(method,))
    (e,) = visitor.session.results
    expected = whyformer.explain(str(folders[model]), WORDS, method, target)
    assert e.scores.tolist() == expected.scores.tolist()
    assert e.target_names == expected.target_names
    assert target in shlex.split(reproduce.command(visitor.session.view))
    again = Visitor(visitor.handlers)
    restored(again, "#" + shown["address"])
    assert again.session.results[0].scores.tolist() == e.scores.tolist()


def test_model_without_row_asks_for_target_and_shows_field(visitor):
    shown = looked(visitor, WORDS, model="folder:words")
    assert "Token(" in shown["status"] and 'role="alert"' in shown["status"]
    assert shown["accordion"]["open"]
    shown = visitor.explain(WORDS, model="folder:words")
    assert "Token(" in shown["status"] and shown["accordion"]["open"]
    assert "accordion" not in visitor.explain(WORDS, model="folder:words", target="Token(99)")
    shown = looked(visitor, WORDS, model="folder:words", target="Token(1)")
    assert "PER" in shown["says"] and 'role="alert"' not in shown["status"]


def test_classes_are_those_of_the_row_that_is_read(visitor, folders):
    visitor.explain(WORDS, model="folder:words", target="Token(1)", classes=["#1", "LOC"], methods=["input_x_gradient"])
    assert [e.target_names for e in visitor.session.results] == [["PER at position 1"], ["LOC at position 1"]]
    expected = whyformer.explain(str(folders["words"]), WORDS, "input_x_gradient", "Token(1, 2)")
    assert visitor.session.results[1].scores.tolist() == expected.scores.tolist()
    assert visitor.session.view.targets == ("Token(1, 1)", "Token(1, 2)")


@pytest.mark.parametrize(("written", "short"), SHORT)
def test_class_of_a_target_is_written_in_its_shortest_form(written, short):
    assert with_class(written, 1) == short


@pytest.mark.parametrize("target", ["Token(2, of='probability')", "Token(2, Probability(3, True))", "Token(2, LogProbability(3, among=10))"])
def test_shortest_form_reads_back(target):
    read = read_target(target)
    assert short_text(read) == target and read_target(short_text(read)) == read


def test_one_forward_pass_reads_the_row(visitor):
    loaded, calls = visitor.handlers.catalogue.load("folder:words"), []
    hook = loaded.model.register_forward_hook(lambda *_: calls.append(1))
    with hook:
        looked(visitor, WORDS, model="folder:words", target="Token(1)")
        first = len(calls)
        visitor.session.subject = None
        looked(visitor, WORDS, model="folder:words", target="Token(1)", classes=["#2"])
        assert len(calls) == first
        looked(visitor, WORDS, model="folder:words", target="Token(2)")
        assert len(calls) == first + 1


def test_likeliest_and_chosen_tokens_of_long_vocabulary_are_offered(visitor, folders):
    row = hf.BertForMaskedLM.from_pretrained(folders["long"])(**tiny_bert()[1](WORDS, return_tensors="pt")).logits[0, 2]
    ranks = row.argsort(descending=True).tolist()
    last = f"#{ranks[-1]}"
    shown = looked(visitor, WORDS, model="folder:long", target="Token(2)")
    offered = [index for _, index in shown["classes"]["choices"]]
    assert {int(index[1:]) for index in offered} == set(ranks[:1000]) and offered[0] == f"#{ranks[0]}"
    share = row.softmax(0).max().item()
    assert shown["classes"]["choices"][0][0].endswith(f"({100 * share:.1f} %)")
    shown = looked(visitor, "film good", model="folder:long", target="Token(2)", classes=[last])
    assert shown["classes"]["value"] == [last] and last in [index for _, index in shown["classes"]["choices"]]
    visitor.explain(WORDS, model="folder:long", target="Token(2)", classes=[last, "#7"], methods=["gae"])
    assert [int(e.target) for e in visitor.session.results] == [ranks[-1], 7]


@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_another_position_is_not_answered_from_the_cache(visitor, folders, method):
    for target in ("Token(1)", "Token(3)", "Token(1)"):
        visitor.explain(WORDS, model="folder:words", target=target, methods=(method,))
        expected = whyformer.explain(str(folders["words"]), WORDS, method, target)
        assert visitor.session.results[0].scores.tolist() == expected.scores.tolist()


def test_snippet_repeats_the_target(visitor):
    visitor.explain(WORDS, model="folder:words", target="Token(1, 'LOC')", methods=["gae"])
    names = {}
    exec(reproduce.snippet(visitor.session.view), names)
    assert names["e"].scores.tolist() == visitor.session.results[0].scores.tolist()


@pytest.mark.parametrize(("target", "classes"), [("Contrast(0, 1)", ["#1"]), ("Token(1", []), ("Token(99)", []), ("no target", []), ("Pixel(0, 0)", [])])
def test_target_that_does_not_fit_is_refused(visitor, target, classes):
    model = "bundled:sst2" if "Contrast" in target else "folder:words"
    shown = visitor.explain(WORDS, model=model, target=target, classes=classes)
    assert 'role="alert"' in shown["status"] and "inside whyformer" not in shown["status"]


def test_target_over_the_row_of_a_classifier(visitor):
    visitor.explain(SENTENCE, target="Contrast(1, 0)", methods=["input_x_gradient"])
    expected = whyformer.explain("bundled:sst2", SENTENCE, "input_x_gradient", "Contrast(1, 0)")
    assert visitor.session.results[0].scores.tolist() == expected.scores.tolist()


@pytest.mark.parametrize("targets", [["Token(1, 'PER')"], ["targets.Token(1)", "Token(2, 0)"]])
def test_endpoint_takes_written_targets(visitor, folders, targets):
    answer = endpoint(visitor.handlers)(text=WORDS, model="folder:words", methods=["rollout"], targets=targets)
    assert [top["name"] for top in answer["top"]] != []
    for target, e in zip(targets, answer["explanations"], strict=True):
        expected = whyformer.explain(str(folders["words"]), WORDS, "rollout", target)
        assert e["scores"] == expected.to_dict()["scores"] and e["target_names"] == expected.target_names


def test_endpoint_takes_targets_over_the_row_beside_classes(visitor):
    answer = endpoint(visitor.handlers)(text=SENTENCE, model="bundled:sst2", methods=["input_x_gradient"], targets=["Contrast(1, 0)", "positive", 0])
    for target, e in zip(["Contrast(1, 0)", 1, 0], answer["explanations"], strict=True):
        assert e["scores"] == whyformer.explain("bundled:sst2", SENTENCE, "input_x_gradient", target).to_dict()["scores"]


@pytest.mark.parametrize("targets", [None, 3, "", {"a": 1}, [None], [["Token(1)"]], "Token(1)", ["Token("], ["Token()"]])
def test_endpoint_answers_or_refuses_other_targets(visitor, targets, caplog):
    with suppress(PageError):
        assert endpoint(visitor.handlers)(text=SENTENCE, model="bundled:sst2", methods=["gae"], targets=targets)["explanations"]
    assert caplog.records == []


def test_endpoint_refuses_model_without_row(visitor):
    with pytest.raises(PageError, match=r"Token\("):
        endpoint(visitor.handlers)(text=WORDS, model="folder:words")
