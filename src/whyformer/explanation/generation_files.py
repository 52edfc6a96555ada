"""Convert explanations of generated texts to plain values and files, and validate the values that are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation import serialization
from whyformer.explanation.candidates import KEPT
from whyformer.explanation.consistency import check_diagnostics, check_fit
from whyformer.explanation.features import Features
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import GenerationSchema, checked
from whyformer.explanation.storage import load_errors, loaded, plain, tensors_of, to_plain, written_whole
from whyformer.explanation.versions import versions

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMAT = "generation 1"
_TENSORS = ("matrix", "value", "target", "logits")
_OPTIONAL = ("classes", "normalizer")  # if only the highest logits are stored
_SEEN = "seen."
_TINY = 1e-300
_MOST = 2**31
"""Largest vocabulary."""


def to_dict(g: Generation) -> dict[str, Any]:
    """Return all values except pictures as JSON values; instead of logits, the most likely tokens of each step."""
    facts = {name: plain(getattr(g, name)) for name in GenerationSchema.model_fields}
    facts |= {name: getattr(g, name).tolist() for name in ("matrix", "value", "target")}
    if g.unit == "token":
        facts["candidates"] = [_candidates(g, t) for t in range(len(g))]
        facts["probabilities"] = [g.probability(t) for t in range(len(g))]
    if g.seen:
        facts["seen"] = {n: {**to_plain(maps.first), "scores": maps.scores.tolist()} for n, maps in g.seen.items()}
    return {**facts, "prompt": g.prompt, "text": g.text}


def _candidates(g: Generation, step: int) -> list[dict[str, Any]]:
    """Return the most likely tokens of a step and the generated token, in descending order of probability."""
    ranked = g.candidates(step, g.logits.shape[1])
    token = g.ids[g.start + step]
    listed = [row for rank, row in enumerate(ranked) if rank < KEPT or row[0] == token]
    normalizer = float(g.logits[step].double().logsumexp(0) if g.normalizer is None else g.normalizer[step])
    return [
        {"id": i, "text": text, "logit": logit, "probability": share, "log_probability": logit - normalizer}
        for i, text, logit, share in listed
    ]


def save(g: Generation, path: str | Path) -> Path:
    """Write a ``.safetensors`` file atomically."""
    path = Path(path)
    with written_whole(path) as partial:
        partial.write_bytes(content(g))
    return path


def content(g: Generation) -> bytes:
    """Return the bytes that :func:`save` writes."""
    from safetensors.torch import save as as_bytes

    facts = {
        "format": _FORMAT,
        "versions": versions(),
        **{name: plain(getattr(g, name)) for name in GenerationSchema.model_fields},
    }
    facts["seen"] = {name: to_plain(maps.first) for name, maps in g.seen.items()}
    tensors = {n: tensor for n in (*_TENSORS, *_OPTIONAL) if (tensor := getattr(g, n)) is not None}
    for i, maps in enumerate(g.seen.values()):
        tensors |= {f"{_SEEN}{i}.{name}": tensor for name, tensor in tensors_of(maps.at(0)).items()}
        tensors[f"{_SEEN}{i}.all"] = maps.scores
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return bytes(as_bytes(tensors, metadata=serialization.metadata(facts, tensors)))


def load(path: str | Path) -> dict[str, Any]:
    """Read a file that :func:`save` wrote, and return the arguments of a Generation.

    Raises:
        LoadError: the file is damaged, or not a saved explanation of a generated text.
    """
    expected = "a saved explanation of a generated text"
    facts, tensors = serialization.opened(path, expected)
    if facts.get("format") != _FORMAT:
        raise LoadError(f"{path} is not an explanation of a generated text that this version of whyformer can read")
    with load_errors(path, expected):
        seen = {}
        for i, (name, first) in enumerate(facts.get("seen", {}).items()):
            explanation = Explanation(**loaded(first, tensors, f"{_SEEN}{i}."))
            seen[name] = PictureScores(explanation, tensors[f"{_SEEN}{i}.all"])
        return _checked(facts, tensors, seen)


def from_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Generation from the values of :func:`to_dict`.

    They contain the logits of the most likely tokens of each step and of the generated token.

    Raises:
        InputError: ``facts`` are not those of :func:`to_dict`, are inconsistent, or belong to a prompt with pictures.
    """
    expected = "a dictionary of Generation.to_dict"
    if not isinstance(facts, Mapping):
        raise InputError(f"this is not {expected}")
    if facts.get("seen"):
        raise InputError("JSON does not hold the pictures of the prompt of this answer: save it as .safetensors")
    try:
        tensors = {name: torch.tensor(facts[name]) for name in ("matrix", "value", "target")}
        tensors |= _logits(facts) if facts["unit"] == "token" else {"logits": tensors["value"][:, None]}
        return _checked(facts, tensors, {})
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError(f"this is not {expected}: {error!r}") from error


