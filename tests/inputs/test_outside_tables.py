"""Token ids and texts that exceed the tables of a model without a config are refused with the cause; valid ones are explained."""

import pytest
import torch
from torch import nn

import whyformer
from whyformer.errors import InputError

WORDS, LONGEST = 20, 6


class Handwritten(nn.Module):
    """An encoder that looks up WORDS tokens and LONGEST positions, and takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 8), nn.Embedding(LONGEST, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.encoder(states).mean(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Handwritten().double().eval()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, ids: whyformer.explain(model, ids, method="gae"),
        lambda model, ids: whyformer.explain(model, ids),
        lambda model, ids: whyformer.explain(model, [ids[0], ids[0, :2]], method="lrp"),
        lambda model, ids: whyformer.attention_maps(model, ids),
        lambda model, ids: whyformer.record(model, ids),
        lambda model, ids: whyformer.compare(model, ids, methods=["gae", "rollout"]),
    ],
)
@pytest.mark.parametrize(("ids", "cause"), [([1, 2, WORDS], "from 1 to 20"), ([1] * (LONGEST + 1), "7 tokens")])
def test_ids_outside_tables_are_refused_with_the_cause(model, use, ids, cause):
    with pytest.raises(InputError, match=cause):
        use(model, torch.tensor([ids]))
    assert use(model, torch.tensor([[1, 2, WORDS - 1]])) is not None


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_baseline_outside_vocabulary_is_refused(model, method):
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(InputError, match="fails on changed inputs"):
        whyformer.explain(model, ids, method=method, baseline=WORDS)
    assert whyformer.explain(model, ids, method=method, baseline=WORDS - 1).scores.shape == (1, 4)


def test_attention_maps_of_ids_of_different_lengths_equal_single_ones(model):
    ids = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7])]
    maps = whyformer.attention_maps(model, ids)
    assert maps.tokens is None
    for sample, row in enumerate(ids):
        alone, size = whyformer.attention_maps(model, row[None]), len(row)
        assert torch.allclose(maps.matrix(1, 0, sample=sample)[:size, :size], alone.matrix(1, 0), atol=1e-12)
        assert torch.allclose(maps.explanation(0).scores[sample, :size], alone.explanation(0).scores[0], atol=1e-12)
        assert not maps.maps[0][sample, :, :, size:].any()
