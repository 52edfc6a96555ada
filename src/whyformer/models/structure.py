"""What is read off a model: its blocks, its classes, and whether it may be explained."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from whyformer.errors import ModelError
from whyformer.models import walking

# model -> (its modules when they were looked through, the groups found); nothing here keeps a module alive
_GROUPS: WeakKeyDictionary[nn.Module, tuple[list[ref[nn.Module]], dict[str, list[ref[nn.Module]]]]] = (
    WeakKeyDictionary()
)


def block_groups(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Name -> blocks of every group of repeated blocks: towers of CLIP, encoder and decoder of T5. The main one first:
    groups that hold attention, then those of several blocks (a model may have depth 1), then the largest.

    Blocks are the children of a container, if all are of one class, or of one kind by the last word of its name, and
    have children of their own. A child whose attention lies all in repeated blocks inside it is a stage (Swin), and its
    blocks are meant; those of stages that differ by a number in their name are one group. Else of nested containers
    only the outer one counts. Looked for again only when the model has got other modules.
    """
    modules, known = walking.modules(model), _GROUPS.get(model)
    if known is not None and [r() for r in known[0]] == modules:
        return {name: [b for r in blocks if (b := r()) is not None] for name, blocks in known[1].items()}
    groups = _groups(model)
    _GROUPS[model] = [ref(m) for m in modules], {n: [ref(b) for b in blocks] for n, blocks in groups.items()}
    return groups


def _groups(model: nn.Module) -> dict[str, list[nn.Module]]:
    found: dict[tuple[str, type], list[nn.Module]] = {}
    taken: list[str] = []
    for name, module in model.named_modules():
        blocks = [] if any(name.startswith(f"{outer}.") for outer in taken) else _repeated(module)
        attending = [b for b in blocks if _attentions(b)]
        if not blocks or (attending and all(map(_is_stage, attending))):
            continue
        taken.append(name)
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        found.setdefault((pattern, type(blocks[0])), []).extend(blocks)

    def rank(key: tuple[str, type]) -> tuple[bool, bool, int]:
        blocks = found[key]
        size = sum(p.numel() for b in blocks for p in b.parameters())
        return any(map(_attentions, blocks)), len(blocks) > 1, size

    ranked = sorted(found, key=rank)  # of two classes under one name the better one stays
    return dict(reversed({name: found[name, kind] for name, kind in ranked}.items()))


def _repeated(module: nn.Module) -> list[nn.Module]:
    """The children of a container of blocks; none of anything else."""
    # a list may hold None in place of a module
    children = [c for c in module if c is not None] if isinstance(module, nn.ModuleList | nn.Sequential) else []
    # a hybrid's classes are of one kind: the last word of JambaAttentionDecoderLayer and JambaMambaDecoderLayer
    kinds, classes = {re.sub(".*(?=[A-Z])", "", type(c).__name__) for c in children}, {type(c) for c in children}
    asked = children if len(classes) > 1 else children[:1]
    alike = len(kinds) == 1 and all(any(True for _ in child.children()) for child in asked)
    return children if alike else []


def _attentions(module: nn.Module) -> list[str]:
    """Names of the modules inside that are called attention, or whose class is."""
    words = ((n, f"{n.rpartition('.')[2]} {type(m).__name__}".lower()) for n, m in module.named_modules() if n)
    return [name for name, word in words if "attention" in word or "attn" in word]


