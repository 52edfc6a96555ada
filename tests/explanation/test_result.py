"""The result object: reading, keeping, showing."""

import dataclasses
import json

import pytest
import torch

from show.made import ATTACK, picture, sentence
from whyformer import Explanation
from whyformer.errors import InputError, LoadError


def batch(e, times=3):
    """The same sample several times, scores scaled by 1, 2, 3 ..."""
    tensors = {n: torch.cat([getattr(e, n)] * times) for n in ("scores", "target", "logits", "pictures") if getattr(e, n) is not None}
    tensors["scores"] = torch.cat([e.scores * (i + 1) for i in range(times)])
    lists = {n: getattr(e, n) * times for n in ("tokens", "offsets", "texts", "target_names") if getattr(e, n) is not None}
    return dataclasses.replace(e, **tensors, **lists, diagnostics={"conservation": [0.1 * i for i in range(times)], "note": "x"})


def same(a, b):
    for field in dataclasses.fields(Explanation):
        x, y = getattr(a, field.name), getattr(b, field.name)
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
    with pytest.raises(InputError, match="for pictures"):
        sentence().heatmap()


def test_probabilities_and_top():
    e = picture()
    assert torch.allclose(e.probabilities().sum(-1), torch.ones(1, dtype=torch.float64))
    assert e.top(0, 2) == [(1, "dog", 3.0, pytest.approx(0.90876, abs=1e-4)), (0, "cat", 0.5, pytest.approx(0.07460, abs=1e-4))]
    several = dataclasses.replace(e, multi_label=True)
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
