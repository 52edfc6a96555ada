"""Answers of generative models on the page: results, refused inputs, and code that reproduces them."""

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
from apps.web.visitor import PICTURES, SENTENCE, Visitor
from whyformer.apps.cli import app
from whyformer.apps.web import answers, examples, reproduce
from whyformer.apps.web.handlers import fields_of, offered
from whyformer.apps.web.limits import Catalogue
from whyformer.apps.web.messages import CANCELLED
from whyformer.apps.web.page_input import FIELDS, PageInput
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.defaults import RECOMMENDED

QUESTION = "what is on the left ?"
OPTIONS = {"kind": "answer", "picture": "digits_37.png", "methods": ["attnlrp"], "length": 2}


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
def storyteller(stories, handlers):
    """A visitor of a page that was started with a small language model."""
    return Visitor(type(handlers)(stories, handlers.limits, handlers.uploads))


def generation_of(visitor):
    return visitor.session.results[0]


def test_question_about_picture_is_answered_and_explained(visitor):
    shown = visitor.explain(QUESTION, **OPTIONS)
    g = generation_of(visitor)
    assert g.pieces[g.start] == " 7"  # the digit on the left
    assert "2 tokens" in shown["status"]
    board = shown["board"]
    assert len(g) == 2
    assert board.count('alt="where on the picture: ') == 2  # one of the whole answer and one of its single word; the other token is the end
    assert board.count('type="radio"') == 1 + len(g.pieces) - 195 - 2  # the 196 tokens of the picture count as one piece; <s> and </s> are omitted
    assert "<script" not in board
    assert "[picture]" in board
    assert shown["looks"]["visible"] is False
    assert visitor.session.bytes > g.matrix.nbytes


def test_language_model_answer_is_explained(storyteller):
    shown = storyteller.explain("Once upon a time", kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=5)
    assert "5 tokens" in shown["status"]
    assert "/stories260k" not in shown["board"]  # no paths on a page that others may see
    assert generation_of(storyteller).method == "input_x_gradient"
    assert len(generation_of(storyteller)) == 5
    assert "Every word of the answer" in shown["board"] or len(generation_of(storyteller).by("word")) == 5


def test_prompt_is_escaped(storyteller):
    attack = '<img src=x onerror=alert(1)></style><script>alert(2)</script>'
    shown = storyteller.explain(attack, kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=1)
    assert "1 token in" in shown["status"]
    assert "<script" not in shown["board"]
    assert "<img src=x" not in shown["board"] + shown["code"]


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "gone.png"])
def test_address_of_file_that_was_not_uploaded_shows_message(visitor, path):
    shown = restored(visitor, urlencode({"kind": "answer", "picture": path, "sentence": QUESTION, "methods": "attnlrp"}))
    assert "no longer here" in shown["status"]
    assert visitor.session.results == []


@pytest.mark.parametrize(("length", "message"), [("0", "1 to 64"), ("65", "1 to 64"), ("99999", "1 to 64")])
def test_address_with_too_long_answer_shows_message(visitor, length, message):
    shown = restored(visitor, urlencode({"kind": "answer", "sentence": QUESTION, "methods": "attnlrp", "length": length}))
    assert message in shown["status"]


def test_unchanged_answer_is_not_recomputed(visitor, monkeypatch):
    visitor.explain(QUESTION, **OPTIONS)
    first = generation_of(visitor)
    monkeypatch.setattr("whyformer.explain_generation", lambda *_, **__: pytest.fail("computed again"))
    visitor.explain(QUESTION, **OPTIONS)
    assert generation_of(visitor) is first


