"""Build tiny random models of transformers classes; one function shrinks any configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn

from zoo import CLASSES, randomise

VOCABULARY = 100
SIDE = 32
# -- shrinking ---------------------------------------------------------------------------------------------------------
# the first pattern that matches the whole name of a setting gives its value, or the value of each item of a list
SMALL: list[tuple[str, int]] = [
    (r"(text_|decoder_|encoder_|src_|tgt_|char_)?vocab_size(_per_layer_input)?|n_tokens", VOCABULARY),
    (r"(moe_|shared_expert_|expert_|dense_|shared_)?(intermediate_size|ffn_hidden_size)(_mlp)?|.*ffn_dim|d_ff|d_inner|hidden_dim|ffn_hidden|moe_intermediate_size|n_inner|.*ffn_size|dim_ff|feed_forward_size|.*mlp_dim|.*intermediate_dim|proj_intermediate", 48),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_groups|num_query_groups", 2),
    (r"(num|n)_(attention_)?heads?|num_attn_heads|.*(encoder|decoder)_attention_heads|n_head|.*num_attention_heads|.*num_heads|attention_heads", 4),
    (r"(attention_)?head_dim|d_kv|qk_head_dim|v_head_dim|.*_head_dim|kv_channels|d_head|size_per_head|dim_head|qkv_dim|attention_head_size", 8),
    (r"(num|n)_(hidden_)?layers?|.*(encoder|decoder)_layers|num_blocks|.*num_hidden_layers|depth|num_(de|en)coder_layers|.*_num_layers|n_layers", 2),
    (r"(hidden|embed|embedding|d_model|model|word_embed_proj|d_embed|emb|token_embed|projection|emb|encoder_hidden|decoder_hidden|encoder_width|decoder_width|vision_hidden|output_proj|classifier_proj|vision_embed|text_embed|joint_embed|lru|q|char|hidden_size|projector_hidden|out_hidden|vis|num_latents|d_latents)_?(size|dim|width|channels)?|d_model|n_embd|dim|.*hidden_size|.*embed_dim|width|embed_dim_per_head|.*projection_(dim|size)|lru_width|emb_dim|d_latents|qk_channels|v_channels", 32),
    (r"max_(position_embeddings|seq_len|sequence_length|source_positions|target_positions|seq_length|target_length)|n_positions|n_ctx|.*max_position_embeddings|max_2d_position_embeddings|model_max_length|seq_length|tokenizer_max_length|original_max_position_embeddings", 64),
    (r"image_size|img_size|video_size|crop_size|resolution|input_size|.*image_size", SIDE),
    (r"(spatial_|image_|frame_)?patch_size", 8),
    (r"(num|n)_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_local_experts|.*num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_?k_experts|.*experts_per_tok", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|num_expert_groups|first_k_dense_replace|moe_num_shared_experts", 1),
    (r"num_frames|frames", 4),
    (r"tubelet_size|temporal_patch_size", 2),
    (r"num_queries|num_detection_tokens|num_query_tokens", 5),
    (r"num_mel_bins|n_mels|num_mel_features|feature_size|input_feat_per_channel", 16),
    (r"(sliding_window|attention_window|local_attention|window_size|block_size|chunk_size)(_size)?|.*sliding_window", 8),
    (r"q_lora_rank|kv_lora_rank|.*lora_rank|.*_rank", 8),
    (r"mamba_(d_state|state_dim)|state_size|ssm_state_size|mamba_dt_rank|time_step_rank", 4),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_(key|value)_heads", 4),
]  # fmt: skip
STAGES: list[tuple[str, Callable[[int], Any]]] = [
    (r"depths|num_blocks|layers|encoder_layers|num_layers|depth", lambda i: 1),
    (r"hidden_sizes|embed_dims|dims|channels|embed_dim|stage_channels|neck_hidden_sizes|encoder_hidden_sizes|hidden_dims", lambda i: 16 * (i + 1)),
    (r"num_attention_heads|num_heads|num_encoder_attention_heads", lambda i: 2),
    (r"window_size", lambda i: 4),
]  # fmt: skip


def shrunk(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Small values for the settings of a configuration (as a mapping) that determine the size of the model."""
    small: dict[str, Any] = {}
    layers = settings.get("num_hidden_layers") or settings.get("num_layers")
    each = {n: v for n, v in settings.items() if isinstance(v, list | tuple) and len(v) == layers and layers > 2}
    kinds = each.get("layer_types", each.get("layers_block_type", ())) if isinstance(layers, int) else ()
    layers_kept = sorted({kinds.index(kind) for kind in kinds})  # one layer of each kind, at least two
    layers_kept = layers_kept if len(layers_kept) > 1 else [0, 1]
    latent = any(
        "kv_lora_rank" in n for n in settings
    )  # latent attention has no grouped heads, and head widths of its own
    for name, value in settings.items():
        number = next((n for pattern, n in SMALL if re.fullmatch(pattern, name)), None)
        if latent and name in ("num_key_value_heads", "head_dim"):
            small[name] = {"num_key_value_heads": 4, "head_dim": 4}[name] if value is not None else None
        elif is_config(name, value):
            small[name] = {**({"model_type": value["model_type"]} if value.get("model_type") else {}), **shrunk(value)}
        elif name in each:
            small[name] = [value[i] if number is None else number for i in layers_kept]
        elif isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
            rule = next((f for pattern, f in STAGES if re.fullmatch(pattern, name)), None)
            if rule is not None:
                small[name] = [rule(i) for i in range(len(value))]
            elif number is not None:
                small[name] = [number] * len(value)
        elif isinstance(value, int) and not isinstance(value, bool) and number is not None and number < value:
            small[name] = len(layers_kept) if value == layers and kinds else number
        elif value is None and name == "head_dim":
            small[name] = 8
    return small


def is_config(name: str, value: Any) -> bool:
    """Return True if a setting is a nested configuration."""
    return isinstance(value, Mapping) and bool(value) and (name.endswith("_config") or "model_type" in value)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Distinct ids inside the small vocabulary: padding is 0, begin 2, end 3, others from 5 on."""
    fixed = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "decoder_start_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 3,
    }
    ids: dict[str, Any] = {}
    for name, value in settings.items():
        if is_config(name, value):
            ids[name] = special_tokens(value)
        elif name in fixed:
            ids[name] = fixed[name]
        elif (
            re.fullmatch(r".*(_token_id|_token_index|_id|_token)", name)
            and isinstance(value, int)
            and not isinstance(value, bool)
        ):
            ids[name] = 5 + len(ids)
    if settings.get("is_encoder_decoder"):
        ids["decoder_start_token_id"] = 2
    return ids


def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; values of ``b`` win."""
    both = dict(a)
    for name, value in b.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def tiny(name: str, settings: Mapping[str, Any] | None = None, attention: str | None = None) -> nn.Module:
    """A shrunk transformers model of this class with random weights."""
    kind = getattr(transformers, name)
    default = kind.config_class().to_dict()
    small = merged(merged(shrunk(default), special_tokens(default)), settings or {})
    if "Classification" in name:
        small["num_labels"] = CLASSES
    config = kind.config_class(**small)
    options = {} if attention is None else {"attn_implementation": attention}
    return randomise(kind._from_config(config, **options))
