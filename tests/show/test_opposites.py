"""Two classes with opposite scores are drawn as one line; all other maps are drawn separately."""

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from show.builders import picture, sentence
from whyformer import show
from whyformer.show import layout, terminal

SCORES = torch.tensor([0, 0.1, 0.5, 0.7, -0.2, 0.3, 0.1, -0.8, 0.4, -0.9, 0.1, 0.2, 0])[None]


def two_maps(other, **kwargs):
    """Maps of both classes of a sentence, where ``other`` computes the scores of the second."""
    first = replace(sentence(target=1, **kwargs), scores=SCORES)
    return [first, replace(sentence(target=0, **kwargs), scores=other(first.scores))]


def words_of(html):
    return len(re.findall('class="w ', html))


def print_to_terminal(maps):
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal.render(maps))
    return console.file.getvalue()


def test_opposite_maps_are_one_line_that_names_other_class():
    maps = two_maps(lambda scores: -scores)
    page, text = show.page(maps), print_to_terminal(maps)
    assert words_of(page) == words_of(show.page(maps[0]))
    assert "Why “negative”?" not in page + text
    for drawn in (page, text):
        assert "transformer_attribution · opposite for “negative”" in drawn
    assert show.figure(maps).get_size_inches()[1] == show.figure(maps[0]).get_size_inches()[1]


@pytest.mark.parametrize("other", [torch.clone, lambda s: -s + 0.2 * s.flip(1), lambda s: torch.zeros_like(s), lambda s: s.flip(1)], ids=["equal", "partly", "zero", "another"])
def test_maps_that_are_not_opposite_are_drawn_separately(other):
    maps = two_maps(other)
    page, text = show.page(maps), print_to_terminal(maps)
    assert words_of(page) == 2 * words_of(show.page(maps[0]))
    for drawn in (page, text):
        assert "Why “positive”?" in drawn and "Why “negative”?" in drawn
        assert "opposite" not in drawn
    assert show.figure(maps).get_size_inches()[1] > 1.2 * show.figure(maps[0]).get_size_inches()[1]


def test_maps_with_opposite_colours_are_merged_only_without_numbers():
    """Lines are scaled separately, so a multiple of the opposite looks opposite; the terminal prints numbers, so it shows both."""
    maps = two_maps(lambda scores: -2 * scores + 0.03 * scores.abs())
    assert words_of(show.page(maps)) == words_of(show.page(maps[0]))
    assert "Why “negative”?" in print_to_terminal(maps)


def test_only_maps_of_same_method_are_merged():
    opposite, another = two_maps(lambda scores: -scores), two_maps(torch.clone, method="gae")
    (part,) = layout.sections([*opposite, *another])
    (positive, rows), (negative, negative_rows) = part.columns
    assert [name for name, _ in rows] == ["transformer_attribution · opposite for “negative”", "gae"]
    assert [name for name, _ in negative_rows] == ["gae"]
    assert (positive.target_names, negative.target_names) == (["positive"], ["negative"])


def test_opposite_maps_up_to_rounding_are_merged():
    maps = two_maps(lambda scores: -scores * (1 + 1e-7))
    assert len(layout.sections(maps)[0].columns) == 1


def test_warnings_of_merged_map_are_shown():
    first, second = two_maps(lambda scores: -scores)
    maps = [first, replace(second, diagnostics={"warnings": [["something odd"]]})]
    assert len(layout.sections(maps)[0].columns) == 1
    assert "negative: something odd" in print_to_terminal(maps)
    assert "something odd" in show.page(maps)
    assert any("something odd" in text.get_text() for text in show.figure(maps).texts)


def test_opposite_maps_of_pictures_are_not_merged():
    maps = [picture(target=1), replace(picture(target=2), scores=-picture().scores)]
    (part,) = layout.sections(maps)
    assert len(part.explanations) == 2
