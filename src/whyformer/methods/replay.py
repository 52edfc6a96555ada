"""Share one recorded forward pass between several targets, each of which starts its own backward walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from whyformer.inputs import Inputs
from whyformer.methods.passes import ForwardPass

__all__ = ["NotShared", "Replay"]


class NotShared(Exception):  # noqa: N818 - a signal, not shown to users
    """Signals that a pass cannot be shared, because it depends on the target or runs on changed inputs."""


@dataclass
class Replay:
    """The passes that all targets of the same model and inputs share.

    Attributes:
        inputs: the recorded inputs.
        passes: the passes; key True for the one in float32.
    """

    inputs: Inputs
    passes: dict[bool, ForwardPass] = field(default_factory=dict)

    def passed(self, inputs: Inputs, make: Callable[[], ForwardPass], in_float32: bool = False) -> ForwardPass:
        """Return the pass that ``make`` records, once for all targets; ``in_float32`` for a pass in float32.

        Raises:
            NotShared: the inputs differ from those of this replay.
        """
        if inputs is not self.inputs:
            raise NotShared
        if in_float32 not in self.passes:
            self.passes[in_float32] = make()
        return self.passes[in_float32]

    @property
    def used(self) -> bool:
        """Whether a pass was recorded."""
        return bool(self.passes)

    def release(self) -> None:
        """Drop the passes."""
        self.passes.clear()
