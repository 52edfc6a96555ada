"""Snapshots of a model and of torch's global state, which an explanation must not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


def snapshot(model: nn.Module) -> dict[str, Any]:
    """A comparable snapshot of the model and of torch."""
    facts: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "modes": torch._C._len_torch_function_stack(),
        "random state": torch.get_rng_state().clone(),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }
    for name, parameter in model.named_parameters():
        facts[f"{name}: value"] = parameter.detach().clone()
        facts[f"{name}: id"] = id(parameter)
        facts[f"{name}: requires_grad"] = parameter.requires_grad
        facts[f"{name}: grad"] = parameter.grad
        facts[f"{name}: extras"] = sorted(vars(parameter))
    for name, buffer in model.named_buffers():
        facts[f"{name}: value"] = buffer.clone()
    for name, module in model.named_modules():
        facts[f"{name}: training"] = module.training
        facts[f"{name}: class"] = type(module)
        facts[f"{name}: own attributes"] = sorted(vars(module))
        facts[f"{name}: hooks"] = {hook: len(getattr(module, hook, {})) for hook in _HOOKS}
    return facts


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after.keys() == before.keys()
    changed = [name for name in before if not _same(before[name], after[name])]
    assert not changed, f"changed by the explanation: {changed}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)
