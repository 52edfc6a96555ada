"""Tiny random mixture-of-experts models of transformers: all implementations of experts, single samples and padded batches."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import pad

import whyformer
from zoo import LENGTHS, TOKENS, VOCABULARY, randomise, rows, text

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "head_dim": 8,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3Moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "Olmoe": {},
    "Glm4Moe": {"partial_rotary_factor": 0.5},
    "DeepseekV3": {
        "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "GptOss": {},
    "Llama4": {"intermediate_size_mlp": 48, "num_experts_per_tok": 1, "attention_chunk_size": 32},
}  # fmt: skip
# these use the expert loop of another family in the list
SAME_EXPERT_LOOP = {"Qwen3Moe", "Olmoe", "Glm4Moe"}
METHODS = ["transformer_attribution", "lrp", "lrp_ah_ln"]


def build_model(name: str, experts: str | None) -> nn.Module:
    import transformers

    kind = f"{name}TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, kind)(**{**_COMMON, **FAMILIES[name]})
    options = {} if experts is None else {"experts_implementation": experts}
    return randomise(getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager", **options))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.whole if n in SAME_EXPERT_LOOP else ()) for n in FAMILIES])
def test_expert_implementations_have_same_scores(name: str, method: str) -> None:
    """Expert loop, grouped and batched matrix products give the same scores; a batch equals single samples."""
    implementations = [None] if name == "Llama4" else ["eager", "grouped_mm", "batched_mm"]
    results = [whyformer.explain(build_model(name, implementation), text(), method, target=3).scores for implementation in implementations]
    assert results[0].isfinite().all()
    assert (results[0].abs().amax(-1) > 0).all()
    assert all(close(scores, results[0], 1e-4) for scores in results[1:])
    for implementation, batch in zip(implementations, results, strict=True):
        model = build_model(name, implementation)
        for i, length in enumerate(LENGTHS):
            single = whyformer.explain(model, rows(text(), i, crop=True), method, target=3).scores[0]
            assert close(pad(single, (0, TOKENS - length)), batch[i], 1e-4)


def test_gradient_of_mixture_equals_autograd() -> None:
    model = build_model("Mixtral", "eager")
    vectors: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        vectors.append(output.detach().requires_grad_())
        return vectors[-1]

    handle = model.model.embed_tokens.register_forward_hook(make_leaf)
    inputs = rows(text(), 0)
    model(**inputs).logits[0, -1, 3].backward()
    handle.remove()
    scores = whyformer.explain(model, inputs, "input_x_gradient", target=3).scores
    assert close(scores, (vectors[0] * vectors[0].grad).sum(-1).detach(), 1e-5)
