"""Limits of the page, checks of what a browser sends, and the models that it may name."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.apps.web.examples import START_MODEL, STORED_MODEL
from whyformer.errors import InputError, LoadError, WhyformerError
from whyformer.inputs.pictures import open_picture
from whyformer.models import Loaded, load

# "owner/name", or a name without owner; hub_id refuses "..", so it never leads out of a folder
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class PageLimits:
    """Limits of the web page.

    Attributes:
        pixels: pixels of a picture.
        size: bytes of a picture.
        characters: characters of a text.
        maps: methods times classes in one view.
        tokens: tokens of an answer.
        seconds: time for one request.
    """

    pixels: int = 24_000_000
    size: int = 16 * 2**20
    characters: int = 20_000
    maps: int = 24
    tokens: int = 64
    seconds: float = 900.0

    def text(self, raw: Any) -> str:
        """Return the text without line breaks at its end, checked."""
        if message := missing("text", None, raw):
            raise InputError(message)
        if len(raw) > self.characters:
            raise InputError(
                f"the text has {len(raw):,} characters; at most {self.characters:,} are allowed: shorten it"
            )
        return str(raw).rstrip("\r\n")

    def picture(self, path: Any, folder: Path) -> Image.Image:
        """Open an uploaded picture. Files outside the folder of uploads are never opened."""
        if message := missing("image", path, None):
            raise InputError(message)
        file = uploaded(path, folder)
        try:
            return open_picture(file, pixels=self.pixels, size=self.size)
        except WhyformerError as error:
            # the message names the file without its folder on this machine
            raise InputError(str(error).replace(str(file), file.name)) from error


def missing(kind: str, picture: Any, text: Any) -> str:
    """Return why there is nothing to explain yet, or an empty string."""
    if kind == "image":
        return "there is no picture yet: drop one, or choose a file" if picture is None else ""
    return "" if isinstance(text, str) and text.strip() else "there is no text yet: type a sentence"


def uploaded(path: Any, folder: Path) -> Path:
    """Return the resolved path of an upload, which must be a plain file inside ``folder``."""
    try:
        file = Path(path).resolve(strict=True)
        inside = file.is_file() and file.is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError, TypeError, ValueError):
        inside = False
    if not inside:
        raise InputError("that file was not uploaded to this page: drop the picture again")
    return file


def hub_id(name: str) -> str:
    """Return a model's id on the hub, after checking that it is one and names no folder of this machine."""
    invalid = len(name) > 96 or ".." in name or "--" in name or name.endswith((".git", ".", "-"))
    if invalid or not _HUB_ID.fullmatch(name):
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


# -- models -----------------------------------------------------------------------------------------------------------
class Catalogue:
    """The models of the page by name, with a cache of loaded models.

    Args:
        folders: folders that ``save_pretrained`` wrote, or folders of such folders. They are listed once, now: names
            from the browser are compared with this list, and never become a path.
        hub: accept ids of the hub.
        keep: number of models that stay loaded, besides the bundled models.
    """

    def __init__(self, folders: Sequence[str | Path] = (), *, hub: bool = True, keep: int = 3) -> None:
        self.hub = hub
        self.folders: dict[str, Path] = {}
        for folder in folders:
            for path in _models_in(Path(folder)):
                name = f"folder:{re.sub(r'[^A-Za-z0-9_.-]+', '_', path.name)}"
                same = sum(n == name or n.startswith(name + "#") for n in self.folders)
                self.folders[f"{name}#{same + 1}" if same else name] = path
        self.keep = keep
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names in the list of models."""
        return [*START_MODEL.values(), *self.folders]

    def place(self, name: str) -> str:
        """Return the folder or id that :func:`whyformer.explain` takes for a name from the browser."""
        name = name.strip() if isinstance(name, str) else ""
        if not name:
            hub = f": an id of the hub (owner/name), such as {STORED_MODEL}" if self.hub else ""
            raise InputError(
                f"choose a model{hub}. Folders are offered by name, those that the page was started with "
                "(--model-dir); the bundled models of pictures read handwritten digits only"
            )
        if name in self.folders:
            return str(self.folders[name])
        if name in self.names():
            return name
        if name.startswith(("bundled:", "folder:")):
            raise InputError(f"there is no model '{name[:80]}' here; there are {', '.join(self.names())}")
        if not self.hub:
            raise InputError(f"this page takes only the models it was started with: {', '.join(self.names())}")
        return hub_id(name)

    def get(self, name: str) -> Loaded | None:
        """Return the model of that name if it is loaded."""
        with suppress(WhyformerError):
            return self._loaded.get(self.place(name))
        return None

    def load(self, name: str) -> Loaded:
        """Return the model of that name, loaded if needed. All sessions share it and leave it unchanged."""
        place = self.place(name)
        try:
            with self._lock:
                loaded = self._loaded.pop(place, None) or load(place)
                self._loaded[place] = loaded  # the last is the newest
                for oldest in [n for n in self._loaded if n not in START_MODEL.values()][: -self.keep]:
                    self._loaded.pop(oldest)
                return loaded
        except LoadError as error:
            raise LoadError(str(error).replace(place, name.strip())) from error


def _models_in(folder: Path) -> list[Path]:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise LoadError(f"no such folder: {folder}")
    real = folder.resolve()
    if (real / "config.json").is_file():
        return [real]
    inside = [child.resolve() for child in sorted(real.iterdir()) if (child / "config.json").is_file()]
    # links out of the folder are skipped
    models = [child for child in inside if child.is_relative_to(real)]
    if not models:
        raise LoadError(f"neither {folder} nor a folder in it holds a model (config.json) that save_pretrained wrote")
    return models
