"""What the page shows before anybody asks: the stored example, the first example of a kind; and what it leaves alone."""

import base64
import copy
import json
import re
from pathlib import Path

import pytest

from apps.web.visiting import PICTURES, SENTENCE, Visitor
from whyformer.apps.web import examples, opening
from whyformer.apps.web.examples import START_MODEL, STORED_MODEL
from whyformer.apps.web.handlers import offered
from whyformer.apps.web.limits import Catalogue
from whyformer.apps.web.uploads import Uploads
from whyformer.errors import LoadError
from whyformer.explanation.result import Explanation
from whyformer.methods import find


@pytest.fixture
def opened(visitor, monkeypatch):
    """A visitor of the page as it opens, and what it shows; no model may be loaded for it."""
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "load", lambda *_: pytest.fail("a model was loaded for the stored example"))
        return visitor, opening.stored(visitor.handlers, visitor.session)


def chosen(visitor, kind, **fields):
    """What the page shows after another kind of input was chosen, with these values in the fields."""
    entered = visitor.entered(kind="text") | {"kind": kind} | fields
    shown = next(opening.switch(visitor.handlers, visitor.session, entered))
    for name in ("picture", "sentence"):
        value = shown[name].get("value", entered[name])
        entered[name] = {"path": value} if name == "picture" and isinstance(value, str) else value
    for step in opening.begin(visitor.handlers, visitor.session, entered | {"model": shown["model"]}):
        shown |= step
    return shown


def test_the_example_is_shown_as_any_result_and_names_its_model(opened):
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


def test_another_look_of_the_example_needs_no_model_and_has_no_address(opened, monkeypatch):
    visitor, shown = opened
    monkeypatch.setattr(Catalogue, "load", lambda *_: pytest.fail("a model was loaded for another look"))
    (step,) = visitor.handlers.redraw(visitor.session, "kept", 1.0, 0.2)
    assert step["board"] != shown["board"]
    assert "Stored example" in step["board"]


def test_the_example_is_small_and_whole():
    files = list(Path(examples.__file__).with_name("examples").iterdir())
    assert sum(file.stat().st_size for file in files) < 300_000
    e = examples.stored()
    assert isinstance(e, Explanation)
    assert e.originals[0].size == (e.geometry[0].size[1], e.geometry[0].size[0])
    assert [name for _, name, _, _ in e.top()][0] == e.target_names[0] == "espresso"
    assert e.model == STORED_MODEL
    assert examples.PHOTOGRAPH.read_bytes() == (PICTURES / "coffee.jpg").read_bytes()


def test_explaining_the_example_asks_its_model_where_ids_of_the_hub_are_taken(opened, monkeypatch):
    visitor, shown = opened
    entered = visitor.entered(kind="image") | {"picture": {"path": shown["picture"]["value"]}, "methods": ["auto"]}
    asked = []
    monkeypatch.setattr(Catalogue, "load", lambda self, name: asked.append(name) or (_ for _ in ()).throw(LoadError("it is far away")))
    *_, last = visitor.handlers.explain(visitor.session, entered | {"model": shown["model"]})
    assert asked == [STORED_MODEL]
    assert "it is far away" in last["status"]
    monkeypatch.undo()
    alone = Visitor(type(visitor.handlers)(Catalogue(hub=False), visitor.handlers.limits, visitor.handlers.uploads))
    shown = opening.stored(alone.handlers, alone.session)
    assert shown["model"] is None
    *_, last = alone.handlers.explain(alone.session, entered | {"model": None})
    assert "choose a model" in last["status"]


def test_each_visitor_begins_with_the_example_and_nothing_else(opened):
    visitor, _ = opened
    visitor.session.keep("made", "for this visitor")
    other = copy.deepcopy(visitor.session)
    assert other.view is visitor.session.view
    assert other.made == {}
    other.forget()
    assert visitor.session.results


@pytest.mark.parametrize("kind", ["text", "answer"])
def test_the_first_example_of_a_kind_is_explained_at_once(visitor, kind):
    shown = chosen(visitor, kind)
    assert "in all" in shown["status"]
    assert visitor.session.view.model == START_MODEL[kind]
    assert shown["sentence"]["value"] == (examples.SENTENCES if kind == "text" else examples.PROMPTS)[0]
    other = chosen(visitor, "answer" if kind == "text" else "text", sentence=shown["sentence"]["value"])
    assert "in all" in other["status"]  # an example is nothing that was entered
    back = chosen(visitor, "image", sentence=other["sentence"]["value"], picture={"path": opening.stored(visitor.handlers, visitor.session)["picture"]["value"]})
    assert "Stored example" in back["board"]


def test_what_was_entered_is_neither_replaced_nor_explained(visitor):
    shown = chosen(visitor, "text", sentence="Words of my own.")
    assert "value" not in shown["sentence"]
    assert "board" not in shown
    drawn = visitor.entered("digits_37.png")["picture"]
    for kind in ("image", "answer"):
        shown = chosen(visitor, kind, picture=drawn)
        assert "value" not in shown["picture"] and "value" not in shown["sentence"]
        assert "board" not in shown
    assert visitor.session.view is None


