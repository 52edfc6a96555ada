"""Value zeroing against a slow reference with one full forward pass for each block and token."""

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

# model -> (path of block b, path of the layer that computes its values, the output's size divided by that of the values)
PATHS: dict[str, tuple[str, str, int]] = {
    "bert": ("bert.encoder.layer.{}", "bert.encoder.layer.{}.attention.self.value", 1),
    "hf_vit": ("vit.layers.{}", "vit.layers.{}.attention.v_proj", 1),
    "distilbert": ("distilbert.transformer.layer.{}", "distilbert.transformer.layer.{}.attention.v_lin", 1),
    "llama": ("model.layers.{}", "model.layers.{}.self_attn.v_proj", 1),
    "gpt2": ("transformer.h.{}", "transformer.h.{}.attn.c_attn", 3),
    "timm_vit": ("blocks.{}", "blocks.{}.attn.qkv", 3),
}
BLOCKS = 3


def block_output(model: nn.Module, inputs: Any, block: str, edit: Callable[[Tensor], Tensor] | None, layer: str) -> Tensor:
    """Output ``[B, N, D]`` of one block in a full pass in which ``edit`` changes the output of ``layer``."""
    block_outputs = []
    hooks = [
        model.get_submodule(block).register_forward_hook(
            lambda m, a, o: block_outputs.append(o if isinstance(o, Tensor) else o[0])
        )
    ]
    if edit is not None:
        hooks.append(model.get_submodule(layer).register_forward_hook(lambda m, a, o: edit(o)))
    try:
        zoo.call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return block_outputs[0]


