"""A batch of two for any model, built from the signature of its forward: text, images, patches, audio, boxes and masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shrinking import SIDE, VOCABULARY

LENGTHS = (10, 7)
Inputs = dict[str, Tensor]


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(length: int = LENGTHS[0], lengths: tuple[int, ...] = LENGTHS, seed: int = 2) -> dict[str, Tensor]:
    """Two sentences of unequal length with begin and end tokens, padded on the right."""
    ids = torch.randint(60, VOCABULARY, (len(lengths), length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 2
    mask = torch.zeros_like(ids)
    for row, real in enumerate(lengths):
        ids[row, real - 1], ids[row, real:], mask[row, :real] = 3, 0, 1
    return {"input_ids": ids, "attention_mask": mask}


def pictures(model: nn.Module, frames: int = 0) -> Tensor:
    config = model.config
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or SIDE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    return noise(
        2, *([frames] if frames else []), channels if isinstance(channels, int) else 3, int(height), int(width)
    )


def inputs_of(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """A batch of two, as the model's forward takes it."""
    takes = inspect.signature(model.forward).parameters
    if kind in ("image classification", "object detection", "semantic segmentation"):
        return alone(model, takes)
    if kind == "video classification":
        name = next(n for n in takes if n.startswith("pixel_values"))
        frames = getattr(model.config, "num_frames", None) or getattr(model.config, "frames_per_clip", 4)
        return {name: pictures(model, frames)}
    if kind == "audio classification":
        if "input_values" in takes:
            length = getattr(model.config, "max_length", None)
            return {"input_values": noise(2, 400) if length is None else noise(2, length, model.config.num_mel_bins)}
        mels = getattr(model.config, "num_mel_bins", None)
        if mels:
            return {"input_features": noise(2, mels, 2 * model.config.max_source_positions)}
        return {"input_features": noise(2, 20, model.config.feature_projection_input_dim)}
    inputs: dict[str, Tensor] = words()
    if kind == "multiple choice":
        return {n: torch.stack([t, t.flip(0)], 1) for n, t in inputs.items()}
    if kind == "sequence to sequence" and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = decoder_words()
    if kind == "two towers" and "pixel_values_videos" in takes:
        return {**inputs, "pixel_values_videos": pictures(model, getattr(model.config.vision_config, "num_frames", 4))}
    if kind == "two towers":
        inputs.update(alone(model, takes))
    if "bbox" in required_arguments(model.forward) or model.config.model_type == "bros":
        inputs["bbox"] = boxes(inputs["input_ids"])
    if kind == "vision and language":
        inputs = with_picture(model, inputs)
    return inputs


# -- pictures without words ----------------------------------------------------------------------------------------------
def alone(model: nn.Module, takes: Mapping[str, Any]) -> Inputs:
    """Images as pixels, or as packed patches or colour ids if the model takes these."""
    if "pixel_values" not in takes:
        ids = torch.randint(5, VOCABULARY, (2, model.config.n_positions), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids}
    if "spatial_shapes" not in takes:
        return {"pixel_values": pictures(model)}
    pixels = noise(*PIXELS["siglip2"])
    whole = torch.ones(pixels.shape[:2], dtype=torch.long)
    return {"pixel_values": pixels, "pixel_attention_mask": whole, "spatial_shapes": BESIDE["spatial_shapes"](pixels)}


# -- pictures among words ----------------------------------------------------------------------------------------------
# family -> shape of its pixel_values if they are neither [2, channels, height, width] nor the usual packed patches
PIXELS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), (2, 2, 3, SIDE, SIDE)),
    **dict.fromkeys(("idefics", "idefics2", "idefics3", "smolvlm", "perception_lm"), (2, 1, 3, SIDE, SIDE)),
    "mllama": (2, 1, 4, 3, SIDE, SIDE), "fuyu": (2, 16, 192), "gemma4": (2, 36, 192), "gemma4_unified": (2, 16, 192), "molmo2": (2, 16, 192),
    **dict.fromkeys(("lfm2_vl", "siglip2"), (2, 16, 192)),
    **dict.fromkeys(("kimi_k25", "paddleocr_vl"), (32, 3, 8, 8)),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), (32, 384)), "nemotron_h_omni": (32, 192),
    "granite_docling": (2, 1, 3, SIDE, SIDE), "instructblipvideo": (2, 4, 3, SIDE, SIDE), "inkling2": (8, 16, 16, 3), "inkling_mm_model": (8, 2, 8, 8, 3),
}  # fmt: skip


def _grid(pixels: Tensor) -> Tensor:
    side = int(pixels.shape[1] ** 0.5)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([columns, rows], -1).flatten(0, 1).repeat(2, 1, 1)


