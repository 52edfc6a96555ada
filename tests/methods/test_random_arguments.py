"""Property-based tests: every method on random inputs, masks, dtypes, targets and settings gives a valid result or a clear error."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whyformer
from mutations import ODD
from snapshot import assert_unchanged, snapshot
from whyformer import targets
from whyformer.errors import WhyformerError
from whyformer.methods import METHODS
from whyformer.methods.registry import Bounds, OneOf
from zoo import CLASSES, VOCABULARY, build

MODELS = {"text": ["bert", "gpt2", "distilbert"], "image": ["hf_vit", "hf_vit_wide", "timm_vit_mean"]}
TYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}
# few repetitions, to save time
FEW = {"samples": 3, "steps": 4, "masks": 6, "repeats": 2, "iterations": 3, "epochs": 2, "draws": 2, "components": 3}
few_examples = settings(max_examples=3, suppress_health_check=list(HealthCheck))
more_examples = settings(max_examples=8, suppress_health_check=list(HealthCheck))


@cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    return build(name)[0].to(dtype)


@st.composite
def inputs_of(draw: Any, name: str, dtype: torch.dtype) -> tuple[Any, list[int] | None]:
    """One to three images, or texts of random lengths padded on the right."""
    count, seed = draw(st.integers(1, 3)), draw(st.integers(0, 50))
    generator = torch.Generator().manual_seed(seed)
    if name in MODELS["image"]:
        size = (24, 40) if name == "hf_vit_wide" else (32, 32)
        return torch.randn(count, 3, *size, generator=generator).to(dtype) * draw(st.sampled_from([1.0, 0.01, 30.0])), None
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    ids = torch.randint(4, VOCABULARY, (count, max(lengths)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}, lengths


def bounded_value(check: Bounds) -> st.SearchStrategy[Any]:
    low, high = check.low, min(check.high, check.low + 5)
    inside = st.integers(int(low), int(high)) if check.integer else st.floats(low, high, allow_subnormal=False)
    return inside | st.sampled_from([low - 1, check.high + 1])


@st.composite
def settings_of(draw: Any, method: str) -> dict[str, Any]:
    """Up to three settings, mostly with valid values."""
    row, selected = METHODS[method], {}
    for name in draw(st.lists(st.sampled_from(sorted(row.settings)), max_size=3, unique=True) if row.settings else st.just([])):
        _, check = row.checks.get(name, ("", None))
        if isinstance(check, OneOf):
            values = st.sampled_from(check.values)
        elif isinstance(check, Bounds):
            values = bounded_value(check)
        elif isinstance(row.settings[name], bool):
            values = st.booleans()
        else:
            values = st.sampled_from([row.settings[name], 0, 1, -1, 2, 7, None, 0.5])
        selected[name] = draw(values if draw(st.integers(0, 9)) else ODD)
    return {**{name: FEW[name] for name in row.settings if name in FEW}, **selected}


CLASS = st.integers(0, CLASSES - 1)
TARGETS = st.one_of(
    st.none(), CLASS, st.lists(CLASS, min_size=1, max_size=3), CLASS.map(str), CLASS.map("#{}".format),
    st.tuples(CLASS, CLASS).map(lambda pair: targets.Contrast(*pair)), CLASS.map(targets.Probability), CLASS.map(targets.LogProbability),
    st.sampled_from([-1, CLASSES, 10**9, True, 1.5, "no class", "", float("nan"), [], [None], {}, (1, 2), "\ud800"]),
)  # fmt: skip


def rows(inputs: Any, index: int, lengths: list[int] | None) -> Any:
    """One sample; a text without its padding."""
    if lengths is None:
        return inputs[index : index + 1]
    return {name: tensor[index : index + 1, : lengths[index]] for name, tensor in inputs.items()}


def target_of(target: Any, index: int) -> Any:
    return target[index] if isinstance(target, list) else target


def check(method: str, data: Any) -> None:
    row = METHODS[method]
    kind = row.modality if row.modality != "both" else data.draw(st.sampled_from(["text", "image"]))
    name, dtype = data.draw(st.sampled_from(MODELS[kind])), data.draw(st.sampled_from(TYPES))
    inputs, lengths = data.draw(inputs_of(name, dtype))
    target, selected = data.draw(TARGETS), data.draw(settings_of(method))
    model = model_of(name, dtype)
    before = snapshot(model)
    try:
        e = whyformer.explain(model, inputs, method, target, **selected)
    except WhyformerError:
        return
    finally:
        assert_unchanged(model, before)
    count = len(lengths or inputs)
    assert len(e) == count
    assert e.scores.isfinite().all()
    assert e.level in (("token",) if lengths else ("patch", "pixel"))
    assert {n: e.settings[n] for n in selected} == selected
    with torch.no_grad():
        expected_logits = (model(**inputs) if isinstance(inputs, dict) else model(inputs))
    expected_logits = getattr(expected_logits, "logits", expected_logits)
    assert (e.logits.double() - expected_logits.double()).abs().max() <= TOLERANCE[dtype] * max(1.0, float(expected_logits.abs().max()))
    for i, length in enumerate(lengths or ()):
        assert not e.scores[i, length:].any()
    if dtype == torch.float64 and method != "auto":  # auto may choose different methods for one sample and for a batch
        i = data.draw(st.integers(0, count - 1))
        single = whyformer.explain(model, rows(inputs, i, lengths), method, target_of(target, i), **selected).scores[0]
        in_batch = e.scores[i] if lengths is None else e.scores[i, : lengths[i]]
        assert (single.double() - in_batch.double()).abs().max() <= 1e-6 * float(e.scores[i].double().abs().max())


@pytest.mark.parametrize("method", sorted(METHODS))
@given(data=st.data())
@few_examples
def test_random_arguments_give_valid_result_or_error(method, data):
    check(method, data)


@pytest.mark.whole
@pytest.mark.parametrize("method", sorted(METHODS))
@given(data=st.data())
@more_examples
def test_more_random_arguments_give_valid_result_or_error(method, data):
    check(method, data)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].modality != "image"])
def test_padded_vectors_are_explained_like_the_vectors_alone(method: str) -> None:
    model = model_of("bert", torch.float64)
    width = model.config.hidden_size
    vectors, mask = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(1)).double(), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    few = {name: value for name, value in FEW.items() if name in METHODS[method].settings}
    batch = whyformer.explain(model, {"inputs_embeds": vectors, "attention_mask": mask}, method, 1, **few)
    alone = whyformer.explain(model, {"inputs_embeds": vectors[1:, :4], "attention_mask": mask[1:, :4]}, method, 1, **few)
    largest = alone.scores.abs().max()
    assert (batch.scores[1, :4] - alone.scores[0]).abs().max() <= 1e-9 * largest
    assert not batch.scores[1, 4:].any()
