"""``checkpoint=True`` stores only the inputs of blocks and gives the same scores."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from snapshot import assert_unchanged, snapshot
from whyformer import targets
from whyformer.errors import MethodNotApplicable
from whyformer.methods import METHODS
from whyformer.tape.values import Tape
from zoo import build, rows, to

MODELS = ["llama", "gpt2", "bert", "hf_vit", "encoder_sequence_first"]
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("attnlrp", {"share": 0.0}), ("attnlrp", {"share": 0.8}), ("libragrad", {}), ("lrp_ah_ln", {"secant": True}), ("cp_lrp", {}),
    ("gim", {}), ("input_x_gradient", {"composite": "libra"}), ("lrp", {}), ("smoothgrad", {"samples": 2}),
]  # fmt: skip


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-10 * b.abs().max())


@pytest.mark.part
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("method", "settings"), RUNS, ids=str)
def test_checkpoint_gives_same_scores_and_leaves_model_unchanged(name: str, method: str, settings: dict[str, Any]) -> None:
    model, inputs = build(name)
    before = snapshot(model)
    checkpointed = whyformer.explain(model, inputs, method, target=[1, 3], checkpoint=True, **settings)
    assert_unchanged(model, before)
    expected = whyformer.explain(model, inputs, method, target=[1, 3], **settings)
    assert expected.scores.abs().max() > 0
    assert close(checkpointed.scores, expected.scores)
    assert checkpointed.diagnostics.keys() == expected.diagnostics.keys()
    assert checkpointed.settings == expected.settings


@pytest.mark.part
@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
@pytest.mark.parametrize(("method", "settings"), RUNS[:3], ids=str)
def test_batch_equals_single_runs(name: str, method: str, settings: dict[str, Any]) -> None:
    model, inputs = build(name)
    batch = whyformer.explain(model, inputs, method, target=[1, 3], checkpoint=True, **settings)
    for i, target in enumerate([1, 3]):
        single = whyformer.explain(model, rows(inputs, i), method, target=target, checkpoint=True, **settings)
        assert close(single.scores[0], batch.scores[i])


TAPED: list[tuple[str, dict[str, Any]]] = [("gim", {}), ("saliency", {}), ("attnlrp", {"share": 0.8}), ("libragrad", {})]


@pytest.mark.parametrize(("method", "settings"), TAPED, ids=str)
def test_checkpoint_halves_peak_memory_of_tape(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama")
    model.config.use_cache = False  # a recomputed layer would read the cache that it filled before
    model.config.num_hidden_layers = 12
    model.model.layers.extend([model.model.layers[i % 3] for i in range(9)])
    release, sizes = Tape.release, list[int]()

    def measured_release(tape: Tape, *args: Any) -> None:
        leaves = {tape[n].untyped_storage().data_ptr() for n in tape.leaves}
        tensors = [*tape._recomputed.values(), *(tape[n] for n in range(len(tape)) if tape.holds(n))]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        sizes.append(sum(size for address, size in memory.items() if address not in leaves))
        release(tape, *args)

    monkeypatch.setattr(Tape, "release", measured_release)
    peaks = []
    for checkpoint in (False, True):
        whyformer.explain(model, inputs, method, target=1, checkpoint=checkpoint, **settings)  # from here on its program is cached
        sizes.clear()
        whyformer.explain(model, inputs, method, target=1, checkpoint=checkpoint, **settings)
        peaks.append(max(sizes))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize(("share", "runs"), [(0.0, [1, 1, 1]), (0.5, [1, 1, 1])])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_number_of_block_runs_with_checkpoint(name: str, share: float, runs: list[int]) -> None:
    """Blocks run once; recomputation repeats recorded calls."""
    model, inputs = build(name)
    blocks = model.model.layers if name == "llama" else model.bert.encoder.layer
    expected = whyformer.explain(model, inputs, "attnlrp", target=1, share=share)
    whyformer.explain(model, inputs, "attnlrp", target=1, share=share, checkpoint=True)  # caches its program
    calls = [0] * len(blocks)
    for i, block in enumerate(blocks):
        forward = block.forward

        def counted(*args: Any, i: int = i, forward: Any = forward, **kwargs: Any) -> Any:
            calls[i] += 1
            return forward(*args, **kwargs)

        block.forward = counted
    result = whyformer.explain(model, inputs, "attnlrp", target=1, share=share, checkpoint=True)
    assert calls == runs
    assert close(result.scores, expected.scores)


class InPlaceOutput(nn.Module):
    """A model that changes the output of its last block in place."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(9, 8), nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), model

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mul_(2)[:, 0])


