"""The page over HTTP: its API endpoint, refused requests, separation of visitors, and exposure to the network."""

import gc
import json
import os
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

import whyformer
from apps.web.visitor import PICTURES, SENTENCE
from waiting import HANG
from whyformer.apps.web import PageLimits, running, server
from whyformer.apps.web.running import USER
from whyformer.errors import InputError
from whyformer.options import DEFAULTS, PER_INPUT, WORDS

# gradio leaves sockets and event loops to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def site(catalogue, tmp_path_factory, free_port):
    """The address of a running page, started in a folder that contains a secret file."""
    home = tmp_path_factory.mktemp("home")
    (home / "secret.txt").write_text("secret words")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        urls = []
        limits = PageLimits(size=200_000, characters=2000)
        close = server.serve(catalogue, limits, port=free_port(), started=urls.append, wait=False)
        yield urls[0].rstrip("/")
        close()
    gc.collect()


@pytest.fixture(scope="module")
def client(site):
    gradio_client = pytest.importorskip("gradio_client")
    return gradio_client.Client(site, verbose=False)


def upload(site, name, content):
    return httpx.post(f"{site}/gradio_api/upload", files={"files": (name, content)})


# -- the endpoint --------------------------------------------------------------------------------------------------
def test_endpoint_explains_sentence(client):
    response = client.predict(text=SENTENCE, methods=["transformer_attribution", "rollout"], targets=["positive"], measure=True, api_name="/explain")
    expected = whyformer.explain("bundled:sst2", SENTENCE, "transformer_attribution", "positive")
    np.testing.assert_allclose(response["explanations"][0]["scores"], expected.scores.tolist())
    assert [e["method"] for e in response["explanations"]] == ["transformer_attribution", "rollout"]
    assert response["top"][0]["name"] in ("positive", "negative")
    assert 0 <= response["faithfulness"][0]["deletion"] <= 1
    assert "whyformer compare" in response["command"]
    assert any("same for every class" in w for w in response["warnings"])


def test_endpoint_explains_picture(client):
    from gradio_client import handle_file

    arguments = {"picture": handle_file(str(PICTURES / "digits_37.png")), "model": "bundled:digits", "targets": ["7"]}
    response = client.predict(**arguments, methods=["gae"], settings={"gae": {"start_layer": 1}}, api_name="/explain")
    expected = whyformer.explain("bundled:digits", PICTURES / "digits_37.png", "gae", 7, start_layer=1)
    np.testing.assert_allclose(response["explanations"][0]["scores"], expected.scores.tolist())
    response = client.predict(**arguments, api_name="/explain")  # the default method is auto
    expected = whyformer.explain("bundled:digits", PICTURES / "digits_37.png", target=7)
    np.testing.assert_allclose(response["explanations"][0]["scores"], expected.scores.tolist())


def test_endpoint_explains_pair_of_texts(client):
    response = client.predict(text=SENTENCE, text_pair="It drags.", methods=["gae"], targets=["positive"], api_name="/explain")
    expected = whyformer.explain("bundled:sst2", {"text": SENTENCE, "text_pair": "It drags."}, "gae", "positive")
    np.testing.assert_allclose(response["explanations"][0]["scores"], expected.scores.tolist())


def test_endpoint_is_listed_with_parameters(client):
    endpoints = client.view_api(return_format="dict")["named_endpoints"]
    assert list(endpoints) == ["/explain"]
    assert [p["parameter_name"] for p in endpoints["/explain"]["parameters"]] == ["text", "picture", "model", "methods", "targets", "settings", "measure", "text_pair", *PER_INPUT]


def test_every_option_of_an_input_is_a_control_with_its_default(site):
    controls = {component["props"].get("elem_id"): component["props"] for component in httpx.get(f"{site}/config").json()["components"]}
    for name in WORDS.keys() - {"device", "dtype"}:
        assert controls[f"wf-{name}"]["value"] == getattr(DEFAULTS, name)


