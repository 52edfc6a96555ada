"""Adapters of peft are loaded by name with their base model, and explained as the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import whyformer
from whyformer.errors import LoadError
from whyformer.models.loading import load
from zoo import randomise

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PICTURES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
IDS = torch.arange(4, 16).view(2, 6)


def base_bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**SIZES))


def base_llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0))


def base_vit() -> nn.Module:
    return hf.ViTModel(hf.ViTConfig(**PICTURES), add_pooling_layer=False)


def saved(tmp_path: Path, base: Any, cls: Any, config: Any, inputs: Any, **labels: int) -> tuple[str, torch.Tensor]:
    """Save a base model and an adapter of it; return the folder of the adapter, and the logits of the adapted model."""
    torch.manual_seed(0)
    randomise(base()).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(cls.from_pretrained(tmp_path / "base", **labels), config())
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        return str(tmp_path / "adapter"), model(inputs).logits


LORA = {"r": 2, "lora_alpha": 4}
CASES = {
    "new head": (base_bert, hf.AutoModelForSequenceClassification, lambda: peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], **LORA), IDS, {"num_labels": 5}),
    "class per token": (base_bert, hf.AutoModelForTokenClassification, lambda: peft.IA3Config(task_type="TOKEN_CLS", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]), IDS, {"num_labels": 4}),
    "language model": (base_llama, hf.AutoModelForCausalLM, lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA), IDS, {}),
    "no task": (base_vit, hf.AutoModelForImageClassification, lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj", "query", "value"], modules_to_save=["classifier"], **LORA), torch.randn(2, 3, 16, 16), {"num_labels": 3}),
    "learned prompt": (base_llama, hf.AutoModelForCausalLM, lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), IDS, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_loaded_adapter_has_the_logits_of_the_adapted_model(name: str, tmp_path: Path) -> None:
    base, cls, config, inputs, labels = CASES[name]
    folder, expected = saved(tmp_path, base, cls, config, inputs, **labels)
    model = load(folder).model
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).logits, expected, rtol=1e-4, atol=1e-5)
    mergeable = name != "learned prompt"
    assert any("lora" in n for n, _ in model.named_parameters()) is False and isinstance(model, hf.PreTrainedModel) is mergeable
    position = {"target": whyformer.targets.Token(0, 1)} if name == "class per token" else {"target": 1}
    e = whyformer.explain(folder, inputs, "input_x_gradient", **position)
    assert e.scores.shape[0] == 2 and bool(e.scores.isfinite().all())


def test_adapter_of_a_running_model_has_the_scores_of_the_merged_model() -> None:
    """Methods that differentiate do not depend on whether a layer and its adapter are one product or two."""
    model = randomise(hf.BertForSequenceClassification(hf.BertConfig(**SIZES))).double()
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], **LORA)).double()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted.eval()
    methods = ("libragrad", "attnlrp", "gae", "integrated_gradients", "value_zeroing")
    scores = [whyformer.explain(adapted, IDS, method, 1).scores for method in methods]
    merged = adapted.merge_and_unload()
    for method, before in zip(methods, scores, strict=True):
        torch.testing.assert_close(before, whyformer.explain(merged, IDS, method, 1).scores, rtol=1e-7, atol=1e-10)


def test_unusable_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, cls, config, inputs, labels = CASES["new head"]
    folder, _ = saved(tmp_path, base, cls, config, inputs, **labels)
    weights, settings = Path(folder) / "adapter_model.safetensors", Path(folder) / "adapter_config.json"
    text = settings.read_text()
    with monkeypatch.context() as patch:
        patch.setattr("whyformer.models.adapters.find_spec", lambda _: None)
        with pytest.raises(LoadError, match=r"whyformer\[adapters\]"):
            load(folder)
    settings.write_text(json.dumps({**json.loads(text), "base_model_name_or_path": str(tmp_path / "elsewhere")}))
    with pytest.raises(LoadError, match="elsewhere"):
        load(folder)
    settings.write_text(json.dumps({**json.loads(text), "base_model_name_or_path": None}))
    with pytest.raises(LoadError, match="base model"):
        load(folder)
    settings.write_text(json.dumps({**json.loads(text), "target_modules": ["query", "key", "value"]}))
    with pytest.raises(LoadError, match="missing"):
        load(folder)
    settings.write_text(text)
    weights.rename(weights.with_name("adapter_model.bin"))
    with pytest.raises(LoadError, match="pickle"):
        load(folder)
