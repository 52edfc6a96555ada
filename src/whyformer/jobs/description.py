"""The description of a job: what to explain, how, and where to write; read from a JOB.toml and validated."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError

from whyformer.comparing import read_method
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, LoadError, unknown
from whyformer.explanation.schemas import Natural
from whyformer.explanation.storage import plain
from whyformer.jobs.actors import check_engine
from whyformer.options import DEFAULTS, NAMES, WORDS, Options, kind_of, split
from whyformer.targets import written_target

# options that a manifest always names, as manifests of earlier versions do
_ALWAYS = {"dtype": "float32", "device": None, "truncate": False}
# keys that change how a job runs, but not what it writes
_WITHOUT_EFFECT = ("out", "engine", "address", "actors", "workers", "max_failures", "metrics_port")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job for ``whyformer run``. Each attribute is a key of the same name in a JOB.toml.

    Attributes:
        model: name of the model, as for :func:`whyformer.explain`; a folder is relative to the file.
        input: a folder, a glob, a .jsonl, .csv or .parquet file, ``"hf:NAME"``, ``"hf:NAME:PART"``, or a URL of these.
        out: output folder.
        methods: names, or ``{method = "name", setting = value}``.
        processor: name of the processor, if the model does not have one.
        targets: ``"predicted"``, ``"column:NAME"`` (the true class, in a column of the input), ``"top-K"`` (the K
            classes with the highest logits), ``"all"``, or a list of classes (names or indices) and of targets as text,
            such as ``"Token(1, 'PER')"`` (see :mod:`whyformer.targets`).
        column: column of a table that holds the input.
        id_column: column of a table that identifies a row.
        limit: number of rows to explain, from the first; all by default.
        batch_size: rows in one batch, or ``"auto"``: as many as fit a quarter of the memory, at most 32 (128 on a GPU).
            It is halved if memory runs out.
        options: how to open and run the model, see :class:`~whyformer.options.Options`; each is a key of the file.
        scores: ``"float32"``, ``"float16"``, or ``"top-K"``: only the K scores of largest magnitude, without special
            tokens.
        overlays: also write a picture or page of each explanation to ``out/overlays``.
        rows_per_part: rows of the input in one file.
        engine: ``"local"`` or ``"ray"``.
        address: address of the Ray cluster; by default a cluster is started on this machine.
        actors: number of Ray actors.
        workers: number of threads that read the input.
        max_failures: number of failed rows above which the job stops; by default it does not stop.
        metrics_port: port of this machine at which to serve metrics for Prometheus during the run.
    """

    model: str
    input: str
    out: str
    methods: tuple[Any, ...] = (DEFAULT_METHOD,)
    processor: str | None = None
    targets: Any = "predicted"
    column: str | None = None
    id_column: str | None = None
    limit: int | None = None
    batch_size: int | str = "auto"
    options: Options = DEFAULTS
    scores: str = "float32"
    overlays: bool = False
    rows_per_part: int = 1000
    engine: str = "local"
    address: str | None = None
    actors: int = 1
    workers: int = 2
    max_failures: int | None = None
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", as_list(self.targets))
        check_values({f.name: getattr(self, f.name) for f in fields(self)} | vars(self.options))
        check_engine(self.engine, self.address, self.actors)
        if "://" in self.out:
            raise InputError(f"out must be a local or mounted folder, not {self.out!r}")
        if self.options.rules is not None:
            raise InputError("a job cannot contain rules (Python objects): register them with whyformer.rules.register")
        full = [(m.name, m.complete(s)) for m, s in map(read_method, self.methods)]
        if len(set(map(repr, full))) < len(full):
            raise InputError("methods lists a method with the same settings twice")
        object.__setattr__(self, "methods", tuple(self.methods))

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the written bytes, as JSON values; methods with all settings."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_WITHOUT_EFFECT, "options")}
        facts |= {**_ALWAYS, **self.options.named}
        facts["methods"] = [{"method": m.name, **m.complete(s)} for m, s in map(read_method, self.methods)]
        return plain(facts)


