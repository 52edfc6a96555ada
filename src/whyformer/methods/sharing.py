"""Share one recorded forward pass between several methods on the same inputs, or several targets of one method."""

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
    from whyformer.methods.task_inputs import TaskInputs

T = TypeVar("T")


class NotShared(Exception):  # noqa: N818 - a signal, not shown to users
    """Signals that a pass cannot be shared by targets, because it depends on the target or runs on changed inputs."""


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
    """The pass that several methods or targets share.

    Attributes:
        off: True if no passes are shared, or not any more.
        inputs_of_targets: the inputs, if several targets share their pass, each with its own backward walk; None if
            methods share it.
        uses: number of times that the pass was used.
        failed: errors of methods that used the pass.
    """

    off: bool = False
    inputs_of_targets: Inputs | None = None
    uses: int = 0
    failed: list[Exception] = field(default_factory=list)
    _passes: dict[bool, tuple[Inputs, Mapping[str, Any], ForwardPass]] = field(default_factory=dict)

    def run(self, make: Callable[..., T]) -> T:
        """Return the result of ``make(shared=...)``. A method that fails with the shared pass is run again without
        it, so that its error does not depend on other methods."""
        if self.off:
            return make(shared=None)
        before = self.uses
        try:
            return make(shared=self)
        except Exception as error:
            if self.uses == before:
                raise
            self.failed.append(error)
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                self.off = True
                self.release()
        return make(shared=None)

    def forward_pass(self, task: TaskInputs, make: Callable[[], ForwardPass], in_float32: bool = False) -> ForwardPass:
        """Return the pass that ``make`` records. It is recorded again only for other inputs or a changed model, and
        once more with ``in_float32``, for a model in half precision.

        Raises:
            NotShared: targets share the pass, and the inputs are others.
        """
        if self.inputs_of_targets is not None and task.inputs is not self.inputs_of_targets:
            raise NotShared
        if self.off:
            return make()
        cached = self._passes.get(in_float32)
        if cached is None or cached[0] is not task.inputs or changes(task.model, cached[1]):
            self._passes.pop(in_float32, None)  # free its memory before the next pass
            self._passes[in_float32] = cached = task.inputs, parameters(task.model), make()
        self.uses += 1
        return cached[2]

    def known_pass(self, inputs: Inputs) -> ForwardPass | None:
        """Return a recorded pass of these inputs; None if there is none."""
        return next((recorded for other, _, recorded in self._passes.values() if other is inputs), None)

    def release(self) -> None:
        """Drop the pass."""
        self._passes.clear()
