"""A job: what is explained, how, and where it goes; read from a JOB.toml, checked before any work."""

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
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
# options that a manifest names also where they are the default, as those of the first jobs do
_ALWAYS = {"dtype": "float32", "device": None, "truncate": False}
# what changes how a job runs, but not what it writes
_FREE = ("out", "engine", "address", "actors", "workers", "max_failures", "metrics_port")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, as ``whyformer run`` takes it; in a JOB.toml each is a key of the same name.

    Attributes:
        model: a name, as for :func:`whyformer.explain`; a folder is relative to the file.
        input: a folder, a glob, a .jsonl, .csv or .parquet file, ``"hf:NAME"``, ``"hf:NAME:PART"``, or a URL of these.
        methods: names, or ``{method = "name", setting = value}``.
        out: the folder to write.
        processor: a name, where it is not the model's own.
        targets: ``"predicted"``, ``"column:NAME"`` (the true class, in a column of the input), ``"top-K"`` (the K
            classes with the highest logits), ``"all"``, or a list of classes (names or numbers).
        column, id_column: which column of a table is the input, and which one names the rows.
        limit: only so many rows, from the first on.
        options: how the model is opened and run, see :class:`~whyformer.options.Options`; keys of the file.
        batch_size: rows explained at once, or ``"auto"``: as many as fit a quarter of the memory, at most 32 (128 on
            a GPU). Where memory runs out it is halved.
        scores: ``"float32"``, ``"float16"``, or ``"top-K"``: only the K scores that are the largest in size, special
            tokens left out.
        overlays: also write a picture or page of each explanation, to ``out/overlays``.
        rows_per_part: rows of the input in one file.
        engine: ``"local"``, or ``"ray"`` with its address and the number of actors.
        workers: threads that read the input.
        max_failures: stop when more rows than that failed.
        metrics_port: serve figures for Prometheus there while it runs.
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
                    f"a job needs its {name}: a text such as {_EXAMPLES[name]}, not {getattr(self, name)!r}"
                )
        if "://" in self.out:
            raise InputError(f"out is a folder of this machine, or one that is mounted on it, not {self.out!r}")
        for name in ("processor", "column", "id_column"):
            if not isinstance(getattr(self, name), str | None):
                raise InputError(f"{name} must be a text, not {getattr(self, name)!r}")
        for name, least in {"rows_per_part": 1, "max_failures": 0, "limit": 1, "metrics_port": 1}.items():  # fmt: skip
            value = getattr(self, name)
            optional = name in ("max_failures", "limit", "metrics_port")
            if not (value is None and optional) and (not _whole(value) or value < least):
                raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.batch_size != "auto" and (not _whole(self.batch_size) or int(self.batch_size) < 1):
            raise InputError(f'batch_size must be "auto" or a whole number of at least 1, not {self.batch_size!r}')
        if not isinstance(self.overlays, bool):
            raise InputError(f"overlays must be true or false, not {self.overlays!r}")
        _check_options(self.options)
        check_engine(self.engine, self.address, self.actors, self.workers)
        if self.scores not in ("float32", "float16"):
            numbered("scores", self.scores, '"float32", "float16" or "top-K"')
        asked = self.methods
        if isinstance(asked, str | Mapping) or not isinstance(asked, list | tuple) or not asked:
            raise InputError(f"methods must be a list with at least one method, not {asked!r}")
        full = [(m.name, m.complete(s)) for m, s in map(read_method, asked)]
        if len({repr(one) for one in full}) < len(full):
            raise InputError("a method with the same settings stands twice among the methods")
        object.__setattr__(self, "methods", tuple(asked))
        check_targets(self.targets)

    def identity(self) -> dict[str, Any]:
        """What decides the bytes that are written, as JSON values: methods with all of their settings."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_FREE, "options")}
        facts |= {**_ALWAYS, **self.options.named}
        facts["methods"] = [{"method": m.name, **m.complete(s)} for m, s in map(read_method, self.methods)]
        return plain(facts)


def _check_options(options: Options) -> None:
    """Refuse options that a file cannot say."""
    if options.dtype not in (None, *_TYPES):
        raise InputError(f"dtype must be one of {', '.join(_TYPES)}, not {options.dtype!r}")
    for name in WORDS:
        value, kind = getattr(options, name), kind_of(name)
        if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise InputError(f"{name} must be {_KINDS[kind]}, not {value!r}")
    if options.rules is not None:
        raise InputError("rules are Python objects, which the files of a job cannot name: whyformer.rules.register")


_EXAMPLES = {"model": '"bundled:sst2"', "input": '"pictures/" or "reviews.jsonl"', "out": '"maps/"'}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def numbered(name: str, value: Any, wanted: str) -> int:
    """The K of ``"top-K"``."""
    start, _, number = value.partition("-") if isinstance(value, str) else ("", "", "")
    if start != "top" or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise InputError(f"{name} must be {wanted}, K a whole number of at least 1, not {value!r}")
    return int(number)


def check_targets(targets: Any) -> None:
    """Refuse targets that no model has; whether it has these classes is checked once it is loaded."""
    if isinstance(targets, list | tuple):
        if not targets or not all(isinstance(t, str) or _whole(t) for t in targets):
            raise InputError(f"a list of targets holds classes, by name or number; not {targets!r}")
    elif isinstance(targets, str) and targets.startswith("column:"):
        if not targets.removeprefix("column:").strip():
            raise InputError('"column:NAME" needs the name of the column with the true class')
    elif targets not in ("predicted", "all"):
        numbered("targets", targets, '"predicted", "all", "column:NAME", a list of classes, or "top-K"')


def read_job(path: str | Path, **changes: Any) -> Job:
    """The job of a TOML file; paths in it are relative to it. ``changes`` replace keys, relative to where one is.

    Raises:
        LoadError: the file is missing or no TOML. InputError: a key is unknown, missing, or out of range.
    """
    file = Path(path)
    if file.is_dir():
        raise LoadError(f"cannot read the job {path}: it is a folder; what is to be explained is given as --input")
    try:
        if file.stat().st_size > 2**20:
            raise InputError(f"{path} has more than 1 MB, which no job has")
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read the job {path}: {getattr(error, 'strerror', None) or error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no TOML: {error}") from error
    for name in ("input", "out", "model", "processor"):
        if name not in changes and isinstance(given.get(name), str):
            given[name] = _beside(file.parent, given[name], name)
    return make_job({**given, **changes}, str(path))


def make_job(given: Mapping[str, Any], where: str = "a job") -> Job:
    """A job of its keys, checked."""
    known = {f.name for f in fields(Job) if f.name != "options"} | set(NAMES) - {"rules"}
    for name in given:
        if name not in known:
            raise unknown(f"{where} has no key", name, known, f"Its keys: {', '.join(sorted(known))}")
    for name in _EXAMPLES:
        if not given.get(name):
            raise InputError(f"{where} lacks its {name}: {name} = {_EXAMPLES[name]}")
    options, keys = split(given)
    return Job(**keys, options=Options(**options))


def _beside(folder: Path, value: str, name: str) -> str:
    """A path as seen from the folder of the job file; names of models and data sets, and URLs, as they are."""
    if not value.strip() or "://" in value or (name == "input" and value.startswith("hf:")):
        return value
    found = folder / Path(value).expanduser()
    return str(found) if name in ("input", "out") or found.is_dir() else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not the same, key by key, in words."""
    names = [*old, *(name for name in new if name not in old)]
    return [f"{n} was {old.get(n)!r} and is {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
