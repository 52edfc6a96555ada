"""Video explanations have a map per time step, and composed maps of image crops preserve the sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

import whyformer
from whyformer.errors import InputError
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.mosaic import composed
from zoo import randomise

FRAME, TOP, LEFT = 2, 8, 0  # of a white square of 8 × 8 pixels in a black video


@pytest.fixture(scope="module")
def video() -> tuple[Any, torch.Tensor]:
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 4}
    config = hf.VideoMAEConfig(**options, image_size=16, patch_size=8, num_frames=4, tubelet_size=2)
    frames = torch.zeros(1, 4, 3, 16, 16)
    frames[:, FRAME, :, TOP : TOP + 8, LEFT : LEFT + 8] = 1
    return randomise(hf.VideoMAEForVideoClassification(config)), frames


def test_pixel_scores_are_in_their_frame(video: tuple[Any, torch.Tensor]) -> None:
    e = whyformer.explain(*video, "input_x_gradient", 1)
    assert (e.level, e.frames, tuple(e.scores.shape)) == ("pixel", 4, (1, 4, 16, 16))
    inside = e.scores[0, FRAME, TOP : TOP + 8, LEFT : LEFT + 8]
    assert bool(inside.any())
    assert torch.equal(inside.abs().sum(), e.scores.abs().sum())
    frame = e.frame(FRAME)
    assert (frame.frames, frame.placed().shape) == (None, (16, 16))
    assert not bool(e.frame(0).scores.any())
    assert e.heatmap((32, 32)).shape == (1, 4, 32, 32)


def test_tokens_are_tubes_of_frames(video: tuple[Any, torch.Tensor], tmp_path: Path) -> None:
    e = whyformer.explain(*video, "rollout", 1)
    assert (e.level, e.frames, e.grid, tuple(e.scores.shape)) == ("patch", 2, (2, 2), (1, 8))
    assert torch.equal(e.frame(-1).scores, e.scores[:, 4:])
    loaded = whyformer.Explanation.load(e.save(tmp_path / "video.safetensors"))
    assert (loaded.frames, loaded.grid) == (2, (2, 2))
    assert torch.equal(loaded.frame(1).scores, e.frame(1).scores)
    with pytest.raises(InputError, match=r"\.frame\(i\)"):
        e.placed()
    with pytest.raises(InputError, match="2 time steps"):
        e.frame(2)


def test_image_explanation_has_no_frames() -> None:
    e = whyformer.explain("bundled:digits", Image.new("RGB", (112, 112)), "rollout")
    with pytest.raises(InputError, match="for videos"):
        e.frame(0)


def test_composed_maps_distribute_scores_by_area() -> None:
    """A coarse map of the whole and a finer map of the upper half: each coarse cell is distributed over two rows."""
    size = (4, 4)
    whole, half = Geometry(size, (0.0, 0.0, 4.0, 4.0)), Geometry(size, (0.0, 0.0, 4.0, 2.0))
    small = torch.tensor([[4.0, 8.0], [12.0, 16.0]], dtype=torch.float64)
    large = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    result, geometry = composed([(small, whole), (large, half)])
    assert geometry.box == whole.box
    # rows of 1 pixel, columns of 2: a coarse cell of 2 × 2 pixels gives half to each of two rows
    assert result.tolist() == [[2 + 1, 4 + 2], [2 + 3, 4 + 4], [6, 8], [6, 8]]
    assert result.sum() == small.sum() + large.sum()
