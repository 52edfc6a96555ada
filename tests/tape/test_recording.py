"""Recorded passes: same output, same values in a replay, and no side effects."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from whyformer.errors import ModelError
from whyformer.tape.program import read_program
from whyformer.tape.recording import record, record_call
from whyformer.tape.walking import GRADIENT, replay, walk_back
from zoo import ZOO, to


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, dict) else ((inputs,), {})


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(output, ∂⟨seed, output⟩/∂x) by a recorded pass."""
    tape, out = record(function, x)
    root, end = tape.number(x), tape.number(out)
    seed = torch.ones_like(out) if seed is None else seed
    program = read_program(tape, [root], end)
    return out, walk_back(program, tape, [(GRADIENT, {end: seed})], observed=[root])[0][root]


def autograd_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]


# -- outputs and values ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "bert", "gpt2", "llama"])
def test_output_equals_model_and_values_can_be_recomputed(name: str) -> None:
    model, inputs = ZOO[name]()
    args, kwargs = arguments_of(inputs)
    with torch.no_grad():
        plain = logits_of(model(*args, **kwargs))
    tape, output = record(model, *args, **kwargs)
    assert torch.equal(logits_of(output), plain)
    end = tape.number(logits_of(output))
    first = next(c.results[0] for c in tape.calls if c.name in ("embedding", "convolution"))
    (repeated,) = replay(tape, {first: tape[first].clone()}, [end])
    assert torch.allclose(repeated, plain, rtol=1e-4, atol=1e-5)
    for n in range(len(tape)):
        if tape.maker.get(n) is not None and not tape.maker[n].random:
            assert tape[n].shape == tape.shapes[n]
            assert tape[n].dtype == tape.dtypes[n]


def test_half_precision_output_equals_model() -> None:
    model, inputs = ZOO["hf_vit"]()
    model, inputs = model.bfloat16(), to(inputs, torch.bfloat16)
    with torch.no_grad():
        plain = model(inputs).logits
    assert torch.equal(record(model, inputs)[1].logits, plain)


def test_fused_attention_is_recorded_as_its_decomposition() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}):
        tape, out = record(lambda q, options=options: F.scaled_dot_product_attention(q, k, v, **options), q)
        (maps,) = [c.results[0] for c in tape.calls if c.name in ("_softmax", "_safe_softmax")]
        assert torch.allclose(tape[maps] @ v, out, atol=1e-12)
        result, expected = gradient(lambda q, options=options: F.scaled_dot_product_attention(q, k, v, **options), q), None
        expected = autograd_gradient(lambda q, options=options: F.scaled_dot_product_attention(q, k, v, **options), q)
        assert torch.allclose(result[1], expected[1].nan_to_num(), atol=1e-12)


def test_gradient_of_grouped_query_attention() -> None:
    k, v = (torch.randn(2, 2, 5, 8, dtype=torch.float64) for _ in range(2))
    function = lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    q = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    assert torch.allclose(gradient(function, q)[1], autograd_gradient(function, q)[1], atol=1e-12)


def test_tape_stores_less_than_half_of_all_values() -> None:
    model, inputs = ZOO["bert"]()
    tape, _ = record(model, **inputs)
    full, _ = record_call(model, (), inputs, stored=frozenset(range(len(tape))))
    assert len(full) == len(tape)
    held, full_held = ([n for n in range(len(t)) if t.holds(n) and n not in t.leaves] for t in (tape, full))
    assert 2 * sum(tape.shapes[n].numel() for n in held) < sum(tape.shapes[n].numel() for n in full_held)


