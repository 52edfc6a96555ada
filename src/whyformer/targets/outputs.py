"""Targets over a model's raw output: each reads one row ``[B, C]`` per sample and selects a number of that row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.models.kinds import is_language_model, is_row_per_token
from whyformer.models.output import Output
from whyformer.models.readout import refusal

Number = int | Sequence[int]
OF = {"logit": "logit", "log_probability": "log-probability", "probability": "probability"}
"""Value of ``Token.of`` -> its name in text."""


class OutputTarget:
    """Base class of targets over the raw output: frozen dataclasses that read a row of it.

    Attributes:
        within: name of the field that holds the target within the row; "" if the row is the value itself.
    """

    within: ClassVar[str] = ""

    @property
    def target(self) -> Any:
        """The target within the row."""
        return getattr(self, self.within) if self.within else 0

    def about(self, target: Any) -> Self:
        """Return a copy with another target within the row."""
        return replace(self, **{self.within: target}) if self.within else self  # type: ignore[type-var]

    def read(self, output: Output) -> Tensor:
        """Return the row ``[B, C]`` of an output."""
        raise NotImplementedError

    def where(self) -> str:
        """Describe the place of the row in the output."""
        raise NotImplementedError


@dataclass(frozen=True)
class Token(OutputTarget):
    """z[p, t]: the logit of a token (or class) at a position, of logits ``[B, N, V]``, or ``[B, N]`` (one per token).

    For masked words, token classification, any position of a language model (of the decoder's tokens if it has a
    decoder) and the frames of a sound. Reads the row ``[B, V]`` at that position.

    Args:
        position: index among the real tokens of each sample, special tokens included, from 0; −1 is the last. Or a
            list of one per sample.
        token: id or text of one token (text needs the tokenizer passed to ``explain``); for token classification, index
            or name of a class. Or a list of one per sample; or a target over the row, such as ``Contrast(a, b)``.
            None: the likeliest. A text of several tokens after the last position of a language model is explained as
            a span, by its log-probability, and the result has a note of it.
        of: the quantity to explain: "logit", "log_probability" or "probability".

    Raises:
        InputError: ``of`` is unknown; when the output is read: there is no such position or token.
    """

    within = "token"
    position: Number
    token: Any = None
    of: str = "logit"

    def __post_init__(self) -> None:
        if not isinstance(self.of, str) or self.of not in OF:
            raise InputError(f"Token: of must be one of {', '.join(map(repr, OF))}, not {self.of!r}")

    def read(self, output: Output) -> Tensor:
        logits = output.logits if output.logits is not None else output.named.get("prediction_logits")
        dim = 0 if logits is None else logits.dim()
        of_tokens = logits is not None and (dim == 3 or (dim == 2 and is_row_per_token(output, logits)))
        if logits is None or not of_tokens or output.of_queries:
            raise refusal(output, "has no logits of single tokens")
        at = output.places(self.position, logits.shape[1]).to(logits.device)
        rows = logits[torch.arange(len(logits), device=logits.device), at]
        return rows if rows.dim() == 2 else rows[:, None]

    def where(self) -> str:
        return f"at position {self.position}" + ("" if self.of == "logit" else f" ({OF[self.of]})")


@dataclass(frozen=True)
class Span(OutputTarget):
    """The tokens from one position to another, both included; positions as for :class:`Token`.

    For question answering: the start's logit + the end's logit. For a language model: Σ log softmax(z[i − 1])[token i]
    over the tokens i of the span, its log-probability after the tokens before it (so ``start`` is at least 1; positions
    are in the decoder's tokens if the model has a decoder). Reads this value as a row ``[B, 1]``.

    Raises:
        InputError: when the output is read: a position is outside the tokens, or the end lies before the start.
    """

    start: Number
    end: Number
    def read(self, output: Output) -> Tensor:
        answers = "start_logits" in output.named and "end_logits" in output.named
        first = output.named["start_logits"] if answers else output.logits
        if first is None or (not answers and (first.dim() != 3 or not is_language_model(output))):
            raise refusal(output, "is from neither a question-answering model nor a language model")
        start, end = (output.places(p, first.shape[1]).to(first.device) for p in (self.start, self.end))
        if bool((end < start).any()):
            raise InputError(f"the span ends at {self.end}, before its start at {self.start}")
        rows = torch.arange(len(first), device=first.device)
        if answers:
            return (first[rows, start] + output.named["end_logits"][rows, end])[:, None]
        ids = output.tokens[1] if output.tokens is not None else None
        if ids is None or ids.dim() != 2 or ids.shape[1] != first.shape[1]:
            raise refusal(output, "is not over the input's tokens, so a span has no probability")
        if bool((start < 1).any()):
            raise InputError("a span must start at 1 or later: no token precedes the first one to predict it")
        scores = first[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None].to(first.device))[..., 0]
        place = torch.arange(1, first.shape[1], device=first.device)
        within = (place >= start[:, None]) & (place <= end[:, None])
        return torch.where(within, scores, 0).sum(1, keepdim=True)

    def where(self) -> str:
        return f"span {self.start} to {self.end}"


@dataclass(frozen=True)
class Query(OutputTarget):
    """z[q, c]: the logit of a class at a query of a detector (DETR, YOLOS), ``[B, Q, C]``; reads the row ``[B, C]``.

    Args:
        index: the query, from 0, or a list of one per sample. None: in each sample, the query with the highest logit
            of the class.
        label: index or name of the class, a list of one per sample, or a target over the row. None: the likeliest,
            which may be the last, "no object".

    Raises:
        InputError: both are None; when the output is read: there is no such query or class.
    """

    within = "label"
    index: Number | None
    label: Any = None

    def __post_init__(self) -> None:
        if self.index is None and (self.label is None or callable(self.label)):
            raise InputError("Query(None, class) is the best query of a class: pass the class, or the query's index")

    def read(self, output: Output) -> Tensor:
        names = ("class_queries_logits", "pred_logits")
        logits = next((output.named[n] for n in names if n in output.named), output.logits)
        of_tokens = output.tokens is not None and not output.of_queries
        if logits is None or logits.dim() != 3 or of_tokens:
            raise refusal(output, "has no logits of queries")
        rows = torch.arange(len(logits), device=logits.device)
        if self.index is None:
            classes = _indices("class", self.label, output, logits, -1)
            return logits[rows, logits[rows, :, classes].argmax(-1)]
        return logits[rows, _indices("query", self.index, output, logits, 1)]

    def where(self) -> str:
        return "at its best query" if self.index is None else f"at query {self.index}"


@dataclass(frozen=True)
class Pixel(OutputTarget):
    """z[c, row, column] of a dense output ``[B, C, h, w]`` (segmentation) or ``[B, h, w]`` (depth, without classes).

    Reads the row ``[B, C]`` at that pixel of the output, which is often coarser than the picture (a quarter of its size
    in SegFormer).

    Args:
        row, column: from 0 at the top left of the output, or a list of one per sample.
        label: index or name of the class, a list of one per sample, or a target over the row. None: the likeliest.

    Raises:
        InputError: when the output is read: there is no such pixel or class.
    """

    within = "label"
    row: Number
    column: Number
    label: Any = None

    def read(self, output: Output) -> Tensor:
        dense = output.dense if output.depth is None else output.depth[:, None]
        if dense is None:
            raise refusal(output, "has no value per pixel and class")
        line, column = _indices("row", self.row, output, dense, 2), _indices("column", self.column, output, dense, 3)
        return dense[torch.arange(len(dense), device=dense.device), :, line, column]

    def where(self) -> str:
        return f"at row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Similarity(OutputTarget):
    """The similarity of each picture and its text in a dual-encoder model (CLIP, SigLIP): the diagonal of its
    ``logits_per_image``, as a row ``[B, 1]``. Picture i and text i form one sample. So for videos and sounds
    (``logits_per_video``, ``logits_per_audio``).

    Raises:
        InputError: when the output is read: the numbers of pictures and texts differ.
    """

    def read(self, output: Output) -> Tensor:
        table = output.named.get(output.compared)
        if table is None:
            raise refusal(output, "has no similarities of pictures and texts")
        if table.shape[0] != table.shape[1]:
            raise InputError(
                f"Similarity() needs one text for each picture, and these are {table.shape[0]} pictures and "
                f"{table.shape[1]} texts: pass pairs, or the index of a text as the target"
            )
        return table.diagonal()[:, None]

    def where(self) -> str:
        return "similarity to the text"


def _indices(name: str, value: Any, output: Output, values: Tensor, axis: int) -> Tensor:
    """Return ``[B]`` the index along an axis of ``values`` that a target gives for each row; raise if it is outside."""
    indices, count = output.by_row(value).to(values.device), values.shape[axis]
    for index in indices.tolist():
        if not 0 <= index < count:
            raise InputError(f"{name} {index} is outside the output, whose indices are 0 to {count - 1}")
    return indices
