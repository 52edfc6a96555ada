"""Colours show a sign only for signed scores; truncated and unknown text is not drawn as a score of 0."""

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console

import whyformer
from show.builders import picture, sentence
from whyformer import show
from whyformer.explanation.result import Explanation
from whyformer.explanation.warnings import of_map
from whyformer.methods import METHODS
from whyformer.show import colours, html, terminal, words
from whyformer.show.layout import sections

LONG = "A charming film, though it drags. " * 200


@pytest.fixture(scope="module")
def truncated():
    return whyformer.explain("bundled:sst2", LONG, truncate=True)


def texts_of(figure):
    return [t.get_text() for t in figure.texts]


def print_to_terminal(es, system="truecolor"):
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=system, force_terminal=system is not None, highlight=False).print(terminal.render(es))
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())


# -- signs ---------------------------------------------------------------------------------------------------------
def test_unsigned_map_is_green():
    e = sentence("good bad", [0, 2.0, 1.0, 0])
    assert [word.hue for word in words.words(e)[0]] == ["mattered", "mattered"]
    red, green, blue = colours.background(1.0, signed=False)
    assert green > red
    assert green > blue
    painted = colours.lookup(colours.SEQUENTIAL)
    assert (painted[20:, 1] >= painted[20:].max(1) - 1e-9).all()  # a single hue, with green as the largest channel


def test_signed_method_without_negative_scores_has_two_colours():
    e = sentence("good bad", [0, 2.0, 1.0, 0], diagnostics={"signed": True})
    assert colours.scale_of(e).signed
    assert words.legend_labels(e) == ("against", "for positive")
    assert [word.hue for word in words.words(e)[0]] == ["for", "for"]


def test_negative_scores_are_signed_even_if_method_is_unsigned():
    assert words.legend_labels(sentence("good bad", [0, 2.0, -1.0, 0], diagnostics={"signed": False})) == ("against", "for positive")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_sign_in_registry_holds_for_scores(name):
    """Unsigned methods have no negative scores, and explanations record whether they are signed."""
    method = METHODS[name]
    if method.modality == "image":
        pytest.skip("pictures only")
    e = whyformer.explain("bundled:sst2", "An utterly charming film, though it drags.", name)
    assert name == "auto" or e.diagnostics["signed"] is method.signs(e.settings)
    assert e.diagnostics["signed"] or float(e.scores.min()) >= 0
    if e.diagnostics["signed"]:
        assert float(e.scores.min()) < 0 < float(e.scores.max())


def test_sign_depends_on_settings():
    assert METHODS["saliency"].signs({"norm": "sum"})
    assert not METHODS["saliency"].signs({"norm": "l2"})


@pytest.mark.parametrize(("scores", "legend"), [([0, 2.0, -1.0, 0], "for positive"), ([0, 2.0, 1.0, 0], "mattered (no sign)")])
def test_every_view_has_legend_of_colours(scores, legend):
    e = sentence("good bad", scores)
    assert legend in html.fragment(e)
    assert legend in html.page(e)
    assert legend in print_to_terminal(e)
    assert legend in terminal.plain(e)
    footer = " ".join(texts_of(show.figure(e)))
    assert ("for the class" if legend == "for positive" else legend) in footer


def test_colour_bars_of_pictures_are_labelled():
    drawing = show.figure([picture(torch.randn(4, 6)), picture(method="b")])
    bars = [[t.get_text() for t in axes.get_yticklabels()] for axes in drawing.axes if axes.axison]
    assert bars == [["against", "0", "for"], ["0", "mattered"]]
    assert any(text.startswith("Why “dog”?") for text in texts_of(drawing))


# -- no class ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [sentence, picture])
def test_class_agnostic_map_is_drawn_once_and_marked_in_every_output(make):
    facts = {"diagnostics": {"class_specific": False}, "method": "rollout"}
    both = [make(target=t, **facts) for t in (0, 1)] + [make(target=t) for t in (0, 1)]
    (part,) = sections(both)
    assert sum(e is not None and words.agnostic(e) for row in part.cells for e in row) == 1
    assert len([t for t in texts_of(show.figure(both)) if t.startswith("any class")]) == 1
    assert print_to_terminal(both).count("any class") == 1
    assert "any class" in html.page(both)


def test_different_class_agnostic_maps_are_all_shown():
    facts = {"diagnostics": {"class_specific": False}, "method": "rollout"}
    (part,) = sections([picture(torch.rand(4, 6), target=t, **facts) for t in (0, 1)])
    assert len([e for row in part.cells for e in row if e is not None]) == 2


# -- truncation ----------------------------------------------------------------------------------------------------
def test_truncated_words_are_reported_in_every_view(truncated):
    message = "1,105 words the model did not read"
    assert "did not read 1,105 of 1,200 words" in truncated.warnings[0]
    begin, end = truncated.extent[0]
    assert (begin, len(LONG[:end].split())) == (0, 95)
    for view in (html.fragment(truncated), html.page(truncated), print_to_terminal(truncated), terminal.plain(truncated)):
        assert message in " ".join(view.split())
    assert any(message in text for text in texts_of(show.figure(truncated)))
    assert "did not read 1,105 of 1,200 words" in " ".join(texts_of(show.figure(truncated)))


def test_truncated_words_have_no_colours(truncated):
    pieces, rest = words.words(truncated)
    (part,) = words.truncated_parts(truncated)
    assert "".join(p.gap + p.text for p in pieces) + rest + part.text == truncated.texts[0]
    assert not part.before
    page = html.page(truncated)
    assert page.index("<details") < page.index(part.text.strip()[:60])


