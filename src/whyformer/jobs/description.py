"""The description of a job: what to explain, how, and where to write; read from a JOB.toml and validated."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from whyformer.comparing import read_method
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, LoadError, unknown
from whyformer.explanation.storage import plain
from whyformer.jobs.actors import check_engine
from whyformer.options import DEFAULTS, NAMES, WORDS, Options, kind_of, split

_TYPES = ("float32", "float64", "bfloat16", "float16")
_KINDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}
# options that a manifest always names, as manifests of earlier versions do
_ALWAYS = {"dtype": "float32", "device": None, "truncate": False}
# keys that change how a job runs, but not what it writes
_FREE = ("out", "engine", "address", "actors", "workers", "max_failures", "metrics_port")


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
            classes with the highest logits), ``"all"``, or a list of classes (names or indices).
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
        for name in ("model", "input", "out"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise InputError(
                    f"{name} must be a string such as {_EXAMPLES[name]}, not {getattr(self, name)!r}"
                )
        if "://" in self.out:
            raise InputError(f"out must be a local or mounted folder, not {self.out!r}")
        for name in ("processor", "column", "id_column"):
            if not isinstance(getattr(self, name), str | None):
                raise InputError(f"{name} must be a string, not {getattr(self, name)!r}")
        for name, least in {"rows_per_part": 1, "max_failures": 0, "limit": 1, "metrics_port": 1}.items():  # fmt: skip
            value = getattr(self, name)
            optional = name in ("max_failures", "limit", "metrics_port")
            if not (value is None and optional) and (not _is_integer(value) or value < least):
                raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.batch_size != "auto" and (not _is_integer(self.batch_size) or int(self.batch_size) < 1):
            raise InputError(f'batch_size must be "auto" or an integer of at least 1, not {self.batch_size!r}')
        if not isinstance(self.overlays, bool):
            raise InputError(f"overlays must be true or false, not {self.overlays!r}")
        _check_options(self.options)
        check_engine(self.engine, self.address, self.actors, self.workers)
        if self.scores not in ("float32", "float16"):
            numbered("scores", self.scores, '"float32", "float16" or "top-K"')
        methods = self.methods
        if isinstance(methods, str | Mapping) or not isinstance(methods, list | tuple) or not methods:
            raise InputError(f"methods must be a list with at least one method, not {methods!r}")
        full = [(m.name, m.complete(s)) for m, s in map(read_method, methods)]
        if len(set(map(repr, full))) < len(full):
            raise InputError("methods lists a method with the same settings twice")
        object.__setattr__(self, "methods", tuple(methods))
        check_targets(self.targets)

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the written bytes, as JSON values; methods with all settings."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_FREE, "options")}
        facts |= {**_ALWAYS, **self.options.named}
        facts["methods"] = [{"method": m.name, **m.complete(s)} for m, s in map(read_method, self.methods)]
        return plain(facts)


def _check_options(options: Options) -> None:
    """Check options, which may be of any type in a file."""
    if options.dtype not in (None, *_TYPES):
        raise InputError(f"dtype must be one of {', '.join(_TYPES)}, not {options.dtype!r}")
    for name in WORDS:
        value, kind = getattr(options, name), kind_of(name)
        if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise InputError(f"{name} must be {_KINDS[kind]}, not {value!r}")
    if options.rules is not None:
        raise InputError("a job cannot contain rules (Python objects): register them with whyformer.rules.register")


_EXAMPLES = {"model": '"bundled:sst2"', "input": '"pictures/" or "reviews.jsonl"', "out": '"maps/"'}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def numbered(name: str, value: Any, expected: str) -> int:
    """Return the K of ``"top-K"``; ``name`` and the ``expected`` values are for the error message."""
    start, _, number = value.partition("-") if isinstance(value, str) else ("", "", "")
    if start != "top" or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise InputError(f"{name} must be {expected} with an integer K of at least 1, not {value!r}")
    return int(number)


def check_targets(targets: Any) -> None:
    """Check the form of targets; whether the model has these classes is checked when it is loaded."""
    if isinstance(targets, list | tuple):
        if not targets or not all(isinstance(t, str) or _is_integer(t) for t in targets):
            raise InputError(f"a list of targets holds classes, by name or number; not {targets!r}")
    elif isinstance(targets, str) and targets.startswith("column:"):
        if not targets.removeprefix("column:").strip():
            raise InputError('"column:NAME" needs the name of the column with the true class')
    elif targets not in ("predicted", "all"):
        numbered("targets", targets, '"predicted", "all", "column:NAME", a list of classes, or "top-K"')


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
    known = {f.name for f in fields(Job) if f.name != "options"} | set(NAMES) - {"rules"}
    for name in values:
        if name not in known:
            raise unknown(f"{where} has no key", name, known, f"Its keys: {', '.join(sorted(known))}")
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


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a description of each key with different values."""
    names = [*old, *(name for name in new if name not in old)]
    return [f"{n} was {old.get(n)!r} and is {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
