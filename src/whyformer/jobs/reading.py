"""What a job wrote, read back: a table, explanations one by one, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.errors import LoadError
from whyformer.explanation.result import Explanation
from whyformer.jobs.columns import explanation_of, failures_table
from whyformer.jobs.disk import checksum
from whyformer.jobs.manifest import FAILURES, Part, finished_parts, holds, read_manifest
from whyformer.jobs.parts import failures_of
from whyformer.jobs.rows import needed

if TYPE_CHECKING:
    from whyformer.jobs.summaries import Drift, MeanMap, Words


class Maps:
    """The folder that a job wrote; iterating gives its explanations in order, one part in memory at a time.

    Attributes:
        path: the folder.
        manifest: what the job was, and what it wrote (docs/jobs.md).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.parts: list[Part] = finished_parts(self.path, self.manifest)
        model = dict(self.manifest["model"])
        model["labels"] = model.get("labels") and {int(k): v for k, v in model["labels"].items()}
        self._model = model
        self._checked: set[str] = set()

    @property
    def labels(self) -> dict[int, str] | None:
        """Class index -> name, where the model names its classes."""
        found: dict[int, str] | None = self._model["labels"]
        return found

    @property
    def complete(self) -> bool:
        """Whether the job has ended; what an unfinished one wrote can be read too."""
        return bool(self.manifest["complete"])

    def __len__(self) -> int:
        return sum(part.written for part in self.parts)

    def __iter__(self) -> Iterator[Explanation]:
        for table in self.tables():
            for batch in table.to_batches(max_chunksize=256):
                for row in batch.to_pylist():
                    yield explanation_of(row, self._model)

    def __getitem__(self, index: int) -> Explanation:
        """The explanation of one row of the table."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        for part in self.parts:
            if index < part.written:
                return explanation_of(self._table(part).slice(index, 1).to_pylist()[0], self._model)
            index -= part.written
        raise IndexError(index)

    def __repr__(self) -> str:
        state = "" if self.complete else ", unfinished"
        return f"Maps({str(self.path)!r}, {len(self)} explanations{state})"

    def tables(self, columns: list[str] | None = None) -> Iterator[Any]:
        """The pyarrow tables of the parts, in order, each checked against its checksum.

        Raises:
            LoadError: a part is missing or damaged.
        """
        for part in self.parts:
            yield self._table(part, columns)

    def table(self, columns: list[str] | None = None) -> Any:
        """A pyarrow table: one row for each input × method × target, in the order of the input."""
        pa = needed("pyarrow", "a table of explanations")
        found = [t.replace_schema_metadata(None) for t in self.tables(columns)]
        if found:
            return pa.concat_tables(found)
        from whyformer.jobs.columns import schema

        empty = schema(self.manifest["job"]["scores"]).empty_table()
        return empty if columns is None else empty.select(columns)

    def failures(self) -> Any:
        """A pyarrow table of the rows, or methods of a row, for which there is no explanation, and why.

        Raises:
            LoadError: its file is missing or damaged.
        """
        pq = needed("pyarrow.parquet", "a table of failures")
        if self.complete:
            path, wanted = self.path / FAILURES, self.manifest.get("failures_sha256")
            if not path.is_file() or wanted not in (None, checksum(path)):
                raise LoadError(f"{path} is missing or damaged: run the job again, which makes it again")
            return pq.read_table(path).replace_schema_metadata(None)
        listed = (failures_of(pq.read_schema(self._whole(p))) for p in self.parts if p.failed)
        return failures_table([one for own in listed for one in own])

    def _table(self, part: Part, columns: list[str] | None = None) -> Any:
        pq = needed("pyarrow.parquet", "a table of explanations")
        return pq.read_table(self._whole(part), columns=columns)

    def _whole(self, part: Part) -> Path:
        """The file of a part, once it was found to be what was written."""
        path = self.path / part.file
        if part.file not in self._checked:
            if not holds(path, part):
                raise LoadError(f"{path} is missing or damaged: run the job again, which makes it again")
            self._checked.add(part.file)
        return path

    # -- summaries ---------------------------------------------------------------------------------------------------
    def words(self, target: int | str | None = None, method: str | None = None, **options: Any) -> Words:
        """Which words carry most relevance for a class; see :func:`whyformer.jobs.summaries.words`."""
        from whyformer.jobs.summaries import words

        return words(self, target, method, **options)

    def mean_map(self, target: int | str | None = None, method: str | None = None) -> MeanMap:
        """The mean map of aligned pictures; see :func:`whyformer.jobs.summaries.mean_map`."""
        from whyformer.jobs.summaries import mean_map

        return mean_map(self, target, method)

    def drift(self, other: Maps, **options: Any) -> Drift:
        """What changed from this run to another of the same rows; see :func:`whyformer.jobs.summaries.drift`."""
        from whyformer.jobs.summaries import drift

        return drift(self, other, **options)


def read(path: str | Path) -> Maps:
    """What ``whyformer run`` or :func:`whyformer.explain_many` wrote to a folder.

    Raises:
        LoadError: no job has written there, or its manifest is damaged.
    """
    return Maps(path)
