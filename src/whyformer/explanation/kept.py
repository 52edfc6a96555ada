"""Explanations of generated texts as plain values and as files, each value checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation import sealing
from whyformer.explanation.candidates import KEPT
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
_SOME = ("classes", "normalizer")  # of a large vocabulary
_SEEN = "seen."
_TINY = 1e-300
_MOST = 2**31
"""Of a vocabulary."""


def to_dict(g: Generation) -> dict[str, Any]:
    """Everything as JSON values; of the logits the likeliest of each step, with text and probability."""
    facts = {name: plain(getattr(g, name)) for name in HeldGeneration.model_fields}
    facts |= {name: getattr(g, name).tolist() for name in ("matrix", "value", "target")}
    if g.unit == "token":
        facts["candidates"] = [_candidates(g, t) for t in range(len(g))]
        facts["probabilities"] = [g.probability(t) for t in range(len(g))]
    if g.seen:
        facts["seen"] = {n: {**to_plain(own.first), "scores": own.scores.tolist()} for n, own in g.seen.items()}
    return {**facts, "prompt": g.prompt, "text": g.text}


def _candidates(g: Generation, step: int) -> list[dict[str, Any]]:
    """The likeliest tokens of a step and the generated one, the likeliest first."""
    found = g.candidates(step, g.logits.shape[1])
    token = g.ids[g.start + step]
    listed = [one for place, one in enumerate(found) if place < KEPT or one[0] == token]
    normalizer = float(g.logits[step].double().logsumexp(0) if g.normalizer is None else g.normalizer[step])
    return [
        {"id": i, "text": text, "logit": logit, "probability": share, "log_probability": logit - normalizer}
        for i, text, logit, share in listed
    ]


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
    tensors = {name: own for name in (*_TENSORS, *_SOME) if (own := getattr(g, name)) is not None}
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

    Of the logits it holds the likeliest of each step and that of the generated token.

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
        tensors |= _logits(facts) if facts["unit"] == "token" else {"logits": tensors["value"][:, None]}
        return _checked(facts, tensors, {})
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError(f"this is not {what}: {error!r}") from error


def _logits(facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The kept logits ``[T, K]``, their tokens and what makes log-probabilities of them.

    Files of earlier versions list ten tokens, without log-probabilities, and of the generated one its probability: its
    logit follows from those of the others.
    """
    written = facts["ids"][facts["start"] :]
    rows = [
        _listed(step, token, float(share))
        for step, token, share in zip(facts["candidates"], written, facts["probabilities"], strict=True)
    ]
    count = min(len(own) for own, _ in rows)
    kept = []
    for (own, _), token in zip(rows, written, strict=True):  # of one length: the least likely are left out
        others = sorted((n for n in own if n != token), key=lambda n: -own[n])[: count - 1]
        kept.append(sorted([token, *others], key=lambda n: -own[n]))
    return {
        "logits": torch.tensor([[own[n] for n in row] for (own, _), row in zip(rows, kept, strict=True)]),
        "classes": torch.tensor(kept),
        "normalizer": torch.tensor([normalizer for _, normalizer in rows], dtype=torch.float64),
    }


def _listed(step: Sequence[Mapping[str, Any]], token: int, share: float) -> tuple[dict[int, float], float]:
    """(token -> logit, the normalizer) of one step's list, the generated token with its probability among them."""
    if not all(isinstance(one["id"], int) and 0 <= one["id"] < _MOST for one in step):
        raise ValueError("its tokens are none of a vocabulary")
    if not step or not all(0 <= float(p) <= 1 for p in (share, *(one["probability"] for one in step))):
        raise ValueError("its probabilities are none")
    best = max(step, key=lambda one: float(one["probability"]))
    normalizer = float(best["logit"]) - float(best.get("log_probability", math.log(max(best["probability"], _TINY))))
    own = {one["id"]: float(one["logit"]) for one in step}
    own.setdefault(token, normalizer + math.log(max(share, _TINY)))
    if any(abs(math.exp(own[one["id"]] - normalizer) - one["probability"]) > 1e-6 for one in step):
        raise ValueError("its probabilities are not those of its logits")
    if abs(math.exp(own[token] - normalizer) - share) > 1e-6:
        raise ValueError("its probabilities are not those of its candidates")
    return own, normalizer


def _checked(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: dict[str, Pictured]) -> dict[str, Any]:
    """The arguments of a Generation, each of its kind and fitting the others."""
    known = {name: facts[name] for name in HeldGeneration.model_fields if name in facts}
    held = vars(checked(HeldGeneration, known, "this answer"))
    some = {name: tensors[name] for name in _SOME if name in tensors}
    made = {**held, **{name: tensors[name] for name in _TENSORS}, **some, "seen": seen}
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
    some = {name: made.get(name) for name in _SOME}
    check_fit({"scores": matrix, "target": target, "logits": logits, "level": "token", "target_names": None,
               "features": Features(), **some})  # fmt: skip
    for own in made["diagnostics"]:
        check_said(own, 1)
    written, classes = torch.tensor(made["ids"][made["start"] :]), some["classes"]
    known = (written >= 0) & (written < logits.shape[1] if classes is None else (classes == written[:, None]).any(1))
    if made["unit"] == "token" and not bool(known.all()):
        raise ValueError("the tokens that were generated are none of its vocabulary")
    for name in ("turns", "groups"):
        if any(not 0 <= a <= b <= 2**31 for *_, a, b in made[name] or ()):
            raise ValueError(f"its {name} lie outside of its tokens")
    if any(not 0 <= a <= b <= tokens for _, a, b in made["turns"]):
        raise ValueError("its turns lie outside of its tokens")
    if any(not 0 <= i < tokens for i in made["special"] or ()):
        raise ValueError("its special tokens lie outside of its tokens")
    for one in made["seen"].values():
        if one.scores.shape[1:] != one.first.scores.shape[1:] or not torch.isfinite(one.scores).all():
            raise ValueError("its maps do not fit its pictures")
