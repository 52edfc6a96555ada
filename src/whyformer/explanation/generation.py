"""The explanation of a generated text: for each token that was generated, scores of all tokens before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation import units
from whyformer.explanation.displayed import Displayed
from whyformer.explanation.features import Features
from whyformer.explanation.pictured import Pictured
from whyformer.explanation.result import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Generation(Displayed):
    """Scores of one method for every step of a generated text.

    Attributes:
        matrix: ``[T, N]`` on the CPU: row t scores the tokens that step t was made from; those at and behind it are 0,
            special tokens too.
        tokens: N tokens as the vocabulary has them: those an encoder read, if there is one, the prompt or the decoder's
            start, what was generated. pieces: the text of each.
        start: the number of the first generated token. source: how many tokens are the encoder's.
        ids: N numbers of tokens.
        method, settings: registry name and full settings.
        explained: what of each generated token the scores are of, such as "log-probability".
        value: ``[T]`` that number. target, target_names: what was explained of each step, as in an Explanation.
        logits: ``[T, V]`` the model's output for each step; of more than 1,000 tokens ``[T, K]``: the 20 highest and
            those of the tokens that were generated or are explained, the highest first. classes: ``[T, K]`` the
            numbers of these tokens; normalizer: ``[T]`` log Σ exp over the whole vocabulary; None where all are there.
        turns: (role, first token, one after the last) of each message of a conversation, its answer included; that
            which a chat template puts before the first message too.
        special: places of tokens that stand for no text: the tokenizer's special ones, and those that a chat template
            writes around messages. None where they are not known.
        labels: number -> text of the likeliest tokens.
        input, part: what the model's forward calls the tokens that it reads, and the decoder's own where they differ.
        unit: "token"; or "word", "sentence", "turn" of what :meth:`by` made. groups: (first, one after the last) token
            of each such unit.
        seen: of each picture of the prompt, by the name that its part has (``"pixel_values"``), its maps.
        diagnostics: of each step, as in an Explanation. notes: what was done to the prompt, in sentences.
    """

    matrix: Tensor
    tokens: list[str]
    pieces: list[str]
    ids: list[int]
    start: int
    method: str
    settings: dict[str, Any]
    explained: str
    value: Tensor
    target: Tensor
    target_names: list[str]
    logits: Tensor
    source: int = 0
    turns: list[tuple[str, int, int]] = field(default_factory=list)
    special: list[int] | None = None
    labels: dict[int, str] | None = None
    model: str | None = None
    input: str = "input_ids"
    part: str = ""
    unit: str = "token"
    groups: list[Range] | None = None
    seen: dict[str, Pictured] = field(default_factory=dict)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    classes: Tensor | None = None
    normalizer: Tensor | None = None

    # -- reading -----------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Number of steps."""
        return len(self.matrix)

    @property
    def generated(self) -> slice:
        """Which of the tokens were generated."""
        return slice(self.start, len(self.pieces))

    @property
    def prompt(self) -> str:
        """The text before the generated one; of an encoder–decoder, what the encoder read."""
        return "".join(self.pieces[: self.source or self.start])

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.pieces[self.generated])

    def probability(self, step: int) -> float:
        """Of the generated token (or unit) of this step."""
        if self.unit != "token":
            raise InputError("the probability of a token is asked of the tokens, not of what by() made of them")
        own = self._output(self._step(step))
        return own.probability(self.ids[self.start + self._step(step)]) or 0.0

    def candidates(self, step: int, k: int = 5) -> list[tuple[int, str, float, float]]:
        """The k likeliest tokens of a step: (number, text, logit, probability); of a large vocabulary 20 are kept, and
        the generated one."""
        return [(i, text, logit, share or 0.0) for i, text, logit, share in self._output(self._step(step)).top(0, k)]

    def _output(self, t: int) -> Explanation:
        """A step as an Explanation of one token, for what the model says there."""
        facts: dict[str, Any] = {"method": self.method, "settings": self.settings, "target": self.target[t : t + 1]}
        return Explanation(self.matrix[t : t + 1, :1], "token", **facts, labels=self.labels, **self._said(t))

    def _said(self, t: int) -> dict[str, Any]:
        """What the model says at a step, by the names that an Explanation has for it."""
        kept = {n: None if (own := getattr(self, n)) is None else own[t : t + 1] for n in ("classes", "normalizer")}
        activation = "softmax" if self.unit == "token" else "identity"
        return {"logits": self.logits[t : t + 1], "activation": activation, **kept}

    def __getitem__(self, step: int) -> Explanation:
        """The explanation of one step: of the tokens before it, and in parts of their own an encoder's and pictures."""
        t = self._step(step)
        end = self.start + t
        notes = {**(self.diagnostics[t] if self.diagnostics else {}), **({"input": [self.notes]} if self.notes else {})}

        def one(first: int, last: int, name: str, **more: Any) -> Explanation:
            text, offsets = units.joined(self.pieces[first:last])
            special = None if self.special is None else [[i - first for i in self.special if first <= i < last]]
            features = Features([self.tokens[first:last]], [offsets], [text], special=special)
            return Explanation(
                self.matrix[t : t + 1, first:last], "token", self.method, self.settings, self.target[t : t + 1],
                target_names=[self.target_names[t]], features=features, labels=self.labels, model=self.model,
                input=name, **self._said(t), **more,
            )  # fmt: skip

        parts = {self.part: one(self.source, end, self.part)} if self.source else {}
        facts = {"target": self.target[t : t + 1], "labels": self.labels, **self._said(t)}
        parts |= {n: own.at(t, **facts, target_names=[self.target_names[t]]) for n, own in self.seen.items()}
        return one(0, self.source or end, self.input, parts=parts, diagnostics=notes)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[t] for t in range(len(self)))

    def _step(self, step: int) -> int:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of a generated text of {len(self)} {self.unit}s")
        return step % len(self)

    # -- larger units ------------------------------------------------------------------------------------------------
    def span(self, *given: Any, **options: Any) -> Explanation:
        """Where this was: :func:`whyformer.explain_span`, to which the model is given."""
        raise InputError("a span needs the model, which a result does not hold: whyformer.explain_span(g, 0, 1, model)")

    def by(self, unit: str) -> Generation:
        """The same with tokens and steps merged into words, sentences or turns; scores and values are added up.

        A merged step's own tokens are scored too, by the later ones of them. Of log-probabilities the sum of a word's
        rows is what explains the word's log-probability, for every method whose scores are linear in its target
        (gradient × input, all that carry multipliers, so ``attnlrp`` too).

        Special tokens are words and sentences of their own, and belong to the scores of a turn but not to its text.

        Raises:
            InputError: no such unit.
        """
        if unit not in units.UNITS:
            raise InputError(f"by() merges into one of {', '.join(units.UNITS[1:])}, not {unit!r}")
        if self.unit != "token":
            raise InputError(f"these are {self.unit}s already: call by() of the tokens")
        if unit == "token":
            return self
        special = frozenset(self.special or ())
        breaks = {self.source, self.start, *(i for _, a, b in self.turns for i in (a, b) if i < len(self.ids))}
        if unit == "turn":
            listed = [*((a, b) for _, a, b in self.turns if b > a)] or [(0, self.start), (self.start, len(self.ids))]
            merged = _filled(listed, len(self.ids), breaks)
        else:
            breaks |= {i for own in special for i in (own, own + 1) if i < len(self.ids)}
            merged = (units.words_of if unit == "word" else units.sentences_of)(self.pieces, breaks)
        first = next(i for i, (a, _) in enumerate(merged) if a >= self.start)
        steps = [(a - self.start, b - self.start) for a, b in merged[first:]]
        columns = torch.stack(units.unit_scores(self.matrix, (range(a, b) for a, b in merged)), 1)
        value = torch.stack(units.unit_scores(self.value, (range(a, b) for a, b in steps)))
        alone = [i for i, own in enumerate(merged) if special.issuperset(range(*own))]
        texts = [
            "".join(p for n, p in enumerate(self.pieces[a:b], a) if i in alone or n not in special)
            for i, (a, b) in enumerate(merged)
        ]
        at = {a: i for i, (a, _) in enumerate(merged)} | {len(self.ids): len(merged)}
        lasting = ("signed", "class_specific", "identity", "auto")
        claims: list[dict[str, Any]] = [{k: own[k] for k in lasting if k in own} for own in self.diagnostics[:1]]
        roles = {(a, b): role for role, a, b in self.turns} if unit == "turn" else {}
        return replace(
            self,
            matrix=torch.stack([columns[a:b].sum(0) for a, b in steps]), pieces=texts,
            tokens=[roles.get(own, text.strip() or text) for own, text in zip(merged, texts, strict=True)],
            ids=list(range(len(merged))), start=first,
            source=sum(b <= self.source for _, b in merged) if self.source else 0,
            value=value, logits=value[:, None], classes=None, normalizer=None,
            target=torch.zeros(len(steps), dtype=torch.long), labels=None,
            target_names=[f"'{text.strip()}'" for text in texts[first:]],
            turns=[(role, at[a], at[b]) for role, a, b in self.turns],
            special=None if self.special is None else alone, unit=unit, groups=merged,
            diagnostics=[dict(c) for c in claims for _ in steps],
            seen={name: own.merged(steps) for name, own in self.seen.items()},
        )  # fmt: skip

    # -- keeping and showing -----------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON; of the logits the likeliest 20 of each step, and that of
        the generated token."""
        from whyformer.explanation import generation_files

        return generation_files.to_dict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Generation:
        """Read what :meth:`to_dict` gave; ``logits`` are then those of the tokens that it lists.

        Raises:
            InputError: it is no such dictionary; or the prompt had pictures, which it does not hold.
        """
        from whyformer.explanation import generation_files

        return cls(**generation_files.from_dict(facts))

    def save(self, path: str | Path) -> Path:
        """Write one ``.safetensors`` file (tensors, and the rest as JSON in its header); it appears whole or not at
        all."""
        from whyformer.explanation import generation_files

        return generation_files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Generation:
        """Read what :meth:`save` wrote; only :meth:`span`, which needs the model, is not to be had of it."""
        from whyformer.explanation import generation_files

        return cls(**generation_files.load(path))

    def to_html(self, title: str = "whyformer") -> str:
        """A whole HTML document: the text, each word of which can be chosen, and the matrix."""
        from whyformer.show.html import answer

        return answer.page(self, title)

    def __rich__(self) -> RenderableType:
        from whyformer.show import terminal_answer

        return terminal_answer.render(self)

    def __str__(self) -> str:
        from whyformer.show import terminal_answer

        return terminal_answer.plain(self)

    def _repr_html_(self) -> str:
        from whyformer.show.html import answer

        return answer.fragment(self)

    def __repr__(self) -> str:
        return f"Generation({self.method}, {len(self)} {self.unit}s after {self.start}: {self.text!r:.60})"


def _filled(ranges: list[Range], count: int, breaks: set[int]) -> list[Range]:
    """The ranges, and what lies between them."""
    bounds = sorted({0, count, *(n for r in ranges for n in r), *breaks})
    return [(a, b) for a, b in pairwise(bounds) if a < b]
