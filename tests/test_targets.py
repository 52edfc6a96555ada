"""Targets map logits to one number per sample, and class names to indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from whyformer.errors import InputError
from whyformer.targets import Contrast, Logit, LogProbability, Probability, class_index
from whyformer.targets.naming import token_ids
from zoo import build
from zoo_evaluate import tiny_bert

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize("index", [1, [1, 2], torch.tensor([1, 2])])
def test_logit(index: object) -> None:
    expected = LOGITS[:, 1] if isinstance(index, int) else LOGITS[[0, 1], [1, 2]]
    assert torch.equal(Logit(index)(LOGITS), expected)  # type: ignore[arg-type]


def test_probability_by_hand() -> None:
    """softmax(0, ln 3) = (1/4, 3/4); sigmoid(ln 3) = 3/4."""
    logits = torch.tensor([[0.0, 3.0]], dtype=torch.float64).log().nan_to_num(neginf=0.0)
    logits[0, 0] = 0
    assert Probability(1)(logits).item() == pytest.approx(3 / 4)
    assert Probability(0)(logits).item() == pytest.approx(1 / 4)
    assert Probability(1, multi_label=True)(logits).item() == pytest.approx(3 / 4)
    assert Probability(0, multi_label=True)(logits).item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("multi_label", [False, True])
def test_log_probability_is_the_logarithm(multi_label: bool) -> None:
    actual = LogProbability([0, 2], multi_label)(LOGITS)
    assert torch.allclose(actual, Probability([0, 2], multi_label)(LOGITS).log())


def test_log_probability_among_the_likeliest() -> None:
    """Of (3, 2, 1, 0) the two likeliest: 3 − log(e³ + e²); the class itself is included if it is not among them."""
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]], dtype=torch.float64, requires_grad=True)
    result = LogProbability([0, 0], among=2)(logits)
    among = [torch.tensor(logits_among, dtype=torch.float64).log_softmax(0)[0] for logits_among in ([3, 2], [0, 2, 3])]
    assert result.tolist() == pytest.approx([float(a) for a in among], abs=1e-12)
    (slope,) = torch.autograd.grad(result.sum(), logits)
    assert slope[0, 2:].tolist() == [0, 0]
    assert slope[1, 1] == 0
    assert torch.allclose(slope.sum(-1), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    for everything in (4, 100):
        assert torch.allclose(LogProbability(1, among=everything)(logits), LogProbability(1)(logits), atol=1e-12)
    assert torch.equal(LogProbability([0, 0], among=[2, 3])(logits), torch.stack([result[0], LogProbability(0, among=3)(logits)[1]]))


@pytest.mark.parametrize("wrong", [{"among": 1}, {"among": True}, {"among": 2.5}, {"among": 3, "multi_label": True}])
def test_invalid_among_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="among"):
        LogProbability(0, **wrong)


def test_contrast_is_a_difference() -> None:
    assert Contrast(2, 0)(LOGITS).tolist() == [3, 3]
    assert Contrast([2, 0], [0, 1])(LOGITS).tolist() == [3, 1]


def test_targets_are_immutable_and_compare_by_value() -> None:
    assert Logit(1) == Logit(1)
    assert Logit(1) != Logit(2)
    with pytest.raises(AttributeError):
        Logit(1).index = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_gradient_methods_are_linear_in_the_target(name: str) -> None:
    """The map of a contrast is the difference of the two classes' maps; a probability scales by p (δ − p)."""
    model, inputs = build(name)

    def scores(target: object) -> torch.Tensor:
        return whyformer.explain(model, inputs, method="input_x_gradient", target=target).scores  # type: ignore[arg-type]

    assert torch.allclose(scores(Contrast(2, 4)), scores(2) - scores(4), atol=1e-12)
    logits = whyformer.explain(model, inputs).logits
    p = logits.softmax(-1)
    mixed = sum(p[:, c].reshape(-1, *[1] * (scores(c).dim() - 1)) * scores(c) for c in range(5))
    assert torch.allclose(scores(LogProbability(1)), scores(1) - mixed, atol=1e-10)


def multi_label(outputs: int, end: bool) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model with a sigmoid for each class, by its config or by its end, and ids of two samples."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config.num_labels, config.problem_type = outputs, None if end else "multi_label_classification"
    model = BertForSequenceClassification(config).double().eval()
    return (EndsInSigmoid(model).eval() if end else model), torch.tensor([[2, 7, 9, 11, 3], [2, 8, 4, 6, 3]])


class EndsInSigmoid(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids).logits.sigmoid()


