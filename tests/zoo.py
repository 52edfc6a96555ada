"""Tiny seeded random models with a batch of two inputs, on which every contract is tested.

``ZOO`` maps a name to a builder of (model in eval mode, inputs). Inputs are what ``whyformer.explain`` takes: a tensor of
pixels, or a mapping with padded ids of unequal length. A new model family is one more builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.explaining import open_model
from whyformer.prepared import Prepared

CLASSES = 5
VOCABULARY = 50
TOKENS = 10
LENGTHS = (10, 7)
WIDTH = 24
HEADS = 3

Inputs = Any
Builder = Callable[[], tuple[nn.Module, Inputs]]


def unseen(values: Tensor) -> Tensor:
    """A copy of values without a record of how they were computed, like the output of an opaque kernel."""
    return torch.from_numpy(values.detach().numpy().copy())


def gelu_backward(ctx: Any, flow: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(flow, x)


class GeluInNumpy(torch.autograd.Function):
    """GELU as a kernel that is opaque to torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return unseen(functional.gelu(x))

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return gelu_backward(ctx, flows[0])


class WrittenGelu(nn.Module):
    """GELU as several calls."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.special.erf(x / 2**0.5))


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set weights large enough that attention is not uniform and the two samples differ; initial weights make every map flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and "token" not in name and "pos" not in name and "embed" not in name.split(".")[-1]:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 0.5)
            elif "bias" in name:
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(1 + noise * 0.1)
    return model.eval()


def pixels(height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def text(pad: int = 0, first: int = 2) -> dict[str, Tensor]:
    """Two sentences of unequal length, padded on the right."""
    ids = torch.randint(4, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = first
    mask = torch.zeros(2, TOKENS, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
        ids[row, length:] = pad
    return {"input_ids": ids, "attention_mask": mask}


# -- pictures ------------------------------------------------------------------------------------------------------
_VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
}  # fmt: skip


def _hf(kind: str, config: str, options: Mapping[str, Any], attention: str = "sdpa") -> nn.Module:
    import transformers

    settings = getattr(transformers, config)(**options)
    return randomise(getattr(transformers, kind)._from_config(settings, attn_implementation=attention))


def hf_vit(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    return _hf("ViTForImageClassification", "ViTConfig", _VISION, attention), pixels()


def hf_vit_wide() -> tuple[nn.Module, Inputs]:
    """A grid of 3 rows and 5 columns."""
    return _hf("ViTForImageClassification", "ViTConfig", {**_VISION, "image_size": (24, 40)}), pixels(24, 40)


def hf_deit() -> tuple[nn.Module, Inputs]:
    return _hf("DeiTForImageClassification", "DeiTConfig", _VISION), pixels()


def hf_deit_teacher() -> tuple[nn.Module, Inputs]:
    """Reads two rows: the mean of the class token's and the distillation token's logits."""
    return _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", _VISION), pixels()


def hf_dinov2() -> tuple[nn.Module, Inputs]:
    """Reads the class token and the mean of the patches."""
    return _hf("Dinov2ForImageClassification", "Dinov2Config", {**_VISION, "mlp_ratio": 2}), pixels()


def timm_vit(name: str = "vit_tiny_patch16_224", **options: Any) -> tuple[nn.Module, Inputs]:
    import timm

    small = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": HEADS, "num_classes": CLASSES}
    return randomise(timm.create_model(name, **{**small, **options})), pixels()


def timm_deit() -> tuple[nn.Module, Inputs]:
    return timm_vit("deit_tiny_distilled_patch16_224")


def timm_vit_mean() -> tuple[nn.Module, Inputs]:
    """No class token: reads the mean of the patches."""
    return timm_vit(class_token=False, global_pool="avg")


def torchvision_vit() -> tuple[nn.Module, Inputs]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=2 * WIDTH, num_classes=CLASSES
    )
    return randomise(model), pixels()


# -- text ----------------------------------------------------------------------------------------------------------
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH, "max_position_embeddings": 32, "num_labels": CLASSES,
}  # fmt: skip


def bert(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    return _hf("BertForSequenceClassification", "BertConfig", _TEXT, attention), text()


def roberta(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    return _hf("RobertaForSequenceClassification", "RobertaConfig", {**_TEXT, "pad_token_id": 1}, attention), text(pad=1)


def distilbert(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    options = {
        "vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 3, "n_heads": HEADS, "hidden_dim": 2 * WIDTH,
        "max_position_embeddings": 32, "num_labels": CLASSES,
    }  # fmt: skip
    return _hf("DistilBertForSequenceClassification", "DistilBertConfig", options, attention), text()


def electra(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    """Its embeddings are narrower than its blocks."""
    return _hf("ElectraForSequenceClassification", "ElectraConfig", {**_TEXT, "embedding_size": 12}, attention), text()


def modernbert(attention: str = "sdpa", pooling: str = "mean") -> tuple[nn.Module, Inputs]:
    """Rotary positions, gated layers, and local attention in all but the first block."""
    options = {
        **_TEXT, "classifier_pooling": pooling, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
        "eos_token_id": 3, "local_attention": 6, "global_attn_every_n_layers": 3,
    }  # fmt: skip
    return _hf("ModernBertForSequenceClassification", "ModernBertConfig", options, attention), text()


def gpt2(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    """Causal; reads the last real token."""
    options = {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 32, "num_labels": CLASSES,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    return _hf("GPT2ForSequenceClassification", "GPT2Config", options, attention), text()


def llama(attention: str = "sdpa") -> tuple[nn.Module, Inputs]:
    """Causal, grouped queries, rotary positions, RMSNorm; reads the last real token."""
    options = {
        **_TEXT, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3,
    }  # fmt: skip
    return _hf("LlamaForSequenceClassification", "LlamaConfig", options, attention), text()


# -- language models: logits of every token over the vocabulary ------------------------------------------------------
def gpt2_lm() -> tuple[nn.Module, Inputs]:
    options = {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 32, "pad_token_id": 0,
        "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    return _hf("GPT2LMHeadModel", "GPT2Config", options), text()


def llama_lm() -> tuple[nn.Module, Inputs]:
    options = {
        **_TEXT, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3,
    }  # fmt: skip
    return _hf("LlamaForCausalLM", "LlamaConfig", options), text()


def t5() -> tuple[nn.Module, Inputs]:
    """An encoder–decoder: needs ``decoder_input_ids`` too."""
    options = {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": HEADS, "pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }  # fmt: skip
    return _hf("T5ForConditionalGeneration", "T5Config", options), text()


class EncoderClassifier(nn.Module):
    """An encoder as a user writes it with plain ``torch.nn``."""

    def __init__(self, *, batch_first: bool = True, pooling: str = "mean", norm_first: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(32, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.1, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first, self.pooling = batch_first, pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids) + self.positions[: input_ids.shape[1]]
        padding = attention_mask == 0
        if self.batch_first:
            hidden = self.encoder(hidden, src_key_padding_mask=padding)
        else:
            hidden = self.encoder(hidden.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
        if self.pooling == "first":
            return self.head(hidden[:, 0])
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


def encoder(**options: Any) -> tuple[nn.Module, Inputs]:
    return randomise(EncoderClassifier(**options)), text()


# -- windows -------------------------------------------------------------------------------------------------------
def hf_swin() -> tuple[nn.Module, Inputs]:
    options = {
        "image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4,
        "num_labels": CLASSES, "drop_path_rate": 0.0,
    }  # fmt: skip
    return _hf("SwinForImageClassification", "SwinConfig", options), pixels()


def timm_swin() -> tuple[nn.Module, Inputs]:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, patch_size=2, embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=4,
        num_classes=CLASSES,
    )  # fmt: skip
    return randomise(model), pixels()


def torchvision_swin() -> tuple[nn.Module, Inputs]:
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[2, 2], embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=[4, 4], stochastic_depth_prob=0.0,
        num_classes=CLASSES,
    )  # fmt: skip
    return randomise(model), pixels()


IMAGES: dict[str, Builder] = {
    "hf_vit": hf_vit,
    "hf_vit_wide": hf_vit_wide,
    "hf_deit": hf_deit,
    "hf_deit_teacher": hf_deit_teacher,
    "hf_dinov2": hf_dinov2,
    "timm_vit": timm_vit,
    "timm_vit_mean": timm_vit_mean,
    "timm_deit": timm_deit,
    "torchvision_vit": torchvision_vit,
}
TEXTS: dict[str, Builder] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "electra": electra,
    "modernbert_mean": lambda: modernbert(pooling="mean"),
    "modernbert_cls": lambda: modernbert(pooling="cls"),
    "gpt2": gpt2,
    "llama": llama,
    "encoder_mean": encoder,
    "encoder_first": lambda: encoder(pooling="first", norm_first=True),
    "encoder_sequence_first": lambda: encoder(batch_first=False),
}
ZOO: dict[str, Builder] = {**IMAGES, **TEXTS}
# the next token; no contract of a classifier's logits is tested on them
LANGUAGE: dict[str, Builder] = {"gpt2_lm": gpt2_lm, "llama_lm": llama_lm}
OTHERS: dict[str, Builder] = {"t5": t5}
# families whose two attention implementations must agree
TWO_ATTENTIONS: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {
    "hf_vit": hf_vit, "bert": bert, "roberta": roberta, "distilbert": distilbert, "electra": electra, "modernbert": modernbert,
    "gpt2": gpt2, "llama": llama,
}  # fmt: skip
# no attention map over all tokens
WINDOWED: dict[str, Builder] = {"hf_swin": hf_swin, "timm_swin": timm_swin, "torchvision_swin": torchvision_swin}


def modality(name: str) -> str:
    return "text" if name in TEXTS else "image"


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Inputs]:
    model, inputs = {**ZOO, **WINDOWED, **LANGUAGE, **OTHERS}[name]()
    return model.to(dtype), to(inputs, dtype)


def to(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    return {name: to(value, dtype) for name, value in inputs.items()}


def rows(inputs: Inputs, index: int, *, crop: bool = False) -> Inputs:
    """One sample as a batch of one; ``crop`` also removes its padding."""
    if isinstance(inputs, Tensor):
        return inputs[index : index + 1]
    length = int(inputs["attention_mask"][index].sum()) if crop and "attention_mask" in inputs else None
    return {name: value[index : index + 1, :length] for name, value in inputs.items()}


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Logits of the plain model."""
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, Tensor) else output.logits


class Choice(nn.Module):
    """Logit of a single choice of a multiple-choice model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids[:, None], attention_mask=attention_mask[:, None]).logits


def prepared(model: nn.Module, inputs: Any) -> Prepared:
    """Prepare inputs for a model."""
    return open_model(model).prepare(inputs)
