"""The page before Explain is pressed: the stored example, the first example of a kind, and inputs that it must not change."""

import base64
import copy
import json
import re
from pathlib import Path

import pytest

from apps.web.visitor import PICTURES, SENTENCE, Visitor
from whyformer.apps.web import examples, opening
from whyformer.apps.web.examples import START_MODEL, STORED_MODEL
from whyformer.apps.web.handlers import offered
from whyformer.apps.web.limits import Catalogue
from whyformer.errors import LoadError
from whyformer.explanation.result import Explanation
from whyformer.methods import find


@pytest.fixture
def opened(visitor, monkeypatch):
    """A visitor of the newly opened page and the page's content, for which no model may be loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "load", lambda *_: pytest.fail("a model was loaded for the stored example"))
        return visitor, opening.stored(visitor.handlers, visitor.session)


def after_switch(visitor, kind, **fields):
    """The page's content after a switch to another kind of input, with the values ``fields`` in its controls."""
    entered = visitor.entered(kind="text") | {"kind": kind} | fields
    shown = next(opening.switch(visitor.handlers, visitor.session, entered))
    for name in ("picture", "sentence"):
        value = shown[name].get("value", entered[name])
        entered[name] = {"path": value} if name == "picture" and isinstance(value, str) else value
    for step in opening.begin(visitor.handlers, visitor.session, entered | {"model": shown["model"]}):
        shown |= step
    return shown


def test_stored_example_is_shown_with_its_model(opened):
    visitor, shown = opened
    assert shown["board"].count("data-values") == 1
    assert STORED_MODEL in shown["board"] and "Stored example" in shown["board"]
    assert f"{STORED_MODEL} says" in shown["says"] and shown["says"].count("<li>") == 5
    assert shown["model"] == STORED_MODEL
    assert "Better than each random map" in shown["trust"]
    assert STORED_MODEL in shown["code"]
    assert len(shown["classes"]["choices"]) == 1000
    for kind, start in {"png": b"\x89PNG", "html": b"<!doctype html>", "json": b"{"}.items():
        assert base64.b64decode(visitor.handlers.download(visitor.session, kind)["base64"]).startswith(start)


def test_redrawing_stored_example_loads_no_model(opened, monkeypatch):
    visitor, shown = opened
    monkeypatch.setattr(Catalogue, "load", lambda *_: pytest.fail("a model was loaded for another look"))
    (step,) = visitor.handlers.redraw(visitor.session, "kept", 1.0, 0.2)
    assert step["board"] != shown["board"]
    assert "Stored example" in step["board"]


def test_stored_example_is_small_and_complete():
    files = list(Path(examples.__file__).with_name("examples").iterdir())
    assert sum(file.stat().st_size for file in files) < 300_000
    e = examples.stored()
    assert isinstance(e, Explanation)
    assert e.originals[0].size == (e.geometry[0].size[1], e.geometry[0].size[0])
    assert [name for _, name, _, _ in e.top()][0] == e.target_names[0] == "espresso"
    assert e.model == STORED_MODEL
    assert examples.PHOTOGRAPH.read_bytes() == (PICTURES / "coffee.jpg").read_bytes()


def test_explaining_stored_example_loads_its_model_only_with_hub(opened, monkeypatch):
    visitor, shown = opened
    entered = visitor.entered(kind="image") | {"picture": {"path": shown["picture"]["value"]}, "methods": ["auto"]}
    loaded = []
    monkeypatch.setattr(Catalogue, "load", lambda self, name: loaded.append(name) or (_ for _ in ()).throw(LoadError("it is far away")))
    *_, last = visitor.handlers.explain(visitor.session, entered | {"model": shown["model"]})
    assert loaded == [STORED_MODEL]
    assert "it is far away" in last["status"]
    monkeypatch.undo()
    offline = Visitor(type(visitor.handlers)(Catalogue(hub=False), visitor.handlers.limits, visitor.handlers.uploads))
    shown = opening.stored(offline.handlers, offline.session)
    assert shown["model"] is None
    *_, last = offline.handlers.explain(offline.session, entered | {"model": None})
    assert "choose a model" in last["status"]


def test_session_copy_has_only_stored_example(opened):
    visitor, _ = opened
    visitor.session.keep("made", "for this visitor")
    copied = copy.deepcopy(visitor.session)
    assert copied.view is visitor.session.view
    assert copied.cache == {}
    copied.forget()
    assert visitor.session.results


@pytest.mark.parametrize("kind", ["text", "answer"])
def test_first_example_of_kind_is_explained_after_switch(visitor, kind):
    shown = after_switch(visitor, kind)
    assert "in all" in shown["status"]
    assert visitor.session.view.page_input.model == START_MODEL[kind]
    assert shown["sentence"]["value"] == (examples.SENTENCES if kind == "text" else examples.PROMPTS)[0]
    switched = after_switch(visitor, "answer" if kind == "text" else "text", sentence=shown["sentence"]["value"])
    assert "in all" in switched["status"]  # examples are replaced, user input is not
    restored = after_switch(visitor, "image", sentence=switched["sentence"]["value"], picture={"path": opening.stored(visitor.handlers, visitor.session)["picture"]["value"]})
    assert "Stored example" in restored["board"]


