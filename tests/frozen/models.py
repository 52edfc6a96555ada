"""Tiny models with seeded random weights whose scores are stored. Each has a batch of two samples, and the first sample separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zoo
from architectures import Architecture, listed
from outcomes import main_logits, reads_ahead, row, target_of
from shrinking import tiny
from tiny_inputs import decoder_words, noise

Inputs = Any
ModelAndInputs = tuple[nn.Module, Inputs]
BATCH, SINGLE = "batch", "single"


@dataclass(frozen=True)
class Model:
    """A float64 model with inputs and targets, for the batch and for its first sample."""

    module: nn.Module
    inputs: dict[str, Inputs]
    targets: dict[str, Any]

    def output(self) -> Tensor:
        """Plain output of the model for the batch."""
        batch = self.inputs[BATCH]
        with torch.no_grad():
            return main_logits(self.module(**batch) if isinstance(batch, dict) else self.module(batch))


# -- models that are neither in tests/zoo.py nor in tests/architectures.py ---------------------------------------------
def lxmert() -> ModelAndInputs:
    """Words and boxes: two streams with co-attention."""
    import transformers

    config = transformers.LxmertConfig(
        vocab_size=50, hidden_size=24, num_attention_heads=3, intermediate_size=48, num_qa_labels=6, visual_feat_dim=8, l_layers=2,
        r_layers=1, x_layers=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    boxes = {"visual_feats": torch.rand(2, 5, 8, generator=generator), "visual_pos": torch.rand(2, 5, 4, generator=generator)}
    return zoo.randomise(transformers.LxmertForQuestionAnswering(config)), {**zoo.text(), **boxes}


def vilt() -> ModelAndInputs:
    """Words and patches in one sequence. ViLT shuffles its patches; here they keep the order of the image."""
    import transformers
    from transformers.models.vilt.modeling_vilt import ViltEmbeddings

    class OrderedViltEmbeddings(ViltEmbeddings):
        def visual_embed(self, *args: Any, **kwargs: Any) -> Any:
            with patch.object(torch, "multinomial", lambda weights, count, **_: torch.arange(count)):
                return super().visual_embed(*args, **kwargs)

    config = transformers.ViltConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=16, patch_size=8,
        max_position_embeddings=20, num_labels=4, max_image_length=-1,
    )  # fmt: skip
    model = transformers.ViltForQuestionAnswering(config)
    model.vilt.embeddings = OrderedViltEmbeddings(config)
    return zoo.randomise(model), {**zoo.text(), "pixel_values": zoo.pixels(16, 16)}


def whisper() -> ModelAndInputs:
    """Sound and words: an encoder-decoder."""
    model = tiny("WhisperForConditionalGeneration", {"max_source_positions": 16, "max_target_positions": 16})
    return model, {"input_features": noise(2, model.config.num_mel_bins, 32), "decoder_input_ids": decoder_words()}


# -- the list ----------------------------------------------------------------------------------------------------------
ZOO = [
    "hf_vit", "hf_deit_teacher", "hf_dinov2", "timm_vit", "timm_vit_mean", "torchvision_vit", "bert", "distilbert", "electra",
    "modernbert_mean", "gpt2", "llama", "encoder_mean", "encoder_first", "encoder_sequence_first", "gpt2_lm", "llama_lm", "hf_swin",
    "torchvision_swin",
]  # fmt: skip
EAGER = ["hf_vit", "llama"]
ARCHITECTURES = [
    "sequence to sequence/t5", "sequence to sequence/bart", "sequence classification/deberta-v2", "sequence classification/xlnet",
    "sequence classification/gemma2", "causal language model/mamba", "token classification/bert", "question answering/bert",
    "image classification/beit", "image classification/timm cait_xxs24_224", "video classification/videomae",
    "audio classification/wav2vec2", "object detection/detr", "object detection/yolos", "semantic segmentation/segformer",
    "two towers/clip", "vision and language/llava",
]  # fmt: skip
OTHERS: dict[str, tuple[Callable[[], ModelAndInputs], Any]] = {
    "lxmert": (lxmert, [1, 3]),
    "vilt": (vilt, [1, 3]),
    "whisper": (whisper, [70, 81]),
}
GENERATION = {"generation/llama": "llama_lm", "generation/t5": "t5"}


@cache
def architectures() -> dict[str, Architecture]:
    return {a.name: a for a in listed()}


def to_double(model_and_inputs: ModelAndInputs) -> ModelAndInputs:
    model, inputs = model_and_inputs
    return model.double().eval(), zoo.to(inputs, torch.float64)


def of_zoo(build: Callable[[], ModelAndInputs]) -> Model:
    module, inputs = to_double(build())
    return Model(module, {BATCH: inputs, SINGLE: zoo.rows(inputs, 0)}, {BATCH: None, SINGLE: None})


def of_target(build: Callable[[], ModelAndInputs], target: Any) -> Model:
    module, inputs = to_double(build())
    first = target[:1] if isinstance(target, list) else target
    return Model(module, {BATCH: inputs, SINGLE: row(inputs, 0, crop=False)}, {BATCH: target, SINGLE: first})


def of_architecture(name: str) -> Model:
    architecture = architectures()[name]
    module, inputs = to_double(architecture.build())
    target = target_of(architecture.kind, reads_ahead(architecture.kind, module, inputs))
    return of_target(lambda: (module, inputs), target)


def of_generation(name: str) -> Model:
    return Model(getattr(zoo, name)()[0].double().eval(), {}, {})


MODELS: dict[str, Callable[[], Model]] = {
    **{name: partial(of_zoo, {**zoo.ZOO, **zoo.LANGUAGE, **zoo.WINDOWED}[name]) for name in ZOO},
    **{f"{name}/eager": partial(of_zoo, partial(zoo.TWO_ATTENTIONS[name], "eager")) for name in EAGER},
    **{name: partial(of_target, build, target) for name, (build, target) in OTHERS.items()},
    **{name: partial(of_architecture, name) for name in ARCHITECTURES},
    **{name: partial(of_generation, zoo_name) for name, zoo_name in GENERATION.items()},
}


def build(name: str) -> Model:
    torch.manual_seed(0)
    return MODELS[name]()
