"""The result object: reading, keeping, showing."""

import dataclasses
import json

import pytest
import torch

import whyformer
from show.builders import ATTACK, picture, sentence
from whyformer import Explanation
from whyformer.errors import InputError, LoadError, ModelError
from whyformer.explanation.warnings import degenerate
from zoo import build


def batch(e, times=3):
    """The same sample several times, scores scaled by 1, 2, 3 ..."""
    tensors = {n: torch.cat([getattr(e, n)] * times) for n in ("scores", "target", "logits")}
    tensors["scores"] = torch.cat([e.scores * (i + 1) for i in range(times)])
    lists = {n: getattr(e, n) * times for n in ("tokens", "offsets", "texts") if getattr(e, n) is not None}
    pictures = None if e.pictures is None else torch.cat([e.pictures] * times)
    e = e.with_features(**lists, pictures=pictures)
    return dataclasses.replace(e, **tensors, target_names=e.target_names * times, diagnostics={"conservation": [0.1 * i for i in range(times)], "note": "x"})


def same(a, b):
    for one, other in ((a, b), (a.features, b.features)):
        for field in dataclasses.fields(one):
            x, y = getattr(one, field.name), getattr(other, field.name)
            if field.name != "features":
                assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y, field.name


@pytest.mark.parametrize("e", [picture(), sentence(), batch(picture()), batch(sentence()), sentence(ATTACK), picture(pictures=None),
                               picture(torch.randn(8, 8, dtype=torch.float64), level="pixel", size=(8, 8))])  # fmt: skip
def test_saved_and_loaded_it_is_the_same(e, tmp_path):
    path = e.save(tmp_path / "e.safetensors")
    same(Explanation.load(path), e)
    assert [p.name for p in tmp_path.iterdir()] == ["e.safetensors"]


def test_a_file_that_is_no_explanation(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"not tensors")
    with pytest.raises(LoadError, match="not a saved explanation"):
        Explanation.load(tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="no such file"):
        Explanation.load(tmp_path / "y.safetensors")


def test_a_failed_save_leaves_nothing(tmp_path):
    with pytest.raises((LoadError, Exception)):
        picture().save(tmp_path / "missing" / "e.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_one_sample_of_a_batch():
    e = batch(sentence())
    assert len(e) == 3
    one = e[1]
    assert len(one) == 1
    assert torch.equal(one.scores, e.scores[1:2])
    assert one.texts == [e.texts[1]]
    assert one.diagnostics == {"conservation": [0.1], "note": "x"}
    same(e[-1], e[2])
    assert [float(x.scores.abs().max()) for x in e] == [2.0, 4.0, 6.0] or len(list(e)) == 3
    with pytest.raises(IndexError):
        e[3]


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        picture().level = "token"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_numbers_are_refused(bad):
    with pytest.raises(InputError, match="NaN or infinity"):
        picture(torch.full((4, 6), bad))


def test_an_unknown_level_is_refused():
    with pytest.raises(InputError, match="level must be one of"):
        dataclasses.replace(picture(), level="word")


def test_heatmap_is_bilinear_and_of_the_asked_size():
    e = picture(torch.arange(24.0).reshape(4, 6))
    assert e.heatmap().shape == (1, 32, 48)
    assert e.heatmap((7, 9)).shape == (1, 7, 9)
    assert torch.equal(e.heatmap((4, 6))[0], torch.arange(24.0).reshape(4, 6))
    expected = torch.nn.functional.interpolate(e.scores.reshape(1, 1, 4, 6), size=(32, 48), mode="bilinear")
    assert torch.allclose(e.heatmap(), expected[:, 0])


def test_text_has_no_heatmap():
    with pytest.raises(InputError, match="no heatmap"):
        sentence().heatmap()


def test_probabilities_and_top():
    e = picture()
    assert torch.allclose(e.probabilities().sum(-1), torch.ones(1, dtype=torch.float64))
    assert e.top(0, 2) == [(1, "dog", 3.0, pytest.approx(0.90876, abs=1e-4)), (0, "cat", 0.5, pytest.approx(0.07460, abs=1e-4))]
    several = dataclasses.replace(e, activation="sigmoid")
    assert several.multi_label and not e.multi_label
    assert torch.allclose(several.probabilities(), torch.sigmoid(e.logits.double()))


def test_to_dict_is_json():
    for e in (batch(picture()), batch(sentence())):
        data = json.loads(json.dumps(e.to_dict(), allow_nan=False))
        assert data["scores"] == e.scores.tolist()
        assert data["target"] == e.target.tolist()
        assert "pictures" not in data


def test_its_shapes_in_words():
    assert repr(picture()) == "Explanation(transformer_attribution, patch scores 1x24, target [1])"
    assert str(picture()).startswith("Top 3 classes:")
    assert picture()._repr_html_().startswith("<div")


# -- what is kept is checked -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "value"), [
    ("tokens", 3), ("tokens", ["a"]), ("offsets", [[[1]]]), ("texts", [3]), ("grid", [1, 2, 3]), ("image_size", "32"), ("activation", 1), ("level", None),
    ("settings", []), ("diagnostics", None), ("labels", ["a"]), ("target_names", "dog"), ("geometry", [3]), ("model", 3), ("method", 3), ("surprise", 1),
])  # fmt: skip
def test_a_value_of_another_kind_is_refused_by_its_name(name, value):
    facts = json.loads(json.dumps(sentence().to_dict()))
    with pytest.raises(InputError, match=name):
        Explanation.from_dict({**facts, name: value})


