"""The global state of torch while a pass is recorded or repeated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["SWITCHES", "bare", "in_transform", "without_autocast"]


class Switches:
    """Context manager that sets process-wide settings of torch for recordings. If several recordings run at once, the
    first sets them and the last restores them."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        self.fast, self.stance = True, None

    def __enter__(self) -> None:
        with self.lock:
            if self.count == 0:
                self.fast = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)  # fused encoder layers hide the attention
                # otherwise torch marks a compiled model as never to be compiled again
                self.stance = torch.compiler.set_stance("force_eager")
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                torch.backends.mha.set_fastpath_enabled(self.fast)
                stance, self.stance = self.stance, None
                stance.__exit__(None, None, None)  # type: ignore[attr-defined]


SWITCHES = Switches()


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Context manager in which recorded calls are repeated: without autograd, inference mode and autocast."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast():
        yield


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Context manager that turns autocast off for all devices."""
    return torch._C._DisableAutocast()


def in_transform() -> bool:
    """Return True inside a function transform such as ``torch.vmap``."""
    return torch._C._functorch.peek_interpreter_stack() is not None
