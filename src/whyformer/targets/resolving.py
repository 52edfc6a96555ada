"""From what a user calls the target to what is read off the output, to a callable over it and to readable names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.models.output import Output
from whyformer.models.readout import has_row, refusal, row_of
from whyformer.targets.naming import class_index, in_range, token_ids
from whyformer.targets.outputs import Pixel, Query, Similarity, Span, Token
from whyformer.targets.rows import Logit, LogProbability, Probability, RowTarget

Raw = Token | Span | Query | Pixel | Similarity
Target = None | int | str | Sequence[int | str | Raw] | Raw | Callable[[Any], Tensor]
_RAW = (Token, Span, Query, Pixel, Similarity)
_SHOWN = 20
OUTPUT = "the output"
"""What the one number of a model for regression is called."""


class Resolver:
    """What is explained of each sample; checked as early as possible.

    Args:
        target: as for :func:`whyformer.explain`: None (each sample's predicted class), a class or one a sample (see
            :func:`class_index`), a callable, or a target over the raw output, as an object, a list of one a sample, or
            written out (``"Token(5, 17)"``).
        labels, classes: names and number of the model's classes, where known.
        batch: number of samples.
        processor: names tokens, if it is or holds a tokenizer.
        activation: (number of logits of a row, whether the row is what the model returned) -> what turns the row into
            what it says, as :func:`whyformer.models.ends.final_activation` has it; default: softmax.

    Attributes:
        reading: the target over the raw output, or the user's own callable; None where the row of logits is read.
        target: what is meant of the row that is read: None, a class, one a sample, or a callable.
    """

    def __init__(
        self,
        target: Any,
        labels: dict[int, str] | None,
        classes: int | None,
        batch: int,
        processor: Any = None,
        activation: Callable[[int, bool], str] = lambda outputs, returned: "softmax",
    ) -> None:
        tokenizer = getattr(processor, "tokenizer", processor)
        self.tokenizer: Any = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
        self.labels, self.classes, self.batch = labels, classes, batch
        self._activation = activation
        target = _plain(target)
        if isinstance(target, str) and _is_written(target):
            target = _written(target)
        elif isinstance(target, list | tuple):
            self._fit(len(target))
            target = [_written(t) if isinstance(t, str) and _is_written(t) else t for t in target]
            target = _together(target) if any(map(_ours, target)) else target
        self.reading: Any = None
        if isinstance(target, _RAW):
            self.reading, target = self._checked(target), target.picked
        self.target = self._classes_of(target)
        if isinstance(self.reading, _RAW):  # two targets with one reading are about the same row
            chosen = self.target if isinstance(self.reading, Query) and self.reading.index is None else None
            self.reading = _about(self.reading, chosen)
        elif callable(self.target) and not _ours(self.target) and self.reading is None:
            self.reading = self.target
        self.raw = isinstance(self.reading, Span | Similarity)
        """Whether the row that is read is the value itself, and no logits."""
        self.pairs = isinstance(self.reading, Similarity)
        """Whether text i belongs to picture i."""
        self.counted = isinstance(self.reading, Token | Span) and getattr(self.reading, "position", None) != -1
        """Whether the row is found by a token's number, which changes when other tokens are taken out."""
        self.last = self.reading is None or (isinstance(self.reading, Token) and self.reading.position == -1)
        """Whether the row is that of the last real token, of an output that has one for each."""
        self._check_named(classes if self.reading is None or callable(self.reading) else None)

    def _fit(self, count: int) -> None:
        if count != self.batch:
            raise InputError(f"{count} targets for {self.batch} samples: give one for all, or one a sample")

    def _checked(self, target: Any) -> Any:
        """The same with positions and places as whole numbers, one for all or one a sample."""
        names = [f.name for f in fields(target) if f.name in ("position", "start", "end", "index", "row", "column")]
        plain = {name: _plain(getattr(target, name)) for name in names}
        for name, value in plain.items():
            for one in value if isinstance(value, list | tuple) else [0 if value is None else value]:
                if isinstance(one, bool) or not hasattr(one, "__index__"):
                    kind = type(target).__name__
                    raise InputError(f"{kind}: {name} is a whole number or one a sample, not {value!r}")
            if isinstance(value, list | tuple):
                self._fit(len(value))
        return replace(target, **plain)

    def _classes_of(self, target: Any) -> Any:
        """Indices for the names of classes and tokens."""
        target = _plain(target)
        if isinstance(target, RowTarget):
            named = {n: _plain(getattr(target, n)) for n in ("index", "other") if hasattr(target, n)}
            numbered: Any = replace(target, **{n: self._numbered(v) for n, v in named.items()})  # type: ignore[type-var]
            return numbered
        if target is None or callable(target):
            return target
        if isinstance(target, str | float) or hasattr(target, "__index__"):
            return self._index(target)
        if isinstance(target, Sequence):
            self._fit(len(target))
            return [self._index(t) for t in target]
        raise InputError(
            "a target is a class index or name, a list of these, a function or one of whyformer.targets, not "
            f"{target!r}"
        )

    def _numbered(self, value: Any) -> Any:
        """Indices for names, one or one a sample."""
        if isinstance(value, str):
            return self._index(value)
        if not isinstance(value, list | tuple):
            return value
        self._fit(len(value))
        return [self._index(v) if isinstance(v, str) else v for v in value]

    def _index(self, wanted: Any) -> int:
        read_off = isinstance(self.reading, Token) or (self.reading is None and self.tokenizer and not self.labels)
        if not isinstance(wanted, str) or not read_off or self.classes is not None or _is_index(wanted):
            return class_index(wanted, self.labels, None if isinstance(self.reading, Query | Pixel) else self.classes)
        if self.tokenizer is None:
            raise InputError(f"the token {wanted!r} is known to a tokenizer only: give processor=, or the token's id")
        ids = token_ids(self.tokenizer, wanted)
        if len(ids) == 1:
            return ids[0]
        parts = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(ids)))
        raise InputError(f"{wanted!r} is not one token but {len(ids)} ({parts}): name one token")

    def _check_named(self, classes: int | None, words: bool = False) -> None:
        """The classes that a target over the row names."""
        if isinstance(self.target, RowTarget):
            for named in (self.target.index, getattr(self.target, "other", 0)):
                for index in torch.as_tensor(named).flatten().tolist():
                    in_range(index, classes, words)

    # -- what is read ------------------------------------------------------------------------------------------------
    def read(self, output: Output) -> Tensor:
        """``[B, C]`` the row that the target is about; ``[B, 1]`` the value itself where there is no such row.

        Raises:
            InputError: the output needs a target and there is none, or it is for another kind of output.
        """
        if isinstance(self.reading, _RAW):
            row: Tensor = self.reading.read(output)
            return row
        if self.reading is None and self.target is None and "logits_per_image" in output.named:
            raise refusal(output, "compares pictures with texts")
        if self.reading is None:
            return row_of(output)
        if has_row(output):  # a function of the user's own is about what the model returns
            return row_of(output.as_returned())
        self.raw = True
        return _numbers(self.reading(output.raw), output.batch)[:, None]

    def callable(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """The target for samples with these logits (the row that was read).

        Raises:
            InputError: it names a class that is none of the row's, or asks for the probability of a number.
        """
        if callable(self.target) and not self.raw:
            self._check_named(logits.shape[-1], self._words(logits))
            own = self.target
            if not _ours(own):
                return lambda logits: _numbers(own(logits), len(logits))
            self._check_probability(own, logits)
            return own
        indices = self.indices(logits)
        in_range(int(indices.max()), logits.shape[-1], self._words(logits))
        of, chosen = getattr(self.reading, "of", "logit"), indices.tolist()
        made: Any = {"probability": Probability, "log_probability": LogProbability}.get(of, Logit)(chosen)
        self._check_probability(made, logits)
        return made

    def activation(self, logits: Tensor) -> str:
        """What turns the row that was read into what it says: "softmax", "sigmoid", or "identity" for a number."""
        returned = callable(self.reading) and not isinstance(self.reading, _RAW)
        return "identity" if self.raw else self._activation(logits.shape[-1], returned)

    def _check_probability(self, target: Any, logits: Tensor) -> None:
        """Refuse a softmax over what is no row of classes."""
        if not isinstance(target, Probability | LogProbability) or target.multi_label:
            return
        kind, numeric = type(target).__name__, self.activation(logits) == "identity"
        if not numeric and logits.shape[-1] > 1:
            return
        why = "the model's output is a number and has no probability" if numeric else "the softmax of one logit is 1"
        index = torch.as_tensor(target.index).flatten()[0]
        raise InputError(
            f"{kind}: {why}: to explain that number itself, give its index, {index} (of a Token, without of=), as the "
            f"target; if it is the logit of a class, its sigmoid is {kind}({index}, multi_label=True)"
        )

    def indices(self, logits: Tensor) -> Tensor:
        """``[B]`` class indices, −1 where a callable names none."""
        index = getattr(self.target, "index", -1) if callable(self.target) else self.target
        index = 0 if self.raw else index
        return logits.argmax(-1) if index is None else torch.as_tensor(index, device=logits.device).expand(len(logits))

    def named(self, logits: Tensor) -> list[Tensor]:
        """``[B]`` each: the classes that the target names (of a contrast two); −1 where a callable names none."""
        other = getattr(self.target, "other", None) if callable(self.target) else None
        rivals = [] if other is None else [torch.as_tensor(other).expand(len(logits))]
        return [self.indices(logits), *rivals]

    # -- what it is called ---------------------------------------------------------------------------------------------
    def describe(self, logits: Tensor) -> tuple[Tensor, list[str]]:
        """(class indices as :meth:`indices` has them, on the CPU; readable names)."""
        index = self.indices(logits).cpu().clone()
        own = callable(self.target) and not hasattr(self.target, "index")
        name = self._namer(logits)
        if isinstance(self.target, RowTarget):
            names = [_of_sample(self.target, i).title(name) for i in range(len(index))]
        else:
            names = ["custom target" if own else name(i) for i in index.tolist()]
        if isinstance(self.reading, _RAW):
            places = [_of_sample(self.reading, i).where() for i in range(len(names))]
            names = places if self.raw else [f"{n} {p}" for n, p in zip(names, places, strict=True)]
        return index, names

    def written(self) -> list[str] | None:
        """The target of each sample written out, where it is more than a class; None for one that cannot be."""
        if self.reading is None and isinstance(self.target, RowTarget) and not isinstance(self.target, Logit):
            return [repr(_of_sample(self.target, i)) for i in range(self.batch)]
        if not isinstance(self.reading, _RAW) or (callable(self.target) and not hasattr(self.target, "index")):
            return None
        return [repr(_of_sample(_about(self.reading, self.target), i)) for i in range(self.batch)]

    def about(self, classes: list[int]) -> Any:
        """The target for another class of each sample, of the same row."""
        return _about(self.reading, classes) if isinstance(self.reading, _RAW) else classes

    def names(self, logits: Tensor) -> dict[int, str] | None:
        """Class index -> name for the row that was read; of a vocabulary the likeliest and the target only."""
        if not self._words(logits):
            return self._labels(logits)
        shown = logits.topk(min(_SHOWN, logits.shape[-1])).indices.flatten().tolist()
        shown += [i for own in self.named(logits) for i in own.tolist() if i >= 0]
        name = self._namer(logits)
        return {i: name(i) for i in sorted(set(shown))}

    def _labels(self, logits: Tensor) -> dict[int, str] | None:
        """Names of the classes of a row; of numbers, what the config calls them or that they are outputs."""
        known, outputs = self.labels or {}, logits.shape[-1]
        if self.activation(logits) == "identity":
            return {i: OUTPUT if outputs == 1 else f"output {i}" for i in range(outputs)} | ({} if self.raw else known)
        if outputs == 1 and len(known) == 2:  # a sigmoid between two classes is the probability of the second
            return {0: known.get(1, OUTPUT)}
        return self.labels

    def _words(self, logits: Tensor) -> bool:
        """Whether the row is over the tokenizer's vocabulary."""
        if self.tokenizer is None or self.raw or self.classes is not None or isinstance(self.reading, Query | Pixel):
            return False
        return not self.labels and logits.shape[-1] >= int(self.tokenizer.vocab_size)

    def _namer(self, logits: Tensor) -> Callable[[int], str]:
        """What calls a class or token of a row by its name."""
        if not self._words(logits):
            labels = self._labels(logits) or {}
            return lambda index: labels.get(index, str(index))

        def word(index: int) -> str:
            token = self.tokenizer.convert_ids_to_tokens(index) if index < len(self.tokenizer) else None
            return str(index) if token is None else repr(_shown(self.tokenizer, token))

        return word


def several_tokens(target: Any, tokenizer: Any, labels: Any, classes: int | None) -> tuple[str, list[int]] | None:
    """(text, numbers of its tokens) of a target that names several tokens as what a language model says next."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "convert_ids_to_tokens") or classes is not None:
        return None
    target = _written(target) if isinstance(target, str) and _is_written(target) else target
    text = target.token if isinstance(target, Token) and target.position == -1 else None if labels else target
    if not isinstance(text, str) or _is_index(text):
        return None
    ids = token_ids(tokenizer, text)
    return (text, ids) if len(ids) > 1 else None


def _is_index(text: str) -> bool:
    return text.removeprefix("#").isdecimal()


def _shown(tokenizer: Any, token: str) -> str:
    """The text of a token with the space before it; the token itself where it is no text of its own."""
    text = tokenizer.convert_tokens_to_string([token])
    if not text.strip("\ufffd"):
        return token
    return f" {text}" if token.startswith("▁") and not text.startswith(" ") else str(text)


def _numbers(value: Any, batch: int) -> Tensor:
    """``[B]`` what a user's function returned, or the error that says what it has to return."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"the target must return a tensor of one number a sample, shape [{batch}], not {type(value).__name__}: "
            "leave out .item(), float() and .numpy(), through which no gradient goes"
        )
    if batch == 1 and value.numel() == 1:
        return value.reshape(1)
    if value.shape != (batch,):
        raise InputError(f"the target must return one number a sample, shape [{batch}], not {list(value.shape)}")
    return value


