"""Explained answers prepared for drawing: messages without special tokens, a scale for each step, strongest words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.explanation import units
from whyformer.show import colours
from whyformer.show.colours import Array, array
from whyformer.show.words import Word, agnostic, method_name, share_of, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation

CANDIDATES = 3
PICTURE = "[picture]"
_COLLAPSED = ("system", "developer")  # roles of messages that are shown closed
_LONG = 6  # words, beyond which such a message is a single column of a matrix


@dataclass(frozen=True)
class Message:
    """A turn of a conversation; for a text without turns the prompt or the answer.

    Attributes:
        label: its role: "System", "User", "Assistant", or else "Prompt" or "Answer".
        first, end: indices of its first piece and after its last.
        text: its pieces joined.
        collapsed: True if it is shown closed, as a system message.
    """

    label: str
    first: int
    end: int
    text: str
    collapsed: bool = False

    @property
    def places(self) -> range:
        """Indices of its pieces."""
        return range(self.first, self.end)


@dataclass(frozen=True, eq=False)
class Conversation:
    """An answer without special tokens, those of a chat template and those that end the answer.

    Attributes:
        whole: the complete answer. g: the part that is shown.
        places: indices in ``whole`` of each piece of ``g``.
        steps: index in ``whole`` of each step of ``g``.
    """

    whole: Generation
    g: Generation
    places: list[list[int]]
    steps: list[int]

    @classmethod
    def of(cls, whole: Generation) -> Conversation:
        """Return the conversation without special tokens, unless prompt or answer has no other tokens."""
        hidden = {i for i in whole.special or () if whole.pieces[i].strip() != PICTURE}
        count, start = len(whole.pieces), whole.start
        prompt = [i for i in range(start) if i not in hidden] or list(range(start))
        steps = [i - start for i in range(start, count) if i not in hidden] or list(range(len(whole)))
        places = [*prompt, *(start + t for t in steps)]
        g = whole if len(places) == count else _picked(whole, places, steps)
        return cls(whole, g, [[i] for i in places], steps)

    # -- messages ------------------------------------------------------------------------------------------------
    @property
    def in_turns(self) -> bool:
        """True if the text is divided into messages, or into the texts of an encoder and a decoder."""
        return bool(self.g.turns or self.g.source)

    @cached_property
    def messages(self) -> list[Message]:
        """All pieces as messages."""
        g, messages = self.g, list[Message]()

        def add(role: str, first: int, end: int) -> None:
            if end > first:
                text, label = "".join(g.pieces[first:end]).strip(), role[:1].upper() + role[1:]
                messages.append(Message(label, first, end, text, role.lower() in _COLLAPSED))

        turns = g.turns or [("prompt", 0, g.source or g.start), ("answer", g.start, len(g.pieces))]
        cursor = 0
        for role, first, end in sorted(turns, key=lambda turn: turn[1:]):
            add("", cursor, first)
            add(role, max(cursor, first), end)
            cursor = max(cursor, end)
        add("", cursor, len(g.pieces))
        return messages

    def compact(self) -> Conversation:
        """Return the conversation with each long system message as a single piece, for a matrix."""
        long = {m.first: m for m in self.messages if m.collapsed and m.end <= self.g.start and len(m.places) > _LONG}
        if not long:
            return self
        inside = {i for m in long.values() for i in m.places[1:]}
        columns = [i for i in range(len(self.g.pieces)) if i not in inside]
        groups = [long[i].places if i in long else range(i, i + 1) for i in columns]
        names = [long[i].label if i in long else self.g.pieces[i] for i in columns]
        merged = _picked(self.g, columns, list(range(len(self.g))))
        for column, total in enumerate(units.unit_scores(self.g.matrix, groups)):
            merged.matrix[:, column] = total
        merged = replace(merged, pieces=names)
        places = [[place for i in group for place in self.places[i]] for group in groups]
        return Conversation(self.whole, merged, places, self.steps)

    # -- colours -------------------------------------------------------------------------------------------------
    @cached_property
    def signed(self) -> bool:
        """True if scores of the answer have a sign."""
        g = self.whole
        diagnostics = (*g.diagnostics, *(picture.first.diagnostics for picture in g.picture_maps.values()))
        known = any(d.get("signed") is True for d in diagnostics)
        return known or any(colours.scale(row).signed for row in array(g.matrix))

    @cached_property
    def matrix(self) -> Array:
        """``[T, N]`` scores."""
        return array(self.g.matrix)

    @cached_property
    def sums(self) -> Array:
        """``[N]`` scores of the prompt for the whole answer (the sum over steps); 0 for pieces of the answer."""
        return np.where(np.arange(len(self.g.pieces)) < self.g.start, self.matrix.sum(0), 0.0)

    @cached_property
    def scales(self) -> list[colours.Scale]:
        """The scale of each step, up to its largest |score| over tokens and patches of pictures, and at least a tenth
        of the largest of all steps: steps, and words beside a picture, with much lower scores are pale.

        The token at which a step is read usually dominates. It does not count for the limit, and is drawn in full
        colour if its score exceeds it.
        """
        rows = [row[: self.g.start + step] for step, row in enumerate(self.matrix)]
        limits = [max(_limit(row, self._read_at(t)), self._largest_patches[1 + t]) for t, row in enumerate(rows)]
        least, scales = max(limits) / 10, []
        for limit, scale in zip(limits, map(colours.scale, rows), strict=True):
            limit = max(limit, least)
            scales.append(colours.Scale(limit, scale.signed, clipped=limit < scale.limit))
        return scales

    @cached_property
    def whole_scale(self) -> colours.Scale:
        """The scale of :attr:`sums`."""
        row = self.sums[: self.g.start]
        return colours.Scale(max(_limit(row, self._read_at(0)), self._largest_patches[0]), colours.scale(row).signed)

    def _read_at(self, step: int) -> bool:
        """Return True if the token before a step, at which the step is read, is shown."""
        at = self.g.start + step
        return at > 0 and self.places[at - 1][-1] == self.places[at][0] - 1

    def scale_of(self, step: int | None) -> colours.Scale:
        """Return the scale of a step, or of the whole answer (None)."""
        return self.whole_scale if step is None else self.scales[step]

    def row(self, step: int | None) -> Array:
        """Return the scores ``[N]`` of a step, or of the whole answer (None)."""
        return self.sums if step is None else self.matrix[step]

    def unit(self, step: int | None) -> Array:
        """Return the scaled scores ``[N]`` (-1 to 1) of a step, or of the whole answer (None)."""
        return self.scale_of(step).unit(self.row(step))

    @cached_property
    def column_units(self) -> Array:
        """``[T, N]`` matrix with each column divided by its largest |score|: the steps for which a token mattered."""
        largest = np.abs(self.matrix).max(0)
        return self.matrix / np.where(largest > 0, largest, 1)

    # -- reasons -------------------------------------------------------------------------------------------------
    @cached_property
    def _words(self) -> list[range]:
        g = self.g
        bounds = {g.source, g.start, *(i for m in self.messages for i in (m.first, m.end))} - {len(g.pieces)}
        return [range(*word) for word in units.words_of(g.pieces, bounds)]

    @cached_property
    def _word_scores(self) -> Array:
        """``[1 + T, words]`` scores of words for the whole answer, and for each step of the words before it."""
        later = np.arange(len(self.g.pieces))[None] >= self.g.start + np.arange(len(self.g))[:, None]
        rows = np.concatenate([self.sums[None], np.where(later, 0, self.matrix)])
        return np.stack(units.unit_scores(rows, self._words), 1)

    def reasons(self, step: int | None, count: int = 4) -> list[Word]:
        """Return the words before a step with the largest |score|, in descending order, then the word at which the
        step is read; for the whole answer (None) the words of the prompt. Units are those of the step's scale."""
        g, scale = self.g, self.scale_of(step)
        end = g.start + (step or 0)
        sums = self._word_scores[0 if step is None else 1 + step]
        reasons = []
        for place, score, unit in zip(self._words, sums.tolist(), scale.unit(sums).tolist(), strict=True):
            if place.start < end:
                text = "".join(g.pieces[place.start : min(place.stop, end)])
                reasons.append(Word(one_line(text.strip() or text), score, unit, (), tuple(place), "", self.signed))
        last, others = (reasons[-1:], reasons[:-1]) if step is not None and self._read_at(step) else ([], reasons)
        best = sorted((w for w in others if w.score), key=lambda w: -abs(w.score))[:count]
        return best + [w for w in last if w.score and len(best) < count]

    @cached_property
    def _sizes(self) -> Array:
        """``[1 + T, N]`` |scores| of all pieces for the whole answer, and for each step."""
        rows = array(self.whole.matrix)[self.steps]
        sums = np.where(np.arange(rows.shape[1]) < self.whole.start, rows.sum(0), 0.0)
        return np.abs(np.concatenate([sums[None], rows]))

    @cached_property
    def _picture_scores(self) -> list[Array]:
        """``[1 + T, ...]`` scores of each picture for the whole answer, and for each step."""
        maps = [array(picture.scores) for picture in self.g.picture_maps.values()]
        return [np.concatenate([m.sum(0)[None], m]) for m in maps]

    @cached_property
    def _picture_sizes(self) -> Array:
        """``[1 + T]`` Σ |score| of all pictures."""
        rows = [np.abs(m).reshape(len(m), -1).sum(1) for m in self._picture_scores]
        return np.sum(rows or np.zeros((1, 1 + len(self.g))), 0)

    @cached_property
    def _largest_patches(self) -> list[float]:
        """``[1 + T]`` largest |score| of a patch of any picture; scores of pixels are summed over patches."""
        sums = [colours.patch_sums(m) if m.ndim > 2 else m for m in self._picture_scores]
        rows = [np.abs(m).reshape(len(m), -1).max(1) for m in sums]
        return list(np.max(rows or np.zeros((1, 1 + len(self.g))), 0).tolist())

    def _share(self, step: int | None, size: float) -> float:
        row = 0 if step is None else 1 + step
        return size / (float(self._sizes[row].sum() + self._picture_sizes[row]) or 1.0)

    def share(self, message: Message, step: int | None = None) -> float:
        """Return the share (0 to 1) of Σ |score| of a step, or of the whole answer, on a message."""
        sizes = self._sizes[0 if step is None else 1 + step][[p for i in message.places for p in self.places[i]]]
        return self._share(step, float(sizes.sum()))

    def picture_share(self, step: int | None) -> float:
        """Return the share (0 to 1) of Σ |score| of a step, or of the whole answer, on the pictures of the prompt."""
        return self._share(step, float(self._picture_sizes[0 if step is None else 1 + step]))

    def picture(self, name: str, step: int | None) -> Explanation:
        """Return the map of a picture for a step, or for the whole answer (None)."""
        if step is None:
            return self.g.picture_maps[name].merged([(0, len(self.g))]).at(0)
        return self.g[step].part(name)

    def picture_note(self, step: int | None) -> str:
        """Return the share of a step's scores on pictures, and the pixel of the largest score on each, as text."""
        if not self.g.picture_maps:
            return ""
        places = [place for name in self.g.picture_maps if (place := _place(self.picture(name, step)))]
        return f"picture {100 * self.picture_share(step):.0f} %" + (f" ({', '.join(places)})" if places else "")

    def special_note(self, step: int | None) -> str:
        """Return the share of a step's scores on special tokens, ``special tokens 12 %``; empty if it is 0."""
        hidden = list(set(range(len(self.whole.pieces))).difference(*self.places))
        size = float(self._sizes[0 if step is None else 1 + step][hidden].sum())
        identity = any(d.get("identity") is True for d in self.whole.diagnostics)
        name = "template tokens" if self.whole.turns else "special tokens"
        return share_of(name, self._share(step, size), identity) if size else ""


