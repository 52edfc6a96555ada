"""The server conforms to its OpenAPI description for generated requests."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
import uvicorn

from waiting import HANG, wait_for
from whyformer.apps.server import Limits
from whyformer.apps.server.app import build
from whyformer.explainer import Explainer
from whyformer.jobs.batching import Session
from whyformer.models import load

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    loaded = load("bundled:sst2")
    app = build(Session(Explainer(loaded), ()), "text", Limits(characters=500, seconds=HANG))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        wait_for(lambda: server.started, "the server")
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_generated_requests_conform_to_openapi(address):
    import subprocess
    import sys

    # valid by the description and still refused with status 400: a blank text, a class that the model does not have
    result = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", "--exclude-checks", "positive_data_acceptance", "--max-examples", "40",
         "--seed", "1", "--request-timeout", str(HANG), "--no-color"],
        capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert httpx.get(f"{address}/ready").status_code == 200
