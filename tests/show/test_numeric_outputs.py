"""Regressions and targets other than classes are drawn, measured and saved as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PretrainedConfig
from typer.testing import CliRunner

import whyformer
from whyformer import targets
from whyformer.apps import cli
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.models.loading import load
from whyformer.report import write_report
from whyformer.show import html

SENTENCE = "A fine film, though it drags a little"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer() -> Any:
    return load("bundled:sst2").processor


def bert(scale: float = 30.0, **facts: Any) -> Any:
    """A random model whose head is large enough that tokens matter."""
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=8000, **SIZES, **facts)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
        model.classifier.weight.mul_(scale)
    return model


class Net(nn.Module):
    """Vectors -> outputs, with one attention between them."""

    def __init__(self, outputs: int = 1, end: nn.Module | None = None, squeeze: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head, self.end, self.squeeze = nn.Linear(16, outputs), end or nn.Identity(), squeeze

    def forward(self, x: Tensor) -> Tensor:
        output = self.end(self.head(self.block(x)[:, 0]))
        return output[:, 0] if self.squeeze else output


def timm_model() -> Any:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=1, depth=2, embed_dim=24, num_heads=3).eval()


NUMERIC_MODELS = {
    "problem_type is unknown": (lambda: bert(num_labels=1), SENTENCE),
    "a regression": (lambda: bert(num_labels=1, problem_type="regression"), [SENTENCE, "Dull as can be"]),
    "a module": (lambda: Net().eval(), torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))),
    "without an axis": (lambda: Net(squeeze=True).eval(), torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))),
    "timm": (timm_model, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))),
}


def explained(name: str, method: str = "input_x_gradient", target: Any = None) -> tuple[Any, Any, Any, Explanation]:
    make, inputs = NUMERIC_MODELS[name]
    model, processor = make(), tokenizer() if isinstance(inputs, str | list) else None
    return model, inputs, processor, whyformer.explain(model, inputs, method, target, processor)


@pytest.mark.parametrize("name", NUMERIC_MODELS)
def test_single_output_is_shown_as_number_in_every_view(name: str, tmp_path: Path) -> None:
    _, _, _, e = explained(name)
    value, share = float(e.logits[0, 0]), f"{100 * float(e.logits[0, 0].sigmoid()):.1f}"
    assert e.numeric and e.target_names == ["the output"] * len(e) and e.label(0) == "the output"
    assert e.top() == [(0, "the output", value, None)]
    with pytest.raises(InputError, match="regression"):
        e.probabilities()
    facts = json.loads(json.dumps(e.to_dict()))
    assert facts["probabilities"] is None and facts["activation"] == "identity"
    loaded = Explanation.load(e.save(tmp_path / "saved.safetensors"))
    for restored in (e, loaded, Explanation.from_dict(facts)):
        assert restored.numeric and str(restored[0]) == str(e[0])
    write_report([tmp_path / "saved.safetensors"], tmp_path / "report.html")
    for view in (str(e[0]), html.page(e[0]), html.fragment(e[0]), (tmp_path / "report.html").read_text()):
        assert "the output" in view and (f"{value:.4g}" in view or f"{value:.3f}" in view)
        assert f"{share}%" not in view and "prob =" not in view


@pytest.mark.parametrize("name", NUMERIC_MODELS)
def test_index_0_equals_default_target_of_single_output(name: str) -> None:
    _, _, _, e = explained(name)
    for target in (0, [0] * len(e), targets.Logit(0)):
        assert torch.equal(explained(name, target=target)[3].scores, e.scores)


@pytest.mark.parametrize("kind", [targets.Probability, targets.LogProbability])
def test_probability_of_number_raises_unless_multi_label(kind: Any) -> None:
    with pytest.raises(InputError, match="number") as error:
        explained("a module", target=kind(0))
    assert "multi_label=True" in str(error.value)
    assert explained("a module", target=kind(0, multi_label=True))[3].scores.abs().sum() > 0
    with pytest.raises(InputError, match="number"):
        whyformer.explain(Net(3).eval(), torch.randn(1, 5, 16)[:, :, :], "lrp", targets.Token(0, 0, "probability"))


@pytest.mark.parametrize("method", ["lrp_ah_ln", "rollout", "occlusion"])
def test_trust_and_evaluate_measure_the_number(method: str) -> None:
    model, inputs, processor, e = explained("a regression", method)
    trust = whyformer.trust(e, model, processor=processor)
    assert trust.numeric and trust.curves[:, 0] == pytest.approx(e.logits[:, 0].tolist(), abs=1e-5)
    masked = processor(SENTENCE, return_tensors="pt")
    masked["input_ids"][0, 1:-1] = processor.mask_token_id or processor.unk_token_id
    assert trust.curves[0, -1] == pytest.approx(float(model(**masked).logits.detach()), abs=1e-4)
    annotated = trust.noted_in(e)
    assert "measured for the output: " in str(annotated[0])
    assert "Measured for <bdi>the output</bdi>" in html.page(annotated[0])
    curve = whyformer.evaluate(model, inputs, e, "deletion", processor, steps=10, baseline=trust.baseline)
    assert curve.curves is not None and curve.curves[:, 0] == pytest.approx(e.logits[:, 0].tolist(), abs=1e-5)
    for name in ("log_odds", "positive"):
        with pytest.raises(InputError, match="deletion"):
            whyformer.evaluate(model, inputs, e, name, processor)


@pytest.mark.parametrize("sign", [1, -1])
def test_correct_map_is_better_than_random_for_any_sign_of_output(sign: int) -> None:
    """f = ± (5 x₀ + 3 x₁ + 2 x₂ + x₃ + ...): exact scores, signed or not, beat random ones."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8000, 1)
            self.head = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.head.weight, sign)
            nn.init.zeros_(self.table.weight)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.table(input_ids).sum(1))

    words, ids = tokenizer(), tokenizer()("one two three four five six seven eight", return_tensors="pt")["input_ids"]
    model = Sum().eval()
    with torch.no_grad():
        model.table.weight[ids[0, 1:9], 0] = torch.tensor([5.0, 0.1, 3.0, 0.1, 0.2, 0.1, 2.0, 0.3])
    e = whyformer.explain(model, ids, "occlusion", processor=words, baseline=words.unk_token_id)
    if sign == 1:
        assert whyformer.trust(e, model, ids, words).better() is True
    unsigned = whyformer.explain(model, ids, "saliency", processor=words)
    sizes = Explanation(**{**vars(unsigned), "scores": e.scores.abs()})
    assert sizes.diagnostics["signed"] is False
    assert whyformer.trust(sizes, model, ids, words).better() is True
    wrong = Explanation(**{**vars(sizes), "scores": (e.scores.abs().max() - e.scores.abs())})
    assert whyformer.trust(wrong, model, ids, words).better() is False