def _limit(row: Array, read: bool) -> float:
    """Return the largest |score| of a row, without its last token if the step is read there."""
    return (colours.scale(row[:-1]).limit if read else 0.0) or colours.scale(row).limit


def _picked(g: Generation, places: list[int], steps: list[int]) -> Generation:
    """Return the answer with these pieces and steps alone."""

    def at(bound: int) -> int:
        return sum(i < bound for i in places)

    rows = ("value", "target", "logits", "classes", "normalizer")
    columns = ("tokens", "pieces", "ids", "groups")
    changed: dict[str, Any] = {n: v[steps] for n in rows if (v := getattr(g, n)) is not None}
    changed |= {n: [v[i] for i in places] for n in columns if (v := getattr(g, n)) is not None}
    return replace(
        g, matrix=g.matrix[steps][:, places], start=at(g.start), source=at(g.source), special=None,
        target_names=[g.target_names[t] for t in steps], turns=[(role, at(a), at(b)) for role, a, b in g.turns],
        picture_maps={name: replace(maps, scores=maps.scores[steps]) for name, maps in g.picture_maps.items()},
        diagnostics=[g.diagnostics[t] for t in steps] if g.diagnostics else [], **changed,
    )  # fmt: skip


def conversation(g: Generation, most: int | None = None) -> Conversation:
    """Return the conversation in tokens; if it has more than ``most`` pieces, in words, sentences or turns."""
    g = _with_pictures(g)
    talk = Conversation.of(g)
    for wider in ("word", "sentence", "turn"):
        if most is None or len(talk.g.pieces) <= most or g.unit != "token":
            break
        merged = Conversation.of(g.by(wider))
        if len(merged.g.pieces) <= most or wider == "turn":
            return merged
    return talk


