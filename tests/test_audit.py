"""The audit of a model: input streams, attentions, operations with their rules, and applicable methods."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.methods import METHODS
from whyformer.show.auditing import plain
from zoo import WIDTH, build


def test_audit_of_image_model() -> None:
    model, pixels = build("hf_vit")
    report = whyformer.audit(model, pixels, target=1)
    (stream,) = report.streams
    assert (stream.name, stream.level, stream.size) == ("pixel_values", "patch", [4, 4])
    assert [(a.queries, a.keys, a.depth, a.block) for a in report.attentions] == [(["pixel_values"], ["pixel_values"], i + 1, i) for i in range(3)]
    rules = {(o.name, o.kind): o.rules for o in report.operations}
    assert rules["convolution", "layer"]["lrp"] == "separate, z^B at inputs"
    assert rules["native_layer_norm", "norm"]["lrp_ln"] == "deviation constant"
    assert rules["native_layer_norm", "norm"]["lrp_ah"] == "adjoint"
    assert rules["_softmax", "softmax"]["lrp_ah"] == "constant"
    products = [o for o in report.operations if o.kind == "product"]  # QKᵀ, which receives no relevance under AH, and AV
    assert sorted("lrp_ah" in o.rules for o in products) == [False, True]
    assert report.methods == dict.fromkeys(METHODS) | {m.name: "it explains text" for m in METHODS.values() if m.modality == "text"}
    e = whyformer.explain(model, pixels, "transformer_attribution", 1)
    share = [sum(block) / sum(e.diagnostics["conservation"]["start"]) for block in e.diagnostics["conservation"]["blocks"].values()]
    assert torch.allclose(torch.tensor(list(report.blocks["transformer_attribution"].values())[-len(share) :]), torch.tensor(share))


def test_sums_of_multipliers_equal_the_conservation_figure() -> None:
    """Σ x ⊙ m as a share of the logit."""
    model, inputs = build("bert")
    figure = whyformer.explain(model, inputs, "lrp_ah_ln", 2).diagnostics["conservation"]
    report = whyformer.audit(model, inputs, target=2)
    assert abs(report.sums["lrp_ah_ln"] - sum(figure["sum"]) / sum(figure["start"])) < 1e-6


def test_relevance_that_is_not_lost_has_no_minus() -> None:
    text = str(whyformer.audit("bundled:sst2"))
    assert "+0.000" in text and "-0.000" not in text


def test_narrow_terminal_breaks_no_word() -> None:
    model, inputs = build("bert")
    report = whyformer.audit(model, inputs, target=2)
    narrow, wide = (plain(report, width) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80
    assert set(narrow.split()) == set(wide.split())
    (line,) = (row for row in wide.splitlines() if row.split()[:1] == ["native_layer_norm"])
    assert "identity: transformer_attribution, lrp; adjoint: lrp_ah; deviation constant: lrp_ln, lrp_ah_ln" in line
    (line,) = (row for row in wide.splitlines() if row.split()[:1] == ["select"])
    assert line.rstrip().endswith("adjoint: all")


class UnknownOperationModel(nn.Module):
    """A model with an operation that no composite has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.special.i0(self.words(input_ids).mean(1)))


def test_operation_without_a_rule_is_listed() -> None:
    report = whyformer.audit(UnknownOperationModel().eval(), {"input_ids": torch.arange(4, 10)[None]})
    (operation,) = (o for o in report.operations if "i0" in o.name)
    assert {name: rule is None for name, rule in operation.rules.items()} == {name: report.methods[name] is not None for name in operation.rules}
    assert operation.rules["lrp"] is None
    assert "i0" in str(report.methods["lrp"])
    assert report.methods["lrp_ah"] is report.methods["input_x_gradient"] is None
    assert str(report.methods["rollout"]).startswith("has no meaning")
    text = str(report)
    (unit,) = (u for u in report.program if u.unknown)
    assert (unit.name, unit.unknown) == (operation.name, ["transformer_attribution", "lrp"])
    assert "no rule: transformer_attribution, lrp" in text
    assert "input_ids" in text
    assert set(report.to_dict()) == {"model", "streams", "attentions", "operations", "program", "blocks", "lost", "sums", "methods"}


def test_bundled_model_is_audited_without_inputs() -> None:
    report = whyformer.audit("bundled:sst2")
    assert [s.level for s in report.streams] == ["token"]
    assert report.methods["gae"] is None
    with pytest.raises(whyformer.WhyformerError, match="needs inputs"):
        whyformer.audit(UnknownOperationModel().eval())
