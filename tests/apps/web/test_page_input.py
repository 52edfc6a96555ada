"""Asking a model on the page: the answer, what is refused, and how to have the same again elsewhere."""

import base64
import html
import json
import re
import shlex
from itertools import count, pairwise
from urllib.parse import urlencode

import numpy as np
import pytest
from typer.testing import CliRunner

from apps.web.test_addresses import restored
from apps.web.visiting import PICTURES, SENTENCE, Visitor
from whyformer.apps.cli import app
from whyformer.apps.web import answers, examples, reproduce
from whyformer.apps.web.handlers import FIELDS, fields_of, offered
from whyformer.apps.web.limits import Catalogue
from whyformer.apps.web.messages import CANCELLED
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.defaults import RECOMMENDED

QUESTION = "what is on the left ?"
ASKED = {"kind": "answer", "picture": "digits_37.png", "methods": ["attnlrp"], "length": 2}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "digits_37.png").write_bytes((PICTURES / "digits_37.png").read_bytes())
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def stories(shared):
    return Catalogue([shared / "weights" / "stories260k"])


@pytest.fixture
def writer(stories, handlers):
    """A visitor of a page that was started with a small language model."""
    return Visitor(type(handlers)(stories, handlers.limits, handlers.uploads))


def written(visitor):
    return visitor.session.results[0]


def test_a_question_about_a_picture(visitor):
    shown = visitor.explain(QUESTION, **ASKED)
    g = written(visitor)
    assert g.pieces[g.start] == " 7"  # which is on the left
    assert "2 tokens" in shown["status"]
    board = shown["board"]
    assert len(g) == 2
    assert board.count('alt="where on the picture: ') == 2  # of the whole answer, and of its one word: the other token ends it
    assert board.count('type="radio"') == 1 + len(g.pieces) - 195 - 2  # 196 tokens of the picture are one piece; <s> and </s> are none
    assert "<script" not in board
    assert "[picture]" in board
    assert shown["looks"]["visible"] is False
    assert visitor.session.bytes > g.matrix.nbytes


def test_a_language_model(writer):
    shown = writer.explain("Once upon a time", kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=5)
    assert "5 tokens" in shown["status"]
    assert "/stories260k" not in shown["board"]  # others may see the page
    assert written(writer).method == "input_x_gradient"
    assert len(written(writer)) == 5
    assert "Every word of the answer" in shown["board"] or len(written(writer).by("word")) == 5


def test_a_prompt_is_never_markup(writer):
    attack = '<img src=x onerror=alert(1)></style><script>alert(2)</script>'
    shown = writer.explain(attack, kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=1)
    assert "1 token in" in shown["status"]
    assert "<script" not in shown["board"]
    assert "<img src=x" not in shown["board"] + shown["code"]


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", "gone.png"])
def test_an_address_opens_no_file_that_was_not_uploaded(visitor, place):
    shown = restored(visitor, urlencode({"kind": "answer", "picture": place, "sentence": QUESTION, "methods": "attnlrp"}))
    assert "no longer here" in shown["status"]
    assert visitor.session.results == []


@pytest.mark.parametrize(("length", "said"), [("0", "1 to 64"), ("65", "1 to 64"), ("99999", "1 to 64")])
def test_an_address_asks_for_no_more_than_the_page_does(visitor, length, said):
    shown = restored(visitor, urlencode({"kind": "answer", "sentence": QUESTION, "methods": "attnlrp", "length": length}))
    assert said in shown["status"]


def test_nothing_is_computed_twice(visitor, monkeypatch):
    visitor.explain(QUESTION, **ASKED)
    first = written(visitor)
    monkeypatch.setattr("whyformer.explain_generation", lambda *_, **__: pytest.fail("computed again"))
    visitor.explain(QUESTION, **ASKED)
    assert written(visitor) is first


