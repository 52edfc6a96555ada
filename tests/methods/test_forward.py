"""An explanation keeps the logits of the plain model and leaves model, inputs and threads undisturbed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import whyformer
from snapshot import assert_unchanged, snapshot
from waiting import HANG
from zoo import WINDOWED, ZOO, build, call, rows

# torch's fused encoder layer and multi-head attention are decomposed, so rounding differs
DECOMPOSED = ("encoder", "torchvision")
TA = "transformer_attribution"
METHODS = ["input_x_gradient", "lrp_ah_ln", "lrp", "gradcam"]


@pytest.mark.part
@pytest.mark.parametrize("name", [*ZOO, *WINDOWED])
@pytest.mark.parametrize("method", METHODS)
def test_logits_equal_model_and_model_is_unchanged(name: str, method: str) -> None:
    model, inputs = build(name, torch.float32)
    expected = call(model, inputs)
    model.train()
    for module in model.modules():
        module.training = False
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    logits = whyformer.explain(model, inputs, method, 1).logits
    assert_unchanged(model, before)
    if name.startswith(DECOMPOSED):
        assert (logits - expected).abs().max() <= 1e-5
    else:
        assert torch.equal(logits, expected)


@pytest.mark.part
@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "lrp_ah_ln", "rollout", "gae", "value_zeroing", "gradcam"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("name", ["hf_vit", "gpt2", "encoder_mean"])
def test_model_is_unchanged_after_exception_in_module(name: str, where: str, method: str) -> None:
    """Also inside a module that is one operation (GPT-2's activation), where gradients are disabled."""
    model, inputs = build(name)
    modules = [m for n, m in model.named_modules() if n and not list(m.children())]
    index = {"first": 0, "middle": len(modules) // 2, "last": -1}[where]

    def explode(*_: Any) -> None:
        raise RuntimeError("in the middle of it")

    modules[index].register_forward_hook(explode)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        whyformer.explain(model, inputs, method=method)
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp_ah_ln", "gae"])
def test_model_is_unchanged_after_exception_in_target(method: str) -> None:
    model, inputs = build("gpt2")
    before = snapshot(model)

    def target(logits: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(KeyError):
        whyformer.explain(model, inputs, method=method, target=target)
    assert_unchanged(model, before)
    # the model can still be explained
    assert whyformer.explain(model, inputs, method=method).scores.isfinite().all()


def test_user_hooks_stay_registered_and_run() -> None:
    model, inputs = build("bert")
    shapes: list[tuple[int, ...]] = []
    model.bert.encoder.layer[1].register_forward_hook(lambda m, a, o: shapes.append(tuple((o if isinstance(o, Tensor) else o[0]).shape)))
    plain = whyformer.explain(build("bert")[0], inputs, TA)
    assert torch.equal(whyformer.explain(model, inputs, TA).scores, plain.scores)
    assert shapes == [(2, 10, 24)]
    whyformer.explain(model, inputs, TA)
    assert shapes == [(2, 10, 24)] * 2


def test_accumulated_gradients_are_unchanged() -> None:
    model, inputs = build("hf_vit")
    model(inputs).logits.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert gradients
    for method in ("transformer_attribution", "gae", "lrp"):
        whyformer.explain(model, inputs, method=method)
    for gradient, before in zip([p.grad for p in model.parameters() if p.grad is not None], gradients, strict=True):
        assert torch.equal(gradient, before)


def test_input_is_unchanged() -> None:
    for name in ("hf_vit", "bert"):
        model, inputs = build(name)
        copy = inputs.clone() if isinstance(inputs, Tensor) else {k: v.clone() for k, v in inputs.items()}
        whyformer.explain(model, inputs, TA)
        whyformer.explain(model, inputs, method="lrp")
        if isinstance(inputs, Tensor):
            assert torch.equal(inputs, copy)
            assert not inputs.requires_grad and inputs.grad is None
        else:
            assert all(torch.equal(inputs[k], copy[k]) for k in copy)


def test_input_that_requires_grad_is_unchanged() -> None:
    model, inputs = build("hf_vit")
    plain = whyformer.explain(model, inputs, method="input_x_gradient").scores
    inputs.requires_grad_()
    assert torch.equal(whyformer.explain(model, inputs, method="input_x_gradient").scores, plain)
    assert torch.equal(whyformer.explain(model, inputs, TA).scores, whyformer.explain(model, inputs.detach(), TA).scores)
    assert inputs.requires_grad and inputs.grad is None


@pytest.mark.parametrize("batch", [10, 16])
def test_batch_axis_is_known_when_sizes_are_equal(batch: int) -> None:
    """With axes of equal length, shapes alone do not identify the batch axis."""
    for name in ("encoder_sequence_first", "encoder_mean", "bert"):
        model, inputs = build(name)
        many = {k: torch.cat([v] * (batch // 2)) for k, v in inputs.items()}
        targets = [i % 5 for i in range(batch)]
        for method in ("transformer_attribution", "rollout", "lrp", "input_x_gradient", "gae"):
            batch_scores = whyformer.explain(model, many, method=method, target=targets).scores
            single = whyformer.explain(model, rows(many, 3), method=method, target=targets[3]).scores
            assert torch.allclose(batch_scores[3:4], single, atol=1e-7 * float(batch_scores.abs().max())), (name, method)


# -- threads -----------------------------------------------------------------------------------------------------------
def run_in_threads(*jobs: Any, repeats: int = 4) -> list[list[Any]]:
    """Run each job in its own thread, started at the same time, ``repeats`` times."""
    results: list[list[Any]] = [[] for _ in jobs]
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        try:
            for _ in range(repeats):
                barrier.wait(HANG)
                results[i].append(jobs[i]())
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder_mean", "hf_vit"])
def test_two_threads_explain_one_model(name: str) -> None:
    """GPT-2 has modules that are one operation, which get hooks; these ignore other threads."""
    model, inputs = build(name)
    methods = ("transformer_attribution", "lrp_ah_ln") if name != "hf_vit" else ("transformer_attribution", "gae")
    expected = [whyformer.explain(model, inputs, method=m).scores for m in methods]
    before = snapshot(model)
    results = run_in_threads(*[lambda m=m: whyformer.explain(model, inputs, method=m).scores for m in methods])
    for results_of_thread, scores in zip(results, expected, strict=True):
        assert all(torch.equal(actual, scores) for actual in results_of_thread)
    before["random state"] = torch.get_rng_state().clone()
    assert_unchanged(model, before)


def test_two_threads_explain_two_models_of_a_family() -> None:
    first, inputs = build("bert")
    second, _ = build("bert")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    expected = [whyformer.explain(m, inputs, TA).scores for m in (first, second)]
    assert not torch.allclose(*expected)
    results = run_in_threads(*[lambda m=m: whyformer.explain(m, inputs, TA).scores for m in (first, second)])
    for results_of_thread, scores in zip(results, expected, strict=True):
        assert all(torch.equal(actual, scores) for actual in results_of_thread)


def test_explanation_does_not_disturb_forward_and_training_in_other_threads() -> None:
    """A model can be run and trained in other threads while it is explained."""
    model, inputs = build("gpt2")
    expected, logits = whyformer.explain(model, inputs, TA).scores, call(model, inputs)

    def gradient() -> Tensor:
        output = model(**inputs).logits
        return torch.autograd.grad(output.sum(), model.score.weight)[0]

    plain = gradient()
    results = run_in_threads(
        lambda: whyformer.explain(model, inputs, TA).scores, lambda: call(model, inputs), gradient, repeats=5
    )
    assert all(torch.equal(result, expected) for result in results[0])
    assert all(torch.equal(result, logits) for result in results[1])
    assert all(torch.equal(result, plain) for result in results[2])


def test_nested_explanations_are_independent() -> None:
    """A target function may call explain; it does not affect the outer run."""
    model, inputs = build("bert")
    inner: list[Tensor] = []

    def target(logits: Tensor) -> Tensor:
        inner.append(whyformer.explain(model, inputs, TA, 0).scores)
        return logits[:, 0]

    outer = whyformer.explain(model, inputs, TA, target).scores
    expected = whyformer.explain(model, inputs, TA, 0).scores
    assert torch.equal(outer, expected)
    assert all(torch.equal(i, expected) for i in inner)
