"""The same rules for a graph of the engine and for a tape."""

from __future__ import annotations

from dataclasses import dataclass

from whyformer.composites import named
from whyformer.rules.core import Composite
from whyformer.rules.multipliers import COMPOSITES
from whyformer.tape.walking import Composite as TapeComposite

__all__ = ["Rules"]

ON_TAPE = (
    *((named.COMPOSITES[name], COMPOSITES[name]) for name in named.COMPOSITES),
    (named.conservative("AH", "secant", "halves"), COMPOSITES["ah_secant"]),
    (named.conservative("LN", "secant", "halves"), COMPOSITES["ln_secant"]),
    (named.conservative("AH", "LN", "secant", "halves"), COMPOSITES["libra"]),
)
"""(a composite of the engine, the same rules for a tape)."""


@dataclass(frozen=True)
class Rules:
    """The same rules for a graph of the engine and for a tape.

    Attributes:
        graph: for the engine.
        tape: for a tape; None if they are known for a graph only.
    """

    graph: Composite
    tape: TapeComposite | None

    @classmethod
    def of(cls, composite: Composite) -> Rules:
        """Return a composite of multipliers with the same rules for a tape."""
        return cls(composite, next((on_tape for own, on_tape in ON_TAPE if own == composite), None))
