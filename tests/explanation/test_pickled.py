"""Results go between processes: they hold neither the model nor functions over it."""

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


def reached(result: Any) -> list[Any]:
    """All that a result refers to, but for classes, modules and their names."""
    seen: dict[int, Any] = {}
    left = [result]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type) or type(one).__name__ == "module":
            continue
        seen[id(one)] = one
        left += gc.get_referents(one)
    return list(seen.values())


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_can_be_pickled_and_holds_no_model(name: str) -> None:
    result = RESULTS[name]()
    assert not [one for one in reached(result) if isinstance(one, torch.nn.Module) or type(one).__name__ == "function"]
    again = pickle.loads(pickle.dumps(result))
    assert type(again) is type(result)
    assert str(again) == str(result)


def test_a_model_is_freed_though_its_results_are_kept() -> None:
    model = load(TEXT).model
    found = reached(whyformer.explain(model, TEXTS[0], "attnlrp", processor=load(TEXT).processor))
    assert all(one is not own for one in found if isinstance(one, torch.Tensor) for own in model.parameters())
