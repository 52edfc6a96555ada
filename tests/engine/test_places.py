"""Where a picture's cells lie among the token rows: found on models that lay them out in any order, or refused."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whyformer
from row_orders import PERMUTED, SIDE, Folded, Mixed, Stem, picture, unfolded
from whyformer.engine import places as room
from whyformer.engine.places import picture_places, row_of_each
from whyformer.errors import MethodNotApplicable
from whyformer.models.facts import facts
from whyformer.models.structure import find_blocks
from whyformer.tape.places import Places, box_cells
from zoo import HEADS, IMAGES, WIDTH, WINDOWED, build, randomise


def measured(model: nn.Module, x: Tensor, block: int | None = None) -> Places | None:
    return picture_places(model, ((x[:1],), {}), 0, block)


@pytest.mark.parametrize(
    ("grid", "before", "after", "order"),
    [
        ((3, 4), 1, 0, None),
        ((3, 5), 1, 0, None),
        ((3, 5), 0, 0, None),
        ((4, 4), 0, 0, None),
        ((3, 4), 1, 0, PERMUTED),
        ((4, 3), 1, 5, None),  # detection tokens behind the patches
        ((3, 4), 5, 3, PERMUTED),
        ((1, 6), 2, 0, None),
    ],
)
def test_unfold_and_linear(grid: tuple[int, int], before: int, after: int, order: list[int] | None) -> None:
    model = unfolded(grid, before, after, order)
    rows = torch.empty(grid[0] * grid[1], dtype=torch.long)
    rows[torch.tensor(order or list(range(len(rows))))] = before + torch.arange(len(rows))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for block in (None, 0, 1):
            found = measured(model.to(dtype), picture(*grid).to(dtype), block)
            assert found is not None
            assert (found.grid, found.tokens) == (grid, before + len(rows) + after)
            assert torch.equal(found.rows, rows)


def test_margins_and_sizes() -> None:
    """Pixels behind the last whole patch feed nothing; another size of picture is measured by itself."""
    model = unfolded((3, 4))
    for height, width in ((24, 32), (29, 38)):
        found = measured(model, torch.randn(1, 3, height, width, dtype=torch.float64))
        assert found is not None
        assert (found.grid, found.rows.tolist()) == ((3, 4), list(range(1, 13)))
    free = unfolded((3, 4))
    free.positions = nn.Parameter(torch.zeros(1, 1, WIDTH, dtype=torch.float64))  # fits any number of rows
    grids = [measured(free, picture(*grid)) for grid in ((2, 3), (3, 2), (1, 1))]
    assert [g and g.grid for g in grids] == [(2, 3), (3, 2), (1, 1)]


@pytest.mark.parametrize(
    ("fed", "cells"),
    [
        ([[0, 0, 1], [0, 0, 1], [2, 2, 3]], [[0, 1], [2, 3]]),
        ([[0, 0, -1], [2, 2, -1]], [[0], [2]]),
        ([[0, 1, 0], [0, 1, 0]], None),  # one row for two boxes
        ([[0, 0, 1], [0, 2, 2]], None),  # no lattice
        ([[0, -1], [1, 2]], None),  # a hole
        ([[-1, -1]], None),
    ],
)
def test_cells(fed: list[list[int]], cells: list[list[int]] | None) -> None:
    found = box_cells(torch.tensor(fed))
    assert (None if found is None else found.tolist()) == cells


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 4), (4, 1), (3, 3)])
def test_lattice(shape: tuple[int, int]) -> None:
    """Points in any order that scatter less than lines lie apart; more, and there is none."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])).double() * 8
    order = torch.randperm(len(whole), generator=generator)
    scatter = torch.rand(len(whole), 2, generator=generator, dtype=torch.float64)
    found = room._lattice((whole + 3 * scatter)[order])
    assert found is not None
    assert torch.equal(order[found], torch.arange(len(whole)).reshape(shape))
    if min(shape) > 1:
        assert room._lattice((whole + 30 * scatter)[order]) is None


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


def yolos() -> tuple[nn.Module, Tensor]:
    import transformers

    options = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH, "patch_size": 8}
    config = transformers.YolosConfig(**options, image_size=[32, 48], num_detection_tokens=5)
    return randomise(transformers.YolosForObjectDetection(config)), torch.randn(1, 3, 32, 48)


def registers() -> tuple[nn.Module, Tensor]:
    import transformers

    options = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**options, mlp_ratio=2, num_register_tokens=4)
    return randomise(transformers.Dinov2WithRegistersForImageClassification(config)), torch.randn(1, 3, 32, 32)


FIRST = {"hf_deit": 2, "hf_deit_teacher": 2, "timm_deit": 2, "timm_vit_mean": 0, "registers": 5}
SIZES = {"hf_vit_wide": (3, 5), "yolos": (4, 6)}
BUILDERS = {**IMAGES, "yolos": yolos, "registers": registers}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("block", [None, -1])
def test_families(name: str, block: int | None) -> None:
    model, x = BUILDERS[name]()
    found = measured(model, x, None if block is None else len(find_blocks(model)) - 1)
    grid = SIZES.get(name, (4, 4))
    assert found is not None
    assert found.grid == grid
    assert found.rows.tolist() == [FIRST.get(name, 1) + i for i in range(grid[0] * grid[1])]
    assert found.tokens == found.rows.max() + 1 + (5 if name == "yolos" else 0)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_have_no_rows_over_the_picture_but_their_blocks_features_do(name: str) -> None:
    model, x = build(name)
    assert measured(model, x) is None
    found = measured(model, x, len(find_blocks(model)) - 1)
    assert found is not None
    assert found.grid == (8, 8)
    assert found.rows.tolist() == list(range(64))


