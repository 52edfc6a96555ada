"""ImageNet pictures: the sample folder's naming, class folders, and the validation folder with the devkit's truth."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from whyformer.datasets.samples import Picture, needed, pictures_in, require_file, require_folder, wrong_layout
from whyformer.inputs.pictures import open_picture

_SAMPLE = re.compile(r"^(\d{4})_(n\d{8})\.(?:jpe?g|png)$", re.IGNORECASE)
_WNID = re.compile(r"^n\d{8}$")
_VALIDATION = re.compile(r"^ILSVRC2012_val_(\d{8})\.jpe?g$", re.IGNORECASE)
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


def imagenet_samples(path: str | Path) -> list[Picture]:
    """Pictures named ``0282_n02123159.jpg``: class index (0..999), synset."""
    expected = "pictures named like 0282_n02123159.jpg (class index, synset)"
    folder = require_folder(path, expected)
    files = pictures_in(folder)
    wrong = [f.name for f in files if not _SAMPLE.match(f.name)]
    if not files or wrong:
        raise wrong_layout(folder, expected, next(iter(wrong), None))
    return [Picture(f.name, partial(open_picture, f), int(f.name[:4])) for f in files]


def class_folders(path: str | Path, classes: dict[str, int] | None = None) -> list[Picture]:
    """One folder of pictures a class.

    Args:
        classes: folder name -> class index. By default folders named by numbers are these classes, and folders named
            by the 1000 synsets count in sorted order, as everywhere in ImageNet; fewer synset folders need ``classes``.
    """
    expected = "one folder of pictures a class"
    folder = require_folder(path, expected)
    folders = sorted(p for p in folder.iterdir() if p.is_dir())
    if not folders:
        raise wrong_layout(folder, expected)
    names = [p.name for p in folders]
    if classes is None:
        if all(n.isdigit() for n in names):
            classes = {n: int(n) for n in names}
        elif all(_WNID.match(n) for n in names) and len(names) == 1000:
            classes = {n: i for i, n in enumerate(names)}
        else:
            named = "folders named by class numbers, or all 1000 synsets (or classes={name: index})"
            found = f"{len(names)} folders, which do not say which of the model's classes they are"
            raise wrong_layout(folder, named, found)
    unknown = [n for n in names if n not in classes]
    if unknown:
        raise wrong_layout(folder, "only folders of known classes", ", ".join(unknown[:5]))
    files = [(p, f) for p in folders for f in pictures_in(p)]
    if not files:
        raise wrong_layout(folder, expected, "folders without pictures")
    return [Picture(f"{p.name}/{f.name}", partial(open_picture, f), classes[p.name]) for p, f in files]


def imagenet_validation(path: str | Path, devkit: str | Path | None = None) -> list[Picture]:
    """The 50 000 validation pictures (or a part), with the devkit's ground truth.

    The devkit numbers classes in its own order (ILSVRC2012_ID); its ``meta.mat`` gives each one's synset, and classes
    are the sorted synsets.

    Args:
        devkit: folder with ``data/ILSVRC2012_validation_ground_truth.txt`` and ``data/meta.mat``; by default looked
            for in and beside ``path``.
    """
    expected = "pictures named ILSVRC2012_val_00000001.JPEG, and the devkit with data/" + TRUTH + " and data/" + META
    folder = require_folder(path, expected)
    files = pictures_in(folder)
    wrong = [f.name for f in files if not _VALIDATION.match(f.name)]
    if not files or wrong:
        raise wrong_layout(folder, expected, next(iter(wrong), None))
    base = _find_devkit(folder, devkit, expected)
    lines = (base / TRUTH).read_text().split()
    index = _class_of_id(require_file(base / META, expected))
    try:
        labels = [index[int(lines[int(f.stem.rpartition("_")[2]) - 1])] for f in files]
    except (IndexError, ValueError, KeyError) as error:
        found = f"{len(lines)} entries, and {error} fails"
        raise wrong_layout(base / TRUTH, "one class number 1..1000 a line", found) from error
    return [Picture(f.name, partial(open_picture, f), label) for f, label in zip(files, labels, strict=True)]


def _find_devkit(folder: Path, devkit: str | Path | None, expected: str) -> Path:
    beside = [folder, folder.parent, *sorted(folder.parent.glob("ILSVRC2012_devkit*"))]
    roots = beside if devkit is None else [Path(devkit)]
    for place in (p for root in roots for p in (root / "data", root)):
        if (place / TRUTH).is_file():
            return place
    looked = ", ".join(str(r) for r in roots)
    found = f"no {TRUTH} in {looked}, and pictures without labels cannot be scored"
    raise wrong_layout(folder, expected, found)


def _class_of_id(meta: Path) -> dict[int, int]:
    """ILSVRC2012_ID -> class index in sorted synsets."""
    rows = needed("scipy.io", "reading the devkit's meta.mat").loadmat(str(meta), squeeze_me=True)["synsets"]
    synsets = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if int(row["ILSVRC2012_ID"]) <= 1000}
    order = {wnid: i for i, wnid in enumerate(sorted(synsets.values()))}
    return {number: order[wnid] for number, wnid in synsets.items()}