def test_block_output_changed_in_place_is_recomputed() -> None:
    """The derivative of tanh uses its output."""
    model, ids = InPlaceOutput(nn.Linear(8, 3)).double().eval(), torch.tensor([[1, 2, 3]])
    checkpointed = whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True)
    leaf = model.embedding(ids).detach().requires_grad_()
    x = leaf
    for block in model.blocks:
        x = block(x)
    (gradient,) = torch.autograd.grad(model.head(x[:, 0] * 2)[0, 1], leaf)
    assert close(checkpointed.scores, (leaf * gradient).sum(-1).detach())


def test_runs_are_freed_after_explanation(runs: list[weakref.ref[Any]]) -> None:
    whyformer.explain(*build("bert"), "attnlrp", checkpoint=True, share=0.5)
    gc.collect()
    assert runs
    assert [reference for reference in runs if reference() is not None] == []


def test_checkpoint_of_encoder_decoder() -> None:
    model, inputs = build("t5")
    if "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :3]}
    target = targets.Token(-1, 5)
    expected = whyformer.explain(model, inputs, "attnlrp", target)
    checkpointed = whyformer.explain(model, inputs, "attnlrp", target, checkpoint=True)
    assert close(checkpointed.scores, expected.scores)
    for name, part in expected.parts.items():
        assert close(checkpointed.parts[name].scores, part.scores)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama_lm"])
def test_checkpoint_of_generation_gives_same_matrix(name: str) -> None:
    model, _ = build(name)
    ids, answer = list(range(4, 12)), [7, 9, 5]
    generations = [whyformer.explain_generation(model, ids, answer, checkpoint=checkpoint) for checkpoint in (False, True)]
    assert close(generations[1].matrix, generations[0].matrix)
    assert close(whyformer.explain_span(generations[1], 0, 2, model, checkpoint=True).scores, whyformer.explain_span(generations[0], 0, 2, model).scores)


@pytest.mark.parametrize("method", ["rollout", "transformer_attribution", "occlusion", "gradcam"])
def test_method_that_reads_inner_values_of_blocks_refuses_checkpoint(method: str) -> None:
    model, inputs = build("hf_vit")
    with pytest.raises(MethodNotApplicable, match=r"checkpoint=True.* or use attnlrp"):
        whyformer.explain(model, inputs, method, checkpoint=True)


def test_methods_that_support_checkpoint() -> None:
    assert {"attnlrp", "cp_lrp", "libragrad", "lrp_ah_ln", "input_x_gradient", "gim"} <= {m.name for m in METHODS.values() if m.checkpoint}
    assert not METHODS["gae"].checkpoint
    model, inputs = build("hf_vit")
    diagnostics = whyformer.explain(model, inputs, "auto", checkpoint=True).diagnostics["auto"]
    assert METHODS[diagnostics["method"]].checkpoint
    assert all("checkpoint" in reason for reason in diagnostics["passed_over"].values())


