"""Units: what is maximised, a class or a place in a module's output, and its value in one forward pass."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.models.output import Output
from whyformer.models.readout import has_row, read_logits
from whyformer.models.structure import class_count, class_names
from whyformer.targets import class_index

_UNITS = (
    'a unit is a class (number or name), "module.path:neuron", "module.path:token:neuron", "module.path:token:*" (mean '
    'of a token) or "module.path:*" (mean of a layer)'
)


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass early; never leaves this file."""


@dataclass(frozen=True)
class Unit:
    """A class (``path`` None, ``neuron`` its index) or a place in a module's output; None is all of an axis."""

    name: str
    path: str | None
    token: int | None
    neuron: int | None

    def value(self, model: nn.Module, run: Callable[[], Any]) -> Tensor:
        """S of one pass, which stops where the unit is."""
        if self.path is None:
            output = run()
            if has_row(Output(model, output)):
                return read_logits(output)[0, self.neuron]
            raise InputError(f"the model's output is not one row of logits, so it has no classes: {_UNITS}")
        module, thread = model.get_submodule(self.path), threading.get_ident()

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                raise _Reached(output)

        handle = module.register_forward_hook(stop)
        try:
            run()
        except _Reached as reached:
            return self.read(module, *reached.args)
        finally:
            handle.remove()
        raise InputError(f"the module '{self.path}' does not run in a forward pass of this model")

    def read(self, module: nn.Module, output: Any) -> Tensor:
        """S out of the module's output."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        output = getattr(output, "last_hidden_state", output)
        if not isinstance(output, Tensor) or output.dim() < 2:
            raise InputError(f"the module '{self.path}' puts out {type(output).__name__}, no tensor with features")
        table = output[0] if output.shape[0] == 1 else output.squeeze(1)
        if table.dim() == 3 and isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | nn.AvgPool2d):
            table = table.movedim(0, -1)
        table = table.reshape(-1, table.shape[-1])
        for what, index, count in (("token", self.token, table.shape[0]), ("neuron", self.neuron, table.shape[1])):
            if index is not None and not -count <= index < count:
                raise InputError(f"{what} {index} is outside the output of '{self.path}', which has {count} {what}s")
        rows, columns = (slice(None) if place is None else place for place in (self.token, self.neuron))
        return table[rows, columns].mean()


def unit_of(model: nn.Module, unit: int | str) -> Unit:
    (labels, _), count = class_names(model), class_count(model)
    if isinstance(unit, bool) or not isinstance(unit, int | str):
        raise InputError(f"{_UNITS}; got {unit!r}")
    path, _, places = str(unit).partition(":")
    if places and path in dict(model.named_modules()):
        found = re.fullmatch(r"(?:(-?\d+):)?(-?\d+|\*)", places)
        if found is None:
            raise InputError(f"{_UNITS}; got {unit!r}")
        token, neuron = (None if place in (None, "*") else int(place) for place in found.groups())
        return Unit(str(unit), path, token, neuron)
    if places and path.replace(".", "").isidentifier():
        raise InputError(f"the model has no module '{path}' (see model.named_modules()); {_UNITS}")
    index = class_index(unit, labels, count)
    return Unit(f"class {(labels or {}).get(index, index)}", None, None, index)
