"""One number without classes, a regression's or a target of one's own: shown as the number that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from whyformer.models.loading import load
from whyformer.report import write_report
from whyformer.show import html


def model(**facts: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=8000, **sizes, **facts)).eval()


@pytest.mark.parametrize("method", ["lrp_ah_ln", "rollout"])
def test_a_regression_has_no_probability(method: str, tmp_path: Path) -> None:
    tokenizer = load("bundled:sst2").processor
    e = whyformer.explain(model(num_labels=1, problem_type="regression"), ["A fine film", "Dull"], method, processor=tokenizer)
    value = f"{float(e.logits[0, 0]):.4g}"
    shown = html.page(e[0]) + html.fragment(e[0])
    assert "the output" in shown and value in shown
    assert f"the output  value = {float(e.logits[0, 0]):.3f}" in str(e)
    e[0].save(tmp_path / "saved.safetensors")
    write_report([tmp_path / "saved.safetensors"], tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert "the output" in report and value in report
    said = (str(e), shown, report)
    assert not any(f"{100 * float(p):.1f}" in text for text in said for p in e.probabilities().flatten())


def test_what_is_measured_of_a_regression_is_called_by_its_name() -> None:
    tokenizer, regression = load("bundled:sst2").processor, model(num_labels=1, problem_type="regression")
    e = whyformer.explain(regression, "A fine film", "lrp_ah_ln", processor=tokenizer)
    noted = whyformer.trust(e, regression, processor=tokenizer).noted_in(e)
    assert "measured for the output (its sigmoid): " in str(noted)
    assert "Measured for <bdi>the output (its sigmoid)</bdi>" in html.page(noted)


def test_a_single_logit_that_is_a_class_has_one() -> None:
    tokenizer = load("bundled:sst2").processor
    e = whyformer.explain(model(num_labels=1), "A fine film", "lrp_ah_ln", processor=tokenizer)
    assert f"prob = {100 * float(e.probabilities()):5.1f}%" in str(e) and "the output" not in str(e)


def test_a_target_of_ones_own_is_a_number() -> None:
    tokenizer = load("bundled:sst2").processor
    e = whyformer.explain(model(num_labels=1), "A fine film", "lrp_ah_ln", lambda logits: 2 * logits[:, 0], tokenizer)
    assert "custom target" in html.page(e) and f"{100 * float(e.probabilities()):.1f}%" not in html.page(e)
