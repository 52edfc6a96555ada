"""Detect changes of a model while it is explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from whyformer.errors import ModelError
from whyformer.models.walking import named_modules

__all__ = ["changes", "parameters", "refuse_changes"]


@contextlib.contextmanager
def refuse_changes(model: nn.Module) -> Iterator[None]:
    """Context that raises at its end if the model was changed meanwhile.

    Raises:
        ModelError: a parameter was written to or replaced, or training mode was switched on.
    """
    named = named_modules(model)
    before, trained = parameters(model, named), {m for _, m in named if m.training}
    yield
    named = named_modules(model)
    changed = changes(model, before, named)
    if changed:
        raise ModelError(
            f"the model was changed while it was being explained (parameter '{min(changed)}'), so the scores would mix "
            "two models. Wait until training or loading has finished, or explain a copy: copy.deepcopy(model)"
        )
    training = next((n or type(m).__name__ for n, m in named if m.training and m not in trained), None)
    if training is not None:
        raise ModelError(
            f"the model was switched to training mode while it was being explained (module '{training}'), so dropout "
            "may have changed the scores: call model.eval(), or explain a copy: copy.deepcopy(model)"
        )


Named = list[tuple[str, nn.Module]]
_State = tuple[Tensor, Tensor | None, int, int]


def parameters(model: nn.Module, named: Named | None = None, *, hold: bool = True) -> dict[str, _State]:
    """Return {name: (parameter, its memory, its version counter, its address)} of a model.

    Buffers are left out, because they may change: rotary tables grow in a forward pass.

    Args:
        model: the model.
        named: its modules, if they are listed already.
        hold: hold references to the parameters' memory, so that it is not reused.
    """
    states: dict[str, _State] = {}
    for name, module in named or named_modules(model):
        for parameter, p in module._parameters.items():
            if p is not None and p.is_floating_point():
                memory, version = p.detach() if hold else None, 0 if p.is_inference() else p._version
                states[f"{name}.{parameter}" if name else parameter] = (p, memory, version, _address(p))
    return states


def changes(model: nn.Module, before: Mapping[str, _State], named: Named | None = None) -> list[str]:
    """Return the names of the parameters that changed since :func:`parameters` returned ``before``."""
    after = parameters(model, named, hold=False)
    return [n for n in before.keys() | after.keys() if not _same(before.get(n), after.get(n))]


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
