"""``whyformer.record``: relevance and interventions at any place inside a model."""

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


def in_autograd(model: nn.Module, inputs: Any, path: str, column: int) -> Tensor:
    """∂ Σ logits[:, column] / ∂ what a module returned, by a hook and autograd."""
    seen: list[Tensor] = []
    module = dict(model.named_modules())[path]
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out if isinstance(out, Tensor) else out[0]))
    try:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    finally:
        handle.remove()
    logits = output if isinstance(output, Tensor) else output.logits
    return torch.autograd.grad(logits[:, column].sum(), seen[0])[0]


@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "bert", "gpt2", "llama", "electra", "hf_swin"])
def test_the_gradient_at_what_a_module_returns_is_that_of_autograd(name: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    paths = [p for p in r.modules if p and r.runs(p)[0].tensor.dim() == 3 and len(r.runs(p)) == 1]
    chosen = paths[:: max(1, len(paths) // 4)]
    flows = r.walk_back([r[p] for p in chosen], target=1)
    for path in chosen:
        wanted = in_autograd(model, inputs, path, 1)
        assert torch.allclose(flows[r[path]], wanted, atol=1e-12), path


@pytest.mark.parametrize("composite", [c for c in COMPOSITES if c in ("attnlrp", "ah_ln", "libra", "cp_lrp", "gim")])
@pytest.mark.parametrize("name", ["hf_vit", "timm_vit"])
def test_relevance_of_the_input_is_what_the_method_of_that_name_explains(name: str, composite: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    (pixels,) = r.roots
    method, settings = {"ah_ln": ("lrp_ah_ln", {}), "libra": ("lrp_ah_ln", {"secant": True})}.get(composite, (composite, {}))
    wanted = whyformer.explain(model, inputs, method, 1, **settings).scores
    found = r.relevance(pixels, 1, composite).sum(1)
    assert torch.allclose(found, wanted.double(), atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.parametrize(("composite", "rule"), [("lrp", "separate"), ("deep_taylor", "shared")])
@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "hf_swin"])
def test_relevance_under_the_rules_of_chefer_et_al(name: str, composite: str, rule: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    wanted = whyformer.explain(model, inputs, "lrp", 1, rule=rule).scores.double()
    found = r.relevance(r.roots[0], 1, composite).sum(1)
    assert torch.allclose(found, wanted, atol=1e-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["hf_vit", "bert", "gpt2"])
def test_an_ablation_is_what_a_hook_does(name: str) -> None:
    model, inputs = built(name)
    r = record(model, inputs)
    path = next(p for p in r.modules if p.endswith(("mlp", "intermediate", "fc1")))
    value = r[path]
    handle = dict(model.named_modules())[path].register_forward_hook(lambda m, args, out: torch.zeros_like(out))
    try:
        with torch.no_grad():
            wanted = (model(**inputs) if isinstance(inputs, dict) else model(inputs)).logits
    finally:
        handle.remove()
    assert torch.allclose(r.replay({value: torch.zeros_like(value.tensor)}), wanted, atol=1e-12)
    assert torch.allclose(r.run({value: torch.zeros_like}), wanted, atol=1e-12)
    assert not torch.allclose(r.logits(), wanted)


def test_a_batch_of_ablations_from_one_recording() -> None:
    model, inputs = built("hf_vit")
    r = record(model, inputs)
    state = r["vit.layers.1"]
    masks = 1 - torch.eye(state.shape[1], dtype=torch.float64)[:, None, :, None]
    found = torch.vmap(lambda mask: r.replay({state: state.tensor * mask}))(masks)
    for i in (0, 5):
        assert torch.allclose(found[i], r.replay({state: state.tensor * masks[i]}), atol=1e-12)


# -- targets ---------------------------------------------------------------------------------------------------------
def test_targets_are_those_of_explain() -> None:
    model, inputs = built("gpt2")
    r = record(model, inputs)
    state = r["transformer.h.1"]
    one, other = r.relevance(state, 1), r.relevance(state, 2)
    assert torch.allclose(r.relevance(state, Contrast(1, 2)), one - other, atol=1e-12)
    assert torch.allclose(r.relevance(state, lambda logits: logits[:, 1] - logits[:, 2]), one - other, atol=1e-12)
    best = r.logits().argmax(-1).tolist()
    assert torch.allclose(r.relevance(state), r.relevance(state, best), atol=1e-12)


def test_a_language_model_at_a_token() -> None:
    model, inputs = built("llama_lm")
    r = record(model, {"input_ids": inputs["input_ids"][:1]})
    state = r["model.layers.0"]
    flow = r.walk_back([state], Token(3, 7))[state]
    assert flow[:, :4].abs().sum() > 0
    assert flow[:, 4:].abs().max() == 0  # later tokens play no part


@pytest.mark.parametrize("function", ["sigmoid", "softmax", "log_softmax"])
def test_a_function_at_the_models_end_is_told_apart_from_the_logits(function: str) -> None:
    class Ended(nn.Module):
        def __init__(self, inner: nn.Module, end: Any) -> None:
            super().__init__()
            self.inner, self.end = inner, end

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.inner(x).logits)

    model, inputs = built("hf_vit")
    end = torch.sigmoid if function == "sigmoid" else lambda t: getattr(torch, function)(t, -1)
    r, plain = record(Ended(model, end), inputs), record(model, inputs)
    assert torch.allclose(r.logits(), plain.logits(), atol=1e-12)
    assert torch.allclose(r.relevance(r.roots[0], 2), plain.relevance(plain.roots[0], 2), atol=1e-12)
    state = r["inner.vit.layers.0"]
    changed = r.replay({state: state.tensor * 0.5})
    assert torch.allclose(changed, plain.replay({plain["vit.layers.0"]: state.tensor * 0.5}), atol=1e-12)


def test_an_output_that_stands_in_two_places_is_read_once() -> None:
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


# -- what there is ---------------------------------------------------------------------------------------------------
def test_the_program_names_units_and_modules() -> None:
    model, inputs = built("bert")
    r = record(model, inputs)
    lines = str(r).splitlines()
    assert len(lines) == len(r.units) + 1
    assert sum("norm" in line.split()[1] for line in lines[1:]) == 7
    assert any(line.endswith("bert.encoder.layer.2.output.LayerNorm") for line in lines)
    assert torch.equal(r.value(r["classifier"].number).tensor, r.logits())


def test_text_and_pictures_are_prepared_as_explain_does() -> None:
    r = whyformer.record("bundled:sst2", "A warm and charming film.")
    assert isinstance(r, Record)
    explained = whyformer.explain("bundled:sst2", "A warm and charming film.", "rollout")
    assert torch.allclose(r.logits(), explained.logits)


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = built("bert")
    before = snapshot(model)
    first = record(model, inputs)
    first.walk_back([first["bert.encoder"]], 1)
    with pytest.raises(InputError):
        record(model, {**inputs, "input_ids": inputs["input_ids"] + 10**6})
    assert_unchanged(model, before)


@pytest.mark.parametrize(("name", "count", "heads"), [("hf_vit", 3, 3), ("timm_vit", 3, 3), ("bert", 3, 3), ("gpt2", 3, 3), ("llama", 3, 4)])
def test_attentions_and_blocks(name: str, count: int, heads: int) -> None:
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
def test_a_hook_that_runs_the_model_once_more_changes_nothing(name: str) -> None:
    model, inputs = built(name)
    plain = record(model, inputs)
    wanted = [plain.attention_map(a) for a in plain.attentions]
    relevance = plain.relevance(plain.blocks[0].entry, 1, "deep_taylor")
    running: list[bool] = []

    def again(*_: Any) -> None:
        if not running:
            running.append(True)
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
            running.clear()

    handle = model.register_forward_pre_hook(again)
    try:
        found = record(model, inputs)
    finally:
        handle.remove()
    assert len(found.attentions) == len(wanted) and len(found.blocks) == len(plain.blocks)
    for attention, a in zip(found.attentions, wanted, strict=True):
        torch.testing.assert_close(found.attention_map(attention), a)
    torch.testing.assert_close(found.relevance(found.blocks[0].entry, 1, "deep_taylor"), relevance)


def test_mistakes_name_the_way_out() -> None:
    model, inputs = built("bert")
    r = record(model, inputs)
    with pytest.raises(InputError, match=r"bert\.encoder\.layer\.1"):
        r["bert.encoder.layers.1"]
    with pytest.raises(InputError, match="attnlrp"):
        r.relevance(r["bert.encoder"], composite="attn_lrp")
    with pytest.raises(InputError, match="shape"):
        r.replay({r["bert.encoder"]: torch.zeros(1)})
    with pytest.raises(InputError, match="floating-point"):
        r.walk_back([r.inputs["input_ids"]])
    with pytest.raises(InputError, match="values"):
        r.value(10**6)
    with pytest.raises(InputError):
        r.relevance(r["bert.encoder"], target=99)


def test_a_module_that_ran_more_than_once_has_several_values() -> None:
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
def test_a_model_that_decides_by_a_value_is_run_again(way: str) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            positive = y.sum() > 0 if way == "comparison" else (y > 0).sum((1, 2)).tolist()[0] > 5
            return self.second(y if positive else -y).mean(1)

    model, x = Deciding().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    r = record(model, x)
    state = r["first"]
    with pytest.raises(ModelError, match="again"):
        r.replay({state: -state.tensor})
    assert torch.allclose(r.run({state: lambda y: -y}), r.logits(), atol=1e-12)


def test_similarity_of_pictures_and_texts() -> None:
    model, inputs = next(a for a in listed() if a.name == "two towers/clip").build()
    r = record(model, inputs)
    found = [r.walk_back([root], Similarity())[root] for root in r.roots]
    assert all(f.abs().sum() > 0 for f in found)
