"""Settings of families whose parts ``shrinking.shrunk`` would make inconsistent."""

from __future__ import annotations

from typing import Any

from shrinking import VOCABULARY

_ONE_GROUP = {"num_key_value_heads": 4}
_MLA = {**_ONE_GROUP, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_SOUND = {
    "conv_dim": [32, 32, 32],
    "conv_kernel": [5, 3, 3],
    "conv_stride": [4, 2, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_WINDOWS = {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}
_BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": _RESNET}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}
_MROPE_LINEAR = {"text_config": {**_LINEAR, **_MROPE["text_config"]}}
# family, or kind/family -> settings that shrinking by name gets wrong
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl"), _MROPE),
    "qwen2_5_vl": {**_MROPE, "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    **dict.fromkeys(("qwen3_5_moe", "qwen4_exp"), _MROPE_LINEAR),
    "llava_next": {"image_grid_pinpoints": [[32, 32]]}, "llava_next_video": {"image_grid_pinpoints": [[32, 32]]}, "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "vipllava": {"vision_feature_layers": [-1, -2]}, "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "gemma3": {"mm_tokens_per_image": 4}, "shieldgemma2": {"mm_tokens_per_image": 4},
    "aria": {"projector_patch_to_query_dict": {16: 4}, "text_config": {"num_key_value_heads": 4}},
    "florence2": {"vision_config": {"patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2], "window_size": 2, "embed_dim": [16, 16, 32, 32], "num_heads": [2] * 4, "num_groups": [2] * 4, "projection_dim": 32, "image_size": 64}},
    **dict.fromkeys(("esmc", "glm5_next"), _ONE_GROUP),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "bailing_hybrid", "youtu", "minicpm3", "mistral4", "mistral_large4"), _MLA),
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm", "sew", "sew-d"), _SOUND),
    "data2vec-audio": {**_SOUND, "conv_pos_kernel_size": 3},
    **dict.fromkeys(("swin", "donut-swin", "swinv2"), _WINDOWS),
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), _BACKBONE),
    "deformable_detr": {**_BACKBONE, "backbone_config": {**_RESNET, "hidden_sizes": [8, 16, 24], "depths": [1, 1, 1], "out_features": ["stage2", "stage3"]}, "num_feature_levels": 3},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _LINEAR),
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "qwen3_5": _MROPE_LINEAR,
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4, "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_headdim": 16, "n_mamba_heads": 4},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 5, "pad_token_id": 0}, "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16, "embedding_size": 16},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "xmod": {"default_language": "en_XX"},
    "bert-generation": {"is_decoder": True},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "perceiver": {"num_self_attends_per_block": 1, "num_latents": 8, "image_size": 16},
    "vjepa2": {"frames_per_clip": 4}, "vivit": {"tubelet_size": [2, 8, 8]}, "audio-spectrogram-transformer": {"max_length": 32},
    "nemotron": {"num_key_value_heads": 4, "head_dim": 8}, "mra": {"block_per_row": 1},
    "cvt": {"embed_dim": [16, 32], "num_heads": [1, 2], "depth": [1, 1], **{n: v[:2] for n, v in {"patch_sizes": [3, 3, 3], "patch_stride": [2, 2, 2], "patch_padding": [1, 1, 1], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0] * 2, "drop_rate": [0.0] * 2, "drop_path_rate": [0.0] * 2, "qkv_bias": [True] * 2, "cls_token": [False, True], "qkv_projection_method": ["dw_bn"] * 2, "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}.items()}},
    "levit": {"hidden_sizes": [16, 32], "num_attention_heads": [2, 2], "depths": [1, 1], "key_dim": [8, 8], "mlp_ratio": [2, 2], "attention_ratio": [2, 2], "down_ops": [["Subsample", 8, 2, 2, 2, 2]], "image_size": 64, "patch_size": 16},
    **{f: {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "out_indices": [1, 2, 3, 4]} for f in ("dpt", "tipsv2_dpt")},
    "bamba": {"attn_layer_indices": [1]}, "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3}, "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48, "num_attention_heads": 4},
    "mobilevitv2": {"base_attn_unit_dims": [16, 24, 32], "n_attn_blocks": [1, 1, 1], "width_multiplier": 0.25, "image_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 2, "state_size": 8},
}  # fmt: skip

# -- detection and segmentation ----------------------------------------------------------------------------------------
_HGNET = {
    "model_type": "hgnet_v2", "embedding_size": 8, "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 24],
    "stage_mid_channels": [8] * 4, "stage_out_channels": [16, 16, 24, 24], "hidden_sizes": [16, 16, 24, 24], "depths": [1] * 4,
    "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4, "stage_kernel_size": [3] * 4,
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_LEVELS = {
    "backbone_config": _HGNET, "encoder_in_channels": [16, 24, 24], "decoder_in_channels": [32] * 3, "feat_strides": [8, 16, 32],
    "encode_proj_layers": [2], "image_size": 64,
}  # fmt: skip
_RT_RESNET = {
    "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 24], "depths": [1] * 4, "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_RT_DETR = {**_LEVELS, "backbone_config": _RT_RESNET}
SETTINGS |= {
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _RT_DETR),
    **dict.fromkeys(("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v4"), _LEVELS),
    "pp_doclayout_v3": {**_LEVELS, "backbone_config": {**_HGNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, "encoder_in_channels": [16, 24, 24], "mask_feature_channels": [8, 8], "x4_feat_dim": 16},
    "lw_detr": {"backbone_config": {"model_type": "lw_detr_vit", "image_size": 32, "pretrain_image_size": 32, "patch_size": 4, "num_windows": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "window_block_indices": [0], "out_indices": [1, 2]}, "projector_scale_factors": [2.0, 0.5], "group_detr": 2, "image_size": 32},
    "upernet": {"backbone_config": {"model_type": "swin", **_WINDOWS, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 2, "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, "pool_scales": [1, 2], "auxiliary_in_channels": 64, "auxiliary_channels": 16, "hidden_size": 16, "image_size": 64},
    "align": {"projection_dim": 32, "vision_config": {"image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 3], "in_channels": [8, 8], "out_channels": [8, 16], "strides": [2, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "hidden_dim": 32}},
}  # fmt: skip

# -- pictures among words ----------------------------------------------------------------------------------------------
_VIT = {"image_size": 32, "patch_size": 8}
_GEMMA3N = {"num_kv_shared_layers": 1, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3, "intermediate_size": [48] * 3, "activation_sparsity_pattern": [0.5, 0.0, 0.0], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90}
_QWEN4 = {**_LINEAR, "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8, "ngram_vocab_size_base": 50, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1}
_MUSE = {"out_hidden_size": 128, "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}}
_INSTRUCT = {"image_token_index": 5, "video_token_index": 6, "text_config": {"model_type": "opt", "word_embed_proj_dim": 32}}
_MINICPM = {"text_config": _LINEAR, "insert_layer_id": 0}
_CODES = {"base_channels": 32, "channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "latent_channels": 32, "embed_dim": 16}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"], "unpadded_vocab_size": VOCABULARY}
_INKLING2 = {**{n: v for n, v in _INKLING.items() if n != "mlp_layer_types"}, "n_layers_per_attn_res_block": 1}
_DOTS3 = {"num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8, "layer_types": ["indexed_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1, "shared_experts_intermediate_size": 48, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8}
_LETTERS = {"<image>": 5, **{f"IMGIMG{c}Z": 10 + i for i, c in enumerate("ABCDEFGHIJ")}}
_NUMBERS = {"<image>": 5, "<|extra_200|>": 6, **{f"<|visual token {i:06d}|>": 10 + i for i in range(16)}}
SETTINGS |= {
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_mci0", "do_pooling": True, "global_pool": "avg", "hidden_size": 128, "model_args": {"inference_mode": True, "layers": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 32], "cls_ratio": 4.0}}},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "vit_pe_core_tiny_patch16_384", "model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "global_pool": "", "use_post_transformer_norm": False}}},
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": {"architecture": "test_efficientnet", "hidden_size": 256, "model_args": None}, "vision_soft_tokens_per_image": 1},
    "janus": {"vision_config": {**_VIT, "hidden_size": 32, "projection_dim": 32, "depth": 2}, "vq_config": {**_CODES, "projection_dim": 32, "image_token_embed_dim": 32, "num_embeddings": 16}},
    "blip-2": {"image_token_index": 5, "text_config": {"model_type": "opt", "word_embed_proj_dim": 32}},
    "instructblip": _INSTRUCT, "instructblipvideo": {n: v for n, v in _INSTRUCT.items() if n != "image_token_index"},
    "two towers/blip-2": {"image_token_index": None, "qformer_config": {"use_qformer_text_input": True}},
    "kosmos-2.5": {"image_token_id": 5, "latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 192}},
    "granite_docling": {"vision_config": {"scale_factor": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "use_fine_route": False}},
    "inkling2": {"text_config": _INKLING2, "vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32, "posemb_grid_size": 4}},
    "inkling_mm_model": {"text_config": _INKLING, "vision_config": {"num_hidden_layers": 2}},
    "dots3_note": {"text_config": _DOTS3, "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "sparse"], "per_layer_config": {}}, "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8}},
    "fuyu": {"patch_size": 8},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "position_embedding_size": 16}},
    "kosmos-2": {"image_token_id": 5, "latent_query_num": 4, "vision_config": _VIT},
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": {"intermediate_layers_indices": [0], "num_global_layers": 1, "vision_output_dim": 64}},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 192, "seq_len": 16}},
    "chameleon": {"max_position_embeddings": 128, "vocabulary_map": _LETTERS, "image_token_id": 5, "vq_config": {**_CODES, "resolution": 32, "num_embeddings": 10}},
    "emu3": {"text_config": {"max_position_embeddings": 128}, "vocabulary_map": _NUMBERS, "image_token_id": 5, "vq_config": {**_CODES, "latent_channels": 4, "embed_dim": 4, "codebook_size": 16, "hidden_size": 32, "attn_resolutions": [2]}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}},
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1], "alpha": 1.0, "factor": 1.0}}},
    "llama4": {"vision_config": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}, "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16, "num_key_value_heads": 4}},
    "gemma3n_text": _GEMMA3N, "causal language model/emu3": {}, "causal language model/mllama": {},
    "kimi_k25": {"text_config": {**_MLA, "first_k_dense_replace": 1}},
    "exaone4_5": {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}, "vision_start_token_id": 20, "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "qwen3_omni_moe_thinker": {**_MROPE, "vision_start_token_id": 20, "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
    "vision-encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}},
    "cosmos3_edge": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "ernie4_5_vl_moe": {"text_config": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4, "vision_config": _VIT}},
    "hyperclovax_vision_v2": {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "granite4_vision": {"image_grid_pinpoints": [[32, 32]], "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2", "vision_config": {**_VIT, "hidden_size": 64}, "qformer_config": {"num_attention_heads": 4}},
    "step3p7": {"text_config": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "nemotron_h_omni": {"image_token_id": 5, "vision_config": {"video_temporal_patch_size": 2}, "text_config": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4}},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MINICPM),
}  # fmt: skip

