"""Padding masks under other names than ``attention_mask``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise


class Padded(nn.Module):
    """An encoder that reads the mean of its real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 3)

    def read(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        x = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        real = torch.ones_like(ids, dtype=x.dtype) if padding is None else (~padding).to(x)
        return self.head((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))


class ByMask(Padded):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.read(ids, None if mask is None else mask == 0)


class ByPaddingMask(Padded):
    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        return self.read(ids, src_key_padding_mask)


class IgnoredMask(Padded):
    def forward(self, ids: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        return self.read(ids, None)


IDS, REAL = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("method", ["gradcam", "legrad", "attcat", "gae"])
@pytest.mark.parametrize(
    ("kind", "name", "mask"),
    [(ByMask, "mask", REAL), (ByMask, "mask", REAL.bool()), (ByPaddingMask, "src_key_padding_mask", REAL == 0)],
)
def test_padded_sample_has_scores_of_single(kind: type[Padded], name: str, mask: Tensor, method: str, positional: bool) -> None:
    model = randomise(kind()).double().eval()
    fed = (IDS, mask) if positional else {"ids": IDS, name: mask}
    padded = whyformer.explain(model, fed, method, 1).scores[1]
    single = whyformer.explain(model, {"ids": IDS[1:, :3]}, method, 1).scores[0]
    assert torch.allclose(padded[:3], single, rtol=1e-6, atol=1e-9)
    assert not bool(padded[3:].any())


def test_mask_without_effect_marks_no_padding() -> None:
    model = randomise(IgnoredMask()).double().eval()
    plain, masked = (whyformer.explain(model, {"ids": IDS, **more}, "gradcam", 1).scores for more in ({}, {"loss_mask": REAL}))
    assert torch.equal(plain, masked)
