"""Where the cells of a picture lie among the rows of a stream, read off a recorded pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from row_orders import PERMUTED, Folded, Mixed, Stem, Turned, Unfolded, picture, unfolded
from whyformer.inputs import prepare
from whyformer.methods.attended import attended_pass
from whyformer.methods.passes import record_pass
from whyformer.models.readout import row_of
from whyformer.tape.places import Places, row_of_each
from zoo import IMAGES, randomise


def places(model: nn.Module, x: Tensor) -> Places | None:
    inputs = prepare(model.eval(), x)
    attended = attended_pass(record_pass(model, inputs.feed), {inputs.name: inputs}, row_of)
    return None if attended is None else attended.places(inputs.name)


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
        assert (found.grid, found.tokens) == (grid, before + len(rows) + after)
        assert torch.equal(found.rows, rows)


def test_margins_feed_no_row() -> None:
    for height, width in ((24, 32), (29, 38)):
        found = places(unfolded((3, 4)), torch.randn(1, 3, height, width, dtype=torch.float64))
        assert found is not None
        assert (found.grid, found.rows.tolist()) == ((3, 4), list(range(1, 13)))


@pytest.mark.parametrize("name", IMAGES)
def test_architectures(name: str) -> None:
    model, x = IMAGES[name]()
    grid = (3, 5) if name == "hf_vit_wide" else (4, 4)
    found = places(model, x)
    assert found is not None
    assert found.grid == grid
    first = {"hf_deit": 2, "hf_deit_teacher": 2, "timm_deit": 2, "timm_vit_mean": 0}.get(name, 1)
    assert found.rows.tolist() == [first + i for i in range(grid[0] * grid[1])]


@pytest.mark.parametrize("layers", [[(7, 4, 3), (3, 2, 1)], [(3, 2, 1), (3, 2, 1), (3, 2, 1)], [(8, 8, 0)]])
def test_a_patch_of_a_stem_stands_where_it_is(layers: Sequence[tuple[int, int, int]]) -> None:
    """The row of each cell is that which moves most if the middle of the cell is changed."""
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    model = randomise(Stem(layers)).double()
    found = places(model, x)
    assert found is not None
    assert found.grid == (6, 4)
    for cell, row in enumerate(found.rows.tolist()):
        changed = x.clone()
        top, left = (8 * place for place in divmod(cell, 4))
        changed[..., top + 3 : top + 5, left + 3 : left + 5] += 100
        moved = [model.stem(v).flatten(2)[0] for v in (x, changed)]
        assert int((moved[1] - moved[0]).norm(dim=0).argmax()) == row


def test_a_turned_picture_has_its_cells_in_reading_order() -> None:
    found = places(randomise(Turned([(8, 8, 0)])).double(), torch.randn(1, 3, 48, 32, dtype=torch.float64))
    assert found is not None
    assert found.grid == (6, 4)
    assert torch.equal(found.rows, torch.arange(24).view(4, 6).T.flatten())
    # rows that overlap have no pixels of their own
    assert places(randomise(Turned([(3, 2, 1)] * 3)).double(), torch.randn(1, 3, 48, 32, dtype=torch.float64)) is None


class Halved(Unfolded):
    """The right half of the picture is convolved, the left one is not read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.avg_pool2d(x[..., x.shape[-1] // 2 :], 1))


def test_what_is_not_read_is_no_cell() -> None:
    found = places(randomise(Halved((3, 2))).double(), picture(3, 4))
    assert found is not None
    assert (found.grid, found.rows.tolist()) == ((3, 2), list(range(1, 7)))


@pytest.mark.parametrize("kind", [Mixed, Folded])
def test_rows_of_several_places_have_none(kind: type[Unfolded]) -> None:
    assert places(randomise(kind((3, 4 if kind is Mixed else 2))).double(), picture(3, 4)) is None


@pytest.mark.parametrize("rows", [3, 300])
def test_rows_are_counted_digit_by_digit(rows: int) -> None:
    weights = torch.randn(rows, 5, 4, dtype=torch.float64)  # row i is made of the pixels that `feeds` gives it
    feeds = torch.randperm(rows)
    found = row_of_each(lambda flow: torch.einsum("nd,ndc->cn", flow, weights)[:, feeds], torch.zeros(rows, 5, dtype=torch.float64))
    assert found is not None
    assert torch.equal(found, feeds)
    # a pixel that feeds two rows alike has no row, also where the mean of their numbers is that of a third
    twice = row_of_each(lambda flow: (flow + flow.roll(2, 0)).sum(1)[None], torch.zeros(rows, 5, dtype=torch.float64))
    assert twice is None
