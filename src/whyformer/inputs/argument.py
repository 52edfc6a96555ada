"""Read a picture, sound or text file by name; on the command line also standard input or a sentence."""

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
_OTHER = f"not a picture ({', '.join(SUFFIXES[:4])} ...), sound (.wav) or text (.txt) file"


@dataclass(frozen=True)
class Argument:
    """The input that a user named on the command line or the web page.

    Attributes:
        content: the picture, the sound or the text.
        name: prefix for names of output files.
        title: title for headings.
    """

    content: Image.Image | Sound | str
    name: str
    title: str

    @property
    def kind(self) -> str:
        """The kind of content: "image", "sound" or "text"."""
        return "text" if isinstance(self.content, str) else "sound" if isinstance(self.content, Sound) else "image"

    @cached_property
    def digest(self) -> str:
        """Checksum of the content, for cache keys."""
        return checksum(self.content)


def checksum(content: Image.Image | Sound | str) -> str:
    """Return the SHA-256 of a picture, a sound or a text."""
    if isinstance(content, str):
        data = content.encode("utf-8", "replace")
    elif isinstance(content, Sound):
        data = f"{content.rate}".encode() + content.wave.numpy().tobytes()
    else:
        data = f"{content.mode}{content.size}".encode() + content.tobytes()
    return hashlib.sha256(data).hexdigest()


def read_argument(source: str) -> Argument:
    """Read a picture, ``.wav`` or ``.txt`` file or standard input (``-``), or use the argument as the text itself.

    An argument with the suffix of a picture, sound or text file is never used as text, so that a misspelt file name is
    an error.

    Raises:
        LoadError: the file is missing or cannot be read.
        InputError: empty text, a folder, or a file of another kind.
    """
    if source == "-":
        # bytes, because Python would decode standard input with the encoding of the terminal
        raw = sys.stdin.buffer.read(_MOST_TEXT + 1)
        if len(raw) > _MOST_TEXT:
            raise InputError(f"standard input is larger than {_MOST_TEXT // 2**20} MB")
        return sentence(decoded(raw, "standard input"))
    if is_picture_name(source) or (source.lower().endswith((".txt", ".wav")) and "\n" not in source):
        path = Path(source)
        return Argument(read_file(path), path.stem, path.name)
    if source.strip() and os.path.exists(source):  # also False for text that is too long for a name or contains a NUL
        raise InputError(
            f"{source} is {'a folder' if os.path.isdir(source) else _OTHER}; to explain the text {source!r} itself, "
            "pass it on standard input, with - as the argument"
        )
    return sentence(source)


def read_file(path: Path) -> Image.Image | Sound | str:
    """Return the picture, the sound or the text in a file.

    Raises:
        LoadError: the file is missing or cannot be read.
        InputError: an empty text, or a file of another kind.
    """
    if is_picture_name(str(path)):
        return open_picture(path)
    if is_sound_name(str(path)):
        return open_sound(path)
    if path.suffix.lower() == ".txt":
        check_file(path, _MOST_TEXT)
        try:
            return decoded(path.read_bytes(), str(path))
        except OSError as error:
            raise LoadError(f"cannot read {path}: {error.strerror}") from error
    raise InputError(f"{path} is {_OTHER}")


def sentence(text: str) -> Argument:
    """Return the argument for a text, which is explained with leading and trailing blanks.

    Raises:
        InputError: the text is empty.
    """
    if not text.strip():
        raise InputError("the text is empty")
    return Argument(text, " ".join(text.split()[:5]), " ".join(text.split())[:100])


def decoded(raw: bytes, name: str) -> str:
    """Return the text of a file, without line breaks at its end.

    Raises:
        InputError: the text is empty, or not UTF-8.
    """
    try:
        return str(sentence(raw.decode("utf-8-sig").rstrip("\r\n")).content)
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text") from error
