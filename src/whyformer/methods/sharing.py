"""Share one recorded forward pass between several methods on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from whyformer.inputs import Inputs
from whyformer.methods.passes import ForwardPass
from whyformer.models.isolation import changes, parameters

if TYPE_CHECKING:
    from whyformer.methods.registry import Method
    from whyformer.methods.sources import Sources

T = TypeVar("T")


@contextmanager
def sharing(methods: Sequence[Method]) -> Iterator[SharedPasses]:
    """Share passes between these methods, and drop them at the end; a single method shares nothing."""
    shared = SharedPasses(off=len(methods) < 2)
    try:
        yield shared
    finally:
        shared.release()


@dataclass
class SharedPasses:
    """The pass that several methods share.

    Attributes:
        off: True if nothing is shared, or no longer.
        views: number of times that a method got the pass.
        failed: errors of methods that used the pass.
    """

    off: bool = False
    views: int = 0
    failed: list[Exception] = field(default_factory=list)
    _passed: dict[bool, tuple[Inputs, Mapping[str, Any], ForwardPass]] = field(default_factory=dict)

    def around(self, make: Callable[..., T]) -> T:
        """Return the result of ``make(shared=...)``. A method that fails with the shared pass is run again without
        it, so that its error does not depend on other methods."""
        if self.off:
            return make(shared=None)
        before = self.views
        try:
            return make(shared=self)
        except Exception as error:
            if self.views == before:
                raise
            self.failed.append(error)
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                self.off = True
                self.release()
        return make(shared=None)

    def passed(self, task: Sources, make: Callable[[], ForwardPass], in_float32: bool = False) -> ForwardPass:
        """Return the pass that ``make`` records, once for all methods on the same inputs unless the model has changed;
        ``in_float32`` for a pass in another precision than the model's."""
        if self.off:
            return make()
        cached = self._passed.get(in_float32)
        if cached is None or cached[0] is not task.inputs or changes(task.model, cached[1]):
            self._passed.pop(in_float32, None)  # free its memory before the next pass
            self._passed[in_float32] = cached = task.inputs, parameters(task.model), make()
        self.views += 1
        return cached[2]

    def release(self) -> None:
        """Drop the pass."""
        self._passed.clear()
