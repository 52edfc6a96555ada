"""Patch affinity and the method ``auto``."""

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


def last_block_input(model, pixels):
    inputs = []
    handle = model.vit.layers[-1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        model(pixels)
    handle.remove()
    return inputs[0][:, 1:]


@pytest.mark.parametrize("method", ["transformer_attribution", "gae", "libragrad"])
def test_affinity_averages_scores_over_similar_patches(vit, method):
    model, pixels = vit
    plain = whyformer.explain(model, pixels, method, target=1)
    with_affinity = whyformer.explain(model, pixels, method, target=1, affinity=True)
    for hidden, scores, spread in zip(last_block_input(model, pixels), plain.scores, with_affinity.scores, strict=True):
        flat_scores, expected = scores.flatten(), torch.zeros(12, dtype=torch.float64)
        for i in range(12):
            similarities = [torch.nn.functional.cosine_similarity(hidden[i], hidden[j], 0).clamp(min=0) ** 2 for j in range(12)]
            expected[i] = sum(w * s for w, s in zip(similarities, flat_scores, strict=True)) / sum(similarities)
        torch.testing.assert_close(spread.flatten(), expected, rtol=1e-9, atol=1e-12)
    assert "less faithful" in with_affinity.diagnostics["affinity"]
    assert "affinity" not in plain.diagnostics


def test_affinity_without_patch_scores_raises():
    model, inputs = build("bert")
    with pytest.raises(InputError, match="one score per patch"):
        whyformer.explain(model, inputs, "gae", affinity=True)
    with pytest.raises(InputError, match="no setting"):
        whyformer.explain(*build("hf_vit"), "saliency", affinity=True)


# -- auto ----------------------------------------------------------------------------------------------------------
def test_auto_equals_the_method_it_reports(vit):
    model, pixels = vit
    assert "libra_joint" not in METHODS and "libra_attention" not in METHODS  # these have no published source
    for purpose, (method, settings) in (("faithful", CHOICES["image", "faithful"][0]), ("localise", CHOICES["image", "localise"][0])):
        result = whyformer.explain(model, pixels, "auto", purpose=purpose)
        diagnostics = result.diagnostics["auto"]
        assert diagnostics["method"] == method
        assert diagnostics["passed_over"] == {}
        assert diagnostics["settings"] == METHODS[method].complete(settings)
        expected = whyformer.explain(model, pixels, method, **settings)
        assert torch.equal(result.scores, expected.scores)


def test_auto_skips_methods_that_do_not_apply():
    model, inputs = build("hf_swin")
    result = whyformer.explain(model, inputs, "auto")
    diagnostics = result.diagnostics["auto"]
    assert diagnostics["method"] == "lrp_ah_ln"
    assert list(diagnostics["passed_over"]) == ["libragrad"]
    assert torch.equal(result.scores, whyformer.explain(model, inputs, diagnostics["method"], **diagnostics["settings"]).scores)


def test_auto_distinguishes_language_model_and_classifier():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    ids = {"input_ids": torch.randint(3, 40, (2, 7))}
    assert whyformer.explain(LlamaForCausalLM(config).eval(), ids, "auto").diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    assert whyformer.explain(*build("bert"), "auto").diagnostics["auto"]["method"] == "libragrad"


@pytest.mark.parametrize("name", ["bert", "timm_vit", "hf_swin", "llama_lm"])
def test_auto_runs_the_model_once(name):
    """The choice of a method, the method, and the layout of its scores read one pass; facts of the model are measured at the first use."""
    model, inputs = build(name)
    whyformer.explain(model, inputs)
    runs = []
    handle = model.register_forward_pre_hook(lambda *_: runs.append(1))
    whyformer.explain(model, inputs)
    handle.remove()
    assert len(runs) == 1


def test_auto_without_applicable_method_raises(vit, monkeypatch):
    model, pixels = vit
    monkeypatch.setitem(CHOICES, ("image", "faithful"), [])
    with pytest.raises(MethodNotApplicable, match="none of its choices"):
        whyformer.explain(model, pixels, "auto")
