"""AmeenAli/XAI_Transformers: relevance of its attention-only classifier, sums over columns, activation and pruning curves.

The classifier's weights are those of `tiny_models.AttentionOnly`. Curves are computed for the first sentence of the zoo's BERT, with the
fractions 0, 0.1 ... 1 as written and as `numpy.linspace` gives them (0.30000000000000004 of 10 words is rounded up to 4).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from peer_tools import checkout, float32, load, save, stand_ins, text_model, tiny_models

import zoo

root = checkout()
with stand_ins("transformers", "pandas"):
    attribution = load(root / "attribution.py", "attribution")
    utils = load(root / "utils.py", "utils")
    peer = load(root / "xai_transformer.py", "xai_transformer")

with float32():
    model, inputs = tiny_models.attention_only()
model.double()
out = {"logits": model(**inputs)}
for name, attention, deviation in (("none", False, False), ("ah", True, False), ("ln", False, True), ("ah_ln", True, True)):
    config = SimpleNamespace(
        hidden_size=24, all_head_size=24, num_attention_heads=zoo.HEADS, attention_head_size=24 // zoo.HEADS, n_blocks=3, n_classes=zoo.CLASSES,
        device="cpu", layer_norm_eps=tiny_models.EPSILON, train_mode=False, detach_kq=attention, detach_layernorm=deviation, detach_mean=False,
    )  # fmt: skip
    peer_model = peer.BertAttention(config, lambda input_ids, **_: model.embeds(input_ids)).eval()
    missing = peer_model.load_state_dict(model.state_dict(), strict=False)
    assert all(key.startswith("output.") or "LayerNorm" in key for key in missing.missing_keys)  # not used
    rows = [[peer_model.forward_and_explain(ids, target)["R"][0] for target in range(zoo.CLASSES)] for ids in inputs["input_ids"].split(1)]
    out[f"relevance_{name}"] = np.array(rows)  # [sentence, class, token]

bert, inputs = text_model()
with torch.no_grad():
    output = bert(**inputs, output_attentions=True)
maps = torch.stack(output.attentions)[:, 0].numpy()
out["bert_logits"] = output.logits
out["last_block_columns"] = attribution.get_raw_att_relevance(maps, None)
out["rollout_columns"] = attribution.get_joint_relevance(maps, None, 2)
scores = np.random.default_rng(0).standard_normal(10)
tokenizer, ids, label = SimpleNamespace(unk_token_id=3), inputs["input_ids"][:1], output.logits[0].argmax()
out["scores"] = scores
for name, fractions in (("written", np.arange(11) / 10), ("linspace", np.linspace(0.0, 1.0, 11))):
    for curve in ("generate", "pruning"):
        logits = lambda ids, labels: {"logits": bert(input_ids=ids).logits}  # noqa: E731
        changes, evidence, _ = utils.flip(logits, scores, ids, None, label, fractions, curve, tokenizer=tokenizer)
        out[f"{curve}_{name}"] = np.array(evidence if curve == "generate" else changes)
save("ali", **out)
