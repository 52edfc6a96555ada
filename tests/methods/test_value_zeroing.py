"""Value zeroing against a slow loop that never recomputes a block by itself: one whole pass for each block and token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, MethodNotApplicable

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


def test_cost_is_one_pass_and_each_block_once_a_token() -> None:
    model, inputs = zoo.build("hf_vit")
    rows = {"blocks": 0, "model": 0}

    def count(name: str) -> Callable[..., None]:
        return lambda m, args: rows.__setitem__(name, rows[name] + args[0].shape[0])

    hooks = [b.register_forward_pre_hook(count("blocks")) for b in model.vit.layers]
    hooks.append(model.classifier.register_forward_pre_hook(count("model")))
    before = snapshot(model)
    result = whyformer.explain(model, inputs, "value_zeroing")
    assert_unchanged(model, before)
    assert rows == {"blocks": 2 * BLOCKS * (1 + 17), "model": 2}
    assert result.diagnostics["block_passes"] == BLOCKS * 17
    for hook in hooks:
        hook.remove()


def test_tokens_before_batch_give_the_same() -> None:
    """The same weights with ``[B, N, D]`` and with ``[N, B, D]`` inside."""
    first, inputs = zoo.encoder(batch_first=True)
    second, _ = zoo.encoder(batch_first=False)
    second.load_state_dict(first.state_dict())
    maps = [whyformer.explain(m.double(), inputs, "value_zeroing").scores for m in (first, second)]
    assert torch.allclose(*maps, atol=1e-12)


def test_cosine_keeps_its_digits_near_zero() -> None:
    """In float32 1 − cos of two vectors 1e-5 apart would be rounding alone."""
    from whyformer.methods.value_zeroing import _distance

    v = torch.randn(1, 1, 64)
    u = v + 1e-5 * torch.randn(1, 1, 64)
    exact = 1 - torch.nn.functional.cosine_similarity(u.double(), v.double(), dim=-1)
    assert torch.allclose(_distance(u, v, "cosine").double(), exact, rtol=0.05)


def test_cross_attention_is_refused() -> None:
    from transformers import T5Config, T5ForSequenceClassification

    config = T5Config(
        vocab_size=50, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, num_labels=3, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.tensor([[5, 6, 7, 1], [8, 9, 4, 1]])
    with pytest.raises(MethodNotApplicable, match="value_zeroing has no meaning"):
        whyformer.explain(T5ForSequenceClassification(config).eval(), {"input_ids": ids}, "value_zeroing")


def test_head_choices_are_refused() -> None:
    model, inputs = zoo.build("bert")
    with pytest.raises(InputError, match="all heads at once"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"heads": 0})
    with pytest.raises(InputError, match=r"3 blocks \(0 to 2\)"):
        whyformer.explain(model, inputs, "value_zeroing", aggregation={"layers": [0, 5]})