_EXAMPLES = {"model": '"bundled:sst2"', "input": '"pictures/" or "reviews.jsonl"', "out": '"maps/"'}
_TYPES = ("float32", "float64", "bfloat16", "float16")
_FLAG, _TEXT = (StrictBool, "true or false"), (StrictStr | None, "a string")
_Count = Annotated[StrictInt, Field(ge=1)]
_Top = Annotated[StrictStr, Field(pattern="^top-0*[1-9][0-9]*$")]
_Column = Annotated[StrictStr, Field(pattern=r"^column:\s*\S")]
_Classes = Annotated[list[StrictStr | StrictInt], Field(min_length=1)]
_K = '"top-K" with an integer K of at least 1'
_KINDS = 'classes by name or index, or text such as "Token(1, 2)"'
_TARGETS = f'"predicted", "all", "column:NAME", {_K}, or a list of targets: {_KINDS}'
VALUES: dict[str, tuple[Any, str]] = {
    **{name: (Annotated[StrictStr, Field(pattern=r"\S")], f"a string such as {e}") for name, e in _EXAMPLES.items()},
    **dict.fromkeys(("processor", "column", "id_column", "address"), _TEXT),
    **dict.fromkeys(("rows_per_part", "actors", "workers"), (_Count, "an integer of at least 1")),
    **dict.fromkeys(("limit", "metrics_port"), (_Count | None, "an integer of at least 1")),
    "max_failures": (Natural | None, "an integer of at least 0"),
    "batch_size": (Literal["auto"] | _Count, '"auto" or an integer of at least 1'),
    "methods": (Annotated[list[Any], Field(min_length=1)], 'a list with at least one method, such as ["gae"]'),
    "targets": (Literal["predicted", "all"] | _Column | _Top | _Classes, _TARGETS),
    "scores": (Literal["float32", "float16"] | _Top, f'"float32", "float16" or {_K}'),
    "overlays": _FLAG,
    "engine": (Literal["local", "ray"], "one of local, ray"),
    **{name: _FLAG if kind_of(name) is bool else _TEXT for name in WORDS},
    "dtype": (Literal[_TYPES] | None, f"one of {', '.join(_TYPES)}"),
}
"""Key -> (its type, description of the valid values)."""
_adapter = cache(lambda name: TypeAdapter(VALUES[name][0]))


def check_values(values: Mapping[str, Any]) -> None:
    """Check the values of keys that are in :data:`VALUES`; whether the model has a class is checked when it is loaded.

    Raises:
        InputError: a value is invalid; the message describes the valid values.
    """
    for name in (name for name in VALUES if name in values):
        try:
            _adapter(name).validate_python(values[name])
        except ValidationError:
            raise InputError(f"{name} must be {VALUES[name][1]}, not {values[name]!r}") from None


def as_list(targets: Any) -> Any:
    """Return the targets of a job, with targets of :mod:`whyformer.targets` as text; a single one becomes a list.

    Raises:
        InputError: a target as text cannot be read.
    """
    if isinstance(targets, list | tuple):
        return [written_target(target) for target in targets]
    text = written_target(targets)
    return targets if text is targets else [text]


def top_count(value: str) -> int:
    """Return the K of ``"top-K"``."""
    return int(value.removeprefix("top-"))


def read_job(path: str | Path, **changes: Any) -> Job:
    """Read a job from a TOML file.

    Args:
        path: the file. Paths in it are relative to its folder.
        **changes: keys that replace those of the file. Paths in them are relative to the working directory.

    Raises:
        LoadError: the file cannot be read.
        InputError: the file is not TOML, or a key is unknown, missing, or out of range.
    """
    file = Path(path)
    if file.is_dir():
        raise LoadError(f"cannot read the job {path}: it is a folder; use --input for a folder of inputs")
    try:
        if file.stat().st_size > 2**20:
            raise InputError(f"{path} is larger than 1 MB, so it is not a job")
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read the job {path}: {getattr(error, 'strerror', None) or error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    for name in ("input", "out", "model", "processor"):
        if name not in changes and isinstance(values.get(name), str):
            values[name] = _relative_to(file.parent, values[name], name)
    return make_job({**values, **changes}, str(path))


def make_job(values: Mapping[str, Any], where: str = "a job") -> Job:
    """Return the job with these keys; ``where`` names it in error messages."""
    valid = {f.name for f in fields(Job) if f.name != "options"} | set(NAMES) - {"rules"}
    for name in values:
        if name not in valid:
            raise unknown(f"{where} has no key", name, valid, f"Its keys: {', '.join(sorted(valid))}")
    for name in _EXAMPLES:
        if not values.get(name):
            raise InputError(f"{where} lacks the key {name}: {name} = {_EXAMPLES[name]}")
    options, keys = split(values)
    return Job(**keys, options=Options(**options))


def _relative_to(folder: Path, value: str, name: str) -> str:
    """Resolve a path relative to the folder of the job file; names of models and data sets, and URLs, do not change."""
    if not value.strip() or "://" in value or (name == "input" and value.startswith("hf:")):
        return value
    path = folder / Path(value).expanduser()
    return str(path) if name in ("input", "out") or path.is_dir() else value
