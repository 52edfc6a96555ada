"""The Explanation object: access, saving and display."""

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
    """A batch of the same sample with scores scaled by 1, 2, 3 ..."""
    tensors = {n: torch.cat([getattr(e, n)] * times) for n in ("scores", "target", "logits")}
    tensors["scores"] = torch.cat([e.scores * (i + 1) for i in range(times)])
    lists = {n: getattr(e, n) * times for n in ("tokens", "offsets", "texts") if getattr(e, n) is not None}
    pictures = None if e.pictures is None else torch.cat([e.pictures] * times)
    e = e.with_features(**lists, pictures=pictures)
    return dataclasses.replace(e, **tensors, target_names=e.target_names * times, diagnostics={"conservation": [0.1 * i for i in range(times)], "note": "x"})


def assert_equal(a, b):
    for first, second in ((a, b), (a.features, b.features)):
        for field in dataclasses.fields(first):
            x, y = getattr(first, field.name), getattr(second, field.name)
            if field.name != "features":
                assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y, field.name


@pytest.mark.parametrize("e", [picture(), sentence(), batch(picture()), batch(sentence()), sentence(ATTACK), picture(pictures=None),
                               picture(torch.randn(8, 8, dtype=torch.float64), level="pixel", size=(8, 8))])  # fmt: skip
def test_loaded_explanation_equals_the_saved_one(e, tmp_path):
    path = e.save(tmp_path / "e.safetensors")
    assert_equal(Explanation.load(path), e)
    assert [p.name for p in tmp_path.iterdir()] == ["e.safetensors"]


def test_loading_invalid_or_missing_file_raises(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"not tensors")
    with pytest.raises(LoadError, match="not a saved explanation"):
        Explanation.load(tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="no such file"):
        Explanation.load(tmp_path / "y.safetensors")


def test_failed_save_leaves_no_file(tmp_path, monkeypatch):
    with pytest.raises(LoadError, match="no folder"):
        picture().save(tmp_path / "missing" / "e.safetensors")
    assert list(tmp_path.iterdir()) == []

    def fill_the_disk(path, content):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fill_the_disk)
    with pytest.raises(LoadError, match="No space"):
        picture().save(tmp_path / "e.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_failed_save_keeps_the_earlier_file(tmp_path, monkeypatch):
    path, earlier = tmp_path / "e.safetensors", picture(target=0)
    earlier.save(path)
    monkeypatch.setattr("pathlib.Path.write_bytes", lambda path, content: path.mkdir() or path.write_text(""))
    with pytest.raises(LoadError, match="cannot write"):
        picture(target=1).save(path)
    assert torch.equal(Explanation.load(path).target, earlier.target)


def test_indexing_selects_a_sample():
    e = batch(sentence())
    assert len(e) == 3
    sample = e[1]
    assert len(sample) == 1
    assert torch.equal(sample.scores, e.scores[1:2])
    assert sample.texts == [e.texts[1]]
    assert sample.diagnostics == {"conservation": [0.1], "note": "x"}
    assert_equal(e[-1], e[2])
    assert [float(x.scores.abs().max()) for x in e] == [2.0, 4.0, 6.0] or len(list(e)) == 3
    with pytest.raises(IndexError):
        e[3]


@pytest.mark.parametrize("sample", [1, -2, 1.5, "a", None])
@pytest.mark.parametrize("read", ["top", "words", "placed", "boxes", "logit", "probability", "column"])
def test_sample_that_does_not_exist_is_named(read, sample):
    e = sentence() if read == "words" else picture()
    arguments = (0,) if read in ("logit", "probability", "column") else ()
    with pytest.raises(IndexError if isinstance(sample, int) else TypeError, match="k=" if read == "top" and isinstance(sample, int) else "sample|integer"):
        getattr(e, read)(*arguments, sample=sample)
    first, last = (getattr(e, read)(*arguments, sample=s) for s in (0, -1))
    assert str(first) == str(last)


def test_explanation_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        picture().level = "token"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_scores_raise(bad):
    with pytest.raises(InputError, match="NaN or infinity"):
        picture(torch.full((4, 6), bad))


def test_unknown_level_raises():
    with pytest.raises(InputError, match="level must be one of"):
        dataclasses.replace(picture(), level="word")


def test_heatmap_is_bilinear_with_requested_size():
    e = picture(torch.arange(24.0).reshape(4, 6))
    assert e.heatmap().shape == (1, 32, 48)
    assert e.heatmap((7, 9)).shape == (1, 7, 9)
    assert torch.equal(e.heatmap((4, 6))[0], torch.arange(24.0).reshape(4, 6))
    expected = torch.nn.functional.interpolate(e.scores.reshape(1, 1, 4, 6), size=(32, 48), mode="bilinear")
    assert torch.allclose(e.heatmap(), expected[:, 0])


def test_heatmap_of_text_raises():
    with pytest.raises(InputError, match="no heatmap"):
        sentence().heatmap()


def test_probabilities_and_top_classes():
    e = picture()
    assert torch.allclose(e.probabilities().sum(-1), torch.ones(1, dtype=torch.float64))
    assert e.top(0, 2) == [(1, "dog", 3.0, pytest.approx(0.90876, abs=1e-4)), (0, "cat", 0.5, pytest.approx(0.07460, abs=1e-4))]
    several = dataclasses.replace(e, activation="sigmoid")
    assert several.multi_label and not e.multi_label
    assert torch.allclose(several.probabilities(), torch.sigmoid(e.logits.double()))


def test_to_dict_is_json_serializable():
    for e in (batch(picture()), batch(sentence())):
        data = json.loads(json.dumps(e.to_dict(), allow_nan=False))
        assert data["scores"] == e.scores.tolist()
        assert data["target"] == e.target.tolist()
        assert "pictures" not in data


def test_repr_and_str():
    assert repr(picture()) == "Explanation(transformer_attribution, patch scores 1x24, target [1])"
    assert str(picture()).startswith("Top 3 classes:")
    assert picture()._repr_html_().startswith("<div")


# -- validation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "value"), [
    ("tokens", 3), ("tokens", ["a"]), ("offsets", [[[1]]]), ("texts", [3]), ("grid", [1, 2, 3]), ("image_size", "32"), ("activation", 1), ("level", None),
    ("settings", []), ("diagnostics", None), ("labels", ["a"]), ("target_names", "dog"), ("geometry", [3]), ("model", 3), ("method", 3), ("surprise", 1),
])  # fmt: skip
def test_field_of_wrong_type_raises_with_its_name(name, value):
    facts = json.loads(json.dumps(sentence().to_dict()))
    with pytest.raises(InputError, match=name):
        Explanation.from_dict({**facts, name: value})


