"""The models that the page offers: bundled ones, the folders it was started with, and the hub's by id."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from whyformer.apps.web.limits import hub_id
from whyformer.errors import InputError, LoadError
from whyformer.models import Loaded, load
from whyformer.models.loading import BUNDLED


class Catalogue:
    """Names of models -> loaded models, the last few of which are kept.

    Args:
        folders: each a folder that ``save_pretrained`` wrote, or one that holds such folders. They are looked through
            now, once: what the browser sends later is compared with names, and never becomes a path.
        hub: whether ids of the hub are taken.
        keep: how many models stay loaded.
    """

    def __init__(self, folders: Sequence[str | Path] = (), *, hub: bool = True, keep: int = 3) -> None:
        self.hub = hub
        self.folders: dict[str, Path] = {}
        for folder in folders:
            for found in _models_in(Path(folder)):
                name = f"folder:{re.sub(r'[^A-Za-z0-9_.-]+', '_', found.name)}"
                again = sum(n == name or n.startswith(name + "#") for n in self.folders)
                self.folders[f"{name}#{again + 1}" if again else name] = found
        self._loaded = lru_cache(maxsize=keep)(load)
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """What is offered by name."""
        return [*(f"bundled:{name}" for name in BUNDLED), *self.folders]

    def place(self, name: str) -> str:
        """What ``whyformer.explain`` takes for a name that a browser sent: one that is offered, or an id of the hub."""
        name = name.strip() if isinstance(name, str) else ""
        if not name:
            raise InputError("choose a model")
        if name in self.folders:
            return str(self.folders[name])
        if name in self.names():
            return name
        if name.startswith(("bundled:", "folder:")):
            raise InputError(f"there is no model '{name[:80]}' here; there are {', '.join(self.names())}")
        if not self.hub:
            raise InputError(f"this page takes only the models it was started with: {', '.join(self.names())}")
        return hub_id(name)

    def load(self, name: str) -> Loaded:
        """The model of that name, loaded if it is not there yet; shared by all sessions, which leave it as it is."""
        place = self.place(name)
        try:
            with self._lock:
                return self._loaded(place)
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