def test_documentation_example_runs(site, monkeypatch, capsys):
    pytest.importorskip("gradio_client")
    root = Path(__file__).parents[3]
    (example,) = re.findall(r"^```py\n(.*?)^```", (root / "docs" / "app.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(root)
    exec(example.replace("http://127.0.0.1:7860", site), {})
    assert capsys.readouterr().out.splitlines()[-1] == "['7']"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either text or picture"),
        ({"text": "x", "model": "../../etc"}, "no model id"),
        ({"text": "a" * 2001}, "at most 2,000"),
        ({"text": SENTENCE, "methods": ["none"]}, "no method 'none'"),
        ({"text": SENTENCE, "targets": ["17"]}, "out of range"),
        ({"text": SENTENCE, "settings": {"transformer_attribution": 3}}, "settings are an object"),
        ({"picture": {"path": "/etc/passwd"}}, "no default model for a picture"),
        ({"picture": {"path": "/etc/passwd"}, "model": "bundled:digits"}, "was not uploaded"),
        ({"picture": {"path": "secret.txt"}, "model": "bundled:digits"}, "was not uploaded"),
        ({"picture": {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}}, ""),
    ],
)
def test_invalid_endpoint_arguments_raise_with_message(site, arguments, message):
    # without the validation of gradio's client
    from gradio_client.exceptions import AppError

    with pytest.raises((AppError, ValueError, httpx.HTTPError, RuntimeError)) as caught:
        raw_call(site, arguments)
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def raw_call(site, arguments):
    full = {"text": "", "picture": None, "model": "", "methods": ["transformer_attribution"], "targets": [], "settings": {}, "measure": False, "text_pair": "", **{name: getattr(DEFAULTS, name) for name in PER_INPUT}} | arguments
    started = httpx.post(f"{site}/gradio_api/call/explain", json={"data": list(full.values())})
    started.raise_for_status()
    with httpx.stream("GET", f"{site}/gradio_api/call/explain/{started.json()['event_id']}") as stream:
        event = ""
        for line in stream.iter_lines():
            if line.startswith("event:"):
                event = line.partition(":")[2].strip()
            if line.startswith("data:") and event in ("error", "complete"):
                data = json.loads(line.partition(":")[2])
                if event == "error":
                    raise RuntimeError(str(data))
                return data
    raise RuntimeError("no answer")


# -- files ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "//etc/passwd", "../../../../etc/passwd", "..%2f..%2f..%2f..%2fetc/passwd", "%2e%2e/%2e%2e/etc/passwd", "secret.txt", "./secret.txt",
        "{home}/secret.txt", "{uploads}/../home/secret.txt", "{uploads}/link", "{uploads}/none", "file:///etc/passwd", "{package}/page.py", "{package}/../bundled/digits/config.json",
    ],
)
def test_only_uploaded_files_are_served(site, path, tmp_path):

    uploads = Path(os.environ["GRADIO_TEMP_DIR"])
    link = uploads / "link"
    link.unlink(missing_ok=True)
    link.symlink_to("/etc/passwd")
    full = path.format(home=Path.cwd(), uploads=uploads, package=Path(server.__file__).parent)
    for url in (f"/gradio_api/file={full}", f"/file={full}"):
        response = raw_get(site, url)
        assert response[0] in (403, 404, 422), (url, response)
        assert "root:" not in response[1]
        assert "secret words" not in response[1]
        assert "architectures" not in response[1]


def raw_get(site, target):
    """Send a GET request without the path normalization of HTTP clients; return status and body."""
    host, _, port = site.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        raw = b""
        while chunk := connection.recv(65536):
            raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode("utf-8", "replace")


def test_upload_is_limited_in_size_and_stays_in_its_folder(site):
    assert upload(site, "large.png", b"x" * 300_000).status_code == 413

    path = Path(upload(site, "../../../escape.png", b"small").json()[0]).resolve()
    assert path.is_relative_to(Path(os.environ["GRADIO_TEMP_DIR"]).resolve())
    assert path.stat().st_mode & 0o077 == 0 or path.parents[1].stat().st_mode & 0o077 == 0  # not readable by other users of the machine


def test_server_fetches_nothing_from_its_network(site):
    requests = []

    class Inside(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Inside) as inside:
        threading.Thread(target=inside.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{inside.server_port}/x.png"
        for target in (f"/gradio_api/file={address}", f"/gradio_api/proxy={address}", f"/proxy={address}"):
            assert raw_get(site, target)[0] >= 300
        file = {"path": address, "meta": {"_type": "gradio.FileData"}}
        event = httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["", file]}).json()["event_id"]
        assert "event: error" in httpx.get(f"{site}/gradio_api/call/explain/{event}").text
        inside.shutdown()
    assert not requests


def test_request_size_is_limited(site):
    assert httpx.post(f"{site}/gradio_api/call/explain", content=b"[" + b"1," * PageLimits().size).status_code == 413


def test_foreign_host_header_is_refused(site):
    assert httpx.get(site, headers={"Host": "evil.example:7860"}).status_code == 400
    assert httpx.get(site).status_code == 200


