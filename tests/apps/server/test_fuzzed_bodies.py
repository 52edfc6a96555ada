"""Whatever is sent to the server: an answer, or a status of its description with a reason; no hang, and no memory filled."""

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


def served(name: str, kind: str):
    loaded = load(name)
    limits = Limits(characters=500, seconds=30, setting=64, pixels=2_000_000)
    return testclient.TestClient(build(Session(Explainer(loaded), ()), kind, limits), "http://127.0.0.1")


@pytest.fixture(scope="module")
def texts():
    with served("bundled:sst2", "text") as made:
        yield made


@pytest.fixture(scope="module")
def pictures():
    with served("bundled:digits", "image") as made:
        yield made


@pytest.fixture(scope="module")
def kinds():
    """One picture in each format."""
    whole = Image.open(Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png").convert("RGB")
    found = {}
    for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        whole.save(held := io.BytesIO(), name)
        found[name] = held.getvalue()
    return found


def check(answer) -> None:
    """An exception inside of the server would have been raised by the request."""
    assert answer.status_code in STATUSES
    assert answer.json()["detail"] if answer.status_code != 200 else answer.json()["explanations"]


def ask(texts, data) -> None:
    content, kind = data.draw(st.one_of(
        st.tuples(REQUESTS.map(lambda v: json.dumps(v).encode()), st.just("application/json")),
        st.tuples(damaged(json.dumps(TEXT).encode()) | st.binary(max_size=50), TYPES),
    ))  # fmt: skip
    check(texts.post("/v1/explain/text", content=content, headers={"content-type": kind}))


def show(pictures, kinds, data) -> None:
    raw = data.draw(damaged(kinds[data.draw(st.sampled_from(sorted(kinds)))]))
    asked = {"method": data.draw(st.sampled_from(["gae", "rollout"]) | st.text(max_size=4)), "target": data.draw(st.text(max_size=4) | st.integers().map(str))}
    check(pictures.post("/v1/explain/picture", content=raw, params=asked))


@given(data=st.data())
@few
def test_any_body_for_a_text_is_answered_or_refused_with_a_reason(texts, data):
    ask(texts, data)


@given(data=st.data())
@few
def test_any_body_for_a_picture_is_answered_or_refused_with_a_reason(pictures, kinds, data):
    show(pictures, kinds, data)


@pytest.mark.whole
@given(data=st.data())
@many
def test_the_same_of_many_more(texts, pictures, kinds, data):
    ask(texts, data)
    show(pictures, kinds, data)


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
def test_a_hostile_body_is_refused(texts, name):
    answer = texts.post("/v1/explain/text", content=HOSTILE[name], headers={"content-type": "application/json"})
    assert answer.status_code in (400, 413, 422)
    check(answer)


def test_of_two_equal_keys_the_later_counts(texts):
    answer = texts.post("/v1/explain/text", content=b'{"text": "Dull.", "text": "Superb."}', headers={"content-type": "application/json"})
    assert "superb" in answer.json()["explanations"][0]["tokens"][0]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, more: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def test_pictures_that_unpack_to_much_more_are_refused_without_it(pictures):
    bomb = zlib.compress(b"\0" * (200 * 2**20), 9)
    bodies = [png(2**31 - 1, 2**31 - 1), png(50_000, 50_000), png(2000, 2000), png(0, 5), *(png(100, 100, chunk(name, b"x\0" + flags + bomb)) for name, flags in ((b"zTXt", b"\0"), (b"iCCP", b"\0"), (b"iTXt", b"\1\0\0\0")))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for body in bodies:
        answer = pictures.post("/v1/explain/picture", content=body)
        assert answer.status_code in (400, 413)
        check(answer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024  # kB
