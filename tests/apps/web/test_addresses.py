"""A view in the page's address: written, read again, and read from whoever made the address."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest

from apps.web.visiting import SENTENCE, Visitor
from whyformer.apps.web import address, examples
from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.apps.web.opening import restore
from whyformer.errors import InputError
from whyformer.show.look import OPACITY


def restored(visitor, fragment):
    """The last value of each part of the page."""
    shown = {}
    for step in restore(visitor.handlers, visitor.session, {"settings": fragment}):
        shown |= step
    return shown


SEEN = {
    "picture": ("digits_37.png", {"methods": ["transformer_attribution", "rollout"], "classes": ["#7"], "settings": {"rollout": {"start_layer": 1}}, "style": "kept", "keep": 0.3}),
    "sentence": (SENTENCE, {"methods": ["gae"], "classes": ["#0"], "settings": {"gae": {"start_layer": 1}}}),
    "odd sentence": ("a # & = % ? ü\n“b”, c", {"methods": ["gae"], "truncate": True}),
    "checkpoint": (SENTENCE, {"methods": ["attnlrp"], "checkpoint": True}),
}


@pytest.mark.parametrize("given", SEEN.values(), ids=SEEN)
def test_a_reload_shows_the_same_scores(visitor, given, monkeypatch):
    monkeypatch.setattr("whyformer.apps.web.visitor_session.judge", lambda *_: iter(()))
    said = visitor.explain(given[0], **given[1])
    again = Visitor(visitor.handlers)
    shown = restored(again, "#" + said["address"])
    assert "map" in shown["status"]
    assert (again.session.view.methods, again.session.view.targets, again.session.view.look) == (visitor.session.view.methods, visitor.session.view.targets, visitor.session.view.look)
    assert [e.scores.tolist() for e in again.session.results] == [e.scores.tolist() for e in visitor.session.results]
    assert shown["address"] == said["address"]  # and another reload does the same
    assert shown["classes"]["value"] == given[1].get("classes", [])


def test_another_look_is_in_the_address(visitor):
    visitor.explain("digits_37.png")
    before, after = (list(visitor.handlers.redraw(visitor.session, *look))[-1]["address"] for look in (("colours", OPACITY, 0.2), ("contours", 0.5, 0.2)))
    assert "opacity" not in parse_qs(before)
    assert (parse_qs(after)["opacity"], parse_qs(after)["style"]) == (["0.5"], ["contours"])


@pytest.mark.parametrize("fragment", ["", "#", "#top", "kind=video", None, 7, "#" + "&" * 1000])
def test_an_address_without_a_view_changes_nothing(visitor, fragment):
    assert restored(visitor, fragment) == {}


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", "", "gone/digits_37.png", "..", "\0"])
def test_an_address_opens_no_file_that_was_not_uploaded(visitor, place):
    with pytest.raises(InputError, match="no longer here"):
        address.read(urlencode({"kind": "image", "picture": place}), visitor.handlers.uploads)


HOSTILE = {
    "method": ({"methods": "nothing"}, "there is no method"),
    "settings": ({"methods": "gae", "settings": "[1"}, "not JSON"),
    "model": ({"methods": "gae", "model": "../../etc"}, "no model id"),
    "class": ({"methods": "gae", "classes": "#99"}, "99"),
    "no methods": ({}, "at least one method"),
    "setting": ({"methods": "gae", "settings": json.dumps({"gae": {"start_layer": "<b>"}})}, "start_layer"),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_a_wrong_address_is_told_in_a_sentence(visitor, case):
    given, words = case
    shown = restored(visitor, urlencode({"kind": "text", "sentence": SENTENCE, "model": "bundled:sst2"} | given))
    assert words in shown["status"]
    assert "wf-error" in shown["status"]
    assert visitor.session.results == []


def test_an_address_loads_no_model_of_the_hub(visitor, monkeypatch):
    monkeypatch.setattr(Catalogue, "load", lambda *_: pytest.fail("a link started a download"))
    shown = restored(visitor, urlencode({"kind": "text", "sentence": SENTENCE, "model": "somebody/large", "methods": "gae"}))
    assert shown["model"] == "somebody/large"
    assert "Press Explain" in shown["status"]


def test_examples_are_taken_from_the_uploads(visitor):
    assert len(examples.PICTURES) == len(examples.SENTENCES) == 3
    for number in range(3):
        place = examples.entered("image", number, visitor.handlers.uploads)["picture"]
        assert PageLimits().picture(place, visitor.handlers.uploads).size == (112, 112)
        assert examples.entered("text", number, visitor.handlers.uploads) == {"sentence": examples.SENTENCES[number]}
        assert f'data-example="{number}"' in examples.offered("image")
        assert examples.SENTENCES[number] in examples.offered("text")


@pytest.mark.parametrize("number", [3, -1, None, "0", "../x", 1.0])
def test_other_examples_are_none(visitor, number):
    for kind in ("image", "text"):
        assert examples.entered(kind, number, visitor.handlers.uploads) == {}
    assert not (visitor.handlers.uploads / "examples").exists()


def test_the_catalogue_keeps_the_last_models(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("whyformer.apps.web.limits.load", lambda place: ran.append(place) or object())
    few = Catalogue(keep=1)
    assert not few.has("some/one")
    assert few.load("some/one") is few.load("some/one")
    assert few.has("some/one")
    few.load("bundled:sst2")
    assert few.has("some/one")  # the bundled ones are small, and stay beside the others
    few.load("another/one")
    assert not few.has("some/one")
    assert few.has("bundled:sst2")
    assert not few.has("../../etc")
    assert ran == ["some/one", "bundled:sst2", "another/one"]


def test_a_model_that_is_not_there_yet_is_said_to_be_loading(handlers):
    fresh = Visitor(type(handlers)(Catalogue(), handlers.limits, handlers.uploads))
    first = next(fresh.handlers.look(fresh.session, fresh.entered(SENTENCE)))
    assert "Loading bundled:sst2" in first["status"]
    assert "wf-busy" in first["status"]


def test_the_examples_are_in_the_package():
    assert all(Path(examples.__file__).parent in place.parents for place in examples.PICTURES)