def test_what_may_be_unknown_may_be_missing_and_the_rest_may_not():
    facts = json.loads(json.dumps(sentence().to_dict()))
    for name in ("tokens", "offsets", "texts", "grid", "image_size", "geometry", "model", "labels", "target_names"):
        assert Explanation.from_dict({k: v for k, v in facts.items() if k != name}).method == facts["method"]
    for name in ("level", "method", "settings", "activation", "diagnostics", "scores", "target", "logits"):
        with pytest.raises(InputError, match=name):  # multi_label says as much as the activation
            Explanation.from_dict({k: v for k, v in facts.items() if k not in (name, "multi_label")})


def test_a_file_of_another_kind_inside_is_no_explanation(tmp_path):
    from safetensors.torch import save_file

    e = sentence()
    for change in ({"tokens": 3}, {"format": 2}, {"geometry": [{}]}):
        facts = {k: v for k, v in json.loads(json.dumps(e.to_dict())).items() if k not in ("scores", "target", "logits", "probabilities")}
        header = {"whyformer": json.dumps({"format": 1, **facts, **change})}
        save_file({n: getattr(e, n) for n in ("scores", "target", "logits")}, tmp_path / "x.safetensors", metadata=header)
        with pytest.raises(LoadError):
            Explanation.load(tmp_path / "x.safetensors")
    save_file({"scores": e.scores}, tmp_path / "x.safetensors", metadata={"whyformer": json.dumps({"format": 1, **facts, "geometry": None})})
    with pytest.raises(LoadError, match="target"):
        Explanation.load(tmp_path / "x.safetensors")


# -- features ----------------------------------------------------------------------------------------------------------
def test_features_are_read_through_the_explanation_and_changed_on_a_copy():
    e = sentence()
    for field in dataclasses.fields(e.features):
        assert getattr(e, field.name) is getattr(e.features, field.name)
    other = e.with_features(texts=["x"])
    assert (other.texts, other.tokens) == (["x"], e.tokens)
    assert e.texts != ["x"]


# -- warnings ----------------------------------------------------------------------------------------------------------
ZERO, EQUAL = "all scores are 0, so this map shows no effect of the input", "all scores are equal, so this map highlights nothing"


@pytest.mark.parametrize(("scores", "warned"), [
    ([0, 0, 0], [ZERO]), ([2, 2, 2], [EQUAL]), ([1, 1 + 1e-7, 1], [EQUAL]), ([1, 1 + 1e-5, 1], []), ([0, 0, 1e-30], []), ([-3, -3], [EQUAL]), ([5], []), ([0], [ZERO]),
])  # fmt: skip
def test_maps_that_say_nothing(scores, warned):
    assert degenerate(torch.tensor(scores, dtype=torch.float32)) == warned


def test_warnings_are_read_in_sentences_with_the_samples_they_are_about(tmp_path):
    e = dataclasses.replace(batch(picture()), diagnostics={"warnings": [[ZERO], [], [ZERO, "odd"]]})
    assert e.warnings == [f"sample 0, 2: {ZERO}", "sample 2: odd"]
    assert [one.warnings for one in e] == [[ZERO], [], [ZERO, "odd"]]
    assert Explanation.load(e.save(tmp_path / "e.safetensors")).warnings == e.warnings
    assert Explanation.from_dict(json.loads(json.dumps(e.to_dict()))).warnings == e.warnings
    assert dataclasses.replace(e, diagnostics={"warnings": [[ZERO]] * 3}).warnings == [ZERO]
    with pytest.raises(InputError, match="for each sample"):
        dataclasses.replace(e, diagnostics={"warnings": ["for all"]})
    assert picture().warnings == []


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_a_map_of_zeros_and_a_constant_map_are_warned_of(name):
    """A model whose classifier is 0 loses nothing whatever is taken out; one whose queries are 0 attends evenly."""
    model, inputs = build(name)
    with torch.no_grad():
        model.classifier.weight.zero_()
    with pytest.raises(ModelError, match="nothing arrives at the input"):
        whyformer.explain(model, inputs, "input_x_gradient")
    e = whyformer.explain(model, inputs, "occlusion", patch=8) if name == "hf_vit" else whyformer.explain(model, inputs, "occlusion")
    assert e.scores.abs().max() == 0
    assert e.diagnostics["warnings"] == [[ZERO], [ZERO]]
    model, inputs = build(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "query" in parameter_name or "q_proj" in parameter_name:
                parameter.zero_()
    e = whyformer.explain(model, inputs, "raw_attention", aggregation={"layers": -1})
    assert e.warnings == [EQUAL]
    assert e[1].warnings == [EQUAL]
    assert whyformer.explain(build(name)[0], inputs, "raw_attention").warnings == []