def test_optional_fields_may_be_missing_and_required_ones_may_not():
    facts = json.loads(json.dumps(sentence().to_dict()))
    for name in ("tokens", "offsets", "texts", "grid", "image_size", "geometry", "model", "labels", "target_names"):
        assert Explanation.from_dict({k: v for k, v in facts.items() if k != name}).method == facts["method"]
    for name in ("level", "method", "settings", "activation", "diagnostics", "scores", "target", "logits"):
        with pytest.raises(InputError, match=name):
            Explanation.from_dict({k: v for k, v in facts.items() if k != name})


def test_file_with_invalid_metadata_raises(tmp_path):
    from safetensors.torch import save_file

    e = sentence()
    for change in ({"tokens": 3}, {"format": 2}, {"geometry": [{}]}):
        facts = {k: v for k, v in json.loads(json.dumps(e.to_dict())).items() if k not in ("scores", "target", "logits", "probabilities", "multi_label")}
        header = {"whyformer": json.dumps({"format": 1, **facts, **change})}
        save_file({n: getattr(e, n) for n in ("scores", "target", "logits")}, tmp_path / "x.safetensors", metadata=header)
        with pytest.raises(LoadError):
            Explanation.load(tmp_path / "x.safetensors")
    save_file({"scores": e.scores}, tmp_path / "x.safetensors", metadata={"whyformer": json.dumps({"format": 1, **facts, "geometry": None})})
    with pytest.raises(LoadError, match="target"):
        Explanation.load(tmp_path / "x.safetensors")


# -- features ----------------------------------------------------------------------------------------------------------
def test_features_are_attributes_and_with_features_copies():
    e = sentence()
    for field in dataclasses.fields(e.features):
        assert getattr(e, field.name) is getattr(e.features, field.name)
    changed = e.with_features(texts=["x"])
    assert (changed.texts, changed.tokens) == (["x"], e.tokens)
    assert e.texts != ["x"]


# -- warnings ----------------------------------------------------------------------------------------------------------
ZERO, EQUAL = "all scores are 0, so this map shows no effect of the input", "all scores are equal, so this map highlights nothing"


@pytest.mark.parametrize(("scores", "expected"), [
    ([0, 0, 0], [ZERO]), ([2, 2, 2], [EQUAL]), ([1, 1 + 1e-7, 1], [EQUAL]), ([1, 1 + 1e-5, 1], []), ([0, 0, 1e-30], []), ([-3, -3], [EQUAL]), ([5], []), ([0], [ZERO]),
])  # fmt: skip
def test_degenerate_maps_have_a_warning(scores, expected):
    assert degenerate(torch.tensor(scores, dtype=torch.float32)) == expected


def test_warnings_name_their_samples(tmp_path):
    e = dataclasses.replace(batch(picture()), diagnostics={"warnings": [[ZERO], [], [ZERO, "odd"]]})
    assert e.warnings == [f"sample 0, 2: {ZERO}", "sample 2: odd"]
    assert [sample.warnings for sample in e] == [[ZERO], [], [ZERO, "odd"]]
    assert Explanation.load(e.save(tmp_path / "e.safetensors")).warnings == e.warnings
    assert Explanation.from_dict(json.loads(json.dumps(e.to_dict()))).warnings == e.warnings
    assert dataclasses.replace(e, diagnostics={"warnings": [[ZERO]] * 3}).warnings == [ZERO]
    with pytest.raises(InputError, match="for each sample"):
        dataclasses.replace(e, diagnostics={"warnings": ["for all"]})
    assert picture().warnings == []


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_zero_and_constant_maps_have_a_warning(name):
    """With a zero classifier no occlusion has an effect; with zero queries the attention is uniform."""
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
