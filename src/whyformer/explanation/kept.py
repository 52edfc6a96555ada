"""Explanations of generated texts as plain values and as files, each value checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation import sealing
from whyformer.explanation.features import Features
from whyformer.explanation.fitting import check_fit, check_said
from whyformer.explanation.pictured import Pictured
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import HeldGeneration, checked
from whyformer.explanation.storage import loaded, plain, tensors_of, to_plain, told, written_whole
from whyformer.explanation.versions import versions

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMAT = "generation 1"
_TENSORS = ("matrix", "value", "target", "logits")
_LISTED = 10
_SEEN = "seen."
_TINY = 1e-300
_MOST, _LARGEST = 2**20, 2**27
"""Of a vocabulary; of all that is read of the logits in a dictionary."""


def to_dict(g: Generation) -> dict[str, Any]:
    """Everything as JSON values; of the logits the likeliest of each step, with text and probability."""
    facts = {name: plain(getattr(g, name)) for name in HeldGeneration.model_fields}
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

    facts = {
        "format": _FORMAT,
        "versions": versions(),
        **{name: plain(getattr(g, name)) for name in HeldGeneration.model_fields},
    }
    facts["seen"] = {name: to_plain(own.first) for name, own in g.seen.items()}
    tensors = {name: getattr(g, name) for name in _TENSORS}
    for i, own in enumerate(g.seen.values()):
        tensors |= {f"{_SEEN}{i}.{name}": tensor for name, tensor in tensors_of(own.at(0)).items()}
        tensors[f"{_SEEN}{i}.all"] = own.scores
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return bytes(as_bytes(tensors, metadata=sealing.metadata(facts, tensors)))


def load(path: str | Path) -> dict[str, Any]:
    """The arguments of a Generation out of what :func:`save` wrote.

    Raises:
        LoadError: it is no saved explanation of a generated text, or was damaged since.
    """
    what = "a saved explanation of a generated text"
    facts, tensors = sealing.opened(path, what)
    if facts.get("format") != _FORMAT:
        raise LoadError(f"{path} holds no explanation of a generated text of this version of whyformer")
    with told(path, what):
        seen = {}
        for i, (name, first) in enumerate(facts.get("seen", {}).items()):
            one = Explanation(**loaded(first, tensors, f"{_SEEN}{i}."))
            seen[name] = Pictured(one, tensors[f"{_SEEN}{i}.all"])
        return _checked(facts, tensors, seen)


def from_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Generation out of what :func:`to_dict` gave.

    Of the logits it holds the likeliest of each step. They become log-probabilities; the other tokens share what is
    left of 1.

    Raises:
        InputError: it is no such dictionary, or its values do not fit together; or its maps of pictures lack them.
    """
    what = "an explanation of a generated text as to_dict gives it"
    if not isinstance(facts, Mapping):
        raise InputError(f"this is not {what}")
    if facts.get("seen"):
        raise InputError("an answer to a prompt with pictures, which JSON does not hold: save it as .safetensors")
    try:
        tensors = {name: torch.tensor(facts[name]) for name in ("matrix", "value", "target")}
        tensors["logits"] = _logits(facts) if facts["unit"] == "token" else tensors["value"][:, None]
        return _checked(facts, tensors, {})
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError(f"this is not {what}: {error!r}") from error


def _logits(facts: Mapping[str, Any]) -> Tensor:
    """``[T, V]`` log-probabilities, V just large enough that no unlisted token is likelier than the listed ones."""
    written = zip(facts["ids"][facts["start"] :], facts["probabilities"], strict=True)
    known = [{one["id"]: one["probability"] for one in step} for step in facts["candidates"]]
    for own, (token, share) in zip(known, written, strict=True):
        if abs(own.setdefault(token, share) - share) > 1e-6:
            raise ValueError("its probabilities are not those of its candidates")
    if not all(isinstance(n, int) and 0 <= n < _MOST for own in known for n in own):
        raise ValueError("its tokens are none of a vocabulary")
    if not all(own and 0 <= float(p) <= 1 for own in known for p in own.values()):
        raise ValueError("its probabilities are none")
    left = [max(0.0, 1 - sum(own.values())) for own in known]
    least = [max(min(one["probability"] for one in step), _TINY) for step in facts["candidates"]]
    more = max(min(math.ceil(rest / low), _MOST) for rest, low in zip(left, least, strict=True))
    size = max(n for own in known for n in own) + 1 + more
    if size * len(known) > _LARGEST:
        raise ValueError(f"{len(known)} steps of {size} tokens would fill the memory")
    made = torch.empty(len(known), size, dtype=torch.float64)
    for row, own, rest, low in zip(made, known, left, least, strict=True):
        each = rest / max(size - len(own), 1)
        if rest > 1e-6 and each > 1.001 * low:
            raise ValueError("its candidates are not the likeliest")
        row.fill_(max(min(each, low), _TINY))
        for token, share in own.items():
            row[token] = max(float(share), _TINY)
    return made.log()


def _checked(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: dict[str, Pictured]) -> dict[str, Any]:
    """The arguments of a Generation, each of its kind and fitting the others."""
    known = {name: facts[name] for name in HeldGeneration.model_fields if name in facts}
    held = vars(checked(HeldGeneration, known, "this answer"))
    made = {**held, **{name: tensors[name] for name in _TENSORS}, "seen": seen}
    _check_fit(made)
    return made


def _check_fit(made: Mapping[str, Any]) -> None:
    """Refuse values that are not of one number of tokens and of steps."""
    matrix, value, target, logits = (made[name] for name in _TENSORS)
    if matrix.dim() != 2 or value.dim() != 1 or not matrix.is_floating_point() or not value.is_floating_point():
        raise ValueError("its scores are of another kind")
    if not torch.isfinite(matrix).all():
        raise ValueError("its scores hold NaN or infinity")
    steps, tokens = matrix.shape
    if not all(len(made[name]) == tokens for name in ("pieces", "tokens", "ids")):
        raise ValueError("its sizes do not fit together")
    if not steps or not 0 <= made["source"] <= made["start"] == tokens - steps:
        raise ValueError("its steps are not those of its tokens")
    known = {"value": value, "target names": made["target_names"], "diagnostics": made["diagnostics"] or value}
    if any(len(own) != steps for own in (*known.values(), *(one.scores for one in made["seen"].values()))):
        raise ValueError("its sizes do not fit together")
    check_fit({"scores": matrix, "target": target, "logits": logits, "level": "token", "target_names": None,
               "features": Features()})  # fmt: skip
    for own in made["diagnostics"]:
        check_said(own, 1)
    if made["unit"] == "token" and not all(0 <= n < logits.shape[1] for n in made["ids"][made["start"] :]):
        raise ValueError("the tokens that were generated are none of its vocabulary")
    for name in ("turns", "groups"):
        if any(not 0 <= a <= b <= 2**31 for *_, a, b in made[name] or ()):
            raise ValueError(f"its {name} lie outside of its tokens")
    if any(not 0 <= a <= b <= tokens for _, a, b in made["turns"]):
        raise ValueError("its turns lie outside of its tokens")
    for one in made["seen"].values():
        if one.scores.shape[1:] != one.first.scores.shape[1:] or not torch.isfinite(one.scores).all():
            raise ValueError("its maps do not fit its pictures")
