"""``whyformer.record``: relevance and interventions at any value inside a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from architectures import listed
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, ModelError
from whyformer.recording import Record, record
from whyformer.rules.multipliers import COMPOSITES
from whyformer.targets import Contrast, Similarity, Token
from zoo import LANGUAGE, WINDOWED, ZOO, to


def built(name: str) -> tuple[nn.Module, Any]:
    model, inputs = {**ZOO, **WINDOWED, **LANGUAGE}[name]()
    return model.double(), to(inputs, torch.float64)


def gradient_by_autograd(model: nn.Module, inputs: Any, path: str, column: int) -> Tensor:
    """∂ Σ logits[:, column] / ∂ output of a module, by a hook and autograd."""
    outputs: list[Tensor] = []
    module = dict(model.named_modules())[path]
    handle = module.register_forward_hook(lambda m, args, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
    try:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    finally:
        handle.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    return torch.autograd.grad(logits[:, column].sum(), outputs[0])[0]


@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "bert", "gpt2", "llama", "electra", "hf_swin"])
def test_gradient_at_module_output_equals_autograd(name: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    paths = [p for p in r.modules if p and r.runs(p)[0].tensor.dim() == 3 and len(r.runs(p)) == 1]
    chosen = paths[:: max(1, len(paths) // 4)]
    flows = r.walk_back([r[p] for p in chosen], target=1)
    for path in chosen:
        expected = gradient_by_autograd(model, inputs, path, 1)
        assert torch.allclose(flows[r[path]], expected, atol=1e-12), path


@pytest.mark.parametrize("composite", [c for c in COMPOSITES if c in ("attnlrp", "ah_ln", "libra", "cp_lrp", "gim")])
@pytest.mark.parametrize("name", ["hf_vit", "timm_vit"])
def test_relevance_of_input_equals_the_method_of_the_composite(name: str, composite: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    (pixels,) = r.roots
    method, settings = {"ah_ln": ("lrp_ah_ln", {}), "libra": ("lrp_ah_ln", {"secant": True})}.get(composite, (composite, {}))
    expected = whyformer.explain(model, inputs, method, 1, **settings).scores
    actual = r.relevance(pixels, 1, composite).sum(1)
    assert torch.allclose(actual, expected.double(), atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize(("composite", "rule"), [("lrp", "separate"), ("deep_taylor", "shared")])
@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "hf_swin"])
def test_relevance_of_input_equals_lrp_rules_of_chefer_et_al(name: str, composite: str, rule: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    expected = whyformer.explain(model, inputs, "lrp", 1, rule=rule).scores.double()
    actual = r.relevance(r.roots[0], 1, composite).sum(1)
    assert torch.allclose(actual, expected, atol=1e-8 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["hf_vit", "bert", "gpt2"])
def test_replay_and_run_equal_a_forward_hook(name: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    path = next(p for p in r.modules if p.endswith(("mlp", "intermediate", "fc1")))
    value = r[path]
    handle = dict(model.named_modules())[path].register_forward_hook(lambda m, args, out: torch.zeros_like(out))
    try:
        with torch.no_grad():
            expected = (model(**inputs) if isinstance(inputs, dict) else model(inputs)).logits
    finally:
        handle.remove()
    assert torch.allclose(r.replay({value: torch.zeros_like(value.tensor)}), expected, atol=1e-12)
    assert torch.allclose(r.run({value: torch.zeros_like}), expected, atol=1e-12)
    assert not torch.allclose(r.logits(), expected)
    for place in (path, value.number):
        assert torch.equal(r.relevance(place, 1), r.relevance(value, 1))
        assert torch.equal(r.replay({place: torch.zeros_like(value.tensor)}), r.replay({value: torch.zeros_like(value.tensor)}))
        assert torch.equal(r.run({place: torch.zeros_like}), r.run({value: torch.zeros_like}))


def test_vmap_over_replays_equals_single_replays() -> None:
    model, inputs = built("hf_vit")
    r = record(model, inputs)
    state = r["vit.layers.1"]
    masks = 1 - torch.eye(state.shape[1], dtype=torch.float64)[:, None, :, None]
    actual = torch.vmap(lambda mask: r.replay({state: state.tensor * mask}))(masks)
    for i in (0, 5):
        assert torch.allclose(actual[i], r.replay({state: state.tensor * masks[i]}), atol=1e-12)


# -- targets ---------------------------------------------------------------------------------------------------------
def test_record_accepts_the_targets_of_explain() -> None:
    model, inputs = built("gpt2")
    r = record(model, inputs)
    state = r["transformer.h.1"]
    first, second = r.relevance(state, 1), r.relevance(state, 2)
    assert torch.allclose(r.relevance(state, Contrast(1, 2)), first - second, atol=1e-12)
    assert torch.allclose(r.relevance(state, lambda logits: logits[:, 1] - logits[:, 2]), first - second, atol=1e-12)
    best = r.logits().argmax(-1).tolist()
    assert torch.allclose(r.relevance(state), r.relevance(state, best), atol=1e-12)


def test_token_target_ignores_later_tokens() -> None:
    model, inputs = built("llama_lm")
    r = record(model, {"input_ids": inputs["input_ids"][:1]})
    state = r["model.layers.0"]
    flow = r.walk_back([state], Token(3, 7))[state]
    assert flow[:, :4].abs().sum() > 0
    assert flow[:, 4:].abs().max() == 0  # later tokens have no effect


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "log_softmax"])
def test_logits_precede_a_final_activation(function: str) -> None:
    class WithActivation(nn.Module):
        def __init__(self, inner: nn.Module, end: Any) -> None:
            super().__init__()
            self.inner, self.end = inner, end

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.inner(x).logits)

    model, inputs = built("hf_vit")
    end = torch.sigmoid if function == "sigmoid" else lambda t: getattr(torch, function)(t, -1)
    r, plain = record(WithActivation(model, end), inputs), record(model, inputs)
    assert torch.allclose(r.logits(), plain.logits(), atol=1e-12)
    assert torch.allclose(r.relevance(r.roots[0], 2), plain.relevance(plain.roots[0], 2), atol=1e-12)
    state = r["inner.vit.layers.0"]
    changed = r.replay({state: state.tensor * 0.5})
    assert torch.allclose(changed, plain.replay({plain["vit.layers.0"]: state.tensor * 0.5}), atol=1e-12)


def test_output_returned_under_two_names_accumulates_gradients() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.layer(x).mean(1)
            return {"first": logits, "second": logits}

    model, x = Twice().eval(), torch.randn(2, 5, 4, dtype=torch.float64)
    r = record(model, x)
    flow = r.walk_back(r.roots, lambda output: output["first"][:, 0] + output["second"][:, 1])
    assert torch.allclose(next(iter(flow.values())), (model.layer.weight[0] + model.layer.weight[1]).expand(2, 5, 4) / 5)


# -- contents --------------------------------------------------------------------------------------------------------
def test_printed_program_names_units_and_modules() -> None:
    model, inputs = built("bert")
    r = record(model, inputs)
    lines = str(r).splitlines()
    assert len(lines) == len(r.units) + 1
    assert sum("norm" in line.split()[1] for line in lines[1:]) == 7
    assert any(line.endswith("bert.encoder.layer.2.output.LayerNorm") for line in lines)
    assert torch.equal(r.value(r["classifier"].number).tensor, r.logits())


def test_text_is_prepared_as_in_explain() -> None:
    r = whyformer.record("bundled:sst2", "A warm and charming film.")
    assert isinstance(r, Record)
    explained = whyformer.explain("bundled:sst2", "A warm and charming film.", "rollout")
    assert torch.allclose(r.logits(), explained.logits)


def test_model_is_unchanged_after_recording() -> None:
    model, inputs = built("bert")
    before = snapshot(model)
    first = record(model, inputs)
    first.walk_back([first["bert.encoder"]], 1)
    with pytest.raises(InputError):
        record(model, {**inputs, "input_ids": inputs["input_ids"] + 10**6})
    assert_unchanged(model, before)


@pytest.mark.parametrize(("name", "count", "heads"), [("hf_vit", 3, 3), ("timm_vit", 3, 3), ("bert", 3, 3), ("gpt2", 3, 3), ("llama", 3, 4)])
def test_attentions_and_blocks_are_listed(name: str, count: int, heads: int) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    assert len(r.attentions) == len(r.blocks) == count
    maps = r.attention_map(r.attentions[0])
    assert maps.shape[1] == heads
    assert torch.allclose(maps.sum(-1), torch.ones(maps.shape[:-1], dtype=maps.dtype))
    flow = r.walk_back([r.attentions[1].map], 1)
    assert next(iter(flow.values())).abs().sum() > 0
    assert all(r.value(b.entry).shape == r.value(b.exit).shape for b in r.blocks)


# -- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "hf_vit"])
def test_hook_that_runs_the_model_again_has_no_effect(name: str) -> None:
    model, inputs = built(name)
    plain = record(model, inputs)
    expected = [plain.attention_map(a) for a in plain.attentions]
    relevance = plain.relevance(plain.blocks[0].entry, 1, "deep_taylor")
    running: list[bool] = []

    def rerun(*_: Any) -> None:
        if not running:
            running.append(True)
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
            running.clear()

    handle = model.register_forward_pre_hook(rerun)
    try:
        actual = record(model, inputs)
    finally:
        handle.remove()
    assert len(actual.attentions) == len(expected) and len(actual.blocks) == len(plain.blocks)
    for attention, a in zip(actual.attentions, expected, strict=True):
        torch.testing.assert_close(actual.attention_map(attention), a)
    torch.testing.assert_close(actual.relevance(actual.blocks[0].entry, 1, "deep_taylor"), relevance)


def test_invalid_arguments_raise_with_remedy() -> None:
    model, inputs = built("bert")
    r = record(model, inputs)
    with pytest.raises(InputError, match=r"bert\.encoder\.layer\.1"):
        r["bert.encoder.layers.1"]
    with pytest.raises(InputError, match=r"bert\.encoder\.layer\.1"):
        r.relevance("bert.encoder.layers.1")
    with pytest.raises(InputError, match="attnlrp"):
        r.relevance("bert.encoder", composite="attn_lrp")
    with pytest.raises(InputError, match="shape"):
        r.replay({r["bert.encoder"]: torch.zeros(1)})
    with pytest.raises(InputError, match="floating-point"):
        r.walk_back([r.inputs["input_ids"]])
    with pytest.raises(InputError, match="values"):
        r.value(10**6)
    with pytest.raises(InputError):
        r.relevance(r["bert.encoder"], target=99)


class _Wide(nn.Module):
    """A matrix of more elements than are compared whole, a buffer, and an integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.last = nn.Embedding(9, 8), nn.Linear(8, 4096), nn.Linear(4096, 3)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.wide(self.table(ids) + self.shift).tanh().mean(1))


