"""Row numbers against the actual dependence on a row, measured by a replay with that row changed."""

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
from tape.recorded_structure import read_structure
from whyformer.errors import ModelError
from whyformer.tape.attentions import find_attentions
from whyformer.tape.labelling import find_rows
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.rows import Rows, RowSamples, Source, slim
from whyformer.tape.sources import find_sources
from whyformer.tape.values import Tape
from whyformer.tape.walking import replay

X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows_of(function: Callable[..., Tensor], *inputs: Tensor, features: int | None = -1) -> tuple[Tape, Rows, int]:
    """(tape, its rows, number of the result)"""
    tape, output = record(function, *inputs)
    rows = find_rows(tape, [Source(str(i), tape.number(t), features) for i, t in enumerate(inputs)])
    return tape, rows, tape.number(output)


def row_numbers(function: Callable[..., Tensor], *inputs: Tensor, features: int | None = -1) -> Tensor:
    """Row numbers of the result."""
    _, rows, n = rows_of(function, *inputs, features=features)
    return rows.of(n)


# -- replays with one row changed --------------------------------------------------------------------------------------
def assert_rows_match_replay(tape: Tape, rows: Rows, root: int, values: list[int]) -> None:
    """Assert that elements that change with a row are labelled with that row."""
    label = slim(rows.of(root))
    for row in label.flatten().unique().tolist()[:4]:
        changed = tape[root] + (rows.of(root) == row) * torch.randn(tape.shapes[root], dtype=torch.float64)
        for n, new in zip(values, replay(tape, {root: changed}, values), strict=True):
            labelled = torch.stack([t == row for t in rows.labels[n]]).any(0)
            changed_elements = (new != tape[n]) & ~(new.isnan() & tape[n].isnan())
            assert not bool((changed_elements & ~labelled).any()), (n, tape.maker[n].name)
            assert bool(changed_elements.any()) == bool(labelled.any())


@pytest.mark.parametrize("variant", [*layouts.PRODUCTS, *ways.PRODUCTS])
def test_rows_of_values_before_first_softmax(variant: str) -> None:
    product = {**ways.PRODUCTS, **layouts.PRODUCTS}[variant]
    reading = read_structure(layouts._plain("ids", product), torch.randint(1, base.VOCABULARY, (2, 6)))
    first = next(c.number for c in reading.tape.calls if "softmax" in c.name or c.name in ("exp", "amax"))
    values = [n for c in reading.tape.calls[:first] for n in c.results if n in reading.rows.labels and reading.tape.floating(n)]
    assert len(values) > 10
    assert_rows_match_replay(reading.tape, reading.rows, values[0], [n for n in values if reading.rows.labels[n][0].any()])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "heads into samples": lambda x: x.view(2, 6, 2, 2).permute(2, 0, 1, 3).reshape(4, 6, 2),
    "packed": lambda x: x.reshape(12, 4)[torch.tensor([3, 1, 0, 7, 11])],
    "windows": lambda x: x.view(2, 2, 3, 4).roll(1, 2).flatten(0, 1),
    "gather": lambda x: x.gather(1, torch.tensor([[5, 0], [2, 2]])[..., None].expand(-1, -1, 4)),
    "rotation": lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1) * 2 + x,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 6, 2, 2)) * (1 + 2j)).flatten(2),
    "written": lambda x: torch.zeros(2, 8, 4, dtype=x.dtype).index_copy(1, torch.arange(1, 7), x * 2),
    "in place": lambda x: written_rows(x),
    "norm": lambda x: F.layer_norm(x, (4,)) * x.sum(-1, keepdim=True),
    "layer": lambda x: F.linear(x, torch.ones(3, 4, dtype=x.dtype)),
    "weight first": lambda x: torch.ones(3, 4, dtype=x.dtype) @ x.mT,
    "padded": lambda x: F.pad(x, (0, 0, 1, 2)),
    "flip": lambda x: x.flip(1).repeat_interleave(2, 2),
    "conv over tokens": lambda x: F.conv1d(x.mT, torch.ones(4, 1, 1, dtype=x.dtype), groups=4),
    "experts": lambda x: experts(x),
}  # fmt: skip


