"""The folder of uploads: limited in size, and cleaned while the page runs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from whyformer.apps.web.examples import FOLDER


def has_room(folder: Path, most: int, age: float = 3600.0) -> bool:
    """Delete old uploads (not the examples), and return True if another upload fits.

    Args:
        folder: the folder of uploads.
        most: bytes of all uploads together.
        age: seconds after which an upload is deleted.
    """
    total, oldest = 0, time.time() - age
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            facts = file.lstat()
            if file.is_dir() or file.is_relative_to(folder / FOLDER):
                continue
            if facts.st_mtime < oldest:
                file.unlink()
            else:
                total += facts.st_size
    return total < most
