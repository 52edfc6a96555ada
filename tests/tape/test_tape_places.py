"""Rows of image patches in a stream, inferred from a recorded pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from row_orders import PERMUTED, Folded, Mixed, Stem, Turned, Unfolded, picture, unfolded
from whyformer.explaining import open_model
from whyformer.inputs import prepare
from whyformer.methods.passes import record_pass
from whyformer.tape.places import Elements, find_elements
from zoo import IMAGES, WINDOWED, build, randomise


def patch_elements(model: nn.Module, x: Tensor) -> Elements | None:
    structure = open_model(model.eval()).prepare(x).task().structure
    elements = [structure.map_pass.elements(structure.main, structure.map_pass.name_of(stream)) for stream in structure.streams]
    return elements[0][1] if len(elements) == 1 and elements[0] is not None else None


@pytest.mark.parametrize(
    ("grid", "before", "after", "order"),
    [
        ((3, 4), 1, 0, None),
        ((3, 5), 0, 0, None),
        ((3, 4), 1, 0, PERMUTED),
        ((4, 3), 1, 5, None),  # detection tokens after the patches
        ((3, 4), 5, 3, PERMUTED),
        ((1, 6), 2, 0, None),
    ],
)
def test_patch_rows_in_any_order(grid: tuple[int, int], before: int, after: int, order: list[int] | None) -> None:
    model = unfolded(grid, before, after, order)
    rows = torch.empty(grid[0] * grid[1], dtype=torch.long)
    rows[torch.tensor(order or list(range(len(rows))))] = before + torch.arange(len(rows))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = patch_elements(model.to(dtype), picture(*grid, 2).to(dtype))
        assert result is not None
        assert result.grid == grid
        assert torch.equal(result.rows[0], rows)


def test_unread_margins_do_not_change_patch_rows() -> None:
    for height, width in ((24, 32), (29, 38)):
        result = patch_elements(unfolded((3, 4)), torch.randn(1, 3, height, width, dtype=torch.float64))
        assert result is not None
        assert (result.grid, result.rows[0].tolist()) == ((3, 4), list(range(1, 13)))


@pytest.mark.parametrize("name", IMAGES)
def test_patch_rows_of_architectures(name: str) -> None:
    model, x = IMAGES[name]()
    grid = (3, 5) if name == "hf_vit_wide" else (4, 4)
    result = patch_elements(model, x)
    assert result is not None
    assert result.grid == grid
    first = {"hf_deit": 2, "hf_deit_teacher": 2, "timm_deit": 2, "timm_vit_mean": 0}.get(name, 1)
    assert result.rows[0].tolist() == [first + i for i in range(grid[0] * grid[1])]


@pytest.mark.parametrize("layers", [[(7, 4, 3), (3, 2, 1)], [(3, 2, 1), (3, 2, 1), (3, 2, 1)], [(8, 8, 0)]])
def test_patch_rows_of_convolutional_stem(layers: Sequence[tuple[int, int, int]]) -> None:
    """A change at the center of a cell changes the cell's row the most."""
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    model = randomise(Stem(layers)).double()
    result = patch_elements(model, x)
    assert result is not None
    assert result.grid == (6, 4)
    for cell, row in enumerate(result.rows[0].tolist()):
        changed = x.clone()
        top, left = (8 * index for index in divmod(cell, 4))
        changed[..., top + 3 : top + 5, left + 3 : left + 5] += 100
        stem_outputs = [model.stem(v).flatten(2)[0] for v in (x, changed)]
        assert int((stem_outputs[1] - stem_outputs[0]).norm(dim=0).argmax()) == row


@pytest.mark.parametrize("layers", [[(8, 8, 0)], [(3, 2, 1)] * 3])
def test_transposed_image_has_patches_in_reading_order(layers: Sequence[tuple[int, int, int]]) -> None:
    result = patch_elements(randomise(Turned(layers)).double(), torch.randn(1, 3, 48, 32, dtype=torch.float64))
    assert result is not None
    assert result.grid == (6, 4)
    assert torch.equal(result.rows[0], torch.arange(24).view(4, 6).T.flatten())


@pytest.mark.parametrize("name", WINDOWED)
def test_merged_patches_have_larger_cells(name: str) -> None:
    """Each row of the second stage is merged from the four rows of the first stage in its cell."""
    model, x = build(name)
    inputs = prepare(model, x)
    recorded = record_pass(model, inputs.feed)
    first, last = recorded.layout({inputs.name: inputs}).streams
    for stream, side in ((first, 16), (last, 8)):
        result = find_elements(recorded.tape, recorded.layout({inputs.name: inputs}).rows, stream.rows, inputs.name, is_picture=True)
        assert result is not None
        assert (result.grid, result.rows[0].sort().values.tolist()) == ((side, side), list(range(side * side)))
    # fine rows belong to the coarse cell at their position
    fine, coarse = (find_elements(recorded.tape, recorded.layout({inputs.name: inputs}).rows, s.rows, inputs.name, is_picture=True) for s in (first, last))
    rows = recorded.layout({inputs.name: inputs}).rows
    merge = next(c for c in recorded.tape.calls if rows.families[int(rows.family[last.rows[0, 0]])].value in c.results)
    label = next(rows.labels[o][0] for o in merge.operands if len(rows.labels.get(o, ())) == 1)
    merged_rows = rows.of(merge.results[0])[..., 0]
    for cell in (0, 9, 63):
        row = int(last.rows[0, coarse.rows[0, cell]])
        source_rows = label[merged_rows == row].unique()
        top, left = divmod(cell, 8)
        expected = [int(first.rows[0, fine.rows[0, (2 * top + i) * 16 + 2 * left + j]]) for i in (0, 1) for j in (0, 1)]
        assert source_rows.tolist() == sorted(expected)


class RightHalf(Unfolded):
    """Patches of the right half of the image; the left half is not read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.avg_pool2d(x[..., x.shape[-1] // 2 :], 1))


def test_unread_half_of_image_has_no_patches() -> None:
    result = patch_elements(randomise(RightHalf((3, 2))).double(), picture(3, 4))
    assert result is not None
    assert (result.grid, result.rows[0].tolist()) == ((3, 2), list(range(1, 7)))


class FoldedStem(Stem):
    """A convolutional stem on the sum of both halves of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(sum(x.chunk(2, -1)))  # type: ignore[arg-type]


def test_stem_on_summed_halves_has_no_patch_rows() -> None:
    assert patch_elements(randomise(FoldedStem([(8, 8, 0)])).double(), torch.randn(2, 3, 48, 64, dtype=torch.float64)) is None


@pytest.mark.parametrize("kind", [Mixed, Folded])
def test_rows_of_several_patches_have_no_patch_rows(kind: type[Unfolded]) -> None:
    assert patch_elements(randomise(kind((3, 4 if kind is Mixed else 2))).double(), picture(3, 4)) is None