def by_hand(model: torch.nn.Module, ids: torch.Tensor, value: Any) -> torch.Tensor:
    """Return embedding × gradient of a function of the logits, by autograd."""
    embeddings, inner = [], getattr(model, "inner", model)
    hook = inner.bert.embeddings.register_forward_hook(lambda module, args, out: embeddings.append(out))
    logits = inner(ids).logits
    hook.remove()
    (slope,) = torch.autograd.grad(value(logits).sum(), embeddings[0])
    return (embeddings[0] * slope).sum(-1).detach()


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize(("outputs", "index"), [(3, 1), (3, [2, 0]), (1, 0)])
@pytest.mark.parametrize(("kind", "log"), [(Probability, False), (LogProbability, True)])
def test_probability_of_multi_label_class_is_sigmoid(
    kind: Any, log: bool, outputs: int, index: Any, end: bool
) -> None:
    model, ids = multi_label(outputs, end)
    picked = torch.as_tensor(index).expand(2)

    def value(logits: torch.Tensor) -> torch.Tensor:
        p = logits.sigmoid().gather(1, picked[:, None])
        return p.log() if log else p

    for target in (kind(index), repr(kind(index)), kind(index, multi_label=True)):
        e = whyformer.explain(model, ids, "input_x_gradient", target)
        assert e.activation == "sigmoid"
        assert torch.allclose(e.scores, by_hand(model, ids, value), atol=1e-12)
    # occlusion shows the value itself
    shown = whyformer.explain(model, ids, "occlusion", kind(index), baseline=0)
    logits = getattr(model, "inner", model)
    padded = ids.clone()
    padded[:, 2] = 0
    with torch.no_grad():
        lost = value(logits(ids).logits) - value(logits(padded).logits)
    assert torch.allclose(shown.scores[:, 2], lost[:, 0], atol=1e-7)


@pytest.mark.parametrize("end", [False, True])
def test_measured_probability_of_multi_label_class_is_sigmoid(end: bool) -> None:
    model, ids = multi_label(3, end)
    expected = Probability(1, multi_label=True)
    results = [
        whyformer.arbitrate(model, ids, ["input_x_gradient", "rollout"], target=t, mode="instance", holdout=0.5)
        for t in (Probability(1), expected)
    ]
    assert torch.equal(results[0].selection, results[1].selection)
    e = whyformer.explain(model, ids, "input_x_gradient", Probability(1))
    repeated = whyformer.explain(model, ids, "input_x_gradient", e.diagnostics["target"])
    assert torch.equal(e.scores, repeated.scores)


def test_multi_label_false_explains_the_softmax() -> None:
    model, ids = multi_label(3, False)
    e = whyformer.explain(model, ids, "input_x_gradient", Probability(1, multi_label=False))
    assert torch.allclose(e.scores, by_hand(model, ids, lambda logits: logits.softmax(-1)[:, 1]), atol=1e-12)
    with pytest.raises(InputError, match="omit it"):
        whyformer.explain(model, ids, "input_x_gradient", LogProbability(1, among=2))


def test_explanation_names_its_target() -> None:
    model, inputs = build("bert")
    model.config.id2label = {i: f"class {i}" for i in range(5)}
    assert whyformer.explain(model, inputs, target=[1, 2]).target_names == ["class 1", "class 2"]
    contrast = whyformer.explain(model, inputs, target=Contrast(1, [0, 4]))
    assert contrast.target_names == ["class 1 rather than class 0", "class 1 rather than class 4"]
    among = whyformer.explain(model, inputs, target="LogProbability(1, among=3)")
    assert among.target_names == ["class 1 among the 3 likeliest"] * 2
    assert contrast.target.tolist() == [1, 1]
    custom = whyformer.explain(model, inputs, target=lambda logits: logits.sum(-1))
    assert custom.target_names == ["custom target"] * 2
    assert custom.target.tolist() == [-1, -1]


def test_tensor_of_targets_equals_list() -> None:
    model, inputs = build("bert")
    as_list = whyformer.explain(model, inputs, target=[3, 0])
    assert torch.equal(as_list.scores, whyformer.explain(model, inputs, target=torch.tensor([3, 0])).scores)


# -- class indices and names -------------------------------------------------------------------------------------------
SWAPPED = {0: "1", 1: "0", 2: "cat, 7", 3: "1990"}


@pytest.mark.parametrize(("label", "index"), [
    (0, 0), (1, 1), ("#0", 0), ("#1", 1), ('"1"', 0), ("'0'", 1), (' "0" ', 1), ("2", 2), ("CAT", 2), ("cat, 7", 2), ('"7"', 2), ('"1990"', 3), ("#3", 3),
])  # fmt: skip
def test_number_is_an_index_and_quoted_number_a_name(label: object, index: int) -> None:
    assert class_index(label, SWAPPED, 4) == index


@pytest.mark.parametrize("label", ["0", "1", "7", "1990", " 1 "])
def test_number_that_names_another_class_raises_with_both_spellings(label: str) -> None:
    with pytest.raises(InputError) as caught:
        class_index(label, SWAPPED, 4)
    number = label.strip()
    assert f"Write #{number} for the index" in str(caught.value)
    assert f"'\"{number}\"' with the inner quotes for the name" in str(caught.value)


