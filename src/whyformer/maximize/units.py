"""Units to maximize: a class, or a part of a module's output."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.models.output import Output
from whyformer.models.readout import has_row, read_logits
from whyformer.models.structure import class_count, class_names
from whyformer.tape.modules import module_hooks
from whyformer.targets import class_index

_UNITS = (
    'a unit is a class (index or name), "module.path:neuron", "module.path:token:neuron", "module.path:token:*" (mean '
    'of a token) or "module.path:*" (mean of a layer)'
)


class _StopForward(Exception):  # noqa: N818
    """Ends a forward pass early; it is always caught in this module."""


@dataclass(frozen=True)
class Unit:
    """A class or a part of a module's output.

    Attributes:
        name: name of the unit.
        path: path of the module; None for a class.
        token: index of the token; None for all tokens.
        neuron: index of the neuron or the class; None for all neurons.
    """

    name: str
    path: str | None
    token: int | None
    neuron: int | None

    def value(self, model: nn.Module, run: Callable[[], Any]) -> Tensor:
        """Return the activation in a forward pass, which stops at the module of the unit."""
        if self.path is None:
            output = run()
            if has_row(Output(model, output)):
                return read_logits(output)[0, self.neuron]
            raise InputError(f"the model's output is not a row of logits, so it has no classes: {_UNITS}")
        module = model.get_submodule(self.path)

        def stop(ran: nn.Module, args: Any, output: Any) -> None:
            if ran is module:
                raise _StopForward(output)

        try:
            with module_hooks(lambda ran: None, stop):
                run()
        except _StopForward as reached:
            return self.read(module, *reached.args)
        raise InputError(f"the module '{self.path}' does not run in a forward pass of this model")

    def read(self, module: nn.Module, output: Any) -> Tensor:
        """Return the activation from the output of the module."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        output = getattr(output, "last_hidden_state", output)
        if not isinstance(output, Tensor) or output.dim() < 2:
            kind = type(output).__name__
            raise InputError(f"the output of the module '{self.path}' must be a tensor with features, not {kind}")
        table = output[0] if output.shape[0] == 1 else output.squeeze(1)
        if table.dim() == 3 and isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | nn.AvgPool2d):
            table = table.movedim(0, -1)
        table = table.reshape(-1, table.shape[-1])
        for axis, index, count in (("token", self.token, table.shape[0]), ("neuron", self.neuron, table.shape[1])):
            if index is not None and not -count <= index < count:
                raise InputError(f"{axis} {index} is out of range: the output of '{self.path}' has {count} {axis}s")
        rows, columns = (slice(None) if index is None else index for index in (self.token, self.neuron))
        return table[rows, columns].mean()


def unit_of(model: nn.Module, unit: int | str) -> Unit:
    """Parse a unit.

    Raises:
        InputError: the unit is not valid for this model.
    """
    (labels, _), count = class_names(model), class_count(model)
    if isinstance(unit, bool) or not isinstance(unit, int | str):
        raise InputError(f"{_UNITS}; got {unit!r}")
    path, _, places = str(unit).partition(":")
    if places and path in dict(model.named_modules()):
        match = re.fullmatch(r"(?:(-?\d+):)?(-?\d+|\*)", places)
        if match is None:
            raise InputError(f"{_UNITS}; got {unit!r}")
        token, neuron = (None if place in (None, "*") else int(place) for place in match.groups())
        return Unit(str(unit), path, token, neuron)
    if places and path.replace(".", "").isidentifier():
        raise InputError(f"the model has no module '{path}' (see model.named_modules()); {_UNITS}")
    index = class_index(unit, labels, count)
    return Unit(f"class {(labels or {}).get(index, index)}", None, None, index)
