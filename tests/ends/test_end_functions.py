"""A model with a final sigmoid, softmax or log-softmax has the scores of the model without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from whyformer import explain, targets
from whyformer.evaluation import evaluate
from whyformer.models.output import Output

METHODS = ["attnlrp", "cp_lrp", "libragrad", "lrp_ah", "lrp_ah_ln", "lrp", "transformer_attribution", "gae", "gradcam",
           "input_x_gradient", "integrated_gradients", "occlusion", "rollout", "decompx", "partial_lrp"]  # fmt: skip

ENDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sigmoid": ("sigmoid", torch.sigmoid),
    "module": ("sigmoid", nn.Sigmoid()),
    "sigmoid by hand": ("sigmoid", lambda z: 1 / (1 + torch.exp(-z))),
    "softmax": ("softmax", lambda z: z.softmax(-1)),
    "softmax by hand": ("softmax", lambda z: (e := (z - z.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)),
    "exp of log_softmax": ("softmax", lambda z: nn.functional.log_softmax(z, 1).exp()),
    "log_softmax": ("log_softmax", nn.LogSoftmax(-1)),
    "z - logsumexp": ("log_softmax", lambda z: z - z.logsumexp(-1, keepdim=True)),
    "logsigmoid": ("logsigmoid", nn.functional.logsigmoid),
    "two classes": ("softmax", lambda z: z[:, :2].softmax(-1)),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """An image classifier with the function ``end`` on its logits."""

    def __init__(self, end: Callable[[Tensor], Tensor] | None = None, classes: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width) * 0.5)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.end = end
        self.double().eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        z = self.head(self.norm(x)[:, 0])
        return z if self.end is None else self.end(z)


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def without_end(end: str) -> Model:
    return Model((lambda z: z[:, :2]) if end == "two classes" else None)


@pytest.mark.parametrize("end", ENDS)
def test_end_function_does_not_change_scores_of_targets(end: str) -> None:
    name, function = ENDS[end]
    model, reference = Model(function), without_end(end)
    for target in (None, 0, 1, [1, 0], targets.Contrast(0, 1)):
        actual, expected = (explain(m, pictures(), "attnlrp", target) for m in (model, reference))
        torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(actual.logits, expected.logits)
        assert actual.diagnostics["end_function"] == name and "end_function" not in expected.diagnostics
    assert "sigmoid" not in name or actual.multi_label


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", ["sigmoid by hand", "softmax", "log_softmax"])
def test_end_function_does_not_change_scores_of_methods(end: str, method: str) -> None:
    actual, expected = (explain(m, pictures(), method, 1) for m in (Model(ENDS[end][1]), Model()))
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("end", ["sigmoid", "softmax", "log_softmax"])
@pytest.mark.parametrize("method", ["lrp", "input_x_gradient", "occlusion"])
def test_target_function_is_applied_to_the_model_output(end: str, method: str) -> None:
    function = ENDS[end][1]
    actual = explain(Model(function), pictures(), method, lambda p: p[:, 2])
    expected = explain(Model(), pictures(), method, lambda z: function(z)[:, 2])
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-8, atol=1e-11)
    assert "end_function" not in actual.diagnostics


class Reader(nn.Module):
    """A text classifier with the function ``end`` on its logits."""

    def __init__(self, end: Callable[[Tensor], Tensor] | None = None, classes: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.bert, self.head = BertModel(BertConfig(vocab_size=50, **sizes)), nn.Linear(16, classes)
        self.end = end
        self.double().eval().requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        z = self.head(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])
        return z if self.end is None else self.end(z)


def ids(count: int = 2) -> Tensor:
    return torch.randint(3, 50, (count, 5), generator=torch.Generator().manual_seed(2))


SIGMOIDS = {"sigmoid": True, "sigmoid by hand": True, "logsigmoid": True, "softmax": False, "log_softmax": False}


@pytest.mark.part(times=2)
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("end", SIGMOIDS)
@pytest.mark.parametrize(("kind", "baseline"), [(Model, "zero"), (Model, "mean"), (Reader, "zero")])
def test_completeness_is_measured_before_the_end_function(
    kind: type[Model] | type[Reader], baseline: str, end: str, classes: int
) -> None:
    if classes == 1 and not SIGMOIDS[end]:
        pytest.skip("a softmax of one logit is always 1")
    model, bare = kind(ENDS[end][1], classes), kind(None, classes)
    inputs = pictures() if kind is Model else ids()
    target_values: list[Any] = [None, 0, targets.Probability(0, SIGMOIDS[end]), targets.LogProbability(0, SIGMOIDS[end])]
    for target in target_values if classes == 1 else [*target_values, targets.Contrast(0, 2), targets.Probability([1, 2], SIGMOIDS[end])]:
        actual, expected = (explain(m, inputs, "integrated_gradients", target, baseline=baseline, steps=6) for m in (model, bare))
        actual_difference, expected_difference = (e.diagnostics["completeness"]["difference"] for e in (actual, expected))
        assert actual_difference == pytest.approx(expected_difference, rel=1e-9, abs=1e-12)
        assert actual.warnings == expected.warnings
        torch.testing.assert_close(actual.scores, expected.scores)
    if kind is Model and baseline == "zero":
        with torch.no_grad():
            z, baseline_logits = bare(inputs), bare(torch.zeros_like(inputs))
        figure = explain(model, inputs, "integrated_gradients", 0, steps=40).diagnostics["completeness"]
        assert figure["difference"] == pytest.approx((z - baseline_logits)[:, 0].tolist())
        assert max(figure["error"]) < 0.05 * max(map(abs, figure["difference"]))


def test_probabilities_equal_the_model_output() -> None:
    for end in ("sigmoid", "softmax", "log_softmax"):
        model = Model(ENDS[end][1])
        actual = explain(model, pictures(), "gae", 0)
        returned = model(pictures())
        torch.testing.assert_close(actual.probabilities(), returned.exp() if end == "log_softmax" else returned)


def test_end_function_with_probability_target() -> None:
    actual, expected = (
        explain(m, pictures(), "lrp_ah_ln", targets.Probability(2)) for m in (Model(ENDS["softmax"][1]), Model())
    )
    torch.testing.assert_close(actual.scores, expected.scores)


def test_other_final_functions_are_no_end_functions() -> None:
    """Outputs between 0 and 1 of other functions, and a sigmoid inside the model."""
    for end in (lambda z: z.sigmoid() ** 2, lambda z: z.clamp(0, 1), lambda z: -z.abs()):
        actual = explain(Model(end), pictures(), "occlusion", 1)
        assert "end_function" not in actual.diagnostics
        torch.testing.assert_close(actual.logits, Model(end)(pictures()))


@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion"])
def test_half_precision_logits_similar_to_log_probabilities_are_logits(method: str) -> None:
    """The logits are negative and equal, to three digits, the log softmax of an earlier tensor."""
    model, shown = Model(lambda z: (-8 - 4 * z.tanh()) / 8).bfloat16(), pictures().bfloat16()
    actual = explain(model, shown, method, 0)
    assert "end_function" not in actual.diagnostics
    torch.testing.assert_close(actual.logits, model(shown))


def test_scaled_logits_of_granite_in_half_precision() -> None:
    """Granite divides its logits by a constant."""
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = GraniteConfig(vocab_size=64, **sizes, num_key_value_heads=2, logits_scaling=8.0)
    model, ids = GraniteForCausalLM(config).bfloat16().eval(), torch.randint(3, 64, (1, 9))
    state = model.model(ids).last_hidden_state[0, -1].detach()
    model.lm_head.weight.data = -torch.linspace(4, 12, 64)[:, None].bfloat16() * state / state.square().sum()
    actual = explain(model, ids, "input_x_gradient")
    assert "end_function" not in actual.diagnostics
    torch.testing.assert_close(actual.logits, model(ids).logits[:, -1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("end", ["softmax", "log_softmax", "sigmoid"])
def test_softmax_over_a_single_output_is_stated(end: str, classes: int) -> None:
    for target in (None, 0):
        e = explain(Model(ENDS[end][1], classes), pictures(), "gae", target)
        torch.testing.assert_close(e.logits, Model(None, classes)(pictures()))
        constant = classes == 1 and end != "sigmoid"
        assert all(any("softmax" in w for w in e[i].warnings) is constant for i in range(2))
        assert e.activation == ("identity" if constant else "sigmoid" if end == "sigmoid" else "softmax")


def test_constant_output_is_no_end_function() -> None:
    model = Model(lambda z: z * 0 + 0.5)
    assert "end_function" not in explain(model, pictures(), "occlusion", 1).diagnostics


def test_end_function_before_reshape_or_in_a_dict() -> None:
    expected = explain(Model(classes=1), pictures(), "attnlrp", 0)
    ends = (lambda z: z.sigmoid().squeeze(-1), lambda z: z.sigmoid()[:, 0], lambda z: z.squeeze(-1).sigmoid(), lambda z: {"logits": z.sigmoid()})
    for end in ends:
        actual = explain(Model(end, classes=1), pictures(), "attnlrp", 0)
        torch.testing.assert_close(actual.scores, expected.scores)


def test_end_function_does_not_change_evaluation() -> None:
    figures = [evaluate(m, pictures(), explain(m, pictures(), "gae", 1)) for m in (Model(ENDS["softmax"][1]), Model())]
    assert str(figures[0]) == str(figures[1])


def test_model_without_end_function_needs_no_further_passes() -> None:
    model, calls = Model(lambda z: z + 100), []
    model.register_forward_hook(lambda *_: calls.append(1))
    explain(model, pictures(), "input_x_gradient", 1)
    first = len(calls)
    explain(model, pictures(), "input_x_gradient", 1)
    assert len(calls) - first <= first
    assert isinstance(Output(model, model(pictures())).logits, Tensor)


def test_end_function_on_token_logits() -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    bert = BertForMaskedLM(config).double().eval()

    class WithSoftmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.config = bert, config

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.bert(input_ids=input_ids).logits.softmax(-1)

    ids = torch.randint(4, 40, (2, 7))
    actual, expected = (explain(m, ids, "attnlrp", targets.Token(3, 17)) for m in (WithSoftmax().eval(), bert))
    torch.testing.assert_close(actual.scores, expected.scores)
