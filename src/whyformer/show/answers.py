"""A generated text as it is shown: its messages without special tokens, a scale for each step, the strongest words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.explanation import units
from whyformer.show import colours
from whyformer.show.colours import Array, array
from whyformer.show.words import method_name, share_of, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation

CANDIDATES = 3
PICTURE = "[picture]"
_FOLDED = ("system", "developer")  # roles whose messages are the same for many questions
_LONG = 6  # words, beyond which such a message is one column of a matrix


@dataclass(frozen=True)
class TokenReason:
    """A word before a step, with its score and the score on the step's scale (-1 to 1)."""

    text: str
    score: float
    unit: float


@dataclass(frozen=True)
class Message:
    """A turn of a conversation; of a text without turns the prompt or the answer.

    Attributes:
        label: whose it is: "System", "User", "Assistant"; else "Prompt" or "Answer".
        first, end: its first piece, and the one after its last.
        text: the whole of it.
        folded: whether it is shown closed: a system message.
    """

    label: str
    first: int
    end: int
    text: str
    folded: bool = False

    @property
    def places(self) -> range:
        """Its pieces."""
        return range(self.first, self.end)


@dataclass(frozen=True, eq=False)
class Conversation:
    """An answer as it is shown: special tokens and those of a chat template left out, also those that end the answer.

    Every figure that belongs to a step is computed once.

    Attributes:
        whole: the complete answer. g: the part of it that is shown.
        places: of each piece of ``g`` its places in ``whole``.
        steps: of each step of ``g`` its number in ``whole``.
    """

    whole: Generation
    g: Generation
    places: list[list[int]]
    steps: list[int]

    @classmethod
    def of(cls, whole: Generation) -> Conversation:
        """Without special tokens, unless nothing else was written, or asked."""
        hidden = {i for i in whole.special or () if whole.pieces[i].strip() != PICTURE}
        count, start = len(whole.pieces), whole.start
        asked = [i for i in range(start) if i not in hidden] or list(range(start))
        steps = [i - start for i in range(start, count) if i not in hidden] or list(range(len(whole)))
        places = [*asked, *(start + t for t in steps)]
        shown = whole if len(places) == count else _picked(whole, places, steps)
        return cls(whole, shown, [[i] for i in places], steps)

    # -- messages ------------------------------------------------------------------------------------------------
    @property
    def in_turns(self) -> bool:
        """Whether prompt and answer are set apart: as messages, or as the texts of an encoder and a decoder."""
        return bool(self.g.turns or self.g.source)

    @cached_property
    def messages(self) -> list[Message]:
        """All pieces, in messages."""
        g, made = self.g, list[Message]()

        def add(role: str, first: int, end: int) -> None:
            if end > first:
                text, label = "".join(g.pieces[first:end]).strip(), role[:1].upper() + role[1:]
                made.append(Message(label, first, end, text, role.lower() in _FOLDED))

        turns = g.turns or [("prompt", 0, g.source or g.start), ("answer", g.start, len(g.pieces))]
        cursor = 0
        for role, first, end in sorted(turns, key=lambda turn: turn[1:]):
            add("", cursor, first)
            add(role, max(cursor, first), end)
            cursor = max(cursor, end)
        add("", cursor, len(g.pieces))
        return made

    def narrow(self) -> Conversation:
        """The same with each long system message as one piece, for a matrix."""
        long = {m.first: m for m in self.messages if m.folded and m.end <= self.g.start and len(m.places) > _LONG}
        if not long:
            return self
        inside = {i for m in long.values() for i in m.places[1:]}
        kept = [i for i in range(len(self.g.pieces)) if i not in inside]
        groups = [long[i].places if i in long else range(i, i + 1) for i in kept]
        names = [long[i].label if i in long else self.g.pieces[i] for i in kept]
        merged = _picked(self.g, kept, list(range(len(self.g))))
        for column, total in enumerate(units.unit_scores(self.g.matrix, groups)):
            merged.matrix[:, column] = total
        merged = replace(merged, pieces=names)
        places = [[place for i in own for place in self.places[i]] for own in groups]
        return Conversation(self.whole, merged, places, self.steps)

    # -- colours -------------------------------------------------------------------------------------------------
    @cached_property
    def signed(self) -> bool:
        """Whether scores of this answer may speak against what was written: then their colours are two."""
        g = self.whole
        noted = (*g.diagnostics, *(one.first.diagnostics for one in g.seen.values()))
        known = any(own.get("signed") is True for own in noted)
        return known or any(colours.scale(row).signed for row in array(g.matrix))

    @cached_property
    def matrix(self) -> Array:
        """``[T, N]`` the scores."""
        return array(self.g.matrix)

    @cached_property
    def sums(self) -> Array:
        """``[N]`` scores of the prompt's pieces for the whole answer, the sum over its steps; 0 at all others."""
        return np.where(np.arange(len(self.g.pieces)) < self.g.start, self.matrix.sum(0), 0.0)

    @cached_property
    def scales(self) -> list[colours.Scale]:
        """The scale of each step: up to its largest |score|, or a tenth of the largest of all steps if that is more,
        so that a step whose scores are next to nothing is pale. Patches of pictures count like tokens, so that words
        are pale beside a picture that mattered more.

        The token at which the step is read usually dominates. It is left out of the limit, and drawn in full colour
        where it lies beyond.
        """
        rows = [row[: self.g.start + step] for step, row in enumerate(self.matrix)]
        limits = [max(_limit(row, self._read_at(step)), self._most_seen[1 + step]) for step, row in enumerate(rows)]
        least, whole = max(limits) / 10, [colours.scale(row) for row in rows]
        found = [(max(limit, least), one) for limit, one in zip(limits, whole, strict=True)]
        return [colours.Scale(limit, one.signed, clipped=limit < one.limit) for limit, one in found]

    @cached_property
    def whole_scale(self) -> colours.Scale:
        """That of :attr:`sums`."""
        row = self.sums[: self.g.start]
        return colours.Scale(max(_limit(row, self._read_at(0)), self._most_seen[0]), colours.scale(row).signed)

    def _read_at(self, step: int) -> bool:
        """Whether the token just before a step, at which it is read, is shown."""
        at = self.g.start + step
        return at > 0 and self.places[at - 1][-1] == self.places[at][0] - 1

    def scale_of(self, step: int | None) -> colours.Scale:
        """The scale of a step; None for the whole answer."""
        return self.whole_scale if step is None else self.scales[step]

    def row(self, step: int | None) -> Array:
        """``[N]`` scores of a step; None for the whole answer."""
        return self.sums if step is None else self.matrix[step]

    def unit(self, step: int | None) -> Array:
        """``[N]`` scores of a step on its scale, -1 to 1; None for the whole answer."""
        return self.scale_of(step).unit(self.row(step))

    @cached_property
    def served(self) -> Array:
        """``[T, N]`` for each token the steps that it served: the matrix with each column by its largest |score|."""
        largest = np.abs(self.matrix).max(0)
        return self.matrix / np.where(largest > 0, largest, 1)

    # -- reasons -------------------------------------------------------------------------------------------------
    @cached_property
    def _words(self) -> list[range]:
        g = self.g
        bounds = {g.source, g.start, *(i for m in self.messages for i in (m.first, m.end))} - {len(g.pieces)}
        return [range(*own) for own in units.words_of(g.pieces, bounds)]

    @cached_property
    def _word_scores(self) -> Array:
        """``[1 + T, words]`` of the whole answer, and of each step those of the pieces before it."""
        later = np.arange(len(self.g.pieces))[None] >= self.g.start + np.arange(len(self.g))[:, None]
        rows = np.concatenate([self.sums[None], np.where(later, 0, self.matrix)])
        return np.stack(units.unit_scores(rows, self._words), 1)

    def reasons(self, step: int | None, count: int = 4) -> list[TokenReason]:
        """The words before a step with the largest |score|, the largest first; the word at which it is read comes
        last. Of the whole answer (None) those of the prompt, by size alone."""
        g, scale = self.g, self.scale_of(step)
        end = g.start + (step or 0)
        sums = self._word_scores[0 if step is None else 1 + step]
        texts = ["".join(g.pieces[w.start : min(w.stop, end)]) for w in self._words if w.start < end]
        found = [
            TokenReason(shown(text.strip() or text), score, unit)
            for text, score, unit in zip(texts, sums.tolist(), scale.unit(sums).tolist(), strict=False)
        ]
        last, others = (found[-1:], found[:-1]) if step is not None and self._read_at(step) else ([], found)
        best = sorted((w for w in others if w.score), key=lambda w: -abs(w.score))[:count]
        return best + [w for w in last if w.score and len(best) < count]

    @cached_property
    def _sizes(self) -> Array:
        """``[1 + T, N of all pieces]`` |scores| of the whole answer, and of each step."""
        rows = array(self.whole.matrix)[self.steps]
        asked = np.where(np.arange(rows.shape[1]) < self.whole.start, rows.sum(0), 0.0)
        return np.abs(np.concatenate([asked[None], rows]))

    @cached_property
    def _seen(self) -> list[Array]:
        """``[1 + T, ...]`` |scores| of each picture, for the whole answer and for each step."""
        of = [array(own.scores) for own in self.g.seen.values()]
        return [np.abs(np.concatenate([own.sum(0)[None], own])) for own in of]

    @cached_property
    def _seen_sizes(self) -> Array:
        """``[1 + T]`` Σ |score| of the pictures."""
        rows = [own.reshape(len(own), -1).sum(1) for own in self._seen]
        return np.sum(rows or np.zeros((1, 1 + len(self.g))), 0)

    @cached_property
    def _most_seen(self) -> list[float]:
        """``[1 + T]`` largest |score| of a patch of the pictures; scores of pixels are summed over patches."""
        rows = [_in_patches(own).reshape(len(own), -1).max(1) for own in self._seen]
        return list(np.max(rows or np.zeros((1, 1 + len(self.g))), 0).tolist())

    def _share(self, step: int | None, held: float) -> float:
        row = 0 if step is None else 1 + step
        return held / (float(self._sizes[row].sum() + self._seen_sizes[row]) or 1.0)

    def share(self, message: Message, step: int | None = None) -> float:
        """How much of all |score| of a step, or of the whole answer, lies on a message, 0 to 1."""
        held = self._sizes[0 if step is None else 1 + step][[p for i in message.places for p in self.places[i]]]
        return self._share(step, float(held.sum()))

    def share_seen(self, step: int | None) -> float:
        """How much of all |score| of a step, or of the whole answer, lies on the pictures of the prompt, 0 to 1."""
        return self._share(step, float(self._seen_sizes[0 if step is None else 1 + step]))

    def picture(self, name: str, step: int | None) -> Explanation:
        """The map of a picture for a step, or for the whole answer."""
        if step is None:
            return self.g.seen[name].merged([(0, len(self.g))]).at(0)
        return self.g[step].part(name)

    def seen(self, step: int | None) -> str:
        """How much of a step's scores is on the pictures, and where on each the largest lies, in its own pixels."""
        if not self.g.seen:
            return ""
        places = [place for name in self.g.seen if (place := _place(self.picture(name, step)))]
        return f"picture {100 * self.share_seen(step):.0f} %" + (f" ({', '.join(places)})" if places else "")

    def aside(self, step: int | None) -> str:
        """How much of a step's scores is on special tokens, as ``special tokens 12 %``; nothing where none is."""
        hidden = list(set(range(len(self.whole.pieces))).difference(*self.places))
        held = float(self._sizes[0 if step is None else 1 + step][hidden].sum())
        identity = any(own.get("identity") is True for own in self.whole.diagnostics)
        name = "template tokens" if self.whole.turns else "special tokens"
        return share_of(name, self._share(step, held), identity) if held else ""