def _about(reading: Any, picked: Any) -> Any:
    """The target over the raw output that means ``picked`` of the row it reads."""
    return replace(reading, **{f.name: picked for f in fields(reading) if f.name in ("token", "label")})


def _plain(value: Any) -> Any:
    """Python's own numbers and lists where an array or a tensor is given."""
    return value.tolist() if hasattr(value, "tolist") else value


def of_samples(target: Any, samples: Sequence[int]) -> Any:
    """What is meant of some samples of a batch, by a target with one for each, or of all."""
    target = _plain(target)
    if isinstance(target, str) and _is_written(target):
        target = _written(target)
    if isinstance(target, list | tuple):
        return [target[i] for i in samples]
    return _together([_of_sample(target, i) for i in samples]) if _ours(target) else target


# -- one for each sample ---------------------------------------------------------------------------------------------
def _of_sample(target: Any, sample: int) -> Any:
    """The target of one sample: lists of one a sample, also those inside, replaced by its number."""
    if not _ours(target):
        return target
    own = {}
    for name in (f.name for f in fields(target)):
        value = _plain(getattr(target, name))
        own[name] = value[sample] if isinstance(value, list | tuple) else _of_sample(value, sample)
    return replace(target, **own)


def _ours(target: Any) -> bool:
    return isinstance(target, (*_RAW, RowTarget))


