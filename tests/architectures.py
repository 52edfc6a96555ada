"""Every family of architectures that transformers and timm can build tiny, and why the others are not here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from shrinking import VOCABULARY, inputs_of, noise, tiny
from zoo import CLASSES, randomise

# kind -> the mapping of transformers that lists its families
KINDS = {
    "sequence classification": "SEQUENCE_CLASSIFICATION", "causal language model": "CAUSAL_LM", "masked language model": "MASKED_LM",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM", "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING", "multiple choice": "MULTIPLE_CHOICE",
    "image classification": "IMAGE_CLASSIFICATION", "video classification": "VIDEO_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION", "object detection": "OBJECT_DETECTION",
    "semantic segmentation": "SEMANTIC_SEGMENTATION", "vision and language": "IMAGE_TEXT_TO_TEXT",
    "two towers": "ZERO_SHOT_IMAGE_CLASSIFICATION",
}  # fmt: skip

# -- exceptions --------------------------------------------------------------------------------------------------------
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
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl"), _MROPE),
    "qwen2_5_vl": {**_MROPE, "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    **dict.fromkeys(("qwen3_5_moe", "qwen4_exp"), _MROPE_LINEAR),
    "llava_next": {"image_grid_pinpoints": [[32, 32]]}, "llava_next_video": {"image_grid_pinpoints": [[32, 32]]}, "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "vipllava": {"vision_feature_layers": [-1, -2]}, "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "gemma3": {"mm_tokens_per_image": 4}, "shieldgemma2": {"mm_tokens_per_image": 4},
    "aria": {"projector_patch_to_query_dict": {16: 4}, "text_config": {"num_key_value_heads": 4}},
    "florence2": {"vision_config": {"patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2], "window_size": 2, "embed_dim": [16, 16, 32, 32], "num_heads": [2] * 4, "num_groups": [2] * 4, "projection_dim": 32, "image_size": 64}},
    "siglip2": {"vision_config": {"num_patches": 16}},
    **dict.fromkeys(("esmc", "dots3_note", "dots3_note_text", "glm5_next"), _ONE_GROUP),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "bailing_hybrid", "youtu", "minicpm3", "mistral4", "mistral_large4"), _MLA),
    **dict.fromkeys(("data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm", "sew", "sew-d"), _SOUND),
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
    "videoprism_vision_model": {"image_size": 32, "patch_size": 8},
    **{f: {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "out_indices": [1, 2, 3, 4]} for f in ("dpt", "tipsv2_dpt")},
    "bamba": {"attn_layer_indices": [1]}, "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3}, "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48, "num_attention_heads": 4},
    "mobilevitv2": {"base_attn_unit_dims": [16, 24, 32], "n_attn_blocks": [1, 1, 1], "width_multiplier": 0.25, "image_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 2, "state_size": 8},
}  # fmt: skip
# reason -> families, of one kind of head or of all ("")
_LEFT_OUT: dict[str, dict[str, str]] = {
    "a convolutional network, no Transformer": {
        "":
            "bit convnext convnextv2 efficientnet focalnet hgnet_v2 mobilenet_v1 mobilenet_v2 poolformer pp_lcnet regnet "
            "resnet textnet pp_ocrv5_mobile_det pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det",
    },
    "needs detectron2": {
        "": "layoutlmv2",
    },
    "needs natten": {
        "": "dinat",
    },
    "needs a backbone of its own, not small by its configuration": {
        "":
            "d_fine deimv2 pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2 upernet align pp_formulanet "
            "fast_vlm janus perception_lm",
    },
    "stands for the models of timm, which are here by themselves": {
        "": "timm_wrapper",
    },
    "its forward takes more than words and one picture of a fixed size": {
        "vision and language":
            "blip-2 evolla kosmos-2.5 mistral4 deepseek_vl fuyu gemma4 gemma4_unified granite_docling idefics inkling2 inkling_mm_model instructblip "
            "instructblipvideo kimi_k25 kosmos-2 lfm2_vl mllama paddleocr_vl pi0 pix2struct udop video_llama_3 "
            "vision-encoder-decoder",
        "two towers": "blip-2",
    },
    "its settings hang together in ways that shrinking by name does not keep": {
        "vision and language":
            "chameleon cohere2_vision cohere_compass cosmos3_edge deepseek_ocr2 deepseek_vl_hybrid diffusion_gemma "
            "dots3_note emu3 ernie4_5_vl_moe exaone4_5 gemma3n glm4v_moe glm_ocr glmga granite4_vision hunyuan_vl "
            "hyperclovax_vision_v2 llama4 minicpm_ocr minicpmv4_6 minicpmv4_7 molmo2 muse_glimmer muse_spark "
            "nemotron_h_omni qwen2_5_omni_thinker qwen3_omni_moe_thinker qwen4_exp step3p7 t5gemma2 unlimited_ocr",
        "multiple choice": "canine mra",
        "sequence classification": "canine esmc mra zamba",
        "causal language model":
            "bailing_hybrid blt dbrx dots1 dots3_note dots3_note_text gemma3n gemma3n_text gemma4_assistant "
            "gemma4_unified_assistant inkling2_text inkling_text kimi_linear longcat_flash musicgen musicgen_melody "
            "nemotron_h phi4_multimodal prophetnet qwen3_5_moe qwen4_exp qwen4_exp_text xlstm zamba",
        "sequence to sequence": "prophetnet",
        "masked language model": "neomme canine esmc mra",
        "token classification": "canine esmc mra",
        "question answering": "canine splinter mra",
        "image classification": "cvt",
        "video classification": "videoprism_vision_model",
        "object detection": "lw_detr",
        "semantic segmentation": "beit data2vec-vision mobilevitv2 sapiens2 tipsv2_dpt",
    },
    "listens to sound before it writes": {
        "sequence to sequence": "nemo_speechlm vibevoice_asr voxtral_realtime",
    },
    "needs boxes": {
        "token classification": "bros",
    },
    "needs features of regions": {
        "question answering": "lxmert",
    },
    "takes clusters of colours as ids": {
        "image classification": "imagegpt",
    },
    "is a vision-language model, and there": {
        "image classification": "shieldgemma2",
    },
    "takes packed patches": {
        "image classification": "siglip2",
        "two towers": "siglip2",
    },
    "compares videos with texts": {
        "two towers": "videoprism",
    },
}  # fmt: skip
LEFT_OUT = {
    f"{kind}/{family}".lstrip("/"): reason
    for reason, kinds in _LEFT_OUT.items()
    for kind, families in kinds.items()
    for family in families.split()
}


# -- the list ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Architecture:
    """``name`` is "kind/family"; ``builds`` the class of transformers, or a builder."""

    kind: str
    family: str
    builds: str | Callable[[], tuple[nn.Module, dict[str, Tensor]]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.family}"

    @property
    def modality(self) -> str:
        visual = self.kind.startswith(("image", "object", "semantic", "video", "two", "vision"))
        return "image" if visual else "audio" if self.kind.startswith("audio") else "text"

    def build(self, attention: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
        if not isinstance(self.builds, str):
            return self.builds()
        model = tiny(self.builds, copy.deepcopy(dict(self.settings)), attention)
        return model, inputs_of(model, self.kind)

    def marks(self, model: nn.Module) -> list[int]:
        """Ids that stand for places of a picture."""
        config = getattr(model, "config", None)
        found = [getattr(config, n, None) for n in ("image_token_id", "image_token_index")]
        return [i for i in found if isinstance(i, int)]


# kinds whose families are those of the kinds before them: a few stand for the head
FEW_HEADS = {"masked language model", "token classification", "question answering", "multiple choice"}
STANDING = {"bert", "deberta-v2", "electra", "gpt2", "modernbert", "roberta", "xlnet"}


def listed() -> list[Architecture]:
    """Every family of the mappings once a kind; of heads on families that are there already only those of a few."""
    made, seen = [], set()
    for kind, mapping in KINDS.items():
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            head = kind in FEW_HEADS or kind == "causal language model"
            if (
                family in LEFT_OUT
                or f"{kind}/{family}" in LEFT_OUT
                or (head and family in seen and family not in STANDING)
            ):
                continue
            seen.add(family)
            own = {
                **EXCEPTIONS.get(family, {}),
                **(
                    {"is_decoder": True}
                    if kind.startswith("causal") and family in ("bert", "electra", "roberta")
                    else {}
                ),
            }
            made.append(Architecture(kind, family, names if isinstance(names, str) else names[0], own))
    for name, settings in TIMM.items():
        made.append(Architecture("image classification", f"timm {name}", partial(of_timm, name, settings)))
    return made


# -- timm --------------------------------------------------------------------------------------------------------------
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
_SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
_TWINS = {"embed_dims": (16, 16, 24, 24), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}
TIMM: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224", "vit_base_patch16_clip_224", "vit_7b_patch16_dinov3", "deit3_small_patch16_224", "beit_base_patch16_224", "beitv2_base_patch16_224", "eva_giant_patch14_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p8_224", "convit_tiny", "flexivit_small", "vit_pe_core_tiny_patch16_384", "vit_small_patch16_rope_224", "aimv2_large_patch14_224"), _VIT),
    "naflexvit_base_patch16_gap": {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8},
    "samvit_base_patch16": {**_VIT, "window_size": 2, "global_attn_indexes": (1,)},
    "swinv2_tiny_window8_256": _SWIN, "swinv2_cr_tiny_224": _SWIN,
    "pit_ti_224": {"img_size": 64, "patch_size": 8, "stride": 8, "base_dims": (8, 8), "depth": (1, 1), "heads": (2, 2)},
    "twins_svt_small": {"img_size": 32, "patch_size": 4, **_TWINS}, "twins_pcpvt_small": {"img_size": 64, **_TWINS},
    "tnt_s_patch16_224": {"img_size": 32, "embed_dim": 24, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
    "davit_tiny": {"embed_dims": (16, 24), "depths": (1, 1), "num_heads": (2, 2), "window_size": 2},
    "levit_128s": {"img_size": 64, "embed_dim": (16, 24), "key_dim": 8, "num_heads": (2, 2), "depth": (1, 1)},
    "visformer_tiny": {"img_size": 64, "embed_dim": 24, "depth": (1, 1, 1), "num_heads": 2},
    "edgenext_xx_small": {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}, "mobilevit_xxs": {}, "mobilevitv2_050": {},
}  # fmt: skip


def of_timm(name: str, settings: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    import timm

    size = settings.get("img_size", 64)
    return randomise(timm.create_model(name, num_classes=CLASSES, **settings)), {"x": noise(2, 3, size, size)}
