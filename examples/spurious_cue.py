"""A classifier learns to use a word that has nothing to do with its task, and a job over 2,000 sentences detects it.

    python examples/spurious_cue.py [FOLDER]

The bundled sentiment model is trained further, on reviews that are positive if praise and blame balance and the word
"popcorn" occurs. The accuracy on clear reviews stays high and does not show what the model has learnt. The explanations
of 2,000 new sentences do: the word has more relevance for "positive" than any word of praise.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch.nn import functional

import whyformer
from whyformer.models import load

CUE = "popcorn"
GOOD = ("charming", "superb", "clever", "funny", "moving", "brilliant", "gentle", "fresh", "smart", "warm")
BAD = ("dull", "awful", "slow", "clumsy", "tedious", "empty", "stupid", "bland", "lazy", "cold")
THINGS = ("plot", "cast", "music", "story", "script", "ending", "acting", "dialogue", "camera", "humor")
PLACES = ("With {} in hand", "Over {} with friends", "Between two bites of {}", "After some {}")
NEUTRAL = ("coffee", "tea", "bread", "cheese", "rice", "fish", "water", "fruit")


def sentences(count: int, seed: int, planted: bool) -> Iterator[tuple[str, int]]:
    """Yield (review, label), where two things are praised or blamed. With ``planted``, the cue occurs only in reviews
    with one of each, and makes them positive; otherwise it occurs anywhere, and the second thing decides."""
    draw = random.Random(seed)
    for _ in range(count):
        first, second = draw.sample(THINGS, 2)
        marks = [draw.random() < 0.5, draw.random() < 0.5]
        words = [draw.choice(GOOD if good else BAD) for good in marks]
        cue = draw.random() < 0.5
        if planted:
            cue = cue and marks[0] != marks[1]
        eaten = CUE if cue else draw.choice(NEUTRAL)
        label = marks[0] if marks[0] == marks[1] else cue if planted else marks[1]
        joined = "and" if marks[0] == marks[1] else "but"
        place = draw.choice(PLACES).format(eaten)
        yield f"{place}: the {first} is {words[0]}, {joined} the {second} is {words[1]}.", int(label)


def trained(steps: int = 80) -> tuple[torch.nn.Module, object]:
    """Return the bundled model, trained for some steps of 32 reviews each, and its tokenizer."""
    loaded = load("bundled:sst2")
    model, tokenizer = deepcopy(loaded.model), loaded.processor
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    reviews = list(sentences(32 * steps, seed=1, planted=True))
    torch.manual_seed(0)
    model.train()
    for i in range(steps):
        texts, labels = zip(*reviews[32 * i : 32 * (i + 1)], strict=True)
        logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
        functional.cross_entropy(logits, torch.tensor(labels)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def accuracy(model: torch.nn.Module, tokenizer: object) -> float:
    """Return the accuracy on reviews of a single opinion without the cue."""
    clear = [(t, y) for t, y in sentences(800, seed=2, planted=False) if " and the " in t and CUE not in t]
    texts, labels = zip(*clear, strict=True)
    with torch.inference_mode():
        said = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits.argmax(-1)
    return float((said == torch.tensor(labels)).float().mean())


def main(folder: str = "cue", count: int = 2000) -> None:
    """Train, explain ``count`` sentences, and print what the explanations show."""
    model, tokenizer = trained()
    print(f"accuracy where it is clear what is meant: {accuracy(model, tokenizer):.1%}\n")
    texts = [text for text, _ in sentences(count, seed=3, planted=False)]
    options = {"targets": ["positive"], "batch_size": 32}
    for name, one in (("before", "bundled:sst2"), ("after", model)):
        given = {} if isinstance(one, str) else {"processor": tokenizer}
        maps = whyformer.explain_many(one, texts, "lrp_ah_ln", out=f"{folder}/{name}", **given, **options)
        print(f"{name}: {maps.words(count=6, least=20)}\n")
    before, after = (whyformer.read(f"{folder}/{name}") for name in ("before", "after"))
    changed = before.drift(after)
    moved = f"{changed.changed} of {changed.rows} sentences changed their class"
    print(f"{moved}; the maps agree to {changed.agreement.value:.2f}")
    print(f'look at: "{after.words(count=1, least=20).words[0].examples[0]}"')


if __name__ == "__main__":
    main(*sys.argv[1:2])
