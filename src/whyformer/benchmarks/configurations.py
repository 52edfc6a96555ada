"""What is compared: methods with settings, and the floor and ceiling that every table holds."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError

RANDOM, TRUTH = "random", "ground_truth"


@dataclass(frozen=True, eq=False)
class Configuration:
    """A row or column of a table.

    Attributes:
        label: its name in the table; kind: "method", "random" (floor) or "ground_truth" (ceiling).
        method, settings: what :func:`whyformer.explain` is called with; ``settings`` are complete.
        published: the key under which the papers' figures are kept; None where a setting differs from theirs.
        class_specific: False if the scores do not depend on the class, so that one run serves every class.
    """

    label: str
    kind: str = "method"
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    published: str | None = None
    class_specific: bool = True

    def key(self, common: dict[str, Any]) -> str:
        """Twelve hex digits that change with anything that changes the result."""
        facts = {"kind": self.kind, "method": self.method, "settings": self.settings, **common}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


FLOOR = Configuration(RANDOM, RANDOM, RANDOM, published=RANDOM, class_specific=False)
CEILING = Configuration(TRUTH, TRUTH, TRUTH, published=TRUTH)


def parse_methods(
    given: str | Sequence[str | tuple[str, dict[str, Any]]], published: Mapping[str, dict[str, Any]]
) -> list[Configuration]:
    """Configurations from ``"rollout:start_layer=1,lrp"`` or a list of such names or of (name, settings).

    ``name=`` in front gives a label: ``"no gradient=transformer_attribution:weighting='none'"``.

    Args:
        published: method -> the settings under which the papers' figures were made; or label -> method and settings.
    """
    from whyformer.methods import find

    made: list[Configuration] = []
    for item in _items(given):
        label, name, settings = _split(item) if isinstance(item, str) else ("", item[0], dict(item[1]))
        if name in (RANDOM, TRUTH):
            continue  # always there
        chosen = find(name)
        full = chosen.complete(settings)
        shown = ", ".join(f"{k}={v}" for k, v in settings.items())
        title = label or (f"{name} ({shown})" if shown and settings != published.get(name) else name)
        source = label if label in published else name
        paper = dict(published.get(source, {"method": None}))
        same = paper.pop("method", source) == name and chosen.complete(paper) == full
        made.append(Configuration(title, "method", name, full, source if same else None, chosen.class_specific))
    if not made:
        raise InputError("no methods were given")
    if repeated := {c.label for c in made if sum(c.label == d.label for d in made) > 1}:
        raise InputError(f"given twice: {', '.join(sorted(repeated))}")
    return made


def settings_of(methods: str) -> dict[str, dict[str, Any]]:
    """Method -> settings, or label -> method and settings, of methods written as for :func:`parse_methods`."""
    split = map(_split, _items(methods))
    return {label or name: {**({"method": name} if label else {}), **settings} for label, name, settings in split}


def _items(given: Any) -> list[Any]:
    return [p for p in given.split(",") if p.strip()] if isinstance(given, str) else list(given)


def _split(item: str) -> tuple[str, str, dict[str, Any]]:
    """(label or "", name, settings)."""
    head, *settings = item.strip().split(":")
    label, _, name = head.rpartition("=")
    found = {}
    for one in settings:
        key, equals, value = one.partition("=")
        if not equals:
            raise InputError(f"settings are written name:key=value:key=value; found {one!r} in {item!r}")
        try:
            found[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key.strip()] = {"true": True, "false": False}.get(value.casefold(), value)
    return label.strip(), name.strip(), found


def generator_for(sample: str, seed: int) -> np.random.Generator:
    """Random numbers that depend on the sample and the seed alone, not on the order of the work."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(sample.encode()).digest()[:8], "big")])


def random_scores(sample: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
    """The floor: uniform scores in 0..1, one a feature."""
    return generator_for(sample, seed).random(shape)