def _in_patches(maps: Array) -> Array:
    """Sum maps ``[..., H, W]`` of more than 32 pixels along an axis over 16 patches along it."""
    for axis in (-2, -1) if maps.ndim > 2 else ():
        if (size := maps.shape[axis]) > 32:
            maps = np.add.reduceat(maps, range(0, size, math.ceil(size / 16)), axis)
    return maps


def _limit(row: Array, read: bool) -> float:
    """The largest |score| of a row, without that of its last token where it is read there."""
    return (colours.scale(row[:-1]).limit if read else 0.0) or colours.scale(row).limit


def _picked(g: Generation, places: list[int], steps: list[int]) -> Generation:
    """Some of its pieces and steps."""

    def at(bound: int) -> int:
        return sum(i < bound for i in places)

    rows = ("value", "target", "logits", "classes", "normalizer")
    columns = ("tokens", "pieces", "ids", "groups")
    changed: dict[str, Any] = {n: own[steps] for n in rows if (own := getattr(g, n)) is not None}
    changed |= {n: [own[i] for i in places] for n in columns if (own := getattr(g, n)) is not None}
    return replace(
        g, matrix=g.matrix[steps][:, places], start=at(g.start), source=at(g.source), special=None,
        target_names=[g.target_names[t] for t in steps], turns=[(role, at(a), at(b)) for role, a, b in g.turns],
        seen={name: replace(own, scores=own.scores[steps]) for name, own in g.seen.items()},
        diagnostics=[g.diagnostics[t] for t in steps] if g.diagnostics else [], **changed,
    )  # fmt: skip


