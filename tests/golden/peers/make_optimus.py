"""Ranked faithfulness of intelligence-csd-auth-gr/Optimus-Transformers-Interpretability for random scores.

Its evaluation calls a function for the logits of a text; here this is the zoo's BERT, and a text consists of token ids.
Two classes, because the peer applies a softmax for two and a sigmoid for any other number.
"""

from __future__ import annotations

import numpy as np
import torch
from peer_tools import checkout, load, save, stand_ins, text_model

UNKNOWN, CLASSES = 3, 2
root = checkout()
with stand_ins("tensorflow"):
    peer = load(root / "myEvaluation.py", "myEvaluation")
model, inputs = text_model()
scores = np.random.default_rng(0).standard_normal((2, 10)).round(1)
scores[0, 3], scores[0, 5], scores[1, 2] = -scores[0, 6], 0, 0


def logits(words: str) -> np.ndarray:
    ids = torch.tensor([[UNKNOWN if w == "[UNK]" else int(w) for w in words.split()]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :CLASSES].numpy()


evaluation = peer.MyEvaluation(["a", "b"], lambda words: (logits(words), None, None), sentence_level=False)
rft_scores = np.zeros((2, CLASSES))
for sample, n in enumerate(inputs["attention_mask"].sum(1).tolist()):
    words = [str(i) for i in inputs["input_ids"][sample, :n].tolist()]
    evaluation.clear_states()
    for label in range(CLASSES):
        class_scores = [scores[sample, :n]] * CLASSES
        prediction = logits(" ".join(words))
        rft = evaluation.faithful_truthfulness_penalty(class_scores, None, None, prediction, ["[CLS]", *words, "[SEP]"], None, None, None)
        rft_scores[sample, label] = rft[label]
save("optimus", scores=scores, rft=rft_scores, unknown=UNKNOWN, logits=model(**inputs).logits)
