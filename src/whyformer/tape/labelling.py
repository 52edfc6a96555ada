"""Find whose row each element of a value is, by applying the calls of a tape to the numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call
from whyformer.tape.declared import HIDDEN_LAYER
from whyformer.tape.rows import Family, Label, Rows, Source, constant_along, equal, first_places, slim, thin, zero
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS, name_set
from whyformer.tape.units import needed_calls
from whyformer.tape.values import Tape

__all__ = ["find_rows"]


_KEPT = name_set(
    "clone contiguous _to_copy to alias lift_fresh lift dropout native_dropout masked_fill nan_to_num tril triu cumsum"
)
_COMPLEX = name_set("real imag view_as_real view_as_complex _conj conj _neg_view resolve_conj resolve_neg")
_RESIZED = {name for name in KINDS if "pool" in name or "upsample" in name} | {"convolution", "_convolution"}
_JAGGED = name_set("_jagged_to_padded_dense_forward _padded_dense_to_jagged_forward")
_VIEWS = {name for name, kind in KINDS.items() if kind == "view"} - _KEPT - _COMPLEX - _RESIZED - _JAGGED - {"fill"}
_MOVED = _VIEWS | name_set("index_add scatter_add index_copy")
_FLOATS = name_set("im2col reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d")  # no integer kernel
_JOINED = name_set("cat stack masked_scatter where index_put overlay index_copy")
_INDEXED = name_set("gather index index_select take take_along_dim")
_LOOKED_UP = name_set("embedding index index_select")
_PRODUCTS = name_set("mm bmm addmm baddbmm matmul mv linear _grouped_mm")
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
        outputs: numbers of values; calls that these do not depend on, such as those of a hook that runs the model once
            more, are left out. None takes all calls.
    """
    ends = None if outputs is None else tuple(outputs)
    key = tape.signature, tuple(sources), ends
    rows = _ROWS.get(key)
    if rows is None or not all(torch.equal(tape[n].cpu(), t) for n, t in rows.indices.items()):
        calls = tape.calls if ends is None else needed_calls(tape, ends)
        with bare():
            rows = _ROWS.put(key, _Following(tape, sources, calls).rows)
    tape.release()
    return rows


