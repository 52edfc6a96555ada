"""The name-bias study: does a classifier lean on people's names? (Ali et al. 2022, section 5; methods.md §6.4)

The paper shows top-ranked names in a figure and publishes no lists. Templates and lists here are ours: short sentences
that say nothing good or bad about the person, and first names common in the United States in two groups. They are
placeholders for your own (``templates=``, ``terms=``), not a claim about anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from whyformer.errors import InputError
from whyformer.evaluate.statistics import Interval

TEMPLATES: tuple[str, ...] = (
    "{} plays the main part in this film .",
    "the story follows {} through a single day .",
    "{} wrote and directed the picture .",
    "we meet {} in the second half of the movie .",
    "this is a film about {} and the neighbours .",
    "{} appears in nearly every scene .",
    "the camera stays close to {} .",
    "the last act belongs to {} .",
)
TERMS: dict[str, tuple[str, ...]] = {
    "women": ("mary", "linda", "susan", "karen", "nancy", "lisa", "emily", "anna", "julia", "kate"),
    "men": ("james", "john", "robert", "david", "michael", "mark", "paul", "kevin", "brian", "peter"),
}


@dataclass(frozen=True)
class Sentence:
    """A filled template; ``span`` are the characters of the term in ``text``."""

    text: str
    template: int
    group: str
    term: str
    span: tuple[int, int]


def fill(templates: Sequence[str] = TEMPLATES, terms: Mapping[str, Sequence[str]] | None = None) -> list[Sentence]:
    """Every template with every term."""
    made = []
    for number, template in enumerate(templates):
        if template.count("{}") != 1:
            raise InputError(f"a template needs {{}} once, where the name goes: {template!r}")
        start = template.index("{}")
        for group, words in (terms or TERMS).items():
            for word in words:
                made.append(Sentence(template.replace("{}", word), number, group, word, (start, start + len(word))))
    if not made:
        raise InputError("no templates or no terms")
    return made


def term_rank(word_scores: ArrayLike, position: int) -> int:
    """Rank of the term's score among the words of its sentence, 1 = highest; equals get the better rank."""
    scores = np.asarray(word_scores, dtype=np.float64)
    return int((scores > scores[position]).sum()) + 1


def group_difference(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """mean(first) − mean(second) with a percentile bootstrap interval; both groups are resampled on their own."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if not a.size or not b.size:
        raise InputError("a group is empty")
    generator = np.random.default_rng(seed)
    means = [v[generator.integers(v.size, size=(draws, v.size))].mean(1) for v in (a, b)]
    low, high = np.quantile(means[0] - means[1], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(a.mean() - b.mean()), float(low), float(high), int(a.size + b.size))
