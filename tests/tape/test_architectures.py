"""Gradients computed by walking a tape equal autograd, for every family of architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import Architecture, listed
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.walking import GRADIENT, walk_back

# architectures with different operations; -m whole runs all
DEFAULT_FAMILIES = {
    "image classification/vit", "image classification/swinv2", "image classification/cvt", "image classification/levit",
    "sequence classification/bert", "sequence classification/deberta-v2", "sequence classification/xlnet",
    "sequence classification/longformer", "causal language model/mamba2", "causal language model/gpt2",
    "sequence classification/bloom", "sequence classification/gemma2", "sequence classification/mixtral", "causal language model/llama4",
    "sequence to sequence/t5", "sequence to sequence/bart", "two towers/clip", "audio classification/wav2vec2",
    "object detection/detr", "vision and language/llava", "video classification/timesformer",
}  # fmt: skip
# the tape differentiates the forward pass; autograd uses the model's own backward
OTHER_BACKWARD = {
    **dict.fromkeys(("hrm_text", "blt"), "runs a part under no_grad"),
    "yoso": "has a backward function of its own",
    "reformer": "has a backward function of its own, for training only",
    **dict.fromkeys(
        ["d_fine", "dab-detr", "deimv2", "lw_detr", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr", "rt_detr_v2"],
        "detaches the boxes that it refines",
    ),
    **dict.fromkeys(("chameleon", "emu3"), "turns pictures into whole numbers"),
}
NO_AUTOGRAD = {"rwkv": "autograd refuses its writes in place", "xlstm": "the same", "git": "the same", "ctrl": "the same"}


def output_of(output: Any) -> Tensor:
    for name in ("logits", "logits_per_image", "logits_per_video", "pred_logits", "last_hidden_state", "start_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    assert isinstance(output, Tensor)
    return output


def assert_gradient_equals_autograd(architecture: Architecture) -> None:
    """Compare in float64, or in float32 if a kernel does not support float64."""
    model, inputs = architecture.build()
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype).eval().requires_grad_(False)
        inputs_ = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        try:
            with torch.no_grad():
                expected_output = output_of(model(**inputs_))
        except RuntimeError:
            continue
        break
    else:
        pytest.fail("runs in neither dtype")
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    tape, raw = record(model, **inputs_)
    output = output_of(raw)
    assert torch.allclose(output, expected_output, rtol=tolerance, atol=tolerance * float(expected_output.nan_to_num().abs().max()), equal_nan=True)
    end, roots = tape.number(output), roots_of(tape)
    seed = torch.zeros_like(output)
    seed[(slice(None), *[0] * (output.dim() - 2), -1)] = 1
    gradients = walk_back(read_program(tape, roots, end), tape, [(GRADIENT, {end: seed})], observed=roots)[0]
    assert all(gradients[n].shape == tape.shapes[n] for n in roots)
    if architecture.family in OTHER_BACKWARD:
        return
    expected = autograd_gradients(model, inputs_, tape, roots, seed)
    for n in roots:
        size = float(expected[n].nan_to_num().abs().max())
        assert torch.allclose(gradients[n], expected[n], rtol=0, atol=tolerance * size + 1e-30, equal_nan=True), tape.maker.get(n)


def roots_of(tape: Any) -> list[int]:
    """Floating-point inputs, or else the embeddings of ids."""
    inputs = sorted(n for n in tape.inputs if tape.floating(n))
    embeddings = [c.results[0] for c in tape.calls if c.name == "embedding"]
    return inputs or embeddings


def autograd_gradients(model: Any, inputs: dict[str, Any], tape: Any, roots: list[int], seed: Tensor) -> dict[int, Tensor]:
    """Gradient at the roots, which are either inputs, or embeddings that are replaced by leaves."""
    if all(n in tape.inputs for n in roots):
        leaves = {id(v): v.clone().requires_grad_() for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()}
        names = {k: leaves.get(id(v), v) for k, v in inputs.items()}
        output = output_of(model(**names))
        order = sorted(tape.number(v) for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point())
        by_number = {tape.number(v): leaves[id(v)] for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()}
        gradients = torch.autograd.grad(output, [by_number[n] for n in order], seed, allow_unused=True)
        return {n: torch.zeros_like(by_number[n]) if g is None else g for n, g in zip(order, gradients, strict=True)}
    leaves_of: dict[int, Tensor] = {}
    original = torch.nn.functional.embedding
    numbers = iter(roots)

    def leaf_embedding(*args: Any, **kwargs: Any) -> Tensor:
        leaf = original(*args, **kwargs).detach().clone().requires_grad_()
        leaves_of[next(numbers)] = leaf
        return leaf

    torch.nn.functional.embedding = leaf_embedding
    try:
        output = output_of(model(**inputs))
    finally:
        torch.nn.functional.embedding = original
    gradients = torch.autograd.grad(output, [leaves_of[n] for n in roots], seed, allow_unused=True)
    return {n: torch.zeros_like(leaves_of[n]) if g is None else g for n, g in zip(roots, gradients, strict=True)}


def cases() -> list[Any]:
    parameters = []
    for architecture in listed():
        if architecture.family in NO_AUTOGRAD:
            continue
        parameters.append(pytest.param(architecture, id=architecture.name, marks=() if architecture.name in DEFAULT_FAMILIES else pytest.mark.whole))
    return parameters


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("architecture", cases())
def test_gradient_equals_autograd(architecture: Architecture) -> None:
    assert_gradient_equals_autograd(architecture)


def test_default_families_are_known_architectures() -> None:
    assert {a.name for a in listed()} >= DEFAULT_FAMILIES