def test_security_headers_are_sent(site):
    headers = httpx.get(site).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


def test_cross_site_request_has_no_cors_header(site):
    response = httpx.post(f"{site}/gradio_api/call/explain", json={"data": []}, headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers or response.headers["access-control-allow-origin"] != "https://evil.example"


def test_only_explain_endpoint_is_named(site):
    named = httpx.get(f"{site}/gradio_api/info").json()["named_endpoints"]
    assert list(named) == ["/explain"]
    assert httpx.post(f"{site}/gradio_api/call/download", json={"data": []}).status_code >= 400


# -- visitors ------------------------------------------------------------------------------------------------------
def test_concurrent_clients_receive_their_own_results(client, site):
    gradio_client = pytest.importorskip("gradio_client")
    other = gradio_client.Client(site, verbose=False)
    texts, results = [SENTENCE, "A dull and lifeless mess."], {}

    def ask(caller, text):
        for _ in range(3):
            results.setdefault(text, []).append(caller.predict(text=text, api_name="/explain")["explanations"][0]["texts"])

    threads = [threading.Thread(target=ask, args=pair) for pair in zip((client, other), texts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {text: [[text]] * 3 for text in texts}


# -- exposure ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"share": True}, {"host": "0.0.0.0"}, {"host": "::"}, {"host": "192.168.1.5"}, {"host": "example.org"}])
def test_exposed_page_requires_password(options):
    with pytest.raises(InputError, match="needs a password"):
        server.serve(**options)
    with pytest.raises(InputError, match="at least 12"):
        server.serve(**options, password="short")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_local_page_needs_no_password(host):
    assert server.check_exposure(host, False, None) is False


def test_password_protects_all_routes(catalogue, free_port):
    urls = []
    close = server.serve(catalogue, port=free_port(), password="correct horse", started=urls.append, wait=False)
    try:
        site = urls[0].rstrip("/")
        for path in ("/gradio_api/info", "/config", "/gradio_api/file=x"):
            assert httpx.get(site + path).status_code == 401, path
        assert upload(site, "a.png", b"x").status_code == 401
        assert httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["hello"]}).status_code == 401
        for number in range(40):  # events that run in the browser are forbidden for everyone
            body = {"data": ["hello"], "session_hash": "x", "fn_index": number}
            assert httpx.post(f"{site}/gradio_api/queue/join", json=body).status_code in (401, 403), number
        assert httpx.post(f"{site}/login", data={"username": USER, "password": "wrong horse"}).status_code == 400
        with httpx.Client() as visitor:
            assert visitor.post(f"{site}/login", data={"username": USER, "password": "correct horse"}).status_code == 200
            assert visitor.get(f"{site}/gradio_api/info").status_code == 200
        gradio_client = pytest.importorskip("gradio_client")
        logged_in = gradio_client.Client(site, auth=(USER, "correct horse"), verbose=False)
        assert logged_in.predict(text=SENTENCE, api_name="/explain")["explanations"]
    finally:
        close()


def test_share_reports_address_of_tunnel(catalogue, free_port, monkeypatch):
    port, tunnels = free_port(), []
    monkeypatch.setattr(running, "setup_tunnel", lambda *args: tunnels.append(args[:2]) or "http://made-up.example")
    urls = []
    close = server.serve(catalogue, port=port, share=True, password="correct horse", started=urls.append, wait=False)
    try:
        assert urls == ["https://made-up.example"]
        assert tunnels == [("127.0.0.1", port)]
        assert httpx.get(f"http://127.0.0.1:{port}/config", headers={"Host": "made-up.example"}).status_code == 401
    finally:
        close()


def test_failed_tunnel_raises_and_starts_no_page(catalogue, free_port, monkeypatch):
    def failing(*args):
        raise RuntimeError("no answer")

    monkeypatch.setattr(running, "setup_tunnel", failing)
    port = free_port()
    with pytest.raises(whyformer.errors.LoadError, match="--share"):
        server.serve(catalogue, port=port, share=True, password="correct horse")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_occupied_port_raises(site):
    port = int(site.rpartition(":")[2])
    with pytest.raises(whyformer.WhyformerError, match=str(port)):
        server.serve(port=port, wait=False)


def test_missing_gradio_error_names_extra(monkeypatch):
    import sys

    for name in [n for n in sys.modules if n.startswith(("whyformer.apps.web.handlers", "whyformer.apps.web.page", "whyformer.apps.web.api"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(whyformer.errors.MissingExtra, match=r"whyformer\[app\]"):
        server.serve()
