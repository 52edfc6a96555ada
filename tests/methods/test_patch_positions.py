"""Scores are assigned to their patches for any order of token rows; ambiguous rows are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import whyformer
from row_orders import PERMUTED, SIDE, Folded, Mixed, picture, unfolded
from tape.test_tape_places import patch_elements
from whyformer.errors import MethodNotApplicable
from zoo import HEADS, WIDTH, randomise


def test_register_rows_are_not_patches() -> None:
    import transformers

    options = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**options, mlp_ratio=2, num_register_tokens=4)
    result = patch_elements(randomise(transformers.Dinov2WithRegistersForImageClassification(config)), torch.randn(1, 3, 32, 32))
    assert result is not None
    assert (result.grid, result.rows[0].tolist()) == ((4, 4), list(range(5, 21)))


def test_video_grid_has_time_axis_first() -> None:
    import transformers

    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.VideoMAEConfig(**options, image_size=16, patch_size=8, num_frames=4, tubelet_size=2)
    result = patch_elements(transformers.VideoMAEForVideoClassification(config), torch.randn(1, 4, 3, 16, 16))
    assert result is not None
    assert (result.grid, result.rows[0].tolist()) == ((2, 2, 2), list(range(8)))


def test_rows_that_depend_on_whole_image_are_refused() -> None:
    model = randomise(Mixed((3, 4))).double()
    x = picture(3, 4)
    for method in ("rollout", "gradcam", "vit_cx", "gradcam_attention"):
        with pytest.raises(MethodNotApplicable, match=r"unknown|no recognizable blocks"):
            whyformer.explain(model, x, method)
    with pytest.raises(MethodNotApplicable, match=r"unknown|no recognizable blocks"):
        whyformer.attention_maps(model, x)
    assert whyformer.explain(model, x, "saliency").level == "pixel"


def test_rows_of_two_patches_are_refused() -> None:
    model = randomise(Folded((3, 2))).double()
    with pytest.raises(MethodNotApplicable, match=r"unknown|no recognizable blocks"):
        whyformer.explain(model, picture(3, 4), "gae")


@pytest.mark.parametrize("before", [0, 1, 3])
def test_scores_of_permuted_rows_are_at_their_patches(before: int) -> None:
    """Input × gradient against autograd, and map methods against a model with rows in reading order."""
    model = unfolded((3, 4), before, 2, PERMUTED)
    x = picture(3, 4, 2)
    pixels = whyformer.explain(model, x, "input_x_gradient", target=1)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    expected_patches = F.unfold(x * gradient, SIDE, stride=SIDE).sum(1)
    assert torch.allclose(F.unfold(pixels.scores[:, None], SIDE, stride=SIDE).sum(1), expected_patches)
    # the same scores as those of a model whose rows are in reading order
    plain = unfolded((3, 4), before, 2)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        row_indices = before + torch.tensor(PERMUTED)
        plain.positions[:, row_indices] = model.positions[:, before : before + 12]
    assert torch.allclose(model(x), plain(x))
    for method in ("rollout", "gae", "transformer_attribution", "gradcam", "gradcam_attention", "value_zeroing", "norm_attention"):
        result, expected = (whyformer.explain(m, x, method, target=1) for m in (model, plain))
        assert (result.grid, result.scores.shape) == ((3, 4), (2, 12))
        assert torch.allclose(result.scores, expected.scores, atol=1e-10), method
    assert float(whyformer.explain(model, x, "gradcam", target=1).scores.std()) > 0
    result, expected = (whyformer.explain(m, x, "vit_cx", target=1) for m in (model, plain))
    assert torch.allclose(result.scores, expected.scores, atol=1e-10)


def test_changed_patch_has_largest_score_change() -> None:
    """After a change of one patch, its score changes the most."""
    model = unfolded((3, 5), 1, 0)
    x = picture(3, 5)
    for cell in (0, 6, 14):
        changed = x.clone()
        row, column = divmod(cell, 5)
        changed[..., row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] += 3
        explanations = [whyformer.explain(model, y, "raw_attention", block=0, aggregation={"rows": "column_mean"}) for y in (x, changed)]
        difference = (explanations[1].scores - explanations[0].scores)[0].abs()
        assert int(difference.argmax()) == cell
