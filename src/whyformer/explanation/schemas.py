"""Pydantic schemas of dataclasses and reports, and validation against them."""

from __future__ import annotations

import functools
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    create_model,
)

from whyformer.errors import InputError

Number = StrictInt | StrictFloat
Natural = Annotated[StrictInt, Field(ge=0)]
_STRICT: dict[Any, Any] = {int: StrictInt, float: Number, str: StrictStr}


@functools.cache
def schema_of(name: str, kinds: tuple[type, ...], without: tuple[str, ...]) -> type[BaseModel]:
    """Return the schema of the stored fields of dataclasses, in which 3.0 and "3" are no integers.

    An unknown name is an error; a value that may be None may also be missing.

    Args:
        name: name of the schema.
        kinds: the dataclasses.
        without: names of fields that are stored in another way.
    """
    hints = {n: hint for kind in kinds for n, hint in get_type_hints(kind).items() if n not in without}
    stored: dict[str, Any] = {n: (_strict(h), None if NoneType in get_args(h) else ...) for n, h in hints.items()}
    schema: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **stored)
    return schema


def _strict(hint: Any) -> Any:
    """Return a type hint with strict numbers and strings; dataclasses and the keys of mappings are unchanged."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is dict:
        return origin[inner[0], _strict(inner[1])]
    if origin in (list, tuple):
        return origin[tuple(map(_strict, inner))]
    if origin in (Union, UnionType):
        return Union[tuple(map(_strict, inner))]  # noqa: UP007
    return _STRICT.get(hint, hint)


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
