"""Files that are written atomically, and safetensors files with JSON facts in the header and a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whyformer.errors import FOREIGN_ERRORS, LoadError, WhyformerError
from whyformer.explanation.versions import versions

_FACTS, _CHECKSUM = "whyformer", "sha256"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success the file there replaces ``path``, on failure it is removed.

    Each call has a temporary path of its own, so two processes may write the same file: the later write wins.

    Raises:
        LoadError: the folder is missing, the disk is full, the file cannot be written, or ``path`` is a folder, a pipe
            or a device.
    """
    if path.exists() and not path.is_file():
        raise LoadError(f"cannot write {path}: it is a folder, a pipe or a device, not a file")
    partial = path.with_name(f".{path.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        folder = "" if path.parent.is_dir() else f": there is no folder {path.parent}"
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(f"cannot write {path}{folder or f': {reason}'}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def errors_as(kind: type[WhyformerError], subject: str) -> Iterator[None]:
    """Turn errors about malformed values into errors of one kind, which begin with ``subject``."""
    try:
        yield
    except kind:
        raise
    except (*FOREIGN_ERRORS, SafetensorError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise kind(f"{subject}: {reason}") from error


def write(path: str | Path, format_: Any, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write the file of :func:`to_bytes` atomically."""
    content = to_bytes(format_, facts, tensors)
    with written_whole(Path(path)) as partial:
        partial.write_bytes(content)
    return Path(path)


def to_bytes(format_: Any, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file of the tensors; its header has format, versions and facts (JSON) and a checksum."""
    from safetensors.torch import save

    stored = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    text = json.dumps({"format": format_, "versions": versions(), **facts})
    return bytes(save(stored, metadata={_FACTS: text, _CHECKSUM: _digest(text, stored)}))


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of facts and contiguous tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read(path: str | Path, format_: Any, expected: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the facts and the tensors of a file; one that another program wrote may lack the checksum.

    Args:
        path: the file.
        format_: the format of the file.
        expected: the expected content, for error messages.

    Raises:
        LoadError: the file is missing, of another kind or format, or damaged.
    """
    if not Path(path).is_file():
        raise LoadError(f"{path} is not a regular file" if Path(path).exists() else f"no such file: {path}")
    with errors_as(LoadError, f"{path} is not {expected}"):
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(header[_FACTS])
        if not isinstance(facts, dict):
            raise TypeError("its facts are not a JSON object")
    if _CHECKSUM in header and header[_CHECKSUM] != _digest(header[_FACTS], tensors):
        raise LoadError(f"{path} is damaged: its content does not match its checksum")
    if facts.pop("format", None) != format_:
        raise LoadError(f"{path} is not {expected} of this version of whyformer")
    facts.pop("versions", None)
    return facts, tensors
