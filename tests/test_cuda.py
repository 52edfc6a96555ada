"""Scores on a GPU equal those on the CPU, and the model stays on its device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whyformer
from architectures import listed
from coverage_page import SHOWN
from outcomes import explain
from snapshot import assert_unchanged, snapshot
from test_contracts import PAIRS, REQUIRED, TARGETS, close, few
from test_coverage import FAST
from whyformer import targets
from whyformer.datasets.scenes import digit_scenes
from whyformer.errors import WhyformerError
from whyformer.models.loading import load
from zoo import LANGUAGE, build, to

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)
# emitted by the first backward pass of a process, which autograd runs in its own thread
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
EVERY = {a.name: a for a in listed()}


def moved(inputs: Any) -> Any:
    """Move tensors, also inside mappings, to the GPU."""
    if isinstance(inputs, Tensor):
        return inputs.cuda()
    return {name: moved(value) for name, value in inputs.items()} if isinstance(inputs, dict) else inputs


SINGLE = ("llama", "modernbert_mean", "modernbert_cls")
"""Models whose rotary angles are computed in float32 and differ in the last bits between devices."""


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cuda()


@pytest.mark.parametrize(("method", "name"), PAIRS + REQUIRED)
def test_scores_on_gpu_equal_scores_on_cpu(method: str, name: str) -> None:
    """In float64, with inputs on the CPU and two samples in one batch."""
    model, inputs = build(name)
    expected = whyformer.explain(model, inputs, method=method, target=TARGETS, **few(method))
    on_gpu = twin(model)
    before = snapshot(on_gpu)
    state = torch.cuda.get_rng_state()
    actual = whyformer.explain(on_gpu, inputs, method=method, target=TARGETS, **few(method))
    assert_unchanged(on_gpu, before)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert actual.scores.device.type == actual.logits.device.type == "cpu"
    tolerance, logit_tolerance = (1e-3, 1e-5) if name in SINGLE else (1e-5, 1e-9)
    assert close(actual.scores, expected.scores, expected.scores, tolerance), (actual.scores - expected.scores).abs().max()
    assert torch.allclose(actual.logits, expected.logits, atol=logit_tolerance)


@pytest.mark.parametrize("name", FAST)
def test_gpu_equals_cpu_for_other_architectures(name: str) -> None:
    """Encoder-decoders, language models, vision-language models, two towers and audio, with every method of the coverage page."""
    model, inputs = EVERY[name].build()
    model, inputs = model.double(), to(inputs, torch.float64)
    on_gpu, gpu_inputs = twin(model), moved(inputs)
    compared = 0
    for method in SHOWN:
        try:
            expected = explain(EVERY[name], model, inputs, method)
        except WhyformerError as refused:
            with pytest.raises(type(refused)):
                explain(EVERY[name], on_gpu, gpu_inputs, method)
            continue
        actual = explain(EVERY[name], on_gpu, gpu_inputs, method)
        for part in expected.inputs:
            a, b = actual.part(part).scores, expected.part(part).scores  # some models compute a part in float32 in any precision
            assert close(a, b, b, 1e-3), (method, part, (a - b).abs().max())
        compared += 1
    assert compared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "libragrad", "gae", "rollout"])
def test_half_precision_agrees_with_single_precision(method: str, name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, torch.float32)
    single = whyformer.explain(twin(model), inputs, method, TARGETS)
    half = whyformer.explain(twin(model).to(dtype), inputs, method, TARGETS)
    assert half.scores.isfinite().all()
    for a, b in zip(half.scores.float(), single.scores.float(), strict=True):
        assert np.corrcoef(a.flatten(), b.flatten())[0, 1] > 0.97


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_gpu_equals_cpu_for_language_models(name: str) -> None:
    """The matrix of a given and of a generated continuation, and token deletion."""
    model, inputs = build(name)
    on_gpu, ids = twin(model), {"input_ids": inputs["input_ids"][:1]}
    for options in ({"continuation": [5, 9, 7]}, {"max_new_tokens": 3}):
        expected, actual = (whyformer.explain_generation(m, ids, **options) for m in (model, on_gpu))
        assert actual.tokens == expected.tokens
        assert close(torch.as_tensor(actual.matrix), torch.as_tensor(expected.matrix), torch.as_tensor(expected.matrix))
    plain = [(m, whyformer.explain(m, ids, "attnlrp", targets.LogProbability(5))) for m in (model, on_gpu)]
    expected, actual = (whyformer.evaluation.token_deletion(m, ids, e, 2) for m, e in plain)
    assert close(actual.scores, expected.scores, expected.scores)


def test_gpu_equals_cpu_for_explain_many_and_audit() -> None:
    model, inputs = build("bert")
    on_gpu = twin(model)
    results = [whyformer.explain_many(m, [inputs], ["gae", "lrp_ah_ln"]) for m in (model, on_gpu)]
    for expected, actual in zip(*results, strict=True):
        assert close(actual.scores, expected.scores, expected.scores)
    audits = [whyformer.audit(m, inputs).to_dict() for m in (model, on_gpu)]
    assert audits[0]["operations"] == audits[1]["operations"]


@pytest.mark.parametrize("method", ["auto", "transformer_attribution", "libragrad", "gae", "occlusion", "integrated_gradients"])
def test_gpu_equals_cpu_for_bundled_models(method: str) -> None:
    for name, example in (("bundled:sst2", "A charming film, though it drags."), ("bundled:digits", "digits")):
        if example == "digits":
            example = next(digit_scenes(1)).image
        expected, actual = (whyformer.explain(name, example, method, device=device) for device in ("cpu", "cuda"))
        assert np.corrcoef(actual.scores.flatten(), expected.scores.flatten())[0, 1] > 0.9999


def test_token_ids_on_gpu_with_tokenizer() -> None:
    loaded = load("bundled:sst2", device="cuda")
    ids = loaded.processor(["a fine film", "dull and long"], return_tensors="pt", padding=True)
    expected = whyformer.explain("bundled:sst2", ["a fine film", "dull and long"], "gae")
    actual = whyformer.explain(loaded.model, moved(dict(ids)), "gae", processor=loaded.processor)
    assert close(actual.scores, expected.scores, expected.scores, 1e-4)


def test_job_on_gpu_equals_job_on_cpu(tmp_path: Path) -> None:
    texts = [f"The {thing} is {word}." for thing in ("plot", "cast", "music") for word in ("superb", "dull", "fine")]
    rows = []
    for device in ("cpu", "cuda"):
        results = whyformer.explain_many("bundled:sst2", texts, ["gae", "lrp_ah_ln"], out=tmp_path / device, device=device)
        rows.append(list(results))
    assert len(rows[0]) == len(rows[1]) == 2 * len(texts)
    for expected, actual in zip(*rows, strict=True):
        assert (actual.scores - expected.scores).abs().max() <= 1e-4 * expected.scores.abs().max()


def spread(model: nn.Module) -> nn.Module:
    """A copy on two devices, as with ``device_map``: the second half of the blocks on the CPU."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate spreads models over devices")
    copied = copy.deepcopy(model)
    path, blocks = max(
        ((n, m) for n, m in copied.named_modules() if isinstance(m, nn.ModuleList)), key=lambda named: len(named[1])
    )
    first, second = torch.device("cuda", 0), torch.device("cpu")
    where: dict[str, torch.device] = {}
    for name, _ in copied.named_modules():
        parent = name.rpartition(".")[0]
        if parent == path and name:
            where[name] = second if int(name.rpartition(".")[2]) >= len(blocks) // 2 else first
        elif name and not f"{path}.".startswith(f"{name}.") and f"{path}.".startswith(f"{parent}." if parent else ""):
            where[name] = first
    for name, device in where.items():
        copied.get_submodule(name).to(device)
    hooks.attach_align_device_hook_on_blocks(copied, {**where, "": first}, dict.fromkeys(where, False))
    assert {p.device.type for p in copied.parameters()} == {"cuda", "cpu"}
    return copied


