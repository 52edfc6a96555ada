"""What is drawn of a generated text: scales, reasons, text views, the page and the matrix."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from rich.console import Console

from show.made import ATTACK
from whyformer.explanation.generation import Generation
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
    rules = re.findall(r"([^\n{}]+)\{background:(#[0-9a-f]+)\}", page)
    lit = {place for where, _ in rules for place in where.split(",")}
    assert f"#{name}-3:checked~p .k0" in lit  # step 0 by its first token
    assert f"#{name}-4:checked~p .k0" not in lit  # which step 1 does not use
    assert f"#{name}-1:checked~p .k4" in lit  # what the second token served
    assert f"#{name}-0:checked~p .k4" not in lit
    assert answer.fragment(g).count('type="radio"') == 5


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
