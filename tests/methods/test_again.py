"""``checkpoint=True``: blocks keep nothing but what enters them, and the scores are the same."""

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
def test_scores_are_the_same_and_the_model_as_it_was(name: str, method: str, settings: dict[str, Any]) -> None:
    model, inputs = build(name)
    before = snapshot(model)
    again = whyformer.explain(model, inputs, method, target=[1, 3], checkpoint=True, **settings)
    assert_unchanged(model, before)
    wanted = whyformer.explain(model, inputs, method, target=[1, 3], **settings)
    assert wanted.scores.abs().max() > 0
    assert close(again.scores, wanted.scores)
    assert again.diagnostics.keys() == wanted.diagnostics.keys()
    assert again.settings == wanted.settings


@pytest.mark.part
@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
@pytest.mark.parametrize(("method", "settings"), RUNS[:3], ids=str)
def test_a_batch_equals_single_runs(name: str, method: str, settings: dict[str, Any]) -> None:
    model, inputs = build(name)
    found = whyformer.explain(model, inputs, method, target=[1, 3], checkpoint=True, **settings)
    for i, target in enumerate([1, 3]):
        one = whyformer.explain(model, rows(inputs, i), method, target=target, checkpoint=True, **settings)
        assert close(one.scores[0], found.scores[i])


TAPED: list[tuple[str, dict[str, Any]]] = [("gim", {}), ("saliency", {}), ("attnlrp", {"share": 0.8}), ("libragrad", {})]


@pytest.mark.parametrize(("method", "settings"), TAPED, ids=str)
def test_a_tape_has_the_values_of_one_block_at_a_time(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama")
    model.config.use_cache = False  # a layer that runs again would read what it wrote before
    model.config.num_hidden_layers = 12
    model.model.layers.extend([model.model.layers[i % 3] for i in range(9)])
    release, sizes = Tape.release, list[int]()

    def noted(tape: Tape, *args: Any) -> None:
        given = {tape[n].untyped_storage().data_ptr() for n in tape.leaves}
        there = [*tape._recomputed.values(), *(tape[n] for n in range(len(tape)) if tape.holds(n))]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}
        sizes.append(sum(size for place, size in memory.items() if place not in given))
        release(tape, *args)

    monkeypatch.setattr(Tape, "release", noted)
    most = []
    for checkpoint in (False, True):
        whyformer.explain(model, inputs, method, target=1, checkpoint=checkpoint, **settings)  # its program is known from here on
        sizes.clear()
        whyformer.explain(model, inputs, method, target=1, checkpoint=checkpoint, **settings)
        most.append(max(sizes))
    assert most[1] < 0.5 * most[0]


@pytest.mark.parametrize(("share", "runs"), [(0.0, [1, 1, 1]), (0.5, [1, 1, 1])])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_how_often_blocks_run(name: str, share: float, runs: list[int]) -> None:
    """A tape repeats their calls, a graph runs them again; that of the last is there still when something flows
    back to it."""
    model, inputs = build(name)
    blocks = model.model.layers if name == "llama" else model.bert.encoder.layer
    wanted = whyformer.explain(model, inputs, "attnlrp", target=1, share=share)
    whyformer.explain(model, inputs, "attnlrp", target=1, share=share, checkpoint=True)  # its program is known then
    seen = [0] * len(blocks)
    for i, block in enumerate(blocks):
        own = block.forward

        def counted(*args: Any, i: int = i, own: Any = own, **kwargs: Any) -> Any:
            seen[i] += 1
            return own(*args, **kwargs)

        block.forward = counted
    found = whyformer.explain(model, inputs, "attnlrp", target=1, share=share, checkpoint=True)
    assert seen == runs
    assert close(found.scores, wanted.scores)


class Grown(nn.Module):
    """A model that changes its last block's output in place."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(9, 8), nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), model

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mul_(2)[:, 0])


def test_an_output_that_is_changed_in_place_is_made_anew() -> None:
    """tanh needs its output on the way back."""
    model, ids = Grown(nn.Linear(8, 3)).double().eval(), torch.tensor([[1, 2, 3]])
    again = whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True)
    leaf = model.embedding(ids).detach().requires_grad_()
    x = leaf
    for block in model.blocks:
        x = block(x)
    (flow,) = torch.autograd.grad(model.head(x[:, 0] * 2)[0, 1], leaf)
    assert close(again.scores, (leaf * flow).sum(-1).detach())


def test_nothing_stays_behind(runs: list[weakref.ref[Any]]) -> None:
    whyformer.explain(*build("bert"), "attnlrp", checkpoint=True, share=0.5)
    gc.collect()
    assert runs
    assert [one for one in runs if one() is not None] == []


def test_an_encoder_and_its_decoder_are_run_again_too() -> None:
    model, inputs = build("t5")
    if "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :3]}
    target = targets.Token(-1, 5)
    wanted = whyformer.explain(model, inputs, "attnlrp", target)
    again = whyformer.explain(model, inputs, "attnlrp", target, checkpoint=True)
    assert close(again.scores, wanted.scores)
    for name, part in wanted.parts.items():
        assert close(again.parts[name].scores, part.scores)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama_lm"])
def test_each_token_of_an_answer(name: str) -> None:
    model, _ = build(name)
    ids, answer = list(range(4, 12)), [7, 9, 5]
    found = [whyformer.explain_generation(model, ids, answer, checkpoint=again) for again in (False, True)]
    assert close(found[1].matrix, found[0].matrix)
    assert close(whyformer.explain_span(found[1], 0, 2, model, checkpoint=True).scores, whyformer.explain_span(found[0], 0, 2, model).scores)


@pytest.mark.parametrize("method", ["rollout", "transformer_attribution", "occlusion", "gradcam"])
def test_a_method_that_looks_inside_of_blocks_is_refused(method: str) -> None:
    model, inputs = build("hf_vit")
    with pytest.raises(MethodNotApplicable, match=r"checkpoint=True.* or use attnlrp"):
        whyformer.explain(model, inputs, method, checkpoint=True)


def test_methods_that_may_be_run_again_say_so() -> None:
    assert {"attnlrp", "cp_lrp", "libragrad", "lrp_ah_ln", "input_x_gradient", "gim"} <= {m.name for m in METHODS.values() if m.checkpoint}
    assert not METHODS["gae"].checkpoint
    model, inputs = build("hf_vit")
    found = whyformer.explain(model, inputs, "auto", checkpoint=True).diagnostics["auto"]
    assert METHODS[found["method"]].checkpoint
    assert all("checkpoint" in said for said in found["passed_over"].values())


class Block(nn.Module):
    """x + W x, which may keep what it saw."""

    def __init__(self, number: int, kind: str, kept: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.number, self.kind, self.kept = nn.Linear(8, 8), number, kind, kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "shares" and self.number:
            y = y + self.kept[0]
        elif self.kind == "counts":
            y = y * (1 + len(self.kept))
        self.kept.append(y)
        return x + y


class Odd(nn.Module):
    """Blocks that hand more to one another, or to the head, than their outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.kind, self.words = kind, nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block(i, kind, self.kept) for i in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.kept.clear()
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head((x + self.kept[1] if self.kind == "reads" else x).mean(1))


