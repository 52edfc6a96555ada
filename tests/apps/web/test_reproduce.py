"""The snippet and the command line make the view again, to the last bit."""

import base64
import json
import shlex

import numpy as np
import pytest
from typer.testing import CliRunner

from apps.web.visiting import PICTURES, SENTENCE
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
]
IDS = ["picture", "two lines", "sentence", "odd text", "one word", "cut off", "checkpoint"]


@pytest.fixture(params=VIEWS, ids=IDS)
def seen(request, visitor, monkeypatch, tmp_path):
    given, more = request.param
    monkeypatch.setattr("whyformer.apps.web.visitor_session.judge", lambda *_: iter(()))
    shown = visitor.explain(given, **more) if given in ("digits_37.png",) else visitor.explain(given, **more, kind="text")
    assert "map" in shown["status"]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "digits_37.png").write_bytes((PICTURES / "digits_37.png").read_bytes())
    monkeypatch.chdir(folder)
    return visitor


def test_the_snippet_gives_the_same_scores(seen):
    found = {}
    written = reproduce.snippet(seen.session.view)
    assert written.count("whyformer.") == 1  # one call
    exec(written, found)
    made = [found["e"]] if "e" in found else found["found"].explanations
    assert len(made) == len(seen.session.results)
    for mine, shown in zip(made, seen.session.results, strict=True):
        np.testing.assert_array_equal(mine.scores.numpy(), shown.scores.numpy())
        assert (mine.method, mine.settings, mine.target.tolist(), mine.target_names) == (shown.method, shown.settings, shown.target.tolist(), shown.target_names)
    # and the same picture: what the page downloads is what is drawn of them with the same look
    name, content = reproduce.download(seen.session, "png")
    assert name.endswith(".png")
    look = seen.session.view.look if seen.session.view.source.kind == "image" else {}
    assert content == encode(figure(made, **look))


def test_the_command_lines_give_the_same_scores(seen):
    got, command = [], reproduce.command(seen.session.view)
    lines = [command] if "printf" in command else command.splitlines()
    for line in lines:
        words = shlex.split(line)
        piped = words[2] if words[0] == "printf" else None
        arguments = words[words.index("whyformer") + 1 :]
        ran = CliRunner().invoke(app, [*arguments, "--json"], input=piped)
        assert ran.exit_code == 0, ran.output
        got += json.loads(ran.stdout)["explanations"]
    shown = [e.scores.numpy() for e in seen.session.results]
    for e, own in zip(got, shown, strict=True):  # what several lines compute one by one, the page computed together
        np.testing.assert_allclose(e["scores"], own, rtol=0, atol=0 if len(lines) == 1 else 1e-6 * np.abs(own).max())


def test_downloads_are_whole_files(visitor):
    visitor.explain(SENTENCE, classes=["1"])
    kinds = {"png": b"\x89PNG", "html": b"<!doctype html>", "json": b"{"}
    for kind, start in kinds.items():
        file = visitor.handlers.download(visitor.session, kind)
        assert base64.b64decode(file["base64"]).startswith(start)
        assert file["name"].endswith(f".{kind}")
        assert "/" not in file["name"]


def test_a_report_can_draw_the_downloaded_json(visitor, tmp_path):
    visitor.explain("digits_37.png", classes=["3"])
    file = visitor.handlers.download(visitor.session, "json")
    content = base64.b64decode(file["base64"])
    assert json.loads(content)["picture"].startswith("data:image/png;base64,")
    (tmp_path / "view.json").write_bytes(content)
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "view.json"), "-o", str(tmp_path / "report.html"), "--quiet"])
    assert ran.exit_code == 0, ran.output
    assert "data:image/" in (tmp_path / "report.html").read_text()
