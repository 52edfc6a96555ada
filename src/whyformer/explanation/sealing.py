"""Files of tensors with facts beside them (safetensors), sealed: what was damaged is told from what is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import LoadError

_FACTS, _SEAL = "whyformer", "sha256"


def metadata(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What stands in the header: the facts as JSON, and the SHA-256 of them and of all tensors."""
    text = json.dumps(facts)
    return {_FACTS: text, _SEAL: _digest(text, tensors)}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    made = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        made.update(f"\n{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        made.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def opened(path: str | Path, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the tensors of a file; ``what`` it should be stands in the errors.

    Raises:
        LoadError: it is missing, no such file, or not as it was written. A file of an older version has no seal.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise LoadError(f"{path} is no regular file" if Path(path).exists() else f"no such file: {path}")
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(header[_FACTS])
    except KeyError as error:
        raise LoadError(f"{path} is not {what}: it lacks {error}") from error
    except (SafetensorError, ValueError, TypeError, OSError, RecursionError, RuntimeError) as error:
        raise LoadError(f"{path} is not {what}: {error}") from error
    if not isinstance(facts, dict):
        raise LoadError(f"{path} is not {what}: its facts are of another kind")
    if _SEAL in header and header[_SEAL] != _digest(header[_FACTS], tensors):
        raise LoadError(f"{path} is damaged: it is not what was written there (its checksum is another)")
    return facts, tensors
