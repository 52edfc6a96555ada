"""Convert explanations of generated texts to plain values and files, and restore them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from whyformer.errors import InputError, LoadError
from whyformer.explanation import serialization, units
from whyformer.explanation.candidates import STORED
from whyformer.explanation.consistency import check_diagnostics, check_fit
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import checked, schema_of
from whyformer.explanation.serialization import errors_as
from whyformer.explanation.storage import of_prefix, plain, restored, tensors_of, to_plain

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMAT = "generation 1"
_TENSORS = ("matrix", "value", "target", "logits")
_OPTIONAL = ("classes", "normalizer")  # if only the highest logits are stored
_SEEN = "seen."
_MOST = 2**31
"""Largest vocabulary."""


def schema(kind: type) -> type[BaseModel]:
    """Return the schema of the values of generations, without tensors and pictures."""
    return schema_of("GenerationSchema", (kind,), (*_TENSORS, *_OPTIONAL, "picture_maps"))


class GenerationCandidate(BaseModel):
    """A possible next token."""

    id: int = Field(ge=0, lt=_MOST)
    text: str
    logit: float
    probability: float = Field(ge=0, le=1)
    log_probability: float


def to_plain_generation(g: Generation) -> dict[str, Any]:
    """Return all values except tensors and pictures as JSON values."""
    return {name: plain(getattr(g, name)) for name in schema(type(g)).model_fields}


def to_dict(g: Generation) -> dict[str, Any]:
    """See :meth:`Generation.to_dict`."""
    facts = {**to_plain_generation(g), **{name: getattr(g, name).tolist() for name in ("matrix", "value", "target")}}
    if g.unit == "token":
        facts["candidates"] = [_candidates(g, t) for t in range(len(g))]
        facts["probabilities"] = [g.probability(t) for t in range(len(g))]
    if g.picture_maps:
        maps = g.picture_maps.items()
        facts["seen"] = {n: {**to_plain(m.first), "scores": m.scores.tolist()} for n, m in maps}
    return {**facts, "prompt": g.prompt, "text": g.text}


def _candidates(g: Generation, step: int) -> list[dict[str, Any]]:
    """Return the most likely tokens of a step and the generated token, in descending order of probability."""
    ranked = g.candidates(step, g.logits.shape[1])
    token = g.ids[g.start + step]
    candidates = [row for rank, row in enumerate(ranked) if rank < STORED or row[0] == token]
    normalizer = float(g.logits[step].double().logsumexp(0) if g.normalizer is None else g.normalizer[step])
    return [
        {"id": i, "text": text, "logit": logit, "probability": share, "log_probability": logit - normalizer}
        for i, text, logit, share in candidates
    ]


def _contents(g: Generation) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return the format, the facts and the tensors of a file."""
    facts = {**to_plain_generation(g), "seen": {name: to_plain(maps.first) for name, maps in g.picture_maps.items()}}
    tensors = {n: tensor for n in (*_TENSORS, *_OPTIONAL) if (tensor := getattr(g, n)) is not None}
    for i, maps in enumerate(g.picture_maps.values()):
        tensors |= {f"{_SEEN}{i}.{name}": tensor for name, tensor in tensors_of(maps.at(0)).items()}
        tensors[f"{_SEEN}{i}.all"] = maps.scores
    return _FORMAT, facts, tensors


def save(g: Generation, path: str | Path) -> Path:
    """See :meth:`Generation.save`."""
    return serialization.write(path, *_contents(g))


def content(g: Generation) -> bytes:
    """Return the bytes of the file that :func:`save` writes."""
    return serialization.to_bytes(*_contents(g))


def load(kind: type[Generation], path: str | Path) -> Generation:
    """See :meth:`Generation.load`."""
    expected = "a saved explanation of a generated text"
    facts, tensors = serialization.read(path, _FORMAT, expected)
    with errors_as(LoadError, f"{path} is not {expected}"):
        maps = {}
        for i, (name, first) in enumerate(facts.pop("seen", {}).items()):
            stored = of_prefix(tensors, f"{_SEEN}{i}.")
            maps[name] = PictureScores(restored(Explanation, first, stored), stored["all"])
        return _restored(kind, facts, tensors, maps)


def from_dict(kind: type[Generation], facts: Mapping[str, Any]) -> Generation:
    """See :meth:`Generation.from_dict`."""
    with errors_as(InputError, "this is not a dictionary of Generation.to_dict"):
        if facts.get("seen"):
            raise InputError("JSON does not hold the pictures of the prompt of this answer: save it as .safetensors")
        tensors = {name: torch.tensor(facts[name]) for name in ("matrix", "value", "target")}
        tensors |= _logits(facts) if facts["unit"] == "token" else {"logits": tensors["value"][:, None]}
        return _restored(kind, facts, tensors, {})


