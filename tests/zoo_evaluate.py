"""Tiny random models with processors, and tiny data sets on disk, for tests of evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

CLASSES = 4
WORDS = [
    "the",
    "a",
    "good",
    "bad",
    "film",
    "is",
    "was",
    "not",
    "very",
    "plot",
    "story",
    "dull",
    "fine",
    "actor",
    "scene",
    "slow",
    "ann",
    "bob",
    "quiet",
    "great",
]


def tiny_vit(size: int = 32, patch: int = 8) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=size, patch_size=patch,
        num_labels=CLASSES, initializer_range=0.5,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def processor() -> SimpleNamespace:
    """The attributes of an image processor that the evaluation reads."""
    return SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4], resample=2, do_normalize=True)


def tiny_bert() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {
        t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##ly", "."])
    }
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_max_length=64,
    )  # fmt: skip
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, num_labels=2, initializer_range=0.5,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval(), tokenizer


def picture_folder(folder: Path, count: int = 5) -> Path:
    """Write images, masks and ``index.json``."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    rows = []
    for i in range(count):
        pixels = generator.integers(0, 255, (40, 36, 3), dtype=np.uint8)
        mask = np.zeros((40, 36), dtype=np.uint8)
        mask[5 + i : 20 + i, 8:24] = 255
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
        rows.append({"image": f"images/{i}.png", "mask": f"masks/{i}.png", "imagenet_class": i % CLASSES})
    (folder / "index.json").write_text(json.dumps(rows))
    return folder


def movie_folder(folder: Path, count: int = 5) -> Path:
    """Write texts and annotations in the layout of ERASER."""
    generator = np.random.default_rng(0)
    (folder / "docs").mkdir(parents=True)
    lines = []
    for i in range(count):
        words = generator.choice(WORDS, 12 + i).tolist()
        name = f"{'neg' if i % 2 else 'pos'}R_{i:03d}.txt"
        (folder / "docs" / name).write_text("\n".join([" ".join(words[:6]), " ".join(words[6:])]))
        spans = [{"docid": name, "start_token": 2, "end_token": 5, "start_sentence": 0, "end_sentence": 1, "text": ""}]
        label = "NEG" if i % 2 else "POS"
        lines.append(json.dumps({"annotation_id": name, "classification": label, "evidences": [spans], "query": "?"}))
    (folder / "val.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def sentence_file(folder: Path, count: int = 6) -> Path:
    """Write sentences in the layout of SST-2."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{' '.join(generator.choice(WORDS, 5 + i % 3))}\t{i % 2}" for i in range(count)]
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return folder
