"""Vision models with any order of patch tokens, and images for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import CLASSES, HEADS, WIDTH, randomise

SIDE = 8


class Unfolded(nn.Module):
    """A ViT whose patches come from unfold, in any order, with special tokens before or after them."""

    def __init__(self, grid: tuple[int, int], before: int = 1, after: int = 0, order: Sequence[int] | None = None) -> None:
        super().__init__()
        cells = grid[0] * grid[1]
        self.patches = nn.Linear(3 * SIDE * SIDE, WIDTH)
        self.before, self.after = (nn.Parameter(torch.randn(1, n, WIDTH)) for n in (before, after))
        self.positions = nn.Parameter(torch.randn(1, before + cells + after, WIDTH) * 0.1)
        self.order = torch.arange(cells) if order is None else torch.tensor(order)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.patches(F.unfold(x, SIDE, stride=SIDE).transpose(1, 2))
        cells = cells[:, self.order] if len(self.order) == cells.shape[1] else cells
        around = [part.expand(len(x), -1, -1) for part in (self.before, self.after)]
        hidden = self.encoder(torch.cat([around[0], cells, around[1]], 1) + self.positions)
        return self.head(hidden[:, 0] if self.before.shape[1] else hidden.mean(1))


class Stem(nn.Module):
    """A convolutional stem with overlapping kernels before the blocks, as in hybrid models."""

    def __init__(self, layers: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        widths = [3, *[WIDTH] * len(layers)]
        self.stem = nn.Sequential(*(nn.Sequential(nn.Conv2d(widths[i], WIDTH, k, s, p), nn.ReLU()) for i, (k, s, p) in enumerate(layers)))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


class Mixed(Unfolded):
    """Every token depends on the whole image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.fft2(x).real)


class Folded(Unfolded):
    """Each token has two places: the halves of the image are added."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(sum(x.chunk(2, -1)))  # type: ignore[arg-type]


def unfolded(*args: Any, **options: Any) -> nn.Module:
    return randomise(Unfolded(*args, **options)).double()


def picture(rows: int, columns: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, rows * SIDE, columns * SIDE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Turned(Stem):
    """Convolutions over the transposed image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(2, 3))


PERMUTED = [7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 6, 4]
