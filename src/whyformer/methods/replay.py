"""One recorded forward pass for several targets: each asks for another row of its output, with a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.probes import BlockFlows, Probe
from whyformer.engine.run import Recording, record
from whyformer.inputs import Inputs
from whyformer.methods.passes import ForwardPass
from whyformer.models.output import Output
from whyformer.rules.core import Composite


class Apart(Exception):  # noqa: N818 - a signal, never told
    """This method's passes depend on the target, or are not of the inputs themselves: each target needs its own."""


_BACKWARD = (BlockFlows,)  # probes that look at backward passes alone, and at each row by itself


@dataclass
class Replay:
    """What a task (:class:`whyformer.methods.task.Task`) records is recorded once, and given again for each target.

    The n-th recording for one target is the n-th for every other: the same model, inputs, method and settings. Where
    it is seen to be another one, or one that a graph cannot serve twice, ``Apart`` is raised.

    Attributes:
        read: the row of the output that the present target is about.
        made: (recording, what it was asked with, its observers) in order.
        whole: the passes on a tape, which serve every target; True for that in float32.
    """

    model: nn.Module
    inputs: Inputs
    read: Callable[[Output], Tensor]
    made: list[tuple[Recording, Any, list[_Observer]]] = field(default_factory=list)
    whole: dict[bool, ForwardPass] = field(default_factory=dict)
    _next: int = 0

    def turn(self, read: Callable[[Output], Tensor]) -> None:
        """From now on the target is about another row."""
        self.read, self._next = read, 0

    def record(
        self, inputs: Inputs, composite: Composite, probes: tuple[Probe, ...], options: Mapping[str, Any]
    ) -> Recording:
        """As :func:`whyformer.engine.run.record`, or the recording made of the same before."""
        fixed = "values" not in options and "root_value" not in options and not options.get("cut")
        gradients = composite.carrier == "multiplier" and all(isinstance(p, _BACKWARD) for p in probes)
        if inputs is not self.inputs or not fixed or (probes and not gradients):
            raise Apart
        watching: Any = probes
        asked = (composite.name, [type(p) for p in probes], sorted(options))
        number, self._next = self._next, self._next + 1
        if number == len(self.made):
            observers = [_Observer(p.seen) for p in watching]
            watched: Any = [replace(p, seen=o) for p, o in zip(watching, observers, strict=True)]
            recording = record(self.model, inputs.feed, composite, *watched, **{**options, "read": self._row})
            recording.kept = True
            self.made.append((recording, asked, observers))
        recording, known, observers = self.made[number]
        if asked != known:
            raise Apart
        for observer, probe in zip(observers, watching, strict=True):
            observer.seen = probe.seen
        with torch.enable_grad():
            recording.logits = self.read(recording.output)
        return recording

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
        return bool(self.made or self.whole)

    def _row(self, output: Output) -> Tensor:
        return self.read(output)

    def release(self) -> None:
        """Free the graphs."""
        for recording, _, _ in self.made:
            recording.release()
        self.made.clear()
        self.whole.clear()


@dataclass
class _Observer:
    """Passes what is seen on the way back to the present target's own observer."""

    seen: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        self.seen(*args)
