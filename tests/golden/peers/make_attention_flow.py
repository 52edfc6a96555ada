"""Attention flow and joint attention of samiraabnar/attention_flow on the attention maps of the zoo's BERT.

Padding is cropped, because the peer does not support it. The function that builds its graph also draws it, and calls a
networkx function that was renamed later: here drawing is disabled, and the old name is an alias.
"""

from __future__ import annotations

import networkx
import numpy as np
import torch
from peer_tools import checkout, load, save, stand_ins, text_model

root = checkout()
networkx.from_numpy_matrix = networkx.from_numpy_array
for name in ("draw_networkx_nodes", "draw_networkx_labels", "draw_networkx_edges"):
    setattr(networkx, name, lambda *args, **kwargs: None)
with stand_ins("tensorflow"):
    peer = load(root / "attention_graph_util.py", "attention_graph_util")
model, inputs = text_model()
with torch.no_grad():
    output = model(**inputs, output_attentions=True)
out = {"logits": output.logits}
for sample, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
    maps = torch.stack(output.attentions)[:, sample, :, :length, :length].mean(1).numpy()
    with_identity = maps + np.eye(length)
    with_identity /= with_identity.sum(-1, keepdims=True)
    words = [str(k) for k in range(length)]
    adjacency, labels = peer.get_adjmat(with_identity, words)
    graph = peer.draw_attention_graph(adjacency, labels, len(maps), length)
    top, bottom = f"L{len(maps)}_0", [name for name, node in labels.items() if node < length]
    flows = peer.compute_node_flow(graph, labels, bottom, [top], length)
    out[f"flow_{sample}"] = flows[labels[top]][-2 * length : -length]
    out[f"joint_{sample}"] = peer.compute_joint_attention(maps)[-1]
save("attention_flow", **out)