def test_a_video_has_cells_by_time_first() -> None:
    import transformers

    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.VideoMAEConfig(**options, image_size=16, patch_size=8, num_frames=4, tubelet_size=2)
    found = measured(transformers.VideoMAEForVideoClassification(config).eval(), torch.randn(1, 4, 3, 16, 16))
    assert found is not None
    assert (found.grid, found.rows.tolist()) == ((2, 2, 2), list(range(8)))


@pytest.mark.parametrize("layers", [[(7, 4, 3), (3, 2, 1)], [(3, 2, 1), (3, 2, 1), (3, 2, 1)]])
def test_overlapping_convolutions_are_placed_by_the_centres_of_their_gradients(layers: list[tuple[int, int, int]]) -> None:
    model = randomise(Stem(layers)).double()
    found = measured(model, torch.randn(1, 3, 48, 32, dtype=torch.float64))
    assert found is not None
    assert (found.grid, found.rows.tolist()) == ((6, 4), list(range(24)))


def test_rows_made_of_the_whole_picture_are_refused() -> None:
    model = randomise(Mixed((3, 4))).double()
    x = picture(3, 4)
    assert measured(model, x) is None
    for method in ("rollout", "gradcam", "vit_cx", "gradcam_attention"):
        with pytest.raises(MethodNotApplicable, match="cannot be measured"):
            whyformer.explain(model, x, method)
    with pytest.raises(MethodNotApplicable, match="cannot be measured"):
        whyformer.attention_maps(model, x)
    assert whyformer.explain(model, x, "saliency").level == "pixel"


def test_rows_of_two_places_are_refused() -> None:
    model = randomise(Folded((3, 2))).double()
    assert measured(model, picture(3, 4)) is None
    with pytest.raises(MethodNotApplicable, match="cannot be measured"):
        whyformer.explain(model, picture(3, 4), "gae")


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_score_stands_at_its_patch(before: int) -> None:
    """Input × gradient of each patch computed by hand, and rollout by hand, both with permuted rows."""
    model = unfolded((3, 4), before, 2, PERMUTED)
    x = picture(3, 4, 2)
    pixels = whyformer.explain(model, x, "input_x_gradient", target=1)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    by_hand = F.unfold(x * gradient, SIDE, stride=SIDE).sum(1)
    assert torch.allclose(F.unfold(pixels.scores[:, None], SIDE, stride=SIDE).sum(1), by_hand)
    # the same rollout as that of a model whose rows are in reading order
    plain = unfolded((3, 4), before, 2)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        moved = before + torch.tensor(PERMUTED)
        plain.positions[:, moved] = model.positions[:, before : before + 12]
    assert torch.allclose(model(x), plain(x))
    for method in ("rollout", "gae", "transformer_attribution", "gradcam", "gradcam_attention", "value_zeroing", "norm_attention"):
        found, wanted = (whyformer.explain(m, x, method, target=1) for m in (model, plain))
        assert (found.grid, found.scores.shape) == ((3, 4), (2, 12))
        assert torch.allclose(found.scores, wanted.scores, atol=1e-10), method
    assert float(whyformer.explain(model, x, "gradcam", target=1).scores.std()) > 0
    found, wanted = (whyformer.explain(m, x, "vit_cx", target=1) for m in (model, plain))
    assert torch.allclose(found.scores, wanted.scores, atol=1e-10)


def test_a_planted_signal_is_seen_where_it_is() -> None:
    """One patch is changed: what is most different is that patch's cell."""
    model = unfolded((3, 5), 1, 0)
    x = picture(3, 5)
    for cell in (0, 6, 14):
        changed = x.clone()
        row, column = divmod(cell, 5)
        changed[..., row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] += 3
        seen = [whyformer.explain(model, y, "raw_attention", block=0, aggregation={"rows": "column_mean"}) for y in (x, changed)]
        difference = (seen[1].scores - seen[0].scores)[0].abs()
        assert int(difference.argmax()) == cell


def test_the_forward_pass_ends_at_the_first_attention_and_the_model_is_left_as_it_was() -> None:
    model = unfolded((3, 4))
    facts(model, ((picture(3, 4),), {}))  # reading its program is a whole pass
    entered: list[int] = []
    hooks = [b.register_forward_hook(lambda *_, i=i: entered.append(i)) for i, b in enumerate(model.encoder.layers)]  # type: ignore[union-attr,arg-type,misc]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = picture(3, 4)
    assert measured(model, x) is not None
    assert entered == []
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if m not in list(model.encoder.layers)] == [0] * (len(list(model.modules())) - 2)  # type: ignore[arg-type,union-attr]
    for hook in hooks:
        hook.remove()


def test_measured_once_for_a_model_and_a_size_without_keeping_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    measure = room._measure
    monkeypatch.setattr(room, "_measure", lambda *given: times.append(1) or measure(*given))  # type: ignore[func-returns-value]
    model: nn.Module | None = unfolded((3, 4))
    assert model is not None
    for _ in range(3):
        assert measured(model, picture(3, 4)) is not None
    assert len(times) == 1
    alive = weakref.ref(model)
    model = None
    gc.collect()
    assert alive() is None