def written_rows(x: Tensor) -> Tensor:
    out = torch.zeros(6, 2, 4, dtype=x.dtype)
    out[1:4] = x.transpose(0, 1)[:3]
    out[5, 1] += x[1, 4]
    return out


def experts(x: Tensor) -> Tensor:
    """Rows that are routed to one of two experts and written back."""
    flat, out = x.reshape(-1, 4), torch.zeros(12, 4, dtype=x.dtype)
    choice = flat.sum(-1) > 0
    for mask in (choice, ~choice):
        indices = mask.nonzero()[:, 0]
        out.index_add_(0, indices, flat[indices] * 3)
    return out.view(x.shape)


@pytest.mark.parametrize("variant", VIEWS)
def test_rows_through_views_and_features(variant: str) -> None:
    tape, rows, n = rows_of(VIEWS[variant], X)
    label, root = rows.of(n), next(iter(tape.inputs))
    for row in range(1, 13):
        changed = X + (rows.of(root) == row) * 0.01
        changed_elements = VIEWS[variant](changed) != tape[n]
        assert not bool((changed_elements & (label != row)).any())
        assert bool(changed_elements.any()) == bool((label == row).any())


# -- sources of rows -----------------------------------------------------------------------------------------------------
def test_embeddings_of_same_ids_share_rows() -> None:
    ids, words, kinds = torch.tensor([[3, 1, 2], [1, 1, 0]]), torch.randn(5, 4), torch.randn(5, 4)
    tape, output = record(lambda ids: (F.embedding(ids, words), kinds[ids], F.embedding(ids.roll(1, 1), words)), ids)
    rows = find_rows(tape, [Source("ids", tape.number(ids))])
    first, repeated, shifted = (rows.of(tape.number(t)) for t in output)
    assert torch.equal(first, repeated)
    assert not set(first.flatten().tolist()) & set(shifted.flatten().tolist())
    assert rows.roots == {"ids": tape.number(output[0]), "ids'": tape.number(output[2])}
    assert rows.sample[shifted[..., 0]].tolist() == [[0] * 3, [1] * 3]


def test_start_token_belongs_to_its_sample() -> None:
    def shifted(ids: Tensor) -> Tensor:
        shifted_ids = ids.new_zeros(ids.shape)
        shifted_ids[:, 1:] = ids[:, :-1].clone()
        shifted_ids[:, 0] = 2
        return F.embedding(shifted_ids, torch.randn(5, 4))

    _, rows, n = rows_of(shifted, torch.tensor([[3, 1, 2], [1, 1, 0]]))
    assert rows.sample[rows.of(n)[..., 0]].tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("name", ["hf_vit", "timm_deit", "torchvision_vit"])
def test_row_families_of_patches_and_constants(name: str) -> None:
    reading = read_structure(*zoo.build(name))
    pixels, patches, *constants = reading.rows.families[1:]
    assert (pixels.grid, patches.grid, tuple(patches.numbers.shape)) == ((32, 32), (4, 4), (2, 16))
    assert [f.source for f in constants] == [""] * len(constants)
    assert sum(f.numbers.shape[1] for f in constants) == reading.stream.rows.shape[1] - 16
    assert torch.equal(reading.rows.sample[reading.stream.rows], torch.arange(2)[:, None].expand(reading.stream.rows.shape))


def test_rows_of_linear_patch_embedding() -> None:
    """Pixels rearranged to ``[B, 4, 12]`` and projected by a linear layer, as in vit-pytorch."""

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
    label = row_numbers(lambda x: x.mean(1), X)
    assert label[:, 0].tolist() == [13, 14]


