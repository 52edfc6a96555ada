"""Mapping of rows to sound samples, packed patches and tiles, checked by the rows that a local change affects most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whyformer.methods.passes import record_pass
from whyformer.tape.attentions import find_attentions
from whyformer.tape.labelling import find_rows
from whyformer.tape.places import Elements, find_elements
from whyformer.tape.program import read_program
from whyformer.tape.sources import axis_of_rows, find_features, find_sources
from whyformer.tape.streams import find_streams
from zoo import CLASSES, HEADS, WIDTH, randomise

Stem = Callable[["StemEncoder", Tensor], Tensor]


class StemEncoder(nn.Module):
    """A function from the input to rows ``[B, N, D]``, and an encoder over these."""

    def __init__(self, stem: Stem, **layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = stem, nn.ModuleDict(layers)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(self, x)).mean(1))


def build_encoder(stem: Stem, **layers: nn.Module) -> StemEncoder:
    return randomise(StemEncoder(stem, **layers)).double().eval()


def elements(model: nn.Module, x: Tensor, is_picture: bool = False, packed: int = 0) -> Elements | None:
    """Elements of the rows of the first stream."""
    tape = (recorded := record_pass(model, ((x,), {}))).tape
    rows = find_rows(tape, find_sources(tape, {"x": x}, packed={"x": packed} if packed else None))
    program = read_program(tape, rows.roots.values(), list(recorded.outputs.values()))
    streams = find_streams(program, tape, rows, find_attentions(program, tape, rows))
    return find_elements(tape, rows, streams[0].rows, "x", is_picture) if streams else None


def row_distances(model: StemEncoder, x: Tensor, changed: Tensor) -> Tensor:
    """Distance ``[B, N]`` between the rows of two inputs."""
    with torch.no_grad():
        return (model.stem(model, changed) - model.stem(model, x)).norm(dim=-1)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# -- sounds ----------------------------------------------------------------------------------------------------------
def convolved(model: StemEncoder, x: Tensor) -> Tensor:
    first = F.gelu(model.layers["first"](x[:, None] if x.dim() == 2 else x))
    return model.layers["second"](first).transpose(1, 2)


def two_branches(model: StemEncoder, x: Tensor) -> Tensor:
    """A pool and a convolution in parallel, which are convolved together; labels do not cover these operations."""
    first = model.layers["first"](x[:, None])
    concatenated = torch.cat([F.max_pool1d(first, 3, 2, 1), model.layers["parallel"](first)], 1)
    return model.layers["second"](concatenated).transpose(1, 2)


def conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2)


SOUNDS: dict[str, tuple[Callable[[], StemEncoder], tuple[int, ...]]] = {
    "convolutions": (lambda: build_encoder(convolved, first=conv(1, 8, 5, 4), second=conv(8, WIDTH, 3, 2)), (2, 256)),
    "normalised over time": (
        lambda: build_encoder(convolved, first=nn.Sequential(conv(1, 8, 5, 4), nn.GroupNorm(8, 8)), second=conv(8, WIDTH, 3, 2)),
        (2, 256),
    ),
    "a spectrogram": (lambda: build_encoder(convolved, first=conv(6, 8, 3, 1), second=conv(8, WIDTH, 3, 2)), (2, 6, 64)),
    "two branches": (
        lambda: build_encoder(two_branches, first=conv(1, 8, 5, 4), parallel=conv(8, 8, 3, 2), second=conv(16, WIDTH, 3, 2)),
        (2, 256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUNDS)
def test_click_changes_its_frame_the_most(name: str) -> None:
    build, shape = SOUNDS[name]
    model, x = build(), noise(*shape)
    result = elements(model, x)
    assert result is not None
    assert result.grid is None
    assert result.rows.shape == (2, shape[-1])
    width = shape[-1] // (int(result.rows.max()) + 1)
    for frame in (1, 3, result.rows.shape[1] // width - 2):
        changed, sample_index = x.clone(), frame * width + width // 2
        changed[..., sample_index - width // 4 : sample_index + width // 4 + 1] += 20
        distances = row_distances(model, x, changed)
        assert torch.equal(result.rows[:, sample_index], torch.full((2,), frame))
        # the center of the receptive field may be in the adjacent frame
        assert bool(((distances.argmax(1) - result.rows[:, sample_index]).abs() <= 1).all())


def test_frames_of_single_sound_equal_batch() -> None:
    for build, shape in SOUNDS.values():
        model, x = build(), noise(*shape)
        batch, single = elements(model, x), elements(model, x[1:])
        assert batch is not None
        assert single is not None
        assert torch.equal(batch.rows[1:], single.rows)
        half = elements(model.bfloat16(), x.bfloat16())
        assert half is not None
        assert torch.equal(half.rows, batch.rows)


def shuffled(model: StemEncoder, x: Tensor) -> Tensor:
    """Parallel branches on shuffled frames; labels do not cover these operations."""
    first = model.layers["first"](x[:, None])[..., torch.randperm(64, generator=torch.Generator().manual_seed(2))]
    concatenated = torch.cat([F.max_pool1d(first, 3, 2, 1), model.layers["parallel"](first)], 1)
    return model.layers["second"](concatenated).transpose(1, 2)


def transformed(model: StemEncoder, x: Tensor) -> Tensor:
    """Frequencies, each of which depends on the whole sound."""
    return convolved(model, torch.fft.fft(x).real)


def test_shuffled_or_global_frames_have_no_elements() -> None:
    layers = {"first": conv(1, 8, 5, 4), "parallel": conv(8, 8, 3, 2), "second": conv(16, WIDTH, 3, 2)}
    assert elements(build_encoder(shuffled, **layers), noise(2, 256)) is None
    layers = {"first": conv(1, 8, 5, 4), "second": conv(8, WIDTH, 3, 2)}
    assert elements(build_encoder(transformed, **layers), noise(2, 256)) is None


# -- patches, tiles and images ---------------------------------------------------------------------------------------
def test_packed_patch_changes_its_merged_row() -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))

    def stem(model: StemEncoder, x: Tensor) -> Tensor:
        return model.layers["merge"](F.gelu(model.layers["patch"](x)).unflatten(0, (2, 16))[:, order].unflatten(1, (4, 4)).flatten(2))

    model, x = build_encoder(stem, patch=nn.Linear(12, 8), merge=nn.Linear(32, WIDTH)), noise(32, 12)
    result = elements(model, x, packed=16)
    assert result is not None
    assert result.rows.shape == (2, 16)
    for patch in range(32):
        changed = x.clone()
        changed[patch] += 3
        distances = row_distances(model, x, changed)
        assert divmod(int(distances.argmax()), 4) == (patch // 16, int(result.rows[patch // 16, patch % 16]))
        assert int((distances > 0).sum()) == 1
    for dtype in (torch.float32, torch.bfloat16):
        converted = elements(model.to(dtype), x.to(dtype), packed=16)
        assert converted is not None
        assert torch.equal(converted.rows, result.rows)


def tiled(model: StemEncoder, x: Tensor) -> Tensor:
    return model.layers["patch"](x.flatten(0, 1)).flatten(2).transpose(1, 2).reshape(len(x), -1, WIDTH).flip(1)


def branched(model: StemEncoder, x: Tensor) -> Tensor:
    first = model.layers["first"](x)
    concatenated = torch.cat([F.max_pool2d(first, 3, 2, 1), model.layers["parallel"](first)], 1)
    return model.layers["second"](concatenated).flatten(2).transpose(1, 2)


def test_bright_patch_changes_row_of_its_cell() -> None:
    """Tiles with rows in reverse order, and overlapping parallel convolutions."""
    tiles = build_encoder(tiled, patch=nn.Conv2d(3, WIDTH, 8, 8)), noise(2, 3, 3, 16, 24), (3, 2, 3)
    stems = {"first": nn.Conv2d(3, 8, 3, 2, 1), "parallel": nn.Conv2d(8, 8, 3, 2, 1), "second": nn.Conv2d(16, WIDTH, 3, 2, 1)}
    untiled = build_encoder(branched, **stems), noise(2, 3, 32, 48), (4, 6)
    for model, x, grid in (tiles, untiled):
        result = elements(model, x, is_picture=True)
        assert result is not None
        assert result.grid == grid
        for cell, row in enumerate(result.rows[0].tolist()):
            *tile, line, column = (int(i) for i in torch.unravel_index(torch.tensor(cell), grid))
            changed = x.clone()
            part = changed[(slice(None), *tile)] if tile else changed
            part[..., 8 * line + 2 : 8 * line + 6, 8 * column + 2 : 8 * column + 6] += 50
            assert row in row_distances(model, x, changed).topk(4).indices[0].tolist()[: 1 if tile else 4]
            assert bool((result.rows[1] == result.rows[0]).all())


# -- axes ------------------------------------------------------------------------------------------------------------
def turned(model: StemEncoder, x: Tensor) -> Tensor:
    return model.layers["first"](F.layer_norm(x, x.shape[1:]).transpose(1, 2))


def mixer(model: StemEncoder, x: Tensor) -> Tensor:
    return model.layers["second"](x + model.layers["first"](x.transpose(1, 2)).transpose(1, 2))


def patched(model: StemEncoder, x: Tensor) -> Tensor:
    """Each row is a part of a channel."""
    return model.layers["first"](x.transpose(1, 2).unfold(2, 5, 5)).flatten(1, 2)


def padded(model: StemEncoder, x: Tensor) -> Tensor:
    """Labels do not cover pooling, so receptive fields are measured."""
    return model.layers["first"](F.avg_pool1d(x, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("stem", "layers", "shape", "features", "axis"),
    [
        (turned, {"first": nn.Linear(6, WIDTH)}, (2, 6, 20), 1, 2),
        (mixer, {"first": nn.Linear(20, 20), "second": nn.Linear(6, WIDTH)}, (2, 20, 6), None, 1),
        (patched, {"first": nn.Linear(5, WIDTH)}, (2, 20, 6), None, 1),
        (padded, {"first": nn.Conv1d(6, WIDTH, 3)}, (2, 6, 20), None, 2),
        (lambda m, x: m.layers["first"](x), {"first": nn.Linear(6, WIDTH)}, (2, 20, 6), 2, 1),
    ],
)
def test_axes_of_features_and_rows(stem: Stem, layers: dict[str, nn.Module], shape: tuple[int, ...], features: int | None, axis: int) -> None:
    x = noise(*shape)
    tape = record_pass(build_encoder(stem, **layers), ((x,), {})).tape
    assert find_features(tape, tape.number(x)) == features
    assert axis_of_rows(tape, tape.number(x)) == axis