class _Following:
    """One pass over the calls, in the order of execution."""

    def __init__(self, tape: Tape, sources: Sequence[Source], calls: Sequence[Call]) -> None:
        self.tape, self.rows = tape, Rows()
        self.labels = self.rows.labels
        self.ids: dict[int, Tensor] = {}  # integer value -> the element of an input that each one is; 0 for none
        self.elements: list[tuple[str, int]] = [("", 0)]  # (source, sample) of each element of an integer input
        self.first: dict[str, tuple[int, int]] = {}  # source -> (number of its first element, length of its last axis)
        self.looked_up: list[tuple[Tensor, Tensor]] = []  # (elements, their rows)
        self.same: dict[tuple[torch.Size, bytes], Tensor] = {}  # one tensor for equal labels
        self.blank: set[int] = set()  # values that hold padding alone, cut off from values with rows
        self.blends = False  # the call at hand makes elements of several rows of one family
        for source in sources:
            self._begin(source)
        for call in calls:
            if not self._look_up(call):
                self._follow(call)

    # -- where rows begin
    def _new(
        self,
        samples: Tensor,
        source: str,
        value: int,
        grid: tuple[int, ...] | None = None,
        elements: Tensor | None = None,
    ) -> Tensor:
        """Number new rows, in the shape of ``samples``, and of ``elements`` if they are looked up."""
        rows, count = self.rows, samples.numel()
        numbers = torch.arange(len(rows), len(rows) + count).view(samples.shape)
        order = samples.flatten().argsort(stable=True)
        counts = samples.flatten().bincount()
        counts = counts[counts > 0]
        listed = numbers.flatten()[order]
        if len(counts) and bool((counts == counts[0]).all()):
            listed = listed.view(len(counts), -1)
        looked_up = None if elements is None else elements.flatten()[order].view(listed.shape)
        rows.families.append(Family(source, value, listed, grid or (listed.shape[-1],), looked_up))
        rows.sample = torch.cat([rows.sample, samples.flatten()])
        rows.family = torch.cat([rows.family, torch.full((count,), len(rows.families) - 1)])
        return numbers

    def _begin(self, source: Source) -> None:
        shape = self.tape.shapes[source.value]
        samples = torch.arange(shape[0]) if source.samples is None else torch.tensor(source.samples)
        lead = 2 if len(samples) == shape[:2].numel() != shape[0] else 1
        samples = samples.view(*shape[:lead], *(1,) * (len(shape) - lead))
        if source.is_map:
            each = torch.arange(int(samples.max()) + 1)[:, None].expand(-1, shape[-1])
            queries = self._new(each, source.name, source.value)[samples.flatten()]
            queries = queries.view(shape[0], *(1,) * (len(shape) - 3), shape[-1], 1)
            self.labels[source.value] = queries.expand(shape), queries.mT.expand(shape)
            return
        if not self.tape.floating(source.value):
            samples = samples.expand(shape)
            self.first[source.name] = len(self.elements), shape[-1]
            self.ids[source.value] = torch.arange(len(self.elements), len(self.elements) + shape.numel()).view(shape)
            self.elements += [(source.name, s) for s in samples.flatten().tolist()]
            return
        features = None if source.features is None else source.features % len(shape)
        grid = tuple(n for i, n in enumerate(shape) if i not in (0, features))
        samples = samples.expand([1 if i == features else n for i, n in enumerate(shape)])
        self.labels[source.value] = (self._new(samples, source.name, source.value, grid).expand(shape),)

    def _look_up(self, call: Call) -> bool:
        """Rows begin where vectors are looked up by ids. The same ids looked up again are the same rows."""
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
            first, length = self.first[name]
            elements = torch.where(ids > 0, (ids - first) % length, -1)
            while name in self.rows.begun:
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
        """Samples and source of elements. What is no element, such as a start token, is of the sample beside it."""
        listed = ids.flatten().tolist()
        names = [self.elements[i][0] for i in listed]
        samples = torch.tensor([self.elements[i][1] if i else -1 for i in listed]).view(ids.shape)
        if bool((samples >= 0).all()):
            return samples, names[0]
        for axis in range(ids.dim() - 1, -1, -1):
            top = samples.amax(axis, keepdim=True).expand(samples.shape)
            if bool((top >= 0).all()) and bool(((samples == top) | (samples < 0)).all()):
                return top.contiguous(), next(n for i, n in zip(listed, names, strict=True) if i)
        return None, ""

    # -- where they go
    def _follow(self, call: Call) -> None:
        if any(o in self.ids for o in call.operands):
            self._follow_ids(call)
        known = [self.labels.get(o, ()) for o in call.operands]
        if not any(known) or not call.results:
            moves = call.name in _MOVED and bool(call.operands) and all(o in self.blank for o in call.operands)
            self.blank.update(call.results if moves else ())
            return
        shape, name = self.tape.shapes[call.results[0]], call.name
        if 0 in shape:
            return
        masks = name == "where" and sum(map(bool, known)) == 1
        restrides = name == "as_strided" and bool(call.writes)
        if name in _MOVED and not masks and not restrides:
            self._move(call, known)
            return
        self.blends = False
        found = tuple(filter(_holds_rows, self._made(call, known, shape)))
        for r in call.results:
            if found and self.tape.floating(r) and self.tape.shapes[r] == shape:
                self.labels[r] = found
                self.rows.blended.update([r] if self.blends else [])

    def _made(self, call: Call, known: list[Label], shape: torch.Size) -> Label:
        """The label of what a call computes; none if it is unknown."""
        name = call.name
        if name in _PRODUCTS:
            a, b = (known[0], ()) if name in ("linear", "_grouped_mm") else known[-2:]
            return self._product(call, a, b, shape)
        if call.kind == HIDDEN_LAYER and self._keeps_rows(call, shape):
            return self._product(call, next(filter(None, known)), (), shape)
        if name in _RESIZED:
            return self._resize(call, known[0], shape)
        if name in _SAMPLED:
            return self._sample(call, known, shape)
        if name in _REDUCED and len(call.operands) == 1:
            return self._reduce(call, known[0], shape)
        if name in _SORTED:
            return self._sort(call, known[0], shape)
        if name in _COMPLEX:
            return self._complex(call, known[0], shape)
        if name == "copy":
            return tuple(t.expand(shape) for t in known[1])
        if not _is_pointwise(call):
            return ()
        shapes = [self.tape.shapes[o] for o in call.operands]
        return self._elementwise([(k, own) for k, own in zip(known, shapes, strict=True) if k], shape)

    def _keeps_rows(self, call: Call, shape: torch.Size) -> bool:
        """Return True if a layer that users declare makes other features of the same rows."""
        given = [self.tape.shapes[o] for o in call.operands if o in self.labels]
        return len(given) == 1 and len(given[0]) > 1 and given[0][:-1] == shape[:-1]

    def _follow_ids(self, call: Call) -> None:
        """Integers that stand for elements of an input, through what rearranges or shifts them."""
        given = self.ids.get(call.operands[0])
        by_ids = call.name in _PLACED_BY_INDEX and any(o in self.ids for o in call.operands[1:])
        moved = call.name in _MOVED and not by_ids and (given is not None or call.name not in _INDEXED)
        if call.name == "copy" or moved:
            places = call.operands[:1] if call.name in _INDEXED else call.operands
            ids = [self.ids.get(o) if o in places else None for o in call.operands]
            found = _moved(call, [self._still(call, i) if t is None else t for i, t in enumerate(ids)])
        elif given is not None and (call.name in _KEPT or _is_pointwise(call)):
            found = [given] * len(call.results)
        else:
            return
        for r, t in zip(call.results, found, strict=True):
            if not self.tape.floating(r) and self.tape.dtypes[r] != torch.bool and t.shape == self.tape.shapes[r]:
                self.ids[r] = t

    def _still(self, call: Call, place: int) -> Tensor:
        """What stands for an operand without rows: itself if it says which rows are meant, no row if it is data."""
        n = call.operands[place]
        says = call.name in _INDEXED or any(o in self.labels for o in call.operands)
        if self.tape.floating(n) or not (says or self.tape.dtypes[n] == torch.bool):
            return zero(self.tape.shapes[n])
        self.rows.indices[n] = self.tape[n].detach().cpu().clone()
        return self.rows.indices[n]

    def _move(self, call: Call, known: list[Label]) -> None:
        for part in range(max(map(len, known))):
            given = [k[min(part, len(k) - 1)] if k else self._still(call, i) for i, k in enumerate(known)]
            for r, label in zip(call.results, _moved(call, given), strict=True):
                if self.tape.floating(r) and _holds_rows(label):
                    label = self._shared(slim(label)).expand(self.tape.shapes[r])
                    if call.name == "cat":
                        label = self._fill(call, known, label)
                    self.labels[r] = (*(self.labels.get(r, ()) if part else ()), label)
                elif self.tape.floating(r):
                    self.blank.add(r)
        joined = self.labels.get(call.results[0], ())
        beside = call.name in _JOINED and not (call.name == "cat" and _along_features(call, known))
        if beside and len(joined) == 1:
            self._join(joined[0])

    def _shared(self, label: Tensor) -> Tensor:
        """The first label that is equal to this one."""
        return self.same.setdefault((label.shape, label.contiguous().numpy().tobytes()), label)

    def _fill(self, call: Call, known: list[Label], label: Tensor) -> Tensor:
        """Give rows to constants that are put beside others: a class token is a row, further features are none."""
        axis, shape = call.argument("dim", 0), label.shape
        like = next(k[0] for k in known if k)
        filled = all(k or o in self.blank for k, o in zip(known, call.operands, strict=True))
        if filled or like.dim() != label.dim() or not bool((label == 0).any()):
            return label
        if _along_features(call, known):
            return torch.where(label == 0, like.narrow(axis, 0, 1).expand(shape), label)
        samples = self.rows.sample[like]
        samples = thin(samples, [a for a in range(like.dim()) if constant_along(samples, a)])
        label = slim(label)
        same = [constant_along(like, a) and like.shape[a] == n and label.shape[a] == 1 for a, n in enumerate(shape)]
        size = [1 if one else n for one, n in zip(same, shape, strict=True)]
        if any(m not in (1, n) for m, n in zip(samples.shape, size, strict=True)):
            return label.expand(shape)  # constants beside samples
        missing = (label == 0).expand(size)
        numbers = torch.zeros(size, dtype=torch.long)
        numbers[missing] = self._new(samples.expand(size)[missing], "", call.results[0])
        return torch.where(missing, numbers, label).expand(shape)

    def _join(self, label: Tensor) -> None:
        """Note that the rows of a label stand side by side."""
        families = self.rows.family[thin(label)].unique().tolist()
        first, *others = dict.fromkeys(self.rows.linked(f) for f in families)
        self.rows.beside.update(dict.fromkeys(others, first))

    def _elementwise(self, known: list[tuple[Label, torch.Size]], shape: torch.Size) -> Label:
        """Rows that meet themselves stay. Of others those that are not broadcast; q kᵀ written as a product of two
        broadcast values has the rows of both."""
        found: list[Tensor] = []
        broadcast: list[bool] = []
        for label, own in known:
            if len(own) > len(shape) or any(m not in (1, n) for m, n in zip(own[::-1], shape[::-1], strict=False)):
                continue
            for one in (t.expand(shape) for t in label):
                if not any(equal(one, other) for other in found):
                    found.append(one)
                    broadcast.append(own != shape)
        if len(found) < 2 or all(broadcast):
            return tuple(found[:2]) if len(found) > 1 and _is_crossed(*found[:2]) else tuple(found[:1])
        whole = [label for label, own in known if own == shape]
        most = max(whole, key=lambda label: (len(label), -self._began(label[0])))
        self.blends = any(self._blend(most, label) for label in whole)
        if len(most) == 1 and not bool(thin(most[0]).all()):  # added to what was not filled in yet
            for label in whole:
                most = (torch.where(most[0] == 0, label[0], most[0]),)
        return most

    def _began(self, label: Tensor) -> int:
        """The first family of some rows: a state's rows began before those of what is made of it and added."""
        return int(self.rows.family[self.rows.distinct(label)].min())

    def _blend(self, a: Label, b: Label) -> bool:
        """Return True if other rows of the same family stand at the same places."""
        if len(a) != 1 or len(b) != 1 or equal(a[0], b[0]):
            return False
        one, other = slim(a[0]), slim(b[0])
        family = self.rows.family
        return bool(((one != other) & (one > 0) & (other > 0) & (family[one] == family[other])).any())

    def _product(self, call: Call, a: Label, b: Label, shape: torch.Size) -> Label:
        """A product keeps the rows that do not change along the axis that it sums over."""
        kept: list[Tensor] = []
        dropped: list[tuple[Tensor, int]] = []
        for label, other, axis in ((a, b, -1), (b, a, -2)):
            for one in label:
                axis = max(axis, -one.dim())
                first = one.narrow(axis, 0, 1)
                first = (first if one.dim() <= len(shape) else first.squeeze(axis)).expand(shape)
                is_key = False
                if one.shape[axis] == 1 and len(label) == 2:  # the only key of a map over one key
                    is_key = any(equal(first, t.narrow(-3 - axis, 0, 1).expand(shape)) for t in other)
                if is_key or not constant_along(one, axis):
                    dropped.append((one, axis))
                elif not any(equal(first, t) for t in kept):
                    kept.append(first)
        if len(kept) == 2 and a and b and not all(_goes_on(t, axis) for t, axis in zip(kept, (-2, -1), strict=True)):
            moving = [t for t, axis in zip(kept, (-2, -1), strict=True) if _goes_on(t, axis)]
            kept = moving or kept  # a row times a state, of which each sample has one, is the row's
        if kept:
            return tuple(kept[:2])
        one, axis = dropped[0]
        by = -2 if a and b else axis if _pools(one, axis) else None
        return (self._mixture(call, one, axis, shape, by=by),)

    def _mixture(
        self, call: Call, label: Tensor, axes: int | Sequence[int], shape: torch.Size, by: int | None = None
    ) -> Tensor:
        """Begin rows that mix others along some axes. Elements that mix the same rows are one row; with learned queries
        or a pool by a matrix, each element along the axis ``by`` of the result is one."""
        axes = [a % label.dim() for a in ([axes] if isinstance(axes, int) else axes)]
        mixed = thin(label, [a for a in range(label.dim()) if a not in axes and constant_along(label, a)])
        of = mixed.amax(axes, keepdim=True)
        for axis in axes:  # a number for each set of rows
            factors = torch.randint(1 << 40, (mixed.shape[axis],), generator=torch.Generator().manual_seed(axis))
            mixed = (mixed.movedim(axis, -1) * factors).sum(-1, keepdim=True).movedim(-1, axis)
        if mixed.dim() != len(shape):
            of, mixed = (t.squeeze(axes) for t in (of, mixed))
        if by is not None:
            mixed = mixed + torch.arange(shape[by]).view(-1, *(1,) * (-1 - by))
            of = of.expand(mixed.shape)
        sets, inverse = mixed.unique(return_inverse=True)
        first = first_places(inverse.flatten(), len(sets))
        order = first.argsort()  # in the order in which they stand
        rows = of.flatten()[first[order]]
        source = self.rows.families[int(self.rows.family[rows].max())].source
        numbers = torch.empty(len(sets), dtype=torch.long)
        numbers[order] = self._new(self.rows.sample[rows], source, call.results[0])
        return numbers[inverse].expand(shape)

    def _reduce(self, call: Call, label: Label, shape: torch.Size) -> Label:
        before = self.tape.shapes[call.operands[0]]
        over = call.argument("dim")
        over = range(len(before)) if over is None or over == [] else [over] if isinstance(over, int) else over
        axes = [a % max(1, len(before)) for a in over]
        size = [1 if a in axes else n for a, n in enumerate(before)]
        most = [t.amax(axes, keepdim=True) for t in map(slim, label)]  # one row, perhaps beside constants
        alone = [m for m, t in zip(most, map(slim, label), strict=True) if bool(((t == m) | (t == 0)).all())]
        kept = [m.expand(size).reshape(shape) for m in alone]
        return tuple(kept) or (self._mixture(call, label[0], axes, shape),)

    def _sort(self, call: Call, label: Label, shape: torch.Size) -> Label:
        """Features of a row in another order belong to the same row; rows in an order of values are unknown."""
        axis = call.argument("dim", -1)
        known = all(constant_along(t, axis) for t in label)
        return tuple(t.narrow(axis, 0, 1).expand(shape) for t in label) if known else ()

    def _resize(self, call: Call, label: Label, shape: torch.Size) -> Label:
        """Convolutions and pools ``[B, C, *grid]``. Rows of a grid that keeps its size go on, others begin. So do rows
        where several grids lie along the channels."""
        if not label or len(shape) < 3 or not constant_along(self.rows.sample[label[0]], 1):
            return ()
        first = label[0].narrow(1, 0, 1)
        if first.shape[2:] == shape[2:] and all(constant_along(t, 1) for t in label):
            return tuple(t.narrow(1, 0, 1).expand(shape) for t in label)
        source = self.rows.families[int(self.rows.family[first].max())].source
        # the largest along the grid: padding is of no sample
        samples = self.rows.sample[first].amax(tuple(range(2, len(shape))), keepdim=True)
        samples = samples.expand(shape[0], 1, *shape[2:])
        return (self._new(samples, source, call.results[0], tuple(shape[2:])).expand(shape),)

    def _sample(self, call: Call, known: list[Label], shape: torch.Size) -> Label:
        """Values of a map ``[B, C, *grid]`` at places ``[B, *grid, axes]`` belong to the rows of the places; if these
        are constants, rows begin."""
        places = known[1]
        if places and all(constant_along(t, -1) for t in places):
            return tuple(t[..., 0].unsqueeze(1).expand(shape) for t in places)
        return self._resize(call, known[0], shape)

    def _complex(self, call: Call, label: Label, shape: torch.Size) -> Label:
        if call.name == "view_as_complex":
            return tuple(t.select(-1, 0) for t in label)
        return tuple((t.unsqueeze(-1) if call.name == "view_as_real" else t).expand(shape) for t in label)