def test_packed_rows_belong_to_given_samples() -> None:
    """Patches of two images, 3 rows each, packed into one sequence with a block mask."""

    def model(x: Tensor) -> Tensor:
        sample = torch.tensor([0, 0, 0, 1, 1, 1])
        scores = (x @ x.mT).masked_fill(sample[:, None] != sample, -torch.inf)
        return (scores.softmax(-1) @ x).view(2, 3, 4).sum((1, 2))

    x = X[0]
    tape, output = record(model, x)
    rows = find_rows(tape, [Source("x", tape.number(x), -1, (0, 0, 0, 1, 1, 1))])
    (attention,) = find_attentions(read_program(tape, rows.roots.values(), tape.number(output)), tape, rows)
    result = attention.arrange(tape[attention.map])[:, 0]
    assert torch.allclose(result, torch.stack([(part @ part.mT).softmax(-1) for part in x.split(3)]))


def test_feature_axes_of_sources_are_inferred_from_calls() -> None:
    images, sound, vectors, ids = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 10), torch.randn(2, 5, 4), torch.ones(2, 5).long()

    def model(images: Tensor, sound: Tensor, vectors: Tensor, ids: Tensor) -> Tensor:
        return F.conv1d(sound, torch.randn(1, 4, 1)).sum() + vectors.sum() + images.sum() + ids.sum()

    inputs = {"images": images, "sound": sound, "vectors": vectors, "ids": ids}
    tape, _ = record(model, **inputs)
    assert {s.name: s.features for s in find_sources(tape, inputs)} == {"images": -3, "sound": 1, "vectors": -1, "ids": None}


# -- errors --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", [lambda x: torch.fft.fft(x, dim=1).real, lambda x: x.sort(1)[0]], ids=["fft", "sort"])
def test_unknown_rows_raise(function: Any) -> None:
    _, rows, n = rows_of(function, X)
    with pytest.raises(ModelError, match="unknown"):
        rows.of(n)
    with pytest.raises(ModelError, match="unknown"):
        RowSamples(rows).sums(n, X)


def test_sums_over_a_single_sample_need_no_rows() -> None:
    _, rows, n = rows_of(lambda x: x.sort(1)[0], X[:1])
    values, samples = torch.randn_like(X[:1]), RowSamples(rows)
    torch.testing.assert_close(samples.sums(n, values), values.sum()[None])
    assert samples.spread(n, torch.tensor([2.0]), values).expand(values.shape).eq(2).all()


def test_attention_map_over_unknown_rows_raises() -> None:
    """The attention is recognised, but arranging its map raises."""

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
def test_sums_per_sample_along_first_axis() -> None:
    _, rows, n = rows_of(lambda x: x.view(2, 6, 2, 2).transpose(1, 2).flatten(0, 1), X)
    values = torch.randn(4, 6, 2, dtype=torch.float64)
    assert torch.allclose(RowSamples(rows).sums(n, values), LeadingAxis(2).sums(n, values))
    results = [s.spread(n, torch.tensor([2.0, 3.0]), values).expand(values.shape) for s in (RowSamples(rows), LeadingAxis(2))]
    assert torch.equal(*results)


def test_sums_per_sample_along_other_axis() -> None:
    _, rows, n = rows_of(lambda x: x.view(2, 6, 2, 2).permute(2, 1, 0, 3).contiguous(), X)
    values, samples = torch.randn(2, 6, 2, 2, dtype=torch.float64), RowSamples(rows)
    assert torch.allclose(samples.sums(n, values), values.sum((0, 1, 3)))
    assert samples.spread(n, torch.tensor([2.0, 3.0]), values).flatten().tolist() == [2, 3]


def test_sums_per_row() -> None:
    _, rows, n = rows_of(lambda x: x.transpose(0, 1).contiguous(), X)
    values = torch.randn(6, 2, 4, dtype=torch.float64)
    assert torch.allclose(rows.sums(n, values)[1:], values.sum(-1).mT.flatten())


