"""What is drawn of a generated text: scales, reasons, text views, the page and the matrix."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from show.made import ATTACK
from whyformer.explanation.features import Features
from whyformer.explanation.generation import Generation
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.pictured import Pictured
from whyformer.explanation.result import Explanation
from whyformer.show import answers, grid, paper, speaking
from whyformer.show.html import answer


def made(pieces: list[str] | None = None, start: int = 3) -> Generation:
    """A prompt of three tokens and an answer of two; each step is read at a token of by far the highest score."""
    pieces = pieces or ["One", " two", " three", " four", "\n"]
    matrix = torch.tensor([[2.0, -1.0, 90.0, 0, 0], [0.0, 3.0, 1.5, -60.0, 0]])
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.1, 0.5, 0.1], [0.05, 0.05, 0.1, 0.2, 0.6]]))
    return Generation(
        matrix=matrix, tokens=pieces, pieces=pieces, ids=[0, 1, 2, 3, 4], start=start, method="attnlrp", settings={},
        explained="log-probability", value=torch.tensor([-0.69, -0.51]), target=torch.tensor([3, 4]),
        target_names=["' four'", "'\\n'"], logits=logits, labels={i: repr(p) for i, p in enumerate(pieces)},
        diagnostics=[{"warnings": [["its sum moves by 10%"]]}, {"warnings": [["its sum moves by 12%"]]}],
    )  # fmt: skip


def test_the_token_that_is_read_does_not_drown_the_others() -> None:
    g = made()
    scale = answers.scale_of(g, 0)
    assert (scale.limit, scale.clipped, scale.signed) == (2.0, True, True)
    np.testing.assert_allclose(answers.unit(g)[0], [1, -0.5, 1, 0, 0])
    np.testing.assert_allclose(answers.unit(g)[1], [0, 1, 0.5, -1, 0])
    np.testing.assert_allclose(answers.served(g)[:, 1], [-1 / 3, 1])


@pytest.mark.parametrize("noise", [1e-7, 0.01])
def test_a_step_of_which_nothing_has_much_of_a_score_is_pale(noise: float) -> None:
    g = made()
    weak = replace(g, matrix=g.matrix * torch.tensor([[1.0], [noise]]))
    before, after = answers.unit(g), answers.unit(weak)
    np.testing.assert_allclose(after[0], before[0])  # the others stay as they are
    assert np.abs(after[1, :2]).max() == pytest.approx(10 * noise * 3 / 2)  # of the larger of both, 2 beside 3
    zero = replace(g, matrix=g.matrix * 0)
    assert not answers.unit(zero).any()


def test_reasons_are_the_strongest_words_and_the_one_that_is_read_comes_last() -> None:
    assert [r.text for r in answers.reasons(made(), 0)] == ["One", "two", "three"]
    assert [r.text for r in answers.reasons(made(), 0, 2)] == ["One", "two"]
    assert [r.text for r in answers.reasons(made(), 1)] == ["two", "three", "four"]


def test_candidates_are_those_that_were_not_written() -> None:
    assert answers.others(made(), 0)[0] == ("' two'", pytest.approx(0.2))
    assert "' four'" not in [name for name, _ in answers.others(made(), 0)]


def test_warnings_that_differ_by_numbers_stand_once() -> None:
    assert answers.remarks(made()) == ["warning: its sum moves by 10% (2 of 2 steps)"]


def test_plain_text_and_a_terminal_without_colours() -> None:
    text = str(made())
    assert "prompt  One two three" in text
    assert re.search(r"' four' +50\.0%  One 2, two -1, three 90", text)
    assert "'⏎'" in text
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(speaking.render(made()))
    assert "because of" in captured.get()
    assert "\x1b" not in captured.get()


def test_the_page_has_no_script_escapes_and_lights_up_what_was_chosen() -> None:
    g = made([ATTACK, " two", " three", "<b>four", "</style><script>"])
    page = answer.page(g, ATTACK)
    assert "<script" not in page
    assert "<b>four" not in page
    assert ATTACK not in page
    mark = re.search(r'id="(g[0-9a-f]{8})"', page)
    assert mark is not None
    name = mark.group(1)
    rules = re.findall(r"([^\n{}]+)\{background:(rgb\(var\(--(?:for|against)\)[^}]*)\}", page)
    lit = {place for where, _ in rules for place in where.split(",")}
    assert f"#{name}-3:checked~p .k0" in lit  # step 0 by its first token
    assert f"#{name}-4:checked~p .k0" not in lit  # which step 1 does not use
    assert f"#{name}-1:checked~p .k4" in lit  # what the second token served
    assert f"#{name}-0:checked~p .k4" not in lit
    card = answer.fragment(g)
    assert card.count('type="radio"') == 5
    assert re.search(r"\{background:#[0-9a-f]{6}\}", card)  # a notebook's own colours are not known
    assert "var(--for)" not in card
    assert re.findall(r'id="(g\w+)"', card) != re.findall(r'id="(g\w+)"', answer.fragment(g))  # shown twice in one notebook


def test_of_a_long_text_the_strongest_words_are_coloured() -> None:
    count = 400
    g = replace(
        made(), matrix=torch.linspace(0.1, 1, count)[None] * torch.cat([torch.ones(1, count - 1), torch.zeros(1, 1)], 1), start=count - 1,
        pieces=[f" w{i}" for i in range(count)], tokens=[f"w{i}" for i in range(count)], ids=list(range(count)), logits=torch.zeros(1, count),
    )  # fmt: skip
    card = answer.fragment(g)
    lit = re.findall(rf"-{count - 1}:checked~p .k(\d+)(?=[,{{][^}}]*background)", card)
    assert sorted(map(int, lit)) == list(range(count - 150 - 1, count - 1))
    assert "the strongest words alone" in card
    assert "the strongest words alone" not in answer.fragment(made())


@pytest.mark.parametrize(("words", "unit"), [(150, "token"), (300, "sentence")])
def test_the_matrix_says_what_its_rows_are(words: int, unit: str) -> None:
    pieces = ([" The", " sun", " is", " shining", " today."] * words)[: words + 1]
    matrix = torch.zeros(1, words + 1)
    matrix[0, 0] = 1.0
    g = replace(
        made(), pieces=pieces, tokens=pieces, ids=[0] * (words + 1), start=words, matrix=matrix, logits=torch.zeros(1, 5), value=torch.zeros(1),
        target=torch.zeros(1), target_names=["x"], diagnostics=[],
    )  # fmt: skip
    assert re.findall(r"Every (\w+) of the answer", answer.page(g)) == [unit]


def seeing(matrix: list[list[float]], diagnostics: list[dict[str, object]] | None = None) -> Generation:
    """An answer of two tokens to a picture of four rows and the word "what"; the first step looks at its last pixel."""
    pieces = ["<s>", *[" <image>"] * 4, " what", " one", " two"]
    logits = torch.eye(8)[[6, 7]]
    features = Features(image_size=(2, 2), pictures=torch.zeros(1, 2, 2, 3, dtype=torch.uint8), originals=[Image.new("RGB", (20, 20))], geometry=[Geometry((20, 20), (0.0, 0.0, 20.0, 20.0))])
    first = Explanation(torch.tensor([[[0.0, 0.0], [0.0, 3.0]]]), "pixel", "gae", {}, torch.tensor([6]), logits[:1], ["'one'"], features)
    return Generation(
        matrix=torch.tensor(matrix), tokens=[p.strip() for p in pieces], pieces=pieces, ids=[0, 1, 1, 1, 1, 2, 6, 7], start=6,
        method="gae", settings={}, explained="log-probability", value=torch.zeros(2), target=torch.tensor([6, 7]),
        target_names=["'one'", "'two'"], logits=logits, labels={i: repr(p) for i, p in enumerate(pieces)},
        seen={"pixel_values": Pictured(first, torch.tensor([[[0.0, 0.0], [0.0, 3.0]], [[2.0, 0.0], [0.0, 0.0]]]))},
        diagnostics=diagnostics or [{}, {}],
    )  # fmt: skip


SEEING = [[0.5, 0, 0, 0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0, 1.0, 1.0, 0]]


def test_tokens_that_stand_for_a_picture_are_one_piece() -> None:
    g = answers.folded(seeing(SEEING))
    assert g.pieces == ["<s>", " [picture]", " what", " one", " two"]
    assert (g.start, g.prompt, g.text, g.probability(1)) == (3, "<s> [picture] what", " one two", seeing(SEEING).probability(1))
    assert g.matrix.tolist() == [[0.5, 0, 0.5, 0, 0], [0, 0, 1.0, 1.0, 0]]
    scored = [[0.5, 0, 0.1, 0, 0, 0.4, 0, 0], SEEING[1]]
    assert answers.folded(seeing(scored)).pieces == ["<s>", " <image>", " <image>", " [picture]", " what", " one", " two"]  # no score is lost
    assert answers.folded(made()).pieces == made().pieces


def test_what_is_on_the_picture_stands_beside_each_step() -> None:
    g = seeing(SEEING)
    assert [answers.share_seen(g, t) for t in range(2)] == [3 / 4, 2 / 4]
    text = str(g)
    assert re.search(r"' one' .*picture 75% \(most at x 1\d, y 1\d\)  <s> 0.5, what 0.5", text)
    assert re.search(r"' two' .*picture 50% \(most at x \d, y \d\)", text)
    page = answer.page(g)
    maps = re.findall(r'<figure class="m m(\d)"><img alt="where on the picture: ([^"]+)"', page)
    assert maps == [("3", " one"), ("4", " two")]
    assert re.search(r"#g\w+-3:checked~.seen .m3\{visibility:visible\}", page)
    assert re.search(r"#g\w+:has\(.k4:hover\) .seen .m4\{visibility:visible\}", page)


def test_colours_claim_no_more_than_the_method_knows() -> None:
    assert not answers.signed(seeing(SEEING))
    assert "green: mattered (no sign)" in answer.page(seeing(SEEING))
    assert "var(--for)" not in answer.page(seeing(SEEING)).partition("</head>")[2]
    known = seeing(SEEING, [{"signed": True}, {"signed": True}])
    assert answers.signed(known)
    assert "orange: for it, blue: against it" in answer.page(known)


def test_a_page_writes_the_matrix_s_legend_beside_it() -> None:
    g = made()
    assert answer.page(g).count(grid.claim(g)) == len(re.findall("<img", answer.page(g))) >= 1
    whole, bare = ({t.get_text() for t in grid.figure(g, bare=one).texts} for one in (False, True))
    assert whole - bare == {answers.title(g), grid.claim(g), *answers.remarks(g)}


def test_the_matrix_as_a_picture() -> None:
    g = made()
    drawing = grid.figure(g)
    (axes,) = drawing.axes
    pixels = axes.images[0].get_array()
    assert pixels.shape[:2] == (2, 4)
    np.testing.assert_allclose(pixels[0, 3], 0.94)  # what came later
    np.testing.assert_allclose(pixels[0, 0], pixels[0, 2])
    assert paper.encode(drawing).startswith(b"\x89PNG")
    words = [t.get_text() for t in drawing.texts]
    assert {"One", "two", "three", "four", "⏎"} <= set(words) or "□" in "".join(words)