def conversation(g: Generation, most: int | None = None) -> Conversation:
    """The answer in tokens; where these and those before them are more than ``most``, in words, sentences or turns."""
    g = _with_pictures(g)
    made = Conversation.of(g)
    for wider in ("word", "sentence", "turn"):
        if most is None or len(made.g.pieces) <= most or g.unit != "token":
            break
        merged = Conversation.of(g.by(wider))
        if len(merged.g.pieces) <= most or wider == "turn":
            return merged
    return made


def _with_pictures(g: Generation) -> Generation:
    """The same with each run of tokens that stand for a picture as one: what they have of scores is the picture's."""
    if not g.seen:
        return g
    silent = (array(g.matrix) == 0).all(0)

    def key(i: int) -> tuple[object, ...]:
        return (g.pieces[i], i < g.source) if silent[i] and i < g.start else (i,)

    runs = [list(places) for _, places in groupby(range(len(g.pieces)), key)]
    at = {own[0]: place for place, own in enumerate(runs)}
    made = _picked(g, list(at), list(range(len(g))))
    names = [f" {PICTURE}" if own[1:] else g.pieces[own[0]] for own in runs]
    return replace(made, pieces=names, special=None if g.special is None else [at[i] for i in g.special if i in at])


def _place(e: Explanation) -> str:
    if e.geometry is None or not bool(e.scores.any()):
        return ""
    placed = np.nan_to_num(array(e.placed()))
    row, column = np.unravel_index(int(np.abs(placed).argmax()), placed.shape)
    return f"most at x {column}, y {row}"


