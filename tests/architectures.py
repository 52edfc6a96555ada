"""Every architecture family of transformers and timm that can be built tiny, and why the others are left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from shrinking import tiny
from tiny_inputs import inputs_of, noise
from tiny_settings import SETTINGS
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

# -- left out ----------------------------------------------------------------------------------------------------------
# reason -> families, of one kind of head or of all ("")
_LEFT_OUT: dict[str, dict[str, str]] = {
    "a convolutional network, no Transformer": {
        "":
            "bit convnext convnextv2 efficientnet focalnet hgnet_v2 mobilenet_v1 mobilenet_v2 poolformer pp_lcnet regnet "
            "resnet textnet pp_ocrv5_mobile_det pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det align",
    },
    "requires detectron2": {
        "": "layoutlmv2",
    },
    "requires natten": {
        "": "dinat",
    },
    "a wrapper of timm models, which are tested directly": {
        "": "timm_wrapper",
    },
    "takes no picture: tested as a language model": {
        "vision and language": "mistral4",
    },
    "tested as its text model": {
        "causal language model": "dots3_note gemma3n qwen3_5_moe qwen4_exp",
    },
    "tested as a vision-language model": {
        "image classification": "shieldgemma2",
    },
    "uses values that another model computed": {
        "causal language model": "gemma4_assistant gemma4_unified_assistant",
    },
    "its inputs are proteins, not pictures": {
        "vision and language": "evolla",
    },
    "a policy for robots; its inputs include the state of the robot": {
        "vision and language": "pi0",
    },
    "generates all tokens at once, by diffusion": {
        "vision and language": "diffusion_gemma",
    },
    "generates several audio codes per step": {
        "causal language model": "musicgen musicgen_melody",
    },
    "its input is sound": {
        "sequence to sequence": "nemo_speechlm vibevoice_asr voxtral_realtime",
    },
    "selects one of a list of answers, not a span": {
        "question answering": "lxmert",
    },
    "packs the pictures of all samples into one row, so samples cannot be separated; tests/inputs/test_packed.py tests single samples": {
        "vision and language": "minicpm_ocr minicpmv4_6 minicpmv4_7",
    },
    "resizes pictures to sizes that are fixed in its code, too large for a tiny model": {
        "vision and language": "deepseek_ocr2 unlimited_ocr",
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
    """``name`` is "kind/family"; ``builds`` is the name of a transformers class, or a builder."""

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
        """Ids of image placeholder tokens."""
        config = getattr(model, "config", None)
        ids = [getattr(config, n, None) for n in ("image_token_id", "image_token_index", "video_token_index")]
        return [i for i in ids if isinstance(i, int)]


# kinds whose families occur in earlier kinds: a few represent the head
FEW_HEADS = {"masked language model", "token classification", "question answering", "multiple choice"}
REPRESENTATIVES = {"bert", "deberta-v2", "electra", "gpt2", "modernbert", "roberta", "xlnet"}


def listed() -> list[Architecture]:
    """Every family of the mappings, once per kind; heads on families listed already only for a few representatives."""
    architectures, seen = [], set()
    for kind, mapping in KINDS.items():
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            head = kind in FEW_HEADS or kind == "causal language model"
            if (
                family in LEFT_OUT
                or f"{kind}/{family}" in LEFT_OUT
                or (head and family in seen and family not in REPRESENTATIVES)
            ):
                continue
            seen.add(family)
            own = {
                **SETTINGS.get(f"{kind}/{family}", SETTINGS.get(family, {})),
                **(
                    {"is_decoder": True}
                    if kind.startswith("causal") and family in ("bert", "electra", "roberta")
                    else {}
                ),
            }
            architectures.append(Architecture(kind, family, names if isinstance(names, str) else names[0], own))
    for name, settings in TIMM.items():
        architectures.append(Architecture("image classification", f"timm {name}", partial(of_timm, name, settings)))
    return architectures


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
