"""Prompts in which one planted sentence holds the answer, drawn from a seed: what ought to be found is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Range = tuple[int, int]


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


_NAMES = listed("Ann Bob Carl Dora Eva Frank Grace Henry Iris Jack Kate Leo Mary Nick Olga Paul Rosa Sam Tina Victor")
_COLOURS = listed("red blue green yellow black white brown pink purple gray silver")
_THINGS = listed("ball kite hat car bag cup bike coat boat lamp book chair")
_JOBS = listed("doctor teacher farmer lawyer nurse pilot painter singer baker writer dentist")
_CITIES = listed("Paris London Berlin Rome Madrid Tokyo Oslo Cairo Lima Boston Dublin Vienna")
_ROOMS = listed("kitchen garden garage bedroom office attic bathroom hall library barn basement")
_FOODS = listed("apples bananas grapes cherries lemons pears peaches carrots tomatoes potatoes")
_BESIDE = (
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
    """One prompt and where its evidence stands.

    Attributes:
        id, kind: of the prompt; text: up to where the answer follows.
        answer: the word that follows, with the space before it. rival: for agreement, the word that must not follow.
        fact: (start, end) characters of the sentence that holds the answer, clue: of the answer's own word in it (for
            agreement, the subject). document: of all sentences among which it stands.
        twin: of the same word in another sentence, where two facts have the same answer. changed: the text with another
            answer in the fact, and with another one in the twin.
        message: how much of the text is a user's message, where it is a conversation; the rest begins the reply.
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
    """Prompts without end, the kinds in turn; another ``draw`` gives others."""
    number = 0
    while True:
        for kind in (*_FACTS, "chat", "twins", "agreement"):
            rng = random.Random(f"{draw} {number} {kind}")
            made = _MADE.get(kind, _question)(rng, kind)
            yield Planted(f"{draw}-{number:05d}-{kind}", **made)
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
    """Two to twelve facts with different answers, one of which is asked for."""
    answers, sentence, question = _FACTS[kind]
    count = min(rng.choice(_COUNTS), len(answers))
    names, things, said = rng.sample(_NAMES, count), rng.sample(_THINGS, min(count, 12)), rng.sample(answers, count)
    asked = rng.randrange(count)
    facts = [sentence(n, t, a) for n, t, a in zip(names, things, said, strict=True)]
    made = _document(rng, facts, asked, said[asked])
    return {**made, "kind": kind, "text": f"{made['text']} {question(names[asked], things[asked])}"}


def _document(rng: random.Random, facts: list[str], asked: int, answer: str) -> dict[str, Any]:
    """The facts with sentences before and behind that say nothing about them."""
    before, behind = rng.sample(_BESIDE, rng.randrange(2)), rng.sample(_BESIDE, rng.randrange(2))
    sentences = [*before, *facts, *behind]
    text = " ".join(sentences)
    start = len(" ".join([*before, *facts[:asked], ""]))
    end = start + len(facts[asked])
    clue = start + facts[asked].rindex(answer)
    return {
        "text": text, "answer": f" {answer}", "fact": (start, end), "clue": (clue, clue + len(answer)),
        "document": (0, len(text)),
    }  # fmt: skip


def _chat(rng: random.Random, kind: str) -> dict[str, Any]:
    """A question in a conversation, whose reply has begun."""
    count = rng.choice(_COUNTS[:6])
    things, said = rng.sample(_THINGS, count), rng.sample(_COLOURS, count)
    asked = rng.randrange(count)
    made = _document(rng, [f"The {t} is {a}." for t, a in zip(things, said, strict=True)], asked, said[asked])
    message = f"{made['text']} What color is the {things[asked]}?"
    return {**made, "kind": kind, "text": f"{message}The {things[asked]} is", "message": len(message)}


def _twins(rng: random.Random, kind: str) -> dict[str, Any]:
    """Two facts with the same answer, of which one is asked for."""
    source = rng.choice(["colour", "place", "work", "home", "food"])
    answers, sentence, question = _FACTS[source]
    count = rng.choice((2, 3, 4))
    names, things, said = rng.sample(_NAMES, count), rng.sample(_THINGS, count), rng.sample(answers, count + 1)
    asked, other = rng.sample(range(count), 2)
    said, another = said[:count], said[count]
    said[other] = said[asked]
    state = rng.getstate()

    def written(changed: int | None = None) -> dict[str, Any]:
        rng.setstate(state)  # the same sentences around them
        own = [another if i == changed else a for i, a in enumerate(said)]
        facts = [sentence(n, t, a) for n, t, a in zip(names, things, own, strict=True)]
        made = _document(rng, facts, asked, own[asked])
        made["text"] = f"{made['text']} {question(names[asked], things[asked])}"
        return made

    made = written()
    twin = sentence(names[other], things[other], said[other])
    start = str(made["text"]).index(twin) + twin.rindex(said[other])
    changed = (str(written(asked)["text"]), str(written(other)["text"]))
    return {**made, "kind": kind, "twin": (start, start + len(said[other])), "changed": changed}


def _agreement(rng: random.Random, kind: str) -> dict[str, Any]:
    """A subject and its verb with a noun of the other number between them."""
    plural = rng.random() < 0.5
    subject, between = rng.choice(_PLURALS if plural else _SINGULARS)
    link = rng.choice(["near", "of", "behind", "for", "from"])
    opening = rng.choice(["", "It is well known that ", "Yesterday we saw that ", "People say that "])
    first = f"{opening}{'the' if opening else 'The'} "
    text = f"{first}{subject} {link} the {between}"
    at = (len(first), len(first) + len(subject))
    verbs = (" are", " is") if plural else (" is", " are")
    return {
        "kind": kind, "text": text, "answer": verbs[0], "rival": verbs[1], "fact": at, "clue": at,
        "document": (0, len(text)),
    }  # fmt: skip


_MADE: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "chat": _chat,
    "twins": _twins,
    "agreement": _agreement,
}
