"""Safetensors files with JSON facts in the header and a checksum that detects damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import LoadError

_FACTS, _CHECKSUM = "whyformer", "sha256"


def metadata(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the header of a file: the facts as JSON, and the SHA-256 of the facts and all tensors."""
    text = json.dumps(facts)
    return {_FACTS: text, _CHECKSUM: _digest(text, tensors)}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"\n{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def opened(path: str | Path, expected: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the facts and the tensors of a file; files of older versions have no checksum.

    Args:
        path: the file.
        expected: the expected content, for error messages.

    Raises:
        LoadError: the file is missing, of another kind, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise LoadError(f"{path} is not a regular file" if Path(path).exists() else f"no such file: {path}")
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(header[_FACTS])
    except KeyError as error:
        raise LoadError(f"{path} is not {expected}: it lacks {error}") from error
    except (SafetensorError, ValueError, TypeError, OSError, RecursionError, RuntimeError) as error:
        raise LoadError(f"{path} is not {expected}: {error}") from error
    if not isinstance(facts, dict):
        raise LoadError(f"{path} is not {expected}: its facts are not a JSON object")
    if _CHECKSUM in header and header[_CHECKSUM] != _digest(header[_FACTS], tensors):
        raise LoadError(f"{path} is damaged: its content does not match its checksum")
    return facts, tensors