def _logits(facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the logits ``[T, K]`` of the candidates, their token ids and their normalizers."""
    steps = checked(list[list[GenerationCandidate]], facts["candidates"], "this answer's candidates")
    logits_by_id: list[dict[int, float]] = []
    normalizers = []
    for step in steps:
        best = max(step, key=lambda candidate: candidate.logit)
        normalizers.append(best.logit - best.log_probability)
        logits_by_id.append({candidate.id: candidate.logit for candidate in step})
        if any(abs(math.exp(c.logit - normalizers[-1]) - c.probability) > 1e-6 for c in step):
            raise ValueError("its probabilities do not fit its logits")
    # rows of equal length: without the least likely tokens, but with the generated one
    count = min(map(len, logits_by_id))
    classes = []
    tokens, shares = facts["ids"][facts["start"] :], facts["probabilities"]
    for token, share, logits, normalizer in zip(tokens, shares, logits_by_id, normalizers, strict=True):
        if abs(math.exp(logits[token] - normalizer) - share) > 1e-6:
            raise ValueError("its probabilities do not fit its candidates")
        others = sorted(logits.keys() - {token}, key=lambda n: -logits[n])[: count - 1]
        classes.append(sorted([token, *others], key=lambda n: -logits[n]))
    return {
        "logits": torch.tensor([[logits[n] for n in row] for logits, row in zip(logits_by_id, classes, strict=True)]),
        "classes": torch.tensor(classes),
        "normalizer": torch.tensor(normalizers, dtype=torch.float64),
    }


def _restored(
    kind: type[Generation], facts: Mapping[str, Any], tensors: Mapping[str, Tensor], maps: dict[str, PictureScores]
) -> Generation:
    """Return a generation after checking the types of its values and their consistency."""
    stored = {name: facts[name] for name in schema(kind).model_fields if name in facts}
    values: dict[str, Any] = vars(checked(schema(kind), stored, "this answer"))
    values |= {name: tensors[name] for name in _TENSORS} | {name: tensors.get(name) for name in _OPTIONAL}
    g = kind(**values, picture_maps=maps)
    _check_fit(g)
    return g


def _check_fit(g: Generation) -> None:
    """Check that the values agree in their numbers of tokens and steps."""
    if g.matrix.dim() != 2 or g.value.dim() != 1 or not g.value.is_floating_point():
        raise ValueError("its scores must be floating-point [T, N], and its values [T]")
    facts = (g.matrix, "token", g.method, g.settings, g.target, g.logits)
    check_fit(Explanation(*facts, classes=g.classes, normalizer=g.normalizer))
    steps, tokens = g.matrix.shape
    if not all(len(entries) == tokens for entries in (g.pieces, g.tokens, g.ids)):
        raise ValueError("its sizes do not fit together")
    if not 0 <= g.source <= g.start == tokens - steps:
        raise ValueError("its steps do not fit its tokens")
    by_step = [g.value, g.target_names, g.diagnostics or g.value, *(maps.scores for maps in g.picture_maps.values())]
    if any(len(entries) != steps for entries in by_step):
        raise ValueError("its sizes do not fit together")
    for entry in g.diagnostics:
        check_diagnostics(entry, 1)
    if g.unit not in units.UNITS:
        raise ValueError(f"its unit must be one of {', '.join(units.UNITS)}")
    generated = torch.tensor(g.ids[g.start :])
    is_candidate = generated < g.logits.shape[1] if g.classes is None else (g.classes == generated[:, None]).any(1)
    if g.unit == "token" and not bool(((generated >= 0) & is_candidate).all()):
        raise ValueError("the generated tokens are not in its vocabulary")
    ranges = {"turns": [(a, b, tokens) for _, a, b in g.turns], "groups": [(a, b, _MOST) for a, b in g.groups or ()]}
    for name, bounds in ranges.items():
        if any(not 0 <= a <= b <= most for a, b, most in bounds):
            raise ValueError(f"its {name} are out of range")
    if any(not 0 <= i < tokens for i in g.special or ()):
        raise ValueError("its special tokens are out of range")
    for maps in g.picture_maps.values():
        if maps.scores.shape[1:] != maps.first.scores.shape[1:]:
            raise ValueError("its maps do not fit its pictures")
        replace(maps.first, scores=maps.scores)  # raises for NaN and infinity