def reference_map(model: nn.Module, inputs: Any, name: str, block: int, distance: str) -> Tensor:
    """``[B, N, N]`` S_b, row by row and token by token, as in methods.md §3.6."""
    path, layer, parts = (p.format(block) if isinstance(p, str) else p for p in PATHS[name])
    plain = block_output(model, inputs, path, None, layer)
    batch, n, _ = plain.shape
    scores = torch.zeros(batch, n, n, dtype=plain.dtype)
    for t in range(n):

        def zero(values: Tensor, t: int = t) -> Tensor:
            values = values.clone()
            values[:, t, -(values.shape[-1] // parts) :] = 0
            return values

        changed = block_output(model, inputs, path, zero, layer)
        for b in range(batch):
            for i in range(n):
                u, v = changed[b, i], plain[b, i]
                scores[b, i, t] = {
                    "cosine": lambda u=u, v=v: 1 - u @ v / (u.norm() * v.norm()),
                    "euclidean": lambda u=u, v=v: (u - v).norm(),
                    "dot": lambda u=u, v=v: (v @ v - u @ v).abs(),
                }[distance]()
    mask = inputs["attention_mask"].bool() if isinstance(inputs, dict) else torch.ones(batch, n, dtype=torch.bool)
    scores = scores.clamp(min=0) * mask[:, None]
    return scores / scores.sum(-1, keepdim=True)


def readout(name: str, inputs: Any, n: int) -> Tensor:
    row = torch.zeros(2, n, dtype=torch.float64)
    for b, length in enumerate(inputs["attention_mask"].sum(1).tolist() if isinstance(inputs, dict) else (1, 1)):
        row[b, length - 1 if name in ("gpt2", "llama") else 0] = 1
    return row


@pytest.mark.parametrize("name", PATHS)
def test_value_zeroing_equals_reference(name: str) -> None:
    model, inputs = zoo.build(name)
    maps = [reference_map(model, inputs, name, b, "cosine") for b in range(BLOCKS)]
    row = readout(name, inputs, maps[0].shape[-1])
    product = torch.einsum("bi,bij,bjk,bkl->bl", row, maps[2], maps[1], maps[0])
    prefix = product.shape[1] - 16 if "vit" in name else 0
    result = whyformer.explain(model, inputs, "value_zeroing").scores
    assert (result - product[:, prefix:]).abs().max() <= 1e-6 * product.max()
    for b in range(BLOCKS):
        result = whyformer.explain(model, inputs, "value_zeroing", block=b - BLOCKS).scores
        expected = torch.einsum("bi,bij->bj", row, maps[b])[:, prefix:]
        assert (result - expected).abs().max() <= 1e-6 * expected.max()


@pytest.mark.parametrize("distance", ["euclidean", "dot"])
def test_distances_equal_reference(distance: str) -> None:
    model, inputs = zoo.build("bert")
    expected = reference_map(model, inputs, "bert", 1, distance)[:, 0]
    result = whyformer.explain(model, inputs, "value_zeroing", block=1, distance=distance).scores
    assert (result - expected).abs().max() <= 1e-9 * expected.max()


def test_rows_sum_to_one() -> None:
    """So products and means of rows sum to 1 over all tokens; without a tokenizer no token is special."""
    model, inputs = zoo.build("bert")
    choices: list[dict[str, Any]] = [{}, {"block": 0}, {"block": 2, "aggregation": {"rows": "column_mean"}}]
    for settings in [*choices, {"aggregation": {"layers": [0, 2]}}]:
        sums = whyformer.explain(model, inputs, "value_zeroing", **settings).scores.sum(1)
        assert torch.allclose(sums, torch.ones(2, dtype=sums.dtype), atol=1e-12)


def test_aggregation_combines_maps_of_all_blocks() -> None:
    model, inputs = zoo.build("hf_vit")
    maps = [reference_map(model, inputs, "hf_vit", b, "cosine") for b in range(BLOCKS)]
    mean = whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": "mean"}).scores
    assert torch.allclose(mean, sum(maps)[:, 0, 1:] / BLOCKS, atol=1e-9)
    column = whyformer.explain(model, inputs, "value_zeroing", block=1, aggregation={"rows": "column_max"}).scores
    assert torch.allclose(column, maps[1].amax(1)[:, 1:], atol=1e-9)
    identity = torch.eye(17, dtype=torch.float64)
    expected_rollout = identity
    for map_ in maps:
        expected_rollout = (identity + map_) / 2 @ expected_rollout
    rollout = whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": "rollout"}).scores
    assert torch.allclose(rollout, expected_rollout[:, 0, 1:], atol=1e-9)


def test_batch_size_does_not_change_scores() -> None:
    model, inputs = zoo.build("bert")
    single, batched = (whyformer.explain(model, inputs, "value_zeroing", batch_size=k).scores for k in (1, 999))
    assert torch.allclose(single, batched, atol=1e-12)


class RowCounter(TorchDispatchMode):
    """Counts the rows in matrix products with some weights, below vmap, where the actual computation is visible."""

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


# model -> (weight of a block that computes its values, a weight after its attention)
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
def test_operations_before_attention_are_computed_once(name: str) -> None:
    """Only in the plain pass; the operations after attention run again for each token."""
    model, inputs = zoo.build(name)
    parameters = dict(model.named_parameters())
    before = snapshot(model)
    whyformer.explain(model, inputs, "raw_attention")  # the first pass records the structure
    with RowCounter(values=parameters[WEIGHTS[name][0]], after=parameters[WEIGHTS[name][1]]) as counter:
        result = whyformer.explain(model, inputs, "value_zeroing", batch_size=999)
    assert_unchanged(model, before)
    tokens = result.diagnostics["block_passes"] // BLOCKS
    assert tokens == (zoo.TOKENS if isinstance(inputs, dict) else 17)
    assert counter.rows == {"values": 2 * tokens, "after": 2 * tokens * (1 + tokens)}


class VmapTestBlock(nn.Module):
    """A pre-norm block in equivalent implementations, some of which vmap cannot run."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.implementation, self.first, self.second = implementation, nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out, self.mlp = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.implementation == "in place":
            x += self.out(mixed)
            x += self.mlp(self.second(x)).tanh()
            return x
        if self.implementation == "asks for a value" and mixed.isnan().any().item():
            mixed = mixed.nan_to_num()
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x)).tanh()


class VmapTestModel(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(zoo.VOCABULARY, 12)
        self.blocks = nn.ModuleList(VmapTestBlock(implementation) for _ in range(BLOCKS))
        self.head = nn.Linear(12, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("implementation", ["in place", "asks for a value"])
def test_blocks_that_vmap_cannot_run_have_same_scores(implementation: str) -> None:
    ids = {"input_ids": zoo.text()["input_ids"]}
    plain, variant = (VmapTestModel(m).double().eval() for m in ("", implementation))
    calls = []
    variant.blocks[0].register_forward_hook(lambda m, a, o: calls.append(o.shape))
    maps = [whyformer.explain(m, ids, "value_zeroing").scores for m in (plain, variant)]
    assert (len(calls) > zoo.TOKENS) == (implementation == "asks for a value")  # the block runs again only if its control flow depends on values
    assert torch.allclose(*maps, atol=1e-12)


def test_token_first_model_has_same_scores() -> None:
    """The same weights with hidden states ``[B, N, D]`` and ``[N, B, D]``."""
    first, inputs = zoo.encoder(batch_first=True)
    second, _ = zoo.encoder(batch_first=False)
    second.load_state_dict(first.state_dict())
    maps = [whyformer.explain(m.double(), inputs, "value_zeroing").scores for m in (first, second)]
    assert torch.allclose(*maps, atol=1e-12)


def test_cosine_distance_is_accurate_near_zero() -> None:
    """In float32, a naive 1 − cos of two vectors at distance 1e-5 would be only rounding error."""
    from whyformer.methods.vectors.value_zeroing import _distance

    v = torch.randn(1, 1, 64)
    u = v + 1e-5 * torch.randn(1, 1, 64)
    exact = 1 - torch.nn.functional.cosine_similarity(u.double(), v.double(), dim=-1)
    assert torch.allclose(_distance(u, v, "cosine").double(), exact, rtol=0.05)


def test_invalid_heads_and_layers_raise() -> None:
    model, inputs = zoo.build("bert")
    with pytest.raises(InputError, match="omit heads in aggregation"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"heads": 0})
    with pytest.raises(InputError, match=r"3 blocks \(0 to 2\)"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": [0, 5]})
