"""Sessions of visitors: results, caching, messages and cancellation."""

import base64
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from apps.web.visitor import SENTENCE, Visitor
from whyformer.apps.web import visitor_session
from whyformer.apps.web.handlers import CANCELLED
from whyformer.apps.web.limits import Catalogue
from whyformer.evaluation import trust
from whyformer.inputs.pictures import open_picture
from whyformer.prepared import Prepared


class Forwards:
    """Counts forward passes of a model."""

    def __init__(self, model):
        self.count = 0
        self.handle = model.register_forward_pre_hook(self.add)

    def add(self, *_):
        self.count += 1

    def since(self):
        count, self.count = self.count, 0
        return count


@pytest.fixture
def forwards(catalogue):
    counters = [Forwards(catalogue.load(name).model) for name in ("bundled:digits", "bundled:sst2")]
    yield lambda: sum(c.since() for c in counters)
    for counter in counters:
        counter.handle.remove()


def test_unchanged_results_are_not_recomputed(visitor, forwards):
    view = {"methods": ["transformer_attribution", "rollout", "gae"], "classes": ["3", "7"]}
    visitor.explain("digits_37.png", **view)
    assert forwards() > 0
    visitor.explain("digits_37.png", **view)
    assert forwards() == 0  # an identical request
    for style in ("contours", "kept"):
        assert list(visitor.handlers.redraw(visitor.session, style, 0.3, 0.2))
    visitor.explain("digits_37.png", opacity=0.5, **view)
    assert forwards() == 0  # another opacity
    visitor.explain("digits_37.png", methods=view["methods"], classes=["7"])
    assert forwards() == 0  # one class fewer


def test_new_class_runs_only_class_specific_methods(visitor, forwards, monkeypatch):
    visitor.explain("digits_37.png", methods=["transformer_attribution", "rollout"], classes=["3"])
    monkeypatch.setattr(visitor_session, "judge", lambda *_: iter(()))
    forwards()
    visitor.explain("digits_37.png", methods=["transformer_attribution", "rollout"], classes=["3", "5"])
    assert forwards() == 1  # transformer_attribution for 5; rollout is the same for every class


def test_changed_setting_runs_only_its_method(visitor, forwards, monkeypatch):
    monkeypatch.setattr(visitor_session, "judge", lambda *_: iter(()))
    names = ["transformer_attribution", "gae"]
    visitor.explain(SENTENCE, methods=names, classes=["1"])
    forwards()
    visitor.explain(SENTENCE, methods=names, classes=["1"], settings={"gae": {"start_layer": 1}})
    assert forwards() == 1
    visitor.explain(SENTENCE, methods=names, classes=["1"], settings={"gae": {"start_layer": 0}})
    assert forwards() == 0  # back to the default


def test_words_share_one_forward_pass(visitor, forwards):
    visitor.explain(SENTENCE)
    forwards()
    for word in range(4):
        assert list(visitor.handlers.word(visitor.session, word, "mean"))
    assert forwards() == 1


def test_displayed_maps_equal_those_of_library(visitor, catalogue):
    shown = visitor.explain("digits_37.png", methods=["transformer_attribution", "rollout"], classes=["7"])
    loaded = catalogue.load("bundled:digits")
    picture = open_picture(visitor.handlers.uploads / "digits_37.png")
    names = ("transformer_attribution", "rollout")
    compared = whyformer.compare(loaded.model, picture, names, [7], loaded.processor).explanations
    for packed, e, name in zip(re.findall(r'data-values="([^"]+)"', shown["board"]), compared, names, strict=True):
        expected = whyformer.explain(loaded.model, picture, name, 7, loaded.processor)
        np.testing.assert_allclose(e.scores[0].numpy(), expected.scores[0].numpy(), rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), e.scores[0].numpy())


def test_faithfulness_equals_evaluate(visitor, catalogue):
    visitor.explain("digits_37.png", classes=["3"])
    session, loaded = visitor.session, catalogue.load("bundled:digits")
    _, judged = next(iter(visitor_session.judge(session, loaded, session.view, session.results, session.track())))
    expected = whyformer.evaluate(loaded.model, session.view.source.content, session.results[0], "deletion", loaded.processor, steps=trust.STEPS, baseline="zero")
    assert judged.areas[0] == expected.value
    assert judged.chance.shape == (len(trust.SEEDS), 1)
    assert judged.areas[0] < judged.chance.min()


