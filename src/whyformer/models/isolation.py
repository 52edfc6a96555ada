"""Whether a model stays as it is while it is explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from whyformer.errors import ModelError
from whyformer.models.walking import named_modules

__all__ = ["alone", "changes", "parameters"]


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Refuse an explanation if the model is changed meanwhile.

    Raises:
        ModelError: at the end, a parameter was written to or replaced, or training mode was switched on.
    """
    named = named_modules(model)
    before, trained = parameters(model, named), {m for _, m in named if m.training}
    yield
    named = named_modules(model)
    changed = changes(model, before, named)
    if changed:
        raise ModelError(
            f"the model was changed while it was being explained (parameter '{min(changed)}'), so the scores would mix "
            "two models. Wait until training or loading is over, or explain a copy: copy.deepcopy(model)"
        )
    training = next((n or type(m).__name__ for n, m in named if m.training and m not in trained), None)
    if training is not None:
        raise ModelError(
            f"the model was switched to training mode while it was being explained (module '{training}'), so dropout "
            "may have changed the scores: call model.eval(), or explain a copy: copy.deepcopy(model)"
        )


Named = list[tuple[str, nn.Module]]
_State = tuple[Tensor, Tensor | None, int, int]


def parameters(model: nn.Module, named: Named | None = None, *, held: bool = True) -> dict[str, _State]:
    """Name -> (parameter, its memory, which stays taken meanwhile if ``held``, count of changes, address); ``named``
    are its modules, if they are listed already.

    Buffers may change: rotary tables grow in a forward pass.
    """
    found: dict[str, _State] = {}
    for name, module in named or named_modules(model):
        for own, p in module._parameters.items():
            if p is not None and p.is_floating_point():
                memory, version = p.detach() if held else None, 0 if p.is_inference() else p._version
                found[f"{name}.{own}" if name else own] = (p, memory, version, _address(p))
    return found


def changes(model: nn.Module, before: Mapping[str, _State], named: Named | None = None) -> list[str]:
    """The parameters that are no longer as :func:`parameters` found them."""
    after = parameters(model, named, held=False)
    return [n for n in before.keys() | after.keys() if not _same(before.get(n), after.get(n))]


def _address(parameter: Tensor) -> int:
    try:
        return parameter.data_ptr()
    except RuntimeError:  # a quantised or distributed kind of tensor
        return 0


def _same(before: _State | None, after: _State | None) -> bool:
    if before is None or after is None:
        return False
    if before[0].is_meta or after[0].is_meta:  # weights that are loaded for each forward pass
        return True
    return before[0] is after[0] and before[2:] == after[2:]