SETTINGS |= {
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision", "patch_size": 8, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"image_size": 64, "global_attn_indexes": [0, 1]}},
    **dict.fromkeys(("muse_glimmer", "muse_spark"), _MUSE),
    "qwen4_exp": {"text_config": {**_QWEN4, **_MROPE["text_config"]}},
}  # fmt: skip

# -- words -------------------------------------------------------------------------------------------------------------
SETTINGS |= {
    "dots1": {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "kimi_linear": {**_MLA, "num_experts": 4, "num_experts_per_token": 2},
    "longcat_flash": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 8, "v_head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "num_key_value_heads": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [2, 3], "use_cache": False, "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64}, "global_config": {"hidden_size": 64, "head_dim": 16}},
    "dots3_note_text": _DOTS3,
    "qwen4_exp_text": _QWEN4,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32}, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "inkling_text": _INKLING, "inkling2_text": _INKLING2,
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_heads": 4, "num_blocks": 2, "num_hidden_layers": 2, "chunk_size": 8, "max_inference_chunksize": 16},
    "bailing_hybrid": {**_MLA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_token": 2, "n_group": 1, "num_expert_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "neomme": {"head_dim": 16, "embedding_rank": 16, "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {"partial_rotary_factor": 1.0}}, "layer_types": ["sliding_attention", "full_attention"]},
    "zamba": {**SETTINGS["zamba"], "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}  # fmt: skip

# -- pictures ----------------------------------------------------------------------------------------------------------
_FOUR = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
SETTINGS |= {
    "videoprism_vision_model": {"image_size": 32, "tubelet_size": [1, 8, 8]},
    "videoprism": {"vision_config": {"image_size": 32, "tubelet_size": [1, 8, 8]}},
    "bros": {"hidden_size": 64, "num_attention_heads": 4},
    "cvt": {**SETTINGS["cvt"], "depth": [1, 2]},
    "siglip2": {"vision_config": {"num_patches": 16, "patch_size": 8}, "num_patches": 16, "patch_size": 8},
    "imagegpt": {"vocab_size": VOCABULARY, "n_positions": 16},
    "sapiens2": {"head_config": {"upsample_out_channels": [16], "conv_out_channels": [16]}, "num_key_value_heads_per_layer": [4, 2]},
    "tipsv2_dpt": {"backbone_config": {"model_type": "tipsv2_vision_model", **_VIT, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "reshape_hidden_states": False, **_FOUR}, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16},
    "beit": _FOUR, "data2vec-vision": {**_FOUR, "hidden_size": 32},
    "pp_doclayout_v2": {**_LEVELS, "class_thresholds": [0.0, 0.0], "class_order": [0, 1], "reading_order_config": {"hidden_size": 32, "coordinate_size": 5, "shape_size": 6, "max_2d_position_embeddings": 1024, "start_token_id": 0, "pad_token_id": 1, "end_token_id": 2, "pred_token_id": 3}},
}  # fmt: skip
