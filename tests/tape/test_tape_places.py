"""Where the cells of a picture lie among the rows of a stream, read off a recorded pass."""

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


def places(model: nn.Module, x: Tensor) -> Elements | None:
    structure = open_model(model.eval()).prepare(x).task().structure
    found = [structure.passed.elements(structure.main, structure.passed.name_of(stream)) for stream in structure.streams]
    return found[0][1] if len(found) == 1 and found[0] is not None else None


@pytest.mark.parametrize(
    ("grid", "before", "after", "order"),
    [
        ((3, 4), 1, 0, None),
        ((3, 5), 0, 0, None),
        ((3, 4), 1, 0, PERMUTED),
        ((4, 3), 1, 5, None),  # detection tokens behind the patches
        ((3, 4), 5, 3, PERMUTED),
        ((1, 6), 2, 0, None),
    ],
)
def test_patches_in_any_order(grid: tuple[int, int], before: int, after: int, order: list[int] | None) -> None:
    model = unfolded(grid, before, after, order)
    rows = torch.empty(grid[0] * grid[1], dtype=torch.long)
    rows[torch.tensor(order or list(range(len(rows))))] = before + torch.arange(len(rows))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = places(model.to(dtype), picture(*grid, 2).to(dtype))
        assert found is not None
        assert found.grid == grid
        assert torch.equal(found.rows[0], rows)


def test_margins_feed_no_row() -> None:
    for height, width in ((24, 32), (29, 38)):
        found = places(unfolded((3, 4)), torch.randn(1, 3, height, width, dtype=torch.float64))
        assert found is not None
        assert (found.grid, found.rows[0].tolist()) == ((3, 4), list(range(1, 13)))


@pytest.mark.parametrize("name", IMAGES)
def test_architectures(name: str) -> None:
    model, x = IMAGES[name]()
    grid = (3, 5) if name == "hf_vit_wide" else (4, 4)
    found = places(model, x)
    assert found is not None
    assert found.grid == grid
    first = {"hf_deit": 2, "hf_deit_teacher": 2, "timm_deit": 2, "timm_vit_mean": 0}.get(name, 1)
    assert found.rows[0].tolist() == [first + i for i in range(grid[0] * grid[1])]


@pytest.mark.parametrize("layers", [[(7, 4, 3), (3, 2, 1)], [(3, 2, 1), (3, 2, 1), (3, 2, 1)], [(8, 8, 0)]])
def test_a_patch_of_a_stem_stands_where_it_is(layers: Sequence[tuple[int, int, int]]) -> None:
    """The row of each cell is that which moves most if the middle of the cell is changed."""
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    model = randomise(Stem(layers)).double()
    found = places(model, x)
    assert found is not None
    assert found.grid == (6, 4)
    for cell, row in enumerate(found.rows[0].tolist()):
        changed = x.clone()
        top, left = (8 * place for place in divmod(cell, 4))
        changed[..., top + 3 : top + 5, left + 3 : left + 5] += 100
        moved = [model.stem(v).flatten(2)[0] for v in (x, changed)]
        assert int((moved[1] - moved[0]).norm(dim=0).argmax()) == row


@pytest.mark.parametrize("layers", [[(8, 8, 0)], [(3, 2, 1)] * 3])
def test_a_turned_picture_has_its_cells_in_reading_order(layers: Sequence[tuple[int, int, int]]) -> None:
    found = places(randomise(Turned(layers)).double(), torch.randn(1, 3, 48, 32, dtype=torch.float64))
    assert found is not None
    assert found.grid == (6, 4)
    assert torch.equal(found.rows[0], torch.arange(24).view(4, 6).T.flatten())


@pytest.mark.parametrize("name", WINDOWED)
def test_merged_patches_are_larger_cells(name: str) -> None:
    """Each row of a later stage is made of the pixels of its cell, and no others but its windows' are."""
    model, x = build(name)
    inputs = prepare(model, x)
    whole = record_pass(model, inputs.feed)
    first, last = whole.layout({inputs.name: inputs}).streams
    for stream, side in ((first, 16), (last, 8)):
        found = find_elements(whole.tape, whole.layout({inputs.name: inputs}).rows, stream.rows, inputs.name, is_picture=True)
        assert found is not None
        assert (found.grid, found.rows[0].sort().values.tolist()) == ((side, side), list(range(side * side)))
    # a fine row is in the coarse cell that its place says
    fine, coarse = (find_elements(whole.tape, whole.layout({inputs.name: inputs}).rows, s.rows, inputs.name, is_picture=True) for s in (first, last))
    rows = whole.layout({inputs.name: inputs}).rows
    merge = next(c for c in whole.tape.calls if rows.families[int(rows.family[last.rows[0, 0]])].value in c.results)
    label = next(rows.labels[o][0] for o in merge.operands if len(rows.labels.get(o, ())) == 1)
    made = rows.of(merge.results[0])[..., 0]
    for cell in (0, 9, 63):
        row = int(last.rows[0, coarse.rows[0, cell]])
        own = label[made == row].unique()
        top, left = divmod(cell, 8)
        wanted = [int(first.rows[0, fine.rows[0, (2 * top + i) * 16 + 2 * left + j]]) for i in (0, 1) for j in (0, 1)]
        assert own.tolist() == sorted(wanted)


class Halved(Unfolded):
    """The right half of the picture is convolved, the left one is not read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.avg_pool2d(x[..., x.shape[-1] // 2 :], 1))


def test_what_is_not_read_is_no_cell() -> None:
    found = places(randomise(Halved((3, 2))).double(), picture(3, 4))
    assert found is not None
    assert (found.grid, found.rows[0].tolist()) == ((3, 2), list(range(1, 7)))


class FoldedStem(Stem):
    """Convolutions of the halves of a picture that lie on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(sum(x.chunk(2, -1)))  # type: ignore[arg-type]


def test_convolutions_of_several_places_have_none() -> None:
    assert places(randomise(FoldedStem([(8, 8, 0)])).double(), torch.randn(2, 3, 48, 64, dtype=torch.float64)) is None


@pytest.mark.parametrize("kind", [Mixed, Folded])
def test_rows_of_several_places_have_none(kind: type[Unfolded]) -> None:
    assert places(randomise(kind((3, 4 if kind is Mixed else 2))).double(), picture(3, 4)) is None