VIEWS = {
    "picture": (QUESTION, OPTIONS),
    "settings": (QUESTION, {**OPTIONS, "methods": ["rollout"], "settings": {"rollout": {"start_layer": 1}}}),
    "odd text": ("-- \"it's\"\n$HOME", {**OPTIONS, "methods": ["input_x_gradient"], "picture": "digits_37.png"}),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_snippet_and_command_give_same_scores(visitor, elsewhere, view):
    prompt, options = view
    visitor.explain(prompt, **options)
    expected, namespace = generation_of(visitor), {}
    snippet = reproduce.snippet(visitor.session.view)
    assert snippet.count("whyformer.") == 1
    exec(snippet, namespace)
    np.testing.assert_array_equal(namespace["g"].matrix.numpy(), expected.matrix.numpy())
    np.testing.assert_array_equal(namespace["g"].picture_maps["pixel_values"].scores.numpy(), expected.picture_maps["pixel_values"].scores.numpy())
    assert (namespace["g"].method, namespace["g"].settings, namespace["g"].ids) == (expected.method, expected.settings, expected.ids)
    command = shlex.split(reproduce.command(visitor.session.view))
    piped = command[2] if command[0] == "printf" else None
    result = CliRunner().invoke(app, [*command[command.index("whyformer") + 1 :], "--json", "--format", "none"], input=piped)
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(json.loads(result.stdout)["generation"]["matrix"], expected.matrix.numpy(), rtol=0, atol=0)


def test_chat_message_needs_chat_template(storyteller):
    view = storyteller.explain("Hello", kind="answer", model="folder:stories260k", methods=["attnlrp"], chat=True)
    assert "has no chat template" in view["status"]
    assert "wf-error" in view["status"]


@pytest.mark.parametrize("kind", ["png", "html", "json"])
def test_downloads_have_name_and_content(visitor, kind):
    visitor.explain(QUESTION, **OPTIONS)
    file = visitor.handlers.download(visitor.session, kind)
    content = base64.b64decode(file["base64"])
    assert file["name"] == f"what_is_on_the_left-attnlrp-answer.{kind}"
    if kind == "json":
        assert json.loads(content)["generation"]["text"] == generation_of(visitor).text
    else:
        assert content.startswith({"png": b"\x89PNG", "html": b"<!doctype html>"}[kind])


REFUSED = {
    "no prompt": ("", OPTIONS, "there is no text yet"),
    "two methods": (QUESTION, {**OPTIONS, "methods": ["attnlrp", "gae"]}, "explained by one method"),
    "no method": (QUESTION, {**OPTIONS, "methods": []}, "explained by one method"),
    "too long": (QUESTION, {**OPTIONS, "length": 65}, "1 to 64 tokens here, not 65"),
    "no length": (QUESTION, {**OPTIONS, "length": "9"}, "1 to 64 tokens"),
    "a classifier": (SENTENCE, {**OPTIONS, "picture": None, "model": "bundled:sst2"}, "cannot generate text"),
    "a blind classifier": (QUESTION, {**OPTIONS, "model": "bundled:sst2"}, "reads no pictures"),
    "pictures alone": (QUESTION, {**OPTIONS, "model": "bundled:digits"}, "writes nothing"),
    "a message": (QUESTION, {**OPTIONS, "chat": True}, "untick the message"),
    "a method of pictures": (QUESTION, {**OPTIONS, "methods": ["grad_cam"]}, "grad_cam"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_invalid_input_shows_message(visitor, case):
    prompt, options, message = case
    shown = visitor.explain(prompt, **options)
    assert message in shown["status"]
    assert "wf-error" in shown["status"]
    assert "Something went wrong" not in shown["status"]
    assert visitor.session.results == []


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_invalid_input_is_not_reported_as_ready(visitor, case):
    """The status of a new input may arrive after the error of Explain and would replace it."""
    prompt, options, message = case
    *_, shown = visitor.handlers.look(visitor.session, visitor.entered(prompt, **options))
    assert "Ready" not in shown["status"]
    assert message in shown["status"] or not prompt.strip()


def test_language_model_leaves_out_example_picture(storyteller):
    picture = {"path": str(examples.copied(examples.PICTURES[0], storyteller.handlers.uploads))}
    entered = storyteller.entered("Once upon a time", kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=2) | {"picture": picture}
    *_, ready = storyteller.handlers.look(storyteller.session, entered)
    assert ready["picture"]["value"] is None and ready["picture"]["visible"] is False
    *_, shown = storyteller.handlers.explain(storyteller.session, entered)
    assert "in all" in shown["status"]
    assert storyteller.session.view.picture is None


def test_answer_is_shown_during_generation(storyteller, monkeypatch):
    monkeypatch.setattr("whyformer.apps.web.visitor_session.PAUSE", -1.0)
    reports = []
    entered = storyteller.entered("Once upon a time <b>", kind="answer", model="folder:stories260k", methods=["input_x_gradient"], length=4)
    steps = list(storyteller.handlers.explain(storyteller.session, entered, progress=lambda share, desc: reports.append((share, desc))))
    assert [share for share, desc in reports if desc == "writing"] == [(i, 4) for i in range(4)]
    *boards, last = [board for step in steps if isinstance(board := step.get("board"), str)]
    assert "wf-generated" in last
    assert all("<p dir=\"auto\">Once upon a time &lt;b&gt;</p>" in board for board in boards)
    texts = [re.findall(r"<p[^>]*>(.*?)</p>", board, re.DOTALL)[1] for board in boards]
    assert len(texts) == 4
    assert all(after.startswith(before) and after != before for before, after in pairwise(texts))
    assert html.unescape(texts[-1]).split() == generation_of(storyteller).text.split()


def test_abandoned_answer_ends_generation():
    ended = []

    def make(track):
        try:
            for _ in track((str(i) for i in count()), "writing"):
                pass
        finally:
            ended.append(True)

    session = VisitorSession()
    shown = answers.stream_text(make, session.track(), lambda text: {"board": text})
    assert [next(shown)["board"], next(shown)["board"]] == ["0", "1"]
    shown.close()
    assert ended == [True]


def test_cancel_ends_generation(storyteller):
    entered = storyteller.entered("Once upon a time", kind="answer", model="folder:stories260k", length=64)

    def cancel(share, desc):
        if desc.startswith("writing"):
            storyteller.handlers.stop(storyteller.session)

    last = list(storyteller.handlers.explain(storyteller.session, entered, progress=cancel))[-1]["status"]
    assert CANCELLED in last
    assert storyteller.session.results == []


def test_generation_time_is_limited(visitor, handlers):
    from dataclasses import replace

    hasty = Visitor(replace(handlers, limits=replace(handlers.limits, seconds=0.0)))
    assert "writing took more than 0 s" in hasty.explain(QUESTION, **OPTIONS)["status"]


def test_reload_shows_same_answer(visitor):
    before = visitor.explain(QUESTION, **VIEWS["settings"][1])
    reloaded = Visitor(visitor.handlers)
    shown = restored(reloaded, "#" + before["address"])
    assert reloaded.session.view.methods == visitor.session.view.methods
    assert (reloaded.session.view.page_input.length, reloaded.session.view.page_input.chat) == (2, False)
    np.testing.assert_array_equal(generation_of(reloaded).matrix.numpy(), generation_of(visitor).matrix.numpy())
    assert shown["address"] == before["address"]
    assert shown["sentence"]["value"] == QUESTION
    assert shown["length"]["value"] == 2


def test_controls_of_answer():
    assert {name for name, update in fields_of("answer").items() if update["visible"]} == {"picture", "sentence", "length", "chat"}
    assert [fields_of(kind)["sentence"]["label"] for kind in ("text", "answer")] == ["Sentence", "Prompt"]
    assert {name for name, update in fields_of("image").items() if update["visible"]} == {*FIELDS["image"]}
    assert [name for name, _ in offered("answer")][:4] == list(RECOMMENDED)
    assert "attnlrp" in dict(offered("answer"))


def test_model_and_methods_depend_on_kind(handlers):
    for kind, model in (("image", "bundled:digits"), ("text", "bundled:sst2"), ("answer", "bundled:reader")):
        shown = handlers.switch(VisitorSession(), kind)
        assert shown["model"] == model
        assert shown["methods"]["choices"] == offered(kind)
        assert "value" not in shown["methods"]  # the selection is kept


def test_examples_have_prompt_and_picture(visitor):
    for number, prompt in enumerate(examples.PROMPTS):
        entered = examples.entered("answer", number, visitor.handlers.uploads)
        assert entered["sentence"] == prompt
        assert entered["picture"].endswith(".png")
        assert prompt in examples.offered("answer")


def test_style_and_word_events_of_classifiers_change_no_answer(visitor):
    visitor.explain(QUESTION, **OPTIONS)
    for updates in (visitor.handlers.redraw(visitor.session, "kept", 0.5, 0.2), visitor.handlers.word(visitor.session, 0, "mean")):
        assert list(updates) == []


@pytest.mark.parametrize("kind", ["image", "text", "answer"])
def test_second_text_belongs_to_sentences_only(visitor, kind):
    with_pair, without = (
        PageInput.read(visitor.entered("digits_37.png" if kind == "image" else QUESTION, kind=kind, pair=pair)) for pair in ("It drags. ", " ")
    )
    assert (with_pair.subject == without.subject) == (kind != "text")
    assert fields_of(kind)["pair"]["visible"] == (kind == "text")
    assert with_pair.pair == ("It drags. " if kind == "text" else "")
    assert without.pair == ""


def test_example_replaces_second_text(visitor):
    entered = visitor.entered(examples.SENTENCES[0], pair="mine")
    assert not examples.untouched(PageInput.read(entered), visitor.handlers.uploads)
    entered |= examples.entered("text", 1, visitor.handlers.uploads)
    assert examples.untouched(PageInput.read(entered), visitor.handlers.uploads)
