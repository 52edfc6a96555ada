"""Generic attention explainability by hila-chefer/Transformer-MM-Explainability on a tiny CLIP and a tiny DETR.

The peer's functions run unedited, one pair or query at a time, on the attention maps and gradients of transformers'
models: `interpret` of CLIP_explainability.ipynb, and the class Generator of DETR with use_lrp=False, the paper's method.
Transformers takes the softmax of CLIP in single precision; here it keeps the model's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from making import cell, checkout, load, save, single, small
from torch import Tensor, nn

torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
softmax = nn.functional.softmax
nn.functional.softmax = lambda x, dim=-1, dtype=None: softmax(x, dim=dim)  # type: ignore[assignment]
root = checkout()
out: dict[str, Any] = {}


class Blocks(nn.ModuleList):
    """As many blocks as a tower has, each with the attention map of the last forward pass."""

    def keep(self, maps: tuple[Tensor, ...]) -> None:
        for block, one in zip(self, maps, strict=True):
            block.attn_probs = one


class Towers(nn.Module):
    """CLIP in the peer's words: what `interpret` looks at."""

    def __init__(self, clip: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.clip, self.mask = clip, mask
        self.image, self.text = (Blocks(nn.Module() for _ in t.encoder.layers) for t in (clip.vision_model, clip.text_model))
        self.visual = SimpleNamespace(transformer=SimpleNamespace(resblocks=self.image))
        self.transformer = SimpleNamespace(resblocks=self.text)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        output = self.clip(input_ids=texts, attention_mask=self.mask, pixel_values=images, output_attentions=True)
        self.image.keep(output.vision_model_output.attentions)
        self.text.keep(output.text_model_output.attentions)
        return output.logits_per_image, output.logits_per_text


with single():
    clip, inputs = small.clip("eager")
clip.double()
interpret = cell(root / "CLIP_explainability.ipynb", "interpret", start_layer=-1, start_layer_text=-1)
towers = Towers(clip, inputs["attention_mask"])
pictures = inputs["pixel_values"].double()
out["clip_logits"] = towers(pictures, inputs["input_ids"])[0]
for first in (-1, 0, 1):
    texts, images = zip(*(interpret(p[None], inputs["input_ids"], towers, "cpu", first, first) for p in pictures), strict=True)
    out[f"clip_image_{first}"] = torch.stack(images)  # [picture, text, patch]
    out[f"clip_text_{first}"] = torch.stack(texts)  # [picture, text, token, token]


class Attention:
    """One attention of DETR in the peer's words."""

    def __init__(self, weights: Tensor) -> None:
        weights.retain_grad()
        self.weights = weights

    def get_attn(self) -> Tensor:
        return self.weights[0]

    def get_attn_gradients(self) -> Tensor:
        assert self.weights.grad is not None
        return self.weights.grad[0]


class Detector:
    """DETR in the peer's words: what its Generator looks at."""

    def __init__(self, detr: nn.Module) -> None:
        self.detr, self.eval, self.zero_grad = detr, detr.eval, detr.zero_grad

    def __call__(self, image: Tensor) -> dict[str, Tensor]:
        found = self.detr(image, output_attentions=True)
        inside = [SimpleNamespace(self_attn=Attention(w)) for w in found.encoder_attentions]
        pairs = zip(found.decoder_attentions, found.cross_attentions, strict=True)
        across = [SimpleNamespace(self_attn=Attention(own), multihead_attn=Attention(other)) for own, other in pairs]
        self.transformer = SimpleNamespace(encoder=SimpleNamespace(layers=inside), decoder=SimpleNamespace(layers=across))
        return {"pred_logits": found.logits}


peer = load(root / "DETR" / "modules" / "ExplanationGenerator.py", "ExplanationGenerator")
normalised, lost = peer.handle_residual, []


def noting(relevance: Tensor) -> Tensor:
    """The peer's division by row sums, which is 0/0 for a row of zeros."""
    found = normalised(relevance)
    lost.append(bool(found.isnan().any()))
    return found


peer.handle_residual = noting
with single():
    detr, pictures = small.detr("eager")
generator = peer.Generator(Detector(detr.double()))
out["detr_logits"] = detr(pictures.double()).logits
out["detr"] = torch.zeros(len(pictures), small.QUERIES, 16)
out["detr_lost_a_block"] = torch.zeros(len(pictures), small.QUERIES, dtype=torch.bool)
for i, one in enumerate(pictures.double().split(1)):
    for query in range(small.QUERIES):
        lost.clear()
        out["detr"][i, query] = generator.generate_ours(one, query, small.CLASS, use_lrp=False).flatten()
        out["detr_lost_a_block"][i, query] = any(lost)
save("gae", **out)