def _optimizer_step(model: nn.Module, ids: Tensor) -> None:
    model(ids).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


WRITES: dict[str, tuple[str, Any]] = {
    "data": ("the parameter 'wide.weight'", lambda m, ids: m.wide.weight.data.mul_(3)),
    "a row": ("the parameter 'wide.weight'", lambda m, ids: m.wide.weight.data[2077].zero_()),
    "a column": ("the parameter 'wide.weight'", lambda m, ids: m.wide.weight.data[:, 5].zero_()),
    "exchanged": ("the parameter 'last.bias'", lambda m, ids: m.last.bias.data.copy_(m.last.bias.data.flip(0))),
    "other data": ("the parameter 'last.bias'", lambda m, ids: setattr(m.last.bias, "data", torch.zeros(3))),
    "one element": ("the parameter 'wide.weight'", lambda m, ids: m.wide.weight.detach()[7, 3].zero_()),
    "type": ("the parameter", lambda m, ids: m.double()),
    "optimizer": ("the parameter", _optimizer_step),
    "buffer": ("the buffer 'shift'", lambda m, ids: m.shift.data.zero_()),
    "input": ("the input '0'", lambda m, ids: ids.zero_()),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_record_of_changed_weights_is_refused(way: str) -> None:
    model, ids = _Wide().eval(), torch.tensor([[1, 2, 3]])
    r = record(model, ids)
    value = r["wide"]
    name, write = WRITES[way]
    write(model, r.inputs["0"]._stored.tape[r.inputs["0"].number] if way == "input" else ids)
    uses = [r.logits, r.inside, lambda: r.walk_back([value]), lambda: r.relevance(value), lambda: r.replay({})]
    for use in [*uses, lambda: r.run({}), lambda: [r.value(n).tensor for n in range(len(r.tape))]]:
        with pytest.raises(ModelError, match=f"{name}.*record again"):
            use()
    assert record(model, ids).relevance(value.number).shape == value.shape


def test_a_record_is_kept_by_what_leaves_its_weights() -> None:
    model, ids = _Wide().eval(), torch.tensor([[1, 2, 3]])
    r = record(model, ids)
    wanted = r.relevance(r["wide"], 1)
    kept = model.last.bias.data.clone()
    model.last.bias.data.mul_(3)
    model.last.bias.data = kept
    model.requires_grad_(False)(ids + 1)
    assert torch.equal(r.run({}), r.logits())
    model.wide.weight = nn.Parameter(torch.zeros(4096, 8))  # the record still has the former
    assert torch.equal(r.relevance(r["wide"], 1), wanted)
    with pytest.raises(ModelError, match=r"wide\.weight"):  # another pass would not
        r.run({})


def test_a_write_to_a_tensor_of_a_value_leaves_the_record() -> None:
    model, inputs = built("bert")
    r = record(model, inputs)
    paths = ("bert.encoder.layer.0", "bert.encoder.layer.1")
    wanted = [r.logits(), *(r.relevance(r[p], 1) for p in paths)]
    for values in (r.runs(paths[1]), r.roots, r.outputs.values(), r.inputs.values()):
        for value in values:
            value.tensor.zero_()
    r.attention_map(r.attentions[0]).zero_()
    assert all(map(torch.equal, [r.logits(), *(r.relevance(r[p], 1) for p in paths)], wanted))


def test_module_that_runs_twice_has_two_values() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    r = record(Shared().eval(), torch.randn(2, 3, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="runs"):
        r["layer"]
    assert len(r.runs("layer")) == 2


@pytest.mark.parametrize("way", ["comparison", "list"])
def test_replay_refuses_data_dependent_control_flow(way: str) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            positive = y.sum() > 0 if way == "comparison" else (y > 0).sum((1, 2)).tolist()[0] > 5
            return self.second(y if positive else -y).mean(1)

    model, x = Branching().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    r = record(model, x)
    state = r["first"]
    with pytest.raises(ModelError, match="again"):
        r.replay({state: -state.tensor})
    assert torch.allclose(r.run({state: lambda y: -y}), r.logits(), atol=1e-12)


def test_similarity_target_reaches_every_input() -> None:
    model, inputs = next(a for a in listed() if a.name == "two towers/clip").build()
    r = record(model, inputs)
    actual = [r.walk_back([root], Similarity())[root] for root in r.roots]
    assert all(f.abs().sum() > 0 for f in actual)