CLASSES = {
    "a sigmoid at the end": (lambda: Net(end=nn.Sigmoid()).eval(), "class 0"),
    "its name": (lambda: bert(id2label={0: "toxic"}), "toxic"),
    "several labels": (lambda: bert(num_labels=1, problem_type="multi_label_classification"), "class 0"),
}


def test_single_output_with_two_names_is_probability_of_second() -> None:
    model = Net().eval()
    model.config = PretrainedConfig(id2label={0: "negative", 1: "positive"})
    e = whyformer.explain(model, torch.randn(1, 5, 16), "lrp")
    assert e.activation == "sigmoid" and e.target_names == ["positive"] and e.top()[0][1] == "positive"
    model.config = PretrainedConfig(num_labels=2)  # the default names LABEL_0 and LABEL_1 do not count
    assert whyformer.explain(model, torch.randn(1, 5, 16), "lrp").numeric


def test_arbitration_of_number_uses_aopc() -> None:
    model, words = bert(num_labels=1), tokenizer()
    chosen = whyformer.arbitrate(model, [SENTENCE, "Dull as can be"], ["occlusion", "input_x_gradient"], processor=words, criterion="aopc", holdout=0.0)
    assert chosen.winners.shape[0] == 2 and torch.isfinite(torch.as_tensor(chosen.selection)).all()
    with pytest.raises(InputError, match="aopc"):
        whyformer.arbitrate(model, [SENTENCE], ["occlusion"], processor=words, criterion="log_odds")