def test_attention_shares_of_word_sum_to_one_hundred_percent(visitor):
    visitor.explain("Unbelievably charming, though it drags.", methods=["rollout"])
    for block in ("mean", "0", "2"):
        (update,) = visitor.handlers.word(visitor.session, 0, block)
        shown = update["attended"]
        shares = [float(s) for s in re.findall(r"<td>([\d.]+) %</td>", shown)]
        assert sum(shares) == pytest.approx(100, abs=0.4)
    assert "“<bdi>Unbelievably</bdi>”" in shown


def test_attention_share_of_word_equals_attention_map(visitor, catalogue):
    visitor.explain(SENTENCE, methods=["rollout"])
    maps = visitor_session.attention(visitor.session, catalogue.load("bundled:sst2"), visitor.session.view)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)
    tokens = visitor.session.results[0].tokens[0]
    query = tokens.index("charming")
    words = {t: float(maps[1, query, i]) for i, t in enumerate(tokens) if not t.startswith("[")}
    (update,) = visitor.handlers.word(visitor.session, 2, "1")
    listed = re.findall(r"<td><bdi>(\S+)</bdi></td><td>([\d.]+) %</td>", update["attended"])
    assert listed == [(t, f"{100 * words[t]:.1f}") for t in sorted(words, key=lambda t: -words[t])[:5]]


def test_warnings_of_run_are_shown(visitor):
    shown = visitor.explain("digits_37.png", methods=["rollout", "lrp", "auto"])["trust"]
    assert "rollout: the map is the same for every class" in shown
    assert "conserved" not in shown  # no method of the view is conservative


@pytest.mark.parametrize(("method", "conservative"), [("transformer_attribution", True), ("integrated_gradients", True), ("auto", False), ("lrp", False)])
def test_absence_of_warnings_is_stated_only_for_conservative_methods(visitor, method, conservative):
    shown = visitor.explain(SENTENCE, methods=[method])["trust"]
    assert ("No warnings" in shown) is conservative


def test_inapplicable_method_shows_reason_and_others_show_maps(visitor, monkeypatch):
    original = Prepared.explain

    def explain(prepared, method, *args, **settings):
        if method == "gae":
            raise whyformer.errors.MethodNotApplicable("gae has no meaning <here>")
        return original(prepared, method, *args, **settings)

    monkeypatch.setattr(Prepared, "explain", explain)
    shown = visitor.explain("digits_37.png", methods=["gae", "rollout"])
    assert "gae has no meaning &lt;here&gt;" in shown["board"]
    assert "data-values" in shown["board"]


INVALID = [
    (("",), {"kind": "image"}, "no picture yet"),
    (("   ",), {}, "no text yet"),
    ((SENTENCE,), {"methods": []}, "at least one method"),
    ((SENTENCE,), {"methods": ["nonsense"]}, "there is no method"),
    ((SENTENCE,), {"classes": ["17"]}, "out of range"),
    ((SENTENCE,), {"classes": ["<b>"]}, "no class"),
    ((SENTENCE,), {"model": "bundled:digits"}, "reads pictures"),
    ((SENTENCE,), {"model": "../etc"}, "no model id"),
    ((SENTENCE,), {"model": "nobody/nothing"}, "cannot load"),
    ((SENTENCE,), {"settings": {"transformer_attribution": {"start_layer": 99}}}, "outside the model"),
    (("word " * 5000,), {}, "characters"),
    (("word " * 1000,), {}, "tokens"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), INVALID)
def test_invalid_input_shows_message(visitor, args, kwargs, message):
    shown = visitor.explain(*args, **kwargs)
    text = shown["status"] + shown.get("board", "")
    assert 'role="alert"' in shown["status"]
    assert message in text
    assert "Traceback" not in text
    assert "<b>" not in shown["status"]


def test_internal_error_shows_message_without_details(visitor, monkeypatch, caplog):
    monkeypatch.setattr(visitor_session, "predict", lambda *_: {}["the secret"])
    shown = visitor.explain(SENTENCE)
    assert "Something went wrong inside whyformer (KeyError)" in shown["status"]
    assert "secret" not in shown["status"]
    assert "the page failed" in caplog.text


