"""Affinity of patches, and the choice ``auto``."""

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import whyformer
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.methods.auto import CHOICES
from whyformer.methods.registry import METHODS
from zoo import build


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=32, image_size=(24, 32), patch_size=8,
        num_labels=5,
    )  # fmt: skip
    model = ViTForImageClassification(config).double().eval()
    return model, torch.randn(3, 3, 24, 32, dtype=torch.float64)


def entering_last(model, pixels):
    kept = []
    handle = model.vit.layers[-1].register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    with torch.no_grad():
        model(pixels)
    handle.remove()
    return kept[0][:, 1:]


@pytest.mark.parametrize("method", ["transformer_attribution", "gae", "libragrad"])
def test_affinity_spreads_over_patches_that_look_alike(vit, method):
    model, pixels = vit
    plain = whyformer.explain(model, pixels, method, target=1)
    found = whyformer.explain(model, pixels, method, target=1, affinity=True)
    for hidden, scores, spread in zip(entering_last(model, pixels), plain.scores, found.scores, strict=True):
        flat, wanted = scores.flatten(), torch.zeros(12, dtype=torch.float64)
        for i in range(12):
            alike = [torch.nn.functional.cosine_similarity(hidden[i], hidden[j], 0).clamp(min=0) ** 2 for j in range(12)]
            wanted[i] = sum(w * s for w, s in zip(alike, flat, strict=True)) / sum(alike)
        torch.testing.assert_close(spread.flatten(), wanted, rtol=1e-9, atol=1e-12)
    assert "less faithful" in found.diagnostics["affinity"]
    assert "affinity" not in plain.diagnostics


def test_affinity_is_for_patches_alone():
    model, inputs = build("bert")
    with pytest.raises(InputError, match="one score per patch"):
        whyformer.explain(model, inputs, "gae", affinity=True)
    with pytest.raises(InputError, match="no setting"):
        whyformer.explain(*build("hf_vit"), "saliency", affinity=True)


# -- auto ----------------------------------------------------------------------------------------------------------
def test_auto_is_the_method_that_it_names(vit):
    model, pixels = vit
    assert "libra_joint" not in METHODS and "libra_attention" not in METHODS  # they have no source
    for purpose, (method, settings) in (("faithful", CHOICES["image", "faithful"][0]), ("localise", CHOICES["image", "localise"][0])):
        found = whyformer.explain(model, pixels, "auto", purpose=purpose)
        said = found.diagnostics["auto"]
        assert said["method"] == method
        assert said["passed_over"] == {}
        assert said["settings"] == METHODS[method].complete(settings)
        wanted = whyformer.explain(model, pixels, method, **settings)
        assert torch.equal(found.scores, wanted.scores)


def test_auto_takes_the_next_where_one_does_not_apply():
    model, inputs = build("hf_swin")
    found = whyformer.explain(model, inputs, "auto")
    said = found.diagnostics["auto"]
    assert said["method"] == "lrp_ah_ln"
    assert list(said["passed_over"]) == ["libragrad"]
    assert torch.equal(found.scores, whyformer.explain(model, inputs, said["method"], **said["settings"]).scores)


def test_auto_knows_a_language_model_from_a_classifier():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    ids = {"input_ids": torch.randint(3, 40, (2, 7))}
    assert whyformer.explain(LlamaForCausalLM(config).eval(), ids, "auto").diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    assert whyformer.explain(*build("bert"), "auto").diagnostics["auto"]["method"] == "libragrad"


def test_auto_says_when_nothing_applies(vit, monkeypatch):
    model, pixels = vit
    monkeypatch.setitem(CHOICES, ("image", "faithful"), [])
    with pytest.raises(MethodNotApplicable, match="none of its choices"):
        whyformer.explain(model, pixels, "auto")
