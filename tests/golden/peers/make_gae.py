"""Generic attention explainability by hila-chefer/Transformer-MM-Explainability on a tiny CLIP and a tiny DETR.

The peer's functions run unedited, one pair or query at a time, on the attention maps and gradients of transformers'
models: `interpret` of CLIP_explainability.ipynb, and the class Generator of DETR with use_lrp=False, the paper's method.
Transformers computes the softmax of CLIP in float32; here it keeps the dtype of the model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from peer_tools import cell, checkout, float32, load, save, tiny_models
from torch import Tensor, nn

torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
softmax = nn.functional.softmax
nn.functional.softmax = lambda x, dim=-1, dtype=None: softmax(x, dim=dim)  # type: ignore[assignment]
root = checkout()
out: dict[str, Any] = {}


class Blocks(nn.ModuleList):
    """The blocks of a tower, each with the attention map of the last forward pass."""

    def store(self, maps: tuple[Tensor, ...]) -> None:
        for block, map_ in zip(self, maps, strict=True):
            block.attn_probs = map_


class Towers(nn.Module):
    """CLIP with the attributes that the peer's `interpret` uses."""

    def __init__(self, clip: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.clip, self.mask = clip, mask
        self.image, self.text = (Blocks(nn.Module() for _ in t.encoder.layers) for t in (clip.vision_model, clip.text_model))
        self.visual = SimpleNamespace(transformer=SimpleNamespace(resblocks=self.image))
        self.transformer = SimpleNamespace(resblocks=self.text)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        output = self.clip(input_ids=texts, attention_mask=self.mask, pixel_values=images, output_attentions=True)
        self.image.store(output.vision_model_output.attentions)
        self.text.store(output.text_model_output.attentions)
        return output.logits_per_image, output.logits_per_text


with float32():
    clip, inputs = tiny_models.clip("eager")
clip.double()
interpret = cell(root / "CLIP_explainability.ipynb", "interpret", start_layer=-1, start_layer_text=-1)
towers = Towers(clip, inputs["attention_mask"])
images_ = inputs["pixel_values"].double()
out["clip_logits"] = towers(images_, inputs["input_ids"])[0]
for first in (-1, 0, 1):
    texts, images = zip(*(interpret(p[None], inputs["input_ids"], towers, "cpu", first, first) for p in images_), strict=True)
    out[f"clip_image_{first}"] = torch.stack(images)  # [image, text, patch]
    out[f"clip_text_{first}"] = torch.stack(texts)  # [image, text, token, token]


class Attention:
    """An attention of DETR with the methods that the peer uses."""

    def __init__(self, weights: Tensor) -> None:
        weights.retain_grad()
        self.weights = weights

    def get_attn(self) -> Tensor:
        return self.weights[0]

    def get_attn_gradients(self) -> Tensor:
        assert self.weights.grad is not None
        return self.weights.grad[0]


class Detector:
    """DETR with the attributes that the peer's Generator uses."""

    def __init__(self, detr: nn.Module) -> None:
        self.detr, self.eval, self.zero_grad = detr, detr.eval, detr.zero_grad

    def __call__(self, image: Tensor) -> dict[str, Tensor]:
        output = self.detr(image, output_attentions=True)
        encoder_layers = [SimpleNamespace(self_attn=Attention(w)) for w in output.encoder_attentions]
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        decoder_layers = [SimpleNamespace(self_attn=Attention(self_map), multihead_attn=Attention(cross_map)) for self_map, cross_map in pairs]
        self.transformer = SimpleNamespace(encoder=SimpleNamespace(layers=encoder_layers), decoder=SimpleNamespace(layers=decoder_layers))
        return {"pred_logits": output.logits}


peer = load(root / "DETR" / "modules" / "ExplanationGenerator.py", "ExplanationGenerator")
normalised, nan_found = peer.handle_residual, []


def recorded(relevance: Tensor) -> Tensor:
    """Divide by row sums as the peer does, and record whether a zero row gave 0/0."""
    result = normalised(relevance)
    nan_found.append(bool(result.isnan().any()))
    return result


peer.handle_residual = recorded
with float32():
    detr, images_ = tiny_models.detr("eager")
generator = peer.Generator(Detector(detr.double()))
out["detr_logits"] = detr(images_.double()).logits
out["detr"] = torch.zeros(len(images_), tiny_models.QUERIES, 16)
out["detr_lost_a_block"] = torch.zeros(len(images_), tiny_models.QUERIES, dtype=torch.bool)
for i, image in enumerate(images_.double().split(1)):
    for query in range(tiny_models.QUERIES):
        nan_found.clear()
        out["detr"][i, query] = generator.generate_ours(image, query, tiny_models.CLASS, use_lrp=False).flatten()
        out["detr_lost_a_block"][i, query] = any(nan_found)
save("gae", **out)
