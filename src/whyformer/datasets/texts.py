"""Readers of text data sets in their original files: SST-2, IMDB, BACE, TweetEval, MELD, ERASER."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whyformer.datasets.samples import Text, Texts, layout_errors, require_file, require_folder, wrong_layout
from whyformer.errors import InputError


@layout_errors
def sst2(path: str | Path, split: str = "dev") -> Texts:
    """Read ``dev.tsv`` or ``train.tsv`` of GLUE: a header ``sentence<TAB>label``, no quoting."""
    file = _file(path, f"{split}.tsv", "sentence<TAB>label")
    rows = enumerate(_table(file, ("sentence", "label"), delimiter="\t", quoting=csv.QUOTE_NONE))
    items = (Text(f"{file.stem}-{i}", r["sentence"].strip(), _label(r["label"], 2, file)) for i, r in rows)
    return Texts(tuple(items), ("negative", "positive"))


@layout_errors
def imdb(path: str | Path) -> Texts:
    """Read folders ``neg/`` and ``pos/`` (or ``test/neg`` ...) with a file ``number_rating.txt`` for each review."""
    expected = "folders neg/ and pos/ with a .txt file for each review"
    folder = require_folder(path, expected)
    folder = folder / "test" if (folder / "test" / "neg").is_dir() else folder
    items = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise wrong_layout(folder, expected, f"no {name}/*.txt")
        for file in files:
            text = file.read_text(encoding="utf-8").replace("<br />", " ").strip()
            items.append(Text(f"{name}/{file.name}", text, label))
    return Texts(tuple(items), ("negative", "positive"))


@layout_errors
def bace(path: str | Path, split: str | None = "Test") -> Texts:
    """Read ``bace.csv`` of MoleculeNet: SMILES with a binary class; ``split`` is a value of ``Model`` (None: all)."""
    file = _file(path, "bace.csv", "smiles,CID,Class,Model")
    rows = _table(file, ("CID", "Class", "Model"))
    column = "smiles" if "smiles" in rows[0] else "mol"
    if column not in rows[0]:
        raise wrong_layout(file, "a column smiles or mol", ", ".join(rows[0]))
    selected = [r for r in rows if split is None or r["Model"].casefold() == split.casefold()]
    if not selected:
        raise wrong_layout(file, f"rows whose Model is {split}", "none")
    items = tuple(Text(r["CID"], r[column], _label(r["Class"], 2, file)) for r in selected)
    return Texts(items, ("inactive", "active"))


@layout_errors
def tweeteval(path: str | Path, split: str = "test") -> Texts:
    """Read the folder of a task: ``{split}_text.txt``, ``{split}_labels.txt`` and ``mapping.txt`` (number, name)."""
    expected = f"{split}_text.txt, {split}_labels.txt and mapping.txt"
    folder = require_folder(path, expected)
    texts, labels, mapping = (
        require_file(folder / name, expected).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for name in (f"{split}_text.txt", f"{split}_labels.txt", "mapping.txt")
    )
    names = [line.split("\t")[1].strip() for line in mapping if line.strip()]
    numbers = [line.split("\t")[0].strip() for line in mapping if line.strip()]
    if numbers != [str(i) for i in range(len(names))]:
        raise wrong_layout(folder / "mapping.txt", "the numbers 0, 1 ... in order", ", ".join(numbers[:5]))
    if len(texts) != len(labels):
        raise wrong_layout(folder, "a label for each text", f"{len(texts)} texts and {len(labels)} labels")
    file, pairs = folder / f"{split}_labels.txt", enumerate(zip(texts, labels, strict=True))
    items = (Text(f"{split}-{i}", t.strip(), _label(label, len(names), file)) for i, (t, label) in pairs if t.strip())
    return Texts(tuple(items), tuple(names))


@layout_errors
def meld(path: str | Path, split: str = "test", task: str = "sentiment") -> Texts:
    """Read ``{split}_sent_emo.csv`` of MELD: single utterances without their dialogue."""
    names = {
        "sentiment": ("negative", "neutral", "positive"),
        "emotion": ("anger", "disgust", "fear", "joy", "neutral", "sadness", "surprise"),
    }
    if task not in names:
        raise InputError(f"the task of MELD must be sentiment or emotion, not {task!r}")
    column = task.capitalize()
    file = _file(path, f"{split}_sent_emo.csv", "Utterance,Emotion,Sentiment,Dialogue_ID,Utterance_ID")
    items = []
    for row in _table(file, ("Utterance", column, "Dialogue_ID", "Utterance_ID")):
        name = row[column].strip().casefold()
        if name not in names[task]:
            raise wrong_layout(file, f"{column} to be one of {', '.join(names[task])}", repr(name))
        if row["Utterance"].strip():
            text = row["Utterance"].replace("\x92", "'").strip()
            items.append(Text(f"{split}-{row['Dialogue_ID']}-{row['Utterance_ID']}", text, names[task].index(name)))
    return Texts(tuple(items), names[task])


@layout_errors
def eraser(path: str | Path, split: str = "val") -> Texts:
    """Read ERASER: ``{split}.jsonl`` (annotation_id, classification, evidences) and ``docs/``, tokens split by spaces.

    The rationale is the union of all evidence spans of a document. Annotations of several documents, and annotations
    whose id is not that of a document, are refused.
    """
    expected = f"{split}.jsonl and docs/ with a file for each document"
    folder = require_folder(path, expected)
    file, docs = require_file(folder / f"{split}.jsonl", expected), folder / "docs"
    if not docs.is_dir():
        raise wrong_layout(folder, expected)
    rows: list[tuple[str, str, Any]] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.append((row["annotation_id"], str(row["classification"]), row["evidences"]))
    except (ValueError, KeyError, TypeError) as error:
        fields = f"annotation_id, classification and evidences on line {len(rows) + 1}"
        raise wrong_layout(file, fields, f"an error: {error}") from error
    names = tuple(sorted({name for _, name, _ in rows}))
    items = []
    for identity, name, evidences in rows:
        words = tuple(require_file(docs / identity, expected).read_text(encoding="utf-8").split())
        flags = [False] * len(words)
        for span in (s for group in evidences for s in group):
            if span["docid"] != identity or not 0 <= span["start_token"] <= span["end_token"] <= len(words):
                raise wrong_layout(file, f"evidence of {identity} within its {len(words)} tokens", str(span))
            flags[span["start_token"] : span["end_token"]] = [True] * (span["end_token"] - span["start_token"])
        items.append(Text(identity, " ".join(words), names.index(name), words, tuple(flags)))
    return Texts(tuple(items), names)


# -- files -------------------------------------------------------------------------------------------------------
def _file(path: str | Path, name: str, expected: str) -> Path:
    place = Path(path)
    return require_file(place / name if place.is_dir() else place, f"{name} with the columns {expected}")


def _table(file: Path, columns: Iterable[str], **dialect: object) -> list[dict[str, str]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, **dialect)  # type: ignore[call-overload]
            rows, header = list(reader), reader.fieldnames or []
    except UnicodeDecodeError as error:
        raise wrong_layout(file, "UTF-8 text", f"an invalid byte at {error.start}") from error
    if not set(columns) <= set(header):
        raise wrong_layout(file, f"the columns {', '.join(columns)}", ", ".join(header) or "an empty file")
    if not rows:
        raise wrong_layout(file, "rows under the header", "none")
    for number, row in enumerate(rows, 1):
        if any(not isinstance(row[name], str) for name in columns):
            raise wrong_layout(file, f"as many cells in row {number} as in the header", "fewer")
    return rows


def _label(value: str | None, classes: int, file: Path) -> int:
    if value is None or not value.strip().isdecimal() or int(value) >= classes:
        raise wrong_layout(file, f"labels 0 to {classes - 1}", repr(value))
    return int(value)
