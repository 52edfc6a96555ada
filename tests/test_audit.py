"""What an audit says of a model: inputs, attentions, operations and their rules, methods."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.methods import METHODS
from whyformer.show.auditing import plain
from zoo import WIDTH, build


def test_a_picture_model() -> None:
    model, pixels = build("hf_vit")
    found = whyformer.audit(model, pixels, target=1)
    (stream,) = found.streams
    assert (stream.name, stream.level, stream.size) == ("pixel_values", "patch", [4, 4])
    assert [(a.queries, a.keys, a.depth, a.block) for a in found.attentions] == [(["pixel_values"], ["pixel_values"], i + 1, i) for i in range(3)]
    rules = {(o.name, o.kind): o.rules for o in found.operations}
    assert rules["convolution", "layer"]["lrp"] == "separate, z^B at inputs"
    assert rules["native_layer_norm", "norm"]["lrp_ln"] == "deviation constant"
    assert rules["native_layer_norm", "norm"]["lrp_ah"] == "adjoint"
    assert rules["_softmax", "softmax"]["lrp_ah"] == "constant"
    products = [o for o in found.operations if o.kind == "product"]  # QKᵀ, at which nothing arrives under AH, and AV
    assert sorted("lrp_ah" in o.rules for o in products) == [False, True]
    assert found.methods == dict.fromkeys(METHODS) | {m.name: "it explains text" for m in METHODS.values() if m.modality == "text"}
    e = whyformer.explain(model, pixels, "transformer_attribution", 1)
    share = [sum(own) / sum(e.diagnostics["conservation"]["start"]) for own in e.diagnostics["conservation"]["blocks"].values()]
    assert torch.allclose(torch.tensor(list(found.blocks["transformer_attribution"].values())[-len(share) :]), torch.tensor(share))


def test_sums_of_multipliers() -> None:
    """Σ x ⊙ m as a share of the logit, as the method's own conservation figure has it."""
    model, inputs = build("bert")
    figure = whyformer.explain(model, inputs, "lrp_ah_ln", 2).diagnostics["conservation"]
    found = whyformer.audit(model, inputs, target=2)
    assert abs(found.sums["lrp_ah_ln"] - sum(figure["sum"]) / sum(figure["start"])) < 1e-6


def test_no_word_is_broken_on_a_narrow_terminal() -> None:
    model, inputs = build("bert")
    found = whyformer.audit(model, inputs, target=2)
    narrow, wide = (plain(found, width) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80
    assert set(narrow.split()) == set(wide.split())
    (line,) = (one for one in wide.splitlines() if one.split()[:1] == ["native_layer_norm"])
    assert "identity: transformer_attribution, lrp; adjoint: lrp_ah; deviation constant: lrp_ln, lrp_ah_ln" in line
    (line,) = (one for one in wide.splitlines() if one.split()[:1] == ["select"])
    assert line.rstrip().endswith("adjoint: all")


class Odd(nn.Module):
    """An operation that no composite knows, on the way from input to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.special.i0(self.words(input_ids).mean(1)))


def test_an_operation_without_a_rule_is_named() -> None:
    found = whyformer.audit(Odd().eval(), {"input_ids": torch.arange(4, 10)[None]})
    (odd,) = (o for o in found.operations if "i0" in o.name)
    assert {name: rule is None for name, rule in odd.rules.items()} == {name: found.methods[name] is not None for name in odd.rules}
    assert odd.rules["lrp"] is None
    assert "i0" in str(found.methods["lrp"])
    assert found.methods["lrp_ah"] is found.methods["input_x_gradient"] is None
    assert str(found.methods["rollout"]).startswith("has no meaning")
    said = str(found)
    (unit,) = (u for u in found.program if u.unknown)
    assert (unit.name, unit.unknown) == (odd.name, ["transformer_attribution", "lrp"])
    assert "no rule: transformer_attribution, lrp" in said
    assert "input_ids" in said
    assert set(found.to_dict()) == {"model", "streams", "attentions", "operations", "program", "blocks", "lost", "sums", "methods"}


def test_by_name_without_an_input() -> None:
    found = whyformer.audit("bundled:sst2")
    assert [s.level for s in found.streams] == ["token"]
    assert found.methods["gae"] is None
    with pytest.raises(whyformer.WhyformerError, match="needs inputs"):
        whyformer.audit(Odd().eval())
