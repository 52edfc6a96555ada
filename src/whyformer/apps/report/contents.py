"""What a report holds: explanations and benchmarks, each with the file it came from, and the files left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class Saved:
    """One explanation of one sample.

    Attributes:
        e: a single sample.
        title: what the input is called.
        file: where it was found, below what was asked for; versions: of the packages that made it.
    """

    e: Explanation
    title: str
    file: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        facts: what ``report.json`` holds; curves: the bytes of ``curves.png``.
        records: lines in ``records.jsonl``; errors: (configuration, message) -> samples.
    """

    facts: dict[str, Any]
    file: str
    curves: bytes | None = None
    records: int | None = None
    errors: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def conventions(self) -> dict[str, Any]:
        """The conventions behind the figures; none where they are not a list."""
        found = self.facts.get("conventions")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report; ``damaged`` if it should have been."""

    file: str
    why: str
    damaged: bool = False


@dataclass
class Contents:
    """Everything that was found, in the order of the files' names."""

    saved: list[Saved] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
