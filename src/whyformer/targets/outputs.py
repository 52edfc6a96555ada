"""Targets over a model's raw output: each reads one row ``[B, C]`` off it and says which number of that is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.models.kinds import is_language_model, one_a_token
from whyformer.models.output import Output
from whyformer.models.readout import refusal

Number = int | Sequence[int]
OF = {"logit": "logit", "log_probability": "log-probability", "probability": "probability"}
"""What of a token may be explained, and in words."""


@dataclass(frozen=True)
class Token:
    """z[p, t]: the logit of a token (or class) at a position; for ``[B, N, V]`` logits, or ``[B, N]`` of one a token.

    Masked words, classes of tokens, any position of a language model (of the decoder's tokens, where there is one), the
    frames of a sound. It reads the row ``[B, V]`` at that position.

    Args:
        position: among the real tokens of each sample, special ones included, from 0; −1 is the last. Or one a sample.
        token: an id or the text of one token (with the tokenizer given to ``explain``), for the classes of tokens an
            index or a name; or one a sample; or a target over the row, such as ``Contrast(a, b)``. None: the likeliest.
            A text of several tokens behind the last position of a language model is taken as a span: what is explained
            is its log-probability, and the result says so.
        of: what of that token: "logit", "log_probability" or "probability".

    Raises:
        InputError: when it is read: there is no such position or token.
    """

    position: Number
    token: Any = None
    of: str = "logit"

    def __post_init__(self) -> None:
        if not isinstance(self.of, str) or self.of not in OF:
            raise InputError(f"Token: of is one of {', '.join(map(repr, OF))}, not {self.of!r}")

    @property
    def picked(self) -> Any:
        """What is meant of the row."""
        return self.token

    def read(self, output: Output) -> Tensor:
        """``[B, V]``"""
        logits = output.logits if output.logits is not None else output.named.get("prediction_logits")
        of_tokens = logits is not None and (logits.dim() == 3 or (logits.dim() == 2 and one_a_token(output, logits)))
        if logits is None or not of_tokens or "pred_boxes" in output.named:
            raise refusal(output, "has no logits of single tokens")
        at = output.places(self.position, logits.shape[1]).to(logits.device)
        rows = logits[torch.arange(len(logits), device=logits.device), at]
        return rows if rows.dim() == 2 else rows[:, None]

    def where(self) -> str:
        """Where that is, in words."""
        return f"at position {self.position}" + ("" if self.of == "logit" else f" ({OF[self.of]})")


@dataclass(frozen=True)
class Span:
    """From one token to another, both included; positions as for :class:`Token`, or one a sample.

    Question answering: the start's logit + the end's logit. A language model: Σ log softmax(z[i − 1])[token i] over the
    span's own tokens i, the log-probability of the span after what stands before it (so it begins at 1 at least; of a
    model with a decoder it lies in the decoder's tokens). It reads that value, as a row ``[B, 1]``.

    Raises:
        InputError: when it is read: a position is outside the tokens, or the end lies before the start.
    """

    start: Number
    end: Number
    picked = 0

    def read(self, output: Output) -> Tensor:
        """``[B, 1]``"""
        asked = "start_logits" in output.named and "end_logits" in output.named
        first = output.named["start_logits"] if asked else output.logits
        if first is None or (not asked and (first.dim() != 3 or not is_language_model(output))):
            raise refusal(output, "is neither that of a question answerer nor a language model's")
        start, end = (output.places(p, first.shape[1]).to(first.device) for p in (self.start, self.end))
        if bool((end < start).any()):
            raise InputError(f"the span ends at {self.end}, before its start at {self.start}")
        each = torch.arange(len(first), device=first.device)
        if asked:
            return (first[each, start] + output.named["end_logits"][each, end])[:, None]
        ids = output.tokens[1] if output.tokens is not None else None
        if ids is None or ids.dim() != 2 or ids.shape[1] != first.shape[1]:
            raise refusal(output, "is not over tokens that were fed, so that a span has no probability")
        if bool((start < 1).any()):
            raise InputError("a span starts at 1 or later: nothing stands before the first token that could predict it")
        scores = first[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None].to(first.device))[..., 0]
        place = torch.arange(1, first.shape[1], device=first.device)
        within = (place >= start[:, None]) & (place <= end[:, None])
        return torch.where(within, scores, 0).sum(1, keepdim=True)

    def where(self) -> str:
        """The span in words."""
        return f"span {self.start} to {self.end}"


@dataclass(frozen=True)
class Query:
    """z[q, c]: the logit of a class at a query of a detector (DETR, YOLOS), ``[B, Q, C]``; reads the row ``[B, C]``.

    Args:
        index: the query, from 0, or one a sample. None: the one with the highest logit of that class, in each input.
        label: index or name of the class, or one a sample, or a target over the row. None: the likeliest, which may be
            the last, "no object".

    Raises:
        InputError: neither is given; when it is read: there is no such query or class.
    """

    index: Number | None
    label: Any = None

    def __post_init__(self) -> None:
        if self.index is None and (self.label is None or callable(self.label)):
            raise InputError("Query(None, class) is the best query of a class: give the class, or a query's number")

    @property
    def picked(self) -> Any:
        """What is meant of the row."""
        return self.label

    def read(self, output: Output) -> Tensor:
        """``[B, C]``"""
        names = ("class_queries_logits", "pred_logits")
        logits = next((output.named[n] for n in names if n in output.named), output.logits)
        words = output.tokens is not None and "pred_boxes" not in output.named
        if logits is None or logits.dim() != 3 or words:
            raise refusal(output, "has no logits of queries")
        each = torch.arange(len(logits), device=logits.device)
        if self.index is None:
            wanted = output.own(self.label).to(logits.device)
            _inside("class", wanted, logits.shape[-1])
            return logits[each, logits[each, :, wanted].argmax(-1)]
        at = output.own(self.index).to(logits.device)
        _inside("query", at, logits.shape[1])
        return logits[each, at]

    def where(self) -> str:
        """Where that is, in words."""
        return "at its best query" if self.index is None else f"at query {self.index}"


@dataclass(frozen=True)
class Pixel:
    """z[c, row, column] of a dense output ``[B, C, h, w]`` (segmentation) or ``[B, h, w]`` (depth; without a class).

    It reads the row ``[B, C]`` at that place. Rows and columns are the output's, from 0 at the top left, which is often
    coarser than the picture (a quarter of it in SegFormer). Each may be one a sample.

    Args:
        label: index or name of the class, or one a sample, or a target over the row. None: the likeliest.

    Raises:
        InputError: when it is read: there is no such place or class.
    """

    row: Number
    column: Number
    label: Any = None

    @property
    def picked(self) -> Any:
        """What is meant of the row."""
        return self.label

    def read(self, output: Output) -> Tensor:
        """``[B, C]``"""
        dense = output.dense
        if isinstance(output.raw, Tensor) and output.raw.dim() == 3:
            dense = output.raw[:, None]
        if dense is None:
            raise refusal(output, "is not one number a pixel and class")
        line, column = (output.own(v).to(dense.device) for v in (self.row, self.column))
        _inside("row", line, dense.shape[2])
        _inside("column", column, dense.shape[3])
        return dense[torch.arange(len(dense), device=dense.device), :, line, column]

    def where(self) -> str:
        """Where that is, in words."""
        return f"at row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Similarity:
    """The similarity of each picture with its own text in a model of two towers (CLIP, SigLIP): the diagonal of its
    ``logits_per_image``, as a row ``[B, 1]``. Picture i and text i are one sample.

    Raises:
        InputError: when it is read: there are not as many texts as pictures.
    """

    picked = 0

    def read(self, output: Output) -> Tensor:
        """``[B, 1]``"""
        table = output.named.get("logits_per_image")
        if table is None:
            raise refusal(output, "has no similarities of pictures and texts")
        if table.shape[0] != table.shape[1]:
            raise InputError(
                f"Similarity() is of each picture and its own text, and these are {table.shape[0]} pictures and "
                f"{table.shape[1]} texts: give pairs, or the index of a text as the target"
            )
        return table.diagonal()[:, None]

    def where(self) -> str:
        """It in words."""
        return "similarity of picture and text"


def _inside(what: str, values: Tensor, count: int) -> None:
    """Raise where one of the numbers is not of 0 ... count − 1."""
    for value in values.tolist():
        if not 0 <= value < count:
            raise InputError(f"{what} {value} is outside the output, whose numbers are 0 to {count - 1}")