def _logits(facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the stored logits ``[T, K]``, their token ids and their normalizers.

    Files of earlier versions list ten tokens without log-probabilities, and only the probability of the generated
    token: its logit is computed from the logit and probability of another token.
    """
    written = facts["ids"][facts["start"] :]
    rows = [
        _listed(step, token, float(share))
        for step, token, share in zip(facts["candidates"], written, facts["probabilities"], strict=True)
    ]
    count = min(len(logits) for logits, _ in rows)
    classes = []
    for (logits, _), token in zip(rows, written, strict=True):  # rows of equal length, without the least likely tokens
        others = sorted((n for n in logits if n != token), key=lambda n: -logits[n])[: count - 1]
        classes.append(sorted([token, *others], key=lambda n: -logits[n]))
    return {
        "logits": torch.tensor([[logits[n] for n in row] for (logits, _), row in zip(rows, classes, strict=True)]),
        "classes": torch.tensor(classes),
        "normalizer": torch.tensor([normalizer for _, normalizer in rows], dtype=torch.float64),
    }


def _listed(step: Sequence[Mapping[str, Any]], token: int, share: float) -> tuple[dict[int, float], float]:
    """Return (token id -> logit, normalizer) of a step's candidates and its token, which has probability ``share``."""
    if not all(isinstance(candidate["id"], int) and 0 <= candidate["id"] < _MOST for candidate in step):
        raise ValueError("its candidates have invalid token ids")
    if not step or not all(0 <= float(p) <= 1 for p in (share, *(candidate["probability"] for candidate in step))):
        raise ValueError("its probabilities are not between 0 and 1")
    best = max(step, key=lambda candidate: float(candidate["probability"]))
    normalizer = float(best["logit"]) - float(best.get("log_probability", math.log(max(best["probability"], _TINY))))
    logits = {candidate["id"]: float(candidate["logit"]) for candidate in step}
    logits.setdefault(token, normalizer + math.log(max(share, _TINY)))
    if any(abs(math.exp(logits[candidate["id"]] - normalizer) - candidate["probability"]) > 1e-6 for candidate in step):
        raise ValueError("its probabilities do not fit its logits")
    if abs(math.exp(logits[token] - normalizer) - share) > 1e-6:
        raise ValueError("its probabilities do not fit its candidates")
    return logits, normalizer


def _checked(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: dict[str, PictureScores]) -> dict[str, Any]:
    """Return the arguments of a Generation after checking their types and their consistency."""
    known = {name: facts[name] for name in GenerationSchema.model_fields if name in facts}
    held = vars(checked(GenerationSchema, known, "this answer"))
    optional = {name: tensors[name] for name in _OPTIONAL if name in tensors}
    arguments = {**held, **{name: tensors[name] for name in _TENSORS}, **optional, "seen": seen}
    _check_fit(arguments)
    return arguments


def _check_fit(arguments: Mapping[str, Any]) -> None:
    """Check that the values agree in their numbers of tokens and steps."""
    matrix, value, target, logits = (arguments[name] for name in _TENSORS)
    if matrix.dim() != 2 or value.dim() != 1 or not matrix.is_floating_point() or not value.is_floating_point():
        raise ValueError("its scores must be floating-point [T, N], and its values [T]")
    if not torch.isfinite(matrix).all():
        raise ValueError("its scores hold NaN or infinity")
    steps, tokens = matrix.shape
    if not all(len(arguments[name]) == tokens for name in ("pieces", "tokens", "ids")):
        raise ValueError("its sizes do not fit together")
    if not steps or not 0 <= arguments["source"] <= arguments["start"] == tokens - steps:
        raise ValueError("its steps do not fit its tokens")
    by_step = [value, arguments["target_names"], arguments["diagnostics"] or value]
    if any(len(entry) != steps for entry in (*by_step, *(maps.scores for maps in arguments["seen"].values()))):
        raise ValueError("its sizes do not fit together")
    optional = {name: arguments.get(name) for name in _OPTIONAL}
    check_fit({"scores": matrix, "target": target, "logits": logits, "level": "token", "target_names": None,
               "features": Features(), **optional})  # fmt: skip
    for entry in arguments["diagnostics"]:
        check_diagnostics(entry, 1)
    generated, classes = torch.tensor(arguments["ids"][arguments["start"] :]), optional["classes"]
    listed = generated < logits.shape[1] if classes is None else (classes == generated[:, None]).any(1)
    if arguments["unit"] == "token" and not bool(((generated >= 0) & listed).all()):
        raise ValueError("the generated tokens are not in its vocabulary")
    for name in ("turns", "groups"):
        if any(not 0 <= a <= b <= 2**31 for *_, a, b in arguments[name] or ()):
            raise ValueError(f"its {name} are out of range")
    if any(not 0 <= a <= b <= tokens for _, a, b in arguments["turns"]):
        raise ValueError("its turns are out of range")
    if any(not 0 <= i < tokens for i in arguments["special"] or ()):
        raise ValueError("its special tokens are out of range")
    for maps in arguments["seen"].values():
        if maps.scores.shape[1:] != maps.first.scores.shape[1:] or not torch.isfinite(maps.scores).all():
            raise ValueError("its maps do not fit its pictures, or hold NaN or infinity")