@pytest.mark.parametrize("method", sorted({m for m, _ in PAIRS + REQUIRED}))
@pytest.mark.parametrize("name", ["llama_lm", "bert", "hf_vit"])
def test_model_on_two_devices_has_scores_of_cpu(name: str, method: str) -> None:
    model, inputs = build(name)
    target = targets.LogProbability(5) if name in LANGUAGE else TARGETS
    try:
        expected = whyformer.explain(model, inputs, method, target, **few(method))
    except WhyformerError:
        pytest.skip("the method does not apply to the model")
    on_gpu = spread(model)
    before = snapshot(on_gpu)
    actual = whyformer.explain(on_gpu, inputs, method, target, **few(method))
    assert_unchanged(on_gpu, before)
    tolerance = 1e-3 if name == "llama_lm" else 1e-5
    assert close(actual.scores, expected.scores, expected.scores, tolerance), (actual.scores - expected.scores).abs().max()


def test_generation_of_model_on_two_devices() -> None:
    model, inputs = build("llama_lm")
    ids = {"input_ids": inputs["input_ids"][:1]}
    expected, actual = (whyformer.explain_generation(m, ids, max_new_tokens=3) for m in (model, spread(model)))
    assert actual.tokens == expected.tokens
    assert close(torch.as_tensor(actual.matrix), torch.as_tensor(expected.matrix), torch.as_tensor(expected.matrix))
