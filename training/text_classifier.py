"""Train a small text classifier for the evaluation tables: ERASER movies, IMDB, TweetEval, MELD, SST-2, SMILES (BACE).

    D=../shared/data
    python training/text_classifier.py --data $D/eraser_movies --test-split val --longest 512 --out runs/movies
    python training/text_classifier.py --data $D/bace --train-split Train --test-split Test --smiles --out runs/b

It makes its own lower-casing WordPiece vocabulary (atoms and signs for SMILES), or fine-tunes a pretrained encoder
(``--start FOLDER``). A data set without a training split (IMDB's folder here, ``--train-split ""``) is cut in two by
``--share``. Interrupt it and run the same command again to go on from the last epoch. What it makes is not shipped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from checkpoints import keep, resume
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel, WordPiece
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer, WordPieceTrainer
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from whyformer.datasets import Text, open_texts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMILES = r"\[[^\]]+\]|Br|Cl|@@|%\d\d|."


def build_tokenizer(texts: list[str], size: int, longest: int, smiles: bool) -> PreTrainedTokenizerFast:
    """Vocabulary of the training texts alone."""
    backend = Tokenizer(WordLevel(unk_token="[UNK]") if smiles else WordPiece(unk_token="[UNK]"))
    if smiles:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), behavior="isolated")
        trainer = WordLevelTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    else:
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, min_frequency=2, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=longest, **names)


def read(args: argparse.Namespace) -> tuple[list[Text], list[Text], tuple[str, ...]]:
    """(texts to train on, texts to test on, names of the labels)."""
    if args.train_split:
        train, test = (open_texts(args.data, split=s)[1] for s in (args.train_split, args.test_split))
        return list(train), list(test), train.labels
    _, whole = open_texts(args.data)
    order = np.random.default_rng(args.seed).permutation(len(whole))
    cut = round(args.share * len(order))
    return [whole[int(i)] for i in order[:cut]], [whole[int(i)] for i in order[cut:]], whole.labels


def batches(lengths: list[int], size: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Texts of about equal length together, the batches in random order."""
    order = np.argsort(np.array(lengths) + generator.uniform(0, 8, len(lengths)))
    cut = [order[i : i + size] for i in range(0, len(order), size)]
    return [cut[i] for i in generator.permutation(len(cut))]


def encode(rows: list[list[int]], pad: int, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """A padded batch."""
    ids = torch.full((len(rows), max(map(len, rows))), pad)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    return {"input_ids": ids.to(device), "attention_mask": (ids != pad).long().to(device)}


def accuracy(model: torch.nn.Module, rows: list[list[int]], labels: list[int], pad: int) -> float:
    """Share of the texts that the model labels right."""
    model.eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, len(rows), 64):
            logits = model(**encode(rows[start : start + 64], pad, next(model.parameters()).device)).logits
            right += int((logits.argmax(-1).cpu() == torch.tensor(labels[start : start + 64])).sum())
    return right / len(rows)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    train, test, names = read(args)
    print(f"{len(train)} texts to train on, {len(test)} to test on, classes {', '.join(names)}", flush=True)
    if args.start:
        tokenizer = AutoTokenizer.from_pretrained(args.start)
        model = AutoModelForSequenceClassification.from_pretrained(
            args.start, num_labels=len(names), dtype=torch.float32
        )
    else:
        if (args.out / "tokenizer.json").is_file():  # made before an interruption: equally frequent pieces may differ
            tokenizer = AutoTokenizer.from_pretrained(args.out)
        else:
            tokenizer = build_tokenizer([t.text for t in train], args.vocabulary, args.longest, args.smiles)
            tokenizer.save_pretrained(args.out)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=args.hidden,
                num_hidden_layers=args.layers,
                num_attention_heads=4,
                intermediate_size=2 * args.hidden,
                max_position_embeddings=args.longest,
                num_labels=len(names),
            )
        )
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: i for i, name in enumerate(names)}
    model = model.to(args.device)
    rows = [tokenizer(t.text, truncation=True, max_length=args.longest)["input_ids"] for t in train]
    labels = torch.tensor([t.label for t in train]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.05)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / "state.pt"
    first = resume(state, model, optimizer)
    per_epoch = math.ceil(len(rows) / args.batch)
    total, begin = args.epochs * per_epoch, time.perf_counter()
    for epoch in range(first, args.epochs):
        model.train()
        generator, step, lost = np.random.default_rng([args.seed, epoch]), epoch * per_epoch, 0.0
        for batch in batches([len(r) for r in rows], args.batch, generator):
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1, (step + 1) / (0.06 * total)) * (1 - step / total)
            loss = functional.cross_entropy(
                model(**encode([rows[i] for i in batch], tokenizer.pad_token_id, args.device)).logits, labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, lost = step + 1, lost + loss.item()
        keep(state, model, optimizer, epoch + 1)
        print(
            f"epoch {epoch + 1}/{args.epochs} loss {lost / per_epoch:.4f} {time.perf_counter() - begin:.0f}s",
            flush=True,
        )
    found = [tokenizer(t.text, truncation=True, max_length=args.longest)["input_ids"] for t in test]
    score = accuracy(model, found, [int(t.label or 0) for t in test], tokenizer.pad_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    tested = {
        "accuracy": round(score, 4),
        "texts": len(test),
        "test_ids": [t.id for t in test] if not args.train_split else None,
    }
    (args.out / "tested.json").write_text(json.dumps(tested) + "\n")
    print(f"accuracy {100 * score:.1f} % of {len(test)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-split", default="train", help="empty: cut the data by --share")
    parser.add_argument("--test-split", default="test")
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--start", default=None, help="folder of a pretrained encoder to fine-tune")
    parser.add_argument("--smiles", action="store_true", help="one token an atom or sign")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
