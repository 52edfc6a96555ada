"""The explanation of a generated text: for each generated token, scores of all tokens before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation import generation_files, units
from whyformer.explanation.display import Displayable
from whyformer.explanation.features import Features
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Generation(Displayable):
    """Scores of one method for every step of a generated text.

    Attributes:
        matrix: ``[T, N]`` on the CPU: row t holds the scores of the tokens before step t, special tokens included; the
            scores of all later tokens are 0.
        tokens: the N tokens in the vocabulary's spelling: the encoder's tokens (if there is an encoder), the prompt or
            the decoder's start token, and the generated tokens.
        pieces: text of each token.
        start: index of the first generated token.
        source: number of tokens that the encoder reads.
        ids: ids of the N tokens.
        method, settings: registry name and full settings.
        explained: the explained quantity of each generated token, such as "log-probability".
        value: ``[T]`` value of that quantity.
        target, target_names: the target of each step, as in an Explanation.
        logits: ``[T, V]`` the model's output for each step. With more than 1,000 tokens, ``[T, K]``: the 20 highest
            logits and those of the generated and the explained tokens, in descending order.
        classes: ``[T, K]`` token ids of ``logits``; None if ``logits`` covers the vocabulary.
        normalizer: ``[T]`` log Σ exp over the vocabulary; None if ``logits`` covers it.
        turns: (role, start, end) token range of each message of a conversation, including the answer and the system
            message of a chat template.
        special: indices of the tokenizer's special tokens and of the tokens that a chat template adds around messages;
            None if unknown.
        labels: token id -> text of the likeliest tokens.
        input: name of the forward argument with the tokens.
        part: name of the argument with the decoder's tokens, if the model has an encoder.
        unit: "token"; "word", "sentence" or "turn" after :meth:`by`.
        groups: (start, end) token range of each unit after :meth:`by`.
        picture_maps: maps of each picture of the prompt, by the name of its part (``"pixel_values"``).
        diagnostics: diagnostics of each step, as in an Explanation.
        notes: sentences on the preparation of the prompt and the choice of generated tokens.
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
    picture_maps: dict[str, PictureScores] = field(default_factory=dict)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    classes: Tensor | None = None
    normalizer: Tensor | None = None

    # -- reading -----------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.matrix)

    @property
    def generated(self) -> slice:
        """The slice of the generated tokens."""
        return slice(self.start, len(self.pieces))

    @property
    def prompt(self) -> str:
        """The text of the prompt; for an encoder-decoder, the text that the encoder read."""
        return "".join(self.pieces[: self.source or self.start])

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.pieces[self.generated])

    def probability(self, step: int) -> float:
        """Return the probability of the generated token of a step by the model's logits, before ``generate`` processes
        them."""
        if self.unit != "token":
            raise InputError("only single tokens have probabilities: call probability() before by()")
        t = self._step(step)
        return self._output(t).probability(self.ids[self.start + t]) or 0.0

    def candidates(self, step: int, k: int = 5) -> list[tuple[int, str, float, float]]:
        """Return (id, text, logit, probability) of the k likeliest tokens of a step.

        Of a large vocabulary, only the 20 likeliest tokens and the generated token are stored.
        """
        return [(i, text, logit, share or 0.0) for i, text, logit, share in self._output(self._step(step)).top(0, k)]

    def _output(self, t: int) -> Explanation:
        """Return a step as an Explanation of a single token, for its logits and probabilities."""
        facts: dict[str, Any] = {"method": self.method, "settings": self.settings, "target": self.target[t : t + 1]}
        return Explanation(self.matrix[t : t + 1, :1], "token", **facts, labels=self.labels, **self._outputs(t))

    def _outputs(self, t: int) -> dict[str, Any]:
        """Return the model's output at a step, as arguments of an Explanation."""
        stored = {n: None if (v := getattr(self, n)) is None else v[t : t + 1] for n in ("classes", "normalizer")}
        activation = "softmax" if self.unit == "token" else "identity"
        return {"logits": self.logits[t : t + 1], "activation": activation, **stored}

    def __getitem__(self, step: int) -> Explanation:
        """Return the explanation of one step: scores of the tokens before it, with pictures and the decoder's tokens in
        separate parts."""
        t = self._step(step)
        end = self.start + t
        notes = {**(self.diagnostics[t] if self.diagnostics else {}), **({"input": [self.notes]} if self.notes else {})}

        def of_range(first: int, last: int, name: str, **more: Any) -> Explanation:
            text, offsets = units.joined(self.pieces[first:last])
            special = None if self.special is None else [[i - first for i in self.special if first <= i < last]]
            features = Features([self.tokens[first:last]], [offsets], [text], special=special)
            return Explanation(
                self.matrix[t : t + 1, first:last], "token", self.method, self.settings, self.target[t : t + 1],
                target_names=[self.target_names[t]], features=features, labels=self.labels, model=self.model,
                input=name, **self._outputs(t), **more,
            )  # fmt: skip

        parts = {self.part: of_range(self.source, end, self.part)} if self.source else {}
        facts = {"target": self.target[t : t + 1], "labels": self.labels, **self._outputs(t)}
        parts |= {n: maps.at(t, **facts, target_names=[self.target_names[t]]) for n, maps in self.picture_maps.items()}
        return of_range(0, self.source or end, self.input, parts=parts, diagnostics=notes)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[t] for t in range(len(self)))

    def _step(self, step: int) -> int:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of a generated text of {len(self)} {self.unit}s")
        return step % len(self)

    # -- larger units ------------------------------------------------------------------------------------------------
    def span(self, *args: Any, **options: Any) -> Explanation:
        """Former name of :func:`whyformer.explain_span`, which also takes the model."""
        raise InputError("a span needs the model, which a result does not hold: whyformer.explain_span(g, 0, 1, model)")

    def by(self, unit: str) -> Generation:
        """Merge tokens and steps into words, sentences or turns, and sum their scores and values.

        In a merged step, later tokens of the unit also score its earlier tokens. If the log-probability is explained,
        the summed rows of a word explain the log-probability of the word, for every method whose scores are linear in
        the target (gradient × input, and all methods that propagate multipliers, such as ``attnlrp``).

        Each special token is a separate word and sentence; adjacent tokens of a chat template, such as those before a
        message, are one. They belong to the scores of a turn, but not to its text.

        Raises:
            InputError: the unit is unknown, or tokens are merged already.
        """
        if unit not in units.UNITS:
            raise InputError(f"by() merges into one of {', '.join(units.UNITS[1:])}, not {unit!r}")
        if self.unit != "token":
            raise InputError(f"these are {self.unit}s already: call by() of the tokens")
        if unit == "token":
            return self
        special = frozenset(self.special or ())
        bounds = {self.source, self.start, *(i for _, a, b in self.turns for i in (a, b) if i < len(self.ids))}
        if unit == "turn":
            turns = [*((a, b) for _, a, b in self.turns if b > a)] or [(0, self.start), (self.start, len(self.ids))]
            merged = units.ranges({i for turn in turns for i in turn} | bounds, len(self.ids))
        else:
            breaks = bounds | {i for n in special for i in (n, n + 1) if i < len(self.ids)}
            merged = (units.words_of if unit == "word" else units.sentences_of)(self.pieces, breaks)
            # tokens of a chat template that continue its text between two contents
            template = {n for n in special if n < self.start and n - 1 in special} - bounds if self.turns else set()
            merged = units.ranges({a for a, _ in merged} - template, len(self.ids))
        first = next(i for i, (a, _) in enumerate(merged) if a >= self.start)
        steps = [(a - self.start, b - self.start) for a, b in merged[first:]]
        columns = torch.stack(units.unit_scores(self.matrix, (range(a, b) for a, b in merged)), 1)
        value = torch.stack(units.unit_scores(self.value, (range(a, b) for a, b in steps)))
        alone = [i for i, unit_range in enumerate(merged) if special.issuperset(range(*unit_range))]
        texts = [
            "".join(p for n, p in enumerate(self.pieces[a:b], a) if i in alone or n not in special)
            for i, (a, b) in enumerate(merged)
        ]
        at = {a: i for i, (a, _) in enumerate(merged)} | {len(self.ids): len(merged)}
        names = ("signed", "class_specific", "identity", "auto")
        claims = [{k: facts[k] for k in names if k in facts} for facts in self.diagnostics[:1]]
        roles = {(a, b): role for role, a, b in self.turns} if unit == "turn" else {}
        return replace(
            self,
            matrix=torch.stack([columns[a:b].sum(0) for a, b in steps]), pieces=texts,
            tokens=[roles.get(r, text.strip() or text) for r, text in zip(merged, texts, strict=True)],
            ids=list(range(len(merged))), start=first,
            source=sum(b <= self.source for _, b in merged) if self.source else 0,
            value=value, logits=value[:, None], classes=None, normalizer=None,
            target=torch.zeros(len(steps), dtype=torch.long), labels=None,
            target_names=[f"'{text.strip()}'" for text in texts[first:]],
            turns=[(role, at[a], at[b]) for role, a, b in self.turns],
            special=None if self.special is None else alone, unit=unit, groups=merged,
            diagnostics=[dict(c) for c in claims for _ in steps],
            picture_maps={name: maps.merged(steps) for name, maps in self.picture_maps.items()},
        )  # fmt: skip

    # -- saving and displaying ---------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return all values except pictures as plain Python values, ready for JSON; of the logits of each step, the 20
        highest and that of the generated token."""
        return generation_files.to_dict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Generation:
        """Restore a generation from the values of :meth:`to_dict`, with the logits that they contain.

        Raises:
            InputError: a value is missing, unknown or invalid, or the prompt had pictures, which are not stored.
        """
        return generation_files.from_dict(cls, facts)

    def save(self, path: str | Path) -> Path:
        """Write a ``.safetensors`` file atomically: the tensors, and all other values as JSON in its header."""
        return generation_files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Generation:
        """Read a file that :meth:`save` wrote; a damaged file or one of another kind raises LoadError."""
        return generation_files.load(cls, path)

    def to_html(self, title: str = "whyformer") -> str:
        """Return an HTML document with the text, whose words can be selected, and the matrix."""
        from whyformer.show.html import answer

        return answer.page(self, title)

    def __rich__(self) -> RenderableType:
        from whyformer.show import terminal_answer

        return terminal_answer.render(self)

    def __str__(self) -> str:
        from whyformer.show import terminal, terminal_answer

        return terminal.printed(terminal_answer.render(self))

    def _repr_html_(self) -> str:
        from whyformer.show.html import answer

        return answer.fragment(self)

    def __repr__(self) -> str:
        return f"Generation({self.method}, {len(self)} {self.unit}s after {self.start}: {self.text!r:.60})"