def _with_pictures(g: Generation) -> Generation:
    """Return the answer with each run of placeholder tokens of a picture as a single piece."""
    if not g.picture_maps:
        return g
    unscored = (array(g.matrix) == 0).all(0)

    def key(i: int) -> tuple[object, ...]:
        return (g.pieces[i], i < g.source) if unscored[i] and i < g.start else (i,)

    runs = [list(places) for _, places in groupby(range(len(g.pieces)), key)]
    at = {run[0]: place for place, run in enumerate(runs)}
    merged = _picked(g, list(at), list(range(len(g))))
    names = [f" {PICTURE}" if run[1:] else g.pieces[run[0]] for run in runs]
    return replace(merged, pieces=names, special=None if g.special is None else [at[i] for i in g.special if i in at])


def _place(e: Explanation) -> str:
    if e.geometry is None or not bool(e.scores.any()):
        return ""
    placed = np.nan_to_num(array(e.placed()))
    row, column = np.unravel_index(int(np.abs(placed).argmax()), placed.shape)
    return f"most at x {column}, y {row}"


def alternatives(g: Generation, step: int) -> list[tuple[str, float]]:
    """Return (text, probability) of the likeliest other tokens at a step."""
    if g.unit != "token":
        return []
    token = g.ids[g.start + step]
    return [(name, share) for i, name, _, share in g.candidates(step, CANDIDATES + 1) if i != token][:CANDIDATES]


