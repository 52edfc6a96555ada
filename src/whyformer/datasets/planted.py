"""Random prompts whose evidence is known: planted facts, and pronouns of stories about a girl and a boy.

A planted sentence holds the answer. In a story that a model continues, a pronoun refers to one of two names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


_NAMES = words_of("Ann Bob Carl Dora Eva Frank Grace Henry Iris Jack Kate Leo Mary Nick Olga Paul Rosa Sam Tina Victor")
_COLOURS = words_of("red blue green yellow black white brown pink purple gray silver")
_THINGS = words_of("ball kite hat car bag cup bike coat boat lamp book chair")
_JOBS = words_of("doctor teacher farmer lawyer nurse pilot painter singer baker writer dentist")
_CITIES = words_of("Paris London Berlin Rome Madrid Tokyo Oslo Cairo Lima Boston Dublin Vienna")
_ROOMS = words_of("kitchen garden garage bedroom office attic bathroom hall library barn basement")
_FOODS = words_of("apples bananas grapes cherries lemons pears peaches carrots tomatoes potatoes")
_UNRELATED = (
    "It rained all day.", "The street was quiet.", "Everybody had slept well.", "Lunch was late again.",
    "The old clock had stopped.", "A dog barked far away.", "Nobody said a word.", "The train was on time.",
)  # fmt: skip
_PLURALS = (("keys", "cabinet"), ("dogs", "farmer"), ("books", "student"), ("letters", "girl"), ("houses", "king"),
            ("songs", "singer"), ("pictures", "child"), ("boats", "captain"), ("roads", "village"))  # fmt: skip
_SINGULARS = (("key", "cabinets"), ("dog", "farmers"), ("book", "students"), ("letter", "girls"), ("house", "kings"),
              ("song", "singers"), ("picture", "children"), ("boat", "captains"), ("road", "villages"))  # fmt: skip
_COUNTS = (2, 2, 3, 3, 4, 4, 6, 8, 12)


@dataclass(frozen=True)
class Planted:
    """A prompt and the place of its evidence. Ranges are (start, end) character offsets.

    Attributes:
        id: identifier.
        kind: kind of the prompt.
        text: text up to the answer.
        answer: the next word, with the space before it.
        fact: range of the sentence that holds the answer.
        clue: range of the answer in this sentence; for agreement, of the subject.
        document: range of all sentences that may hold the answer.
        rival: for agreement, the word of the wrong number.
        twin: range of the answer in another sentence, if two facts have the same answer.
        changed: the text with another answer in the fact, and with another answer in the twin.
        message: length of the user's message in a conversation; the rest of the text begins the reply.
    """

    id: str
    kind: str
    text: str
    answer: str
    fact: Range
    clue: Range
    document: Range
    rival: str | None = None
    twin: Range | None = None
    changed: tuple[str, str] | None = None
    message: int | None = None
    label: None = None
    words: None = None


def planted(draw: int = 0) -> Iterator[Planted]:
    """Yield an endless sequence of prompts, cycling through the kinds; ``draw`` is the seed."""
    number = 0
    while True:
        for kind in (*_FACTS, "chat", "twins", "agreement"):
            rng = random.Random(f"{draw} {number} {kind}")
            fields = _KINDS.get(kind, _question)(rng, kind)
            yield Planted(f"{draw}-{number:05d}-{kind}", **fields)
        number += 1


Sentence = Callable[[str, str, str], str]
# kind -> (answers, sentence of (name, thing, answer), question of (name, thing))
_FACTS: dict[str, tuple[tuple[str, ...], Sentence, Callable[[str, str], str]]] = {
    "colour": (_COLOURS, lambda n, t, a: f"{n}'s {t} is {a}.", lambda n, t: f"Answer: {n}'s {t} is"),
    "owned": (_COLOURS, lambda n, t, a: f"{n} has a {a} {t}.", lambda n, t: f"Answer: {n}'s {t} is"),
    "asked colour": (
        _COLOURS, lambda n, t, a: f"{n} has a {a} {t}.",
        lambda n, t: f"Question: What color is {n}'s {t}? Answer: The color of {n}'s {t} is",
    ),
    "place": (
        _ROOMS, lambda n, t, a: f"The {t} is in the {a}.",
        lambda n, t: f"Question: Where is the {t}? Answer: The {t} is in the",
    ),
    "work": (
        _JOBS, lambda n, t, a: f"{n} is a {a}.", lambda n, t: f"Question: What is {n}'s job? Answer: {n} is a",
    ),
    "home": (_CITIES, lambda n, t, a: f"{n} lives in {a}.", lambda n, t: f"Answer: {n} lives in"),
    "food": (
        _FOODS, lambda n, t, a: f"{n} likes {a}.", lambda n, t: f"Question: What does {n} like? Answer: {n} likes",
    ),
}  # fmt: skip


def _question(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return two to twelve facts with different answers, and a question about one of them."""
    answers, sentence, question = _FACTS[kind]
    count = min(rng.choice(_COUNTS), len(answers))
    names, items, values = rng.sample(_NAMES, count), rng.sample(_THINGS, min(count, 12)), rng.sample(answers, count)
    queried = rng.randrange(count)
    facts = [sentence(n, t, a) for n, t, a in zip(names, items, values, strict=True)]
    fields = _document(rng, facts, queried, values[queried])
    return {**fields, "kind": kind, "text": f"{fields['text']} {question(names[queried], items[queried])}"}


