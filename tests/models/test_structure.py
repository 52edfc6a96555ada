"""The structure of a model that is detected automatically: blocks, readout and modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.maps.stream_maps import Paths
from whyformer.models.structure import find_blocks, first_bad_parameter
from whyformer.tape.walking import GRADIENT
from zoo import WINDOWED, ZOO, build

# tokens of the last block that the logits depend on, for a sample of ten tokens or an image
READOUT = {
    "hf_vit": [0], "hf_vit_wide": [0], "hf_deit": [0], "hf_deit_teacher": [0, 1], "hf_dinov2": list(range(17)), "timm_vit": [0],
    "timm_vit_mean": list(range(16)), "timm_deit": [0, 1], "torchvision_vit": [0], "bert": [0], "roberta": [0], "distilbert": [0],
    "electra": [0], "modernbert_mean": list(range(10)), "modernbert_cls": [0], "gpt2": [9], "llama": [9],
    "encoder_mean": list(range(10)), "encoder_first": [0], "encoder_sequence_first": list(range(10)),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_number_of_blocks(name: str) -> None:
    model, _ = build(name)
    assert len(find_blocks(model)) == 3


LAST_BLOCK = {
    "hf_swin": ("swin.encoder.layers.1.blocks.1", "layernorm_before"),
    "timm_swin": ("layers.1.blocks.1", "norm1"),
    "torchvision_swin": ("features.3.1", "norm1"),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_blocks_of_all_stages_are_found(name: str) -> None:
    """Two blocks in each of two stages, in order, and not the stages."""
    model, _ = build(name)
    blocks = find_blocks(model)
    assert len(blocks) == 4
    assert blocks[-1] is model.get_submodule(LAST_BLOCK[name][0])
    assert blocks == [m for m in model.modules() if type(m) is type(blocks[0])]


@pytest.mark.parametrize("name", WINDOWED)
def test_grad_cam_of_hierarchical_model_by_hand(name: str) -> None:
    """(Σ_k w_k F_k)⁺ at the first norm of the last block, by a hook and autograd."""
    model, x = build(name)
    outputs: list[Tensor] = []
    norm = model.get_submodule(".".join(LAST_BLOCK[name]))
    handle = norm.register_forward_hook(lambda m, a, out: outputs.append(out))
    out = model(x)
    logit = getattr(out, "logits", out)[:, 2]
    handle.remove()
    (gradient,) = torch.autograd.grad(logit.sum(), outputs[0])
    features, gradient = (t.detach().reshape(2, -1, t.shape[-1]) for t in (outputs[0], gradient))
    expected = torch.einsum("bnd,bd->bn", features, gradient.mean(1)).clamp(min=0)
    actual = whyformer.explain(model, x, method="gradcam", target=2)
    assert actual.grid == (8, 8)
    assert expected.max() > 0
    assert torch.allclose(actual.scores, expected, atol=1e-10)


def test_stages_are_distinguished_from_experts_and_heads() -> None:
    """Lists of experts or heads inside a block are no blocks, because the attention is outside of them."""

    class Attention(nn.Module):
        def __init__(self, heads: int = 0) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(heads)])
            self.query = nn.Linear(2, 2)

    class Block(nn.Module):
        def __init__(self, heads: int = 0, experts: int = 0) -> None:
            super().__init__()
            self.attn = Attention(heads)
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 20)) for _ in range(experts)])

    class Stage(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(depth)])
            self.merge = nn.Linear(2, 2)

    for options in ({"heads": 3}, {"experts": 4}, {"heads": 2, "experts": 2}):
        blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        assert find_blocks(nn.ModuleDict({"blocks": blocks})) == list(blocks)
    stages = nn.ModuleList([Stage(1), Stage(3)])
    assert find_blocks(nn.ModuleDict({"stages": stages})) == [*stages[0].blocks, *stages[1].blocks]
    convolutions = nn.Sequential(*[nn.Sequential(nn.Conv2d(2, 99, 3)) for _ in range(9)])
    hybrid = nn.ModuleDict({"stem": convolutions, "stages": stages})
    assert find_blocks(hybrid) == [*stages[0].blocks, *stages[1].blocks]


def test_model_without_blocks() -> None:
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_single_block_is_found() -> None:
    class SingleBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2)])

    assert len(find_blocks(SingleBlock())) == 1


@pytest.mark.parametrize("name", ZOO)
def test_readout_tokens(name: str) -> None:
    """By the gradient at the output of the last block: CLS, CLS and distillation token, last token, or all."""
    model, inputs = build(name)
    ready = open_model(model).prepare(inputs)
    task = ready.task(ready.resolver(1), "gae")
    row = task.walk(task.attended(), GRADIENT, lambda *_: None, range(3)).row
    assert torch.allclose(row.sum(-1), torch.ones(2, dtype=row.dtype))
    assert row[0].gt(1e-12).nonzero()[:, 0].tolist() == READOUT[name]
    if isinstance(inputs, dict):  # the second sample has seven tokens, and its readout excludes padding
        padded = inputs["attention_mask"][1] == 0
        assert row[1, padded].abs().max() < 1e-12


def test_first_non_finite_parameter() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert first_bad_parameter(model) is None
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")  # type: ignore[index,union-attr]
    assert first_bad_parameter(model) == "1.weight"


def test_carried_row_equals_product_of_matrices() -> None:
    """r Ā_L ⋯ Ā_1 without matrix products, in O(L N²)."""
    maps = [torch.rand(2, 5, 5, dtype=torch.float64) for _ in range(3)]
    row = torch.rand(2, 5, dtype=torch.float64)
    identity = torch.eye(5, dtype=torch.float64)
    for with_identity in (True, False):
        for normalised in (True, False):
            product: Tensor = identity.expand(2, 5, 5)
            for attention in maps:
                whole = attention + identity if with_identity else attention
                product = (whole / whole.sum(-1, keepdim=True) if normalised else whole) @ product
            expected = torch.einsum("bn,bnm->bm", row, product)
            key = frozenset({"x"})
            carried = Paths([{(key, key): fused} for fused in maps], {key: row}).roll_out(identity=with_identity, normalize_rows=normalised)
            assert torch.allclose(carried[key], expected)