def test_features_of_rows_are_read_and_replaced() -> None:
    """Read and replace features of some rows in any layout; missing rows are 0 and are not written."""
    other = torch.randn(2, 3, 4, dtype=torch.float64)

    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y, x[:, 1:]], 1).permute(2, 1, 0).contiguous()

    tape, rows, n = rows_of(joined, X, other)
    numbers_ = next(f.numbers for f in rows.families if f.source == "0")
    result = rows.features(n, tape[n], numbers_)
    assert torch.equal(result[:, 1:], X[:, 1:])
    assert not bool(result[:, 0].any())
    replaced = rows.with_features(n, tape[n], numbers_, 2 * X)
    assert torch.equal(replaced, joined(2 * X, other))
    assert torch.equal(rows.features(n, replaced, numbers_.flip(1)), rows.features(n, replaced, numbers_).flip(1))


# -- caching -------------------------------------------------------------------------------------------------------------
def test_rows_are_cached_by_signature_and_index() -> None:
    def select(x: Tensor, index: Tensor) -> Tensor:
        return x[torch.arange(2), index]

    def rows_for(index: list[int]) -> Rows:
        positions = torch.tensor(index)
        tape, _ = record(select, X, positions)
        return find_rows(tape, [Source("x", tape.number(X), -1)])

    first = rows_for([1, 2])
    assert rows_for([1, 2]) is first
    assert rows_for([1, 3]) is not first


def test_reading_structure_does_not_recompute_values() -> None:
    """Reading the structure of a model recomputes no values."""
    reading = read_structure(*zoo.build("hf_vit"))
    assert not reading.tape._recomputed


def test_padded_convolution_over_time_keeps_samples() -> None:
    weight = torch.randn(4, 4, 3, dtype=torch.float64)
    _, rows, n = rows_of(lambda x: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), weight, stride=2), X)
    label = rows.of(n)
    assert rows.sample[label][:, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert {rows.families[f].source for f in rows.family[label].flatten().tolist()} == {"0"}


def test_constants_scattered_by_index_are_accepted() -> None:
    indices = torch.zeros(2, 6, 1, dtype=torch.long)
    result = row_numbers(lambda x: x.scatter(-1, indices, -torch.inf), X)
    assert result.shape == X.shape


def test_grid_sample_results_have_rows_of_their_positions() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.rand(2, 5, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5

    def sample_grid(x: Tensor, p: Tensor) -> Tensor:
        return F.grid_sample(x, p.tanh(), align_corners=False)

    tape, output = record(sample_grid, x, positions)
    rows = find_rows(tape, [Source("map", tape.number(x), 1), Source("places", tape.number(positions), 3)])
    label = rows.of(tape.number(output))
    assert torch.equal(label, rows.of(tape.number(positions))[..., :1].permute(0, 3, 1, 2).expand(label.shape))
    tape, rows, n = rows_of(lambda x: F.grid_sample(x, positions, align_corners=False), x, features=1)
    label = rows.of(n)
    assert torch.equal(rows.sample[label], torch.arange(2).view(2, 1, 1, 1).expand(label.shape))
    assert len(label.unique()) == 10
    assert not set(label.unique().tolist()) & set(rows.of(tape.number(x)).unique().tolist())


def test_pointwise_convolution_merges_rows_of_concatenated_grids() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second, last = (torch.randn(c, d, k, k, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for c, d, k in ((4, 3, 2), (4, 3, 4), (2, 8, 1)))

    def mixed(x: Tensor) -> Tensor:
        finer, coarser = F.conv2d(x, first, stride=2), F.conv2d(x, second, stride=4)
        return F.conv2d(torch.cat([finer, coarser.expand(-1, -1, 2, 2)], 1), last)

    _, rows, n = rows_of(mixed, x, features=1)
    label = rows.of(n)
    assert len(label.unique()) == 8
    assert torch.equal(rows.sample[label], torch.arange(2).view(2, 1, 1, 1).expand(label.shape))


def test_matrix_vector_product_keeps_rows() -> None:
    weight = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tape, rows, n = rows_of(lambda x: torch.mv(x.reshape(12, 4), weight), X)
    assert torch.equal(rows.of(n), rows.of(tape.number(X))[..., 0].reshape(12))
