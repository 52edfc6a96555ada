"""Follows the rows of inputs through one pass: whose rows each attention mixes, and at which depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.decompositions import DECOMPOSITIONS, PARTS, PRODUCTS
from whyformer.engine.operations import is_in_place, operation
from whyformer.engine.readings import is_parameter, tensors
from whyformer.models.facts import Block

Key = frozenset[str]
Path = tuple[Any, ...]
_APART = 10**9  # between the numbers of two inputs' elements; token ids are smaller


@dataclass(frozen=True)
class Attention:
    """One attention of the pass.

    Attributes:
        queries, keys: the streams whose rows look, and are looked at.
        depth: the largest number of attentions on a path to its output.
        block: the number of the block call that it lies in.
        shape: (batch, queries, keys) of its map; the batch is larger than the model's where it works in windows, and 0
            where the map ``[B·H, Q, K]`` does not tell.
    """

    queries: Key
    keys: Key
    depth: int
    block: int | None
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Lookup:
    """A look-up of token ids in a table: which element of its input each of its rows stands for.

    Attributes:
        number: among all look-ups of the pass.
        input: the input whose ids these are; they need not be in its order (a decoder's are shifted by one).
        elements: ``[B, M]`` element of the input, −1 where the model put something else (a start token).
        ids: ``[B, M]`` what was looked up.
    """

    number: int
    input: str
    elements: Tensor
    ids: Tensor

    @property
    def in_order(self) -> bool:
        """Whether row i stands for element i."""
        return torch.equal(
            self.elements, torch.arange(self.elements.shape[-1]).to(self.elements).expand_as(self.elements)
        )


# -- labels that tensors carry through the pass ----------------------------------------------------------------------
@dataclass(frozen=True)
class _Rows:
    """Whose rows a tensor has: stream -> attentions on a path from that stream; and on any path."""

    streams: Mapping[str, int] = field(default_factory=dict)
    depth: int = 0

    @property
    def key(self) -> Key:
        return frozenset(self.streams)


def _rows(value: Any) -> _Rows | None:
    return getattr(value, "_whyformer_rows", None)


def _ids(value: Any) -> Tensor | None:
    return getattr(value, "_whyformer_ids", None)


def _joined(labels: Sequence[_Rows]) -> _Rows:
    streams: dict[str, int] = {}
    for label in labels:
        for name, depth in label.streams.items():
            streams[name] = max(depth, streams.get(name, 0))
    return _Rows(streams, max(label.depth for label in labels))


def _shape(queries: Tensor, keys: int) -> tuple[int, int, int]:
    return (len(queries) if queries.dim() > 3 else 0, queries.shape[-2], keys)


_WHOLE_NUMBERS = (torch.int32, torch.int64)
_COMPOSED = DECOMPOSITIONS.keys() | PRODUCTS.keys() | PARTS.keys()


@dataclass
class Trace:
    """Follows the rows of some inputs through one pass (see :func:`survey`)."""

    inputs: tuple[str, ...]
    takes: frozenset[str]
    attentions: list[Attention] = field(default_factory=list)
    lookups: dict[str, Lookup] = field(default_factory=dict)
    entries: dict[str, tuple[int, Key]] = field(default_factory=dict)
    again: dict[str, list[tuple[int, Key]]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    rows: list[Key | None] = field(default_factory=list)
    outputs: dict[Key, tuple[int, Path]] = field(default_factory=dict)
    groups: dict[Block, str] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    tokens_first: bool | None = None
    unaligned: set[str] = field(default_factory=set)
    looked: int = 0
    nameless: int = 0

    def begin(self, name: str, value: Tensor) -> Tensor:
        """A copy of an input, marked as the beginning of its stream."""
        copy = value.detach().clone()
        self.shapes[name] = copy.shape
        if copy.is_floating_point():
            copy._whyformer_rows = _Rows({name: 0})  # type: ignore[attr-defined]
        else:
            numbers = torch.arange(copy.shape[-1], device=copy.device).expand(copy.shape)
            copy._whyformer_ids = numbers + (1 + self.inputs.index(name)) * _APART  # type: ignore[attr-defined]
        return copy

    def entered(self, call: int, module: Block, hidden: Tensor | None) -> None:
        """A block is called on these rows."""
        self.calls.append(self.groups[module])
        label = _rows(hidden)
        self.rows.append(None if label is None else label.key)
        if label is not None and hidden is not None and hidden.dim() == 3 and hidden.shape[0] != hidden.shape[1]:
            shapes = [self.shapes[n] for n in label.key if n in self.shapes and n in self.lookups]
            texts = shapes[0][:-1].numel() if len(label.key) == len(shapes) == 1 else 0
            if texts in hidden.shape[:2]:
                self.tokens_first = hidden.shape[1] == texts
        for name, depth in ({} if label is None else label.streams).items():
            if depth == 0 and label is not None and name in self.entries:
                self.again.setdefault(name, []).append((call, label.key))
            elif depth == 0 and label is not None:
                self.entries[name] = (call, label.key)
                found = self.lookups.get(name)
                if found is not None and hidden is not None and hidden.shape[:2].numel() != found.elements.numel():
                    self.unaligned.add(name)

    def left(self, call: int, found: Sequence[tuple[Path, Tensor]]) -> None:
        """A block's outputs, and where they stand."""
        for path, hidden in reversed(found):
            label = _rows(hidden)
            if label is not None:
                self.outputs[label.key] = (call, path)

    def __call__(self, mode: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What an operation made of labelled tensors is labelled too."""
        made = tensors((result,))
        if name in _COMPOSED and any(_rows(m) is not None for m in made):
            return result
        given = tensors((*args, *kwargs.values()))
        if is_in_place(name) and args and isinstance(args[0], Tensor):
            made = [*made, args[0]]
        if any(_ids(t) is not None for t in given):
            self._follow_ids(name, func, args, kwargs, result)
        if is_lookup(name, args):
            self.looked += 1
            label = self._looked_up(args, kwargs)
            if label is not None:
                given = [*given]
                for one in made:
                    one._whyformer_rows = label  # type: ignore[attr-defined]
                return result
        kind = operation(name).kind
        mixed = getattr(result, "_whyformer_mixed", None) if isinstance(result, Tensor) else None
        if kind == "attention" and isinstance(result, Tensor):
            q, k, v = ([*args, *(kwargs[n] for n in ("query", "key", "value")[len(args) :])])[:3]
            self._attended(mode, mixed, _rows(q), [_rows(k), _rows(v)], _shape(q, k.shape[-2]), result)
        elif kind == "matrix product" and mixed is not None:
            weights, v = args[:2]
            queries, keys = getattr(weights, "_whyformer_pair", (_rows(v), None))
            self._attended(mode, mixed, queries, [keys, _rows(v)], _shape(weights, weights.shape[-1]), result)
        else:
            found = [label for label in map(_rows, given) if label is not None]
            floats = [m for m in made if m.is_floating_point() or m.is_complex()]
            pair = next((t._whyformer_pair for t in given if hasattr(t, "_whyformer_pair")), None)
            if kind == "matrix product":
                pair = (_rows(args[0]), _rows(args[1]))
            for one in floats:
                if found:
                    one._whyformer_rows = _joined(found)  # type: ignore[attr-defined]
                if pair is not None:
                    one._whyformer_pair = pair  # type: ignore[attr-defined]
        return result

    def _attended(
        self, mode: Any, mixed: Any, queries: _Rows | None, others: list[_Rows | None],
        shape: tuple[int, int, int], result: Tensor,
    ) -> None:  # fmt: skip
        keys = [o for o in others if o is not None]
        if queries is None or not queries.streams:
            if keys and shape[1] == shape[2] and queries is None:  # queries that are the keys' own constants
                queries = None
            self.nameless += 1
            queries = _Rows({f"queries {self.nameless}": 0}, 0 if queries is None else queries.depth)
        seen = _joined([queries, *keys])
        looked_at = _joined(keys) if keys else queries
        streams = {s: max(d, looked_at.streams.get(s, 0)) + 1 for s, d in queries.streams.items()}
        result._whyformer_rows = _Rows(streams, seen.depth + 1)  # type: ignore[attr-defined]
        if mixed is not None:
            self.attentions.append(
                Attention(queries.key, looked_at.key or queries.key, seen.depth + 1, mode.block, shape)
            )

    # -- token ids ---------------------------------------------------------------------------------------------
    def _follow_ids(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Which elements of which input whole numbers stand for, through what rearranges them."""
        rearranges = operation(name).kind == "view"
        if not rearranges:
            if isinstance(result, Tensor) and result.dtype in _WHOLE_NUMBERS:  # hashed, shifted by an offset
                same = [_ids(t) for t in tensors(args) if _ids(t) is not None and t.shape == result.shape]
                if same:
                    result._whyformer_ids = same[0]  # type: ignore[attr-defined]
            return

        def numbered(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(numbered, value)) if type(value) in (list, tuple) else value
            known = _ids(value)
            if known is not None:
                return known.clone() if is_in_place(name) and value is args[0] else known
            return value

        shadow = [numbered(a) for a in args]
        if is_in_place(name) and _ids(args[0]) is None:
            shadow[0] = args[0].clone()
        try:
            made = func(*shadow, **{k: numbered(v) for k, v in kwargs.items()})
        except (RuntimeError, TypeError, IndexError):
            return
        if is_in_place(name):
            args[0]._whyformer_ids = shadow[0]
            made = shadow[0]
        for own, numbers in zip(tensors((result,)), tensors((made,)), strict=False):
            if own.dtype in _WHOLE_NUMBERS and numbers.shape == own.shape:
                own._whyformer_ids = numbers  # type: ignore[attr-defined]

    def _looked_up(self, args: Any, kwargs: Any) -> _Rows | None:
        ids = next((t for t in tensors((*args, *kwargs.values())) if _ids(t) is not None), None)
        if ids is None:
            return None
        numbers = _ids(ids)
        assert numbers is not None
        owners = (numbers // _APART).unique()
        owners = owners[(owners > 0) & (owners <= len(self.inputs))]
        if len(owners) != 1:
            return None
        name = self.inputs[int(owners[0]) - 1]
        elements, ids = torch.where(numbers >= _APART, numbers % _APART, -1), ids.detach().clone()
        shape = self.shapes[name]
        if elements.dim() == 2 and elements.shape != shape and elements.shape == shape[::-1]:  # tokens first
            elements, ids = elements.T, ids.T
        stream = name
        known = self.lookups.get(stream)
        while known is not None and not (
            known.elements.shape == elements.shape and torch.equal(known.elements, elements)
        ):
            stream = self._next(stream, name)
            known = self.lookups.get(stream)
        if known is None:
            self.lookups[stream] = Lookup(self.looked - 1, name, elements, ids)
        return _Rows({stream: 0})

    def _next(self, stream: str, name: str) -> str:
        """The name of another stream made of the same input: what a decoder takes, or a numbered one."""
        decoder = f"decoder_{name}"
        if stream == name and decoder in self.takes and decoder not in self.inputs:
            return decoder
        before = stream.rpartition("#")[2] if "#" in stream else "1"
        return f"{name}#{int(before) + 1}"


def is_lookup(name: str, args: Any) -> bool:
    """Whether an operation looks rows up in a table of parameters."""
    if name == "embedding":
        return True
    indexed = name == "__getitem__" and is_parameter(args[0]) and args[0].dim() == 2
    return indexed and isinstance(args[1], Tensor) and args[1].dtype in _WHOLE_NUMBERS
