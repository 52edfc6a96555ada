"""What the page takes, and where it may look: every check of what a browser sends, and the models that it may name."""

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

# "owner/name", or a bare name of the hub's first days; no dots in a row, so never a way up a folder
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class PageLimits:
    """The most that is taken from a browser.

    Attributes:
        pixels, size: of a picture, in pixels and bytes.
        characters: of a text.
        maps: methods times classes in one view.
        tokens: of an answer.
        uploads: bytes of all uploads together; seconds: that one request may work.
    """

    pixels: int = 24_000_000
    size: int = 16 * 2**20
    characters: int = 20_000
    maps: int = 24
    tokens: int = 64
    uploads: int = 2**30
    seconds: float = 900.0

    def text(self, raw: Any) -> str:
        """Return the text without surrounding whitespace, checked."""
        if message := missing("text", None, raw):
            raise InputError(message)
        if len(raw) > self.characters:
            raise InputError(f"the text has {len(raw):,} characters; at most {self.characters:,} are taken: shorten it")
        return raw.strip()

    def picture(self, path: Any, folder: Path) -> Image.Image:
        """The uploaded picture; a file that does not lie in the folder of uploads is never opened."""
        if message := missing("image", path, None):
            raise InputError(message)
        found = uploaded(path, folder)
        try:
            return open_picture(found, pixels=self.pixels, size=self.size)
        except WhyformerError as error:
            # the name, not the place on this machine
            raise InputError(str(error).replace(str(found), found.name)) from error


def missing(kind: str, picture: Any, text: Any) -> str:
    """Return why there is nothing to explain yet, or an empty string."""
    if kind == "image":
        return "there is no picture yet: drop one, or choose a file" if picture is None else ""
    return "" if isinstance(text, str) and text.strip() else "there is no text yet: type a sentence"


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


# -- models -----------------------------------------------------------------------------------------------------------
class Catalogue:
    """Names of models -> loaded models, the last few of which are kept.

    Args:
        folders: each a folder that ``save_pretrained`` wrote, or one that holds such folders. They are looked through
            now, once: what the browser sends later is compared with names, and never becomes a path.
        hub: whether ids of the hub are taken.
        keep: how many models stay loaded, beside the bundled ones.
    """

    def __init__(self, folders: Sequence[str | Path] = (), *, hub: bool = True, keep: int = 3) -> None:
        self.hub = hub
        self.folders: dict[str, Path] = {}
        for folder in folders:
            for found in _models_in(Path(folder)):
                name = f"folder:{re.sub(r'[^A-Za-z0-9_.-]+', '_', found.name)}"
                again = sum(n == name or n.startswith(name + "#") for n in self.folders)
                self.folders[f"{name}#{again + 1}" if again else name] = found
        self.keep = keep
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """What is offered by name."""
        return [*START_MODEL.values(), *self.folders]

    def place(self, name: str) -> str:
        """What ``whyformer.explain`` takes for a name that a browser sent: one that is offered, or an id of the hub."""
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

    def has(self, name: str) -> bool:
        """Whether that model is loaded already."""
        with suppress(WhyformerError):
            return self.place(name) in self._loaded
        return False

    def load(self, name: str) -> Loaded:
        """The model of that name, loaded if it is not there yet; shared by all sessions, which leave it as it is."""
        place = self.place(name)
        try:
            with self._lock:
                found = self._loaded.pop(place, None) or load(place)
                self._loaded[place] = found  # the youngest is the last
                for oldest in [n for n in self._loaded if n not in START_MODEL.values()][: -self.keep]:
                    self._loaded.pop(oldest)
                return found
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
    # a link out of the folder is not something the page was started with
    found = [child for child in inside if child.is_relative_to(real)]
    if not found:
        raise LoadError(f"neither {folder} nor a folder in it holds a model (config.json) that save_pretrained wrote")
    return found
