"""Fuzzed requests to the page: a result or a message, without internal errors."""

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

from apps.web.visitor import PICTURES, Visitor
from mutations import ODD, damaged, mutated
from whyformer.apps.web import PageLimits, address, opening, page_input, server
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import Handlers
from whyformer.errors import InputError

# gradio leaves sockets and event loops to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
few = settings(max_examples=25, suppress_health_check=list(HealthCheck))
many = settings(max_examples=60, suppress_health_check=list(HealthCheck))
TEXT = {"text": "A charming film.", "picture": None, "model": "bundled:sst2", "methods": ["gae", "rollout"], "targets": ["positive"], "settings": {"gae": {"composite": "plain"}}, "measure": False, "text_pair": "", "truncate": False, "checkpoint": False}
FORM = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nabc\r\n--x--\r\n'
BOUNDARIES = st.sampled_from(["multipart/form-data; boundary=x", "multipart/form-data", "multipart/form-data; boundary=" + "y" * 5000, "application/json", ""])


@pytest.fixture(scope="module")
def handlers(catalogue, tmp_path_factory):
    uploads = tmp_path_factory.mktemp("fuzzed") / "uploads"
    uploads.mkdir()
    (uploads / "digits_37.png").write_bytes((PICTURES / "digits_37.png").read_bytes())
    return Handlers(catalogue, PageLimits(characters=500, seconds=30), uploads)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.ERROR, "whyformer.web")
    yield caplog
    assert caplog.records == []  # internal errors are logged


def call_endpoint(handlers, data) -> None:
    picture = {**TEXT, "text": "", "picture": {"path": str(handlers.uploads / "digits_37.png")}, "model": "bundled:digits", "targets": ["3"], "settings": {"gae": {"composite": "ah"}}}
    arguments = data.draw(mutated(TEXT) | mutated(picture) | st.fixed_dictionaries(dict.fromkeys(TEXT, ODD)))
    with contextlib.suppress(gr.Error):  # the message to the user
        json.dumps(endpoint(handlers)(**{name: arguments.get(name, TEXT[name]) for name in TEXT}))


def enter_values(handlers, data) -> None:
    visitor = Visitor(handlers)
    controls = data.draw(st.sampled_from([
        visitor.entered("A charming film.", methods=("gae",), classes=("positive",)), visitor.entered("digits_37.png", methods=("gae",)),
        visitor.entered("Where is the key?", kind="answer", methods=("input_x_gradient",), length=2),
    ]))  # fmt: skip
    values = data.draw(mutated(list(controls.values())))
    entered = dict(zip(page_input.CONTROLS, [*values, *[None] * 15], strict=False))
    assert all(handlers.explain(visitor.session, entered))
    assert all(opening.switch(handlers, visitor.session, entered))


@given(data=st.data())
@few
def test_fuzzed_endpoint_arguments_give_result_or_message(handlers, log, data):
    call_endpoint(handlers, data)


@given(data=st.data())
@few
def test_fuzzed_control_values_give_result_or_message(handlers, log, data):
    enter_values(handlers, data)


@given(st.text(max_size=60) | ODD | st.dictionaries(st.sampled_from(page_input.CONTROLS), st.text(max_size=12) | st.sampled_from(["image", "text", "answer", "digits_37.png", "../x", "nan", "-1"])).map(lambda facts: "&".join(f"{k}={v}" for k, v in facts.items())))
def test_fuzzed_address_is_parsed_or_raises(handlers, fragment):
    with contextlib.suppress(InputError):  # the picture was not uploaded
        values = address.read(fragment, handlers.uploads)
        assert values is None or len(values) == len(page_input.CONTROLS)


@pytest.mark.whole
@given(data=st.data())
@many
def test_many_fuzzed_arguments_and_values_give_result_or_message(handlers, log, data):
    call_endpoint(handlers, data)
    enter_values(handlers, data)


# -- over HTTP -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(catalogue, free_port):
    urls = []
    close = server.serve(catalogue, PageLimits(characters=500, seconds=30), port=free_port(), started=urls.append, wait=False)
    yield urls[0].rstrip("/") + "/gradio_api"
    close()
    gc.collect()


def assert_call_ends(site: str, response: httpx.Response) -> None:
    """Check that an accepted call ends, and that the page answers after a refused one."""
    if response.status_code == 200:
        with httpx.stream("GET", f"{site}/call/explain/{response.json()['event_id']}") as stream:
            events = "".join(stream.iter_lines())
        assert "event: complete" in events or "event: error" in events
    else:
        assert response.status_code >= 400
        assert httpx.get(f"{site}/info").status_code == 200


@given(data=st.data())
@settings(few, max_examples=12)
def test_fuzzed_http_body_is_answered_or_refused(site, data):
    full = {"data": list(TEXT.values())}
    if data.draw(st.booleans()):
        body, kind = json.dumps(data.draw(mutated(full))).encode(), "application/json"
    else:
        body = data.draw(damaged(json.dumps(full).encode()))
        kind = data.draw(st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "image/png", ""]))
    assert_call_ends(site, httpx.post(f"{site}/call/explain", content=body, headers={"content-type": kind}))


@given(damaged(FORM), BOUNDARIES)
@settings(few, max_examples=60)
def test_fuzzed_form_is_uploaded_or_refused(site, body, kind):
    response = httpx.post(f"{site}/upload", content=body, headers={"content-type": kind})
    assert response.status_code == 200 or response.status_code >= 400
    assert httpx.get(f"{site}/info").status_code == 200


@pytest.mark.parametrize("body", [b"[" * 10**5, b'{"data": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"null", b"\xff", b'{"data": [' + b"9" * 5000 + b"]}", b'{"data": ["\\ud800"]}', b'{"data": {"a": 1}}'], ids=["torn", "deep", "null", "no text", "a huge number", "half a pair", "no list"])
def test_hostile_body_ends_or_is_refused(site, body):
    assert_call_ends(site, httpx.post(f"{site}/call/explain", content=body, headers={"content-type": "application/json"}))