def one_line(piece: str) -> str:
    """Return the text of a token on a single line, with symbols for line breaks and tabs."""
    return visible(piece.replace("\n", "⏎").replace("\t", "⇥"))


def question(talk: Conversation) -> str:
    """Return the question that the scores answer, ``Why “Paris”?``; "any token" for class-agnostic scores."""
    g = talk.g
    answer = " ".join("".join(g.pieces[g.start :]).split())
    return visible(f"any {g.unit}" if agnostic(g[0]) else f"Why “{answer}”?")


def source(g: Generation) -> str:
    """Return the method and the explained quantity: ``attnlrp · log-probability of each token``."""
    number = f"any {g.unit}" if agnostic(g[0]) else f"{g.explained} of each {g.unit}"
    return f"{method_name(g[0])} · {number}"


def remarks(g: Generation) -> list[str]:
    """Return notes on the prompt and warnings of steps, safe to print; warnings that differ in numbers alone once."""
    groups: dict[str, list[str]] = {}
    for line in [line for d in g.diagnostics for warnings in d.get("warnings") or () for line in _lines(warnings)]:
        groups.setdefault(re.sub(r"\d+", "", line), []).append(line)
    warned = [f"warning: {w[0]}" + (f" ({len(w)} of {len(g)} steps)" if w[1:] else "") for w in groups.values()]
    return [visible(line) for line in [*g.notes, *warned]]


def _lines(warnings: object) -> list[str]:
    return [warnings] if isinstance(warnings, str) else [str(w) for w in warnings] if isinstance(warnings, list) else []