def _is_stage(module: nn.Module) -> bool:
    """Whether every attention inside is a part of a repeated block inside."""
    blocks = [f"{n}.{i}.".lstrip(".") for n, m in module.named_modules() for i in range(len(_repeated(m)))]
    return all(any(name.startswith(block) for block in blocks) for name in _attentions(module))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of blocks, in order; empty if the model has no such container."""
    return next(iter(block_groups(model).values()), [])


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that computes, of one that ``torch.compile`` or a data-parallel wrapper made of it: the same weights
    and the same function, with operations that can be seen."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner: Any = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def refuse_unfit(model: Any) -> None:
    """Raise where an explanation would be wrong or impossible, before any work."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module or a name, not {type(model).__name__}")
    modules = walking.named_modules(model)
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError("a torch.jit (TorchScript) module hides its operations: pass the original nn.Module")
        if type(module).__name__ == "OptimizedModule":
            raise ModelError(
                f"a part of the model is torch.compile'd and hides its operations: put the original module there "
                f"(model.{name}._orig_mod)"
            )
        # transformers checkpoint in training mode alone, timm always
        own, training = module.__dict__, module.training
        if own.get("grad_checkpointing") is True or (training and own.get("gradient_checkpointing") is True):
            names = ("set_grad_checkpointing(False)", "activation_checkpointing_disable()")  # of timm, and transformers
            way = next((n for n in names if hasattr(model, n.partition("(")[0])), "gradient_checkpointing_disable()")
            raise ModelError(
                f"activation checkpointing is on ({_where(name, module)}) and hides operations: call model.{way}"
            )
        cause = _changed_by_training(module) if training else None
        if cause is not None:
            raise ModelError(f"the model is in training mode, so {cause} ({_where(name, module)}): call model.eval()")
    empty = _empty(modules)
    if empty is not None:
        raise ModelError(
            f"the parameter '{empty}' lies on the meta device and has no numbers: make the model outside of "
            "torch.device('meta'), and load its weights into that"
        )


def _empty(modules: list[tuple[str, nn.Module]]) -> str | None:
    """Name of the first parameter on the meta device, where no hook puts weights in place for a pass (offloading)."""
    if any(hasattr(module, "_hf_hook") or module.__dict__["_forward_pre_hooks"] for _, module in modules):
        return None
    own = ((name, n, p) for name, module in modules for n, p in module.__dict__["_parameters"].items())
    return next((f"{name}.{n}".lstrip(".") for name, n, p in own if p is not None and p.is_meta), None)


def _where(name: str, module: nn.Module) -> str:
    return f"module '{name or type(module).__name__}'"


_DRAWN = ("drop", "jitter", "noise", "mask_time_prob", "mask_feature_prob")


def _changed_by_training(module: nn.Module) -> str | None:
    """What makes a module another function in training mode: dropout of any kind with p > 0, or batch statistics."""
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
    """Name of the first parameter that holds NaN or infinity."""
    return next((n for n, p in model.named_parameters() if not p.is_meta and not bool(torch.isfinite(p).all())), None)


def class_names(model: nn.Module) -> tuple[dict[int, str] | None, bool]:
    """(names of the classes where the config has real ones, whether several may be true at once)."""
    config = getattr(model, "config", None)
    raw = getattr(config, "id2label", None)
    labels = _numbered(raw) if isinstance(raw, dict) and raw else None
    if labels and all(v == f"LABEL_{k}" for k, v in labels.items()):
        labels = None
    return labels, getattr(config, "problem_type", None) == "multi_label_classification"


def _numbered(raw: dict[Any, Any]) -> dict[int, str] | None:
    """Number -> name, also where they stand the other way round; None where neither side is a number."""
    for pairs in (raw.items(), ((v, k) for k, v in raw.items())):
        with suppress(ValueError, TypeError):
            return {int(number): str(name) for number, name in pairs}
    return None


def class_count(model: nn.Module) -> int | None:
    """Number of classes where the model says so, a classifier's config or timm's ``num_classes``, and its last weights
    give out so many: else the output says."""
    config = getattr(model, "config", None)
    if config is None:
        count = getattr(model, "num_classes", None)
    else:  # every config has num_labels, also that of a language model
        count = getattr(config, "num_labels", None) if "Classification" in type(model).__name__ else None
    weights = [p for p in model.parameters() if p.dim() > 1]
    known = isinstance(count, int) and count > 0 and bool(weights) and count in weights[-1].shape
    return count if known else None