def _document(rng: random.Random, facts: list[str], queried: int, answer: str) -> dict[str, Any]:
    """Return the facts between unrelated sentences."""
    before, after = rng.sample(_UNRELATED, rng.randrange(2)), rng.sample(_UNRELATED, rng.randrange(2))
    sentences = [*before, *facts, *after]
    text = " ".join(sentences)
    start = len(" ".join([*before, *facts[:queried], ""]))
    end = start + len(facts[queried])
    clue = start + facts[queried].rindex(answer)
    return {
        "text": text, "answer": f" {answer}", "fact": (start, end), "clue": (clue, clue + len(answer)),
        "document": (0, len(text)),
    }  # fmt: skip


def _chat(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return a question in a conversation, with the beginning of the reply."""
    count = rng.choice(_COUNTS[:6])
    items, values = rng.sample(_THINGS, count), rng.sample(_COLOURS, count)
    queried = rng.randrange(count)
    fields = _document(rng, [f"The {t} is {a}." for t, a in zip(items, values, strict=True)], queried, values[queried])
    message = f"{fields['text']} What color is the {items[queried]}?"
    return {**fields, "kind": kind, "text": f"{message}The {items[queried]} is", "message": len(message)}


def _twins(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return two facts with the same answer, and a question about one of them."""
    source = rng.choice(["colour", "place", "work", "home", "food"])
    answers, sentence, question = _FACTS[source]
    count = rng.choice((2, 3, 4))
    names, items, values = rng.sample(_NAMES, count), rng.sample(_THINGS, count), rng.sample(answers, count + 1)
    queried, other = rng.sample(range(count), 2)
    values, another = values[:count], values[count]
    values[other] = values[queried]
    state = rng.getstate()

    def document(changed: int | None = None) -> dict[str, Any]:
        rng.setstate(state)  # the same unrelated sentences
        current = [another if i == changed else a for i, a in enumerate(values)]
        facts = [sentence(n, t, a) for n, t, a in zip(names, items, current, strict=True)]
        fields = _document(rng, facts, queried, current[queried])
        fields["text"] = f"{fields['text']} {question(names[queried], items[queried])}"
        return fields

    fields = document()
    twin = sentence(names[other], items[other], values[other])
    start = str(fields["text"]).index(twin) + twin.rindex(values[other])
    changed = (str(document(queried)["text"]), str(document(other)["text"]))
    return {**fields, "kind": kind, "twin": (start, start + len(values[other])), "changed": changed}


def _agreement(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return a subject with a noun of the other number between it and its verb."""
    plural = rng.random() < 0.5
    subject, between = rng.choice(_PLURALS if plural else _SINGULARS)
    link = rng.choice(["near", "of", "behind", "for", "from"])
    opening = rng.choice(["", "It is well known that ", "Yesterday we saw that ", "People say that "])
    first = f"{opening}{'the' if opening else 'The'} "
    text = f"{first}{subject} {link} the {between}"
    subject_range = (len(first), len(first) + len(subject))
    verbs = (" are", " is") if plural else (" is", " are")
    return {
        "kind": kind, "text": text, "answer": verbs[0], "rival": verbs[1], "fact": subject_range, "clue": subject_range,
        "document": (0, len(text)),
    }  # fmt: skip


_KINDS: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "chat": _chat,
    "twins": _twins,
    "agreement": _agreement,
}


# -- stories --------------------------------------------------------------------------------------------------------
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
