"""Which rows stand for the moments of a sound, for packed patches and for tiles: what is changed there moves them most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whyformer.methods.passes import record_pass
from whyformer.tape.labelling import find_rows
from whyformer.tape.places import Elements, find_elements
from whyformer.tape.program import read_program
from whyformer.tape.sources import axis_of_rows, find_features, find_sources
from whyformer.tape.streams import find_streams
from whyformer.tape.structure import find_attentions
from zoo import CLASSES, HEADS, WIDTH, randomise

Stem = Callable[["Listens", Tensor], Tensor]


class Listens(nn.Module):
    """Rows ``[B, N, D]`` by a function of the model and its input, and blocks over them."""

    def __init__(self, stem: Stem, **layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = stem, nn.ModuleDict(layers)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(self, x)).mean(1))


def built(stem: Stem, **layers: nn.Module) -> Listens:
    return randomise(Listens(stem, **layers)).double().eval()


def elements(model: nn.Module, x: Tensor, is_picture: bool = False, packed: int = 0) -> Elements | None:
    """Of the rows that attend first."""
    tape = (whole := record_pass(model, ((x,), {}))).tape
    rows = find_rows(tape, find_sources(tape, {"x": x}, packed={"x": packed} if packed else None))
    program = read_program(tape, rows.roots.values(), list(whole.outputs.values()))
    streams = find_streams(program, tape, rows, find_attentions(program, tape, rows))
    return find_elements(tape, rows, streams[0].rows, "x", is_picture) if streams else None


def moved(model: Listens, x: Tensor, changed: Tensor) -> Tensor:
    """``[B, N]``, how far the rows move."""
    with torch.no_grad():
        return (model.stem(model, changed) - model.stem(model, x)).norm(dim=-1)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# -- sounds ----------------------------------------------------------------------------------------------------------
def convolved(model: Listens, x: Tensor) -> Tensor:
    first = F.gelu(model.layers["first"](x[:, None] if x.dim() == 2 else x))
    return model.layers["second"](first).transpose(1, 2)


def two_branches(model: Listens, x: Tensor) -> Tensor:
    """Steps that labels do not follow: a pool and a convolution beside each other, convolved together."""
    first = model.layers["first"](x[:, None])
    both = torch.cat([F.max_pool1d(first, 3, 2, 1), model.layers["beside"](first)], 1)
    return model.layers["second"](both).transpose(1, 2)


def conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2)


SOUNDS: dict[str, tuple[Callable[[], Listens], tuple[int, ...]]] = {
    "convolutions": (lambda: built(convolved, first=conv(1, 8, 5, 4), second=conv(8, WIDTH, 3, 2)), (2, 256)),
    "normalised over time": (
        lambda: built(convolved, first=nn.Sequential(conv(1, 8, 5, 4), nn.GroupNorm(8, 8)), second=conv(8, WIDTH, 3, 2)),
        (2, 256),
    ),
    "a spectrogram": (lambda: built(convolved, first=conv(6, 8, 3, 1), second=conv(8, WIDTH, 3, 2)), (2, 6, 64)),
    "two branches": (
        lambda: built(two_branches, first=conv(1, 8, 5, 4), beside=conv(8, 8, 3, 2), second=conv(16, WIDTH, 3, 2)),
        (2, 256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUNDS)
def test_a_click_moves_the_frame_of_its_moment_most(name: str) -> None:
    build, shape = SOUNDS[name]
    model, x = build(), noise(*shape)
    found = elements(model, x)
    assert found is not None
    assert found.grid is None
    assert found.rows.shape == (2, shape[-1])
    width = shape[-1] // (int(found.rows.max()) + 1)
    for frame in (1, 3, found.rows.shape[1] // width - 2):
        changed, moment = x.clone(), frame * width + width // 2
        changed[..., moment - width // 4 : moment + width // 4 + 1] += 20
        far = moved(model, x, changed)
        assert torch.equal(found.rows[:, moment], torch.full((2,), frame))
        # a frame of convolutions begins with the moment in the middle of what it sees
        assert bool(((far.argmax(1) - found.rows[:, moment]).abs() <= 1).all())


def test_one_sound_has_the_frames_of_each_of_two() -> None:
    for build, shape in SOUNDS.values():
        model, x = build(), noise(*shape)
        both, one = elements(model, x), elements(model, x[1:])
        assert both is not None
        assert one is not None
        assert torch.equal(both.rows[1:], one.rows)
        half = elements(model.bfloat16(), x.bfloat16())
        assert half is not None
        assert torch.equal(half.rows, both.rows)


def shuffled(model: Listens, x: Tensor) -> Tensor:
    """Steps that labels do not follow, in another order in time."""
    first = model.layers["first"](x[:, None])[..., torch.randperm(64, generator=torch.Generator().manual_seed(2))]
    both = torch.cat([F.max_pool1d(first, 3, 2, 1), model.layers["beside"](first)], 1)
    return model.layers["second"](both).transpose(1, 2)


def transformed(model: Listens, x: Tensor) -> Tensor:
    """Frames of frequencies, each of which is of the whole sound."""
    return convolved(model, torch.fft.fft(x).real)


def test_frames_in_another_order_or_of_the_whole_have_no_place() -> None:
    layers = {"first": conv(1, 8, 5, 4), "beside": conv(8, 8, 3, 2), "second": conv(16, WIDTH, 3, 2)}
    assert elements(built(shuffled, **layers), noise(2, 256)) is None
    layers = {"first": conv(1, 8, 5, 4), "second": conv(8, WIDTH, 3, 2)}
    assert elements(built(transformed, **layers), noise(2, 256)) is None


# -- patches, tiles and pictures -------------------------------------------------------------------------------------
def test_a_packed_patch_moves_the_row_that_it_was_merged_into() -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))

    def stem(model: Listens, x: Tensor) -> Tensor:
        return model.layers["merge"](F.gelu(model.layers["patch"](x)).unflatten(0, (2, 16))[:, order].unflatten(1, (4, 4)).flatten(2))

    model, x = built(stem, patch=nn.Linear(12, 8), merge=nn.Linear(32, WIDTH)), noise(32, 12)
    found = elements(model, x, packed=16)
    assert found is not None
    assert found.rows.shape == (2, 16)
    for patch in range(32):
        changed = x.clone()
        changed[patch] += 3
        far = moved(model, x, changed)
        assert divmod(int(far.argmax()), 4) == (patch // 16, int(found.rows[patch // 16, patch % 16]))
        assert int((far > 0).sum()) == 1
    for dtype in (torch.float32, torch.bfloat16):
        same = elements(model.to(dtype), x.to(dtype), packed=16)
        assert same is not None
        assert torch.equal(same.rows, found.rows)


def tiled(model: Listens, x: Tensor) -> Tensor:
    return model.layers["patch"](x.flatten(0, 1)).flatten(2).transpose(1, 2).reshape(len(x), -1, WIDTH).flip(1)


def branched(model: Listens, x: Tensor) -> Tensor:
    first = model.layers["first"](x)
    both = torch.cat([F.max_pool2d(first, 3, 2, 1), model.layers["beside"](first)], 1)
    return model.layers["second"](both).flatten(2).transpose(1, 2)


def test_a_bright_patch_moves_the_row_of_its_cell() -> None:
    """In tiles whose rows stand in reverse order, and below overlapping convolutions that labels do not follow."""
    tiles = built(tiled, patch=nn.Conv2d(3, WIDTH, 8, 8)), noise(2, 3, 3, 16, 24), (3, 2, 3)
    stems = {"first": nn.Conv2d(3, 8, 3, 2, 1), "beside": nn.Conv2d(8, 8, 3, 2, 1), "second": nn.Conv2d(16, WIDTH, 3, 2, 1)}
    whole = built(branched, **stems), noise(2, 3, 32, 48), (4, 6)
    for model, x, grid in (tiles, whole):
        found = elements(model, x, is_picture=True)
        assert found is not None
        assert found.grid == grid
        for cell, row in enumerate(found.rows[0].tolist()):
            *tile, line, column = (int(i) for i in torch.unravel_index(torch.tensor(cell), grid))
            changed = x.clone()
            part = changed[(slice(None), *tile)] if tile else changed
            part[..., 8 * line + 2 : 8 * line + 6, 8 * column + 2 : 8 * column + 6] += 50
            assert row in moved(model, x, changed).topk(4).indices[0].tolist()[: 1 if tile else 4]
            assert bool((found.rows[1] == found.rows[0]).all())


# -- axes ------------------------------------------------------------------------------------------------------------
def turned(model: Listens, x: Tensor) -> Tensor:
    return model.layers["first"](F.layer_norm(x, x.shape[1:]).transpose(1, 2))


def mixer(model: Listens, x: Tensor) -> Tensor:
    return model.layers["second"](x + model.layers["first"](x.transpose(1, 2)).transpose(1, 2))


def padded(model: Listens, x: Tensor) -> Tensor:
    """Behind a pad no label is followed: what the rows see is measured."""
    return model.layers["first"](F.avg_pool1d(x, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("stem", "layers", "shape", "features", "axis"),
    [
        (turned, {"first": nn.Linear(6, WIDTH)}, (2, 6, 20), 1, 2),
        (mixer, {"first": nn.Linear(20, 20), "second": nn.Linear(6, WIDTH)}, (2, 20, 6), None, 1),
        (padded, {"first": nn.Conv1d(6, WIDTH, 3)}, (2, 6, 20), None, 2),
        (lambda m, x: m.layers["first"](x), {"first": nn.Linear(6, WIDTH)}, (2, 20, 6), 2, 1),
    ],
)
def test_axes_of_features_and_rows(stem: Stem, layers: dict[str, nn.Module], shape: tuple[int, ...], features: int | None, axis: int) -> None:
    x = noise(*shape)
    tape = record_pass(built(stem, **layers), ((x,), {})).tape
    assert find_features(tape, tape.number(x)) == features
    assert axis_of_rows(tape, tape.number(x)) == axis
