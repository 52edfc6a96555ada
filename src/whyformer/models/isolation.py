"""Detect changes of a model while it is explained, or after a pass of it was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from whyformer.errors import ModelChanged, ModelError
from whyformer.models.cache import measured

__all__ = ["Snapshot", "changes", "parameters", "refuse_changes", "settled"]

T = TypeVar("T")
WAIT = "Wait until training or loading has finished, or explain a copy: copy.deepcopy(model)"


@contextlib.contextmanager
def refuse_changes(model: nn.Module) -> Iterator[None]:
    """Context that raises at its end if the model was changed meanwhile.

    Raises:
        ModelChanged: a parameter was written to or replaced.
        ModelError: training mode was switched on.
    """
    before, trained = parameters(model), {m for m in model.modules() if m.training}
    changed_by_pass: ModelChanged | None = None
    try:
        yield
    except ModelChanged as error:  # from a recorded pass, without the parameter's name
        changed_by_pass = error
    changed = changes(model, before)
    if changed:
        raise ModelChanged(
            f"the model was changed while it was being explained (parameter '{min(changed)}'), so the scores would mix "
            f"two models. {WAIT}"
        ) from changed_by_pass
    if changed_by_pass is not None:
        raise changed_by_pass
    training = next((n or type(m).__name__ for n, m in model.named_modules() if m.training and m not in trained), None)
    if training is not None:
        raise ModelError(
            f"the model was switched to training mode while it was being explained (module '{training}'), so dropout "
            "may have changed the scores: call model.eval(), or explain a copy: copy.deepcopy(model)"
        )


def settled(model: nn.Module, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which is run again if the model was changed meanwhile for the first time: some
    models rescale their weights in their first pass (RWKV)."""
    try:
        return work()
    except ModelChanged:
        if measured(model).setdefault("settled", False):
            raise
        measured(model)["settled"] = True
        return work()


_State = tuple[Tensor, Tensor, int, int]


def parameters(model: nn.Module) -> dict[str, _State]:
    """Return {name: (parameter, its memory, its version counter, its address)} of a model.

    The memory is referenced so that it is not reused. Buffers are left out, because they may change: rotary tables grow
    in a forward pass.
    """
    floats = ((name, p) for name, p in model.named_parameters() if p.is_floating_point())
    return {name: (p, p.detach(), _version(p), _address(p)) for name, p in floats}


def changes(model: nn.Module, before: Mapping[str, _State]) -> list[str]:
    """Return the names of the parameters that changed since :func:`parameters` returned ``before``."""
    after = parameters(model)
    return [n for n in before.keys() | after.keys() if not _same(before.get(n), after.get(n))]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(parameter: Tensor) -> int:
    try:
        return parameter.data_ptr()
    except RuntimeError:  # a quantised or distributed tensor
        return 0


def _same(before: _State | None, after: _State | None) -> bool:
    if before is None or after is None:
        return False
    if before[0].is_meta or after[0].is_meta:  # offloaded weights, loaded for each forward pass
        return True
    return before[0] is after[0] and before[2:] == after[2:]


# -- tensors of a recorded pass --------------------------------------------------------------------------------------
_WHOLE = 1 << 14
"""Number of elements up to which tensors are compared whole."""


class Snapshot:
    """Detects writes to tensors, also those that advance no version counter, such as writes to ``parameter.data``.

    Elements are compared too: all of them up to 2¹⁴; in a larger tensor, some of every row and column, because reading
    all would take about as long as a pass. So a write through ``.data`` to single elements of a large matrix can be
    missed.

    Args:
        tensors: the tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        plain = lambda t: t.layout is torch.strided and not (t.is_nested or t.is_quantized)  # noqa: E731
        self._tensors = {name: tensor for name, tensor in tensors.items() if plain(tensor)}
        self._states = {name: _state(tensor) for name, tensor in self._tensors.items()}

    def changed(self) -> str | None:
        """Return the name of the first tensor that was written to, moved or converted; None if there is none."""
        return next((n for n, t in self._tensors.items() if not _equal(self._states[n], _state(t))), None)


def _state(tensor: Tensor) -> tuple[Tensor, tuple[object, ...]]:
    """Return (elements of a tensor as bytes, its version counter, device, type and shape)."""
    rows = tensor.detach().resolve_conj().resolve_neg().reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    if rows.numel() > _WHOLE:
        i = torch.arange(max(rows.shape), device=rows.device)
        rows = rows[i % len(rows), i % rows.shape[1]]
    facts = _version(tensor), tensor.device, tensor.dtype, tensor.shape
    return rows.clone().flatten().view(torch.uint8), facts  # as bytes, NaN equals NaN


def _equal(before: tuple[Tensor, tuple[object, ...]], after: tuple[Tensor, tuple[object, ...]]) -> bool:
    return before[1] == after[1] and torch.equal(before[0], after[0])
