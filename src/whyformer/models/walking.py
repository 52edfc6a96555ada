"""List a model's modules and weights in the order of torch's generators, several times as fast, because no nested
generators are used."""

from __future__ import annotations

from torch import Tensor, nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the model and all submodules, each once, as ``model.named_modules()`` does."""
    listed: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module in seen:
            continue
        seen.add(module)
        listed.append((name, module))
        if len(module._modules):
            start = f"{name}." if name else ""
            ahead += [(start + n, child) for n, child in list(module._modules.items())[::-1] if child is not None]
    return listed


def modules(model: nn.Module) -> list[nn.Module]:
    """Return the model and all submodules, each once, as ``model.modules()`` does."""
    return [module for _, module in named_modules(model)]


def weights(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of the model and all submodules."""
    tables = (module.__dict__[kind] for module in modules(model) for kind in ("_parameters", "_buffers"))
    return [tensor for table in tables for tensor in table.values() if tensor is not None]
