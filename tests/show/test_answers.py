"""Drawings of answers: scales, reasons, text, page and matrix."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from rich.console import Console

from show.builders import ATTACK
from whyformer.explanation.features import Features
from whyformer.explanation.generation import Generation
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation
from whyformer.show import answers, grid, paper, terminal_answer
from whyformer.show.html import answer


def generation(pieces: list[str] | None = None, start: int = 3) -> Generation:
    """A prompt of three tokens and an answer of two; in each step, the token at which it is read has by far the highest score."""
    pieces = pieces or ["One", " two", " three", " four", "\n"]
    matrix = torch.tensor([[2.0, -1.0, 90.0, 0, 0], [0.0, 3.0, 1.5, -60.0, 0]])
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.1, 0.5, 0.1], [0.05, 0.05, 0.1, 0.2, 0.6]]))
    return Generation(
        matrix=matrix, tokens=pieces, pieces=pieces, ids=[0, 1, 2, 3, 4], start=start, method="attnlrp", settings={},
        explained="log-probability", value=torch.tensor([-0.69, -0.51]), target=torch.tensor([3, 4]),
        target_names=["' four'", "'\\n'"], logits=logits, labels={i: repr(p) for i, p in enumerate(pieces)},
        diagnostics=[{"warnings": [["its sum moves by 10%"]]}, {"warnings": [["its sum moves by 12%"]]}],
    )  # fmt: skip


def unit_scores(g: Generation) -> np.ndarray:
    talk = answers.conversation(g)
    return np.stack([talk.unit(t) for t in range(len(talk.g))])


def test_token_read_by_step_does_not_set_scale() -> None:
    talk = answers.conversation(generation())
    scale = talk.scales[0]
    assert (scale.limit, scale.clipped, scale.signed) == (2.0, True, True)
    np.testing.assert_allclose(talk.unit(0), [1, -0.5, 1, 0, 0])
    np.testing.assert_allclose(talk.unit(1), [0, 1, 0.5, -1, 0])
    np.testing.assert_allclose(talk.column_units[:, 1], [-1 / 3, 1])
    np.testing.assert_allclose(talk.sums, [2, 2, 91.5, 0, 0])  # tokens of the answer are not summed, only those of the prompt
    np.testing.assert_allclose(talk.unit(None), [1, 1, 1, 0, 0])


@pytest.mark.parametrize("noise", [1e-7, 0.01])
def test_step_with_small_scores_is_pale(noise: float) -> None:
    g = generation()
    before, after = unit_scores(g), unit_scores(replace(g, matrix=g.matrix * torch.tensor([[1.0], [noise]])))
    np.testing.assert_allclose(after[0], before[0])  # other steps are unchanged
    assert np.abs(after[1, :2]).max() == pytest.approx(10 * noise * 3 / 2)  # relative to the larger of the two limits, 2 and 3
    assert not unit_scores(replace(g, matrix=g.matrix * 0)).any()


def test_reasons_are_strongest_words_with_token_read_last() -> None:
    talk = answers.conversation(generation())
    assert [r.text for r in talk.reasons(0)] == ["One", "two", "three"]
    assert [r.text for r in talk.reasons(0, 2)] == ["One", "two"]
    assert [r.text for r in talk.reasons(1)] == ["two", "three", "four"]
    assert [(r.text, r.score) for r in talk.reasons(None)] == [("three", 91.5), ("One", 2), ("two", 2)]


def test_alternatives_exclude_generated_token() -> None:
    assert answers.alternatives(generation(), 0)[0] == ("' two'", pytest.approx(0.2))
    assert "' four'" not in [name for name, _ in answers.alternatives(generation(), 0)]


def test_warnings_that_differ_only_in_numbers_are_merged() -> None:
    assert answers.remarks(generation()) == ["warning: its sum moves by 10% (2 of 2 steps)"]


def test_plain_text_and_colourless_terminal() -> None:
    text = str(generation())
    assert "Prompt  One two three" in text
    assert re.search(r"whole answer +three 91\.5, One 2, two 2", text)
    assert re.search(r"' four' +50\.0 % .* One 2, two -1, three 90", text)
    assert "'⏎'" in text
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal_answer.render(generation()))
    assert "because of" in captured.get()
    assert "\x1b" not in captured.get()


def test_page_is_escaped_and_highlights_selection_without_script() -> None:
    g = generation([ATTACK, " two", " three", "<b>four", "</style><script>"])
    page = answer.page(g, ATTACK)
    assert "<script" not in page
    assert "<b>four" not in page
    assert ATTACK not in page
    mark = re.search(r'id="(g[0-9a-f]{8})"', page)
    assert mark is not None
    name = mark.group(1)
    rules = re.findall(r"(?m)^([^\n{}]+)\{background:(rgb\(var\(--(?:for|against)\)[^}]*)\}", page)
    highlighted = {selector for selectors, _ in rules for selector in selectors.split(",")}
    assert f"#{name}-3:checked~.t .k0" in highlighted  # selecting step 0 highlights token 0
    assert f"#{name}-4:checked~.t .k0" not in highlighted  # step 1 does not use token 0
    assert f"#{name}-1:checked~.t .k4" in highlighted  # selecting token 1 highlights the step that used it
    assert f"#{name}-0:checked~.t .k4" not in highlighted
    card = answer.fragment(g)
    assert card.count('type="radio"') == 5 + 1  # five tokens and the whole answer
    assert re.search(r"\{background:#[0-9a-f]{6}\}", card)  # fixed colours, because the notebook's theme is unknown
    assert "var(--for)" not in card
    assert re.findall(r'id="(g\w+)"', card) != re.findall(r'id="(g\w+)"', answer.fragment(g))  # ids differ when it is shown twice in one notebook


def test_only_strongest_words_of_long_text_are_coloured() -> None:
    count = 400
    g = replace(
        generation(), matrix=torch.linspace(0.1, 1, count)[None] * torch.cat([torch.ones(1, count - 1), torch.zeros(1, 1)], 1), start=count - 1,
        pieces=[f" w{i}" for i in range(count)], tokens=[f"w{i}" for i in range(count)], ids=list(range(count)), logits=torch.zeros(1, count),
    )  # fmt: skip
    card = answer.fragment(g)
    highlighted = re.findall(rf"-{count - 1}:checked~.t .k(\d+)(?=[,{{][^}}]*background)", card)
    assert sorted(map(int, highlighted)) == list(range(count - 150 - 1, count - 1))
    assert "the strongest words alone" in card
    assert "the strongest words alone" not in answer.fragment(generation())


@pytest.mark.parametrize(("words", "unit"), [(150, "token"), (300, "sentence")])
def test_matrix_names_unit_of_rows(words: int, unit: str) -> None:
    pieces = ([" The", " sun", " is", " shining", " today."] * words)[: words + 1]
    matrix = torch.zeros(1, words + 1)
    matrix[0, 0] = 1.0
    g = replace(
        generation(), pieces=pieces, tokens=pieces, ids=[0] * (words + 1), start=words, matrix=matrix, logits=torch.zeros(1, 5), value=torch.zeros(1),
        target=torch.zeros(1), target_names=["x"], diagnostics=[],
    )  # fmt: skip
    assert re.findall(r"Every (\w+) of the answer", answer.page(g)) == [unit]


def generation_with_picture(matrix: list[list[float]], diagnostics: list[dict[str, object]] | None = None) -> Generation:
    """An answer of two tokens to a picture of four tokens and the word "what"; the first step has its scores in the last pixel."""
    pieces = ["<s>", *[" <image>"] * 4, " what", " one", " two"]
    logits = torch.eye(8)[[6, 7]]
    features = Features(image_size=(2, 2), pictures=torch.zeros(1, 2, 2, 3, dtype=torch.uint8), originals=[Image.new("RGB", (20, 20))], geometry=[Geometry((20, 20), (0.0, 0.0, 20.0, 20.0))])
    first = Explanation(torch.tensor([[[0.0, 0.0], [0.0, 3.0]]]), "pixel", "gae", {}, torch.tensor([6]), logits[:1], ["'one'"], features)
    return Generation(
        matrix=torch.tensor(matrix), tokens=[p.strip() for p in pieces], pieces=pieces, ids=[0, 1, 1, 1, 1, 2, 6, 7], start=6,
        method="gae", settings={}, explained="log-probability", value=torch.zeros(2), target=torch.tensor([6, 7]),
        target_names=["'one'", "'two'"], logits=logits, labels={i: repr(p) for i, p in enumerate(pieces)},
        picture_maps={"pixel_values": PictureScores(first, torch.tensor([[[0.0, 0.0], [0.0, 3.0]], [[2.0, 0.0], [0.0, 0.0]]]))},
        diagnostics=diagnostics or [{}, {}],
    )  # fmt: skip


PICTURE_MATRIX = [[0.5, 0, 0, 0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0, 1.0, 1.0, 0]]


def test_placeholder_tokens_of_picture_are_merged() -> None:
    g = answers.conversation(generation_with_picture(PICTURE_MATRIX)).g
    assert g.pieces == ["<s>", " [picture]", " what", " one", " two"]
    assert (g.start, g.prompt, g.text, g.probability(1)) == (3, "<s> [picture] what", " one two", generation_with_picture(PICTURE_MATRIX).probability(1))
    assert g.matrix.tolist() == [[0.5, 0, 0.5, 0, 0], [0, 0, 1.0, 1.0, 0]]
    scored = [[0.5, 0, 0.1, 0, 0, 0.4, 0, 0], PICTURE_MATRIX[1]]
    assert answers.conversation(generation_with_picture(scored)).g.pieces == ["<s>", " <image>", " <image>", " [picture]", " what", " one", " two"]  # placeholders with scores are not merged
    assert answers.conversation(generation()).g.pieces == generation().pieces


def test_share_and_map_of_picture_are_shown_for_each_step() -> None:
    g = generation_with_picture(PICTURE_MATRIX)
    talk = answers.conversation(g)
    assert [talk.picture_share(t) for t in (0, 1, None)] == [3 / 4, 2 / 4, 5 / 7]
    text = str(g)
    assert re.search(r"' one' .*picture 75 % \(most at x 1\d, y 1\d\)  <s> 0.5, what 0.5", text)
    assert re.search(r"' two' .*picture 50 % \(most at x \d, y \d\)", text)
    page = answer.page(g)
    maps = re.findall(r'<figure class="m m(\w+)"><img alt="where on the picture: ([^"]+)"', page)
    assert maps == [("all", "the whole answer"), ("3", " one"), ("4", " two")]
    assert re.search(r"#g\w+-3:checked~.seen .m3\{visibility:visible\}", page)
    assert re.search(r"#g\w+:has\(.k4:hover\) .seen .m4\{visibility:visible\}", page)


def test_colours_have_sign_only_if_method_is_signed() -> None:
    assert not answers.conversation(generation_with_picture(PICTURE_MATRIX)).signed
    assert "green: mattered (no sign)" in answer.page(generation_with_picture(PICTURE_MATRIX))
    assert "var(--for)" not in answer.page(generation_with_picture(PICTURE_MATRIX)).partition("</head>")[2]
    signed = generation_with_picture(PICTURE_MATRIX, [{"signed": True}, {"signed": True}])
    assert answers.conversation(signed).signed
    assert "orange: for it, blue: against it" in answer.page(signed)


def test_page_shows_legend_of_matrix_as_text() -> None:
    g = generation()
    claim = grid.legend(answers.conversation(g))
    assert answer.page(g).count(claim) == len(re.findall("<img", answer.page(g))) >= 1
    whole, bare = (" ".join(t.get_text() for t in grid.figure(g, bare=value).texts) for value in (False, True))
    for text in (answers.question(answers.conversation(g)), answers.source(g), claim, *answers.remarks(g)):
        assert text in whole
        assert text not in bare


@pytest.mark.parametrize("count", [5, 60])
def test_matrix_is_as_wide_as_its_columns_and_contains_all_text(count: int) -> None:
    pieces = [" word"] * (count - 2) + [" four", "\n"]
    matrix = torch.zeros(2, count)
    matrix[:, 0] = 1.0
    g = replace(generation(), pieces=pieces, tokens=pieces, ids=[*range(count)], start=count - 2, matrix=matrix)
    drawing, bare = grid.figure(g), grid.figure(g, bare=True)
    assert drawing.get_figwidth() == pytest.approx(max(4.0, bare.get_figwidth() + 0.1))
    canvas = FigureCanvasAgg(drawing)
    ends = [text.get_window_extent(canvas.get_renderer()) for text in drawing.texts]
    assert min(end.x0 for end in ends) >= 0
    assert max(end.x1 for end in ends) <= drawing.bbox.width
    assert min(end.y0 for end in ends) >= 0


@pytest.mark.parametrize("size", [2, 64])
def test_words_are_pale_beside_dominant_picture(size: int) -> None:
    """The picture has a score of 30 in one patch, of one or many pixels."""
    g = generation_with_picture(PICTURE_MATRIX)
    scores, edge = torch.zeros(2, size, size), -(-size // 16)
    scores[:, :edge, :edge] = 30 / edge**2
    talk = answers.conversation(replace(g, picture_maps={n: replace(part, scores=scores) for n, part in g.picture_maps.items()}))
    np.testing.assert_allclose(talk.unit(0), talk.matrix[0] / 30, rtol=1e-6)
    np.testing.assert_allclose(talk.unit(None), talk.sums / 60, rtol=1e-6)


def test_source_names_method_chosen_automatically() -> None:
    chosen: list[dict[str, object]] = [{"auto": {"method": "attnlrp"}}] * 2
    g = replace(generation([" One", " two", " three", " four", "\n"]), method="auto", diagnostics=chosen)
    assert "attnlrp" in answers.source(g)
    assert answers.source(g.by("word")) == answers.source(g).replace("token", "word")


def test_matrix_figure_has_pixels_and_labels() -> None:
    g = generation()
    drawing = grid.figure(g)
    (axes,) = drawing.axes
    pixels = axes.images[0].get_array()
    assert pixels.shape[:2] == (2, 4)
    np.testing.assert_allclose(pixels[0, 3], 0.94)  # later tokens are grey
    np.testing.assert_allclose(pixels[0, 0], pixels[0, 2])
    assert paper.encode(drawing).startswith(b"\x89PNG")
    words = [t.get_text() for t in drawing.texts]
    assert {"One", "two", "three", "four", "⏎"} <= set(words) or "□" in "".join(words)


def chat_generation(special: list[int] | None = None, diagnostics: list[dict[str, object]] | None = None) -> Generation:
    """A conversation with template tokens: a system message of seven words, a question and an answer."""
    pieces = ["<s>", "system\n", *"You are here to be of help".replace(" ", "| ").split("|"), "<e>", "<s>", "user\n", "Which", " fruit?", "<e>", "<s>", "assistant\n", "An", " apple", ".", "<e>"]
    count, start = len(pieces), 17
    matrix = torch.zeros(4, count)
    matrix[:, 0], matrix[:, 2:9], matrix[:, 12], matrix[:, 13] = 2.0, 0.5, 1.0, 3.0
    matrix[1, 17], matrix[2, 18], matrix[3, 19] = 0.25, -4.0, 5.0
    marks = [i for i, piece in enumerate(pieces) if piece in ("<s>", "<e>") or piece.endswith("\n")]
    return Generation(
        matrix=matrix, tokens=pieces, pieces=pieces, ids=list(range(count)), start=start, method="attnlrp", settings={},
        explained="log-probability", value=torch.zeros(4), target=torch.arange(start, count), target_names=pieces[start:],
        logits=torch.zeros(4, count), turns=[("system", 0, 10), ("user", 10, 15), ("assistant", start, count)],
        special=marks if special is None else special, diagnostics=diagnostics or [],
    )  # fmt: skip


def test_messages_have_roles_without_template_tokens() -> None:
    talk = answers.conversation(chat_generation())
    assert [(m.label, m.text, m.collapsed) for m in talk.messages] == [
        ("System", "You are here to be of help", True), ("User", "Which fruit?", False), ("Assistant", "An apple.", False),
    ]  # fmt: skip
    assert "".join(talk.g.pieces) == "You are here to be of helpWhich fruit?An apple."
    assert talk.g.text == "An apple."  # the end token has no row
    assert talk.special_note(0) == "template tokens 21 %"  # 2 of 9.5
    assert talk.special_note(None) == "template tokens 21 %"
    assert talk.share(talk.messages[0], 0) == pytest.approx(3.5 / 9.5)
    assert talk.scales[0].limit == 3.0  # this step is read at a template token, so no token is excluded from the limit
    assert talk.scales[1].limit == 3.0
    assert talk.scales[2].clipped  # read at " apple", whose score exceeds those of all preceding tokens
    for view in (str(chat_generation()), answer.page(chat_generation()), answer.fragment(chat_generation())):
        assert "&lt;s&gt;" not in view
        assert "<e>" not in view
        assert "template tokens 21 %" in view
    assert answers.conversation(chat_generation(diagnostics=[{"identity": True}] * 4)).special_note(0) == "template tokens left out"


def test_unknown_special_tokens_are_shown() -> None:
    old = replace(chat_generation(), special=None)
    talk = answers.conversation(old)
    assert talk.g is old
    assert [m.label for m in talk.messages] == ["System", "User", "", "Assistant"]
    assert talk.special_note(None) == ""


def test_answer_of_special_tokens_only_is_shown() -> None:
    g = chat_generation()
    only_special = replace(g, special=[*(g.special or ()), 17, 18, 19])
    assert answers.conversation(only_special).g.text == "An apple.<e>"


@pytest.mark.parametrize("unit", ["word", "sentence", "turn"])
def test_merged_answers_omit_template_tokens(unit: str) -> None:
    merged = answers.conversation(chat_generation().by(unit))
    assert [m.label for m in merged.messages] == ["System", "User", "Assistant"]
    assert "".join(merged.g.pieces) == "You are here to be of helpWhich fruit?An apple."
    assert merged.g.text == "An apple."


def test_long_system_message_is_one_column() -> None:
    talk = answers.conversation(chat_generation()).compact()
    assert talk.g.pieces == ["System", "Which", " fruit?", "An", " apple", "."]
    assert talk.matrix[:, 0].tolist() == [3.5, 3.5, 3.5]
    short = replace(chat_generation(), pieces=["<s>", "system\n", "You", *[""] * 6, *chat_generation().pieces[9:]], special=[*(chat_generation().special or ()), *range(3, 9)])
    assert answers.conversation(short).compact().g.pieces[0] == "You"
    texts = [t.get_text() for t in grid.figure(chat_generation()).texts]
    assert {"System", "User"} <= set(texts)
    assert any("template tokens 21 %" in text for text in texts)


def test_system_message_is_collapsed_and_whole_answer_is_selected() -> None:
    page = answer.page(chat_generation())
    closed = re.search(r"<details>.*?</details>", page, re.S)
    assert closed is not None
    assert "System, 37 %" in closed[0]
    assert re.findall(r"<label[^>]*>([^<]*)</label>", closed[0]) == ["You", " are", " here", " to", " be", " of", " help"]
    assert re.findall(r'id="\w+-(\w+)" checked', page) == ["all"]
    buttons = re.findall(r'type="radio"[^>]*id="\w+-(\w+)"', page)
    assert buttons == ["0", "1", "2", "3", "4", "5", "6", "all", "7", "8", "9", "10", "11"]  # "all" precedes the buttons of the answer
    highlighted = re.search(r"#g\w+-all:checked~\.t \.k8[,{]", page)
    assert highlighted is not None  # " fruit?"
    assert re.search(r"#g\w+-all:checked~\.t \.s0[,{]", page)  # the collapsed system message has the colour of its sum
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal_answer.render(chat_generation()))
    assert re.search(r"System +You are here to be of help +37 %\n *User +Which fruit\?\n *Assistant +An apple\.", captured.get())


def test_picture_has_map_for_whole_answer() -> None:
    talk = answers.conversation(generation_with_picture(PICTURE_MATRIX))
    assert talk.picture("pixel_values", None).scores.tolist() == [[[2.0, 0.0], [0.0, 3.0]]]
    ended = answers.conversation(replace(generation_with_picture(PICTURE_MATRIX), special=[0, 7]))
    assert ended.picture("pixel_values", None).scores.tolist() == [[[0.0, 0.0], [0.0, 3.0]]]
    assert ended.g.pieces == [" [picture]", " what", " one"]
    assert ended.special_note(0) == "special tokens 12 %"  # .5 of 4


def test_encoder_and_decoder_texts_are_separate_messages() -> None:
    g = replace(generation(["Hello", " you", "<start>", "Hallo", " du"]), source=2)
    assert [(m.label, m.text) for m in answers.conversation(replace(g, special=[2])).messages] == [("Prompt", "Hello you"), ("Answer", "Hallo du")]
    assert [m.label for m in answers.conversation(g).messages] == ["Prompt", "", "Answer"]
    assert "Hallo" in answer.page(g)
    assert re.search(r"Answer +Hallo du", str(g))


@pytest.mark.parametrize("system", ["truecolor", None])
def test_answer_on_ascii_console_is_ascii(system: str | None) -> None:
    for g in (generation(), generation(["Ä", " двa", " 三", "…", "\n"]), chat_generation()):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
        Console(file=stream, width=100, color_system=system, force_terminal=system is not None).print(terminal_answer.render(g))
        stream.flush()
        assert b"attnlrp" in stream.buffer.getvalue()
