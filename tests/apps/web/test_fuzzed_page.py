"""Whatever a browser or a program sends to the page: shown, or refused in a sentence; nothing goes wrong inside."""

from __future__ import annotations

import contextlib
import gc
import json
import logging

import gradio as gr
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apps.web.visiting import PICTURES, Visitor
from mutations import ODD, damaged, mutated
from whyformer.apps.web import PageLimits, address, opening, page_input, server
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import Handlers
from whyformer.errors import InputError

# sockets and event loops that gradio leaves to the garbage collector; nothing here can mend them
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
few = settings(max_examples=25, suppress_health_check=list(HealthCheck))
many = settings(max_examples=60, suppress_health_check=list(HealthCheck))
TEXT = {"text": "A charming film.", "picture": None, "model": "bundled:sst2", "methods": ["gae", "rollout"], "targets": ["positive"], "settings": {"gae": {"composite": "plain"}}, "truncate": False, "measure": False, "checkpoint": False}
FORM = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nabc\r\n--x--\r\n'
BOUNDARIES = st.sampled_from(["multipart/form-data; boundary=x", "multipart/form-data", "multipart/form-data; boundary=" + "y" * 5000, "application/json", ""])


@pytest.fixture(scope="module")
def place(catalogue, tmp_path_factory):
    uploads = tmp_path_factory.mktemp("fuzzed") / "uploads"
    uploads.mkdir()
    (uploads / "digits_37.png").write_bytes((PICTURES / "digits_37.png").read_bytes())
    return Handlers(catalogue, PageLimits(characters=500, seconds=30), uploads)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.ERROR, "whyformer.web")
    yield caplog
    assert caplog.records == []  # what went wrong inside is told to the log


def calls(place, data) -> None:
    picture = {**TEXT, "text": "", "picture": {"path": str(place.uploads / "digits_37.png")}, "model": "bundled:digits", "targets": ["3"], "settings": {"gae": {"composite": "ah"}}}
    asked = data.draw(mutated(TEXT) | mutated(picture) | st.fixed_dictionaries(dict.fromkeys(TEXT, ODD)))
    with contextlib.suppress(gr.Error):  # the sentence
        json.dumps(endpoint(place)(**{name: asked.get(name, TEXT[name]) for name in TEXT}))


def enters(place, data) -> None:
    visitor = Visitor(place)
    whole = data.draw(st.sampled_from([
        visitor.entered("A charming film.", methods=("gae",), classes=("positive",)), visitor.entered("digits_37.png", methods=("gae",)),
        visitor.entered("Where is the key?", kind="answer", methods=("input_x_gradient",), length=2),
    ]))  # fmt: skip
    values = data.draw(mutated(list(whole.values())))
    entered = dict(zip(page_input.CONTROLS, [*values, *[None] * 15], strict=False))
    assert all(place.explain(visitor.session, entered))
    assert all(opening.switch(place, visitor.session, entered))


@given(data=st.data())
@few
def test_any_arguments_of_the_endpoint_are_answered_or_refused_in_a_sentence(place, log, data):
    calls(place, data)


@given(data=st.data())
@few
def test_any_values_of_the_controls_are_shown_or_refused_in_a_sentence(place, log, data):
    enters(place, data)


@given(st.text(max_size=60) | ODD | st.dictionaries(st.sampled_from(page_input.CONTROLS), st.text(max_size=12) | st.sampled_from(["image", "text", "answer", "digits_37.png", "../x", "nan", "-1"])).map(lambda facts: "&".join(f"{k}={v}" for k, v in facts.items())))
def test_any_address_is_read_or_refused(place, fragment):
    with contextlib.suppress(InputError):  # the picture is no longer there
        found = address.read(fragment, place.uploads)
        assert found is None or len(found) == len(page_input.CONTROLS)


@pytest.mark.whole
@given(data=st.data())
@many
def test_the_same_of_many_more(place, log, data):
    calls(place, data)
    enters(place, data)


# -- over HTTP -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(catalogue, free_port):
    found = []
    close = server.serve(catalogue, PageLimits(characters=500, seconds=30), port=free_port(), started=found.append, wait=False)
    yield found[0].rstrip("/") + "/gradio_api"
    close()
    gc.collect()


def ended(site: str, answer: httpx.Response) -> None:
    """A call that was taken ends, and one that was not has a status of the client's mistakes."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500
    if answer.status_code == 200:
        with httpx.stream("GET", f"{site}/call/explain/{answer.json()['event_id']}") as stream:
            said = "".join(stream.iter_lines())
        assert "event: complete" in said or "event: error" in said


@given(data=st.data())
@settings(few, max_examples=12)
def test_any_body_over_http_is_answered_or_refused(site, data):
    full = {"data": list(TEXT.values())}
    if data.draw(st.booleans()):
        body, kind = json.dumps(data.draw(mutated(full))).encode(), "application/json"
    else:
        body = data.draw(damaged(json.dumps(full).encode()))
        kind = data.draw(st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "image/png", ""]))
    ended(site, httpx.post(f"{site}/call/explain", content=body, headers={"content-type": kind}))


@given(damaged(FORM), BOUNDARIES)
@settings(few, max_examples=60)
def test_any_form_is_an_upload_or_refused(site, body, kind):
    answer = httpx.post(f"{site}/upload", content=body, headers={"content-type": kind})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500


@pytest.mark.parametrize("body", [b"[" * 10**5, b'{"data": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"null", b"\xff", b'{"data": [' + b"9" * 5000 + b"]}", b'{"data": ["\\ud800"]}', b'{"data": {"a": 1}}'], ids=["torn", "deep", "null", "no text", "a huge number", "half a pair", "no list"])
def test_a_hostile_body_is_refused(site, body):
    ended(site, httpx.post(f"{site}/call/explain", content=body, headers={"content-type": "application/json"}))
