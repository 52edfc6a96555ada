"""Value zeroing with the BERT of hmohebbi/ValueZeroing, whose layers have an argument for the token to zero.

Its scoring script cannot be imported, so its loop over layers and tokens, its distance (of scikit-learn) and its product of
maps are re-implemented here. Padding is cropped.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import torch
from peer_tools import checkout, layers_of, load, save, stand_ins, text_model
from sklearn.metrics.pairwise import cosine_distances
from transformers.activations import ACT2FN

root = checkout()
model, inputs = text_model()
parents = ("transformers", "transformers.models", "transformers.models.bert")
others = ("file_utils", "modeling_outputs", "models.bert.configuration_bert")
with (
    stand_ins(*parents, *(f"transformers.{name}" for name in others)),
    stand_ins("transformers.utils", logging=SimpleNamespace(get_logger=logging.getLogger)),
    stand_ins("transformers.activations", ACT2FN=ACT2FN),
    stand_ins("transformers.modeling_utils", apply_chunking_to_forward=lambda call, size, axis, *args: call(*args)),
):
    peer = load(root / "modeling" / "customized_modeling_bert.py", "customized_modeling_bert")
layers = layers_of(model, peer.BertLayer, chunk_size_feed_forward=0, position_embedding_type="absolute")
out = {}
for sample, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
    with torch.no_grad():
        hidden = model.bert.embeddings(inputs["input_ids"][sample : sample + 1, :length])
        scores = np.zeros((len(layers), length, length))
        for block, layer in enumerate(layers):
            (plain,) = layer(hidden)
            for t in range(length):
                (zeroed,) = layer(hidden, zero_value_index=t)
                scores[block, :, t] = cosine_distances(zeroed[0], plain[0]).diagonal()
            hidden = plain
        out[f"logits_{sample}"] = model.classifier(model.bert.pooler(hidden))[0]
    scores /= scores.sum(-1, keepdims=True)
    out[f"maps_{sample}"] = scores
    out[f"rollout_{sample}"] = scores[2] @ scores[1] @ scores[0]
save("value_zeroing", **out)
