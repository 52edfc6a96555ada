"""Fuzzed requests to the server: a response or a documented error status with a reason, without a hang or high memory use."""

from __future__ import annotations

import io
import json
import resource
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mutations import ODD, damaged, mutated
from whyformer.apps.server import Limits
from whyformer.apps.server.app import build
from whyformer.explainer import Explainer
from whyformer.jobs.batching import Session
from whyformer.models import load

testclient = pytest.importorskip("starlette.testclient")
STATUSES = {200, 400, 413, 422, 429, 504}
few = settings(max_examples=30, suppress_health_check=list(HealthCheck))
many = settings(max_examples=300, suppress_health_check=list(HealthCheck))
TEXT = {"text": "A charming film.", "method": "integrated_gradients", "settings": {"steps": 4}, "target": "positive"}
METHODS = st.sampled_from(["gae", "tis", "integrated_gradients", "occlusion", "auto", "rollout", "decompx", "\x00", "\ud800"]) | st.text(max_size=5)
NAMES = st.sampled_from(["steps", "start_layer", "composite", "block", "samples", "seed", "share", "aggregation"]) | st.text(max_size=4)
REQUESTS = mutated(TEXT) | st.fixed_dictionaries({"text": st.text(max_size=40) | ODD, "method": METHODS, "settings": st.dictionaries(NAMES, ODD, max_size=2), "target": ODD})
TYPES = st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "multipart/form-data", "application/x-www-form-urlencoded", "image/png", "application/json; charset=utf-16", ""])


def make_client(name: str, kind: str):
    loaded = load(name)
    limits = Limits(characters=500, seconds=30, setting=64, pixels=2_000_000)
    return testclient.TestClient(build(Session(Explainer(loaded), ()), kind, limits), "http://127.0.0.1")


@pytest.fixture(scope="module")
def text_client():
    with make_client("bundled:sst2", "text") as client:
        yield client


@pytest.fixture(scope="module")
def picture_client():
    with make_client("bundled:digits", "image") as client:
        yield client


@pytest.fixture(scope="module")
def encoded_pictures():
    """One picture in each format."""
    picture = Image.open(Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png").convert("RGB")
    encoded = {}
    for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        picture.save(buffer := io.BytesIO(), name)
        encoded[name] = buffer.getvalue()
    return encoded


def assert_valid_response(response) -> None:
    """Check status and content of a response; an exception in the server is raised by the request itself."""
    assert response.status_code in STATUSES
    assert response.json()["detail"] if response.status_code != 200 else response.json()["explanations"]


def post_fuzzed_text(text_client, data) -> None:
    content, kind = data.draw(st.one_of(
        st.tuples(REQUESTS.map(lambda v: json.dumps(v).encode()), st.just("application/json")),
        st.tuples(damaged(json.dumps(TEXT).encode()) | st.binary(max_size=50), TYPES),
    ))  # fmt: skip
    assert_valid_response(text_client.post("/v1/explain/text", content=content, headers={"content-type": kind}))


def post_fuzzed_picture(picture_client, encoded_pictures, data) -> None:
    raw = data.draw(damaged(encoded_pictures[data.draw(st.sampled_from(sorted(encoded_pictures)))]))
    params = {"method": data.draw(st.sampled_from(["gae", "rollout"]) | st.text(max_size=4)), "target": data.draw(st.text(max_size=4) | st.integers().map(str))}
    assert_valid_response(picture_client.post("/v1/explain/picture", content=raw, params=params))


@given(data=st.data())
@few
def test_fuzzed_text_request_is_answered_or_refused_with_reason(text_client, data):
    post_fuzzed_text(text_client, data)


@given(data=st.data())
@few
def test_fuzzed_picture_request_is_answered_or_refused_with_reason(picture_client, encoded_pictures, data):
    post_fuzzed_picture(picture_client, encoded_pictures, data)


@pytest.mark.whole
@given(data=st.data())
@many
def test_many_fuzzed_requests_are_answered_or_refused_with_reason(text_client, picture_client, encoded_pictures, data):
    post_fuzzed_text(text_client, data)
    post_fuzzed_picture(picture_client, encoded_pictures, data)


LONG = "x" * 10**6
HOSTILE = {
    "a million brackets": b"[" * 10**6,
    "deep JSON": b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "a number of 5000 digits": b'{"text": "a", "target": ' + b"9" * 5000 + b"}",
    "a number beyond all floats": b'{"text": "a", "settings": {"steps": 1e999}}',
    "half of a surrogate pair": json.dumps({**TEXT, "text": "\ud800 film"}).encode(),
    "a method of a million letters": json.dumps({**TEXT, "method": LONG}).encode(),
    "a setting of a million letters": json.dumps({**TEXT, "settings": {LONG: 1}}).encode(),
    "a class of a million letters": json.dumps({**TEXT, "target": LONG}).encode(),
    "half of a surrogate pair as a class": json.dumps({**TEXT, "target": "\ud800"}).encode(),
    "half of a surrogate pair as a key": json.dumps({**TEXT, "\ud800": 1}).encode(),
    "a hundred thousand blocks": json.dumps({**TEXT, "method": "gae", "settings": {"blocks": list(range(10**5))}}).encode(),
    "steps beyond counting": json.dumps({**TEXT, "settings": {"steps": 10**30}}).encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_is_refused(text_client, name):
    response = text_client.post("/v1/explain/text", content=HOSTILE[name], headers={"content-type": "application/json"})
    assert response.status_code in (400, 413, 422)
    assert_valid_response(response)


def test_last_of_duplicate_keys_wins(text_client):
    response = text_client.post("/v1/explain/text", content=b'{"text": "Dull.", "text": "Superb."}', headers={"content-type": "application/json"})
    assert "superb" in response.json()["explanations"][0]["tokens"][0]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, more: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def test_decompression_bombs_are_refused_without_decompression(picture_client):
    bomb = zlib.compress(b"\0" * (200 * 2**20), 9)
    bodies = [png(2**31 - 1, 2**31 - 1), png(50_000, 50_000), png(2000, 2000), png(0, 5), *(png(100, 100, chunk(name, b"x\0" + flags + bomb)) for name, flags in ((b"zTXt", b"\0"), (b"iCCP", b"\0"), (b"iTXt", b"\1\0\0\0")))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for body in bodies:
        response = picture_client.post("/v1/explain/picture", content=body)
        assert response.status_code in (400, 413)
        assert_valid_response(response)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024  # kB
