"""Value zeroing against a slow loop that never recomputes a block by itself: one whole pass for each block and token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whyformer
import zoo
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError

# model -> (path of block b, path of the layer that makes its values, share of that layer's output that is values)
PLACES: dict[str, tuple[str, str, int]] = {
    "bert": ("bert.encoder.layer.{}", "bert.encoder.layer.{}.attention.self.value", 1),
    "hf_vit": ("vit.layers.{}", "vit.layers.{}.attention.v_proj", 1),
    "distilbert": ("distilbert.transformer.layer.{}", "distilbert.transformer.layer.{}.attention.v_lin", 1),
    "llama": ("model.layers.{}", "model.layers.{}.self_attn.v_proj", 1),
    "gpt2": ("transformer.h.{}", "transformer.h.{}.attn.c_attn", 3),
    "timm_vit": ("blocks.{}", "blocks.{}.attn.qkv", 3),
}
BLOCKS = 3


def outputs(model: nn.Module, inputs: Any, block: str, edit: Callable[[Tensor], Tensor] | None, layer: str) -> Tensor:
    """``[B, N, D]`` output of one block in a whole pass, the output of ``layer`` edited on the way."""
    kept = []
    hooks = [
        model.get_submodule(block).register_forward_hook(
            lambda m, a, o: kept.append(o if isinstance(o, Tensor) else o[0])
        )
    ]
    if edit is not None:
        hooks.append(model.get_submodule(layer).register_forward_hook(lambda m, a, o: edit(o)))
    try:
        zoo.call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return kept[0]


def slow_map(model: nn.Module, inputs: Any, name: str, block: int, distance: str) -> Tensor:
    """``[B, N, N]`` S_b, row by row and token by token as methods.md §3.6 says."""
    at, layer, share = (p.format(block) if isinstance(p, str) else p for p in PLACES[name])
    plain = outputs(model, inputs, at, None, layer)
    batch, n, _ = plain.shape
    found = torch.zeros(batch, n, n, dtype=plain.dtype)
    for t in range(n):

        def zero(values: Tensor, t: int = t) -> Tensor:
            values = values.clone()
            values[:, t, -(values.shape[-1] // share) :] = 0
            return values

        changed = outputs(model, inputs, at, zero, layer)
        for b in range(batch):
            for i in range(n):
                u, v = changed[b, i], plain[b, i]
                found[b, i, t] = {
                    "cosine": lambda u=u, v=v: 1 - u @ v / (u.norm() * v.norm()),
                    "euclidean": lambda u=u, v=v: (u - v).norm(),
                    "dot": lambda u=u, v=v: (v @ v - u @ v).abs(),
                }[distance]()
    mask = inputs["attention_mask"].bool() if isinstance(inputs, dict) else torch.ones(batch, n, dtype=torch.bool)
    found = found.clamp(min=0) * mask[:, None]
    return found / found.sum(-1, keepdim=True)


def readout(name: str, inputs: Any, n: int) -> Tensor:
    row = torch.zeros(2, n, dtype=torch.float64)
    for b, length in enumerate(inputs["attention_mask"].sum(1).tolist() if isinstance(inputs, dict) else (1, 1)):
        row[b, length - 1 if name in ("gpt2", "llama") else 0] = 1
    return row


@pytest.mark.parametrize("name", PLACES)
def test_equal_to_a_slow_loop(name: str) -> None:
    model, inputs = zoo.build(name)
    maps = [slow_map(model, inputs, name, b, "cosine") for b in range(BLOCKS)]
    row = readout(name, inputs, maps[0].shape[-1])
    product = torch.einsum("bi,bij,bjk,bkl->bl", row, maps[2], maps[1], maps[0])
    prefix = product.shape[1] - 16 if "vit" in name else 0
    found = whyformer.explain(model, inputs, "value_zeroing").scores
    assert (found - product[:, prefix:]).abs().max() <= 1e-6 * product.max()
    for b in range(BLOCKS):
        found = whyformer.explain(model, inputs, "value_zeroing", block=b - BLOCKS).scores
        wanted = torch.einsum("bi,bij->bj", row, maps[b])[:, prefix:]
        assert (found - wanted).abs().max() <= 1e-6 * wanted.max()


@pytest.mark.parametrize("distance", ["euclidean", "dot"])
def test_other_distances(distance: str) -> None:
    model, inputs = zoo.build("bert")
    wanted = slow_map(model, inputs, "bert", 1, distance)[:, 0]
    found = whyformer.explain(model, inputs, "value_zeroing", block=1, distance=distance).scores
    assert (found - wanted).abs().max() <= 1e-9 * wanted.max()


def test_rows_sum_to_one() -> None:
    """So the readout row of any product, and any mean of rows, sums to 1 over all tokens (no special ones known here)."""
    model, inputs = zoo.build("bert")
    choices: list[dict[str, Any]] = [{}, {"block": 0}, {"block": 2, "aggregation": {"rows": "column_mean"}}]
    for settings in [*choices, {"aggregation": {"layers": [0, 2]}}]:
        sums = whyformer.explain(model, inputs, "value_zeroing", **settings).scores.sum(1)
        assert torch.allclose(sums, torch.ones(2, dtype=sums.dtype), atol=1e-12)


def test_aggregation_is_over_the_maps_of_all_blocks() -> None:
    model, inputs = zoo.build("hf_vit")
    maps = [slow_map(model, inputs, "hf_vit", b, "cosine") for b in range(BLOCKS)]
    mean = whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": "mean"}).scores
    assert torch.allclose(mean, sum(maps)[:, 0, 1:] / BLOCKS, atol=1e-9)
    column = whyformer.explain(model, inputs, "value_zeroing", block=1, aggregation={"rows": "column_max"}).scores
    assert torch.allclose(column, maps[1].amax(1)[:, 1:], atol=1e-9)
    identity = torch.eye(17, dtype=torch.float64)
    rolled = identity
    for one in maps:
        rolled = (identity + one) / 2 @ rolled
    rollout = whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": "rollout"}).scores
    assert torch.allclose(rollout, rolled[:, 0, 1:], atol=1e-9)


def test_batch_size_changes_nothing() -> None:
    model, inputs = zoo.build("bert")
    one, many = (whyformer.explain(model, inputs, "value_zeroing", batch_size=k).scores for k in (1, 999))
    assert torch.allclose(one, many, atol=1e-12)


class Rows(TorchDispatchMode):
    """Rows that went through the products with each of some weights, below vmap: what is really computed."""

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        self.rows = dict.fromkeys(weights, 0)
        self.names = {w.untyped_storage().data_ptr(): name for name, w in weights.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            *_, x, weight = args
            name = self.names.get(weight.untyped_storage().data_ptr())
            if name is not None:
                self.rows[name] += x.numel() // x.shape[-1]
        return func(*args, **(kwargs or {}))


# model -> (weight of a block that makes its values, a weight behind its attention)
WEIGHTS = {
    "bert": ("bert.encoder.layer.1.attention.self.value.weight", "bert.encoder.layer.1.output.dense.weight"),
    "hf_vit": ("vit.layers.1.attention.v_proj.weight", "vit.layers.1.mlp.fc2.weight"),
    "gpt2": ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight"),
    "llama": ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    "timm_vit": ("blocks.1.attn.qkv.weight", "blocks.1.mlp.fc2.weight"),
    "torchvision_vit": (
        "encoder.layers.encoder_layer_1.self_attention.in_proj_weight",
        "encoder.layers.encoder_layer_1.mlp.3.weight",
    ),
    "encoder_sequence_first": ("encoder.layers.1.self_attn.in_proj_weight", "encoder.layers.1.linear2.weight"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_comes_before_the_attention_is_computed_once(name: str) -> None:
    """Once, in the plain pass; what follows, once for each token too."""
    model, inputs = zoo.build(name)
    parameters = dict(model.named_parameters())
    before = snapshot(model)
    whyformer.explain(model, inputs, "raw_attention")  # the structure is read off the first pass of all
    with Rows(values=parameters[WEIGHTS[name][0]], behind=parameters[WEIGHTS[name][1]]) as counted:
        result = whyformer.explain(model, inputs, "value_zeroing", batch_size=999)
    assert_unchanged(model, before)
    tokens = result.diagnostics["block_passes"] // BLOCKS
    assert tokens == (zoo.TOKENS if isinstance(inputs, dict) else 17)
    assert counted.rows == {"values": 2 * tokens, "behind": 2 * tokens * (1 + tokens)}


class Block(nn.Module):
    """A pre-norm block, written in ways that give the same and that vmap may not run."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner, self.first, self.second = manner, nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out, self.mlp = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.manner == "in place":
            x += self.out(mixed)
            x += self.mlp(self.second(x)).tanh()
            return x
        if self.manner == "asks for a value" and mixed.isnan().any().item():
            mixed = mixed.nan_to_num()
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x)).tanh()


