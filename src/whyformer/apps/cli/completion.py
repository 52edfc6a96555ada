"""What the shell offers after a Tab: names of methods, settings, formats, models and benchmarks.

The registries need torch, which takes seconds to import, so their names are kept in the user's cache folder, in a file
whose name changes with the files that they were read from.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

Offers = list[tuple[str, str]]
FORMATS = ("png", "svg", "pdf", "html", "json")
# what `compare` shows without --method
COMPARED = (
    "transformer_attribution", "gae", "gradcam_attention", "partial_lrp", "raw_attention", "rollout",
    "input_x_gradient", "integrated_gradients",
)  # fmt: skip

_CMAPS = ("inferno", "blue-orange", "viridis", "cividis", "magma", "plasma")
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def known() -> dict[str, Any]:
    """{"bundled": [name], "methods": {name: {"summary", "modality", "settings"}}, "benchmarks": {name: {"summary",
    "options"}}}; settings and options map a name to the values worth offering, the default first."""
    file = _cache_file()
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    made = collect()
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time, not the answer
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("names-*.json"):
            old.unlink(missing_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(made), encoding="utf-8")
        partial.replace(file)
    return made


def _cache_file() -> Path:
    package = Path(__file__).parents[2]
    sources = sorted(f for room in ("methods", "benchmarks", "models") for f in (package / room).rglob("*.py"))
    stamp = zlib.crc32(repr([(str(f), f.stat().st_mtime_ns) for f in sources]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "whyformer" / f"names-{stamp:08x}.json"


def collect() -> dict[str, Any]:
    """What :func:`known` says, from the registries themselves."""
    from whyformer.benchmarks import BENCHMARKS
    from whyformer.methods import METHODS
    from whyformer.models.loading import BUNDLED

    return {
        "bundled": list(BUNDLED),
        "methods": {
            name: {
                "summary": m.summary,
                "modality": m.modality,
                "settings": {k: _values(v, m.checks.get(k, ("", None))[1]) for k, v in m.settings.items()},
            }
            for name, m in sorted(METHODS.items())
        },
        "benchmarks": {
            b.name: {"summary": b.summary, "options": {k: _values(v) for k, v in b.options.items()}}
            for b in BENCHMARKS.values()
        },
    }


def _values(default: Any, check: Any = None) -> list[Any]:
    """The default, and the others where there are few."""
    rest = getattr(check, "values", (True, False) if isinstance(default, bool) else ())
    found = [default, *(v for v in rest if v != default or type(v) is not type(default))]
    return [v if v is None or isinstance(v, bool | int | float | str) else str(v) for v in found]


# -- for each option ---------------------------------------------------------------------------------------------
def complete_method(incomplete: str) -> Offers:
    """One name of a method."""
    return beginning(incomplete, ((name, facts["summary"]) for name, facts in known()["methods"].items()))


def complete_methods(incomplete: str) -> Offers:
    """The last name of a list with commas; what is in the list already is not offered again."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [(f"{before}{comma}{name}", about) for name, about in complete_method(last) if name not in given]


def complete_configurations(incomplete: str) -> Offers:
    """``name:key=value,name``: names, and after a colon the settings of that method."""
    before, comma, last = incomplete.rpartition(",")
    head, colon, setting = last.rpartition(":")
    if not colon:
        return complete_methods(incomplete)
    settings = known()["methods"].get(head.partition(":")[0], {}).get("settings", {})
    return [(f"{before}{comma}{head}:{one}", about) for one, about in beginning(setting, _assignments(settings))]


def complete_setting(context: typer.Context, incomplete: str) -> Offers:
    """``key=value`` for the settings of the methods that stand on the line before."""
    given = context.params.get("method")
    default = COMPARED if context.info_name == "compare" else ("transformer_attribution",)
    names = given.split(",") if given else default
    settings: dict[str, list[Any]] = {}
    for name in names:
        settings.update(known()["methods"].get(name.strip(), {}).get("settings", {}))
    return beginning(incomplete, _assignments(settings))


def complete_format(incomplete: str) -> Offers:
    """The last of a list of formats."""
    before, comma, last = incomplete.rpartition(",")
    offered = FORMATS if comma else (*FORMATS, "none")
    return [(f"{before}{comma}{f}", "") for f in offered if f.startswith(last) and f not in before.split(",")]


def complete_model(incomplete: str) -> Offers:
    """Bundled models; for the rest the shell offers folders."""
    return beginning(incomplete, ((f"bundled:{name}", "comes with whyformer") for name in known()["bundled"]))


def complete_benchmark(incomplete: str) -> Offers:
    """Names of benchmarks."""
    return beginning(incomplete, ((name, facts["summary"]) for name, facts in known()["benchmarks"].items()))


def complete_option(incomplete: str) -> Offers:
    """``key=value`` for the options of the benchmarks; which of them was named, an unfinished line does not tell."""
    options: dict[str, list[Any]] = {}
    for facts in known()["benchmarks"].values():
        options.update(facts["options"])
    return beginning(incomplete, _assignments(options))


def complete_cmap(incomplete: str) -> Offers:
    """Colour maps that even steps and the colour-blind can do with, and the one of the papers."""
    return beginning(incomplete, ((name, "") for name in (*_CMAPS, "jet")))


def complete_device(incomplete: str) -> Offers:
    return beginning(incomplete, (("cpu", ""), ("cuda", "")))


def complete_dtype(incomplete: str) -> Offers:
    return beginning(incomplete, ((name, "") for name in _DTYPES))


def beginning(incomplete: str, offers: Iterable[tuple[str, str]]) -> Offers:
    return [(value, about) for value, about in offers if value.startswith(incomplete)]


def _assignments(settings: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """``key=value`` for each value that needs no quotes, else ``key=``."""
    for key, values in settings.items():
        for i, value in enumerate(values):
            written = value if isinstance(value, str) else json.dumps(value)
            yield f"{key}={'' if any(c.isspace() for c in written) else written}", "default" if i == 0 else ""
