"""Images among text tokens, in models whose first block has no attention or whose blocks process several versions of each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import CLASSES, HEADS, WIDTH, randomise

MARK, VERSIONS = 7, 3
IDS = torch.tensor([[1, MARK, MARK, MARK, MARK, 3, 4, 5], [2, 6, MARK, MARK, MARK, MARK, 5, 4]])


class OptionalAttentionBlock(nn.Module):
    """A block with attention, or one that adds the previous row to each row."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if attends else None

    def mixed(self, y: Tensor) -> Tensor:
        if self.qkv is None:
            return self.out(nn.functional.pad(y, (0, 0, 1, 0))[:, :-1])
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(y).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if x.dim() == 3:
            return x + self.mixed(y)
        return x + self.mixed(y.mean(2))[:, :, None] * torch.arange(1, VERSIONS + 1).to(x)[:, None]


class ImageTextModel(nn.Module):
    def __init__(self, versions: bool) -> None:
        super().__init__()
        self.versions = versions
        self.words, self.patches, self.head = nn.Embedding(10, WIDTH), nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([OptionalAttentionBlock(False), OptionalAttentionBlock(True)])

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, rows: list[Tensor] | None = None) -> Tensor:
        x = self.words(input_ids) if rows is None else rows[0]
        if pixel_values is not None:
            image_rows = self.patches(pixel_values).flatten(2).transpose(1, 2)
            x = x.masked_scatter((input_ids == MARK)[..., None], image_rows)
        x = x[:, :, None] * torch.linspace(1, 2, VERSIONS).to(x)[:, None] if self.versions else x
        if rows is not None:
            rows.append(x)
        for layer in self.layers:
            x = layer(x)
        return self.head((x.mean(2) if self.versions else x)[:, -1])


@pytest.mark.parametrize("versions", [False, True])
def test_words_are_scored_at_block_input_and_image_at_pixels(versions: bool) -> None:
    model = randomise(ImageTextModel(versions)).double()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    e = whyformer.explain(model, {"input_ids": IDS, "pixel_values": pixels}, "input_x_gradient", [1, 3])
    leaf = pixels.clone().requires_grad_()
    rows = [model.words(IDS)]
    logits = model(IDS, leaf, rows)
    by_pixels, by_rows = torch.autograd.grad(logits[[0, 1], [1, 3]].sum(), (leaf, rows[1]))
    torch.testing.assert_close(e.part("pixel_values").scores, (pixels * by_pixels).sum(1))
    expected = (rows[1].detach() * by_rows).flatten(2).sum(-1).masked_fill(IDS == MARK, 0)
    torch.testing.assert_close(e.part("input_ids").scores, expected)


def test_gradcam_of_several_versions_has_one_score_per_word() -> None:
    """The channels of all versions count as channels of the token."""
    model = randomise(ImageTextModel(True)).double()
    e = whyformer.explain(model, {"input_ids": IDS}, "gradcam", [1, 3])
    entering: list[Tensor] = []
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, normed: entering.append(normed))
    logits = model(IDS)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[[0, 1], [1, 3]].sum(), entering)
    weights = gradient.flatten(2).mean(1, keepdim=True)
    cam = (entering[0].detach().flatten(2) * weights).sum(-1).clamp(min=0)
    assert float(cam.max()) > 0
    torch.testing.assert_close(e.scores, cam)


class SegmentedModel(nn.Module):
    """Separate blocks choose a kind for each token through a comparison, which has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.head = nn.Embedding(10, WIDTH), nn.Embedding(2, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.cutters = nn.ModuleList([OptionalAttentionBlock(True), OptionalAttentionBlock(True)])
        self.layers = nn.ModuleList([OptionalAttentionBlock(True), OptionalAttentionBlock(True)])

    def forward(self, input_ids: Tensor) -> Tensor:
        words = self.words(input_ids)
        cut = words
        for block in self.cutters:
            cut = block(cut)
        x = words + self.kinds((cut.sum(-1) > 0).long())
        for block in self.layers:
            x = block(x)
        return self.head(x[:, -1])


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp_ah_ln", "saliency"])
def test_words_are_scored_at_blocks_with_gradient_to_logits(method: str) -> None:
    model = randomise(SegmentedModel()).double()
    assert 0 < int((model.cutters[1](model.cutters[0](model.words(IDS))).sum(-1) > 0).sum()) < IDS.numel()
    e = whyformer.explain(model, {"input_ids": IDS}, method, [1, 3])
    assert e.scores.shape == IDS.shape and bool(e.scores.ne(0).all())
    if method != "input_x_gradient":
        return
    entering: list[Tensor] = []
    handle = model.layers[0].register_forward_pre_hook(lambda m, a: entering.append(a[0]))
    logits = model(IDS)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[[0, 1], [1, 3]].sum(), entering)
    torch.testing.assert_close(e.scores, (entering[0].detach() * gradient).sum(-1))
