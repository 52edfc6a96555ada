"""Record the module that makes each call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import nn

from whyformer.tape.calls import every_tensor

if TYPE_CHECKING:
    from whyformer.tape.recording import Recorder

__all__ = ["ModuleNames"]


class ModuleNames:
    """Context manager that records which module makes each call of a pass, with global module hooks of torch. Modules
    that run in other threads are ignored."""

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self.paths = {id(m): name for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
        self.recorder, self.tape = recorder, recorder.tape
        self.thread, self.stack = threading.get_ident(), [(0, "")]
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        from torch.nn.modules import module

        self.hooks = [
            module.register_module_forward_pre_hook(self.enter),
            module.register_module_forward_hook(self.leave, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        self.close(0)
        for hook in self.hooks:
            hook.remove()

    def close(self, depth: int) -> None:
        """Assign the calls since the last module began or ended to the innermost running module, and leave the modules
        from ``depth`` on."""
        start, path = self.stack[-1]
        for call in self.tape.calls[start:]:
            self.tape.modules.setdefault(call.number, path)
        del self.stack[max(depth, 1) :]

    def enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self.thread and id(module) in self.paths:
            self.close(len(self.stack))
            self.stack.append((len(self.tape.calls), self.paths[id(module)]))

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != self.thread or id(module) not in self.paths:
            return
        path = self.paths[id(module)]
        self.close(len(self.stack) - 1)
        self.stack[-1] = (len(self.tape.calls), self.stack[-1][1])
        numbers = tuple(self.recorder.number(t) for t in every_tensor(output) if self.tape.knows(t))
        self.tape.outputs.setdefault(path, []).append(numbers)