def _pools(label: Tensor, axis: int) -> bool:
    """Return True if rows lie along an axis one by one and have features along another, so that a product with a
    constant matrix makes as many rows as it has outputs. Of rows that lie there with their features, it makes one."""
    axes = [a - label.dim() for a in range(label.dim()) if a - label.dim() != axis]
    features = any(label.shape[a] > 1 and constant_along(label, a) for a in axes)
    numbers = slim(label).movedim(axis, -1)
    return features and bool((numbers.sort(-1).values.diff(dim=-1) != 0).all())


def _goes_on(label: Tensor, axis: int) -> bool:
    """Return True if rows may lie along an axis of a product, and not the features of one."""
    return label.dim() < -axis or label.shape[axis] == 1 or not constant_along(label, axis)


def _is_crossed(a: Tensor, b: Tensor) -> bool:
    """Return True if each of two labels changes along an axis along which the other does not, as those of a map do."""
    moves = [(not constant_along(a, axis), not constant_along(b, axis)) for axis in range(a.dim())]
    return (True, False) in moves and (False, True) in moves


def _holds_rows(label: Tensor) -> bool:
    """Return False for a label of padding alone, as of a part of a value that no row was put in."""
    return bool(thin(label).any())


def _is_pointwise(call: Call) -> bool:
    """Return True if each element of a result belongs to the row of the operands' elements at its place."""
    known = call.name in _KEPT or call.name in ELEMENTWISE or call.name in ("where", "as_strided")
    tags = getattr(call.operator, "tags", ())
    return known or (call.kind or KINDS.get(call.name)) in _POINTWISE or torch.Tag.pointwise in tags


def _along_features(call: Call, known: list[Label]) -> bool:
    """Return True if values are put together feature by feature, not row by row."""
    axis = call.argument("dim", 0)
    return all(k[0].dim() > 0 and k[0].shape[axis] > 1 and constant_along(k[0], axis) for k in known if k)


_PLACED: dict[str, Callable[..., Tensor]] = {"index_add": torch.index_copy, "scatter_add": torch.scatter}


def _moved(call: Call, given: list[Tensor]) -> list[Tensor]:
    """Repeat a call that rearranges elements on row numbers."""
    if call.name in _PLACED:  # rows put where nothing is yet
        return [_PLACED[call.name](given[0], call.argument("dim", 0), *given[1:])]
    if call.name == "constant_pad_nd":
        return [torch.nn.functional.pad(given[0], call.args[1], value=0)]
    if call.name == "scatter" and len(given) == 2:  # a number is put there, which is of no row
        return [given[0].scatter(call.argument("dim", 0), given[1], 0)]
    if call.name in _FLOATS:
        return [t.long() for t in call([t.double() for t in given])]
    return call(given)