def test_text_truncated_at_beginning_is_reported():
    e = sentence("one two three", [0, 0, 1, 0], tokens=[["[CLS]", "two", "three", "[SEP]"]], offsets=[[(0, 0), (4, 7), (8, 13), (0, 0)]], extent=[(4, 13)])
    assert [w.text for w in words.words(e)[0]] == ["two", "three"]
    (part,) = words.truncated_parts(e)
    assert (part.text, part.label, part.before) == ("one ", "1 word the model did not read", True)


def test_untruncated_text_has_no_warning():
    assert whyformer.explain("bundled:sst2", ["A film.", "A charming film."], truncate=True).warnings == []


def test_only_truncated_text_of_batch_has_warning():
    e = whyformer.explain("bundled:sst2", ["A film.", LONG], truncate=True)
    assert e.warnings == ["sample 1: the model did not read 1,105 of 1,200 words: they were truncated and have no score"]
    assert words.truncated_parts(e[0]) == []


def test_truncation_is_saved_and_loaded(truncated, tmp_path):
    for restored in (Explanation.load(truncated.save(tmp_path / "e.safetensors")), Explanation.from_dict(truncated.to_dict())):
        assert restored.extent == truncated.extent
        assert restored.warnings == truncated.warnings


# -- unknown words -------------------------------------------------------------------------------------------------
def test_unknown_words_are_marked_and_warned_of():
    e = whyformer.explain("bundled:sst2", "漢 ख film", "raw_attention")
    assert e.unknown == [[1, 2]]
    assert e.warnings == ["2 of 3 tokens are unknown to the model ([UNK]): it cannot tell them apart"]
    assert [word.unknown for word in words.words(e)[0]] == [True, True, False]
    assert "unknown to the model" in html.fragment(e)
    assert html.page(e).count("unknown\"") >= 2
    assert "underlined: unknown to the model ([UNK])" in print_to_terminal(e)
    assert "[UNK]: unknown to the model" in terminal.plain(e)
    assert any("unknown to the model" in text for text in texts_of(show.figure(e)))


def test_few_unknown_words_have_no_warning():
    e = whyformer.explain("bundled:sst2", "a b c d e f g h i j k l m n 漢", "raw_attention")
    assert len(e.unknown[0]) == 1
    assert e.warnings == []


# -- measured properties --------------------------------------------------------------------------------------------
def test_violated_conservation_is_warned_of_in_every_view():
    diagnostics = {"conservation": {"start": [1.0], "error": [0.2], "promised": True}}
    (line,) = of_map(torch.tensor([2.0, -1.0]), diagnostics, 0)
    assert line.startswith("relevance is not conserved") and "20%" in line
    e = sentence("good bad", [0, 2.0, -1.0, 0], diagnostics={**diagnostics, "warnings": [[line]]})
    for view in (html.fragment(e), terminal.plain(e), print_to_terminal(e)):
        assert "relevance is not conserved" in view
    assert "relevance is not conserved" in " ".join(texts_of(show.figure(e)))


@pytest.mark.parametrize("figure", [{"error": [0.009], "promised": True}, {"error": [0.2], "promised": False}, {"error": [0.2]}])
def test_conservation_error_is_warned_of_only_if_promised_and_above_one_percent(figure):
    assert of_map(torch.tensor([2.0, -1.0]), {"conservation": {"start": [1.0], **figure}}, 0) == []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_that_promise_conservation_conserve_relevance(name):
    if METHODS[name].modality == "image":
        pytest.skip("pictures only")
    for settings in [{}, {"rule": "shared"}] if "rule" in METHODS[name].settings else [{}]:
        e = whyformer.explain("bundled:sst2", "An utterly charming film, though it drags.", name, **settings)
        figure = e.diagnostics.get("conservation", {})
        assert (figure.get("promised") is True) == (name == "transformer_attribution" or settings == {"rule": "shared"})
        assert not figure.get("promised") or max(figure["error"]) < 1e-4
        assert not any("conserved" in line or "add up" in line for line in e.warnings)


def test_conservation_error_without_promise_has_no_warning():
    e = whyformer.explain("bundled:sst2", "An utterly charming film, though it drags.", "libragrad")
    figure = e.diagnostics["conservation"]
    assert figure["error"] == pytest.approx([abs(figure["sum"][0] - figure["start"][0])])
    assert e.warnings == []


@pytest.mark.parametrize(("difference", "scores", "error", "warned"), [
    (1.0, [1.0, -0.1], 0.04, False), (1.0, [1.0, -0.1], 0.06, True),
    (0.0007, [4.0, -4.0], 0.04, False), (0.0007, [4.0, -4.0], 0.5, True), (0.0, [0.1, 0.2], 0.3, True),
])  # fmt: skip
def test_completeness_error_is_relative_to_scores(difference, scores, error, warned):
    """The error is not divided by the difference, which may be close to 0."""
    messages = of_map(torch.tensor(scores), {"completeness": {"difference": [difference], "error": [error]}}, 0)
    assert [line.startswith("the scores add up to") for line in messages] == [True] * warned


def test_map_of_two_cells_is_scaled_by_its_maximum():
    cells = np.array([[1.0, 2.0]])
    assert colours.scale(cells, signed=True).unit(cells).tolist() == [[0.5, 1.0]]
