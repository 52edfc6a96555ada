"""Total and free memory, and detection of out-of-memory errors."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def total_memory(place: torch.device) -> int:
    """Return the bytes of the machine, or of the GPU, that a process may use."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30
    for limit, _ in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((_CGROUP / limit).read_text()))
    return total


def free_memory(place: torch.device) -> int:
    """Return the bytes that are free now."""
    if place.type == "cuda":
        cached = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # reserved by torch for reuse
        return int(torch.cuda.mem_get_info(place)[0]) + cached
    free = total_memory(place)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = min(free, 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(free, 0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is an out-of-memory error of the GPU or the CPU."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
