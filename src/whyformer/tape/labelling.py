"""Find the row of each element of a value, by applying the calls of a tape to row numbers.

:func:`find_rows` runs a :class:`_Labeller`: rows begin at the sources and at looked-up embeddings, and each call gives
its results the labels of its operands, rearranged or combined, or new rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.custom_ops import OPAQUE_LAYER
from whyformer.tape.rearranging import (
    along_features,
    complex_view,
    first_with_equal_rows,
    holds_rows,
    is_crossed,
    padded,
    pools,
    preserved_rows,
    rearranged,
    sorted_features,
    window,
)
from whyformer.tape.rows import Label, RowFamily, Rows, Source, constant_along, equal, first_places, no_rows, slim, thin
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS, PRODUCTS, name_set
from whyformer.tape.values import Tape

__all__ = ["find_rows", "label_rows"]

_UNMOVED = name_set(
    "clone contiguous _to_copy to alias lift_fresh lift dropout native_dropout masked_fill nan_to_num tril triu cumsum"
)
_COMPLEX = name_set("real imag view_as_real view_as_complex _conj conj _neg_view resolve_conj resolve_neg")
_RESIZED = {name for name in KINDS if "pool" in name or "upsample" in name} | {"convolution", "_convolution"}
_JAGGED = name_set("_jagged_to_padded_dense_forward _padded_dense_to_jagged_forward")
_VIEWS = {name for name, kind in KINDS.items() if kind == "view"} - _UNMOVED - _COMPLEX - _RESIZED - _JAGGED - {"fill"}
_MOVED = _VIEWS | name_set("index_add scatter_add")
_JOINED = name_set("cat stack masked_scatter where index_put overlay index_copy")
_INDEXED = name_set("gather index index_select take take_along_dim")
_LOOKED_UP = name_set("embedding index index_select")
_CONTRACTIONS = PRODUCTS | name_set("mv linear _grouped_mm")
_REDUCED = name_set("sum nansum mean amax amin max min var std linalg_vector_norm norm logsumexp median nanmedian")
_PLACED_BY_INDEX = name_set("scatter scatter_add index_add index_copy")
_SAMPLED = name_set("grid_sampler_2d grid_sampler_3d")
_SORTED = name_set("topk sort cummax cummin")
_POINTWISE = name_set("add mul scale rectifier activation clip norm softmax identity") | {"log softmax"}  # kinds

_ROWS: Recent[Rows] = Recent(16)


def find_rows(tape: Tape, sources: Sequence[Source], outputs: Iterable[int] | None = None) -> Rows:
    """Return the rows of a pass.

    Args:
        tape: a recorded pass.
        sources: the inputs whose rows are followed.
        outputs: numbers of values. Calls on which these do not depend, such as those of a hook that runs the model
            again, are ignored. None uses all calls.
    """
    ends = None if outputs is None else tuple(outputs)
    key = tape.signature, tuple(sources), ends
    rows = _ROWS.get(key)
    if rows is None or not all(torch.equal(tape[n].cpu(), t) for n, t in rows.indices.items()):
        calls = tape.calls if ends is None else needed_calls(tape.calls, ends)
        rows = _ROWS.put(key, label_rows(tape, sources, calls))
    tape.release()
    return rows


def label_rows(tape: Tape, sources: Sequence[Source], calls: Sequence[Call]) -> Rows:
    """Return the rows of some calls, in the order of execution."""
    with bare():
        return _Labeller(tape, sources, calls).rows


class _Labeller:
    """Computes the rows of a pass in one loop over its calls."""

    def __init__(self, tape: Tape, sources: Sequence[Source], calls: Sequence[Call]) -> None:
        self.tape, self.rows = tape, Rows()
        self.labels = self.rows.labels
        self.ids: dict[int, Tensor] = {}  # integer value -> number of the input element that each id is; 0 for none
        self.elements: list[tuple[str, int]] = [("", 0)]  # (source, sample) of each input element, by number
        self.first_elements: dict[str, tuple[int, torch.Size]] = {}  # source -> (number of its first element, shape)
        self.looked_up: list[tuple[Tensor, Tensor]] = []  # (elements, their rows)
        self.same: dict[tuple[torch.Size, bytes], Tensor] = {}  # a shared tensor for equal labels
        self.padding: set[int] = set()  # values that hold only padding
        self.input_of: dict[int, str] = {}  # value of unknown rows -> the input from which it is computed
        self.lone: set[int] = set()  # families of constants that have not been combined with other rows yet
        self.blends = False  # whether the current call combines several rows of a family in an element
        self.first_of_windows: dict[Any, int] = {}  # position of windows -> first row of the first result
        self.repeated: list[tuple[int, int, int]] = []  # (first row, last row, offset to rows with equal windows)
        for source in sources:
            self._begin(source)
        for call in calls:
            if not self._look_up(call):
                self._follow(call)
            if KINDS.get(call.name) != "silent":
                self._trace(call)

    # -- where rows begin
    def _new(
        self,
        samples: Tensor,
        source: str,
        value: int,
        grid: tuple[int, ...] | None = None,
        elements: Tensor | None = None,
    ) -> Tensor:
        """Create a family of new rows; return their numbers, in the shape of ``samples``, the sample of each row."""
        rows, count = self.rows, samples.numel()
        numbers = torch.arange(len(rows), len(rows) + count).view(samples.shape)
        order = samples.flatten().argsort(stable=True)
        counts = samples.flatten().bincount()
        counts = counts[counts > 0]
        by_sample = numbers.flatten()[order]
        if len(counts) and bool((counts == counts[0]).all()):
            by_sample = by_sample.view(len(counts), -1)
        looked_up = None if elements is None else elements.flatten()[order].view(by_sample.shape)
        rows.families.append(RowFamily(source, value, by_sample, grid or (by_sample.shape[-1],), looked_up))
        rows.sample = torch.cat([rows.sample, samples.flatten()])
        rows.family = torch.cat([rows.family, torch.full((count,), len(rows.families) - 1)])
        return numbers

    def _begin(self, source: Source) -> None:
        """Create the rows of a source, or the element numbers of ids."""
        shape = self.tape.shapes[source.value]
        samples = torch.arange(shape[0]) if source.samples is None else torch.tensor(source.samples)
        lead = 2 if len(samples) == shape[:2].numel() != shape[0] else 1
        samples = samples.view(*shape[:lead], *(1,) * (len(shape) - lead))
        if source.is_map:
            map_samples = torch.arange(int(samples.max()) + 1)[:, None].expand(-1, shape[-1])
            queries = self._new(map_samples, source.name, source.value)[samples.flatten()]
            queries = queries.view(shape[0], *(1,) * (len(shape) - 3), shape[-1], 1)
            self.labels[source.value] = queries.expand(shape), queries.mT.expand(shape)
            return
        if not self.tape.floating(source.value):
            samples = samples.expand(shape)
            self.first_elements[source.name] = len(self.elements), shape
            self.ids[source.value] = torch.arange(len(self.elements), len(self.elements) + shape.numel()).view(shape)
            self.elements += [(source.name, s) for s in samples.flatten().tolist()]
            return
        features = None if source.features is None else source.features % len(shape)
        grid = tuple(n for i, n in enumerate(shape) if i not in (0, features))
        samples = samples.expand([1 if i == features else n for i, n in enumerate(shape)])
        self.labels[source.value] = (self._new(samples, source.name, source.value, grid).expand(shape),)

    def _look_up(self, call: Call) -> bool:
        """Create rows for embeddings that are looked up by ids, and return True if the call is such a look-up. If equal
        ids are looked up again, they get the same rows."""
        if call.name not in _LOOKED_UP or call.operands[0] in self.labels:
            return False
        if call.operands[-1] not in self.ids or not self.tape.floating(call.operands[0]):
            return False
        ids, result = self.ids[call.operands[-1]], call.results[0]
        rows = next((rows for other, rows in self.looked_up if torch.equal(other, ids)), None)
        if rows is None:
            samples, name = self._samples_of(ids)
            if samples is None:
                return True
            first, (*_, length) = self.first_elements[name]
            elements = torch.where(ids > 0, (ids - first) % length, -1)
            while name in self.rows.roots:
                name += "'"
            rows = self._new(samples, name, result, elements=elements)
            self.looked_up.append((ids, rows))
        else:
            source = self.rows.families[int(self.rows.family[rows.flatten()[0]])].source
            self.rows.repeats.setdefault(source, []).append(result)
        shape = self.tape.shapes[result]
        if call.name == "embedding" or len(shape) == ids.dim() + 1:
            self.labels[result] = (rows.view(*ids.shape, *(1,) * (len(shape) - ids.dim())).expand(shape),)
        return True

    def _samples_of(self, ids: Tensor) -> tuple[Tensor | None, str]:
        """Return the sample of each element number, and the source of all. A 0, such as a start token, gets the sample
        of its neighbours; if all are 0, the samples follow the first axis of the only input of ids. The samples are
        None if unknown."""
        numbers = ids.flatten().tolist()
        if not any(numbers) and len(self.first_elements) == 1:
            ((name, (first, shape)),) = self.first_elements.items()
            if shape[0] == len(ids):
                samples = torch.tensor([s for _, s in self.elements[first : first + shape.numel() : shape[1:].numel()]])
                return samples.view(-1, *(1,) * (ids.dim() - 1)).expand(ids.shape).contiguous(), name
        names = [self.elements[i][0] for i in numbers]
        samples = torch.tensor([self.elements[i][1] if i else -1 for i in numbers]).view(ids.shape)
        if bool((samples >= 0).all()):
            return samples, names[0]
        for axis in range(ids.dim() - 1, -1, -1):
            top = samples.amax(axis, keepdim=True).expand(samples.shape)
            if bool((top >= 0).all()) and bool(((samples == top) | (samples < 0)).all()):
                return top.contiguous(), next(n for i, n in zip(numbers, names, strict=True) if i)
        return None, ""

    # -- propagation
    def _trace(self, call: Call) -> None:
        """If the rows of the results of a call are unknown, record the input from which they are computed."""
        results = [r for r in call.results if not (r in self.labels or r in self.padding) and self.tape.floating(r)]
        name = next(filter(None, map(self._source_of, call.operands)), "") if results else ""
        self.input_of.update(dict.fromkeys(results, name) if name else {})

    def _source_of(self, value: int) -> str:
        """Return the input from which a value is computed; "" for constants."""
        label = self.labels.get(value)
        return self.rows.source_of(label[0]) if label else self.input_of.get(value, "")

    def _follow(self, call: Call) -> None:
        """Label the results of a call."""
        if any(o in self.ids for o in call.operands):
            self._follow_ids(call)
        labels = [self.labels.get(o, ()) for o in call.operands]
        if not any(labels) or not call.results:
            moves = call.name in _MOVED and bool(call.operands) and all(o in self.padding for o in call.operands)
            self.padding.update(call.results if moves else ())
            return
        shape, name = self.tape.shapes[call.results[0]], call.name
        if 0 in shape:
            return
        masks = name == "where" and sum(map(bool, labels)) == 1
        restrides = name == "as_strided" and bool(call.writes)
        if name in _MOVED and not masks and not restrides:
            self._move(call, labels)
            return
        if sum(map(bool, labels)) > 1 or torch.Tag.pointwise not in getattr(call.operator, "tags", ()):
            self.lone.clear()
        self.blends = False
        label = tuple(filter(holds_rows, self._label_of(call, labels, shape)))
        for r in call.results:
            if label and self.tape.floating(r) and self.tape.shapes[r] == shape:
                self.labels[r] = label
                self.rows.blended.update([r] if self.blends else [])

    def _label_of(self, call: Call, labels: list[Label], shape: torch.Size) -> Label:
        """Return the label of the results of a call, from those of its operands; () if unknown."""
        name = call.name
        if name in _CONTRACTIONS:
            a, b = (labels[0], ()) if name in ("linear", "_grouped_mm") else labels[-2:]
            return self._product(call, a, b, shape)
        if call.kind == OPAQUE_LAYER and self._keeps_rows(call, shape):
            return self._product(call, next(filter(None, labels)), (), shape)
        if name in _RESIZED:
            return self._resize(call, labels[0], shape)
        if name in _SAMPLED:
            return self._sample(call, labels, shape)
        if name in _REDUCED and len(call.operands) == 1:
            return self._reduce(call, labels[0], shape)
        if name in _SORTED:
            return sorted_features(call, labels[0], shape)
        if name in _COMPLEX:
            return complex_view(call, labels[0], shape)
        if name == "copy":
            return tuple(t.expand(shape) for t in labels[1])
        if not _is_pointwise(call):
            return ()
        shapes = [self.tape.shapes[o] for o in call.operands]
        return self._elementwise([(k, s) for k, s in zip(labels, shapes, strict=True) if k], shape)

    def _keeps_rows(self, call: Call, shape: torch.Size) -> bool:
        """Return True if a custom linear operation maps features of rows to other features of the same rows."""
        shapes = [self.tape.shapes[o] for o in call.operands if o in self.labels]
        return len(shapes) == 1 and len(shapes[0]) > 1 and shapes[0][:-1] == shape[:-1]

    def _follow_ids(self, call: Call) -> None:
        """Follow the element numbers of ids through calls that rearrange or shift them."""
        first = self.ids.get(call.operands[0])
        by_ids = call.name in _PLACED_BY_INDEX and any(o in self.ids for o in call.operands[1:])
        moved = call.name in _MOVED and not by_ids and (first is not None or call.name not in _INDEXED)
        if call.name == "copy" or moved:
            places = call.operands[:1] if call.name in _INDEXED else call.operands
            ids = [self.ids.get(o) if o in places else None for o in call.operands]
            numbers = rearranged(call, [self._unlabelled(call, i) if t is None else t for i, t in enumerate(ids)])
        elif first is not None and (call.name in _UNMOVED or _is_pointwise(call)):
            numbers = [first] * len(call.results)
        else:
            return
        for r, t in zip(call.results, numbers, strict=True):
            if not self.tape.floating(r) and self.tape.dtypes[r] != torch.bool and t.shape == self.tape.shapes[r]:
                self.ids[r] = t

    def _unlabelled(self, call: Call, place: int) -> Tensor:
        """Return the tensor that replaces an operand without rows when a call is applied to row numbers: the operand
        itself if it is an index or a mask, zeros if it is data."""
        n = call.operands[place]
        selects = call.name in _INDEXED or any(o in self.labels for o in call.operands)
        if self.tape.floating(n) or not (selects or self.tape.dtypes[n] == torch.bool):
            return no_rows(self.tape.shapes[n])
        self.rows.indices[n] = self.tape[n].detach().cpu().clone()
        return self.rows.indices[n]

    def _move(self, call: Call, labels: list[Label]) -> None:
        """Label the results of a call that rearranges elements."""
        if call.name == "cat" and along_features(call, labels):
            labels = [tuple(map(self._first_rows, k)) for k in labels]
        elif call.name == "cat" and self.lone:
            labels = self._without_strays(call, labels)
        for part in range(max(map(len, labels))):
            numbers = [k[min(part, len(k) - 1)] if k else self._unlabelled(call, i) for i, k in enumerate(labels)]
            for r, label in zip(call.results, rearranged(call, numbers), strict=True):
                if self.tape.floating(r) and holds_rows(label):
                    label = self._shared(slim(label)).expand(self.tape.shapes[r])
                    if call.name == "cat":
                        label = self._fill(call, labels, label)
                    elif call.name == "constant_pad_nd" and len(labels[0]) == 1:
                        label = padded(label, labels[0][0])
                    self.labels[r] = (*(self.labels.get(r, ()) if part else ()), label)
                elif self.tape.floating(r):
                    self.padding.add(r)
        joined = self.labels.get(call.results[0], ())
        joins_rows = call.name in _JOINED and not (call.name == "cat" and along_features(call, labels))
        if joins_rows and len(joined) == 1:
            self._join(joined[0])

    def _shared(self, label: Tensor) -> Tensor:
        """Return the first label that is equal to this one, to save memory."""
        return self.same.setdefault((label.shape, label.contiguous().numpy().tobytes()), label)

    def _without_strays(self, call: Call, labels: list[Label]) -> list[Label]:
        """Drop the labels of constants that are concatenated with rows of other samples or that repeat a row, such as
        class tokens taken from the first sample (TimeSformer) or repeated for windows (RF-DETR)."""
        lone = [not k or self.lone.issuperset(self.rows.family[self.rows.distinct(k[0])].tolist()) for k in labels]
        first = [k[0].narrow(call.argument("dim", 0), 0, 1) if k else no_rows(()) for k in labels]
        facts = [(self.rows.sample[t].tolist(), len(t.unique())) for t in first]
        beside = next((fact for fact, is_lone in zip(facts, lone, strict=True) if not is_lone), None)
        strays = [is_lone and beside not in (None, fact) for is_lone, fact in zip(lone, facts, strict=True)]
        return [() if is_stray else k for k, is_stray in zip(labels, strays, strict=True)]

    def _fill(self, call: Call, labels: list[Label], label: Tensor) -> Tensor:
        """Label values without rows that are concatenated with rows: constants, such as class tokens, and values whose
        rows are unknown become new rows; along an axis of features, constants belong to the rows beside them."""
        axis, shape = call.argument("dim", 0), label.shape
        like = next(k[0] for k in labels if k)
        filled = all(k or o in self.padding for k, o in zip(labels, call.operands, strict=True))
        if filled or like.dim() != label.dim() or not bool((label == 0).any()):
            return label
        if along_features(call, labels):
            return torch.where(label == 0, like.narrow(axis, 0, 1).expand(shape), label)
        samples = self.rows.sample[like]
        samples = thin(samples, [a for a in range(like.dim()) if constant_along(samples, a)])
        label = slim(label)
        same = [constant_along(like, a) and like.shape[a] == n and label.shape[a] == 1 for a, n in enumerate(shape)]
        size = [1 if s else n for s, n in zip(same, shape, strict=True)]
        if any(m not in (1, n) for m, n in zip(samples.shape, size, strict=True)):
            return label.expand(shape)  # the constants are concatenated along the axis of samples
        missing = (label == 0).expand(size)
        numbers = torch.zeros(size, dtype=torch.long)
        names = ["" if k else self.input_of.get(o, "") for k, o in zip(labels, call.operands, strict=True)]
        parts = [(names.index(n), self.tape.shapes[o]) for n, o in zip(names, call.operands, strict=True)]
        origin = torch.cat([torch.full((t[axis],), i) for i, t in parts if len(t) == len(shape)])
        origin = origin.view(-1, *(1,) * (len(shape) - 1 - axis % len(shape)))
        place = first_with_equal_rows(label.expand(size), axis)  # heads beside samples share their constants
        is_first = place == torch.arange(place.numel()).view(place.shape)
        for i in origin.unique().tolist():
            here = missing & (origin == i) & is_first
            if bool(here.any()):
                numbers[here] = self._new(samples.expand(size)[here], names[i], call.results[0])
                self.lone.update(() if names[i] else [len(self.rows.families) - 1])
        numbers = numbers.movedim(axis, -1).reshape(-1, size[axis])[place.squeeze(axis)].movedim(-1, axis)
        return torch.where(missing, numbers, label).expand(shape)

    def _join(self, label: Tensor) -> None:
        """Record that the families of a label are joined in a value."""
        families = self.rows.family[thin(label)].unique().tolist()
        first, *others = dict.fromkeys(self.rows.linked(f) for f in families)
        self.rows.joined.update(dict.fromkeys(others, first))

    def _elementwise(self, labels: list[tuple[Label, torch.Size]], shape: torch.Size) -> Label:
        """Return the label of an elementwise call, from (label, shape) of its operands. If the operands have different
        rows, the result has those of operands that are not broadcast. If all operands are broadcast, as in q kᵀ written
        as a product of two broadcast values, the result is a map with the rows of both."""
        distinct: list[Tensor] = []
        broadcast: list[bool] = []
        for label, size in labels:
            if len(size) > len(shape) or any(m not in (1, n) for m, n in zip(size[::-1], shape[::-1], strict=False)):
                continue
            for numbers in (t.expand(shape) for t in label):
                if not any(equal(numbers, other) for other in distinct):
                    distinct.append(numbers)
                    broadcast.append(size != shape)
        if len(distinct) < 2 or all(broadcast):
            return tuple(distinct[:2]) if len(distinct) > 1 and is_crossed(*distinct[:2]) else tuple(distinct[:1])
        full = [label for label, size in labels if size == shape]
        most = max(full, key=lambda label: (len(label), -self._began(label[0])))
        self.blends = any(self._blend(most, label) for label in full)
        if len(most) == 1 and not bool(thin(most[0]).all()):  # elements without a row get that of another operand
            for label in full:
                most = (torch.where(most[0] == 0, label[0], most[0]),)
        return most

    def _began(self, label: Tensor) -> int:
        """Return the first family of some rows: the rows of a state began before those of a branch computed from it."""
        return int(self.rows.family[self.rows.distinct(label)].min())

    def _blend(self, a: Label, b: Label) -> bool:
        """Return True if two labels have different rows of the same family at the same position."""
        if len(a) != 1 or len(b) != 1 or equal(a[0], b[0]):
            return False
        first, second = slim(a[0]), slim(b[0])
        family = self.rows.family
        return bool(((first != second) & (first > 0) & (second > 0) & (family[first] == family[second])).any())

    def _product(self, call: Call, a: Label, b: Label, shape: torch.Size) -> Label:
        """Return the label of a product a @ b, which sums over the last axis of a and the second to last of b.

        Rows that do not change along the summed axis are preserved: x W, ``[N, D] @ [D, E]``, has the rows of x; q kᵀ
        has those of q and of k; and A V, ``[Q, K] @ [K, D]``, has the queries of A. If all rows are summed, as in
        pooling by learned queries, the result has new rows, which mix them.
        """
        if preserved := preserved_rows(a, b, shape):
            return preserved[:2]
        numbers, axis = (a[0], -1) if a else (b[0], max(-2, -b[0].dim()))
        by = -2 if a and b else axis if pools(numbers, axis) else None
        return (self._mixture(call, numbers, axis, shape, by=by),)

    def _mixture(
        self, call: Call, label: Tensor, axes: int | Sequence[int], shape: torch.Size, by: int | None = None
    ) -> Tensor:
        """Create rows that mix the rows of a label along some axes. Elements that mix the same rows belong to the same
        new row. With ``by``, for learned queries or pooling by a matrix, each index along this axis of the result is a
        new row."""
        axes = [a % label.dim() for a in ([axes] if isinstance(axes, int) else axes)]
        mixed = thin(label, [a for a in range(label.dim()) if a not in axes and constant_along(label, a)])
        of = mixed.amax(axes, keepdim=True)
        for axis in axes:  # a hash of each set of mixed rows
            factors = torch.randint(1 << 40, (mixed.shape[axis],), generator=torch.Generator().manual_seed(axis))
            mixed = (mixed.movedim(axis, -1) * factors).sum(-1, keepdim=True).movedim(-1, axis)
        if mixed.dim() != len(shape):
            of, mixed = (t.squeeze(axes) for t in (of, mixed))
        if by is not None:
            mixed = mixed + torch.arange(shape[by]).view(-1, *(1,) * (-1 - by))
            of = of.expand(mixed.shape)
        sets, inverse = mixed.unique(return_inverse=True)
        first = first_places(inverse.flatten(), len(sets))
        order = first.argsort()  # in the order of their first occurrence
        rows = of.flatten()[first[order]]
        source = self.rows.source_of(label)
        numbers = torch.empty(len(sets), dtype=torch.long)
        numbers[order] = self._new(self.rows.sample[rows], source, call.results[0])
        return numbers[inverse].expand(shape)

    def _reduce(self, call: Call, label: Label, shape: torch.Size) -> Label:
        """Return the label of a reduction. A reduction over features keeps the rows; one over rows mixes them."""
        before = self.tape.shapes[call.operands[0]]
        over = call.argument("dim")
        over = range(len(before)) if over is None or over == [] else [over] if isinstance(over, int) else over
        axes = [a % max(1, len(before)) for a in over]
        size = [1 if a in axes else n for a, n in enumerate(before)]
        most = [t.amax(axes, keepdim=True) for t in map(slim, label)]
        # labels in which each sum has the elements of a single row, possibly with constants
        single = [m for m, t in zip(most, map(slim, label), strict=True) if bool(((t == m) | (t == 0)).all())]
        return tuple(m.expand(size).reshape(shape) for m in single) or (self._mixture(call, label[0], axes, shape),)

    def _resize(self, call: Call, label: Label, shape: torch.Size) -> Label:
        """Return the label of a convolution or pool, ``[B, C, *grid]``. If the size of the grid is unchanged, the rows
        are the same; otherwise, or if the channels hold several grids, the result has new rows."""
        if not label or len(shape) < 3 or not constant_along(self.rows.sample[label[0]], 1):
            return ()
        first = label[0].narrow(1, 0, 1)
        if first.shape[2:] == shape[2:] and all(constant_along(t, 1) for t in label):
            return tuple(t.narrow(1, 0, 1).expand(shape) for t in label)
        source = self.rows.source_of(first)
        # the largest along the grid, because padding has the sample 0
        samples = self.rows.sample[first].amax([*range(2, len(shape))], keepdim=True).expand(shape[0], 1, *shape[2:])
        numbers = self._new(samples, source, call.results[0], tuple(shape[2:]))
        start, key = int(numbers.min()), (call.operands[0], shape[2:], *window(self.tape, call))
        if offset := self.first_of_windows.setdefault(key, start) - start:
            self.repeated.append((start, int(numbers.max()), offset))
        return (numbers.expand(shape),)

    def _first_rows(self, label: Tensor) -> Tensor:
        """Return a label in which rows that begin in a convolution have the numbers of the first rows with the same
        windows, such as those of another part of the channels."""
        numbers = thin(label)
        for first, last, offset in self.repeated:
            numbers = torch.where((numbers >= first) & (numbers <= last), numbers + offset, numbers)
        return numbers.expand(label.shape)

    def _sample(self, call: Call, labels: list[Label], shape: torch.Size) -> Label:
        """Return the label of values of ``[B, C, *grid]`` sampled at positions ``[B, *grid, axes]``: the rows of the
        positions, or new rows if the positions are constants."""
        places = labels[1]
        if places and all(constant_along(t, -1) for t in places):
            return tuple(t[..., 0].unsqueeze(1).expand(shape) for t in places)
        return self._resize(call, labels[0], shape)


def _is_pointwise(call: Call) -> bool:
    """Return True if each element of a result belongs to the row of the operands at the same position."""
    by_name = call.name in _UNMOVED or call.name in ELEMENTWISE or call.name in ("where", "as_strided")
    by_kind = (call.kind or KINDS.get(call.name)) in _POINTWISE
    return by_name or by_kind or torch.Tag.pointwise in getattr(call.operator, "tags", ())
