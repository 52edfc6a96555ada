"""Read the output of a job: a table, explanations, failures and summaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.errors import LoadError, import_optional
from whyformer.explanation.result import Explanation
from whyformer.jobs.columns import explanation_of, failures_table, schema
from whyformer.jobs.disk import checksum
from whyformer.jobs.manifest import FAILURES, Part, finished_parts, holds, job_id, read_manifest
from whyformer.jobs.parts import failures_of

if TYPE_CHECKING:
    from whyformer.jobs.summaries import Drift, MeanMap, Words


class Maps:
    """The output folder of a job.

    Iteration yields the explanations in the order of the input, with one part in memory at a time.

    Attributes:
        path: the folder.
        manifest: description of the job and its output (docs/jobs.md).
        parts: finished parts.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.parts: list[Part] = list(finished_parts(self.path, self.manifest, job_id(self.manifest)).values())
        model = dict(self.manifest["model"])
        model["labels"] = model.get("labels") and {int(k): v for k, v in model["labels"].items()}
        self._model = model
        self._checked: set[str] = set()

    @property
    def labels(self) -> dict[int, str] | None:
        """Class index -> name, if the model names its classes."""
        labels: dict[int, str] | None = self._model["labels"]
        return labels

    @property
    def complete(self) -> bool:
        """True if the job is finished. The parts of an unfinished job can be read too."""
        return bool(self.manifest["complete"])

    def __len__(self) -> int:
        return sum(part.written for part in self.parts)

    def __iter__(self) -> Iterator[Explanation]:
        yield from self.explanations()

    def explanations(self, **values: Any) -> Iterator[Explanation]:
        """Yield the explanations whose columns have these values, such as ``method="gae", target=1``."""
        for row in self.rows(filters=[(name, "==", value) for name, value in values.items()] or None):
            yield explanation_of(row, self._model)

    def rows(self, columns: list[str] | None = None, filters: Any = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of the table as mappings; arguments as for :meth:`tables`."""
        for table in self.tables(columns, filters):
            for batch in table.to_batches(max_chunksize=256):
                yield from batch.to_pylist()

    def __getitem__(self, index: int) -> Explanation:
        """Return the explanation of one row of the table."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        index %= len(self)
        for part in self.parts:
            if index < part.written:
                return explanation_of(self._table(part).slice(index, 1).to_pylist()[0], self._model)
            index -= part.written
        raise IndexError(index)

    def __repr__(self) -> str:
        state = "" if self.complete else ", unfinished"
        return f"Maps({str(self.path)!r}, {len(self)} explanations{state})"

    def tables(self, columns: list[str] | None = None, filters: Any = None) -> Iterator[Any]:
        """Yield the pyarrow tables of the parts in order, verified by their checksums.

        Args:
            columns: names of the columns; all by default.
            filters: as for ``pyarrow.parquet.read_table``; all rows by default.

        Raises:
            LoadError: a part is missing or damaged.
        """
        for part in self.parts:
            yield self._table(part, columns, filters)

    def table(self, columns: list[str] | None = None) -> Any:
        """Return a pyarrow table with a row for each input, method and target, in the order of the input."""
        pa = import_optional("pyarrow", "a table of explanations")
        tables = [t.replace_schema_metadata(None) for t in self.tables(columns)]
        if tables:
            return pa.concat_tables(tables)
        empty = schema(self.manifest["job"]["scores"]).empty_table()
        return empty if columns is None else empty.select(columns)

    def failures(self) -> Any:
        """Return a pyarrow table of the inputs, or methods of an input, that failed, with the reasons.

        Raises:
            LoadError: a file is missing or damaged.
        """
        pq = import_optional("pyarrow.parquet", "a table of failures")
        if self.complete:
            path, expected = self.path / FAILURES, self.manifest.get("failures_sha256")
            if not path.is_file() or expected not in (None, checksum(path)):
                raise LoadError(f"{path} is missing or damaged: run the job again to rewrite it")
            return pq.read_table(path).replace_schema_metadata(None)
        failures = (failures_of(self._verified(part)) for part in self.parts if part.failed)
        return failures_table(list(itertools.chain.from_iterable(failures)))

    def _table(self, part: Part, columns: list[str] | None = None, filters: Any = None) -> Any:
        pq = import_optional("pyarrow.parquet", "a table of explanations")
        return pq.read_table(self._verified(part), columns=columns, filters=filters)

    def _verified(self, part: Part) -> Path:
        """Return the file of a part after verifying its checksum once."""
        path = self.path / part.file
        if part.file not in self._checked:
            if not holds(path, part):
                raise LoadError(f"{path} is missing or damaged: run the job again to rewrite it")
            self._checked.add(part.file)
        return path

    # -- summaries ---------------------------------------------------------------------------------------------------
    def words(self, target: int | str | None = None, method: str | None = None, **options: Any) -> Words:
        """Return the words with the most relevance for a class; see :func:`whyformer.jobs.summaries.words`."""
        from whyformer.jobs.summaries import words

        return words(self, target, method, **options)

    def mean_map(self, target: int | str | None = None, method: str | None = None) -> MeanMap:
        """Return the mean map of aligned pictures; see :func:`whyformer.jobs.summaries.mean_map`."""
        from whyformer.jobs.summaries import mean_map

        return mean_map(self, target, method)

    def drift(self, other: Maps, **options: Any) -> Drift:
        """Compare this run with another run over the same rows; see :func:`whyformer.jobs.summaries.drift`."""
        from whyformer.jobs.summaries import drift

        return drift(self, other, **options)


def read(path: str | Path) -> Maps:
    """Open a folder that ``whyformer run`` or :func:`whyformer.explain_many` wrote.

    Raises:
        LoadError: the folder is not the output of a job, or its manifest is damaged.
    """
    return Maps(path)
