"""How much memory there is, and what a model's blocks keep of each token for a backward pass."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whyformer.models.walking import named_modules

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def total_memory(place: torch.device) -> int:
    """Bytes of the machine, or of the GPU, that a process may use."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30
    for limit, _ in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            whole = min(whole, int((_CGROUP / limit).read_text()))
    return whole


def free_memory(place: torch.device) -> int:
    """Bytes of it that are free now."""
    if place.type == "cuda":
        kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # torch's own, to be used again
        return int(torch.cuda.mem_get_info(place)[0]) + kept
    free = total_memory(place)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = min(free, 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(free, 0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, on the GPU or the CPU; also where another error was raised from that."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def widths(blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """(width of what enters the blocks, numbers that all of them keep of a token for a backward pass to the inputs).

    Half as many again as their linear layers give out: these outputs, and what norms, activations and products read.
    Of a mixture the experts are left out, of which few run.
    """
    width, kept = 0, 0
    for block in blocks:
        for name, module in named_modules(block):
            sizes = None if "expert" in name else _sizes(module)
            if sizes is not None:
                width, kept = width or sizes[0], kept + sizes[1]
    return width, kept * 3 // 2


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(numbers that a linear layer takes, that it gives) of each token."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, 3 * module.embed_dim
    if type(module).__name__ == "Conv1D" and isinstance(weight := getattr(module, "weight", None), torch.Tensor):
        return int(weight.shape[0]), int(weight.shape[1])  # of transformers: [in, out]
    if "in_features" not in vars(module) and not hasattr(type(module), "in_features"):
        return None  # torch takes long to say that there is none
    sizes: Any = getattr(module, "in_features", None), getattr(module, "out_features", None)  # quantised ones too
    return sizes if all(isinstance(size, int) for size in sizes) else None
