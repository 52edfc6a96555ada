"""Pronouns in stories: openings about a girl and a boy, and the referent of the pronoun in a model's continuation."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from whyformer.datasets.planted import Planted, words_of

_GIRLS = words_of("Lily Lucy Mia Sue Anna Sara Amy Emma")
_BOYS = words_of("Tim Ben Max Tom Jack Sam Bob Leo")
_OPENINGS = (
    "{} and {} went to the park.", "{} and {} were playing in the garden.", "One day, {} met {} near a big tree.",
    "{} was sitting next to {} in the kitchen.", "There was a party, and {} danced with {}.",
    "{} gave {} a big red ball.",
)  # fmt: skip
_PRONOUN = re.compile(r" (she|he|She|He)\b")
_OTHERS = words_of(
    "she he her hers herself him his himself girl girls boy boys woman women man men lady mom mommy mother mama dad "
    "daddy father papa grandma grandpa sister brother aunt uncle queen king princess prince"
)
"""Words that a pronoun may also refer to, or that reveal a person's sex."""


@dataclass(frozen=True)
class Opening:
    """The opening of a story: ``text`` names a girl and a boy, whose sex only their names reveal."""

    id: str
    text: str
    girl: str
    boy: str


def openings(draw: int = 0) -> Iterator[Opening]:
    """Yield an endless sequence of openings; ``draw`` is the seed."""
    rng, number = random.Random(f"{draw} stories"), 0
    while True:
        girl, boy = rng.choice(_GIRLS), rng.choice(_BOYS)
        text = rng.choice(_OPENINGS).format(*rng.sample([girl, boy], 2))
        yield Opening(f"{draw}-{number:05d}-pronoun", text, girl, boy)
        number += 1


def pronoun(opening: Opening, story: str, number: int = 0) -> Planted | None:
    """Return the first *she* or *he* of a story as a prompt, or None if its referent is ambiguous.

    The referent is unambiguous if the girl and the boy are each named exactly once before the pronoun, and no other
    name or word for a person (*mom*, *king*, *her*) occurs there. ``fact`` and ``clue`` of the prompt are the name of
    the referent, and ``twin`` is the other name.

    Args:
        opening: opening of the story.
        story: text of the story.
        number: number of the story among those of the opening, for the id.
    """
    match = _PRONOUN.search(story)
    if match is None:
        return None
    text = story[: match.start()]
    words = re.findall(r"[A-Za-z]+", text)
    others = [w for w in words if w.lower() in _OTHERS or w in {*_GIRLS, *_BOYS} - {opening.girl, opening.boy}]
    if others or any(words.count(name) != 1 for name in (opening.girl, opening.boy)):
        return None
    referent, other = (opening.girl, opening.boy) if match[1].lower() == "she" else (opening.boy, opening.girl)
    places = [m.span() for name in (referent, other) if (m := re.search(rf"\b{name}\b", text)) is not None]
    return Planted(
        f"{opening.id}-{number}", "pronoun", text, f" {match[1]}", places[0], places[0], (0, len(text)), twin=places[1]
    )
