"""One recorded forward pass for several targets: each asks for another row of its output, with a walk back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from whyformer.inputs import Inputs
from whyformer.methods.passes import ForwardPass

__all__ = ["Apart", "Replay"]


class Apart(Exception):  # noqa: N818 - a signal, never told
    """This method's passes depend on the target, or are not of the inputs themselves: each target needs its own."""


@dataclass
class Replay:
    """The passes that serve all targets of the same model and inputs.

    Attributes:
        inputs: what was recorded.
        whole: the passes; True for that in float32.
    """

    inputs: Inputs
    whole: dict[bool, ForwardPass] = field(default_factory=dict)

    def passed(self, inputs: Inputs, make: Callable[[], ForwardPass], apart: bool = False) -> ForwardPass:
        """What ``make`` records, once for all targets; ``apart`` for a pass in float32.

        Raises:
            Apart: these are other inputs.
        """
        if inputs is not self.inputs:
            raise Apart
        if apart not in self.whole:
            self.whole[apart] = make()
        return self.whole[apart]

    @property
    def used(self) -> bool:
        """Whether something was recorded."""
        return bool(self.whole)

    def release(self) -> None:
        """Drop the passes."""
        self.whole.clear()
