"""Options for opening and running a model, the same in every function, command and job.

To add an option, add a field to :class:`Options` and, for type checkers, a line to :class:`Keywords`. Every public
function that takes a model, :class:`~whyformer.explaining.OpenedModel` and jobs then accept it, and so do the commands
and the page if it has an entry in :data:`WORDS`. Its name must differ from those of the methods' settings, of the
parameters of these functions and of other options of the commands. This module does not import torch, because the
command line reads it before torch is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from whyformer.errors import check_type

if TYPE_CHECKING:
    import torch

    from whyformer.rules.core import Rule

Function = TypeVar("Function", bound=Callable[..., Any])


WORDS: dict[str, dict[str, Any]] = {
    "device": {"metavar": "cpu|cuda", "autocompletion": lambda: ["cpu", "cuda"], "help": "Where the model runs."},
    "dtype": {
        "metavar": "TYPE", "autocompletion": lambda: ["float32", "float64", "bfloat16", "float16"],
        "help": "float32 (default), float64, bfloat16, float16.",
    },
    "truncate": {"flags": ["--truncate"], "help": "Truncate text that is longer than the model's limit."},
    "checkpoint": {
        "flags": ["--checkpoint"],
        "help": "For long texts: recompute each block in the backward pass instead of storing its activations. "
        "Takes less memory and about half as much time again.",
    },
}
"""Typer arguments of the options that commands and job files accept. An option whose default is False is a flag; any
other has the ``type`` listed here, or is text."""
PER_INPUT = tuple(name for name in WORDS if name not in ("device", "dtype"))
"""The options that visitors of the page choose. Where a model runs is chosen when the page starts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is opened and run.

    Attributes:
        device, dtype: device and precision of a model that is loaded by name.
        truncate: truncate text that is longer than the model's limit. The prompt of a generated answer is never
            truncated.
        rules: custom operations and the known operations they behave like, ``{MyActivation: "gelu"}``, for this model
            only (:func:`whyformer.rules.register` registers them for all models).
        checkpoint: for long texts and large models: store only the input of each block and recompute the block in the
            backward pass. The scores are the same; it takes about half as much time again. Only for methods that
            propagate through whole blocks (``checkpoint`` of :func:`whyformer.list_methods`).
    """

    device: str | torch.device | None = None
    dtype: torch.dtype | str | None = None
    truncate: bool = False
    rules: Mapping[Any, str | Rule] | None = None
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("truncate", "checkpoint"):
            check_type(name, getattr(self, name), bool, "True or False")
        check_type("rules", self.rules, Mapping | None, "a mapping such as {MyActivation: 'gelu'}")

    @property
    def named(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


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
    """Return the type of an option on the command line and in job files."""
    return bool if _DEFAULTS[name] is False else WORDS[name].get("type", str)


def shows_options(function: Function) -> Function:
    """Replace ``**options`` in a function's signature by the single options, for ``help`` and notebooks.

    Raises:
        TypeError: the function has a parameter with the name of an option.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if clash := {p.name for p in parameters} & _DEFAULTS.keys():
        raise TypeError(f"{function.__qualname__} has a parameter of the same name as an option: {', '.join(clash)}")
    kinds = Options.__annotations__
    keyword = inspect.Parameter.KEYWORD_ONLY
    expanded = [inspect.Parameter(n, keyword, default=_DEFAULTS[n], annotation=kinds[n]) for n in NAMES]
    rest = [p.replace(name=p.name.removeprefix("options_and_")) for p in parameters if p.kind is p.VAR_KEYWORD]
    rest = [p for p in rest if p.name != "options"]
    others = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*others, *expanded, *rest])  # type: ignore[attr-defined]
    return function


def split(keywords: Mapping[str, Any]) -> tuple[Keywords, dict[str, Any]]:
    """Split keyword arguments into (options, all others)."""
    options: Any = {name: value for name, value in keywords.items() if name in _DEFAULTS}
    return options, {name: value for name, value in keywords.items() if name not in _DEFAULTS}
