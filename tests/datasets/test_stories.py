"""Pronouns in stories: which are selected, and the names to which they refer."""

from __future__ import annotations

from itertools import islice

import pytest

from whyformer.datasets.planted import Opening, openings, pronoun

LILY_AND_BEN = Opening("0", "Ben met Lily.", "Lily", "Ben")


@pytest.mark.parametrize(
    ("story", "text", "referent", "other_name"),
    [
        ("Ben met Lily. She ran. He ran.", "Ben met Lily.", "Lily", "Ben"),
        ("Ben met Lily. The sun was high, and he said hello.", "Ben met Lily. The sun was high, and", "Ben", "Lily"),
    ],
)
def test_first_pronoun_refers_to_name_of_same_gender(story: str, text: str, referent: str, other_name: str) -> None:
    result = pronoun(LILY_AND_BEN, story, 3)
    assert result is not None
    assert result.text == text
    assert story.startswith(result.text + result.answer)
    assert text[slice(*result.clue)] == text[slice(*result.fact)] == referent
    assert result.twin is not None
    assert text[slice(*result.twin)] == other_name
    assert (result.id, result.kind, result.rival, result.changed) == ("0-3", "pronoun", None, None)


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
def test_ambiguous_pronoun_is_skipped(story: str) -> None:
    assert pronoun(LILY_AND_BEN, story) is None


def test_draw_determines_openings() -> None:
    first = list(islice(openings(), 20))
    assert first == list(islice(openings(), 20)) != list(islice(openings(1), 20))
    assert all(o.text.count(o.girl) == o.text.count(o.boy) == 1 for o in first)
    assert {pronoun(o, f"{o.text} She") is not None for o in first} == {True}
