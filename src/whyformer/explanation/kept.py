"""Explanations of generated texts as plain values and as files, each value checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whyformer.errors import LoadError
from whyformer.explanation.pictured import Pictured
from whyformer.explanation.result import Explanation
from whyformer.explanation.storage import loaded, plain, tensors_of, to_plain, written_whole
from whyformer.explanation.versions import versions

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMAT = "generation 1"
_TENSORS = ("matrix", "value", "target", "logits")
_LISTED = 10
_SEEN = "seen."


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(one, kind) for one in value)


_FACTS: dict[str, Callable[[Any], bool]] = {
    "tokens": _list_of(str), "pieces": _list_of(str), "ids": _list_of(int), "target_names": _list_of(str),
    "notes": _list_of(str), "turns": _list_of(list), "diagnostics": _list_of(dict),
    "groups": lambda v: v is None or _list_of(list)(v), "labels": lambda v: v is None or isinstance(v, dict),
    "settings": lambda v: isinstance(v, dict), "model": lambda v: v is None or isinstance(v, str),
    **dict.fromkeys(("method", "explained", "unit", "input", "part"), lambda v: isinstance(v, str)),
    **dict.fromkeys(("start", "source"), lambda v: isinstance(v, int)),
}  # fmt: skip


def to_dict(g: Generation) -> dict[str, Any]:
    """Everything as JSON values; of the logits the likeliest of each step, with text and probability."""
    facts = {name: plain(getattr(g, name)) for name in _FACTS}
    facts |= {name: getattr(g, name).tolist() for name in ("matrix", "value", "target")}
    if g.unit == "token":
        keys = ("id", "text", "logit", "probability")
        steps = range(len(g))
        facts["candidates"] = [[dict(zip(keys, c, strict=True)) for c in g.candidates(t, _LISTED)] for t in steps]
        facts["probabilities"] = [g.probability(t) for t in steps]
    if g.seen:
        facts["seen"] = {n: {**to_plain(own.first), "scores": own.scores.tolist()} for n, own in g.seen.items()}
    return {**facts, "prompt": g.prompt, "text": g.text}


def save(g: Generation, path: str | Path) -> Path:
    """One ``.safetensors`` file; it appears whole or not at all."""
    path = Path(path)
    with written_whole(path) as partial:
        partial.write_bytes(content(g))
    return path


def content(g: Generation) -> bytes:
    """What :func:`save` writes."""
    from safetensors.torch import save as as_bytes

    facts = {"format": _FORMAT, "versions": versions(), **{name: plain(getattr(g, name)) for name in _FACTS}}
    facts["seen"] = {name: to_plain(own.first) for name, own in g.seen.items()}
    tensors = {name: getattr(g, name) for name in _TENSORS}
    for i, own in enumerate(g.seen.values()):
        tensors |= {f"{_SEEN}{i}.{name}": tensor for name, tensor in tensors_of(own.at(0)).items()}
        tensors[f"{_SEEN}{i}.all"] = own.scores
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return bytes(as_bytes(tensors, metadata={"whyformer": json.dumps(facts)}))


def load(path: str | Path) -> dict[str, Any]:
    """The arguments of a Generation out of what :func:`save` wrote."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise LoadError(f"no such file: {path}")
    try:
        with safe_open(str(path), "pt") as file:
            facts: Mapping[str, Any] = json.loads((file.metadata() or {})["whyformer"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.get("format") != _FORMAT:
            raise LoadError(f"{path} holds no explanation of a generated text of this version of whyformer")
        seen = {}
        for i, (name, first) in enumerate(facts.get("seen", {}).items()):
            one = Explanation(**loaded(first, tensors, f"{_SEEN}{i}."))
            seen[name] = Pictured(one, tensors[f"{_SEEN}{i}.all"])
        wrong = [name for name, check in _FACTS.items() if not check(facts[name])]
        steps, tokens = tensors["matrix"].shape
        sized = len(facts["pieces"]) == len(facts["tokens"]) == len(facts["ids"]) == tokens
        if wrong or not sized or any(len(tensors[name]) != steps for name in _TENSORS):
            raise ValueError(f"of another kind: {', '.join(wrong) or 'its sizes do not fit together'}")
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} is not a saved explanation of a generated text: {error}") from error
    made = {name: facts[name] for name in _FACTS}
    made["turns"] = [(str(role), int(a), int(b)) for role, a, b in made["turns"]]
    made["groups"] = None if made["groups"] is None else [(int(a), int(b)) for a, b in made["groups"]]
    made["labels"] = None if made["labels"] is None else {int(k): str(v) for k, v in made["labels"].items()}
    return {**made, **{name: tensors[name] for name in _TENSORS}, "seen": seen}
