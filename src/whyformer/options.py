"""Options for opening and running a model. They are the same in every function, command and job.

A new option is a field of :class:`Options` and, for type checkers, a line of :class:`Keywords`. Every public function
that takes a model, :class:`~whyformer.explaining.OpenedModel` and jobs then take it, and so do the commands if it has
an entry in :data:`WORDS`. Its name must not be that of a method's setting, nor of a parameter of such a function. The
module does not import torch, because the command line reads it before torch is needed.
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
        "help": "For long texts: run each block again on the way back instead of keeping what it computed. Less "
        "memory, about half as much time more.",
    },
}
"""Arguments of typer for the options that commands and files of jobs take. An option whose default is False is a flag;
any other is text, or of the ``type`` given here."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is opened and run.

    Attributes:
        device, dtype: where and in which precision a model given by name is loaded.
        truncate: allow text longer than the model takes to be cut off. The prompt of a generated answer is never cut.
        rules: operations of your own and what they are like, ``{MyActivation: "gelu"}``: as
            :func:`whyformer.rules.register`, but for this model alone.
        checkpoint: for long texts and large models: keep only the input of each block, and run the block again on the
            way back. The scores are the same; it takes about half as much time more. For methods that send something
            back through whole blocks (``checkpoint`` of :func:`whyformer.list_methods`).
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


def kind_of(name: str) -> type:
    """The type of an option on the command line and in the file of a job."""
    return bool if _DEFAULTS[name] is False else WORDS[name].get("type", str)


def shows_options(function: Function) -> Function:
    """Make ``help`` and notebooks show each option of a function that takes ``**options``.

    Raises:
        TypeError: the function has a parameter with the name of an option.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    if clash := {p.name for p in own} & _DEFAULTS.keys():
        raise TypeError(f"{function.__qualname__} has a parameter of the same name as an option: {', '.join(clash)}")
    kinds = Options.__annotations__
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(n, keyword, default=_DEFAULTS[n], annotation=kinds[n]) for n in NAMES]
    rest = [p.replace(name=p.name.removeprefix("options_and_")) for p in own if p.kind is p.VAR_KEYWORD]
    rest = [p for p in rest if p.name != "options"]
    others = [p for p in own if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*others, *shown, *rest])  # type: ignore[attr-defined]
    return function


def split(given: Mapping[str, Any]) -> tuple[Keywords, dict[str, Any]]:
    """Keyword arguments as (options, all others)."""
    options: Any = {name: value for name, value in given.items() if name in _DEFAULTS}
    return options, {name: value for name, value in given.items() if name not in _DEFAULTS}
