"""Row numbers against what really depends on a row: the pass is repeated with one row changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zoo
from forms import base, layouts
from forms.functions import attentions as ways
from leading_axis import LeadingAxis
from tape.reading import read
from whyformer.errors import ModelError
from whyformer.tape.labelling import find_rows
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.rows import Rows, RowSamples, Source, slim
from whyformer.tape.sources import find_sources
from whyformer.tape.structure import find_attentions
from whyformer.tape.values import Tape
from whyformer.tape.walking import replay

X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows_of(function: Callable[..., Tensor], *inputs: Tensor, features: int | None = -1) -> tuple[Tape, Rows, int]:
    """(the pass, its rows, number of the result)"""
    tape, output = record(function, *inputs)
    rows = find_rows(tape, [Source(str(i), tape.number(t), features) for i, t in enumerate(inputs)])
    return tape, rows, tape.number(output)


def numbers(function: Callable[..., Tensor], *inputs: Tensor, features: int | None = -1) -> Tensor:
    """Row numbers of the result."""
    _, rows, n = rows_of(function, *inputs, features=features)
    return rows.of(n)


# -- against the pass with one row changed -----------------------------------------------------------------------------
def check_rows(tape: Tape, rows: Rows, root: int, values: list[int]) -> None:
    """Elements that change when a row changes are labelled with that row."""
    label = slim(rows.of(root))
    for row in label.flatten().unique().tolist()[:4]:
        changed = tape[root] + (rows.of(root) == row) * torch.randn(tape.shapes[root], dtype=torch.float64)
        for n, new in zip(values, replay(tape, {root: changed}, values), strict=True):
            own = torch.stack([t == row for t in rows.labels[n]]).any(0)
            moved = (new != tape[n]) & ~(new.isnan() & tape[n].isnan())
            assert not bool((moved & ~own).any()), (n, tape.maker[n].name)
            assert bool(moved.any()) == bool(own.any())


@pytest.mark.parametrize("way", [*layouts.PRODUCTS, *ways.PRODUCTS])
def test_every_value_before_the_first_softmax(way: str) -> None:
    product = {**ways.PRODUCTS, **layouts.PRODUCTS}[way]
    reading = read(layouts._plain("ids", product), torch.randint(1, base.VOCABULARY, (2, 6)))
    first = next(c.number for c in reading.tape.calls if "softmax" in c.name or c.name in ("exp", "amax"))
    made = [n for c in reading.tape.calls[:first] for n in c.results if n in reading.rows.labels and reading.tape.floating(n)]
    assert len(made) > 10
    check_rows(reading.tape, reading.rows, made[0], [n for n in made if reading.rows.labels[n][0].any()])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "heads into samples": lambda x: x.view(2, 6, 2, 2).permute(2, 0, 1, 3).reshape(4, 6, 2),
    "packed": lambda x: x.reshape(12, 4)[torch.tensor([3, 1, 0, 7, 11])],
    "windows": lambda x: x.view(2, 2, 3, 4).roll(1, 2).flatten(0, 1),
    "gather": lambda x: x.gather(1, torch.tensor([[5, 0], [2, 2]])[..., None].expand(-1, -1, 4)),
    "rotation": lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1) * 2 + x,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 6, 2, 2)) * (1 + 2j)).flatten(2),
    "written": lambda x: torch.zeros(2, 8, 4, dtype=x.dtype).index_copy(1, torch.arange(1, 7), x * 2),
    "in place": lambda x: written(x),
    "norm": lambda x: F.layer_norm(x, (4,)) * x.sum(-1, keepdim=True),
    "layer": lambda x: F.linear(x, torch.ones(3, 4, dtype=x.dtype)),
    "weight first": lambda x: torch.ones(3, 4, dtype=x.dtype) @ x.mT,
    "padded": lambda x: F.pad(x, (0, 0, 1, 2)),
    "flip": lambda x: x.flip(1).repeat_interleave(2, 2),
    "conv over tokens": lambda x: F.conv1d(x.mT, torch.ones(4, 1, 1, dtype=x.dtype), groups=4),
    "experts": lambda x: experts(x),
}  # fmt: skip


def written(x: Tensor) -> Tensor:
    out = torch.zeros(6, 2, 4, dtype=x.dtype)
    out[1:4] = x.transpose(0, 1)[:3]
    out[5, 1] += x[1, 4]
    return out


def experts(x: Tensor) -> Tensor:
    """Rows sent to one of two layers and put back."""
    flat, out = x.reshape(-1, 4), torch.zeros(12, 4, dtype=x.dtype)
    choice = flat.sum(-1) > 0
    for chosen in (choice, ~choice):
        where = chosen.nonzero()[:, 0]
        out.index_add_(0, where, flat[where] * 3)
    return out.view(x.shape)


@pytest.mark.parametrize("way", VIEWS)
def test_views_and_features(way: str) -> None:
    tape, rows, n = rows_of(VIEWS[way], X)
    label, root = rows.of(n), next(iter(tape.inputs))
    for row in range(1, 13):
        changed = X + (rows.of(root) == row) * 0.01
        moved = VIEWS[way](changed) != tape[n]
        assert not bool((moved & (label != row)).any())
        assert bool(moved.any()) == bool((label == row).any())


# -- where rows begin ----------------------------------------------------------------------------------------------------
def test_the_same_ids_are_the_same_rows() -> None:
    ids, words, kinds = torch.tensor([[3, 1, 2], [1, 1, 0]]), torch.randn(5, 4), torch.randn(5, 4)
    tape, output = record(lambda ids: (F.embedding(ids, words), kinds[ids], F.embedding(ids.roll(1, 1), words)), ids)
    rows = find_rows(tape, [Source("ids", tape.number(ids))])
    first, again, shifted = (rows.of(tape.number(t)) for t in output)
    assert torch.equal(first, again)
    assert not set(first.flatten().tolist()) & set(shifted.flatten().tolist())
    assert rows.roots == {"ids": tape.number(output[0]), "ids'": tape.number(output[2])}
    assert rows.sample[shifted[..., 0]].tolist() == [[0] * 3, [1] * 3]


def test_a_start_token_is_of_its_sample() -> None:
    def shifted(ids: Tensor) -> Tensor:
        moved = ids.new_zeros(ids.shape)
        moved[:, 1:] = ids[:, :-1].clone()
        moved[:, 0] = 2
        return F.embedding(moved, torch.randn(5, 4))

    _, rows, n = rows_of(shifted, torch.tensor([[3, 1, 2], [1, 1, 0]]))
    assert rows.sample[rows.of(n)[..., 0]].tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("name", ["hf_vit", "timm_deit", "torchvision_vit"])
def test_patches_and_constants(name: str) -> None:
    reading = read(*zoo.build(name))
    pixels, patches, *constants = reading.rows.families[1:]
    assert (pixels.grid, patches.grid, tuple(patches.numbers.shape)) == ((32, 32), (4, 4), (2, 16))
    assert [f.source for f in constants] == [""] * len(constants)
    assert sum(f.numbers.shape[1] for f in constants) == reading.stream.rows.shape[1] - 16
    assert torch.equal(reading.rows.sample[reading.stream.rows], torch.arange(2)[:, None].expand(reading.stream.rows.shape))


def test_patches_of_a_linear_layer() -> None:
    """Pixels rearranged to ``[B, 4, 12]`` and mixed by a layer, as in vit-pytorch."""

    def patches(x: Tensor) -> Tensor:
        x = x.view(2, 3, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(2, 4, 12)
        return F.linear(x, torch.ones(5, 12, dtype=x.dtype))

    _, rows, n = rows_of(patches, torch.randn(2, 3, 4, 4, dtype=torch.float64), features=1)
    label = rows.of(n)
    assert len(label.unique()) == 8
    assert torch.equal(label, label[..., :1].expand_as(label))
    assert rows.sample[label[..., 0]].tolist() == [[0] * 4, [1] * 4]
    assert rows.families[-1].source == "0"


def test_pooled_rows_are_new_rows() -> None:
    label = numbers(lambda x: x.mean(1), X)
    assert label[:, 0].tolist() == [13, 14]


def test_packed_rows_are_of_the_samples_that_are_given() -> None:
    """Patches of two pictures, of 3 and 3 rows, in one sequence with a mask between."""

    def model(x: Tensor) -> Tensor:
        sample = torch.tensor([0, 0, 0, 1, 1, 1])
        scores = (x @ x.mT).masked_fill(sample[:, None] != sample, -torch.inf)
        return (scores.softmax(-1) @ x).view(2, 3, 4).sum((1, 2))

    x = X[0]
    tape, output = record(model, x)
    rows = find_rows(tape, [Source("x", tape.number(x), -1, (0, 0, 0, 1, 1, 1))])
    (attention,) = find_attentions(read_program(tape, rows.roots.values(), tape.number(output)), tape, rows)
    found = attention.arrange(tape[attention.map])[:, 0]
    assert torch.allclose(found, torch.stack([(part @ part.mT).softmax(-1) for part in x.split(3)]))


def test_sources_are_told_from_the_calls() -> None:
    pictures, sound, vectors, ids = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 10), torch.randn(2, 5, 4), torch.ones(2, 5).long()

    def model(pictures: Tensor, sound: Tensor, vectors: Tensor, ids: Tensor) -> Tensor:
        return F.conv1d(sound, torch.randn(1, 4, 1)).sum() + vectors.sum() + pictures.sum() + ids.sum()

    inputs = {"pictures": pictures, "sound": sound, "vectors": vectors, "ids": ids}
    tape, _ = record(model, **inputs)
    assert {s.name: s.features for s in find_sources(tape, inputs)} == {"pictures": -3, "sound": 1, "vectors": -1, "ids": None}


# -- what is refused -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", [lambda x: torch.fft.fft(x, dim=1).real, lambda x: x.sort(1)[0]], ids=["fft", "sort"])
def test_unknown_rows(way: Any) -> None:
    _, rows, n = rows_of(way, X)
    with pytest.raises(ModelError, match="unknown"):
        rows.of(n)
    with pytest.raises(ModelError, match="unknown"):
        RowSamples(rows).sums(n, X)


def test_attention_over_unknown_rows() -> None:
    """It is found, and its map refuses to be arranged."""

    def model(x: Tensor) -> Tensor:
        x = x.sort(1)[0]
        return ((x @ x.mT).softmax(-1) @ x).sum((1, 2))

    tape, rows, n = rows_of(model, X)
    (attention,) = find_attentions(read_program(tape, rows.roots.values(), n), tape, rows)
    assert attention.queries is None
    assert torch.equal(tape[attention.map], (X.sort(1)[0] @ X.sort(1)[0].mT).softmax(-1))
    with pytest.raises(ModelError, match="unknown"):
        attention.arrange(tape[attention.map])


# -- samples ---------------------------------------------------------------------------------------------------------------
def test_samples_along_the_first_axis() -> None:
    _, rows, n = rows_of(lambda x: x.view(2, 6, 2, 2).transpose(1, 2).flatten(0, 1), X)
    flow = torch.randn(4, 6, 2, dtype=torch.float64)
    assert torch.allclose(RowSamples(rows).sums(n, flow), LeadingAxis(2).sums(n, flow))
    both = [s.spread(n, torch.tensor([2.0, 3.0]), flow).expand(flow.shape) for s in (RowSamples(rows), LeadingAxis(2))]
    assert torch.equal(*both)


def test_samples_elsewhere() -> None:
    _, rows, n = rows_of(lambda x: x.view(2, 6, 2, 2).permute(2, 1, 0, 3).contiguous(), X)
    flow, samples = torch.randn(2, 6, 2, 2, dtype=torch.float64), RowSamples(rows)
    assert torch.allclose(samples.sums(n, flow), flow.sum((0, 1, 3)))
    assert samples.spread(n, torch.tensor([2.0, 3.0]), flow).flatten().tolist() == [2, 3]


def test_sums_of_rows() -> None:
    _, rows, n = rows_of(lambda x: x.transpose(0, 1).contiguous(), X)
    flow = torch.randn(6, 2, 4, dtype=torch.float64)
    assert torch.allclose(rows.sums(n, flow)[1:], flow.sum(-1).mT.flatten())


def test_features_of_some_rows() -> None:
    """Of rows that stand beside others, in any layout; a row that is not there has none, and is not put anywhere."""
    other = torch.randn(2, 3, 4, dtype=torch.float64)

    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y, x[:, 1:]], 1).permute(2, 1, 0).contiguous()

    tape, rows, n = rows_of(joined, X, other)
    own = next(f.numbers for f in rows.families if f.source == "0")
    found = rows.features(n, tape[n], own)
    assert torch.equal(found[:, 1:], X[:, 1:])
    assert not bool(found[:, 0].any())
    put = rows.with_features(n, tape[n], own, 2 * X)
    assert torch.equal(put, joined(2 * X, other))
    assert torch.equal(rows.features(n, put, own.flip(1)), rows.features(n, put, own).flip(1))


# -- read once -----------------------------------------------------------------------------------------------------------
def test_rows_are_read_once_for_each_signature_and_index() -> None:
    def chosen(x: Tensor, index: Tensor) -> Tensor:
        return x[torch.arange(2), index]

    def found(index: list[int]) -> Rows:
        place = torch.tensor(index)
        tape, _ = record(chosen, X, place)
        return find_rows(tape, [Source("x", tape.number(X), -1)])

    first = found([1, 2])
    assert found([1, 2]) is first
    assert found([1, 3]) is not first


def test_no_map_is_computed() -> None:
    """Reading a model's structure computes no value of its attentions."""
    reading = read(*zoo.build("hf_vit"))
    assert not reading.tape._recomputed


