"""On a GPU: what every method says of a model there equals what it says on the processor, and the model stays where it is."""

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
# of the first backward pass of a process, which autograd runs in a thread of its own
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
EVERY = {a.name: a for a in listed()}


def moved(inputs: Any) -> Any:
    """Tensors, also inside of mappings, on the GPU."""
    if isinstance(inputs, Tensor):
        return inputs.cuda()
    return {name: moved(value) for name, value in inputs.items()} if isinstance(inputs, dict) else inputs


SINGLE = ("llama", "modernbert_mean", "modernbert_cls")
"""Turn by angles that are computed in float32 whatever the model's precision, and not to the last bit alike on both."""


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cuda()


@pytest.mark.parametrize(("method", "name"), PAIRS + REQUIRED)
def test_scores_equal_those_of_the_processor(method: str, name: str) -> None:
    """In float64, with inputs that were left on the processor, and for two samples in one batch."""
    model, inputs = build(name)
    wanted = whyformer.explain(model, inputs, method=method, target=TARGETS, **few(method))
    there = twin(model)
    before = snapshot(there)
    states = torch.cuda.get_rng_state()
    found = whyformer.explain(there, inputs, method=method, target=TARGETS, **few(method))
    assert_unchanged(there, before)
    assert torch.equal(torch.cuda.get_rng_state(), states)
    assert found.scores.device.type == found.logits.device.type == "cpu"
    tolerance, near = (1e-3, 1e-5) if name in SINGLE else (1e-5, 1e-9)
    assert close(found.scores, wanted.scores, wanted.scores, tolerance), (found.scores - wanted.scores).abs().max()
    assert torch.allclose(found.logits, wanted.logits, atol=near)


@pytest.mark.parametrize("name", FAST)
def test_other_models_too(name: str) -> None:
    """Encoder-decoders, language models, vision and language, two towers, sound; every method of the coverage page."""
    model, inputs = EVERY[name].build()
    model, inputs = model.double(), to(inputs, torch.float64)
    there, given = twin(model), moved(inputs)
    worked = 0
    for method in SHOWN:
        try:
            wanted = explain(EVERY[name], model, inputs, method)
        except WhyformerError as refused:
            with pytest.raises(type(refused)):
                explain(EVERY[name], there, given, method)
            continue
        found = explain(EVERY[name], there, given, method)
        for part in wanted.inputs:
            a, b = found.part(part).scores, wanted.part(part).scores  # some compute a part in float32 whatever they are
            assert close(a, b, b, 1e-3), (method, part, (a - b).abs().max())
        worked += 1
    assert worked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "libragrad", "gae", "rollout"])
def test_half_precision_agrees_with_single(method: str, name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, torch.float32)
    single = whyformer.explain(twin(model), inputs, method, TARGETS)
    half = whyformer.explain(twin(model).to(dtype), inputs, method, TARGETS)
    assert half.scores.isfinite().all()
    for a, b in zip(half.scores.float(), single.scores.float(), strict=True):
        assert np.corrcoef(a.flatten(), b.flatten())[0, 1] > 0.97


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_language_models(name: str) -> None:
    """A generation's matrix, of answers that were given and that the model writes itself; verified answers."""
    model, inputs = build(name)
    there, ids = twin(model), {"input_ids": inputs["input_ids"][:1]}
    for options in ({"continuation": [5, 9, 7]}, {"max_new_tokens": 3}):
        wanted, found = (whyformer.explain_generation(m, ids, **options) for m in (model, there))
        assert found.tokens == wanted.tokens
        assert close(torch.as_tensor(found.matrix), torch.as_tensor(wanted.matrix), torch.as_tensor(wanted.matrix))
    plain = [(m, whyformer.explain(m, ids, "attnlrp", targets.LogProbability(5))) for m in (model, there)]
    wanted, found = (whyformer.evaluation.token_deletion(m, ids, e, 2) for m, e in plain)
    assert close(found.scores, wanted.scores, wanted.scores)


def test_checks_comparisons_and_choices() -> None:
    model, inputs = build("bert")
    there = twin(model)
    results = [whyformer.explain_many(m, [inputs], ["gae", "lrp_ah_ln"]) for m in (model, there)]
    for wanted, found in zip(*results, strict=True):
        assert close(found.scores, wanted.scores, wanted.scores)
    audits = [whyformer.audit(m, inputs).to_dict() for m in (model, there)]
    assert audits[0]["operations"] == audits[1]["operations"]


@pytest.mark.parametrize("method", ["auto", "transformer_attribution", "libragrad", "gae", "occlusion", "integrated_gradients"])
def test_bundled_models_by_name(method: str) -> None:
    for name, given in (("bundled:sst2", "A charming film, though it drags."), ("bundled:digits", "digits")):
        if given == "digits":
            given = next(digit_scenes(1)).image
        wanted, found = (whyformer.explain(name, given, method, device=device) for device in ("cpu", "cuda"))
        assert np.corrcoef(found.scores.flatten(), wanted.scores.flatten())[0, 1] > 0.9999


def test_ids_that_are_there_already_beside_their_tokenizer() -> None:
    loaded = load("bundled:sst2", device="cuda")
    ids = loaded.processor(["a fine film", "dull and long"], return_tensors="pt", padding=True)
    wanted = whyformer.explain("bundled:sst2", ["a fine film", "dull and long"], "gae")
    found = whyformer.explain(loaded.model, moved(dict(ids)), "gae", processor=loaded.processor)
    assert close(found.scores, wanted.scores, wanted.scores, 1e-4)


def test_a_job_on_the_gpu(tmp_path: Path) -> None:
    texts = [f"The {thing} is {word}." for thing in ("plot", "cast", "music") for word in ("superb", "dull", "fine")]
    rows = []
    for device in ("cpu", "cuda"):
        made = whyformer.explain_many("bundled:sst2", texts, ["gae", "lrp_ah_ln"], out=tmp_path / device, device=device)
        rows.append(list(made))
    assert len(rows[0]) == len(rows[1]) == 2 * len(texts)
    for wanted, found in zip(*rows, strict=True):
        assert (found.scores - wanted.scores).abs().max() <= 1e-4 * wanted.scores.abs().max()


def spread(model: nn.Module) -> nn.Module:
    """A copy on two devices, as ``device_map`` leaves it: the second half of the blocks on the other one."""
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
def test_a_model_over_two_devices(name: str, method: str) -> None:
    model, inputs = build(name)
    target = targets.LogProbability(5) if name in LANGUAGE else TARGETS
    try:
        wanted = whyformer.explain(model, inputs, method, target, **few(method))
    except WhyformerError:
        pytest.skip("the method does not apply to the model")
    there = spread(model)
    before = snapshot(there)
    found = whyformer.explain(there, inputs, method, target, **few(method))
    assert_unchanged(there, before)
    tolerance = 1e-3 if name == "llama_lm" else 1e-5
    assert close(found.scores, wanted.scores, wanted.scores, tolerance), (found.scores - wanted.scores).abs().max()


def test_an_answer_of_a_model_over_two_devices() -> None:
    model, inputs = build("llama_lm")
    ids = {"input_ids": inputs["input_ids"][:1]}
    wanted, found = (whyformer.explain_generation(m, ids, max_new_tokens=3) for m in (model, spread(model)))
    assert found.tokens == wanted.tokens
    assert close(torch.as_tensor(found.matrix), torch.as_tensor(wanted.matrix), torch.as_tensor(wanted.matrix))