def others(g: Generation, step: int) -> list[tuple[str, float]]:
    """(text, probability) of the likeliest tokens that were not written at a step."""
    if g.unit != "token":
        return []
    token = g.ids[g.start + step]
    return [(name, share) for i, name, _, share in g.candidates(step, CANDIDATES + 1) if i != token][:CANDIDATES]


def shown(piece: str) -> str:
    """A token's text with line breaks and tabs made visible, for one line."""
    return visible(piece.replace("\n", "⏎").replace("\t", "⇥"))


def question(talk: Conversation) -> str:
    """The question that the scores answer, ``Why “Paris”?``; "any token" if they do not depend on what was written."""
    g = talk.g
    written = " ".join("".join(g.pieces[g.start :]).split())
    return visible(f"any {g.unit}" if agnostic(g) else f"Why “{written}”?")


def source(g: Generation) -> str:
    """The method, and the number that the scores are of: ``attnlrp · log-probability of each token``."""
    return method_name(g[0]) + ("" if agnostic(g) else f" · {g.explained} of each {g.unit}")


def agnostic(g: Generation) -> bool:
    """Whether the scores do not depend on which token was written."""
    return bool(g.diagnostics) and all(own.get("class_specific") is False for own in g.diagnostics)


def remarks(g: Generation) -> list[str]:
    """Notes on the prompt and warnings of steps, safe to print; those that differ by numbers alone once."""
    warned = [line for own in g.diagnostics for one in own.get("warnings", ()) for line in _lines(one)]
    alike: dict[str, list[str]] = {}
    for line in warned:
        alike.setdefault(re.sub(r"\d+", "", line), []).append(line)
    said = [f"warning: {own[0]}" + (f" ({len(own)} of {len(g)} steps)" if own[1:] else "") for own in alike.values()]
    return [visible(line) for line in [*g.notes, *said]]


def _lines(warnings: object) -> list[str]:
    return [warnings] if isinstance(warnings, str) else [str(w) for w in warnings] if isinstance(warnings, list) else []
