"""A model's modules, in the order of torch's own generators and several times as fast: in one list, without a
generator for each level of nesting."""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the model and all that is in it, each once, as ``model.named_modules()``."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        if len(module._modules):
            start = f"{name}." if name else ""
            ahead += [(start + n, child) for n, child in list(module._modules.items())[::-1] if child is not None]
    return found


def modules(model: nn.Module) -> list[nn.Module]:
    """The model and all that is in it, each once, as ``model.modules()``."""
    return [module for _, module in named_modules(model)]