def test_a_field_that_is_left_as_it_was_changes_nothing(visitor):
    entered = visitor.entered(SENTENCE)
    *_, first = visitor.handlers.look(visitor.session, entered)
    assert "Ready" in first["status"]
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    visitor.explain(SENTENCE)
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    assert list(visitor.handlers.look(visitor.session, visitor.entered("Another one.")))
    assert list(visitor.handlers.look(visitor.session, entered))


def test_a_change_of_a_setting_explains_only_what_is_shown(visitor):
    assert list(visitor.handlers.again(visitor.session, visitor.entered(SENTENCE))) == []
    visitor.explain(SENTENCE)
    assert list(visitor.handlers.again(visitor.session, visitor.entered(SENTENCE, classes=["0"])))
    assert list(visitor.handlers.again(visitor.session, visitor.entered("Another one.", classes=["0"]))) == []


def test_models_are_loaded_at_the_start_and_a_failure_is_nobodys_error(handlers, tmp_path, monkeypatch, caplog):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    fresh = type(handlers)(Catalogue([tmp_path / "broken"]), handlers.limits, handlers.uploads)
    fresh.load_models()
    assert all(fresh.catalogue.has(name) for name in START_MODEL.values())
    assert not fresh.catalogue.has("folder:broken")
    assert caplog.records == []
    late = type(handlers)(Catalogue(), handlers.limits, handlers.uploads)
    late.end()
    late.load_models()  # the page has ended
    assert not any(late.catalogue.has(name) for name in START_MODEL.values())


def test_examples_are_never_swept():
    uploads = Uploads(age=-1.0)
    try:
        place = examples.copied(examples.PHOTOGRAPH, uploads.folder)
        (uploads.folder / "old.png").write_bytes(b"x")
        assert uploads.room()
        assert place.exists()
        assert not (uploads.folder / "old.png").exists()
    finally:
        uploads.delete()


@pytest.mark.parametrize("kind", START_MODEL)
def test_methods_stand_in_groups(kind):
    names = [name for _, name in offered(kind)]
    families = [find(name).family for name in names[4:]]
    assert len(set(names)) == len(names)
    assert [f for i, f in enumerate(families) if i == 0 or families[i - 1] != f] == list(dict.fromkeys(families))


@pytest.mark.parametrize("kind", ["image", "text", "answer"])
def test_without_an_input_the_page_says_the_same_before_and_after_explain(visitor, kind):
    entered = visitor.entered("", kind=kind)
    entered["sentence"], entered["picture"] = " ", None
    *_, before = visitor.handlers.look(visitor.session, entered)
    *_, after = visitor.handlers.explain(visitor.session, entered)
    words = [re.sub("<[^>]*>", "", one["status"]).strip() for one in (before, after)]
    assert words[0] and words[0] == words[1]


def test_what_a_model_says_of_an_input_that_was_left_is_not_shown(visitor):
    entered = visitor.entered(SENTENCE)
    saying = visitor.handlers.look(visitor.session, entered)
    visitor.handlers.switch(visitor.session, "image")
    assert list(saying) == []
    entered = visitor.entered(SENTENCE, model="bundled:digits")  # which reads no sentences
    saying = visitor.handlers.look(visitor.session, entered)
    opening.stored(visitor.handlers, visitor.session)
    assert list(saying) == []


def test_maps_of_an_input_that_was_left_are_not_shown(visitor):
    running = visitor.handlers.explain(visitor.session, visitor.entered(SENTENCE))
    assert "status" in next(running)
    opening.stored(visitor.handlers, visitor.session)
    assert list(running) == []
    assert visitor.session.view.stored


def test_a_changed_input_ends_what_runs_for_the_one_before(visitor):
    entered = visitor.entered(SENTENCE)
    running = visitor.handlers.explain(visitor.session, entered)
    next(running)
    list(visitor.handlers.leave(visitor.session, entered))  # not changed
    assert "board" in next(running)
    list(visitor.handlers.leave(visitor.session, entered | {"sentence": "Dull.", "number": 1}))
    *_, last = running
    assert last == {"status": "", "board": last["board"]}
    assert "wf-word" not in last["board"]
    assert "in all" in visitor.explain(SENTENCE)["status"]


def test_what_waits_for_an_input_that_was_left_does_not_begin(visitor):
    entered = visitor.entered(SENTENCE)
    list(visitor.handlers.leave(visitor.session, entered | {"number": 1}))
    running = visitor.session.stop
    assert list(visitor.handlers.explain(visitor.session, entered)) == []
    assert list(visitor.handlers.look(visitor.session, entered)) == []
    assert visitor.session.stop is running
    assert "in all" in visitor.explain(SENTENCE)["status"]
