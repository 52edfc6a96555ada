"""A tape: the calls and values of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call, Slot
from whyformer.tape.state import bare

__all__ = ["Tape"]


class Tape:
    """The calls and values of one forward pass; ``tape[n]`` is value ``n``.

    A value that is cheap to compute (a view, an elementwise or rowwise function of a value that is held) is not held.
    It is computed again when it is read, and dropped by :meth:`release`.

    Attributes:
        calls: all calls, in the order of execution.
        shapes, dtypes: of each value.
        maker: number of a value -> the call that made it.
        given: numbers of the values that no call made: inputs, weights, constants.
        inputs: numbers of the tensors that were passed to the model.
        modules: call number -> path of the innermost module that made it, if names were recorded.
        outputs: module path -> numbers of the values that the module returned, one entry for each run of the module.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.shapes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []
        self.maker: dict[int, Call] = {}
        self.given: set[int] = set()
        self.inputs: set[int] = set()
        self.modules: dict[int, str] = {}
        self.outputs: dict[str, list[tuple[int, ...]]] = {}
        self.written: set[int] = set()  # given values that the pass overwrote and the recorder restored
        self.versions: dict[int, int] = {}
        self._held: list[Tensor | None] = []
        self._again: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._signature = 0

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, n: int) -> Tensor:
        value = self._held[n]
        if value is None:
            value = self._again.get(n)
        return self._compute(n) if value is None else value

    def _compute(self, n: int) -> Tensor:
        """Repeat the calls that lead to a value that is not held."""
        todo = [n]
        with bare():
            while todo:
                call = self.maker[todo[-1]]
                missing = [o for o in call.operands if self._held[o] is None and o not in self._again]
                if missing:
                    todo += missing
                    continue
                todo.pop()
                if call.results[0] not in self._again:
                    made = call([self[o] for o in call.operands])
                    self._again.update(zip(call.results, made, strict=True))
        return self._again[n]

    def release(self, calls: Iterable[Call] | None = None) -> None:
        """Drop the values that were computed again: the results of some calls, or all of them."""
        if calls is None:
            self._again.clear()
        elif self._again:
            for call in calls:
                for r in call.results:
                    self._again.pop(r, None)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor that took part in the pass.

        Raises:
            KeyError: the tensor is not a value of this pass.
        """
        return self._numbers[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the tensor is a value of this pass."""
        return id(tensor) in self._numbers

    def holds(self, n: int) -> bool:
        """Return True if value ``n`` is in memory, and need not be computed again."""
        return self._held[n] is not None

    def floating(self, n: int) -> bool:
        """Return True if value ``n`` is real or complex, so that relevance can flow through it."""
        return self.dtypes[n].is_floating_point or self.dtypes[n].is_complex

    def device(self, n: int) -> torch.device:
        """Return the device of value ``n``."""
        held = self._held[n]
        while held is None and n in self.maker and self.maker[n].operands:
            n = self.maker[n].operands[0]
            held = self._held[n]
        return torch.device("cpu") if held is None else held.device

    @property
    def signature(self) -> int:
        """A hash of all calls, their operands, constants and shapes, and of the shapes of given values: passes of one
        signature have the same program."""
        return self._signature

    @property
    def held_bytes(self) -> int:
        """Memory of the values that are held and were made by this pass."""
        held = (v.untyped_storage() for n, v in enumerate(self._held) if v is not None and n not in self.given)
        return sum({memory.data_ptr(): memory.nbytes() for memory in held}.values())

    # the recorder's side
    def hold(self, n: int, tensor: Tensor) -> None:
        """Let a tensor be value ``n``."""
        self._held[n] = tensor
        self._again.pop(n, None)

    def _add(self, shape: torch.Size, dtype: torch.dtype, held: Tensor | None) -> int:
        self.shapes.append(shape)
        self.dtypes.append(dtype)
        self._held.append(held)
        return len(self.shapes) - 1

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        for r in call.results:
            self.maker[r] = call
        shape = self.shapes[call.results[0]] if call.results else ()
        named = str(call.kwargs) if call.kwargs else ""
        row = (call.name, call.kind, call.operands, call.results, shape, _constants(call.args), named)
        self._signature = hash((self._signature, row))


def _constants(args: tuple[Any, ...]) -> Any:
    return tuple(a if type(a) in (int, float, bool, type(None)) else str(a) for a in args if type(a) is not Slot)
