"""Of two classes whose scores are each other's negatives one line is drawn; all other maps are drawn."""

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


def two(other, **more):
    """Maps of both classes of a sentence with these scores for the second."""
    first = replace(sentence(target=1, **more), scores=SCORES)
    return [first, replace(sentence(target=0, **more), scores=other(first.scores))]


def words_of(html):
    return len(re.findall('class="w ', html))


def printed(maps):
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal.render(maps))
    return console.file.getvalue()


def test_opposite_scores_are_one_line_which_names_the_other_class():
    maps = two(lambda scores: -scores)
    page, text = show.page(maps), printed(maps)
    assert words_of(page) == words_of(show.page(maps[0]))
    assert "Why “negative”?" not in page + text
    for drawn in (page, text):
        assert "transformer_attribution · opposite for “negative”" in drawn
    assert show.figure(maps).get_size_inches()[1] == show.figure(maps[0]).get_size_inches()[1]


@pytest.mark.parametrize("other", [torch.clone, lambda s: -s + 0.2 * s.flip(1), lambda s: torch.zeros_like(s), lambda s: s.flip(1)], ids=["equal", "partly", "zero", "another"])
def test_all_other_maps_are_drawn(other):
    maps = two(other)
    page, text = show.page(maps), printed(maps)
    assert words_of(page) == 2 * words_of(show.page(maps[0]))
    for drawn in (page, text):
        assert "Why “positive”?" in drawn and "Why “negative”?" in drawn
        assert "opposite" not in drawn
    assert show.figure(maps).get_size_inches()[1] > 1.2 * show.figure(maps[0]).get_size_inches()[1]


def test_colours_that_look_opposite_are_one_line_and_numbers_are_not():
    """Lines are scaled separately, so that twice the opposite looks opposite; the terminal prints the numbers of both."""
    maps = two(lambda scores: -2 * scores + 0.03 * scores.abs())
    assert words_of(show.page(maps)) == words_of(show.page(maps[0]))
    assert "Why “negative”?" in printed(maps)


def test_each_method_is_compared_with_itself():
    opposite, another = two(lambda scores: -scores), two(torch.clone, method="gae")
    (part,) = layout.sections([*opposite, *another])
    (positive, rows), (negative, others) = part.columns
    assert [name for name, _ in rows] == ["transformer_attribution · opposite for “negative”", "gae"]
    assert [name for name, _ in others] == ["gae"]
    assert (positive.target_names, negative.target_names) == (["positive"], ["negative"])


def test_rounding_is_no_difference():
    maps = two(lambda scores: -scores * (1 + 1e-7))
    assert len(layout.sections(maps)[0].columns) == 1


def test_warnings_of_a_map_that_is_not_drawn_are_shown():
    first, second = two(lambda scores: -scores)
    maps = [first, replace(second, diagnostics={"warnings": [["something odd"]]})]
    assert len(layout.sections(maps)[0].columns) == 1
    assert "negative: something odd" in printed(maps)
    assert "something odd" in show.page(maps)
    assert any("something odd" in text.get_text() for text in show.figure(maps).texts)


def test_pictures_have_a_map_for_each_class():
    maps = [picture(target=1), replace(picture(target=2), scores=-picture().scores)]
    (part,) = layout.sections(maps)
    assert len(part.explanations) == 2