def test_a_convolution_over_time_with_padding_keeps_the_samples() -> None:
    weight = torch.randn(4, 4, 3, dtype=torch.float64)
    _, rows, n = rows_of(lambda x: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), weight, stride=2), X)
    label = rows.of(n)
    assert rows.sample[label][:, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert {rows.families[f].source for f in rows.family[label].flatten().tolist()} == {"0"}


def test_numbers_that_are_put_by_index_are_of_no_row() -> None:
    places = torch.zeros(2, 6, 1, dtype=torch.long)
    found = numbers(lambda x: x.scatter(-1, places, -torch.inf), X)
    assert found.shape == X.shape


def test_samples_of_a_map_are_of_the_rows_of_their_places() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = torch.rand(2, 5, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5

    def moving(x: Tensor, p: Tensor) -> Tensor:
        return F.grid_sample(x, p.tanh(), align_corners=False)

    tape, output = record(moving, x, places)
    rows = find_rows(tape, [Source("map", tape.number(x), 1), Source("places", tape.number(places), 3)])
    label = rows.of(tape.number(output))
    assert torch.equal(label, rows.of(tape.number(places))[..., :1].permute(0, 3, 1, 2).expand(label.shape))
    tape, rows, n = rows_of(lambda x: F.grid_sample(x, places, align_corners=False), x, features=1)
    label = rows.of(n)
    assert torch.equal(rows.sample[label], torch.arange(2).view(2, 1, 1, 1).expand(label.shape))
    assert len(label.unique()) == 10
    assert not set(label.unique().tolist()) & set(rows.of(tape.number(x)).unique().tolist())


def test_grids_along_the_channels_are_mixed_by_a_convolution() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second, last = (torch.randn(c, d, k, k, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for c, d, k in ((4, 3, 2), (4, 3, 4), (2, 8, 1)))

    def mixed(x: Tensor) -> Tensor:
        finer, coarser = F.conv2d(x, first, stride=2), F.conv2d(x, second, stride=4)
        return F.conv2d(torch.cat([finer, coarser.expand(-1, -1, 2, 2)], 1), last)

    _, rows, n = rows_of(mixed, x, features=1)
    label = rows.of(n)
    assert len(label.unique()) == 8
    assert torch.equal(rows.sample[label], torch.arange(2).view(2, 1, 1, 1).expand(label.shape))


def test_a_product_with_a_vector_keeps_the_rows() -> None:
    weight = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tape, rows, n = rows_of(lambda x: torch.mv(x.reshape(12, 4), weight), X)
    assert torch.equal(rows.of(n), rows.of(tape.number(X))[..., 0].reshape(12))
