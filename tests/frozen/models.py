"""The models whose scores are stored: tiny, with random weights from seeds. Each has a batch of two samples, and its first sample alone."""

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
from outcomes import TARGETS, main_logits, reads_ahead, row, target_of
from shrinking import tiny
from tiny_inputs import decoder_words, noise

Inputs = Any
Built = tuple[nn.Module, Inputs]
BATCH, SINGLE = "batch", "single"


@dataclass(frozen=True)
class Model:
    """A model in float64 with its inputs, and what of its output is explained, for the batch and for its first sample alone."""

    module: nn.Module
    inputs: dict[str, Inputs]
    targets: dict[str, Any]

    def output(self) -> Tensor:
        """What the model says of the batch, without an explanation."""
        given = self.inputs[BATCH]
        with torch.no_grad():
            return main_logits(self.module(**given) if isinstance(given, dict) else self.module(given))


# -- models that are not in tests/zoo.py nor in tests/architectures.py -------------------------------------------------
def lxmert() -> Built:
    """Words and boxes: two streams that attend to each other."""
    import transformers

    config = transformers.LxmertConfig(
        vocab_size=50, hidden_size=24, num_attention_heads=3, intermediate_size=48, num_qa_labels=6, visual_feat_dim=8, l_layers=2,
        r_layers=1, x_layers=2,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(5)
    boxes = {"visual_feats": torch.rand(2, 5, 8, generator=drawn), "visual_pos": torch.rand(2, 5, 4, generator=drawn)}
    return zoo.randomise(transformers.LxmertForQuestionAnswering(config)), {**zoo.text(), **boxes}


def vilt() -> Built:
    """Words and patches in one sequence. Its embeddings draw the order of the patches at random; here it is that of the picture."""
    import transformers
    from transformers.models.vilt.modeling_vilt import ViltEmbeddings

    class InOrder(ViltEmbeddings):
        def visual_embed(self, *args: Any, **kwargs: Any) -> Any:
            with patch.object(torch, "multinomial", lambda weights, count, **_: torch.arange(count)):
                return super().visual_embed(*args, **kwargs)

    config = transformers.ViltConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=16, patch_size=8,
        max_position_embeddings=20, num_labels=4, max_image_length=-1,
    )  # fmt: skip
    model = transformers.ViltForQuestionAnswering(config)
    model.vilt.embeddings = InOrder(config)
    return zoo.randomise(model), {**zoo.text(), "pixel_values": zoo.pixels(16, 16)}


def whisper() -> Built:
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
OTHERS: dict[str, tuple[Callable[[], Built], Any]] = {
    "lxmert": (lxmert, [1, 3]),
    "vilt": (vilt, [1, 3]),
    "whisper": (whisper, [70, 81]),
}
GENERATION = {"generation/llama": "llama_lm", "generation/t5": "t5"}


@cache
def architectures() -> dict[str, Architecture]:
    return {a.name: a for a in listed()}


def in_double(built: Built) -> Built:
    model, inputs = built
    return model.double().eval(), zoo.to(inputs, torch.float64)


def of_zoo(build: Callable[[], Built]) -> Model:
    module, inputs = in_double(build())
    return Model(module, {BATCH: inputs, SINGLE: zoo.rows(inputs, 0)}, {BATCH: None, SINGLE: None})


def of_target(build: Callable[[], Built], target: Any) -> Model:
    module, inputs = in_double(build())
    first = target[:1] if isinstance(target, list) else target
    return Model(module, {BATCH: inputs, SINGLE: row(inputs, 0, crop=False)}, {BATCH: target, SINGLE: first})


def of_architecture(name: str) -> Model:
    one = architectures()[name]
    module, inputs = in_double(one.build())
    target = TARGETS.get(name) or target_of(one.kind, reads_ahead(one.kind, module, inputs))
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
