"""What saved explanations, answers and reports hold, and the check, by pydantic, of all that is read from a file."""

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


class Held(BaseModel):
    """Values by name; an unknown name is refused, what may be None may also be missing."""

    model_config = ConfigDict(extra="forbid")


class HeldFeatures(Held):
    """Of :class:`~whyformer.explanation.features.Features`, all that is no tensor and no picture."""

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
    unknown: list[list[StrictInt]] | None = None
    special: list[list[StrictInt]] | None = None
    geometry: list[dict[str, Any]] | None = None


class HeldResult(Held):
    """Of :class:`~whyformer.explanation.result.Explanation` beside its features."""

    level: StrictStr
    method: StrictStr
    settings: dict[str, Any]
    model: StrictStr | None = None
    input: StrictStr | None = None
    target_names: list[StrictStr] | None = None
    labels: dict[int, StrictStr] | None = None
    activation: Literal["softmax", "sigmoid", "identity"]
    diagnostics: dict[str, Any]


class HeldExplanation(HeldResult, HeldFeatures):
    """An explanation."""


class HeldGeneration(Held):
    """Of :class:`~whyformer.explanation.generation.Generation`, all that is no tensor."""

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


class _Figure(BaseModel):
    table: StrictStr
    row: StrictStr
    column: StrictStr
    measured: Number | None = None
    low: Number | None = None
    high: Number | None = None
    published: Number | None = None


class _Table(BaseModel):
    table: StrictStr
    title: StrictStr
    corner: StrictStr = ""
    rows: list[StrictStr]
    columns: list[StrictStr]
    digits: StrictInt | None = None
    note: StrictStr = ""


class HeldBenchmark(BaseModel):
    """The report of a benchmark; it may say more."""

    benchmark: StrictStr
    conventions: dict[str, Any]
    counts: dict[str, dict[str, StrictInt]]
    remarks: list[StrictStr]
    tables: list[_Table]
    figures: list[_Figure]
    curves: dict[str, Any]


Kind = TypeVar("Kind")
_checks = functools.cache(TypeAdapter)  # made once a kind


def checked(kind: type[Kind], facts: object, what: str) -> Kind:
    """``facts`` as what they should be.

    Raises:
        InputError: a value is unknown, missing, or of another kind; it says which, by its place.
    """
    try:
        made: Kind = _checks(cast("Any", kind)).validate_python(facts)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            raise InputError(f"{what} has no '{place}'") from None
        if wrong["type"] == "missing":
            raise InputError(f"{what} lacks its {place}") from None
        given = str(wrong["input"])[:60]
        raise InputError(f"{what}'s {place} is of another kind ({wrong['msg']}): {given}") from None
    return made
