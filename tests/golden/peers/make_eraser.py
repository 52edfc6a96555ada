"""Metrics of jayded/eraserbenchmark for random scores of the zoo's two sentences.

The peer takes as inputs the k highest words (ties in reading order), and the model's probabilities without and with only
the highest 1, 5, 10, 20, 50 % of words (rounded, at least one); removed words are deleted.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from peer_tools import checkout, save, text_model

sys.path.insert(0, str(checkout()))
from rationale_benchmark import metrics as peer

K, SHARES = 3, (0.01, 0.05, 0.10, 0.20, 0.50)
model, inputs = text_model()
lengths = inputs["attention_mask"].sum(1).tolist()
draw = np.random.default_rng(0)
scores = draw.standard_normal((2, 10)).round(1)
scores[0, 3] = scores[0, 6]
rationale = draw.random((2, 10)) < 0.4
out = {"scores": scores, "rationale": rationale, "k": K, "logits": model(**inputs).logits}


def probabilities(ids: torch.Tensor) -> dict[str, float]:
    with torch.no_grad():
        result = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0].softmax(-1)
    return {str(c): float(p) for c, p in enumerate(result)}


truth, predicted, instances = [], [], []
out["auprc"], out["f1"] = np.zeros(2), np.zeros(2)
for doc, n in enumerate(lengths):
    order = np.argsort(-scores[doc, :n], kind="stable")
    marked = [peer.Rationale("a", str(doc), t, t + 1) for t in np.flatnonzero(rationale[doc, :n]).tolist()]
    top_words = [peer.Rationale("a", str(doc), t, t + 1) for t in order[:K].tolist()]
    out["f1"][doc] = peer.score_hard_rationale_predictions(marked, top_words)["instance_micro"]["f1"]
    paired = peer.PositionScoredDocument("a", str(doc), tuple(scores[doc, :n]), tuple(rationale[doc, :n]))
    out["auprc"][doc] = peer.score_soft_tokens([paired])["auprc"]
    truth, predicted = truth + marked, predicted + top_words
    ids = inputs["input_ids"][doc, :n]
    full, thresholds = probabilities(ids), []
    for share in SHARES:
        top = np.isin(np.arange(n), order[: max(1, round(share * n))])
        comprehensiveness, sufficiency = probabilities(ids[~top]), probabilities(ids[top])
        thresholds.append({"threshold": share, "comprehensiveness_classification_scores": comprehensiveness, "sufficiency_classification_scores": sufficiency})
    instances.append({"classification": max(full, key=full.__getitem__), "classification_scores": full, "thresholded_scores": thresholds})
hard_scores = peer.score_hard_rationale_predictions(truth, predicted)
out["f1_macro"], out["f1_micro"] = hard_scores["instance_macro"]["f1"], hard_scores["instance_micro"]["f1"]
figures = [peer.compute_aopc_scores([instance], SHARES) for instance in instances]
out["comprehensiveness"], out["sufficiency"] = np.array([f[1] for f in figures]), np.array([f[3] for f in figures])
save("eraser", **out)
