"""The configurations that a benchmark compares: methods with settings, and the floor and ceiling of every table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError
from whyformer.explanation.display import format_settings
from whyformer.notation import method_in, parts

RANDOM, TRUTH = "random", "ground_truth"


@dataclass(frozen=True, eq=False)
class Configuration:
    """A row or column of a table.

    Attributes:
        label: name in the table.
        kind: "method", "random" (floor) or "ground_truth" (ceiling).
        method: name of the method, for :func:`whyformer.explain`.
        settings: settings of the method, defaults included.
        published: key of the papers' figures; None if a setting differs from theirs.
        class_specific: False if the scores do not depend on the class, so that one run serves all classes.
    """

    label: str
    kind: str = "method"
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    published: str | None = None
    class_specific: bool = True

    def key(self, common: dict[str, Any]) -> str:
        """Return 12 hexadecimal digits that identify this configuration and the ``common`` facts of the run."""
        facts = {"kind": self.kind, "method": self.method, "settings": self.settings, **common}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


FLOOR = Configuration(RANDOM, RANDOM, RANDOM, published=RANDOM, class_specific=False)
CEILING = Configuration(TRUTH, TRUTH, TRUTH, published=TRUTH)


def parse_methods(
    methods: str | Sequence[str | tuple[str, dict[str, Any]]], published: Mapping[str, dict[str, Any]]
) -> list[Configuration]:
    """Parse configurations.

    Args:
        methods: a string such as ``"rollout:start_layer=1,lrp"``, or a list of such names or of (name, settings). A
            prefix ``label=`` sets the label: ``"no gradient=transformer_attribution:weighting='none'"``.
        published: method -> settings of the papers' figures, or label -> method and settings.

    Raises:
        InputError: there are no methods, a method is listed twice, or a name or setting is invalid.
    """
    from whyformer.methods import find

    configurations: list[Configuration] = []
    for item in _items(methods):
        label, name, settings = _split(item) if isinstance(item, str) else ("", item[0], dict(item[1]))
        if name in (RANDOM, TRUTH):
            continue  # part of every table
        method = find(name)
        full = method.complete(settings)
        summary = format_settings(settings)
        title = label or (f"{name} ({summary})" if summary and settings != published.get(name) else name)
        source = label if label in published else name
        reference = dict(published.get(source, {"method": None}))
        matches = reference.pop("method", source) == name and method.complete(reference) == full
        key = source if matches else None
        configurations.append(Configuration(title, "method", name, full, key, method.class_specific))
    if not configurations:
        raise InputError("there are no methods: name at least one")
    if repeated := {c.label for c in configurations if sum(c.label == d.label for d in configurations) > 1}:
        raise InputError(f"methods are listed twice: {', '.join(sorted(repeated))}")
    return configurations


def settings_of(methods: str) -> dict[str, dict[str, Any]]:
    """Parse methods as :func:`parse_methods` into method -> settings, or label -> method and settings."""
    split = map(_split, _items(methods))
    return {label or name: {**({"method": name} if label else {}), **settings} for label, name, settings in split}


def _items(methods: Any) -> list[Any]:
    return parts(methods) if isinstance(methods, str) else list(methods)


def _split(item: str) -> tuple[str, str, dict[str, Any]]:
    """Return (label or "", name, settings)."""
    head, settings = method_in(item)
    label, _, name = head.rpartition("=")
    return label.strip(), name.strip(), settings


def generator_for(sample: str, seed: int) -> np.random.Generator:
    """Return a random generator that depends on the sample and the seed alone, not on the order of samples."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(sample.encode()).digest()[:8], "big")])


def random_scores(sample: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
    """Return uniform scores in 0..1 for all features, the floor of a benchmark."""
    return generator_for(sample, seed).random(shape)
