"""Tiny random vision-language models, each with a processor in the style of transformers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.inkling2.image_processing_inkling2 import Inkling2ImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shrinking import tiny
from tiny_settings import SETTINGS
from zoo import HEADS, WIDTH, randomise

MARK = 100
PLAIN: dict[str, Any] = {"do_normalize": False}  # black is 0, so gradient × input is 0 wherever an image is black
_TOWER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120}


def words(chat: str | None = None) -> Any:
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", "what", "is", "here", "on", "the", "left"])} | {"<image>": MARK}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = chat
    return tokenizer


class TinyProcessor:
    """A processor of images and text in the style of transformers: it repeats the image placeholder for each image token.

    ``grouped``: the image processor receives the images grouped by prompt, and pads their tiles."""

    def __init__(self, image_processor: Any, rows: Any, chat: str | None = None, grouped: bool = False) -> None:
        self.image_processor, self.tokenizer, self.rows, self.grouped = image_processor, words(chat), rows, grouped
        self.image_token, self.image_token_id = "<image>", MARK

    def __call__(self, images: Any, text: list[str], return_tensors: str, padding: bool) -> dict[str, Any]:
        assert return_tensors == "pt"
        flat = [p for group in images for p in group]
        pixels = dict(self.image_processor(images=images if self.grouped else flat, return_tensors="pt"))
        counts = iter(self.rows(pixels, flat))
        written = []
        for t in text:
            *parts, last = t.split("<image>")
            written.append("".join(f"{part} " + "<image>" * next(counts) for part in parts) + last)
        return {**self.tokenizer(written, return_tensors="pt", padding=padding), **pixels}


def square(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    """A black image with a white square; ``size`` is (height, width), ``box`` is (left, top, right, bottom)."""
    picture = Image.new("RGB", (size[1], size[0]))
    picture.paste((255, 255, 255), box)
    return picture


def outside(part: Any, box: tuple[int, int, int, int], margin: float) -> float:
    """Share of |score| that lies more than ``margin`` pixels of the original image outside a box."""
    maps = part._maps()[0].abs().double()
    left, top, right, bottom = part.geometry[0].box
    rows = top + (torch.arange(maps.shape[0]) + 0.5) * (bottom - top) / maps.shape[0]
    columns = left + (torch.arange(maps.shape[1]) + 0.5) * (right - left) / maps.shape[1]
    near = ((rows > box[1] - margin) & (rows < box[3] + margin))[:, None] & ((columns > box[0] - margin) & (columns < box[2] + margin))
    return float(maps[~near].sum() / maps.sum())


def llava() -> tuple[Any, Any]:
    vision = hf.CLIPVisionConfig(**_TOWER, image_size=32, patch_size=8)
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_index=MARK, vision_feature_layer=-1)
    processor = CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False, **PLAIN)
    return randomise(hf.LlavaForConditionalGeneration(config)).double(), TinyProcessor(processor, lambda _, flat: [16] * len(flat))


def idefics3() -> tuple[Any, Any]:
    vision = {**_TOWER, "image_size": 32, "patch_size": 8}
    config = hf.Idefics3Config(vision_config=vision, text_config={**TEXT, "model_type": "llama", "pad_token_id": 0}, image_token_id=MARK, scale_factor=2, pad_token_id=0)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    almost = {"image_mean": [-1e-6] * 3, "image_std": [1.0] * 3}  # tiles that are all 0 would count as padding
    processor = Idefics3ImageProcessorPil(**sizes, **almost)

    def rows(pixels: Any, flat: list[Any]) -> list[int]:
        return [4 * len(processor(images=[p], return_tensors="pt")["pixel_values"][0]) for p in flat]

    return randomise(hf.Idefics3ForConditionalGeneration(config)).double(), TinyProcessor(processor, rows, grouped=True)


def qwen2_vl() -> tuple[Any, Any]:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}
    marks = {"image_token_id": MARK, "vision_start_token_id": 101, "vision_end_token_id": 102, "video_token_id": 103}
    config = hf.Qwen2VLConfig(vision_config=tower, text_config=text, **marks)
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}, **PLAIN)
    wrapper = TinyProcessor(processor, lambda pixels, _: [int(g.prod()) // 4 for g in pixels["image_grid_thw"]])
    plain = wrapper.__class__.__call__

    class TokenTypeProcessor(TinyProcessor):
        def __call__(self, images: Any, text: list[str], return_tensors: str, padding: bool) -> dict[str, Any]:
            batch = plain(self, images, text, return_tensors, padding)
            return {**batch, "mm_token_type_ids": (batch["input_ids"] == MARK).long()}

    wrapper.__class__ = TokenTypeProcessor
    return randomise(hf.Qwen2VLForConditionalGeneration(config)).double(), wrapper


def inkling2() -> tuple[Any, Any]:
    """Packed patches that are small images with channels last."""
    settings = copy.deepcopy(SETTINGS["inkling2"])
    settings["text_config"] |= {"vocab_size": 120, "unpadded_vocab_size": 120}
    model = tiny("Inkling2ForConditionalGeneration", {**settings, "image_token_id": MARK})
    edge = model.config.vision_config.patch_size * model.config.vision_config.spatial_merge_size
    processor = Inkling2ImageProcessor(size={"height": edge, "width": edge}, **PLAIN)
    return model, TinyProcessor(processor, lambda pixels, _: [int(g.prod()) for g in pixels["image_grid_thw"]])


BUILT = {"llava": llava, "idefics3": idefics3, "qwen2_vl": qwen2_vl, "inkling2": inkling2}