@pytest.mark.parametrize("kind", ["shares", "counts", "reads"])
def test_blocks_that_could_not_run_twice_do_not_have_to(kind: str) -> None:
    model, ids = Odd(kind).double().eval(), {"input_ids": torch.randint(0, 20, (2, 5))}
    wanted = whyformer.explain(model, ids, "input_x_gradient", 1).scores
    assert wanted.abs().max() > 0
    assert close(whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True).scores, wanted)


def test_a_cache_that_the_model_begins_is_not_filled_twice() -> None:
    model, _ = build("llama_lm")
    ids = {"input_ids": torch.randint(4, 40, (1, 6)), "use_cache": True}
    wanted = whyformer.explain(model, ids, "attnlrp", 1)
    assert close(whyformer.explain(model, ids, "attnlrp", 1, checkpoint=True).scores, wanted.scores)


def test_nor_is_one_that_is_given() -> None:
    model, _ = build("llama_lm")
    ids = torch.randint(4, 40, (1, 6))
    found = []
    for again in (False, True):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        given = {"input_ids": ids, "past_key_values": cache}
        found.append(whyformer.explain(model, given, "attnlrp", targets.Token(-1, 5), checkpoint=again).scores)
    assert close(found[1], found[0])


def test_a_block_that_changes_its_input_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            x += y
            return x

    model = Odd("")
    model.blocks = nn.ModuleList(InPlace() for _ in range(3))
    model, ids = model.double().eval(), {"input_ids": torch.randint(0, 20, (2, 5))}
    wanted = whyformer.explain(model, ids, "input_x_gradient", 1)
    assert close(whyformer.explain(model, ids, "input_x_gradient", 1, checkpoint=True).scores, wanted.scores)


def test_users_hooks_on_blocks_and_inside_of_them() -> None:
    model, inputs = build("llama")
    layers = model.model.layers
    layers[1].register_forward_hook(lambda module, args, output: output * 1.3)
    layers[1].mlp.register_forward_hook(lambda module, args, output: output * 0.7)
    layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
    wanted = whyformer.explain(model, inputs, "attnlrp", 1, share=0.8)
    assert close(whyformer.explain(model, inputs, "attnlrp", 1, share=0.8, checkpoint=True).scores, wanted.scores)


def test_two_threads_at_once_do_not_disturb_each_other() -> None:
    model, inputs = build("llama")
    methods = ["attnlrp", "libragrad", "attnlrp"]
    wanted = {method: whyformer.explain(model, inputs, method, 1).scores for method in methods}

    def work(number: int) -> bool:
        found = [whyformer.explain(model, inputs, methods[number], 1, checkpoint=number < 2) for _ in range(3)]
        return all(close(e.scores, wanted[methods[number]]) for e in found)

    before = snapshot(model)
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
def test_autocast_and_half_precision(name: str) -> None:
    model, inputs = build(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [whyformer.explain(model, inputs, "attnlrp", 1, share=0.0, checkpoint=again) for again in (False, True)]
    assert close(found[1].scores, found[0].scores)
    model, inputs = model.bfloat16(), to(inputs, torch.bfloat16)
    found = [whyformer.explain(model, inputs, "attnlrp", 1, share=0.0, checkpoint=again) for again in (False, True)]
    assert close(found[1].scores, found[0].scores)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("name", ["llama", "bert", "hf_vit"])
@pytest.mark.parametrize("method", ["attnlrp", "libragrad", "gim", "lrp"])
def test_in_the_thread_in_which_autograd_works_for_a_gpu(method: str, name: str) -> None:
    model, inputs = build(name)
    there = model.cuda()
    given = {n: value.cuda() for n, value in inputs.items()} if isinstance(inputs, dict) else inputs.cuda()
    before = snapshot(there)
    found = whyformer.explain(there, given, method, target=[1, 3], checkpoint=True)
    assert_unchanged(there, before)
    wanted = whyformer.explain(there, given, method, target=[1, 3])
    assert (found.scores - wanted.scores).abs().max() <= 1e-8 * wanted.scores.abs().max()