def test_class_named_by_its_index_is_unambiguous() -> None:
    assert [class_index(str(i), {i: str(i) for i in range(10)}, 10) for i in range(10)] == list(range(10))


@pytest.mark.parametrize("label", ["#4", "4", 4, -1, "-1"])
def test_index_out_of_range_raises_in_any_spelling(label: object) -> None:
    with pytest.raises(InputError, match="out of range: the model has 4 classes, 0 to 3"):
        class_index(label, SWAPPED, 4)


@pytest.mark.parametrize("label", ['"4"', "#x", "#", '"', '""'])
def test_unknown_class_name_raises_in_any_spelling(label: str) -> None:
    with pytest.raises(InputError, match="no class"):
        class_index(label, SWAPPED, 4)


def test_entry_points_resolve_classes_alike() -> None:
    model, inputs = build("hf_vit")
    model.config.id2label = {0: "1", 1: "0", 2: "a", 3: "b", 4: "c"}
    for label, index in (("#0", 0), ('"0"', 1), (1, 1), ("A", 2)):
        assert whyformer.explain(model, inputs, "raw_attention", label).target.tolist() == [index] * 2
        assert whyformer.explain(model, inputs, "raw_attention", [label, 4]).target.tolist() == [index, 4]
        assert whyformer.compare(model, inputs, ["raw_attention"], [label]).explanations[0].target.tolist() == [index] * 2
        assert whyformer.arbitrate(model, inputs, ["raw_attention"], target=label).labels.tolist() == [[index]] * 2
        assert whyformer.attention_maps(model, inputs, target=label, gradient=True).explanation(0).target.tolist() == [index] * 2
        maximized = whyformer.maximize_activation(model, label, steps=1)
        assert maximized.unit == f"class {model.config.id2label[index]}"
    for call in (whyformer.explain, lambda *a, target: whyformer.compare(*a, targets=[target]), lambda *a, target: whyformer.maximize_activation(a[0], target)):
        with pytest.raises(InputError, match="Write #0 for the index"):
            call(model, inputs, target="0")


@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion"])
@pytest.mark.parametrize("mixing", [lambda x: x[:, 0] - x.mean(), lambda x: x[:, 0] / x.norm(), lambda x: x[:, 0].flip(0)])
def test_function_that_mixes_samples_raises(method: str, mixing: Any) -> None:
    """Its number for a sample changed with the rest of the batch."""
    model, inputs = build("bert")
    with pytest.raises(InputError, match="depends on the other samples"):
        whyformer.explain(model, inputs, method, mixing)
    single = {name: value[:1] for name, value in inputs.items()}
    assert len(whyformer.explain(model, single, method, lambda x: x[:, 0] - x.mean())) == 1


def test_function_with_classes_of_each_sample_does_not_mix_samples() -> None:
    model, inputs = build("bert")
    a = whyformer.explain(model, inputs, "input_x_gradient", lambda x: x[[0, 1], [1, 0]] - x.logsumexp(1))
    b = whyformer.explain(model, inputs, "input_x_gradient", LogProbability([1, 0]))
    assert torch.allclose(a.scores, b.scores)


@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion", "transformer_attribution"])
def test_function_that_changes_the_logits_in_place(method: str) -> None:
    """Each call of the function doubled the logits that the next one read."""
    model, inputs = build("bert")
    a = whyformer.explain(model, inputs, method, lambda x: x.mul_(2)[:, 0])
    b = whyformer.explain(model, inputs, method, lambda x: (x * 2)[:, 0])
    assert torch.allclose(a.scores, b.scores)
    assert torch.equal(a.logits, b.logits)


@pytest.mark.parametrize("number", [lambda x: x.argmax(1), lambda x: x[:, 0] > 0, lambda x: x[:, 0] * 1j])
def test_function_must_return_floating_point_numbers(number: Any) -> None:
    model, inputs = build("bert")
    with pytest.raises(InputError, match="must return floating-point numbers"):
        whyformer.explain(model, inputs, "occlusion", number)


@pytest.mark.parametrize("text", ["nope", " nope", "good nope", "😀"])
def test_token_that_the_tokenizer_does_not_know_raises(text: str) -> None:
    """A misspelt target explained the logit of [UNK]."""
    tokenizer = tiny_bert()[1]
    with pytest.raises(InputError, match=r"does not know .*'\[UNK\]'"):
        token_ids(tokenizer, text)
    assert token_ids(tokenizer, "good") == [tokenizer.convert_tokens_to_ids("good")]
    assert token_ids(tokenizer, "[UNK]") == [tokenizer.unk_token_id]
