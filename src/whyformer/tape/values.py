"""The tape: calls and values of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call, Slot
from whyformer.tape.state import bare

__all__ = ["Tape"]


class Tape:
    """The calls and values of one forward pass.

    ``tape[n]`` is the tensor of value ``n``. Values that are cheap to recompute (views, and elementwise or rowwise
    functions of stored values) are not stored: they are recomputed when read, and freed by :meth:`release`.

    Attributes:
        calls: all calls, in the order of execution.
        shapes, dtypes: shape and dtype of each value.
        maker: maps the number of a value to the call that computed it.
        leaves: numbers of the values that no call computed: inputs, parameters, buffers, constants.
        inputs: numbers of the tensors passed to the model.
        modules: maps the number of a call to the path of the innermost module around it, if names were recorded.
        outputs: maps a module path to the numbers of the values that the module returned, one tuple for each run.
        written: numbers of the leaves that the pass overwrote and the recorder restored.
        changes_weights: whether the pass wrote into parameters, which are not restored.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.shapes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []
        self.maker: dict[int, Call] = {}
        self.leaves: set[int] = set()
        self.inputs: set[int] = set()
        self.modules: dict[int, str] = {}
        self.outputs: dict[str, list[tuple[int, ...]]] = {}
        self.written: set[int] = set()
        self.changes_weights = False
        self._stored: list[Tensor | None] = []
        self._recomputed: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._signature = 0

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, n: int) -> Tensor:
        value = self._stored[n]
        if value is None:
            value = self._recomputed.get(n)
        return self._compute(n) if value is None else value

    def _compute(self, n: int) -> Tensor:
        """Recompute a value that is not stored."""
        todo = [n]
        with bare():
            while todo:
                call = self.maker[todo[-1]]
                missing = [o for o in call.operands if self._stored[o] is None and o not in self._recomputed]
                if missing:
                    todo += missing
                    continue
                todo.pop()
                if call.results[0] not in self._recomputed:
                    results = call([self[o] for o in call.operands])
                    self._recomputed.update(zip(call.results, results, strict=True))
        return self._recomputed[n]

    def release(self, calls: Iterable[Call] | None = None) -> None:
        """Free recomputed values: the results of ``calls``, or all if None."""
        if calls is None:
            self._recomputed.clear()
        elif self._recomputed:
            for call in calls:
                for r in call.results:
                    self._recomputed.pop(r, None)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor of this pass.

        Raises:
            KeyError: the tensor is not a value of this pass.
        """
        return self._numbers[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the tensor is a value of this pass."""
        return id(tensor) in self._numbers

    def holds(self, n: int) -> bool:
        """Return True if value ``n`` is stored, so that reading it does not recompute it."""
        return self._stored[n] is not None

    def floating(self, n: int) -> bool:
        """Return True if value ``n`` has a floating-point or complex dtype, so that relevance can flow through it."""
        return self.dtypes[n].is_floating_point or self.dtypes[n].is_complex

    def device(self, n: int) -> torch.device:
        """Return the device of value ``n``."""
        tensor = self._stored[n]
        while tensor is None and n in self.maker and self.maker[n].operands:
            n = self.maker[n].operands[0]
            tensor = self._stored[n]
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def signature(self) -> int:
        """Hash of all calls with their operands, constants and shapes, and of the shapes of the leaves. Passes with
        equal signatures have the same program."""
        return self._signature

    # used by the recorder
    def store(self, n: int, tensor: Tensor) -> None:
        """Store a tensor as value ``n``, possibly of another shape."""
        self._stored[n], self.shapes[n], self.dtypes[n] = tensor, tensor.shape, tensor.dtype
        self._recomputed.pop(n, None)

    def _add(self, shape: torch.Size, dtype: torch.dtype, tensor: Tensor | None) -> int:
        self.shapes.append(shape)
        self.dtypes.append(dtype)
        self._stored.append(tensor)
        return len(self.shapes) - 1

    def _add_call(self, call: Call) -> None:
        self.calls.append(call)
        for r in call.results:
            self.maker[r] = call
        shape = self.shapes[call.results[0]] if call.results else ()
        kwargs = str(call.kwargs) if call.kwargs else ""
        row = (call.name, call.kind, call.operands, call.results, shape, _constants(call.args), kwargs)
        self._signature = hash((self._signature, row))


def _constants(args: tuple[Any, ...]) -> Any:
    return tuple(str(a) for a in args if type(a) is not Slot)  # strings, because hash(-1) == hash(-2)