@pytest.mark.parametrize("name", CLASSES)
def test_single_output_with_sigmoid_or_name_is_class(name: str) -> None:
    make, class_name = CLASSES[name]
    model = make()
    text = not isinstance(model, Net)
    inputs = SENTENCE if text else torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    e = whyformer.explain(model, inputs, "lrp", processor=tokenizer() if text else None)
    assert e.activation == "sigmoid" and torch.allclose(e.probabilities(), e.logits.double().sigmoid())
    assert f"Why “{class_name}”? {100 * float(e.probabilities()[0, 0]):.1f} %" in str(e[0])
    kind, reads = targets.Probability, tokenizer() if text else None
    result, expected = (whyformer.explain(model, inputs, "lrp", t, reads) for t in (kind(0), kind(0, multi_label=True)))
    assert torch.equal(result.scores, expected.scores) and not torch.equal(result.scores, e.scores)
    with pytest.raises(InputError, match="multi_label=True"):
        whyformer.explain(model, inputs, "lrp", kind(0, multi_label=False), reads)


def test_name_of_output_is_shown() -> None:
    e = whyformer.explain(bert(problem_type="regression", id2label={0: "stars"}), SENTENCE, "lrp", processor=tokenizer())
    assert e.numeric and e.target_names == ["stars"] and "stars  value = " in str(e)


def test_multiple_regression_outputs_have_no_probabilities() -> None:
    model = bert(num_labels=3, problem_type="regression")
    e = whyformer.explain(model, SENTENCE, "lrp", 1, tokenizer())
    assert e.numeric and e.target_names == ["output 1"]
    assert [name for _, name, _, share in e.top() if share is None] == [e.label(int(i)) for i in e.logits[0].argsort(descending=True)]
    assert str(e).startswith("Values:") and "prob" not in str(e)


def test_custom_target_is_shown_as_number() -> None:
    e = whyformer.explain(bert(num_labels=1), "A fine film", "lrp_ah_ln", lambda logits: 2 * logits[:, 0], tokenizer())
    assert "custom target" in html.page(e) and "prob" not in str(e)


def test_numeric_depends_on_output_that_target_reads() -> None:
    e = whyformer.explain(Net(3).eval(), torch.randn(1, 5, 16), "lrp", lambda logits: logits[:, 0] - logits[:, 2])
    assert not e.numeric  # the target reads class logits
    dense = nn.Conv2d(3, 1, 3, padding=1).eval()
    assert whyformer.explain(dense, torch.randn(1, 3, 8, 8), "input_x_gradient", targets.Pixel(2, 3)).numeric


@pytest.mark.parametrize("facts", [{"num_labels": 1}, {"num_labels": 1, "problem_type": "regression"}])
def test_command_line_shows_and_checks_number(facts: dict[str, Any], tmp_path: Path) -> None:
    bert(**facts).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["explain", SENTENCE, "--model", str(tmp_path / "model"), "--method", "lrp_ah_ln", "--out", str(tmp_path / "out"), "--check"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "the output  value = " in result.output and "measured for the output: " in result.output and "prob" not in result.output
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    (explanation,) = json.loads(result.stdout)["explanations"]
    assert explanation["probabilities"] is None and explanation["target_names"] == ["the output"]


def test_perturbation_strip_shows_number(tmp_path: Path) -> None:
    picture = Image.open("examples/pictures/digits_37.png").convert("RGB")
    loaded = load("bundled:digits")

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loaded.model

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.inner(pixel_values).logits[:, 3:4]

    from whyformer import show
    from whyformer.evaluation.strip import perturbation_strip

    model = Score().eval()
    e = whyformer.explain(model, picture, "input_x_gradient", processor=loaded.processor)
    strip = perturbation_strip(model, picture, e, loaded.processor)
    assert strip.numeric and strip.probabilities[0, 0] == pytest.approx(float(e.logits[0, 0]), abs=1e-4)
    svg = show.encode(show.strip(strip), "svg").decode()
    assert "%" in svg and strip.predicted == [["the output"] * 10] * 2
