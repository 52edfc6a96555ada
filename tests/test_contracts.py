"""Contracts of every method on every model: parametrized over the registry × the zoo, so new methods and models need no new test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.methods import METHODS
from zoo import LENGTHS, TOKENS, TWO_ATTENTIONS, WINDOWED, ZOO, build, call, modality, rows, to

TARGETS = [1, 3]
# small values for settings that repeat work
FEW: dict[str, Any] = {"samples": 3, "steps": 4, "masks": 6, "repeats": 2, "iterations": 3, "epochs": 2, "patch": 8}


def pairs_of(*names: str) -> list[tuple[str, str]]:
    """Pairs of each method with the models of its modality."""
    return [(m, n) for m in sorted(METHODS) for n in names if METHODS[m].modality in ("both", modality(n))]


PAIRS = pairs_of(*ZOO)
REQUIRED = [(m, n) for m in sorted(METHODS) for n in WINDOWED if METHODS[m].anywhere and METHODS[m].modality in ("both", "image")]
OF_ONE_BLOCK = {"raw_attention", "partial_lrp", "gradcam_attention"}  # applies at the resolution of one block
REFUSED = [
    (m, n) for m in sorted(METHODS.keys() - OF_ONE_BLOCK) for n in WINDOWED if not METHODS[m].anywhere and METHODS[m].modality in ("both", "image")
]

every_pair = pytest.mark.parametrize(("method", "name"), PAIRS + REQUIRED)
either_pair = pytest.mark.parametrize(("method", "name"), pairs_of("hf_vit", "bert"))
every_method = pytest.mark.parametrize("method", sorted(METHODS))


def few(method: str) -> dict[str, Any]:
    return {name: FEW[name] for name in METHODS[method].settings if name in FEW}


def close(a: Tensor, b: Tensor, scale: Tensor, tolerance: float = 1e-6) -> bool:
    """Equal up to a fraction of the maximum of ``scale``; exactly equal if it is zero."""
    return bool((a.double() - b.double()).abs().max() <= tolerance * scale.double().abs().max())


@cache
def built(name: str) -> tuple[nn.Module, Any]:
    """The model, shared by all tests, and its inputs."""
    return build(name)


@dataclass(frozen=True)
class Run:
    model: nn.Module
    inputs: Any
    before: dict[str, Any]
    result: whyformer.Explanation


@cache
def run(method: str, name: str) -> Run:
    """The explanation of the batch with one target per sample, shared by several contracts."""
    model, inputs = built(name)
    torch.manual_seed(0)
    before = snapshot(model)
    result = whyformer.explain(model, inputs, method=method, target=TARGETS, **few(method))
    assert_unchanged(model, before)
    return Run(model, inputs, before, result)


@pytest.mark.part(times=2)
@every_pair
def test_batch_equals_single_runs(method: str, name: str) -> None:
    """Each sample is run alone; text is also run without its padding."""
    batch = run(method, name)
    for i, target in enumerate(TARGETS):
        expected = batch.result.scores[i]
        for crop in (False, True) if isinstance(batch.inputs, dict) else (False,):
            single = rows(batch.inputs, i, crop=crop)
            actual = whyformer.explain(batch.model, single, method=method, target=target, **few(method))
            assert actual.scores.shape[0] == 1
            assert close(actual.scores[0], expected[: actual.scores.shape[1]], expected), f"sample {i}, {crop=}"
            assert torch.allclose(actual.logits[0], batch.result.logits[i], atol=1e-9)


@pytest.mark.part(times=2)
@every_pair
def test_scores_have_the_documented_level_and_shape(method: str, name: str) -> None:
    reference = run(method, name)
    result = reference.result
    assert result.scores.isfinite().all()
    assert result.target.tolist() == TARGETS
    assert result.method == method
    assert result.settings == {**METHODS[method].settings, **few(method)}
    if isinstance(reference.inputs, dict):
        assert result.level == "token"
        assert result.scores.shape == (2, TOKENS)
        for row, length in enumerate(LENGTHS):
            assert result.scores[row, length:].eq(0).all()
            assert len(result[row].scores[0]) == TOKENS
        return
    height, width = reference.inputs.shape[-2:]
    assert result.level in METHODS[method].level
    if result.level == "pixel":
        assert result.scores.shape == (2, height, width)
    elif result.level == "patch":
        assert result.grid is not None
        assert result.scores.shape == (2, result.grid[0] * result.grid[1])
        assert result.grid[0] * width == result.grid[1] * height
    assert result.heatmap().shape == (2, height, width)


@pytest.mark.part(times=2)
@every_pair
def test_logits_equal_the_plain_model(method: str, name: str) -> None:
    reference = run(method, name)
    assert (reference.result.logits - call(reference.model, reference.inputs)).abs().max() <= 1e-12


@pytest.mark.part(times=2)
@every_pair
def test_explanation_is_deterministic(method: str, name: str) -> None:
    """The global random state has no effect; sampling methods have their own seed."""
    reference = run(method, name)
    torch.manual_seed(7)
    repeated = whyformer.explain(reference.model, reference.inputs, method=method, target=TARGETS, **few(method))
    assert torch.equal(repeated.scores, reference.result.scores)


@pytest.mark.part(times=2)
@every_pair
def test_model_is_unchanged(method: str, name: str) -> None:
    reference = run(method, name)
    torch.manual_seed(0)
    assert_unchanged(reference.model, reference.before)


@pytest.mark.part
@pytest.mark.parametrize(("method", "name"), [(m, n) for m, n in pairs_of("hf_vit", "bert") if METHODS[m].class_specific])
def test_class_specific_scores_depend_on_the_class(method: str, name: str) -> None:
    model, inputs = built(name)
    maps = [whyformer.explain(model, inputs, method=method, target=c, **few(method)).scores for c in range(5)]
    assert any(not close(m, maps[0], maps[0], 1e-3) for m in maps[1:])


@pytest.mark.part
@pytest.mark.parametrize(("method", "name"), [(m, n) for m, n in pairs_of("hf_vit", "bert") if not METHODS[m].class_specific])
def test_class_agnostic_scores_are_equal_for_all_classes(method: str, name: str) -> None:
    model, inputs = built(name)
    first, second = (whyformer.explain(model, inputs, method=method, target=c, **few(method)) for c in (0, 4))
    assert torch.equal(first.scores, second.scores)
    assert first.diagnostics["class_specific"] is False


@pytest.mark.part
@either_pair
def test_default_target_is_the_predicted_class(method: str, name: str) -> None:
    model, inputs = built(name)
    result = whyformer.explain(model, inputs, method=method, **few(method))
    predicted = call(model, inputs).argmax(-1).tolist()
    assert result.target.tolist() == predicted
    same = whyformer.explain(model, inputs, method=method, target=predicted, **few(method))
    assert torch.equal(result.scores, same.scores)


@pytest.mark.part
@either_pair
def test_target_objects_and_functions(method: str, name: str) -> None:
    model, inputs = built(name)
    options = {"method": method, **few(method)}
    as_list = whyformer.explain(model, inputs, target=TARGETS, **options)
    logit = whyformer.explain(model, inputs, target=whyformer.targets.Logit(TARGETS), **options)
    assert torch.equal(as_list.scores, logit.scores)
    contrast = whyformer.explain(model, inputs, target=whyformer.targets.Contrast(TARGETS, [2, 0]), **options)
    assert contrast.scores.isfinite().all()
    assert contrast.target.tolist() == TARGETS
    custom = whyformer.explain(model, inputs, target=lambda logits: logits.square().sum(-1), **options)
    assert custom.scores.isfinite().all()


@pytest.mark.part
@every_method
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_gradient_mode_of_caller_has_no_effect(method: str, mode: str) -> None:
    name = "bert" if METHODS[method].modality == "text" else "hf_vit"
    reference = run(method, name)
    with getattr(torch, mode)():
        result = whyformer.explain(reference.model, reference.inputs, method=method, target=TARGETS, **few(method))
    assert torch.equal(result.scores, reference.result.scores)


@pytest.mark.part
@either_pair
def test_frozen_parameters_have_no_effect(method: str, name: str) -> None:
    model, inputs = build(name)
    model.requires_grad_(False)
    before = snapshot(model)
    result = whyformer.explain(model, inputs, method=method, target=TARGETS, **few(method))
    assert_unchanged(model, before)
    assert torch.equal(result.scores, run(method, name).result.scores)


@cache
def with_attention(name: str, attention: str) -> tuple[nn.Module, Any]:
    model, inputs = TWO_ATTENTIONS[name](attention)
    return model.double(), to(inputs, torch.float64)


@pytest.mark.part
@pytest.mark.parametrize(("method", "name"), [*pairs_of(*(n for n in TWO_ATTENTIONS if n in ZOO)), *((m, "modernbert") for m in sorted(METHODS) if METHODS[m].modality != "image")])
def test_sdpa_and_eager_attention_have_equal_scores(method: str, name: str) -> None:
    results = [whyformer.explain(*with_attention(name, a), method=method, target=TARGETS, **few(method)).scores for a in ("sdpa", "eager")]
    # most eager implementations of transformers take the softmax in float32 whatever the model's precision
    assert close(*results, results[0], 1e-6 if name in ("bert", "distilbert") else 2e-3)


@pytest.mark.part
@pytest.mark.parametrize(("method", "name"), REFUSED)
def test_windowed_attention_is_refused(method: str, name: str) -> None:
    """The error names the methods that do apply."""
    model, inputs = built(name)
    before = snapshot(model)
    with pytest.raises(MethodNotApplicable) as caught:
        whyformer.explain(model, inputs, method=method, **few(method))
    message = str(caught.value)
    assert message.startswith(method)
    named = {other for other in METHODS if METHODS[other].anywhere and METHODS[other].modality in ("both", "image")}
    assert all(other in message for other in named)
    assert_unchanged(model, before)


def test_methods_without_need_of_global_attention() -> None:
    expected = "attnlrp auto cp_lrp gim gradcam input_x_gradient integrated_gradients lrp lrp_ah lrp_ah_ln lrp_ln occlusion saliency smoothgrad vit_cx"
    assert {name for name, row in METHODS.items() if row.anywhere} == set(expected.split())


@every_method
def test_wrong_modality_is_refused(method: str) -> None:
    expected = METHODS[method].modality
    if expected == "both":
        pytest.skip("explains both")
    model, inputs = built("bert" if expected == "image" else "hf_vit")
    with pytest.raises((InputError, MethodNotApplicable), match=method):
        whyformer.explain(model, inputs, method=method)


@every_method
def test_unknown_settings_are_refused(method: str) -> None:
    model, inputs = built("hf_vit")
    with pytest.raises(InputError) as caught:
        whyformer.explain(model, inputs, method=method, no_such_setting=1)
    message = str(caught.value)
    assert "no_such_setting" in message
    for name, default in METHODS[method].settings.items():
        assert f"{name}={default!r}" in message


@every_method
def test_invalid_setting_values_are_refused(method: str) -> None:
    """The model is never called."""

    class Untouched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    for name in METHODS[method].checks:
        with pytest.raises(InputError) as caught:
            whyformer.explain(Untouched().eval(), torch.zeros(1, 3, 8, 8), method=method, **{name: object()})
        assert name in str(caught.value)
        assert repr(METHODS[method].settings[name]) in str(caught.value)


@pytest.mark.parametrize(
    ("method", "setting"), [(m, s) for m in sorted(METHODS) for s in ("start_layer", "block", "blocks", "layer") if s in METHODS[m].settings]
)
@pytest.mark.parametrize("number", [3, -4])
def test_blocks_outside_the_model_are_refused(method: str, setting: str, number: int) -> None:
    model, inputs = built("bert" if METHODS[method].modality == "text" else "hf_vit")
    with pytest.raises(InputError, match=r"3 blocks \(0 to 2\)"):
        whyformer.explain(model, inputs, method=method, **{setting: number})


@every_method
def test_registry_entry_is_complete(method: str) -> None:
    row = METHODS[method]
    assert row.name == method
    assert row.summary
    assert row.citation
    assert row.family in ("attention", "propagation", "gradient", "perturbation")
    assert row.modality in ("both", "image", "text")
    assert row.function.__doc__
    assert set(row.checks) <= set(row.settings)
    assert row.complete({}) == row.settings, "a default fails its own check"
