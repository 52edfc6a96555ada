"""Read a model's blocks and classes, and check whether it can be explained."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from whyformer.errors import ModelError
from whyformer.models.cache import refresh


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, in order; empty if there are none. Of several groups, such as the towers
    of CLIP or encoder and decoder of T5, one with attention comes first, then one of several blocks (a model may have
    depth 1), then the largest.

    Blocks are the children of a container if they are all of one class (or of one kind, by the last word of the class
    name) and have children themselves. A child whose attention is all inside repeated blocks is a stage (Swin); its
    blocks are used, and stages whose names differ by a number form one group. Of other nested containers, only the
    outermost counts.
    """
    groups: dict[tuple[str, type], list[nn.Module]] = {}
    containers: list[str] = []
    for name, module in model.named_modules():
        blocks = [] if any(name.startswith(f"{outer}.") for outer in containers) else _repeated(module)
        attending = [b for b in blocks if _attentions(b)]
        if not blocks or (attending and all(map(_is_stage, attending))):
            continue
        containers.append(name)
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault((pattern, type(blocks[0])), []).extend(blocks)

    def rank(blocks: list[nn.Module]) -> tuple[bool, bool, int]:
        size = sum(p.numel() for b in blocks for p in b.parameters())
        return any(map(_attentions, blocks)), len(blocks) > 1, size

    return max(reversed(groups.values()), key=rank, default=[])


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return the children of a container of blocks; an empty list for other modules."""
    # a ModuleList may contain None
    children = [c for c in module if c is not None] if isinstance(module, nn.ModuleList | nn.Sequential) else []
    # hybrid models have classes of one kind: the last word of JambaAttentionDecoderLayer and JambaMambaDecoderLayer
    kinds, classes = {re.sub(".*(?=[A-Z])", "", type(c).__name__) for c in children}, {type(c) for c in children}
    checked = children if len(classes) > 1 else children[:1]
    are_blocks = len(kinds) == 1 and all(any(True for _ in child.children()) for child in checked)
    return children if are_blocks else []


def _attentions(module: nn.Module) -> list[str]:
    """Return the names of submodules whose name or class contains attention or attn."""
    texts = ((n, f"{n.rpartition('.')[2]} {type(m).__name__}".lower()) for n, m in module.named_modules() if n)
    return [name for name, text in texts if "attention" in text or "attn" in text]


def _is_stage(module: nn.Module) -> bool:
    """Return whether every attention of a module is in a repeated block inside it."""
    blocks = [f"{n}.{i}.".lstrip(".") for n, m in module.named_modules() for i in range(len(_repeated(m)))]
    return all(any(name.startswith(block) for block in blocks) for name in _attentions(module))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile`` or a data-parallel wrapper, whose operations can be recorded."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner: Any = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def refuse_unfit(model: Any) -> None:
    """Raise if an explanation would be wrong or impossible; forget what was measured for other modules of the model.

    Raises:
        ModelError: not a module, TorchScript, training mode with random or batch-dependent layers, or parameters on the
            meta device.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module or a name, not {type(model).__name__}")
    modules = [*model.named_modules()]
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError("a torch.jit (TorchScript) module hides its operations: pass the original nn.Module")
        cause = _changed_by_training(module) if module.training else None
        if cause is not None:
            place = f"module '{name or type(module).__name__}'"
            raise ModelError(f"the model is in training mode, so {cause} ({place}): call model.eval()")
    refresh(model, [module for _, module in modules])
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    # hooks load offloaded weights for each pass
    if empty is not None and not any(hasattr(m, "_hf_hook") or m.__dict__["_forward_pre_hooks"] for _, m in modules):
        raise ModelError(
            f"the parameter '{empty}' is on the meta device and has no values: create the model outside of "
            "torch.device('meta'), and load its weights"
        )


_DRAWN = ("drop", "jitter", "noise", "mask_time_prob", "mask_feature_prob")


def _changed_by_training(module: nn.Module) -> str | None:
    """Return why a module computes another function in training mode: dropout with p > 0, or batch statistics."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch normalisation would mix the samples and change the model"
    values = {**vars(module), **getattr(getattr(module, "config", None), "__dict__", {})}
    if isinstance(module, nn.modules.dropout._DropoutNd):
        values["dropout"] = module.p
    if type(module).__name__ == "StochasticDepth":
        values["drop"] = values.get("p")
    rates = [v for k, v in values.items() if any(word in k.lower() for word in _DRAWN)]
    if any(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in rates):
        return "dropout or other noise would make scores random"
    return None


def first_bad_parameter(model: nn.Module) -> str | None:
    """Return the name of the first parameter that contains NaN or infinity; None if all are finite."""
    return next((n for n, p in model.named_parameters() if not p.is_meta and not bool(torch.isfinite(p).all())), None)


def class_names(model: nn.Module) -> tuple[dict[int, str] | None, bool]:
    """Return (names of the classes if the config has real ones, whether the model is multi-label)."""
    config = getattr(model, "config", None)
    raw = getattr(config, "id2label", None)
    labels = _numbered(raw) if isinstance(raw, dict) and raw else None
    if labels and all(v == f"LABEL_{k}" for k, v in labels.items()):
        labels = None
    return labels, getattr(config, "problem_type", None) == "multi_label_classification"


def _numbered(raw: dict[Any, Any]) -> dict[int, str] | None:
    """Return {index: name} from a mapping in either direction; None if neither side is a number."""
    for pairs in (raw.items(), ((v, k) for k, v in raw.items())):
        with suppress(ValueError, TypeError):
            return {int(number): str(name) for number, name in pairs}
    return None


def class_count(model: nn.Module) -> int | None:
    """Return the number of classes in a classifier's config or timm's ``num_classes``, if the model's last weights have
    as many outputs; else None."""
    config = getattr(model, "config", None)
    if config is None:
        count = getattr(model, "num_classes", None)
    else:  # every config has num_labels, even that of a language model
        count = getattr(config, "num_labels", None) if "Classification" in type(model).__name__ else None
    weights = [p for p in model.parameters() if p.dim() > 1]
    is_count = isinstance(count, int) and count > 0 and bool(weights) and count in weights[-1].shape
    return count if is_count else None