# -- in-place writes -------------------------------------------------------------------------------------------------
def random_program(choices: random.Random) -> Callable[[Tensor], Tensor]:
    """A random function of ``[4, 3]`` with views and in-place writes."""
    steps = [(choices.randrange(14), choices.randrange(1 << 30)) for _ in range(choices.randrange(4, 14))]

    def fitted(value: Tensor, like: Tensor) -> Tensor:
        return value if value.shape == like.shape else value.sum() * 0.1

    def function(x: Tensor) -> Tensor:
        live = [x * 1.5, x.sin()]
        for kind, seed in steps:
            draw = random.Random(seed)
            t, u = draw.choice(live), draw.choice(live)
            many = t.dim() > 0 and t.shape[0] > 1
            if kind == 0:
                live.append(t + fitted(u, t))
            elif kind == 1:
                live.append(t * fitted(u, t).tanh())
            elif kind == 2 and t.dim() > 1:
                live.append(t.transpose(0, 1))
            elif kind == 3:
                live.append(t.reshape(-1))
            elif kind == 4 and many:
                live.append(t[: t.shape[0] // 2])
            elif kind == 5 and many:
                live.append(t[1:])
            elif kind == 6:
                t.mul_(1.1)
            elif kind == 7:
                t.add_(1.0 if u is t else fitted(u, t) * 0.5)
            elif kind == 8:
                part = t[..., :1]
                part.copy_(fitted(u, part).sin())
            elif kind == 9:
                live.append(t.clone())
            elif kind == 10:
                live.append(t.sigmoid())
            elif kind == 11 and many:
                live.extend(t.chunk(2, 0))
            elif kind == 12:
                t[0] = fitted(u, t[0]) * 0.3
            elif kind == 13 and t.dim() == 1:
                t.unsqueeze(0).tanh_()
        return torch.stack([v.tanh().sum() for v in live]).sum()

    return function


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 30))
def test_random_views_and_in_place_writes(seed: int) -> None:
    function = random_program(random.Random(seed))
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    try:
        out, expected = autograd_gradient(function, x)
    except RuntimeError:  # autograd refuses some in-place writes; the tape supports them, and its replay must equal the pass
        out = expected = None
    tape, value = record(function, x)
    root, end = tape.number(x), tape.number(value)
    (replayed,) = replay(tape, {root: x.clone()}, [end])
    assert torch.allclose(replayed, value, atol=1e-12)
    result = walk_back(read_program(tape, [root], end), tape, [(GRADIENT, {end: torch.ones_like(value)})], observed=[root])[0][root]
    assert result.isfinite().all()
    if expected is not None:
        assert torch.allclose(value, out)
        assert torch.allclose(result, expected, atol=1e-9)


def test_signature_does_not_depend_on_held_values() -> None:
    model, inputs = ZOO["gpt2"]()
    first, _ = record(model, **inputs)
    all_held, _ = record_call(model, (), inputs, stored=frozenset(range(len(first))))
    none_held, _ = record_call(model, (), inputs, stored=frozenset())
    assert first.signature == all_held.signature == none_held.signature