def test_user_input_is_neither_replaced_nor_explained_after_switch(visitor):
    shown = after_switch(visitor, "text", sentence="Words of my own.")
    assert "value" not in shown["sentence"]
    assert "board" not in shown
    picture = visitor.entered("digits_37.png")["picture"]
    for kind in ("image", "answer"):
        shown = after_switch(visitor, kind, picture=picture)
        assert "value" not in shown["picture"] and "value" not in shown["sentence"]
        assert "board" not in shown
    assert visitor.session.view is None


def test_example_picture_is_no_part_of_prompt_that_visitor_entered(visitor):
    picture = {"path": opening.stored(visitor.handlers, visitor.session)["picture"]["value"]}
    shown = after_switch(visitor, "answer", sentence="Words of my own.", picture=picture)
    assert shown["picture"]["value"] is None
    assert "value" not in shown["sentence"]


def test_unchanged_field_updates_nothing(visitor):
    entered = visitor.entered(SENTENCE)
    *_, first = visitor.handlers.look(visitor.session, entered)
    assert "Ready" in first["status"]
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    visitor.explain(SENTENCE)
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    assert list(visitor.handlers.look(visitor.session, visitor.entered("Another one.")))
    assert list(visitor.handlers.look(visitor.session, entered))


def test_changed_setting_reruns_only_displayed_input(visitor):
    assert list(visitor.handlers.explain_again(visitor.session, visitor.entered(SENTENCE))) == []
    visitor.explain(SENTENCE)
    assert list(visitor.handlers.explain_again(visitor.session, visitor.entered(SENTENCE, classes=["0"])))
    assert list(visitor.handlers.explain_again(visitor.session, visitor.entered("Another one.", classes=["0"]))) == []


def test_models_are_loaded_at_start_and_failures_are_not_logged(handlers, tmp_path, monkeypatch, caplog):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    fresh = type(handlers)(Catalogue([tmp_path / "broken"]), handlers.limits, handlers.uploads)
    fresh.load_models()
    assert all(fresh.catalogue.get(name) for name in START_MODEL.values())
    assert not fresh.catalogue.get("folder:broken")
    assert caplog.records == []
    late = type(handlers)(Catalogue(), handlers.limits, handlers.uploads)
    late.end()
    late.load_models()  # the page has ended
    assert not any(late.catalogue.get(name) for name in START_MODEL.values())


@pytest.mark.parametrize("kind", START_MODEL)
def test_methods_are_grouped_by_family(kind):
    names = [name for _, name in offered(kind)]
    families = [find(name).family for name in names[4:]]
    assert len(set(names)) == len(names)
    assert [f for i, f in enumerate(families) if i == 0 or families[i - 1] != f] == list(dict.fromkeys(families))


@pytest.mark.parametrize("kind", ["image", "text", "answer"])
def test_missing_input_has_same_message_before_and_after_explain(visitor, kind):
    entered = visitor.entered("", kind=kind)
    entered["sentence"], entered["picture"] = " ", None
    *_, before = visitor.handlers.look(visitor.session, entered)
    *_, after = visitor.handlers.explain(visitor.session, entered)
    messages = [re.sub("<[^>]*>", "", update["status"]).strip() for update in (before, after)]
    assert messages[0] and messages[0] == messages[1]


def test_prediction_for_abandoned_input_is_not_shown(visitor):
    entered = visitor.entered(SENTENCE)
    updates = visitor.handlers.look(visitor.session, entered)
    visitor.handlers.switch(visitor.session, "image")
    assert list(updates) == []
    entered = visitor.entered(SENTENCE, model="bundled:digits")  # a model that does not accept text
    updates = visitor.handlers.look(visitor.session, entered)
    opening.stored(visitor.handlers, visitor.session)
    assert list(updates) == []


def test_maps_of_abandoned_input_are_not_shown(visitor):
    running = visitor.handlers.explain(visitor.session, visitor.entered(SENTENCE))
    assert "status" in next(running)
    opening.stored(visitor.handlers, visitor.session)
    assert list(running) == []
    assert visitor.session.view.stored


def test_changed_input_ends_computation_for_previous_input(visitor):
    entered = visitor.entered(SENTENCE)
    running = visitor.handlers.explain(visitor.session, entered)
    next(running)
    list(visitor.handlers.leave(visitor.session, entered))  # the input did not change
    assert "board" in next(running)
    list(visitor.handlers.leave(visitor.session, entered | {"sentence": "Dull.", "number": 1}))
    *_, last = running
    assert last == {"status": "", "board": last["board"]}
    assert "wf-word" not in last["board"]
    assert "in all" in visitor.explain(SENTENCE)["status"]


def test_queued_work_for_abandoned_input_does_not_start(visitor):
    entered = visitor.entered(SENTENCE)
    list(visitor.handlers.leave(visitor.session, entered | {"number": 1}))
    running = visitor.session.stop
    assert list(visitor.handlers.explain(visitor.session, entered)) == []
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    assert visitor.session.stop is running
    assert "in all" in visitor.explain(SENTENCE)["status"]