def _together(targets: Sequence[Any]) -> Any:
    """One target with a list of one a sample for what differs."""
    kind: Any = type(targets[0])
    if any(type(t) is not kind for t in targets):
        kinds = ", ".join(type(t).__name__ for t in targets)
        raise InputError(f"the targets of one batch are of one kind, not {kinds}")
    listed = {f.name: [getattr(t, f.name) for t in targets] for f in fields(kind)}
    return kind(**{n: v[0] if all(one == v[0] for one in v) else _merged(v) for n, v in listed.items()})


def _merged(values: list[Any]) -> Any:
    return _together(values) if _ours(values[0]) else values


def _kinds() -> dict[str, Any]:
    """The targets that can be written out, by name."""
    return {kind.__name__: kind for kind in (*_RAW, *RowTarget.__subclasses__())}


def _is_written(text: str) -> bool:
    return text.strip().endswith(")") and text.strip().partition("(")[0] in _kinds()


def _written(text: str) -> Any:
    """The target that stands there as in Python, such as ``Token(-1, "blue")`` or ``Pixel(4, 9, 2)``."""

    def made(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _kinds():
            kind = _kinds()[node.func.id]
            return kind(*map(made, node.args), **{str(k.arg): made(k.value) for k in node.keywords})
        return ast.literal_eval(node)

    try:
        return made(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError) as error:
        raise InputError(
            f"the target {text!r} cannot be read: names stand in quotes, as in Contrast('cat', 'dog'), Probability(3), "
            "Token(-1, 'word'), Token(5, 17), Span(3, 7), Query(0, 3), Pixel(4, 9, 2) or Similarity()"
        ) from error
