"""The page's snippet and command line reproduce the view exactly."""

import base64
import json
import shlex

import numpy as np
import pytest
from typer.testing import CliRunner

from apps.web.visitor import PICTURES, SENTENCE
from whyformer.apps.cli import app
from whyformer.apps.web import reproduce
from whyformer.show import encode, figure

VIEWS = [
    ("digits_37.png", {"methods": ["transformer_attribution", "rollout", "input_x_gradient"], "classes": ["3", "7"], "settings": {"transformer_attribution": {"start_layer": 1}, "rollout": {"start_layer": 1, "head_fusion": "max"}}, "opacity": 0.4, "style": "contours"}),
    ("digits_37.png", {"methods": ["transformer_attribution", "gae"], "settings": {"gae": {"start_layer": 2}}, "style": "kept"}),
    (SENTENCE, {"methods": ["integrated_gradients", "raw_attention"], "classes": ["1"], "settings": {"raw_attention": {"aggregation": {"layers": "mean"}}}}),
    ("-- it's \"fine\"\nor 100% so.png", {"methods": ["gae"]}),
    ("charming", {"methods": ["saliency"]}),
    ("word " * 300, {"truncate": True, "methods": ["gae"]}),
    (SENTENCE, {"checkpoint": True, "methods": ["attnlrp", "input_x_gradient"]}),
    (SENTENCE, {"pair": "It drags, \"really\".", "methods": ["gae", "saliency"]}),
]
IDS = ["picture", "two lines", "sentence", "odd text", "one word", "cut off", "checkpoint", "pair"]


@pytest.fixture(params=VIEWS, ids=IDS)
def explained_visitor(request, visitor, monkeypatch, tmp_path):
    input_, options = request.param
    monkeypatch.setattr("whyformer.apps.web.visitor_session.judge", lambda *_: iter(()))
    shown = visitor.explain(input_, **options) if input_ in ("digits_37.png",) else visitor.explain(input_, **options, kind="text")
    assert "map" in shown["status"]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "digits_37.png").write_bytes((PICTURES / "digits_37.png").read_bytes())
    monkeypatch.chdir(folder)
    return visitor


def test_snippet_gives_same_scores(explained_visitor):
    namespace = {}
    snippet = reproduce.snippet(explained_visitor.session.view)
    assert snippet.count("whyformer.") == 1  # a single call
    exec(snippet, namespace)
    explanations = [namespace["e"]] if "e" in namespace else namespace["comparison"].explanations
    assert len(explanations) == len(explained_visitor.session.results)
    for e, shown in zip(explanations, explained_visitor.session.results, strict=True):
        np.testing.assert_array_equal(e.scores.numpy(), shown.scores.numpy())
        assert (e.method, e.settings, e.target.tolist(), e.target_names) == (shown.method, shown.settings, shown.target.tolist(), shown.target_names)
    # the downloaded picture equals the figure of these explanations in the same style
    name, content = reproduce.download(explained_visitor.session, "png")
    assert name.endswith(".png")
    look = explained_visitor.session.view.look if explained_visitor.session.view.source.kind == "image" else {}
    assert content == encode(figure(explanations, **look))


def test_command_lines_give_same_scores(explained_visitor):
    results, command = [], reproduce.command(explained_visitor.session.view)
    lines = [command] if "printf" in command else command.splitlines()
    for line in lines:
        arguments = shlex.split(line)
        piped = arguments[2] if arguments[0] == "printf" else None
        options = arguments[arguments.index("whyformer") + 1 :]
        result = CliRunner().invoke(app, [*options, "--json"], input=piped)
        assert result.exit_code == 0, result.output
        results += json.loads(result.stdout)["explanations"]
    shown = [e.scores.numpy() for e in explained_visitor.session.results]
    for e, expected in zip(results, shown, strict=True):  # the page computed in one batch what several lines compute separately
        np.testing.assert_allclose(e["scores"], expected, rtol=0, atol=0 if len(lines) == 1 else 1e-6 * np.abs(expected).max())


def test_downloads_are_complete_files(visitor):
    visitor.explain(SENTENCE, classes=["1"])
    kinds = {"png": b"\x89PNG", "html": b"<!doctype html>", "json": b"{"}
    for kind, start in kinds.items():
        file = visitor.handlers.download(visitor.session, kind)
        assert base64.b64decode(file["base64"]).startswith(start)
        assert file["name"].endswith(f".{kind}")
        assert "/" not in file["name"]


def test_report_accepts_downloaded_json(visitor, tmp_path):
    visitor.explain("digits_37.png", classes=["3"])
    file = visitor.handlers.download(visitor.session, "json")
    content = base64.b64decode(file["base64"])
    assert json.loads(content)["picture"].startswith("data:image/png;base64,")
    (tmp_path / "view.json").write_bytes(content)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "view.json"), "-o", str(tmp_path / "report.html"), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "data:image/" in (tmp_path / "report.html").read_text()
