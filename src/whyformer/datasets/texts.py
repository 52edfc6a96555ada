"""Texts in their original files: SST-2, IMDB, BACE, TweetEval, MELD, ERASER."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

from whyformer.datasets.samples import LayoutError, Text, Texts, require_file, require_folder, wrong_layout


def sst2(path: str | Path, split: str = "dev") -> Texts:
    """``dev.tsv``/``train.tsv`` of GLUE: a header ``sentence<TAB>label``, no quoting."""
    file = _file(path, f"{split}.tsv", "sentence<TAB>label")
    rows = _table(file, ("sentence", "label"), delimiter="\t", quoting=csv.QUOTE_NONE)
    items = tuple(
        Text(f"{file.stem}-{i}", r["sentence"].strip(), _label(r["label"], 2, file)) for i, r in enumerate(rows)
    )
    return Texts(items, ("negative", "positive"))


def imdb(path: str | Path) -> Texts:
    """Folders ``neg/`` and ``pos/`` (or ``test/neg`` ...), one review a file named ``number_rating.txt``."""
    expected = "folders neg/ and pos/ with one review a .txt file"
    folder = require_folder(path, expected)
    folder = folder / "test" if (folder / "test" / "neg").is_dir() else folder
    made = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted((folder / name).glob("*.txt"), key=lambda f: f.name) if (folder / name).is_dir() else []
        if not files:
            raise wrong_layout(folder, expected, f"no {name}/*.txt")
        for file in files:
            text = file.read_text(encoding="utf-8").replace("<br />", " ").strip()
            made.append(Text(f"{name}/{file.name}", text, label))
    return Texts(tuple(made), ("negative", "positive"))


def bace(path: str | Path, split: str | None = "Test") -> Texts:
    """``bace.csv`` of MoleculeNet: SMILES with a binary class; ``split`` is the column ``Model`` (None: all)."""
    file = _file(path, "bace.csv", "smiles,CID,Class,Model")
    columns = ("smiles" if "smiles" in _header(file) else "mol", "CID", "Class", "Model")
    rows = [r for r in _table(file, columns) if split is None or r["Model"].casefold() == split.casefold()]
    if not rows:
        raise LayoutError(f"{file}: expected rows whose Model is {split}; found none")
    items = tuple(Text(r["CID"], r[columns[0]], _label(r["Class"], 2, file)) for r in rows)
    return Texts(items, ("inactive", "active"))


def tweeteval(path: str | Path, split: str = "test") -> Texts:
    """A task's folder: ``{split}_text.txt``, ``{split}_labels.txt`` (one a line) and ``mapping.txt`` (number, name)."""
    expected = f"{split}_text.txt, {split}_labels.txt and mapping.txt"
    folder = require_folder(path, expected)
    read = {
        n: require_file(folder / n, expected).read_text(encoding="utf-8").split("\n")
        for n in (f"{split}_text.txt", f"{split}_labels.txt", "mapping.txt")
    }
    names = [line.split("\t")[1].strip() for line in read["mapping.txt"] if line.strip()]
    labels = [line.strip() for line in read[f"{split}_labels.txt"] if line.strip()]
    texts = read[f"{split}_text.txt"]
    texts = texts[:-1] if texts and not texts[-1].strip() else texts
    if len(texts) != len(labels):
        raise LayoutError(f"{folder}: expected one label a text; found {len(texts)} texts and {len(labels)} labels")
    file = folder / f"{split}_labels.txt"
    items = tuple(
        Text(f"{split}-{i}", text.strip(), _label(label, len(names), file))
        for i, (text, label) in enumerate(zip(texts, labels, strict=True))
        if text.strip()
    )
    return Texts(items, tuple(names))


def meld(path: str | Path, split: str = "test", task: str = "sentiment") -> Texts:
    """``{split}_sent_emo.csv`` of MELD; the utterance alone, without its dialogue."""
    names = {
        "sentiment": ("negative", "neutral", "positive"),
        "emotion": ("anger", "disgust", "fear", "joy", "neutral", "sadness", "surprise"),
    }
    if task not in names:
        raise LayoutError(f"MELD's tasks are sentiment and emotion, not {task!r}")
    column = task.capitalize()
    file = _file(path, f"{split}_sent_emo.csv", "Utterance,Emotion,Sentiment,Dialogue_ID,Utterance_ID")
    made = []
    for row in _table(file, ("Utterance", column, "Dialogue_ID", "Utterance_ID")):
        name = row[column].strip().casefold()
        if name not in names[task]:
            raise LayoutError(f"{file}: expected {column} to be one of {', '.join(names[task])}; found {name!r}")
        if row["Utterance"].strip():
            text = row["Utterance"].replace("\x92", "'").strip()
            made.append(Text(f"{split}-{row['Dialogue_ID']}-{row['Utterance_ID']}", text, names[task].index(name)))
    return Texts(tuple(made), names[task])


def eraser(path: str | Path, split: str = "val") -> Texts:
    """ERASER: ``{split}.jsonl`` (annotation_id, classification, evidences) and ``docs/``, tokens separated by spaces.

    The rationale is the union of all evidence spans of the document. Annotations over several documents, and those
    without a document of their own, are refused.
    """
    expected = f"{split}.jsonl and docs/ with one document a file"
    folder = require_folder(path, expected)
    file, docs = require_file(folder / f"{split}.jsonl", expected), folder / "docs"
    if not docs.is_dir():
        raise wrong_layout(folder, expected)
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append((row["annotation_id"], row["classification"], row["evidences"]))
        except (ValueError, KeyError, TypeError) as error:
            raise LayoutError(
                f"{file}: expected annotation_id, classification and evidences on line {number}; {error} fails"
            ) from error
    names = tuple(sorted({str(r[1]) for r in rows}))
    made = []
    for identity, name, evidences in rows:
        words = tuple(require_file(docs / identity, expected).read_text(encoding="utf-8").split())
        flags = [False] * len(words)
        for span in (s for group in evidences for s in group):
            if span["docid"] != identity or not 0 <= span["start_token"] <= span["end_token"] <= len(words):
                raise LayoutError(
                    f"{file}: expected evidence of {identity} within its {len(words)} tokens; found {span}"
                )
            for token in range(span["start_token"], span["end_token"]):
                flags[token] = True
        made.append(Text(identity, " ".join(words), names.index(str(name)), words, tuple(flags)))
    return Texts(tuple(made), names)


# -- files -------------------------------------------------------------------------------------------------------
def _file(path: str | Path, name: str, expected: str) -> Path:
    place = Path(path)
    return require_file(place / name if place.is_dir() else place, f"{name} with the columns {expected}")


def _header(file: Path) -> list[str]:
    with file.open(encoding="utf-8", newline="") as lines:
        return next(csv.reader(lines), [])


def _table(file: Path, columns: Iterable[str], **dialect: object) -> list[dict[str, str]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, **dialect)  # type: ignore[call-overload]
            rows, header = list(reader), reader.fieldnames or []
    except UnicodeDecodeError as error:
        raise LayoutError(f"{file}: expected UTF-8 text; found a byte that is none at {error.start}") from error
    missing = [c for c in columns if c not in header]
    if missing:
        raise LayoutError(
            f"{file}: expected the columns {', '.join(columns)}; found {', '.join(header) or 'an empty file'}"
        )
    if not rows:
        raise LayoutError(f"{file}: expected rows under the header; found none")
    return rows


def _label(value: str | None, classes: int, file: Path) -> int:
    if value is None or not value.strip().isdigit() or int(value) >= classes:
        raise LayoutError(f"{file}: expected labels 0 to {classes - 1}; found {value!r}")
    return int(value)