# -- side effects ----------------------------------------------------------------------------------------------------
class ModelWithWrites(nn.Module):
    """Writes to its buffer, its input and a cache argument."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.fails = fails

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        y = self.layer(x)
        self.total += y.sum(0)
        x.mul_(0)
        cache[0] = y[0]
        if self.fails:
            raise ValueError("after the writes")
        return y + self.total + cache


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_inputs_and_caches_are_restored(fails: bool) -> None:
    model, x, cache = ModelWithWrites(fails), torch.randn(2, 3), torch.randn(2, 3)
    state, original_x, original_cache = model.total.clone(), x.clone(), cache.clone()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises(ValueError, match="after the writes"):
            record(model, x, cache)
    else:
        tape, _ = record(model, x, cache)
        assert torch.equal(tape[tape.number(x)], original_x)
    assert torch.equal(model.total, state)
    assert torch.equal(x, original_x)
    assert torch.equal(cache, original_cache)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not model._forward_hooks
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
def test_tape_is_freed_when_unreferenced(name: str) -> None:
    """Without garbage collection: no reference cycle may keep the values of a pass."""
    model, inputs = ZOO[name]()
    args, kwargs = arguments_of(inputs)
    gc.collect()
    gc.disable()
    try:
        tape, output = record(model, *args, **kwargs)
        held = [weakref.ref(tape[n]) for n in range(len(tape)) if n not in tape.leaves and tape.holds(n)]
        end = tape.number(logits_of(output))
        root = next(iter(c.results[0] for c in tape.calls if tape.floating(c.results[0])))
        walk_back(read_program(tape, [root], end), tape, [(GRADIENT, {end: torch.ones_like(logits_of(output))})], observed=[root])
        assert len(held) > 5
        del tape, output
        assert not [r for r in held if r() is not None]
    finally:
        gc.enable()


def test_threads_and_nested_passes_are_independent() -> None:
    model, inputs = ZOO["bert"]()
    expected = record(model, **inputs)[0].signature
    signatures: list[int] = []

    def work() -> None:
        signatures.extend(record(model, **inputs)[0].signature for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert signatures == [expected] * 9
    assert torch.backends.mha.get_fastpath_enabled()

    def outer(x: Tensor) -> Tensor:
        return record(torch.tanh, x * 2)[1] + x

    x = torch.randn(3, dtype=torch.float64)
    assert torch.allclose(gradient(outer, x)[1], 1 + 2 / (2 * x).cosh() ** 2)


# -- scripts, transforms and other execution modes -------------------------------------------------------------------
class DoubleWithWrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        return flows[0] * 100  # ignored: the forward is explained


def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x @ x.t()).softmax(-1) @ x


def with_hook(x: Tensor) -> Tensor:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
        layer.bias.zero_()
    layer.register_forward_hook(lambda module, args, output: output * 3)
    return layer(x)


VARIANTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "script": (torch.jit.script(scripted), scripted) if not hasattr(torch, "_no_jit") else (scripted, scripted),
    "traced": (torch.jit.trace(scripted, torch.randn(4, 3, dtype=torch.float64)), scripted),
    "checkpoint": (lambda x: checkpoint(scripted, x, use_reentrant=False), scripted),
    "checkpoint, reentrant": (lambda x: checkpoint(scripted, x, use_reentrant=True), scripted),
    "autograd function": (lambda x: DoubleWithWrongBackward.apply(x).sin(), lambda x: (2 * x).sin()),
    "a user's hook": (with_hook, lambda x: x * 3),
    "detach": (lambda x: x.detach() * x, lambda x: x * x),
    "no_grad": (lambda x: torch.no_grad()(torch.tanh)(x), torch.tanh),
    "inference mode": (lambda x: torch.inference_mode()(lambda y: F.linear(y, torch.eye(3, dtype=y.dtype)))(x), lambda x: x @ torch.eye(3, dtype=x.dtype)),
    "compiled": (torch.compile(scripted, backend="eager"), scripted),
    "vmap": (torch.vmap(lambda row: row.softmax(-1).square()), lambda x: x.softmax(-1).square()),
    "a gradient inside": (lambda x: torch.func.grad(lambda y: y.pow(3).sum())(x), lambda x: 3 * x * x),
    "complex numbers": (lambda x: torch.fft.fft(x).abs().square(), lambda x: torch.fft.fft(x).abs().square()),
    "sorted": (lambda x: x.sort(-1).values.cumsum(-1), lambda x: x.sort(-1).values.cumsum(-1)),
    "strided": (lambda x: x.as_strided((3, 2), (2, 1), 1).exp(), lambda x: x.as_strided((3, 2), (2, 1), 1).exp()),
    "unfold": (lambda x: x.unfold(1, 2, 1).tanh(), lambda x: x.unfold(1, 2, 1).tanh()),
    "foreach": (lambda x: torch.stack(torch._foreach_mul([x, x * 2], 3.0)).sum(0), lambda x: 9 * x),
    "float32 inside": (lambda x: x.float().double() * 2, lambda x: x * 2),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_execution_modes_are_recorded(variant: str) -> None:
    function, plain = VARIANTS[variant]
    x = torch.randn(4, 3, dtype=torch.float64)
    out, result = gradient(function, x)
    expected, expected_gradient = autograd_gradient(plain, x)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(result, expected_gradient, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_gradient_equals_sdpa() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    tape, out = record(lambda q: flex_attention(q, k, v), q)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(out, plain, atol=1e-6)
    end, root = tape.number(out), tape.number(q)
    result = walk_back(read_program(tape, [root], end), tape, [(GRADIENT, {end: torch.ones_like(out)})], observed=[root])[0][root]
    assert torch.allclose(result, autograd_gradient(lambda q: F.scaled_dot_product_attention(q, k, v), q)[1], atol=1e-6)


def test_gradient_with_autocast_inside_and_around() -> None:
    layer = nn.Linear(3, 3)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).float() + x

    x = torch.randn(4, 3)
    _, result = gradient(function, x)
    assert torch.allclose(result, autograd_gradient(function, x)[1], atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(gradient(function, x)[1], result)


def test_random_operation_on_path_of_relevance_is_refused() -> None:
    with pytest.raises(ModelError, match="random"):
        gradient(lambda x: torch.bernoulli(x.sigmoid()) + F.rrelu(x, training=True), torch.randn(4, 3))
    # noise that does not depend on the input is a constant
    assert torch.equal(gradient(lambda x: x * 2 + torch.randn(4, 3), torch.randn(4, 3))[1], torch.full((4, 3), 2.0))


def test_operation_without_derivative_is_named_in_error() -> None:
    with torch.library._scoped_library("tape_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
        with pytest.raises(ModelError, match="twice"):
            gradient(lambda x: torch.ops.tape_tests.twice(x) + 1, torch.randn(3))


@torch.library.custom_op("tape_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


def test_custom_op_without_autograd_formula_is_named_in_error() -> None:
    with pytest.raises(ModelError, match=r"thrice.*register_autograd"):
        gradient(lambda x: thrice(x) + 1, torch.randn(3))


# -- interventions ---------------------------------------------------------------------------------------------------
def test_intervention_replaces_value_during_pass() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    tape, plain = record(model, x)
    hidden = next(c.results[0] for c in tape.calls if c.name == "relu")
    mask = torch.tensor([1.0, 0, 0, 0])
    _, changed = record_call(model, [x], change={hidden: lambda h: h * mask})
    with torch.no_grad():
        expected = model[2](model[1](model[0](x)) * mask)
    assert torch.allclose(changed, expected)
    assert torch.allclose(replay(tape, {hidden: tape[hidden] * mask}, [tape.number(plain)])[0], expected)


def test_batched_interventions_from_one_recording() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    tape, plain = record(model, x)
    hidden = next(c.results[0] for c in tape.calls if c.name == "relu")
    masks = 1 - torch.eye(4)
    value, end = tape[hidden], tape.number(plain)
    result = torch.vmap(lambda mask: replay(tape, {hidden: value * mask}, [end])[0])(masks)
    with torch.no_grad():
        expected = torch.stack([model[2](value * mask) for mask in masks])
    assert torch.allclose(result, expected, atol=1e-6)


def test_replay_with_data_dependent_control_flow_is_refused() -> None:
    x = torch.tensor([1.0, 2.0])
    tape, out = record(lambda x: x * 2 if x.sum() > 0 else x * 3, x)
    with pytest.raises(ModelError, match="decides"):
        replay(tape, {tape.number(x): -x}, [tape.number(out)])


# -- names -----------------------------------------------------------------------------------------------------------
def test_names_of_modules_and_their_outputs() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2)), torch.randn(2, 3)
    tape, out = record_call(model, [x], names=True)
    assert [tape.modules[c.number] for c in tape.calls if c.name in ("addmm", "relu")] == ["0", "1.0", "1.1", "2"]
    assert tape.outputs["2"] == tape.outputs[""] == [(tape.number(out),)]
    assert torch.equal(tape[tape.outputs["1"][0][0]], model[1](model[0](x)))


def test_replaced_value_is_stored_on_tape() -> None:
    """Although the value would be cheap to recompute."""
    x, replacement = torch.randn(2, 3), torch.randn(2, 3)
    tape, _ = record(lambda x: (x * 2).tanh(), x)
    (product,) = (c.results[0] for c in tape.calls if c.name == "mul")
    changed, output = record_call(lambda x: (x * 2).tanh(), (x,), change={product: lambda _: replacement})
    assert torch.equal(changed[product], replacement)
    assert torch.equal(output, replacement.tanh())


@pytest.mark.parametrize("samples", [1, 2])
def test_batch_norm_gradient_with_mixed_memory_layouts(samples: int) -> None:
    """torch's batch norm backward is wrong if gradient and input have different memory layouts, also in plain autograd."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 8, 3, padding=1).double(), nn.BatchNorm2d(8).double().eval()
    norm.running_var.uniform_(0.5, 2)
    head = nn.Linear(8, 4).double()

    def model(x: Tensor, norm: Callable[[Tensor], Tensor] = norm) -> Tensor:
        tokens = norm(convolution(x)).flatten(2).transpose(1, 2)
        return (tokens * head.weight[0]).tanh().mean(1) @ head.weight.T

    def reference_norm(x: Tensor) -> Tensor:
        return (x - norm.running_mean[:, None, None]) * (norm.running_var[:, None, None] + norm.eps).rsqrt()

    pixels = torch.randn(samples, 3, 4, 4, dtype=torch.float64)
    leaf = pixels.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf, reference_norm)[:, 1].sum(), leaf)
    tape, output = record(model, pixels)
    root, end = tape.number(pixels), tape.number(output)
    seed = torch.zeros_like(output)
    seed[:, 1] = 1
    (result,) = walk_back(read_program(tape, [root], end), tape, [(GRADIENT, {end: seed})], observed=[root])
    torch.testing.assert_close(result[root], expected)
