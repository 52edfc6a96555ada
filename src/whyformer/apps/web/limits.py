"""What the page takes, and where it may look: every check of what a browser sends is here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.errors import InputError, WhyformerError
from whyformer.inputs.pictures import open_picture

# "owner/name", or a bare name of the hub's first days; no dots in a row, so never a way up a folder
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Limits:
    """The most that is taken from a browser.

    Attributes:
        pixels, size: of a picture, in pixels and bytes.
        characters: of a text.
        maps: methods times classes in one view.
    """

    pixels: int = 24_000_000
    size: int = 16 * 2**20
    characters: int = 20_000
    maps: int = 24

    def text(self, raw: Any) -> str:
        """The sentence to explain."""
        if not isinstance(raw, str) or not raw.strip():
            raise InputError("there is no text yet: type a sentence")
        if len(raw) > self.characters:
            raise InputError(f"the text has {len(raw):,} characters; at most {self.characters:,} are taken: shorten it")
        return raw.strip()

    def picture(self, path: Any, folder: Path) -> Image.Image:
        """The uploaded picture; a file that does not lie in the folder of uploads is never opened."""
        if path is None:
            raise InputError("there is no picture yet: drop one, or choose a file")
        found = uploaded(path, folder)
        try:
            return open_picture(found, pixels=self.pixels, size=self.size)
        except WhyformerError as error:
            # the name, not the place on this machine
            raise InputError(str(error).replace(str(found), found.name)) from error


def uploaded(path: Any, folder: Path) -> Path:
    """The real path of an upload: a plain file inside ``folder``, links followed."""
    try:
        found = Path(path).resolve(strict=True)
        inside = found.is_file() and found.is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError, TypeError, ValueError):
        inside = False
    if not inside:
        raise InputError("that file was not uploaded to this page: drop the picture again")
    return found


def hub_id(name: str) -> str:
    """A model's id on the hub, checked to be one and not to name a folder of this machine."""
    odd = len(name) > 96 or ".." in name or "--" in name or name.endswith((".git", ".", "-"))
    if odd or not _HUB_ID.fullmatch(name):
        raise InputError(
            "that is no model id: it is written owner/name. Folders of this machine are offered by name, and only "
            "those that the page was started with (--model-dir)"
        )
    if Path(name).exists():
        raise InputError(
            f"'{name}' is also a folder where this page was started, so it is not taken for a model id; folders are "
            "given at the start (--model-dir)"
        )
    return name
