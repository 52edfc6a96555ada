"""Drawings of models with several inputs show each input with its share of all scores."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from rich.console import Console
from transformers import BertConfig, BertForMultipleChoice

import whyformer
from prompting import llava, square
from show import builders
from whyformer import show
from whyformer.apps.report import reading
from whyformer.apps.web import maps
from whyformer.apps.web.visitor_session import View
from whyformer.explanation.features import Features
from whyformer.inputs.argument import sentence
from whyformer.show import colours, layout, terminal, words
from whyformer.targets import Contrast

SOURCE = sentence("what they lie on")


def choices() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMultipleChoice(BertConfig(vocab_size=40, initializer_range=0.3, **sizes)).eval()
    return whyformer.explain(model, torch.arange(2, 26).reshape(1, 4, 6), "input_x_gradient", Contrast(2, 3))


def prompt() -> Any:
    model, processor = llava()
    inputs = {"text": "what is on the left", "images": [square((32, 32), (8, 8, 24, 24))]}
    return whyformer.explain(model, inputs, "transformer_attribution", processor=processor)


EXPLAINED = {"choices": choices, "a prompt": prompt}


@pytest.fixture(scope="module", params=EXPLAINED)
def explained(request: Any) -> Any:
    return EXPLAINED[request.param]()


def labels(e: Any) -> list[str]:
    total = sum(float(e.part(name).scores.abs().sum()) for name in e.inputs)
    return [f"{name} {100 * float(e.part(name).scores.abs().sum()) / total:.0f} %" for name in e.inputs]


def test_each_input_is_labelled_with_its_share(explained: Any) -> None:
    assert len(explained.inputs) == 2
    parts = layout.by_input(explained[0])
    assert [words.method_name(e).split(" · ")[1] for e in parts] == labels(explained)
    assert [words.is_further(e) for e in parts] == [False, True]


def test_plot_of_one_input_names_the_others(explained: Any) -> None:
    title = explained.plot(pyplot.figure().subplots()).get_title()
    assert all(label in title for label in labels(explained))
    for name in explained.inputs:
        title = explained.part(name).plot(pyplot.figure().subplots()).get_title()
        assert "not drawn" not in title
    pyplot.close("all")


def test_every_view_shows_all_inputs(explained: Any, tmp_path: Any) -> None:
    stream = io.StringIO()
    Console(file=stream, width=100, color_system=None).print(terminal.render(explained))
    views = {
        "print": str(explained), "terminal": stream.getvalue(), "notebook": explained._repr_html_(),
        "page": show.page([explained]), "the web page": maps.board(Session(), View("a/model", "a/model", SOURCE, (), ()), [explained]),
    }  # fmt: skip
    for label in labels(explained):
        for name, view in views.items():
            assert label in re.sub(r"<wbr>", "", view), (name, label)
    file = tmp_path / "explained.json"
    file.write_text(json.dumps(explained.to_dict()))
    saved = reading.read([file], tmp_path / "report.html", lambda files, *_: files).saved
    assert [words.method_name(item.e).split(" · ")[1] for item in saved] == labels(explained)


@pytest.mark.parametrize("factor", [0.01, 0.5, 4.0])
def test_inputs_have_common_scale(explained: Any, factor: float) -> None:
    first = replace(explained[0], scores=explained[0].scores * factor)
    parts = layout.by_input(first, smooth=0)
    sizes = [colours.strongest(first.part(name)) for name in first.inputs]
    drawn = [colours.strongest(e) / colours.scale_of(e).limit for e in parts if e.level == "token"]
    expected = [max(size / max(sizes), 0.1) for size, e in zip(sizes, parts, strict=True) if e.level == "token"]
    assert drawn == pytest.approx(expected)


def test_all_inputs_name_method_that_auto_chose(explained: Any) -> None:
    auto = replace(explained[0], method="auto", diagnostics={**explained[0].diagnostics, "auto": {"method": "gae"}})
    assert all(words.method_name(e).startswith("gae · chosen") for e in layout.by_input(auto))


@pytest.mark.parametrize(("score", "count", "shown"), [(0.0, 9, ["a", "<image> ×9", "b"]), (0.0, 3, ["a", *["<image>"] * 3, "b"]), (0.1, 4, ["a", *["<image>"] * 4, "b"])])
def test_tokens_in_place_of_picture_are_counted(score: float, count: int, shown: list[str]) -> None:
    scores = torch.tensor([[1.0, *[score] * count, 2.0]])
    e = replace(builders.sentence("a b"), scores=scores, features=Features(tokens=[["a", *["<image>"] * count, "b"]]))
    assert [word.text for word in words.words(e)[0]] == shown


class Session:
    """A stand-in for the page's session, without a cache."""

    def once(self, key: str, make: Any) -> Any:
        return make()


def test_classes_are_listed_once(explained: Any) -> None:
    assert str(explained).count(" classes:") == 1
    assert show.page([explained]).count("The model says") == 1


@pytest.mark.parametrize("method", ["transformer_attribution", "auto"])
def test_figure_shows_all_inputs_with_their_shares(explained: Any, method: str) -> None:
    chosen = {"auto": {"method": "attnlrp"}} if method == "auto" else {}
    figure = show.figure([replace(explained, method=method, diagnostics={**explained.diagnostics, **chosen})])
    try:
        written = "".join(text.get_text() for text in figure.texts).replace("\n", "").replace(" ", "")
        assert all(label.replace(" ", "") in written for label in labels(explained))
        pictures = [image for axes in figure.axes for image in axes.images if min(image.get_array().shape[:2]) > 16]
        assert len(pictures) == 2 * ("pixel_values" in explained.inputs)  # the picture and its map
    finally:
        pyplot.close(figure)
