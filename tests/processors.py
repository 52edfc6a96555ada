"""Tiny random vision-language models with the original processors of transformers."""

from __future__ import annotations

from typing import Any

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from zoo import HEADS, WIDTH, randomise

_TOWER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8}
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120, "head_dim": 8}
_WORDS = ["<pad>", "<s>", "</s>", "<unk>", "what", "is", "here", "on", "the", "left", "and"]
_ALMOST: dict[str, Any] = {"image_mean": [-1e-6] * 3, "image_std": [1.0] * 3}  # black is nearly but not exactly 0, which would be padding


def tokenizer(**special: str) -> Any:
    """A word tokenizer with special tokens from id 100 on, by the names that a processor asks for."""
    vocabulary = {w: i for i, w in enumerate(_WORDS)} | {f"<{i}>": i for i in range(len(_WORDS), 100)}
    vocabulary |= {token: 100 + i for i, token in enumerate(special.values())}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=special, **names)


def paligemma() -> tuple[Any, Any]:
    pictures = SiglipImageProcessorPil(size={"height": 32, "width": 32}, **_ALMOST)
    pictures.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(pictures, tokenizer(image_token="<image>"))
    text = {**_TEXT, "model_type": "gemma", "vocab_size": len(processor.tokenizer)}
    config = hf.PaliGemmaConfig(vision_config={**_TOWER, "model_type": "siglip_vision_model"}, text_config=text, image_token_index=100, projection_dim=32, hidden_size=32)
    return randomise(hf.PaliGemmaForConditionalGeneration(config)).double(), processor


def gemma3() -> tuple[Any, Any]:
    """Pan and scan: crops of an elongated image in addition to the whole image."""
    pan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2}
    pictures = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, **pan, **_ALMOST)
    words = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    marks = {"image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102}
    config = hf.Gemma3Config(vision_config={**_TOWER, "model_type": "siglip_vision_model"}, text_config={**_TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, mm_tokens_per_image=4, **marks)
    processor = hf.Gemma3Processor(pictures, words, image_seq_length=4)
    processor.images_kwargs = {**processor.images_kwargs, **pan}
    return randomise(hf.Gemma3ForConditionalGeneration(config)).double(), processor


def internvl() -> tuple[Any, Any]:
    """Tiles of the best-fitting grid, followed by the whole image."""
    pictures = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, min_patches=1, max_patches=4, **_ALMOST)
    words = tokenizer(context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", video_token="<video>")
    vision = {**_TOWER, "model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [8, 8]}
    config = hf.InternVLConfig(vision_config=vision, text_config={**_TEXT, "model_type": "qwen2"}, image_token_id=100, image_seq_length=4, downsample_ratio=0.5)
    return randomise(hf.InternVLForConditionalGeneration(config)).double(), hf.InternVLProcessor(pictures, words, InternVLVideoProcessor(), image_seq_length=4)


def llava_next() -> tuple[Any, Any]:
    """The whole image, and tiles of the best-fitting canvas without its padding."""
    canvases = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
    pictures = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=canvases, **_ALMOST)
    config = hf.LlavaNextConfig(vision_config={**_TOWER, "model_type": "clip_vision_model"}, text_config={**_TEXT, "model_type": "llama"}, image_token_index=100, image_grid_pinpoints=canvases, vision_feature_layer=-1)
    processor = hf.LlavaNextProcessor(pictures, tokenizer(image_token="<image>"), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    return randomise(hf.LlavaNextForConditionalGeneration(config)).double(), processor


BUILT = {"paligemma": paligemma, "gemma3": gemma3, "internvl": internvl, "llava_next": llava_next}
