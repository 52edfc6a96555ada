"""Observe the modules that run during a pass, and record which of them makes each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as module_of_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from whyformer.tape.calls import every_tensor

if TYPE_CHECKING:
    from whyformer.tape.recording import Recorder

__all__ = ["ModuleNames", "module_hooks"]

# torch keeps entries of removed hooks here, and compiled modules would warn about them in every call
_WITH_KWARGS: dict[int, bool] = getattr(module_of_hooks, "_global_forward_hooks_with_kwargs", {})


@contextmanager
def module_hooks(
    enter: Callable[[nn.Module], None],
    leave: Callable[..., Any],
    *,
    always: bool = False,
    with_kwargs: bool = False,
) -> Iterator[None]:
    """Context manager with global hooks of torch for the modules that run in this thread.

    Args:
        enter: called with each module before its forward.
        leave: called with (module, args, output) after its forward; returns None or another output.
        always: also call ``leave`` after a forward that fails.
        with_kwargs: call ``leave`` with (module, args, kwargs, output).
    """
    thread = threading.get_ident()

    def before(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            enter(module)

    def after(module: nn.Module, *call: Any) -> Any:
        return leave(module, *call) if threading.get_ident() == thread else None

    hooks = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=with_kwargs, always_call=always),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
            _WITH_KWARGS.pop(hook.id, None)


class ModuleNames:
    """Records which module makes each call of a pass."""

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self.paths = {id(m): name for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
        self.recorder, self.tape, self.stack = recorder, recorder.tape, [(0, "")]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that observes the modules while a pass runs."""
        with module_hooks(self.enter, self.leave, always=True):
            try:
                yield
            finally:
                self.close(0)

    def close(self, depth: int) -> None:
        """Assign the calls since a module last began or ended to the innermost running module, and truncate the stack
        of running modules to ``depth``."""
        start, path = self.stack[-1]
        for call in self.tape.calls[start:]:
            self.tape.modules.setdefault(call.number, path)
        del self.stack[max(depth, 1) :]

    def enter(self, module: nn.Module) -> None:
        if id(module) in self.paths:
            self.close(len(self.stack))
            self.stack.append((len(self.tape.calls), self.paths[id(module)]))

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if id(module) not in self.paths:
            return
        path = self.paths[id(module)]
        self.close(len(self.stack) - 1)
        self.stack[-1] = (len(self.tape.calls), self.stack[-1][1])
        numbers = tuple(self.recorder.number(t) for t in every_tensor(output) if self.tape.knows(t))
        self.tape.outputs.setdefault(path, []).append(numbers)
