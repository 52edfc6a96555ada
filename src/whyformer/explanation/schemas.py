"""Pydantic schemas of saved explanations, answers and reports, and validation against them."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from whyformer.errors import InputError

Number = StrictInt | StrictFloat
Natural = Annotated[StrictInt, Field(ge=0)]
Pair = tuple[StrictInt, StrictInt]
Corners = tuple[Number, Number, Number, Number]


class StoredValues(BaseModel):
    """Values by name. An unknown name is an error; a value that may be None may also be missing."""

    model_config = ConfigDict(extra="forbid")


class FeaturesSchema(StoredValues):
    """Fields of :class:`~whyformer.explanation.features.Features` except tensors and pictures."""

    grid: Pair | None = None
    frames: StrictInt | None = None
    image_size: Pair | None = None
    cells: Corners | None = None
    read: Corners | None = None
    tokens: list[list[StrictStr]] | None = None
    offsets: list[list[Pair]] | None = None
    texts: list[StrictStr] | None = None
    sampling_rate: StrictInt | None = None
    rate: Number | None = None
    durations: list[Number] | None = None
    extent: list[Pair] | None = None
    skipped: list[list[Pair]] | None = None
    unknown: list[list[StrictInt]] | None = None
    special: list[list[StrictInt]] | None = None
    geometry: list[dict[str, Any] | None] | None = None


class ResultSchema(StoredValues):
    """Fields of :class:`~whyformer.explanation.result.Explanation` except tensors and features."""

    level: StrictStr
    method: StrictStr
    settings: dict[str, Any]
    model: StrictStr | None = None
    input: StrictStr | None = None
    target_names: list[StrictStr] | None = None
    labels: dict[int, StrictStr] | None = None
    activation: Literal["softmax", "sigmoid", "identity"]
    diagnostics: dict[str, Any]


class ExplanationSchema(ResultSchema, FeaturesSchema):
    """Fields of an explanation and of its features."""


class GenerationSchema(StoredValues):
    """Fields of :class:`~whyformer.explanation.generation.Generation` except tensors."""

    tokens: list[StrictStr]
    pieces: list[StrictStr]
    ids: list[StrictInt]
    target_names: list[StrictStr]
    notes: list[StrictStr]
    turns: list[tuple[StrictStr, StrictInt, StrictInt]]
    special: list[StrictInt] | None = None
    diagnostics: list[dict[str, Any]]
    groups: list[Pair] | None = None
    labels: dict[int, StrictStr] | None = None
    settings: dict[str, Any]
    model: StrictStr | None = None
    method: StrictStr
    explained: StrictStr
    input: StrictStr
    part: StrictStr
    unit: Literal["token", "word", "sentence", "turn"]
    start: StrictInt
    source: StrictInt


class BenchmarkFigure(BaseModel):
    """A cell of a table."""

    table: StrictStr
    row: StrictStr
    column: StrictStr
    measured: Number | None = None
    low: Number | None = Field(None, description="Lower end of the 95 % interval.")
    high: Number | None = Field(None, description="Upper end of this interval.")
    samples: StrictInt | None = None
    published: Number | None = None


class BenchmarkTable(BaseModel):
    """A table without its figures."""

    table: StrictStr
    title: StrictStr
    corner: StrictStr = Field("", description="Heading of the column of row names.")
    rows: list[StrictStr]
    columns: list[StrictStr]
    digits: StrictInt | None = Field(None, description="Number of digits after the decimal point.")
    note: StrictStr = ""


class BenchmarkCounts(BaseModel):
    """Numbers of samples of one configuration, by outcome."""

    scored: StrictInt = 0
    failed: StrictInt = 0
    constant: StrictInt = 0
    nan: StrictInt = 0


class BenchmarkCurve(BaseModel):
    """The points of a curve."""

    x: list[Number | None]
    y: list[Number | None]


class BenchmarkSchema(BaseModel):
    """The report of a benchmark; additional fields are allowed."""

    benchmark: StrictStr = Field(description="Name of the benchmark.")
    conventions: dict[str, Any] = Field(description="Every convention that the figures depend on, in words.")
    counts: dict[str, BenchmarkCounts] = Field(description="Configuration -> number of samples.")
    remarks: list[StrictStr] = Field(description="Remarks on the results.")
    tables: list[BenchmarkTable] = Field(description="The tables without their figures.")
    figures: list[BenchmarkFigure] = Field(description="One for each cell of a table.")
    curves: dict[str, dict[str, BenchmarkCurve]] = Field(description="Panel -> name of the curve -> points.")


Kind = TypeVar("Kind")
_checks = functools.cache(TypeAdapter)  # building an adapter is slow


def checked(kind: type[Kind], facts: object, subject: str) -> Kind:
    """Validate ``facts`` against a schema and return them as an instance of it.

    Args:
        kind: the schema, a pydantic model or any type that pydantic supports.
        facts: the values.
        subject: name of the validated object, for error messages.

    Raises:
        InputError: a value is unknown, missing or invalid; the message names its path.
    """
    try:
        return cast("Kind", _checks(cast("Any", kind)).validate_python(facts))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InputError(f"{subject} has no field '{place}'") from None
        if first["type"] == "missing":
            raise InputError(f"{subject} lacks its {place}") from None
        value = str(first["input"])[:60]
        field = f"{subject}'s {place}" if place else subject
        raise InputError(f"{field} is invalid ({first['msg']}): {value}") from None
