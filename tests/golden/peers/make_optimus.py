"""Ranked faithfulness of intelligence-csd-auth-gr/Optimus-Transformers-Interpretability for random scores.

Its evaluation asks a function for the logits of a text; here that is the zoo's BERT, a text being the ids of its words.
Two classes, as the peer takes a softmax for two and a sigmoid for any other number.
"""

from __future__ import annotations

import numpy as np
import torch
from making import checkout, load, save, stand_ins, text

UNKNOWN, CLASSES = 3, 2
root = checkout()
with stand_ins("tensorflow"):
    peer = load(root / "myEvaluation.py", "myEvaluation")
model, inputs = text()
scores = np.random.default_rng(0).standard_normal((2, 10)).round(1)
scores[0, 3], scores[0, 5], scores[1, 2] = -scores[0, 6], 0, 0


def logits(words: str) -> np.ndarray:
    ids = torch.tensor([[UNKNOWN if w == "[UNK]" else int(w) for w in words.split()]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :CLASSES].numpy()


evaluation = peer.MyEvaluation(["a", "b"], lambda words: (logits(words), None, None), sentence_level=False)
found = np.zeros((2, CLASSES))
for sample, n in enumerate(inputs["attention_mask"].sum(1).tolist()):
    words = [str(i) for i in inputs["input_ids"][sample, :n].tolist()]
    evaluation.clear_states()
    for label in range(CLASSES):
        own = [scores[sample, :n]] * CLASSES
        prediction = logits(" ".join(words))
        rft = evaluation.faithful_truthfulness_penalty(own, None, None, prediction, ["[CLS]", *words, "[SEP]"], None, None, None)
        found[sample, label] = rft[label]
save("optimus", scores=scores, rft=found, unknown=UNKNOWN, logits=model(**inputs).logits)
