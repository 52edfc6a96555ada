"""Pronouns in stories: which are kept, and whom they mean."""

from __future__ import annotations

from itertools import islice

import pytest

from whyformer.datasets.stories import Opening, openings, pronoun

LILY_AND_BEN = Opening("0", "Ben met Lily.", "Lily", "Ben")


@pytest.mark.parametrize(
    ("story", "text", "own", "other"),
    [
        ("Ben met Lily. She ran. He ran.", "Ben met Lily.", "Lily", "Ben"),
        ("Ben met Lily. The sun was high, and he said hello.", "Ben met Lily. The sun was high, and", "Ben", "Lily"),
    ],
)
def test_the_first_pronoun_means_the_name_of_its_sex(story: str, text: str, own: str, other: str) -> None:
    found = pronoun(LILY_AND_BEN, story, 3)
    assert found is not None
    assert found.text == text
    assert story.startswith(found.text + found.answer)
    assert text[slice(*found.clue)] == text[slice(*found.fact)] == own
    assert found.twin is not None
    assert text[slice(*found.twin)] == other
    assert (found.id, found.kind, found.rival, found.changed) == ("0-3", "pronoun", None, None)


@pytest.mark.parametrize(
    "story",
    [
        "Ben met Lily. They ran.",
        "Ben met Lily. Lily ran. She fell.",
        "Ben met Lily. Her mom came. She ran.",
        "Ben met Lily. Tim ran. He fell.",
        "Ben met a cat. He ran.",
        "Ben met Lily. The king said he ran.",
    ],
)
def test_where_it_is_not_clear_there_is_none(story: str) -> None:
    assert pronoun(LILY_AND_BEN, story) is None


def test_a_draw_gives_the_same_openings_and_another_one_others() -> None:
    first = list(islice(openings(), 20))
    assert first == list(islice(openings(), 20)) != list(islice(openings(1), 20))
    assert all(o.text.count(o.girl) == o.text.count(o.boy) == 1 for o in first)
    assert {pronoun(o, f"{o.text} She") is not None for o in first} == {True}
