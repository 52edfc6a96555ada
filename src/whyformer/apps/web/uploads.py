"""The folder of uploads: limited in size, cleaned while the page runs, and deleted when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from whyformer.apps.web.examples import FOLDER

_NAME = "whyformer-app-"


class Uploads:
    """The folder of uploads of one server. Its name contains the id of the process.

    Args:
        most: bytes of all uploads together.
        age: seconds after which an upload is deleted.
    """

    def __init__(self, most: int = 2**30, age: float = 3600.0) -> None:
        self.most, self.age = most, age
        sweep_the_dead()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_NAME}{os.getpid()}-"))

    def room(self) -> bool:
        """Delete old uploads (not the examples), and return True if another upload fits."""
        total, oldest = 0, time.time() - self.age
        for file in self.folder.rglob("*"):
            if file.is_relative_to(self.folder / FOLDER):
                continue
            with contextlib.suppress(OSError):
                facts = file.lstat()
                if file.is_dir():
                    continue
                if facts.st_mtime < oldest:
                    file.unlink()
                else:
                    total += facts.st_size
        return total < self.most

    def delete(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep_the_dead() -> None:
    """Delete the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        owner = folder.name.removeprefix(_NAME).partition("-")[0]
        with contextlib.suppress(OSError):
            is_own = not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
            if is_own and owner.isdecimal() and not _runs(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
