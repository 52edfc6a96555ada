"""The explained forward pass is the plain one, and nothing of it is left behind."""

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

# torch's fused encoder layer and fused multi-head attention are opened, so rounding differs
OPENED = ("encoder", "torchvision")
TA = "transformer_attribution"
METHODS = ["input_x_gradient", "lrp_ah_ln", "lrp", "gradcam"]


@pytest.mark.part
@pytest.mark.parametrize("name", [*ZOO, *WINDOWED])
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_model_and_everything_is_left_as_found(name: str, method: str) -> None:
    model, inputs = build(name, torch.float32)
    wanted = call(model, inputs)
    model.train()
    for module in model.modules():
        module.training = False
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    logits = whyformer.explain(model, inputs, method, 1).logits
    assert_unchanged(model, before)
    if name.startswith(OPENED):
        assert (logits - wanted).abs().max() <= 1e-5
    else:
        assert torch.equal(logits, wanted)


@pytest.mark.part
@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "lrp_ah_ln", "rollout", "gae", "value_zeroing", "gradcam"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("name", ["hf_vit", "gpt2", "encoder_mean"])
def test_everything_is_left_as_found_after_an_error(name: str, where: str, method: str) -> None:
    """Also in the middle of a module that stands for one operation (GPT-2's activation), where gradients are off."""
    model, inputs = build(name)
    modules = [m for n, m in model.named_modules() if n and not list(m.children())]
    place = {"first": 0, "middle": len(modules) // 2, "last": -1}[where]

    def explode(*_: Any) -> None:
        raise RuntimeError("in the middle of it")

    modules[place].register_forward_hook(explode)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        whyformer.explain(model, inputs, method=method)
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp_ah_ln", "gae"])
def test_everything_is_left_as_found_after_an_error_of_the_target(method: str) -> None:
    model, inputs = build("gpt2")
    before = snapshot(model)

    def target(logits: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(KeyError):
        whyformer.explain(model, inputs, method=method, target=target)
    assert_unchanged(model, before)
    # and the model can be explained right after
    assert whyformer.explain(model, inputs, method=method).scores.isfinite().all()


def test_a_users_own_hooks_stay_and_run() -> None:
    model, inputs = build("bert")
    seen: list[tuple[int, ...]] = []
    model.bert.encoder.layer[1].register_forward_hook(lambda m, a, o: seen.append(tuple((o if isinstance(o, Tensor) else o[0]).shape)))
    plain = whyformer.explain(build("bert")[0], inputs, TA)
    assert torch.equal(whyformer.explain(model, inputs, TA).scores, plain.scores)
    assert seen == [(2, 10, 24)]
    whyformer.explain(model, inputs, TA)
    assert seen == [(2, 10, 24)] * 2


def test_accumulated_gradients_are_not_touched() -> None:
    model, inputs = build("hf_vit")
    model(inputs).logits.sum().backward()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert kept
    for method in ("transformer_attribution", "gae", "lrp"):
        whyformer.explain(model, inputs, method=method)
    for gradient, before in zip([p.grad for p in model.parameters() if p.grad is not None], kept, strict=True):
        assert torch.equal(gradient, before)


def test_the_input_is_not_touched() -> None:
    for name in ("hf_vit", "bert"):
        model, inputs = build(name)
        given = inputs.clone() if isinstance(inputs, Tensor) else {k: v.clone() for k, v in inputs.items()}
        whyformer.explain(model, inputs, TA)
        whyformer.explain(model, inputs, method="lrp")
        if isinstance(inputs, Tensor):
            assert torch.equal(inputs, given)
            assert not inputs.requires_grad and inputs.grad is None
        else:
            assert all(torch.equal(inputs[k], given[k]) for k in given)


def test_an_input_that_requires_grad_is_not_touched() -> None:
    model, inputs = build("hf_vit")
    plain = whyformer.explain(model, inputs, method="input_x_gradient").scores
    inputs.requires_grad_()
    assert torch.equal(whyformer.explain(model, inputs, method="input_x_gradient").scores, plain)
    assert torch.equal(whyformer.explain(model, inputs, TA).scores, whyformer.explain(model, inputs.detach(), TA).scores)
    assert inputs.requires_grad and inputs.grad is None


@pytest.mark.parametrize("batch", [10, 16])
def test_as_many_samples_as_tokens(batch: int) -> None:
    """Where axes have equal lengths, shapes alone do not say which is the batch."""
    for name in ("encoder_sequence_first", "encoder_mean", "bert"):
        model, inputs = build(name)
        many = {k: torch.cat([v] * (batch // 2)) for k, v in inputs.items()}
        targets = [i % 5 for i in range(batch)]
        for method in ("transformer_attribution", "rollout", "lrp", "input_x_gradient", "gae"):
            whole = whyformer.explain(model, many, method=method, target=targets).scores
            one = whyformer.explain(model, rows(many, 3), method=method, target=targets[3]).scores
            assert torch.allclose(whole[3:4], one, atol=1e-7 * float(whole.abs().max())), (name, method)


# -- threads -----------------------------------------------------------------------------------------------------------
def together(*jobs: Any, repeats: int = 4) -> list[list[Any]]:
    """Each job in its own thread, started at the same moment, several times over."""
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
def test_two_threads_on_one_model(name: str) -> None:
    """GPT-2 has modules that stand for one operation, so hooks; they are deaf to the other thread."""
    model, inputs = build(name)
    methods = ("transformer_attribution", "lrp_ah_ln") if name != "hf_vit" else ("transformer_attribution", "gae")
    wanted = [whyformer.explain(model, inputs, method=m).scores for m in methods]
    before = snapshot(model)
    results = together(*[lambda m=m: whyformer.explain(model, inputs, method=m).scores for m in methods])
    for found, scores in zip(results, wanted, strict=True):
        assert all(torch.equal(one, scores) for one in found)
    before["random state"] = torch.get_rng_state().clone()
    assert_unchanged(model, before)


def test_two_models_of_one_family_in_two_threads() -> None:
    first, inputs = build("bert")
    second, _ = build("bert")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    wanted = [whyformer.explain(m, inputs, TA).scores for m in (first, second)]
    assert not torch.allclose(*wanted)
    results = together(*[lambda m=m: whyformer.explain(m, inputs, TA).scores for m in (first, second)])
    for found, scores in zip(results, wanted, strict=True):
        assert all(torch.equal(one, scores) for one in found)


def test_a_plain_forward_and_training_in_another_thread() -> None:
    """What one thread explains, another uses as if nothing were there."""
    model, inputs = build("gpt2")
    wanted, logits = whyformer.explain(model, inputs, TA).scores, call(model, inputs)

    def gradient() -> Tensor:
        output = model(**inputs).logits
        return torch.autograd.grad(output.sum(), model.score.weight)[0]

    plain = gradient()
    results = together(
        lambda: whyformer.explain(model, inputs, TA).scores, lambda: call(model, inputs), gradient, repeats=5
    )
    assert all(torch.equal(one, wanted) for one in results[0])
    assert all(torch.equal(one, logits) for one in results[1])
    assert all(torch.equal(one, plain) for one in results[2])


def test_an_explanation_inside_an_explanation() -> None:
    """A target that explains something itself does not see the outer run."""
    model, inputs = build("bert")
    inner: list[Tensor] = []

    def target(logits: Tensor) -> Tensor:
        inner.append(whyformer.explain(model, inputs, TA, 0).scores)
        return logits[:, 0]

    outer = whyformer.explain(model, inputs, TA, target).scores
    wanted = whyformer.explain(model, inputs, TA, 0).scores
    assert torch.equal(outer, wanted)
    assert all(torch.equal(i, wanted) for i in inner)