class SharingBlock(nn.Module):
    """x + W x, with a list of values that blocks may share."""

    def __init__(self, number: int, kind: str, stored: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.number, self.kind, self.stored = nn.Linear(8, 8), number, kind, stored

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "shares" and self.number:
            y = y + self.stored[0]
        elif self.kind == "counts":
            y = y * (1 + len(self.stored))
        self.stored.append(y)
        return x + y


class SharingModel(nn.Module):
    """Blocks that pass values to later blocks, or to the head, besides their outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stored: list[Tensor] = []
        self.kind, self.words = kind, nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(SharingBlock(i, kind, self.stored) for i in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.stored.clear()
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head((x + self.stored[1] if self.kind == "reads" else x).mean(1))


@pytest.mark.parametrize("kind", ["shares", "counts", "reads"])
def test_checkpoint_of_blocks_with_side_effects(kind: str) -> None:
    model, ids = SharingModel(kind).double().eval(), {"input_ids": torch.randint(0, 20, (2, 5))}
    expected = whyformer.explain(model, ids, "input_x_gradient", 1).scores
    assert expected.abs().max() > 0
    assert close(whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True).scores, expected)


def test_new_cache_is_filled_once() -> None:
    model, _ = build("llama_lm")
    ids = {"input_ids": torch.randint(4, 40, (1, 6)), "use_cache": True}
    expected = whyformer.explain(model, ids, "attnlrp", 1)
    assert close(whyformer.explain(model, ids, "attnlrp", 1, checkpoint=True).scores, expected.scores)


def test_cache_from_user_is_filled_once() -> None:
    model, _ = build("llama_lm")
    ids = torch.randint(4, 40, (1, 6))
    results = []
    for checkpoint in (False, True):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        inputs = {"input_ids": ids, "past_key_values": cache}
        results.append(whyformer.explain(model, inputs, "attnlrp", targets.Token(-1, 5), checkpoint=checkpoint).scores)
    assert close(results[1], results[0])


def test_checkpoint_of_block_that_changes_its_input_in_place() -> None:
    class InPlaceBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            x += y
            return x

    model = SharingModel("")
    model.blocks = nn.ModuleList(InPlaceBlock() for _ in range(3))
    model, ids = model.double().eval(), {"input_ids": torch.randint(0, 20, (2, 5))}
    expected = whyformer.explain(model, ids, "input_x_gradient", 1)
    assert close(whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True).scores, expected.scores)


def test_user_hooks_on_and_inside_blocks_apply_with_checkpoint() -> None:
    model, inputs = build("llama")
    layers = model.model.layers
    layers[1].register_forward_hook(lambda module, args, output: output * 1.3)
    layers[1].mlp.register_forward_hook(lambda module, args, output: output * 0.7)
    layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
    expected = whyformer.explain(model, inputs, "attnlrp", 1, share=0.8)
    assert close(whyformer.explain(model, inputs, "attnlrp", 1, share=0.8, checkpoint=True).scores, expected.scores)


def test_concurrent_checkpointed_runs_equal_plain_runs() -> None:
    model, inputs = build("llama")
    methods = ["attnlrp", "libragrad", "attnlrp"]
    expected = {method: whyformer.explain(model, inputs, method, 1).scores for method in methods}

    def work(number: int) -> bool:
        results = [whyformer.explain(model, inputs, methods[number], 1, checkpoint=number < 2) for _ in range(3)]
        return all(close(e.scores, expected[methods[number]]) for e in results)

    before = snapshot(model)
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
def test_checkpoint_in_autocast_and_half_precision(name: str) -> None:
    model, inputs = build(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [whyformer.explain(model, inputs, "attnlrp", 1, share=0.0, checkpoint=checkpoint) for checkpoint in (False, True)]
    assert close(results[1].scores, results[0].scores)
    model, inputs = model.bfloat16(), to(inputs, torch.bfloat16)
    results = [whyformer.explain(model, inputs, "attnlrp", 1, share=0.0, checkpoint=checkpoint) for checkpoint in (False, True)]
    assert close(results[1].scores, results[0].scores)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
@pytest.mark.parametrize("method", ["attnlrp", "libragrad", "gim", "lrp"])
def test_checkpoint_on_gpu(method: str, name: str) -> None:
    model, inputs = build(name)
    gpu_model = model.cuda()
    gpu_inputs = {n: value.cuda() for n, value in inputs.items()} if isinstance(inputs, dict) else inputs.cuda()
    before = snapshot(gpu_model)
    result = whyformer.explain(gpu_model, gpu_inputs, method, target=[1, 3], checkpoint=True)
    assert_unchanged(gpu_model, before)
    expected = whyformer.explain(gpu_model, gpu_inputs, method, target=[1, 3])
    assert (result.scores - expected.scores).abs().max() <= 1e-8 * expected.scores.abs().max()
