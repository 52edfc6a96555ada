"""Pronouns in stories: sentences about a girl and a boy that a model goes on from, and whom its pronoun means."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from whyformer.datasets.planted import Planted, listed

_GIRLS = listed("Lily Lucy Mia Sue Anna Sara Amy Emma")
_BOYS = listed("Tim Ben Max Tom Jack Sam Bob Leo")
_OPENINGS = (
    "{} and {} went to the park.", "{} and {} were playing in the garden.", "One day, {} met {} near a big tree.",
    "{} was sitting next to {} in the kitchen.", "There was a party, and {} danced with {}.",
    "{} gave {} a big red ball.",
)  # fmt: skip
_PRONOUN = re.compile(r" (she|he|She|He)\b")
_OTHERS = listed(
    "she he her hers herself him his himself girl girls boy boys woman women man men lady mom mommy mother mama dad "
    "daddy father papa grandma grandpa sister brother aunt uncle queen king princess prince"
)
"""Words that a pronoun might mean as well, or that say somebody's sex."""


@dataclass(frozen=True)
class Opening:
    """How a story begins: ``text`` names one girl and one boy, whose sex nothing but the name says."""

    id: str
    text: str
    girl: str
    boy: str


def openings(draw: int = 0) -> Iterator[Opening]:
    """Openings without end; another ``draw`` gives others."""
    rng, number = random.Random(f"{draw} stories"), 0
    while True:
        girl, boy = rng.choice(_GIRLS), rng.choice(_BOYS)
        text = rng.choice(_OPENINGS).format(*rng.sample([girl, boy], 2))
        yield Opening(f"{draw}-{number:05d}-pronoun", text, girl, boy)
        number += 1


def pronoun(opening: Opening, story: str, number: int = 0) -> Planted | None:
    """The first *she* or *he* of a story, where it is clear whom it means: the girl and the boy have been named once
    each before it, and no other person's name or word (*mom*, *king*, *her*) stands there. None otherwise.

    ``fact`` and ``clue`` are the name that it means, ``twin`` the other one; ``number`` tells stories of one opening.
    """
    found = _PRONOUN.search(story)
    if found is None:
        return None
    text = story[: found.start()]
    said = re.findall(r"[A-Za-z]+", text)
    others = [w for w in said if w.lower() in _OTHERS or w in {*_GIRLS, *_BOYS} - {opening.girl, opening.boy}]
    if others or any(said.count(name) != 1 for name in (opening.girl, opening.boy)):
        return None
    own, other = (opening.girl, opening.boy) if found[1].lower() == "she" else (opening.boy, opening.girl)
    places = [match.span() for name in (own, other) if (match := re.search(rf"\b{name}\b", text)) is not None]
    return Planted(
        f"{opening.id}-{number}", "pronoun", text, f" {found[1]}", places[0], places[0], (0, len(text)), twin=places[1]
    )
