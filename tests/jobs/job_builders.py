"""Tiny models, tables and pictures on disk for the tests of jobs, and child processes that run a job."""

from __future__ import annotations

import csv
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from zoo_evaluate import WORDS, tiny_bert, tiny_vit


def text_model(folder: Path) -> str:
    """A tiny BERT with its tokenizer."""
    model, tokenizer = tiny_bert()
    model.config.id2label, model.config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def picture_model(folder: Path) -> str:
    """A tiny ViT with its processor."""
    from transformers import ViTImageProcessorPil

    tiny_vit().save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, int(generator.integers(1, 12)))) for _ in range(count)]


def text_table(path: Path, count: int = 20, bad: tuple[int, ...] = ()) -> Path:
    """A table with the columns id, text and label, in the format of the suffix of ``path``; texts of rows ``bad`` are empty."""
    texts = ["" if i in bad else text for i, text in enumerate(sentences(count))]
    rows = [{"id": f"r{i}", "text": text, "label": i % 2} for i, text in enumerate(texts)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def pictures(folder: Path, count: int = 5) -> Path:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(count):
        Image.fromarray(generator.integers(0, 255, (40 + i, 36, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a job by relative path, without its log."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "log.jsonl"}


def run_in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a child process, which exits with status 0, or 1 after an exception; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def exit_code(child: int) -> int:
    """Wait for a child process and return its exit code; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
