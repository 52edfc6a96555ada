"""Norms, softmaxes, activations and layers are recognised as units in any implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from forms.catalogue import all_forms
from forms.form import Form
from whyformer.tape.program import Program, read_program
from whyformer.tape.recording import record
from whyformer.tape.values import Tape
from whyformer.tape.walking import Composite, Rule, walk_back

KINDS = (
    "LayerNorm", "RMSNorm", "other norms", "softmax", "causal softmax", "activations", "linear", "linear modules",
)  # fmt: skip

REASONS = {
    "parts": "several units, one for each part of the features or of the rows",
    "fused": "one call that computes a product of two halves, or of three operands",
}
UNSUPPORTED = {
    "other norms / groups of channels / pre-norm, vectors, inline / by chunk": "parts",
    "other norms / groups of channels / pre-norm, vectors, inline / stacked groups": "parts",
    "linear / pre-norm, vectors / addbmm of one": "parts",
    "linear / pre-norm, vectors / multi_dot": "parts",
    "linear / pre-norm, vectors / bilinear with one": "fused",
    "linear / pre-norm, vectors / output halves": "parts",
    "linear / pre-norm, vectors / tensor parallel": "parts",
    "linear / pre-norm, vectors / token by token": "parts",
    "linear / pre-norm, vectors / sample by sample": "parts",
    "linear / pre-norm, vectors / vector by vector": "parts",
    "linear / pre-norm, vectors / written into rows": "parts",
}  # fmt: skip

# piecewise linear kinds, which have the rules of activations
EQUIVALENT_KINDS = {"rectifier": "activation", "clip": "activation", "selection": "activation"}
IGNORED_KINDS = ("view", "shift", "scale")

Kinds = Counter[tuple[str, int]]


# -- reading -------------------------------------------------------------------------------------------------------------
def read(model: Callable[..., Any], inputs: Any, *more: int) -> tuple[Tape, Program]:
    """Read the program from floating-point inputs, or else from the first embedding, to the output."""
    tape, output = record(model, **inputs) if isinstance(inputs, dict) else record(model, inputs)
    tensor = output if isinstance(output, Tensor) else output["logits"] if isinstance(output, dict) else output[0]
    floating = [n for n in sorted(tape.inputs) if tape.floating(n)]
    roots = floating or [next(c.results[0] for c in tape.calls if c.name == "embedding")]
    return tape, read_program(tape, [*roots, *more], tape.number(tensor))


def kinds(program: Program) -> Kinds:
    units = [u for u in program.units if u.kind not in IGNORED_KINDS]
    return Counter((EQUIVALENT_KINDS.get(u.kind, u.kind), len(set(u.entries))) for u in units)


def decomposed_kinds(program: Program) -> Counter[str]:
    return Counter(u.kind for u in program.units if not u.places)


@cache
def groups() -> dict[Any, list[Form]]:
    """For each function, its forms in the first model."""
    forms_by_group: dict[Any, list[Form]] = {}
    bases: dict[Any, str] = {}
    for form in all_forms():
        if form.kind in KINDS and bases.setdefault(form.group[:2], form.base) == form.base:
            forms_by_group.setdefault(form.group, []).append(form)
    return forms_by_group


def kinds_of(form: Form) -> Kinds:
    return kinds(read(form.build(), form.inputs())[1])


# -- equivalent implementations --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", groups(), ids=" / ".join)
def test_equivalent_forms_have_the_same_units(group: Any) -> None:
    first, *others = [form for form in groups()[group] if not form.regroups]
    expected = kinds_of(first)
    differ = {form.id for form in others if kinds_of(form) != expected}
    assert differ == {form.id for form in others if form.id in UNSUPPORTED}


def test_unsupported_forms_exist_and_have_reasons() -> None:
    assert set(UNSUPPORTED) <= {form.id for forms in groups().values() for form in forms}
    assert set(UNSUPPORTED.values()) == set(REASONS)


BIASES = {
    "F.linear + b", "x @ W.T + b", "x @ W.t()", "matmul, transpose", "method matmul, mT", "W @ x", "W @ x, column of biases", "W @ each vector", "each vector @ W", "einsum bnd,ed",
    "einsum, weight first", "tensordot", "inner", "mm of flat rows", "bmm, expanded", "bmm, repeated", "baddbmm",
    "product and sum", "vecdot", "weight.data", "weight norm", "multiplier at the output",
}  # fmt: skip


LINEAR = next(forms for group, forms in groups().items() if group[0] == "linear")


@pytest.mark.parametrize("form", [form for form in LINEAR if form.way in BIASES], ids=lambda form: form.way)
def test_bias_belongs_to_its_layer(form: Form) -> None:
    """A bias added in any shape is not a shift unit."""
    shifts = [sum(u.kind == "shift" for u in read(f.build(), f.inputs())[1].units) for f in (LINEAR[0], form)]
    assert shifts[0] == shifts[1]


class Positioned(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.table


@pytest.mark.parametrize(
    ("shape", "units"),
    [((4,), ["layer"]), ((1, 1, 4), ["layer"]), ((5, 4), ["layer", "shift"]), ((5, 1), ["layer", "shift"])],
    ids=str,
)
def test_position_table_is_not_a_bias(shape: tuple[int, ...], units: list[str]) -> None:
    _, program = read(Positioned(*shape), torch.randn(2, 5, 6))
    assert [u.kind for u in program.units if u.kind != "view"] == units


# -- norms -----------------------------------------------------------------------------------------------------------------
HELD_STATISTICS = Composite("held", {"norm": Rule(constant=("statistics",))})


@pytest.mark.parametrize("form", [f for g, forms in groups().items() if g[0] == "RMSNorm" for f in forms], ids=lambda f: f.id)
def test_norm_with_constant_statistics_is_linear(form: Form) -> None:
    """Σ x ⊙ m_x = Σ y ⊙ m_y for norms without bias that consist of several calls."""
    tape, program = read(form.build(), form.inputs())
    for unit in program.units:
        if unit.kind == "norm" and not unit.places:
            unit_program = read_program(tape, unit.entries, unit.exit)
            seed = torch.randn_like(tape[unit.exit])
            (flows,) = walk_back(unit_program, tape, [(HELD_STATISTICS, {unit.exit: seed})], observed=unit.entries)
            x, y = tape[unit.entries[0]], tape[unit.exit]
            torch.testing.assert_close((x * flows[unit.entries[0]]).sum(), (y * seed).sum())


class DecomposedNorms(nn.Module):
    """A decomposed LayerNorm and RMSNorm."""

    def __init__(self, size: int, fresh: bool) -> None:
        super().__init__()
        values = torch.ones(size), torch.zeros(size), torch.ones(size)
        self.weight, self.bias, self.scale = (nn.Parameter(v if fresh else torch.randn(size)) for v in values)

    def forward(self, x: Tensor) -> Tensor:
        c = x - x.mean(-1, keepdim=True)
        x = c / (c.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return self.scale * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def structure(program: Program) -> list[tuple[Any, ...]]:
    return [(u.kind, u.entries, u.exits, u.calls, u.axes) for u in program.units]


def test_unit_weights_are_read_as_trained_weights() -> None:
    x = torch.randn(2, 5, 8)
    fresh, trained = (read(DecomposedNorms(8, fresh), x)[1] for fresh in (True, False))
    assert structure(fresh) == structure(trained)
    assert kinds(fresh) == {("norm", 1): 2}
    assert not any(u.kind in ("scale", "shift") for u in fresh.units)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_units_of_float64(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 8)
    assert kinds(read(DecomposedNorms(8, True).to(dtype), x.to(dtype))[1]) == kinds(read(DecomposedNorms(8, True).double(), x.double())[1])


@pytest.mark.parametrize("x", [torch.zeros(2, 5, 8), torch.ones(2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 1, 8)], ids=lambda x: str(x.shape))
def test_units_do_not_depend_on_values_or_batch_size(x: Tensor) -> None:
    assert kinds(read(DecomposedNorms(8, False), x)[1]) == {("norm", 1): 2}


def test_requested_value_splits_a_region() -> None:
    model, x = DecomposedNorms(8, False), torch.randn(2, 5, 8)
    tape, program = read(model, x)
    first = next(u for u in program.units if u.kind == "norm")
    inner = next(tape.calls[n].results[0] for n in first.calls if tape.calls[n].name == "sqrt")
    split = read(model, x, inner)[1]
    assert decomposed_kinds(program) == {"norm": 2}
    assert decomposed_kinds(split) == {"norm": 1}
    assert inner in [u.exit for u in split.units]


def test_value_with_other_readers_is_not_part_of_region() -> None:
    def model(x: Tensor) -> Tensor:
        e = x.exp()
        return (e / e.sum(-1, keepdim=True)) @ e.mT

    assert not decomposed_kinds(read(model, torch.randn(2, 5, 5))[1])


def test_causal_mask_is_not_an_activation() -> None:
    x = torch.randn(2, 3, 5, 4)
    assert not decomposed_kinds(read(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), x)[1])


@pytest.mark.parametrize(("constant", "kind"), [(torch.zeros(1), "activation"), (torch.nn.Parameter(torch.zeros(1)), "softmax")])
def test_softmax_of_one_number_and_a_constant_is_an_activation_but_not_with_a_sink(constant: Tensor, kind: str) -> None:
    """With a single key, an attention with a learned sink computes the same as a sigmoid."""

    def probability(x: Tensor) -> Tensor:
        other = torch.zeros_like(x) if kind == "activation" else constant.expand(x.shape)
        return torch.cat([x, other], -1).softmax(-1)[..., :1]

    _, program = read(probability, torch.randn(2, 3, 1))
    assert {"activation", "softmax"} & {u.kind for u in program.units} == {kind}


def test_bias_outside_the_exponential_is_a_shift_of_the_softmax() -> None:
    """exp(x) exp(b) / Σ exp(x) exp(b) is a softmax of x + b, which the model never computes; x + b and a mask are not part of a softmax."""
    bias, mask = nn.Parameter(torch.randn(6)), torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
    functions: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: F.normalize(x.exp() * bias.exp(), p=1, dim=-1), "shifted softmax"),
        (lambda x: (e := (x + bias).exp()) / e.sum(-1, keepdim=True), "softmax"),
        (lambda x: (x + bias).softmax(-1).masked_fill(mask, 0), "softmax"),
    ]
    for function, kind in functions:
        _, program = read(function, torch.randn(4, 5, 6))
        assert [u.kind for u in program.units if "softmax" in u.kind] == [kind]
    for function in (lambda x: (x + x.square()).softmax(-1), lambda x: (e := (x + x.abs()).exp()) / e.sum(-1, keepdim=True)):
        _, program = read(function, torch.randn(4, 5, 6))
        assert "shifted softmax" not in {u.kind for u in program.units}


def test_similar_formulas_are_not_norms() -> None:
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * x.square().mean(-1, keepdim=True).sqrt(),
        lambda x: x / (x.abs().mean(-1, keepdim=True) + 1e-5),
        lambda x: (x - x.mean(0, keepdim=True)) / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
        lambda x: x.exp() / (x.square().sum(-1, keepdim=True) + 1),
    ]
    for function in functions:
        assert not {"norm", "softmax"} & set(decomposed_kinds(read(function, torch.randn(4, 5, 6))[1]))


# -- shapes and axes ---------------------------------------------------------------------------------------------------------
def softmaxes(axis: int) -> list[Callable[[Tensor], Tensor]]:
    return [
        lambda x: x.exp() / x.exp().sum(axis, keepdim=True),
        lambda x: (e := (x - x.amax(axis, keepdim=True)).exp()) / e.sum(axis, keepdim=True),
        lambda x: (x - x.logsumexp(axis, keepdim=True)).exp(),
        lambda x: x.log_softmax(axis).exp(),
        lambda x: (e := x.exp()) / (1 + e.sum(axis, keepdim=True)),
    ]


def log_softmaxes(axis: int) -> list[Callable[[Tensor], Tensor]]:
    return [
        lambda x: x - x.logsumexp(axis, keepdim=True),
        lambda x: x.softmax(axis).log(),
        lambda x: (c := x - x.amax(axis, keepdim=True)) - c.exp().sum(axis, keepdim=True).log(),
    ]


def norms(axis: int) -> list[Callable[[Tensor], Tensor]]:
    return [
        lambda x: (x - x.mean(axis, keepdim=True)) / (x.std(axis, keepdim=True) + 1e-6),
        lambda x: (x - x.mean(axis, keepdim=True)) * (x.var(axis, keepdim=True, correction=0) + 1e-5).rsqrt(),
        lambda x: x / (x.square().mean(axis, keepdim=True) + 1e-5).sqrt(),
        lambda x: F.normalize(x, dim=axis),
    ]


FUNCTIONS = {"softmax": softmaxes, "log softmax": log_softmaxes, "norm": norms}
AXES = [(shape, axis) for shape in ((5, 3), (4, 3, 6), (3, 5, 4, 6)) for axis in range(-len(shape), 0)]


@pytest.mark.parametrize(("shape", "axis"), AXES)
@pytest.mark.parametrize(("kind", "way"), [(kind, i) for kind, ways in FUNCTIONS.items() for i in range(len(ways(-1)))])
def test_any_axis(kind: str, way: int, shape: tuple[int, ...], axis: int) -> None:
    (unit,) = read(FUNCTIONS[kind](axis)[way], torch.randn(shape))[1].units
    assert (unit.kind, unit.axes) == (kind, (axis,))


# -- models --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "expected"), [("gpt2", {"activation": 3}), ("llama", {"norm": 7}), ("t5", {"norm": 10})])
def test_units_of_transformers_models(name: str, expected: dict[str, int]) -> None:
    """Each decomposed norm and activation is one unit; for T5, those after the encoder's embedding."""
    model, inputs = getattr(zoo, name)()
    if name == "t5":
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    _, program = read(model, inputs)
    assert decomposed_kinds(program) == expected
    assert not any(u.kind in ("statistic", "other") for u in program.units)


def test_quick_gelu_of_clip_is_one_unit() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, hidden_act="quick_gelu")
    model = transformers.CLIPVisionModel(config).eval()
    _, program = read(lambda pixels: model(pixels).last_hidden_state, torch.randn(2, 3, 16, 16))
    assert decomposed_kinds(program) == {"activation": 2}


def test_norms_of_gemma_are_units() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    config = transformers.Gemma2Config(**sizes, num_key_value_heads=1, vocab_size=30, pad_token_id=0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    _, program = read(lambda ids: model(input_ids=ids).logits, torch.randint(1, 30, (2, 6)))
    assert decomposed_kinds(program) == {"norm": 9}
