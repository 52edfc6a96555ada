"""Results can be pickled: they refer neither to the model nor to functions of it."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from PIL import Image

import whyformer
from whyformer.models.loading import load
from zoo import build

TEXTS = ["A gripping , beautiful film .", "Dull ."]
TEXT = "bundled:sst2"


def digit() -> Image.Image:
    picture = Image.new("L", (56, 56))
    picture.paste(255, (24, 8, 32, 48))
    return picture


RESULTS: dict[str, Any] = {
    "texts": lambda: whyformer.explain(TEXT, TEXTS, "integrated_gradients", steps=4),
    "a picture": lambda: whyformer.explain("bundled:digits", digit(), "attnlrp"),
    "a comparison": lambda: whyformer.compare(TEXT, TEXTS[0], ["rollout", "vit_cx"], ["positive", "negative"]),
    "an answer": lambda: whyformer.explain_generation(build("llama_lm")[0], [5, 9, 7], [3, 8], "attnlrp"),
    "its words": lambda: whyformer.explain_generation(build("llama_lm")[0], [5, 9, 7], [3, 8], "attnlrp").by("sentence"),
    "trust": lambda: whyformer.trust(whyformer.explain(TEXT, TEXTS[0], "attnlrp"), TEXT),
    "attention": lambda: whyformer.attention_maps(TEXT, TEXTS),
    "attention on a picture": lambda: whyformer.attention_maps("bundled:digits", digit()),
    "figures": lambda: whyformer.evaluate(TEXT, TEXTS[0], whyformer.explain(TEXT, TEXTS[0], "attnlrp"), "comprehensiveness"),
}  # fmt: skip


def referents(result: Any) -> list[Any]:
    """All objects that a result refers to, except classes and modules."""
    visited: dict[int, Any] = {}
    pending = [result]
    while pending:
        value = pending.pop()
        if id(value) in visited or isinstance(value, type) or type(value).__name__ == "module":
            continue
        visited[id(value)] = value
        pending += gc.get_referents(value)
    return list(visited.values())


@pytest.mark.parametrize("name", RESULTS)
def test_result_is_picklable_and_holds_no_model(name: str) -> None:
    result = RESULTS[name]()
    assert not [value for value in referents(result) if isinstance(value, torch.nn.Module) or type(value).__name__ == "function"]
    restored = pickle.loads(pickle.dumps(result))
    assert type(restored) is type(result)
    assert str(restored) == str(result)


def test_result_does_not_keep_parameters_alive() -> None:
    model = load(TEXT).model
    values = referents(whyformer.explain(model, TEXTS[0], "attnlrp", processor=load(TEXT).processor))
    assert all(value is not parameter for value in values if isinstance(value, torch.Tensor) for parameter in model.parameters())