def test_too_many_maps_show_message(visitor):
    shown = visitor.explain("digits_37.png", methods=["gae", "rollout", "raw_attention"], classes=[str(i) for i in range(10)])
    assert "3 methods for 10 classes are 30 maps" in shown["status"]


def test_path_outside_uploads_is_refused(visitor):
    entered = visitor.entered("digits_37.png")
    for path in ("/etc/passwd", str(visitor.handlers.uploads / ".." / ".." / "x.png")):
        entered["picture"] = {"path": path}
        last = list(visitor.handlers.explain(visitor.session, entered))[-1]
        assert "was not uploaded" in last["status"]


def test_cancel_ends_computation(visitor):
    steps = visitor.handlers.explain(visitor.session, visitor.entered("digits_37.png", methods=["occlusion"], settings={"occlusion": {"batch_size": 1}}))
    next(steps)
    passes = itertools.count()

    def cancel(*_):
        if next(passes) == 5:
            visitor.handlers.stop(visitor.session)

    handle = visitor.handlers.catalogue.load("bundled:digits").model.register_forward_pre_hook(cancel)
    try:
        last = list(steps)[-1]["status"]
    finally:
        handle.remove()
    assert CANCELLED in last
    assert next(passes) < 20  # of about two hundred
    assert visitor.session.view is None
    assert "1 map in" in visitor.explain("digits_37.png")["status"]  # a new request runs


def test_visitors_share_only_models(handlers):
    first, second = Visitor(handlers), Visitor(handlers)
    first.explain(SENTENCE)
    assert second.handlers.download(second.session, "json") == {}
    second.explain("A dull and lifeless mess.")
    files = [json.loads(base64.b64decode(v.handlers.download(v.session, "json")["base64"])) for v in (first, second)]
    assert [f["explanations"][0]["texts"] for f in files] == [[SENTENCE], ["A dull and lifeless mess."]]
    assert not set(first.session.cache) & set(second.session.cache)


def test_injected_markup_is_escaped(visitor):
    evil = 'A <script>alert(1)</script> "film" <img src=x onerror=alert(2)> that\u202e drags.'
    shown = visitor.explain(evil, methods=["rollout"])
    word = next(visitor.handlers.word(visitor.session, 1, "mean"))["attended"]
    for part in (shown["board"], shown["code"], shown["trust"], word):
        assert "<script" not in part
        assert "<img src=x" not in part
    assert "\u202e" not in shown["board"] + word


def test_page_shows_five_likeliest_classes_and_offers_all(visitor):
    *_, shown = visitor.handlers.look(visitor.session, visitor.entered("digits_37.png"))
    says, classes, form = (shown[name] for name in ("says", "classes", "form"))
    assert says.count("<li>") == 5
    assert len(classes["choices"]) == 10
    assert [index for _, index in classes["choices"]][:2] == ["#3", "#7"]
    assert 'type="range" min="0" max="4"' in form


def test_regression_shows_output_value_without_probability(visitor, catalogue, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=8000, **sizes, num_labels=1, problem_type="regression"))
    model.save_pretrained(tmp_path / "regression")
    catalogue.load("bundled:sst2").processor.save_pretrained(tmp_path / "regression")
    e = whyformer.explain(str(tmp_path / "regression"), SENTENCE, "lrp_ah_ln")
    value, share = f"{float(e.logits[0, 0]):.4g}", f"{100 * float(e.logits.sigmoid()):.1f}"
    handlers = replace(visitor.handlers, catalogue=Catalogue([tmp_path / "regression"]))
    visitor, name = Visitor(handlers), handlers.catalogue.names()[-1]
    *_, update = handlers.look(visitor.session, visitor.entered(SENTENCE, model=name))
    says, classes = update["says"], update["classes"]
    shown = visitor.explain(SENTENCE, model=name, methods=["lrp_ah_ln"], classes=["#0"])
    assert "the output" in says and value in says
    assert classes["choices"] == [("the output", "#0")]
    assert "Measured for <bdi>the output</bdi>" in shown["board"]
    assert "the output" in shown["trust"] and "probability" not in shown["trust"]
    assert not any(share in text for text in (says, shown["board"], shown["trust"]))
