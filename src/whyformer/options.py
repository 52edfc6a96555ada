"""Options of opening and running a model: the same for every entrance, each said once.

A new option is a field of :class:`Options` and, for type checkers, a line of :class:`Keywords`; then it is taken by
every public function, by :class:`~whyformer.explaining.OpenedModel`, by jobs, and, where it has words for it, by every
command. The module imports no torch, since the command line reads it before that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch

    from whyformer.rules.core import Rule

Function = TypeVar("Function", bound=Callable[..., Any])


WORDS: dict[str, dict[str, Any]] = {
    "device": {"metavar": "cpu|cuda", "autocompletion": "devices", "help": "Where the model runs."},
    "dtype": {"metavar": "TYPE", "autocompletion": "dtypes", "help": "float32 (default), float64 or bfloat16."},
    "truncate": {"flags": ["--truncate"], "help": "Cut off text that is longer than the model takes."},
    "checkpoint": {
        "flags": ["--checkpoint"],
        "help": "For long texts: run each block again on the way back instead of keeping what it computed; less "
        "memory, half as much time more.",
    },
}
"""What typer is told of the options that commands take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is opened and run.

    Attributes:
        device, dtype: where and in which precision a model given by name is loaded.
        truncate: allow text longer than the model takes to be cut off.
        rules: operations of your own and what they are like, ``{MyActivation: "gelu"}``: for these calls what
            :func:`whyformer.rules.register` says for all.
        checkpoint: for long texts and large models, keep of each block what enters it alone, and run it again on the
            way back: the same scores in about half as much time more. For methods that send something back through
            whole blocks (``checkpoint`` of :func:`whyformer.list_methods`).
    """

    device: str | torch.device | None = None
    dtype: torch.dtype | str | None = None
    truncate: bool = False
    rules: Mapping[Any, str | Rule] | None = None
    checkpoint: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """Those that are not the default."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


class Keywords(TypedDict, total=False):
    """:class:`Options` as keyword arguments."""

    device: str | torch.device | None
    dtype: torch.dtype | str | None
    truncate: bool
    rules: Mapping[Any, str | Rule] | None
    checkpoint: bool


_DEFAULTS = {f.name: f.default for f in fields(Options)}
NAMES = tuple(_DEFAULTS)
DEFAULTS = Options()


def shows_options(function: Function) -> Function:
    """Let a function that takes ``**options`` show them by name, in ``help`` and in notebooks."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    kinds = Options.__annotations__
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(n, keyword, default=_DEFAULTS[n], annotation=kinds[n]) for n in NAMES]
    rest = [p.replace(name=p.name.removeprefix("options_and_")) for p in own if p.kind is p.VAR_KEYWORD]
    rest = [p for p in rest if p.name != "options"]
    others = [p for p in own if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*others, *shown, *rest])  # type: ignore[attr-defined]
    return function


def split(given: Mapping[str, Any]) -> tuple[Keywords, dict[str, Any]]:
    """(options, all else) of keyword arguments."""
    options: Any = {name: value for name, value in given.items() if name in _DEFAULTS}
    return options, {name: value for name, value in given.items() if name not in _DEFAULTS}
