"""Views in the page's address: written, restored, and parsed from untrusted addresses."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest

from apps.web.visitor import SENTENCE, Visitor
from whyformer.apps.web import address, examples
from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.apps.web.opening import restore
from whyformer.errors import InputError
from whyformer.show.look import OPACITY


def restored(visitor, fragment):
    """The last value of each part of the page after it is opened with this address."""
    shown = {}
    for step in restore(visitor.handlers, visitor.session, {"settings": fragment}):
        shown |= step
    return shown


VIEWS = {
    "picture": ("digits_37.png", {"methods": ["transformer_attribution", "rollout"], "classes": ["#7"], "settings": {"rollout": {"start_layer": 1}}, "style": "kept", "keep": 0.3}),
    "sentence": (SENTENCE, {"methods": ["gae"], "classes": ["#0"], "settings": {"gae": {"start_layer": 1}}}),
    "odd sentence": ("a # & = % ? ü\n“b”, c", {"methods": ["gae"], "truncate": True}),
    "checkpoint": (SENTENCE, {"methods": ["attnlrp"], "checkpoint": True}),
    "pair": (SENTENCE, {"methods": ["gae"], "pair": "a & b | c"}),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_reload_shows_same_scores(visitor, view, monkeypatch):
    monkeypatch.setattr("whyformer.apps.web.visitor_session.judge", lambda *_: iter(()))
    before = visitor.explain(view[0], **view[1])
    reloaded = Visitor(visitor.handlers)
    shown = restored(reloaded, "#" + before["address"])
    assert "map" in shown["status"]
    assert (reloaded.session.view.methods, reloaded.session.view.targets, reloaded.session.view.look) == (visitor.session.view.methods, visitor.session.view.targets, visitor.session.view.look)
    assert [e.scores.tolist() for e in reloaded.session.results] == [e.scores.tolist() for e in visitor.session.results]
    assert shown["address"] == before["address"]  # the address is unchanged
    assert shown["classes"]["value"] == view[1].get("classes", [])


def test_address_contains_changed_style(visitor):
    visitor.explain("digits_37.png")
    before, after = (list(visitor.handlers.redraw(visitor.session, *look))[-1]["address"] for look in (("colours", OPACITY, 0.2), ("contours", 0.5, 0.2)))
    assert "opacity" not in parse_qs(before)
    assert (parse_qs(after)["opacity"], parse_qs(after)["style"]) == (["0.5"], ["contours"])


@pytest.mark.parametrize("fragment", ["", "#", "#top", "kind=video", None, 7, "#" + "&" * 1000])
def test_address_without_view_changes_nothing(visitor, fragment):
    assert restored(visitor, fragment) == {}


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "", "gone/digits_37.png", "..", "\0"])
def test_address_of_file_that_was_not_uploaded_raises(visitor, path):
    with pytest.raises(InputError, match="no longer here"):
        address.read(urlencode({"kind": "image", "picture": path}), visitor.handlers.uploads)


HOSTILE = {
    "method": ({"methods": "nothing"}, "there is no method"),
    "settings": ({"methods": "gae", "settings": "[1"}, "not JSON"),
    "model": ({"methods": "gae", "model": "../../etc"}, "no model id"),
    "class": ({"methods": "gae", "classes": "#99"}, "99"),
    "no methods": ({}, "at least one method"),
    "setting": ({"methods": "gae", "settings": json.dumps({"gae": {"start_layer": "<b>"}})}, "start_layer"),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_invalid_address_shows_message(visitor, case):
    fields, message = case
    shown = restored(visitor, urlencode({"kind": "text", "sentence": SENTENCE, "model": "bundled:sst2"} | fields))
    assert message in shown["status"]
    assert "wf-error" in shown["status"]
    assert visitor.session.results == []


def test_address_downloads_no_model(visitor, monkeypatch):
    monkeypatch.setattr(Catalogue, "load", lambda *_: pytest.fail("a link started a download"))
    shown = restored(visitor, urlencode({"kind": "text", "sentence": SENTENCE, "model": "somebody/large", "methods": "gae"}))
    assert shown["model"] == "somebody/large"
    assert "Press Explain" in shown["status"]


def test_examples_are_copied_to_uploads(visitor):
    assert len(examples.PICTURES) == len(examples.SENTENCES) == 3
    for number in range(3):
        path = examples.entered("image", number, visitor.handlers.uploads)["picture"]
        assert PageLimits().picture(path, visitor.handlers.uploads).size == (112, 112)
        assert examples.entered("text", number, visitor.handlers.uploads) == {"sentence": examples.SENTENCES[number], "pair": ""}
        assert f'data-example="{number}"' in examples.offered("image")
        assert examples.SENTENCES[number] in examples.offered("text")


@pytest.mark.parametrize("number", [3, -1, None, "0", "../x", 1.0])
def test_invalid_example_number_gives_nothing(visitor, number):
    for kind in ("image", "text"):
        assert examples.entered(kind, number, visitor.handlers.uploads) == {}
    assert not (visitor.handlers.uploads / "examples").exists()


def test_catalogue_keeps_last_models(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr("whyformer.apps.web.limits.load", lambda name: loaded.append(name) or object())
    few = Catalogue(keep=1)
    assert not few.get("some/one")
    assert few.load("some/one") is few.load("some/one")
    assert few.get("some/one")
    few.load("bundled:sst2")
    assert few.get("some/one")  # bundled models do not count
    few.load("another/one")
    assert not few.get("some/one")
    assert few.get("bundled:sst2")
    assert not few.get("../../etc")
    assert loaded == ["some/one", "bundled:sst2", "another/one"]


def test_page_reports_loading_of_model(handlers):
    fresh = Visitor(type(handlers)(Catalogue(), handlers.limits, handlers.uploads))
    first = next(fresh.handlers.look(fresh.session, fresh.entered(SENTENCE)))
    assert "Loading bundled:sst2" in first["status"]
    assert "wf-busy" in first["status"]


def test_examples_are_in_package():
    assert all(Path(examples.__file__).parent in path.parents for path in examples.PICTURES)
