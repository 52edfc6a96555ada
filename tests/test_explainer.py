"""One object of options for all entrances: what it says holds wherever it is taken, and for that alone."""

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
TAKING = ("explain", "compare", "attention_maps", "audit", "record", "evaluate", "trust", "arbitrate", "explain_generation", "explain_span", "explain_many")
LONG = " ".join(["a touching film and it is good ,"] * 60)


class Squashing(nn.Module):
    """A network with an operation that no rule knows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.special.bessel_j0(self.first(x))).mean(1)


def test_options_and_keywords_are_the_same():
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


@pytest.mark.parametrize("name", TAKING)
def test_every_entrance_shows_the_options(name):
    shown = inspect.signature(getattr(whyformer, name)).parameters
    assert set(Options.__dataclass_fields__) <= set(shown)


def test_an_explainer_gives_what_the_functions_give():
    model, inputs = build("bert")
    one = whyformer.Explainer(model)
    assert torch.equal(one.explain(inputs, "lrp", 1).scores, whyformer.explain(model, inputs, "lrp", 1).scores)
    both = one.compare(inputs, ["gae", "attnlrp"], [0]), whyformer.compare(model, inputs, ["gae", "attnlrp"], [0])
    for a, b in zip(*(c.explanations for c in both), strict=True):
        assert torch.equal(a.scores, b.scores)
    for a, b in zip(one.attention_maps(inputs).maps, whyformer.attention_maps(model, inputs).maps, strict=True):
        assert torch.equal(a, b)


def test_an_explainer_stands_in_the_place_of_a_model():
    one = whyformer.Explainer("bundled:sst2", truncate=True)
    e = whyformer.explain(one, LONG)
    assert torch.equal(e.scores, whyformer.explain("bundled:sst2", LONG, truncate=True).scores)
    assert whyformer.trust(e, one).to_dict() == whyformer.trust(e, "bundled:sst2", truncate=True).to_dict()
    assert len(list(whyformer.explain_many(one, [LONG, "bad"]))) == 2
    with pytest.raises(InputError, match="truncate"):
        whyformer.explain(one, LONG, truncate=False)


def test_answers_too():
    model, _ = llama_lm()
    one = whyformer.Explainer(model, checkpoint=True)
    g = one.explain_generation([3, 5, 7], [2, 9], "attnlrp")
    alone = whyformer.explain_generation(model, [3, 5, 7], [2, 9], "attnlrp")
    torch.testing.assert_close(g.matrix, alone.matrix)
    torch.testing.assert_close(one.explain_span(g, 0, 1).scores, whyformer.explain_span(alone, 0, 1, model).scores)


def test_rules_hold_wherever_an_explainer_is_taken():
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    model = Squashing().eval()
    with pytest.raises(whyformer.WhyformerError):
        whyformer.explain(model, x, "lrp", 0)
    one = whyformer.Explainer(model, rules={"special_bessel_j0": "identity"})
    made = one.explain(x, "lrp", 0).scores
    assert torch.equal(one.compare(x, ["lrp"], [0]).explanations[0].scores, made)
    assert torch.equal(whyformer.compare(model, x, ["lrp"], [0], rules=one.options.rules).explanations[0].scores, made)
    for e, own in zip(whyformer.explain_many(one, list(x), "lrp", [0]), made, strict=True):
        torch.testing.assert_close(e.scores[0], own)
    record = whyformer.record(one, x)
    root = record.roots[0]
    assert float(record.walk_back([root], 0, "lrp")[root].abs().sum()) > 0
    with pytest.raises(whyformer.WhyformerError):
        whyformer.record(model, x).walk_back([root], 0, "lrp")
    with pytest.raises(whyformer.WhyformerError):  # and nowhere else
        whyformer.explain(model, x, "lrp", 0)


def test_other_options_leave_the_first_as_they_are():
    one = whyformer.Explainer(MODEL)
    other = one.using(checkpoint=True)
    assert (one.options.checkpoint, other.options.checkpoint) == (False, True)
    assert other.model is one.model
    with pytest.raises(InputError, match="loaded by name"):
        one.using(device="cpu")
    with pytest.raises(InputError, match="loaded by name"):
        whyformer.explain(one, torch.tensor([[1, 2]]), dtype="float64")


def test_an_option_that_there_is_not_is_told():
    for call in (lambda: whyformer.Explainer(MODEL, colour=1), lambda: whyformer.compare(MODEL, torch.tensor([[1, 2]]), colour=1)):
        with pytest.raises(TypeError, match="colour"):
            call()
    with pytest.raises(InputError, match="colour"):
        whyformer.explain(MODEL, torch.tensor([[1, 2]]), colour=1)


def test_targets_of_an_explainer_are_those_of_explain():
    model, inputs = build("bert")
    one = whyformer.Explainer(model)
    goal = targets.Contrast(0, 1)
    assert torch.equal(one.explain(inputs, "input_x_gradient", goal).scores, whyformer.explain(model, inputs, "input_x_gradient", goal).scores)


@pytest.mark.parametrize("call", [
    lambda one, x, y: one.attention_maps(x).maps[-1],
    lambda one, x, y: one.attention_maps(x, gradient=True, target=1).maps[-1],
    lambda one, x, y: one.explain(x, "lrp", 1).scores,
    lambda one, x, y: whyformer.evaluate(one, x, y, "sufficiency").values,
])
def test_blocks_that_are_run_again_change_no_answer(call):
    model, inputs = build("bert")
    one = whyformer.Explainer(model)
    y = one.explain(inputs, "lrp", 1)
    torch.testing.assert_close(torch.as_tensor(call(one.using(checkpoint=True), inputs, y)), torch.as_tensor(call(one, inputs, y)))


def test_a_record_keeps_every_value():
    model, inputs = build("bert")
    one = whyformer.Explainer(model, checkpoint=True)
    with pytest.raises(InputError, match="checkpoint"):
        whyformer.record(one, inputs)
    assert len(whyformer.record(one.using(checkpoint=False), inputs).units) > 0