class Written(nn.Module):
    def __init__(self, manner: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(zoo.VOCABULARY, 12)
        self.blocks = nn.ModuleList(Block(manner) for _ in range(BLOCKS))
        self.head = nn.Linear(12, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("manner", ["in place", "asks for a value"])
def test_blocks_that_vmap_cannot_run(manner: str) -> None:
    ids = {"input_ids": zoo.text()["input_ids"]}
    usual, other = (Written(m).double().eval() for m in ("", manner))
    calls = []
    other.blocks[0].register_forward_hook(lambda m, a, o: calls.append(o.shape))
    maps = [whyformer.explain(m, ids, "value_zeroing").scores for m in (usual, other)]
    assert (len(calls) > zoo.TOKENS) == (manner == "asks for a value")  # only where the model may decide otherwise it runs again
    assert torch.allclose(*maps, atol=1e-12)


def test_tokens_before_batch_give_the_same() -> None:
    """The same weights with ``[B, N, D]`` and with ``[N, B, D]`` inside."""
    first, inputs = zoo.encoder(batch_first=True)
    second, _ = zoo.encoder(batch_first=False)
    second.load_state_dict(first.state_dict())
    maps = [whyformer.explain(m.double(), inputs, "value_zeroing").scores for m in (first, second)]
    assert torch.allclose(*maps, atol=1e-12)


def test_cosine_keeps_its_digits_near_zero() -> None:
    """In float32 1 − cos of two vectors 1e-5 apart would be rounding alone."""
    from whyformer.methods.vectors.value_zeroing import _distance

    v = torch.randn(1, 1, 64)
    u = v + 1e-5 * torch.randn(1, 1, 64)
    exact = 1 - torch.nn.functional.cosine_similarity(u.double(), v.double(), dim=-1)
    assert torch.allclose(_distance(u, v, "cosine").double(), exact, rtol=0.05)


def test_head_choices_are_refused() -> None:
    model, inputs = zoo.build("bert")
    with pytest.raises(InputError, match="omit heads in aggregation"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"heads": 0})
    with pytest.raises(InputError, match=r"3 blocks \(0 to 2\)"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": [0, 5]})
