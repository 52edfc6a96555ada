"""The file of a part: a table whose metadata says which job and which rows it is of, so that it stands by itself."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictInt, StrictStr

from whyformer.explanation.schemas import Natural, checked
from whyformer.jobs import lines
from whyformer.jobs.batching import Failure
from whyformer.jobs.columns import schema
from whyformer.jobs.disk import checksum, write_parquet, write_table
from whyformer.jobs.manifest import Part, part_name
from whyformer.jobs.rows import needed

_KEY = b"whyformer"


class PartFacts(BaseModel):
    """What a part says of itself.

    Attributes:
        job: the job's id; part: its number; first, rows: of the input; batch_size: of its batches; failures: as
            :class:`whyformer.jobs.batching.Failure` has them.
    """

    job: StrictStr
    part: Natural
    first: Natural
    rows: Natural
    batch_size: StrictInt
    failures: list[dict[str, Any]]


def stamped(table: Any, **facts: Any) -> Any:
    """A table whose metadata is ``facts``, with a checksum; ``job`` is one of them."""
    return table.replace_schema_metadata({_KEY: lines.written(facts)})


def stamp_of(table_schema: Any) -> dict[str, Any] | None:
    """The facts of a stamped table; None where there are none, or they are damaged."""
    return lines.read((table_schema.metadata or {}).get(_KEY, b""))


def is_stamped(table_schema: Any) -> bool:
    """Whether there are facts, be they damaged."""
    return _KEY in (table_schema.metadata or {})


def failures_of(table_schema: Any) -> list[Failure]:
    """The failures that a part carries in its schema."""
    found = (table_schema.metadata or {}).get(_KEY, b'{"failures": []}')
    return [Failure(**one) for one in json.loads(found)["failures"]]


def write_part(path: Path, table: Any, facts: PartFacts) -> Part:
    """Write a part whole; once more gives the same bytes."""
    write_table(path, stamped(table, **facts.model_dump()), facts.job)
    return entry_of(path, facts, table.num_rows)


def entry_of(path: Path, facts: PartFacts, written: int) -> Part:
    """The journal's entry for a file."""
    failed = len(facts.failures)
    return Part(path.name, facts.first, facts.rows, written, failed, path.stat().st_size, checksum(path))


def facts_of(path: Path) -> PartFacts:
    """What a part says of itself.

    Raises:
        InputError: it says nothing.
    """
    pq = needed("pyarrow.parquet", "a part")
    return checked(PartFacts, stamp_of(pq.read_schema(path)), f"{path.name}'s metadata")


def verified(path: Path, scores: str) -> Part | None:
    """The entry of a part that no list names; None where its bytes are not those that were written.

    There is no checksum of the file to compare it with. Its pages have checksums, and what was read of it, written
    again, must give the same bytes.
    """
    pq, arrow = needed("pyarrow.parquet", "a part"), needed("pyarrow", "a part")
    known = schema(scores)
    try:
        content = path.read_bytes()
        table = pq.read_table(BytesIO(content), page_checksum_verification=True)
        facts = facts_of(path)
    except (OSError, ValueError, TypeError, arrow.ArrowException):  # not all of arrow's errors are of one kind
        return None
    if not table.schema.equals(known) or path.name != part_name(facts.part):
        return None
    again = BytesIO()
    whole = arrow.table(table.combine_chunks().columns, schema=known)
    write_parquet(stamped(whole, **facts.model_dump()), again)
    return entry_of(path, facts, table.num_rows) if again.getvalue() == content else None
