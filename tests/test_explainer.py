"""Explainer: its options apply in every function that accepts it, and nowhere else."""

import inspect
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import whyformer
from whyformer import targets
from whyformer.errors import InputError
from whyformer.methods import METHODS
from whyformer.methods.settings import Settings
from whyformer.options import Keywords, Options
from zoo import build, llama_lm

MODEL, _ = build("bert")
ENTRY_POINTS = ("explain", "compare", "attention_maps", "audit", "record", "evaluate", "trust", "arbitrate", "explain_generation", "explain_span", "explain_many")
LONG = " ".join(["a touching film and it is good ,"] * 60)


class BesselModel(nn.Module):
    """A network with an operation that has no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.special.bessel_j0(self.first(x))).mean(1)


def test_options_and_keywords_have_the_same_fields():
    assert list(get_type_hints(Keywords, localns={"Rule": object, "torch": torch})) == list(Options.__dataclass_fields__)


def test_every_setting_of_every_method_is_typed():
    hints = get_type_hints(Settings)
    named = {name: value for m in METHODS.values() for name, value in m.settings.items()}
    assert set(hints) == set(named)
    for method in METHODS.values():
        for name, value in method.settings.items():
            kinds = get_args(hints[name]) or (hints[name],)
            assert any(isinstance(value, getattr(kind, "__origin__", kind)) for kind in kinds), (method.name, name, value)
    assert not set(hints) & set(Options.__dataclass_fields__), "a setting would be taken for an option"


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_signature_has_all_options(name):
    shown = inspect.signature(getattr(whyformer, name)).parameters
    assert set(Options.__dataclass_fields__) <= set(shown)


def test_explainer_methods_equal_functions():
    model, inputs = build("bert")
    explainer = whyformer.Explainer(model)
    assert torch.equal(explainer.explain(inputs, "lrp", 1).scores, whyformer.explain(model, inputs, "lrp", 1).scores)
    both = explainer.compare(inputs, ["gae", "attnlrp"], [0]), whyformer.compare(model, inputs, ["gae", "attnlrp"], [0])
    for a, b in zip(*(c.explanations for c in both), strict=True):
        assert torch.equal(a.scores, b.scores)
    for a, b in zip(explainer.attention_maps(inputs).maps, whyformer.attention_maps(model, inputs).maps, strict=True):
        assert torch.equal(a, b)


def test_functions_accept_an_explainer_as_model():
    explainer = whyformer.Explainer("bundled:sst2", truncate=True)
    e = whyformer.explain(explainer, LONG)
    assert torch.equal(e.scores, whyformer.explain("bundled:sst2", LONG, truncate=True).scores)
    assert whyformer.trust(e, explainer).to_dict() == whyformer.trust(e, "bundled:sst2", truncate=True).to_dict()
    assert len(list(whyformer.explain_many(explainer, [LONG, "bad"]))) == 2
    with pytest.raises(InputError, match="truncate"):
        whyformer.explain(explainer, LONG, truncate=False)


def test_generation_with_an_explainer_equals_function():
    model, _ = llama_lm()
    explainer = whyformer.Explainer(model, checkpoint=True)
    g = explainer.explain_generation([3, 5, 7], [2, 9], "attnlrp")
    alone = whyformer.explain_generation(model, [3, 5, 7], [2, 9], "attnlrp")
    torch.testing.assert_close(g.matrix, alone.matrix)
    torch.testing.assert_close(explainer.explain_span(g, 0, 1).scores, whyformer.explain_span(alone, 0, 1, model).scores)


def test_rules_of_explainer_apply_in_every_function():
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    model = BesselModel().eval()
    with pytest.raises(whyformer.WhyformerError):
        whyformer.explain(model, x, "lrp", 0)
    explainer = whyformer.Explainer(model, rules={"special_bessel_j0": "identity"})
    expected = explainer.explain(x, "lrp", 0).scores
    assert torch.equal(explainer.compare(x, ["lrp"], [0]).explanations[0].scores, expected)
    assert torch.equal(whyformer.compare(model, x, ["lrp"], [0], rules=explainer.options.rules).explanations[0].scores, expected)
    for e, scores in zip(whyformer.explain_many(explainer, list(x), "lrp", [0]), expected, strict=True):
        torch.testing.assert_close(e.scores[0], scores)
    record = whyformer.record(explainer, x)
    root = record.roots[0]
    assert float(record.walk_back([root], 0, "lrp")[root].abs().sum()) > 0
    with pytest.raises(whyformer.WhyformerError):
        whyformer.record(model, x).walk_back([root], 0, "lrp")
    with pytest.raises(whyformer.WhyformerError):  # the rules of the explainer are not global
        whyformer.explain(model, x, "lrp", 0)


def test_using_returns_a_new_explainer():
    explainer = whyformer.Explainer(MODEL)
    changed = explainer.using(checkpoint=True)
    assert (explainer.options.checkpoint, changed.options.checkpoint) == (False, True)
    assert changed.model is explainer.model
    with pytest.raises(InputError, match="loaded by name"):
        explainer.using(device="cpu")
    with pytest.raises(InputError, match="loaded by name"):
        whyformer.explain(explainer, torch.tensor([[1, 2]]), dtype="float64")


def test_unknown_option_raises():
    for call in (lambda: whyformer.Explainer(MODEL, colour=1), lambda: whyformer.compare(MODEL, torch.tensor([[1, 2]]), colour=1)):
        with pytest.raises(TypeError, match="colour"):
            call()
    with pytest.raises(InputError, match="colour"):
        whyformer.explain(MODEL, torch.tensor([[1, 2]]), colour=1)


def test_explainer_accepts_target_objects():
    model, inputs = build("bert")
    explainer = whyformer.Explainer(model)
    goal = targets.Contrast(0, 1)
    assert torch.equal(explainer.explain(inputs, "input_x_gradient", goal).scores, whyformer.explain(model, inputs, "input_x_gradient", goal).scores)


@pytest.mark.parametrize("call", [
    lambda explainer, x, y: explainer.attention_maps(x).maps[-1],
    lambda explainer, x, y: explainer.attention_maps(x, gradient=True, target=1).maps[-1],
    lambda explainer, x, y: explainer.explain(x, "lrp", 1).scores,
    lambda explainer, x, y: whyformer.evaluate(explainer, x, y, "sufficiency").values,
])
def test_checkpointing_changes_no_result(call):
    model, inputs = build("bert")
    explainer = whyformer.Explainer(model)
    y = explainer.explain(inputs, "lrp", 1)
    torch.testing.assert_close(torch.as_tensor(call(explainer.using(checkpoint=True), inputs, y)), torch.as_tensor(call(explainer, inputs, y)))


def test_record_refuses_checkpointing():
    model, inputs = build("bert")
    explainer = whyformer.Explainer(model, checkpoint=True)
    with pytest.raises(InputError, match="checkpoint"):
        whyformer.record(explainer, inputs)
    assert len(whyformer.record(explainer.using(checkpoint=False), inputs).units) > 0
