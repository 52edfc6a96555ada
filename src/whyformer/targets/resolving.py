"""Resolve a user's target: the row to read from the output, a callable over that row, and readable names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import FOREIGN_ERRORS, InputError, WhyformerError
from whyformer.models.output import Output, with_tensors
from whyformer.models.readout import has_row, refusal, row_of
from whyformer.targets.naming import class_index, in_range, text_index, token_ids
from whyformer.targets.outputs import OutputTarget, Pixel, Query, Similarity, Span, Token
from whyformer.targets.reading import of_sample, read_target, to_python
from whyformer.targets.rows import Logit, LogProbability, Probability, RowTarget

Target = None | int | str | Sequence[int | str | OutputTarget] | OutputTarget | Callable[[Any], Tensor]
_NAMED_TOKENS = 20
_OF_TOKENS = "Token is for outputs with logits of each token; a class of the whole input is a target by itself."
OUTPUT = "the output"
"""Name of a regression model's single output."""


class Resolver:
    """A target resolved against the model's classes and checked as early as possible.

    Args:
        target: as for :func:`whyformer.explain`: None (each sample's predicted class), a class or a list of one per
            sample (see :func:`class_index`), a callable, or a target over the raw output, as an object, a list of one
            per sample, or text (``"Token(5, 17)"``).
        labels, classes: names and number of the model's classes, if known.
        batch: number of samples.
        processor: provides the names of tokens, if it is or holds a tokenizer.
        activation: function (length of the row, whether the model returned the row itself) -> name of the row's
            activation, as in :func:`whyformer.models.ends.final_activation`; default: softmax.
        texts: function that returns the texts that are the classes of each sample, which name these classes; None if
            the classes are others.

    Attributes:
        reading: the target over the raw output, or the user's callable; None if the row of logits is read.
        target: the target within the row: None, a class, a list of one per sample, or a callable.
        raw: whether the row is the value itself instead of logits.
        numeric: whether the row is one number without classes, such as a depth, once an output is read.
        pairs: whether text i belongs to picture i.
        counted: whether a token's index selects the row, so that it changes when other tokens are deleted; None if a
            user's function may do so, until an output is read.
        last: whether the row is that of the last real token, if the output has one per token.
    """

    def __init__(
        self,
        target: Any,
        labels: dict[int, str] | None,
        classes: int | None,
        batch: int,
        processor: Any = None,
        activation: Callable[[int, bool], str] = lambda outputs, returned: "softmax",
        texts: Callable[[], list[list[str]] | None] = lambda: None,
    ) -> None:
        tokenizer = getattr(processor, "tokenizer", processor)
        self.tokenizer: Any = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
        self.labels, self.classes, self.batch = labels, classes, batch
        self._activation, self._texts = activation, cache(texts)
        self._word: str | None = None  # the text of a token, which is an index of a row over the vocabulary only
        if isinstance(target := to_python(target), list | tuple):
            self._fit(len(target))
        target = read_target(target)
        self.reading: Any = None
        if isinstance(target, OutputTarget):
            self.reading, target = self._checked(target), target.target
        self.target = self._classes_of(target)
        if isinstance(self.reading, OutputTarget):  # targets with equal readings read the same row
            index = self.target if isinstance(self.reading, Query) and self.reading.index is None else None
            self.reading = self.reading.about(index)
        elif callable(self.target) and not isinstance(self.target, RowTarget):
            self.reading = self.target
        self.raw = isinstance(self.reading, Span | Similarity)
        self.numeric = False
        self.pairs = isinstance(self.reading, Similarity)
        counted = isinstance(self.reading, Token | Span) and getattr(self.reading, "position", None) != -1
        self.counted = None if callable(self.reading) else counted
        self.last = self.reading is None or (isinstance(self.reading, Token) and self.reading.position == -1)

    def _fit(self, count: int) -> None:
        if count != self.batch:
            raise InputError(f"{count} targets for {self.batch} samples: pass one for all, or one per sample")

    def _checked(self, target: Any) -> Any:
        """Return the target with positions and indices as Python ints, or lists of one per sample."""
        names = [f.name for f in fields(target) if f.name in ("position", "start", "end", "index", "row", "column")]
        values = {name: to_python(getattr(target, name)) for name in names}
        for name, value in values.items():
            for number in value if isinstance(value, list | tuple) else [0 if value is None else value]:
                if isinstance(number, bool) or not hasattr(number, "__index__"):
                    kind = type(target).__name__
                    raise InputError(f"{kind}: {name} must be a whole number or one per sample, not {value!r}")
            if isinstance(value, list | tuple):
                self._fit(len(value))
        return replace(target, **values)

    def _classes_of(self, target: Any) -> Any:
        """Replace the names of classes and tokens by indices."""
        target = to_python(target)
        if isinstance(target, RowTarget):
            indices = {name: self._indices_of(to_python(getattr(target, name))) for name in target.classes}
            return replace(target, **indices)  # type: ignore[type-var]
        if target is None or callable(target):
            return target
        if isinstance(target, str | float) or hasattr(target, "__index__"):
            return self._indices_of(target)
        if isinstance(target, Sequence):
            return self._indices_of(list(target))
        raise InputError(
            "a target must be a class index or name, a list of these, a function or one of whyformer.targets, not "
            f"{target!r}"
        )

    def _indices_of(self, value: Any) -> int | list[int]:
        """Return the index of a class or token; a list of one per sample for a list, and for a text that has different
        indices among the texts of each sample."""
        if isinstance(value, list | tuple):
            self._fit(len(value))
            return [self._index(v, i) for i, v in enumerate(value)]
        texts = self._texts() if isinstance(value, str) and self.reading is None else None
        indices = [self._index(value, i) for i in range(1 if texts is None else self.batch)]
        return indices[0] if len(set(indices)) == 1 else indices

    def _index(self, name: Any, sample: int) -> int:
        read_off = isinstance(self.reading, Token) or (self.reading is None and self.tokenizer and not self.labels)
        if not isinstance(name, str) or not read_off or self.classes is not None:
            classes = None if isinstance(self.reading, Query | Pixel) else self.classes
            try:
                return class_index(name, self.labels, classes)
            except InputError as error:
                if not isinstance(self.reading, Token):
                    raise
                raise InputError(f"{str(error).removesuffix('.')}. {_OF_TOKENS}") from None
        texts = self._texts() if self.reading is None else None
        if texts is not None:
            return text_index(name, texts[sample], self.tokenizer)
        if _is_index(name):
            return class_index(name, None)
        if self.tokenizer is None:
            raise InputError(f"the token {name!r} needs a tokenizer: pass processor=, or the token's id")
        ids = token_ids(self.tokenizer, name)
        if len(ids) == 1:
            self._word = name
            return ids[0]
        parts = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(ids)))
        raise InputError(f"{name!r} is {len(ids)} tokens ({parts}), not one: name one token")

    def _check_named(self, classes: int, words: bool) -> None:
        """Raise if a target names a class outside of the row, which has this number of ``classes``."""
        if isinstance(self.target, RowTarget):
            for name in self.target.classes:
                for index in torch.as_tensor(getattr(self.target, name)).flatten().tolist():
                    in_range(index, classes, words)

    # -- reading the output ------------------------------------------------------------------------------------------
    def read(self, output: Output) -> Tensor:
        """Return the row ``[B, C]`` that the target selects from; ``[B, 1]`` the value itself if there is no such row.

        Raises:
            InputError: the output needs a target and has none, or the target is for another kind of output, such as the
                text of a token for a row that is not over the vocabulary.
        """
        self.numeric = isinstance(self.reading, Pixel) and output.depth is not None
        if isinstance(self.reading, OutputTarget):
            return self.reading.read(output)
        compared = output.named[output.compared] if output.compared else None
        if self.reading is None and self.target is None and compared is not None and compared.shape[-1] > 1:
            raise refusal(output, "compares pictures with texts")
        if self.reading is None:
            row = row_of(output)
            of_tokens = output.logits is not None and output.logits.dim() == 3  # a language model's, as measured
            if self._word is not None and not of_tokens and row.shape[-1] < int(self.tokenizer.vocab_size):
                raise InputError(
                    f"{self._word!r} is the text of a token, and the output is {row.shape[-1]} numbers, fewer than the "
                    f"tokenizer has tokens: pass an index, 0 to {row.shape[-1] - 1}"
                )
            return row
        self.raw = not has_row(output)
        if not self.raw:  # a user's function gets the row as the model returned it
            self.counted = False
            return row_of(output.as_returned())
        if self.counted is None:
            self.counted = _reads_tokens(self.reading, output)
        return _result(self.reading, output.raw, output)[:, None]

    def callable(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the target as a function of the row ``[B, C]``.

        Args:
            logits: the row that was read.

        Raises:
            InputError: the target names a class outside the row, or a probability of a row that has none.
        """
        if callable(self.target) and not self.raw:
            self._check_named(logits.shape[-1], self._is_vocabulary(logits))
            function = self._with_activation(self.target, logits)
            if not isinstance(function, RowTarget):
                _check_samples(function, logits)
            return function if isinstance(function, Logit) else partial(_of_row, function)
        indices = self.indices(logits)
        in_range(int(indices.max()), logits.shape[-1], self._is_vocabulary(logits))
        of, index = getattr(self.reading, "of", "logit"), indices.tolist()
        target: Any = {"probability": Probability, "log_probability": LogProbability}.get(of, Logit)(index)
        return self._with_activation(target, logits)

    def activation(self, logits: Tensor) -> str:
        """Return the activation of the row: "softmax", "sigmoid", or "identity" for regression outputs."""
        return "identity" if self.raw or self.numeric else self._activation(logits.shape[-1], callable(self.reading))

    def _with_activation(self, target: Any, logits: Tensor) -> Any:
        """Return a probability with the activation of the row; raise for a softmax over a row without probabilities."""
        if not isinstance(target, Probability | LogProbability):
            return target
        kind, activation = type(target).__name__, self.activation(logits)
        if target.multi_label is None:
            target = replace(target, multi_label=activation == "sigmoid")
        numeric = activation == "identity"
        if target.multi_label or (not numeric and logits.shape[-1] > 1):
            return target
        why = "the model's output is a number and has no probability" if numeric else "the softmax of one logit is 1"
        index = torch.as_tensor(target.index).flatten()[0]
        sigmoid = f"{kind}({index}, multi_label=True)"
        sigmoid = sigmoid if self.reading is None else f"{type(self.reading).__name__}(..., {sigmoid})"
        raise InputError(
            f"{kind}: {why}. To explain the number itself, pass its index, {index} (for a Token, omit of=), as the "
            f"target; if it is the logit of a class, its sigmoid is {sigmoid}"
        )

    def indices(self, logits: Tensor) -> Tensor:
        """Return the class indices ``[B]``; −1 if a callable names no class."""
        index = getattr(self.target, "index", -1) if callable(self.target) else self.target
        index = 0 if self.raw else index
        return logits.argmax(-1) if index is None else torch.as_tensor(index, device=logits.device).expand(len(logits))

    def named(self, logits: Tensor) -> list[Tensor]:
        """Return one tensor ``[B]`` per class that the target names (two for a contrast); −1 if a callable names none.
        """
        others = self.target.classes[1:] if isinstance(self.target, RowTarget) else ()
        return [self.indices(logits), *(torch.as_tensor(getattr(self.target, n)).expand(len(logits)) for n in others)]

    # -- names ---------------------------------------------------------------------------------------------------------
    def describe(self, logits: Tensor) -> tuple[Tensor, list[str]]:
        """Return (the class indices of :meth:`indices` on the CPU, readable names)."""
        index = self.indices(logits).cpu().clone()
        custom = callable(self.target) and not hasattr(self.target, "index")
        name = self._namer(logits)
        if isinstance(self.target, RowTarget):
            names = [of_sample(self.target, i).title(name) for i in range(len(index))]
        else:
            names = ["custom target" if custom else name(i) for i in index.tolist()]
        if isinstance(self.reading, OutputTarget):
            places = [of_sample(self.reading, i).where() for i in range(len(names))]
            names = places if self.raw else [f"{n} {p}" for n, p in zip(names, places, strict=True)]
        return index, names

    def as_text(self) -> list[str] | None:
        """Return the target of each sample as text; None if it is a plain class or cannot be expressed as text."""
        if self.reading is None and isinstance(self.target, RowTarget) and not isinstance(self.target, Logit):
            return [repr(of_sample(self.target, i)) for i in range(self.batch)]
        if not isinstance(self.reading, OutputTarget) or (callable(self.target) and not hasattr(self.target, "index")):
            return None
        return [repr(of_sample(self.reading.about(self.target), i)) for i in range(self.batch)]

    def about(self, classes: list[int]) -> Any:
        """Return the target for another class of each sample in the same row."""
        return self.reading.about(classes) if isinstance(self.reading, OutputTarget) else classes

    def names(self, logits: Tensor, count: int = _NAMED_TOKENS) -> dict[int, str] | None:
        """Return class index -> name for the row; for a vocabulary only the ``count`` likeliest tokens and the target.
        """
        if not self._is_vocabulary(logits):
            return self._labels(logits)
        classes = logits.topk(min(count, logits.shape[-1])).indices.flatten().tolist()
        classes += [i for indices in self.named(logits) for i in indices.tolist() if i >= 0]
        name = self._namer(logits)
        return {i: name(i) for i in sorted(set(classes))}

    def _labels(self, logits: Tensor) -> dict[int, str] | None:
        """Return the names of a row's classes; regression outputs are named by the config, or "output 0" and so on."""
        labels, outputs = self.labels or {}, logits.shape[-1]
        if self.activation(logits) == "identity":
            named = {} if self.raw or self.numeric else labels
            return {i: OUTPUT if outputs == 1 else f"output {i}" for i in range(outputs)} | named
        if outputs == 1 and len(labels) == 2:  # the sigmoid of a single logit is the probability of the second class
            return {0: labels.get(1, OUTPUT)}
        return self.labels

    def _is_vocabulary(self, logits: Tensor) -> bool:
        """Return whether the row is over the tokenizer's vocabulary."""
        if self.tokenizer is None or self.raw or self.classes is not None or isinstance(self.reading, Query | Pixel):
            return False
        return not self.labels and logits.shape[-1] >= int(self.tokenizer.vocab_size)

    def _namer(self, logits: Tensor) -> Callable[[int], str]:
        """Return a function from the index of a class or token to its name."""
        if not self._is_vocabulary(logits):
            labels = self._labels(logits) or {}
            return lambda index: labels.get(index, str(index))

        def word(index: int) -> str:
            token = self.tokenizer.convert_ids_to_tokens(index) if index < len(self.tokenizer) else None
            return str(index) if token is None else repr(_token_text(self.tokenizer, token))

        return word


def _reads_tokens(function: Callable[[Any], Any], output: Output) -> bool:
    """Return True if a function of the raw output depends on a tensor with a row for each token, ``[B, N, ...]``."""
    shape = None if output.tokens is None else output.tokens[1].shape[:2]

    def changed(value: Tensor) -> Tensor:
        per_token = value.is_floating_point() and value.shape[:2] == shape
        return torch.linspace(0, 1, value.numel()).to(value).view(value.shape) if per_token else value

    with torch.no_grad():
        values = [_result(function, raw, output) for raw in (output.raw, with_tensors(output.raw, changed))]
    return not torch.equal(*values)


def check_target(target: Any, labels: dict[int, str] | None, classes: int | None, batch: int, processor: Any) -> None:
    """Raise if a target fits no input of a model; arguments as for :class:`Resolver`.

    Raises:
        InputError: it cannot be read, or names a class that the model does not have.
    """
    if several_tokens(target, processor, labels, classes) is None:
        Resolver(target, labels, classes, batch, processor)


def several_tokens(target: Any, tokenizer: Any, labels: Any, classes: int | None) -> tuple[str, list[int]] | None:
    """Return (text, token ids) of a target that names several next tokens of a language model; None for any other."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "convert_ids_to_tokens") or classes is not None:
        return None
    target = read_target(target)
    text = target.token if isinstance(target, Token) and target.position == -1 else None if labels else target
    if not isinstance(text, str) or _is_index(text):
        return None
    ids = token_ids(tokenizer, text)
    return (text, ids) if len(ids) > 1 else None


def _is_index(text: str) -> bool:
    return text.removeprefix("#").isdecimal()


def _token_text(tokenizer: Any, token: str) -> str:
    """Return the text of a token with its leading space; the token itself if it does not decode to text."""
    text = tokenizer.convert_tokens_to_string([token])
    if not text.strip("\ufffd"):
        return token
    return f" {text}" if token.startswith("▁") and not text.startswith(" ") else str(text)


def _of_row(function: Callable[[Tensor], Any], logits: Tensor) -> Tensor:
    """Return the numbers ``[B]`` of a user's function of the row; raise if it reads the row as something else."""
    try:
        return _numbers(function(logits.clone()), len(logits))  # the function may change its argument in place
    except (AttributeError, IndexError, TypeError) as error:
        raise InputError(
            f"the target function gets logits {list(logits.shape)} and fails ({type(error).__name__}: {error}): return "
            "one number per sample, such as target=lambda logits: logits[:, 0]"
        ) from error


def _check_samples(function: Callable[[Tensor], Any], logits: Tensor) -> None:
    """Raise if a user's number for one sample depends on the row of another, so that a batch would change it."""
    rows, first = logits.detach(), torch.arange(len(logits), device=logits.device)[:, None] == 0
    if len(rows) == 1:
        return
    with torch.no_grad():
        number = _of_row(function, rows)
        for changed in (first, ~first):
            other = _of_row(function, torch.where(changed, rows.roll(1, -1) / 2 + 1, rows))
            kept = ~changed[:, 0]
            if not torch.allclose(other[kept], number[kept], rtol=1e-3, atol=1e-6, equal_nan=True):
                raise InputError(
                    "the target function's number for a sample depends on the other samples, or is random: use "
                    f"the sample's own row only, such as logits.mean(1) for logits {list(logits.shape)}, or pass one "
                    "sample at a time"
                )


def _result(function: Callable[[Any], Any], value: Any, output: Output) -> Tensor:
    """Return the numbers ``[B]`` of a user's function of the raw output; raise if it fails."""
    try:
        return _numbers(function(value), output.batch)
    except WhyformerError:
        raise
    except FOREIGN_ERRORS as error:
        raise refusal(output, f"does not fit the target function ({type(error).__name__}: {error})") from error


def _numbers(value: Any, batch: int) -> Tensor:
    """Check that a user's function returned ``[B]``."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"the target must return a tensor of one number per sample, shape [{batch}], not {type(value).__name__}: "
            "remove .item(), float() and .numpy(), which stop the gradient"
        )
    if not value.is_floating_point():
        raise InputError(f"the target must return floating-point numbers, not {value.dtype}")
    if batch == 1 and value.numel() == 1:
        return value.reshape(1)
    if value.shape != (batch,):
        raise InputError(f"the target must return one number per sample, shape [{batch}], not {list(value.shape)}")
    return value