VIEWS = {
    "picture": (QUESTION, ASKED),
    "settings": (QUESTION, {**ASKED, "methods": ["rollout"], "settings": {"rollout": {"start_layer": 1}}}),
    "odd text": ("-- \"it's\"\n$HOME", {**ASKED, "methods": ["input_x_gradient"], "picture": "digits_37.png"}),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_snippet_and_the_command_give_the_same_scores(visitor, elsewhere, view):
    given, more = view
    visitor.explain(given, **more)
    shown, found = written(visitor), {}
    snippet = reproduce.snippet(visitor.session.view)
    assert snippet.count("whyformer.") == 1
    exec(snippet, found)
    np.testing.assert_array_equal(found["g"].matrix.numpy(), shown.matrix.numpy())
    np.testing.assert_array_equal(found["g"].seen["pixel_values"].scores.numpy(), shown.seen["pixel_values"].scores.numpy())
    assert (found["g"].method, found["g"].settings, found["g"].ids) == (shown.method, shown.settings, shown.ids)
    words = shlex.split(reproduce.command(visitor.session.view))
    piped = words[2] if words[0] == "printf" else None
    ran = CliRunner().invoke(app, [*words[words.index("whyformer") + 1 :], "--json", "--format", "none"], input=piped)
    assert ran.exit_code == 0, ran.output
    np.testing.assert_allclose(json.loads(ran.stdout)["generation"]["matrix"], shown.matrix.numpy(), rtol=0, atol=0)


def test_a_message_is_written_down_by_the_template(writer):
    view = writer.explain("Hello", kind="answer", model="folder:stories260k", methods=["attnlrp"], chat=True)
    assert "has no chat template" in view["status"]
    assert "wf-error" in view["status"]


@pytest.mark.parametrize("kind", ["png", "html", "json"])
def test_downloads(visitor, kind):
    visitor.explain(QUESTION, **ASKED)
    file = visitor.handlers.download(visitor.session, kind)
    content = base64.b64decode(file["base64"])
    assert file["name"] == f"what_is_on_the_left-attnlrp-answer.{kind}"
    if kind == "json":
        assert json.loads(content)["generation"]["text"] == written(visitor).text
    else:
        assert content.startswith({"png": b"\x89PNG", "html": b"<!doctype html>"}[kind])


REFUSED = {
    "no prompt": ("", ASKED, "there is no text yet"),
    "two methods": (QUESTION, {**ASKED, "methods": ["attnlrp", "gae"]}, "explained by one method"),
    "no method": (QUESTION, {**ASKED, "methods": []}, "explained by one method"),
    "too long": (QUESTION, {**ASKED, "length": 65}, "1 to 64 tokens here, not 65"),
    "no length": (QUESTION, {**ASKED, "length": "9"}, "1 to 64 tokens"),
    "a classifier": (SENTENCE, {**ASKED, "picture": None, "model": "bundled:sst2"}, "cannot generate text"),
    "a blind classifier": (QUESTION, {**ASKED, "model": "bundled:sst2"}, "reads no pictures"),
    "pictures alone": (QUESTION, {**ASKED, "model": "bundled:digits"}, "writes nothing"),
    "a message": (QUESTION, {**ASKED, "chat": True}, "untick the message"),
    "a method of pictures": (QUESTION, {**ASKED, "methods": ["grad_cam"]}, "grad_cam"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_one_sentence(visitor, case):
    given, more, said = case
    shown = visitor.explain(given, **more)
    assert said in shown["status"]
    assert "wf-error" in shown["status"]
    assert "Something went wrong" not in shown["status"]
    assert visitor.session.results == []


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_nothing_is_called_ready_that_explain_refuses(visitor, case):
    """What is said of a new input may arrive after what Explain said of it, and then stays."""
    given, more, said = case
    *_, shown = visitor.handlers.look(visitor.session, visitor.entered(given, **more))
    assert "Ready" not in shown["status"]
    assert said in shown["status"] or not given.strip()


def test_the_answer_is_seen_while_it_is_written(writer, monkeypatch):
    monkeypatch.setattr("whyformer.apps.web.visitor_session.PAUSE", -1.0)
    said = []
    entered = writer.entered("Once upon a time <b>", kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=4)
    steps = list(writer.handlers.explain(writer.session, entered, progress=lambda share, desc: said.append((share, desc))))
    assert [share for share, desc in said if desc == "writing"] == [(i, 4) for i in range(4)]
    *boards, last = [board for step in steps if isinstance(board := step.get("board"), str)]
    assert "wf-generated" in last
    assert all("<p dir=\"auto\">Once upon a time &lt;b&gt;</p>" in board for board in boards)
    texts = [re.findall(r"<p[^>]*>(.*?)</p>", board, re.DOTALL)[1] for board in boards]
    assert len(texts) == 4
    assert all(after.startswith(before) and after != before for before, after in pairwise(texts))
    assert html.unescape(texts[-1]).split() == written(writer).text.split()


def test_an_answer_that_nobody_waits_for_is_not_written_to_its_end():
    ended = []

    def make(track):
        try:
            for _ in track((str(i) for i in count()), "writing"):
                pass
        finally:
            ended.append(True)

    session = VisitorSession()
    shown = answers.as_written(make, session.track(), lambda text: {"board": text})
    assert [next(shown)["board"], next(shown)["board"]] == ["0", "1"]
    shown.close()
    assert ended == [True]


def test_cancelling_ends_the_writing(writer):
    entered = writer.entered("Once upon a time", kind="answer", model="folder:stories260k", length=64)

    def cancel(share, desc):
        if desc.startswith("writing"):
            writer.handlers.stop(writer.session)

    last = list(writer.handlers.explain(writer.session, entered, progress=cancel))[-1]["status"]
    assert CANCELLED in last
    assert writer.session.results == []


def test_time_is_bounded(visitor, handlers):
    from dataclasses import replace

    hasty = Visitor(replace(handlers, limits=replace(handlers.limits, seconds=0.0)))
    assert "writing took more than 0 s" in hasty.explain(QUESTION, **ASKED)["status"]


def test_a_reload_shows_the_same_answer(visitor):
    said = visitor.explain(QUESTION, **VIEWS["settings"][1])
    again = Visitor(visitor.handlers)
    shown = restored(again, "#" + said["address"])
    assert again.session.view.methods == visitor.session.view.methods
    assert (again.session.view.length, again.session.view.chat) == (2, False)
    np.testing.assert_array_equal(written(again).matrix.numpy(), written(visitor).matrix.numpy())
    assert shown["address"] == said["address"]
    assert shown["sentence"]["value"] == QUESTION
    assert shown["length"]["value"] == 2


def test_the_controls_of_an_answer():
    assert {name for name, update in fields_of("answer").items() if update["visible"]} == {"picture", "sentence", "length", "chat"}
    assert [fields_of(kind)["sentence"]["label"] for kind in ("text", "answer")] == ["Sentence", "Prompt"]
    assert tuple(fields_of("image")) == FIELDS
    assert [name for name, _ in offered("answer")][:4] == list(RECOMMENDED)
    assert "attnlrp" in dict(offered("answer"))


def test_the_methods_follow_the_kind(handlers):
    for kind, model in (("image", "bundled:digits"), ("text", "bundled:sst2"), ("answer", "bundled:reader")):
        shown = handlers.switch(VisitorSession(), kind)
        assert shown["model"] == model
        assert shown["methods"]["choices"] == offered(kind)
        assert "value" not in shown["methods"]  # what was chosen stays


def test_examples_ask_about_a_picture(visitor):
    for number, prompt in enumerate(examples.PROMPTS):
        entered = examples.entered("answer", number, visitor.handlers.uploads)
        assert entered["sentence"] == prompt
        assert entered["picture"].endswith(".png")
        assert prompt in examples.offered("answer")


def test_another_look_or_a_word_of_a_classifier_changes_nothing(visitor):
    visitor.explain(QUESTION, **ASKED)
    for found in (visitor.handlers.redraw(visitor.session, "kept", 0.5, 0.2), visitor.handlers.word(visitor.session, 0, "mean")):
        assert list(found) == []
