"""The file of a part: a table whose metadata identifies its job and its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import StrictInt, StrictStr

from whyformer.errors import import_optional
from whyformer.explanation.schemas import Natural, checked
from whyformer.jobs import lines
from whyformer.jobs.batching import Failure
from whyformer.jobs.columns import Rows, schema
from whyformer.jobs.disk import checksum, write_parquet, write_table
from whyformer.jobs.manifest import Part, part_name

_KEY = b"whyformer"


@dataclass(frozen=True)
class PartFacts:
    """The metadata of a part.

    Attributes:
        job: id of the job.
        part: number of the part.
        first: index of its first row in the input.
        rows: number of its rows in the input.
        batch_size: batch size.
        failures: fields of each :class:`whyformer.jobs.batching.Failure`.
    """

    job: StrictStr
    part: Natural
    first: Natural
    rows: Natural
    batch_size: StrictInt
    failures: list[dict[str, Any]]


@dataclass(frozen=True)
class UnwrittenPart:
    """The explanations and failures of a part, and its metadata."""

    facts: PartFacts
    rows: Rows

    def write(self, out: Path) -> Part:
        """Write the part atomically; writing it again gives the same bytes."""
        path, table = out / part_name(self.facts.part), self.rows.table()
        write_table(path, stamped(table, **asdict(self.facts)), self.facts.job)
        return entry_of(path, self.facts, table.num_rows)


def stamped(table: Any, **facts: Any) -> Any:
    """Return a table with the metadata ``facts``, which include ``job``, and their checksum."""
    return table.replace_schema_metadata({_KEY: lines.encoded(facts)})


def stamp_of(table_schema: Any) -> dict[str, Any] | None:
    """Return the facts of a stamped table; None if they are missing or damaged."""
    return lines.read((table_schema.metadata or {}).get(_KEY, b""))


def is_stamped(table_schema: Any) -> bool:
    """Return True if a table has facts, even if they are damaged."""
    return _KEY in (table_schema.metadata or {})


def failures_of(path: Path) -> list[Failure]:
    """Return the failures in the metadata of a part."""
    return [Failure(**failure) for failure in facts_of(path).failures]


def entry_of(path: Path, facts: PartFacts, row_count: int) -> Part:
    """Return the entry of a file in the manifest."""
    failed = len(facts.failures)
    return Part(path.name, facts.first, facts.rows, row_count, failed, path.stat().st_size, checksum(path))


def facts_of(path: Path) -> PartFacts:
    """Read the metadata of a part.

    Raises:
        InputError: the metadata are missing or damaged.
    """
    pq = import_optional("pyarrow.parquet", "a part")
    return checked(PartFacts, stamp_of(pq.read_schema(path)), f"{path.name}'s metadata")


def verified(path: Path, scores: str) -> Part | None:
    """Verify a part that neither manifest nor log lists, and return its entry; None if it is damaged.

    Without a checksum of the file, the checksums of its pages are verified, and writing its content again must give
    the same bytes.
    """
    pq, arrow = import_optional("pyarrow.parquet", "a part"), import_optional("pyarrow", "a part")
    expected = schema(scores)
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        facts = facts_of(path)
    except (OSError, ValueError, TypeError, arrow.ArrowException):  # Arrow raises unrelated types
        return None
    if not table.schema.equals(expected) or path.name != part_name(facts.part):
        return None
    rewritten = arrow.BufferOutputStream()
    combined = arrow.table(table.combine_chunks().columns, schema=expected)
    write_parquet(stamped(combined, **asdict(facts)), rewritten)
    return entry_of(path, facts, table.num_rows) if path.read_bytes() == rewritten.getvalue() else None
