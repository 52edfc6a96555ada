"""Norms of attention-weighted vectors by both versions of gorokoba560/norm-analysis-of-transformer on the zoo's BERT.

Only the layers of the peer's fork of transformers run (3.0, which no longer imports); embeddings and head are the zoo's.
"""

from __future__ import annotations

import torch
from peer_tools import additive_mask, checkout, layers_of, load, save, stand_ins, text_model
from torch import nn

root = checkout()
model, inputs = text_model()
out: dict[str, list[torch.Tensor]] = {}
NAMES = {"emnlp2020": ("", "heads", "attention"), "emnlp2021": ("heads", "attention", "residual", "norm")}
for version, names in NAMES.items():
    fork = root / version / "transformers" / "src" / "transformers"
    others = [f"{version}.{name}" for name in ("configuration_bert", "file_utils", "modeling_utils")]
    with stand_ins(version, *others), stand_ins(f"{version}.activations", gelu=nn.functional.gelu, gelu_new=None, swish=None):
        peer = load(fork / "modeling_bert.py", f"{version}.modeling_bert")
    with torch.no_grad():
        hidden = model.bert.embeddings(inputs["input_ids"])
        for layer in layers_of(model, peer.BertLayer):
            hidden, _, *norms = layer(hidden, additive_mask(inputs["attention_mask"]), output_norms=True)
            for name, values in zip(names, norms, strict=False):
                if name:
                    out.setdefault(f"{version}_{name}", []).append(values)
        out[f"{version}_logits"] = list(model.classifier(model.bert.pooler(hidden)))
save("norms", **{name: torch.stack(values) for name, values in out.items()})
