"""What a name means: a file of a picture, a sound or text, or on the command line standard input or a sentence too."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from whyformer.errors import InputError, LoadError
from whyformer.inputs.pictures import SUFFIXES, check_file, is_picture_name, open_picture
from whyformer.inputs.sounds import Sound, is_sound_name, open_sound

_MOST_TEXT = 16 * 2**20
_OTHER = f"a file that is no picture ({', '.join(SUFFIXES[:4])} ...), sound (.wav) or text (.txt)"


@dataclass(frozen=True)
class Argument:
    """What the user wants explained.

    Attributes:
        kind: "image", "sound" or "text".
        content: the picture, the sound or the text.
        name: what names of files may begin with.
        title: what headings say.
    """

    kind: str
    content: Image.Image | Sound | str
    name: str
    title: str

    @cached_property
    def digest(self) -> str:
        """What stands for the content in keys."""
        return checksum(self.content)


def checksum(content: Image.Image | Sound | str) -> str:
    """SHA-256 of a picture, a sound or a text."""
    if isinstance(content, str):
        known = content.encode("utf-8", "replace")
    elif isinstance(content, Sound):
        known = f"{content.rate}".encode() + content.wave.numpy().tobytes()
    else:
        known = f"{content.mode}{content.size}".encode() + content.tobytes()
    return hashlib.sha256(known).hexdigest()


def read_argument(source: str) -> Argument:
    """Read a picture file, a ``.txt`` file, standard input (``-``), or take the argument as the text itself.

    A name that ends like a picture or a text file is never taken for a sentence, so that a slip of the pen is an error.

    Raises:
        LoadError: missing or unreadable file.
        InputError: empty text, a folder, or a file of another kind.
    """
    if source == "-":
        # bytes, because the encoding that Python guesses for standard input is that of the terminal
        raw = sys.stdin.buffer.read(_MOST_TEXT + 1)
        if len(raw) > _MOST_TEXT:
            raise InputError(f"standard input is larger than {_MOST_TEXT // 2**20} MB")
        return sentence(_decoded(raw, "standard input"))
    if is_picture_name(source) or (source.lower().endswith((".txt", ".wav")) and "\n" not in source):
        path = Path(source)
        content = read_file(path)
        kind = "text" if isinstance(content, str) else "sound" if isinstance(content, Sound) else "image"
        return Argument(kind, content, path.stem, path.name)
    if source.strip() and os.path.exists(source):  # False too for what is longer than any name, or has a NUL in it
        raise InputError(
            f"{source} is {'a folder' if os.path.isdir(source) else _OTHER}; to explain these very words, pass them on "
            "standard input, with - as the argument"
        )
    return sentence(source)


def read_file(path: Path) -> Image.Image | Sound | str:
    """The picture, the sound or the text in a file.

    Raises:
        LoadError: missing or unreadable. InputError: an empty text, or a file of another kind.
    """
    if is_picture_name(str(path)):
        return open_picture(path)
    if is_sound_name(str(path)):
        return open_sound(path)
    if path.suffix.lower() == ".txt":
        check_file(path, _MOST_TEXT)
        try:
            return _decoded(_bytes(path), str(path))
        except OSError as error:
            raise LoadError(f"cannot read {path}: {error.strerror}") from error
    raise InputError(f"{path} is {_OTHER}")


def _bytes(path: Path) -> bytes:
    """What is in a file, and never more than was allowed, should it grow or be exchanged meanwhile."""
    with path.open("rb") as file:
        raw = file.read(_MOST_TEXT + 1)
    if len(raw) > _MOST_TEXT:
        raise InputError(f"{path} is larger than {_MOST_TEXT // 2**20} MB")
    return raw


def sentence(text: str) -> Argument:
    """A text that is meant as it stands."""
    text = _filled(text)
    return Argument("text", text, " ".join(text.split()[:5]), " ".join(text.split())[:100])


def _decoded(raw: bytes, name: str) -> str:
    try:
        return _filled(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text") from error


def _filled(text: str) -> str:
    if not text.strip():
        raise InputError("the text is empty")
    return text.strip()