# inputs that accompany an image, by argument of forward
BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "image_sizes": lambda pixels: torch.tensor([list(pixels.shape[-2:])] * 2),
    "image_grid_thw": lambda pixels: torch.tensor([[1, 4, 4] if pixels.shape[-1] != 3 else [1, 2, 2]] * 2),
    "image_grid_hw": lambda pixels: torch.tensor([[4, 4]] * 2),
    "image_merge_sizes": lambda pixels: torch.tensor([2, 2]),
    "image_position_ids": _grid,
    "spatial_shapes": lambda pixels: torch.tensor([[4, 4]] * 2),
    "aspect_ratio_ids": lambda pixels: torch.full((2, 1), 6),
    "aspect_ratio_mask": lambda pixels: torch.ones(pixels.shape[:3], dtype=torch.long),
    "image_token_pooling": lambda pixels: torch.arange(32).view(2, 2, 2, 2, 2).transpose(2, 3).reshape(8, 4),
    "image_grids": lambda pixels: torch.tensor([[2, 2, 0, 0]] * 2),
    "image_num_crops": lambda pixels: torch.tensor([1, 1]),
    "high_res_pixel_values": lambda pixels: noise(2, 3, 2 * SIDE, 2 * SIDE, seed=4),
}  # fmt: skip
# inputs that accompany the words, built from ids and the mask of image placeholders
AMONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("token_type_ids", "mm_token_type_ids"), lambda ids, place: place.long()),
    "image_embeds_position_mask": lambda ids, place: place,
    "image_attention_mask": lambda ids, place: torch.ones(*ids.shape, 1, dtype=torch.long),
    "cross_attention_mask": lambda ids, place: torch.ones(*ids.shape, 1, 4, dtype=torch.long),
    "qformer_input_ids": lambda ids, place: words(5, (5, 5), seed=5)["input_ids"],
    "bbox": lambda ids, place: boxes(ids),
}  # fmt: skip


def boxes(ids: Tensor) -> Tensor:
    """A box (left, top, right, bottom) in [0, 1] for each word, in reading order."""
    left = torch.linspace(0, 0.8, ids.shape[1])
    return torch.stack([left, left, left + 0.1, left + 0.2], -1).repeat(len(ids), 1, 1)


def required_arguments(function: Callable[..., Any]) -> set[str]:
    """Arguments without a default."""
    empty = inspect.Parameter.empty
    return {n for n, p in inspect.signature(function).parameters.items() if p.default is empty}


def with_picture(model: nn.Module, text: Inputs) -> Inputs:
    """Inputs of a vision-language model: the words after image placeholders, and the image."""
    family, takes = model.config.model_type, inspect.signature(model.forward).parameters
    if "flattened_patches" in takes and "input_ids" not in takes:
        return {"flattened_patches": patches(), "decoder_input_ids": decoder_words()}
    own = ("get_image_features", "get_video_features")
    features_of = next((f for n in own for m in (model.base_model, model) if (f := getattr(m, n, None)) is not None), None)
    wants = required_arguments(features_of) if features_of is not None else set()
    pixels = picture_of(model, family, takes)
    if "input_ids" not in takes or (model.config.is_encoder_decoder and model.main_input_name == "pixel_values"):
        return {"pixel_values": pixels, "decoder_input_ids": decoder_words()}
    sized = "image_sizes" in wants or pixels.dim() == 5 or "mistral" in family
    beside = [n for n in BESIDE if n in takes and (n != "image_sizes" or sized)]
    name = "flattened_patches" if "flattened_patches" in takes else "pixel_values"
    picture = {name: patches() if name != "pixel_values" else pixels, **{n: BESIDE[n](pixels) for n in beside}}
    if "pixel_attention_mask" in wants:
        picture["pixel_attention_mask"] = torch.ones(pixels.shape[:2], dtype=torch.bool if pixels.dim() == 5 else torch.long)
    marks = (getattr(model.config, n, None) for n in ("image_token_id", "image_token_index", "video_token_index"))
    mark = next((m for m in marks if m is not None), None)
    ids, mask = text["input_ids"], text["attention_mask"]
    among = {n: make for n, make in AMONG.items() if n in takes and (mark is not None or "type" not in n)}
    rows = 2 * getattr(model.config, "latent_query_num", 0)
    if mark is not None and features_of is not None:
        knows = inspect.signature(features_of).parameters
        inputs = {**picture, **{n: make(ids, ids == mark) for n, make in among.items()}}
        with torch.no_grad():
            features = features_of(**{n: t for n, t in inputs.items() if n in knows})
        candidates = (getattr(features, n, None) for n in ("pooler_output", "deepstack_features", "last_hidden_state"))
        features = next((f for f in candidates if f is not None), features)
        features = features[0][1] if isinstance(features, list) and isinstance(features[0], tuple) else features
        rows = sum(f.numel() // f.shape[-1] for f in (features if isinstance(features, list | tuple) else [features]))
    if rows:
        front = torch.full((2, rows // 2), mark)
        ids, mask = torch.cat([ids[:, :1], front, ids[:, 1:]], 1), torch.cat([torch.ones_like(front), mask], 1)
    inputs = {"input_ids": ids, "attention_mask": mask, **{n: make(ids, ids == mark) for n, make in among.items()}, **picture}
    if model.config.is_encoder_decoder and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = decoder_words()
    return inputs


def decoder_words() -> Tensor:
    return words(5, (5, 5), seed=3)["input_ids"]


def patches() -> Tensor:
    """16 patches of 8 × 8 pixels, each preceded by its row and column, counted from 1."""
    rows, columns = torch.meshgrid(torch.arange(1.0, 5), torch.arange(1.0, 5), indexing="ij")
    place = torch.stack([rows, columns], -1).flatten(0, 1).expand(2, -1, 2)
    return torch.cat([place, noise(2, 16, 192)], -1)


def picture_of(model: nn.Module, family: str, takes: Mapping[str, Any]) -> Tensor:
    if family in PIXELS:
        return noise(*PIXELS[family])
    if "image_grid_thw" in takes:
        vision = model.config.vision_config
        return noise(32, 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)
    return pictures(model)
