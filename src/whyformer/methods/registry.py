"""The registry of methods, from which the docs, the command line's choices and the tests' parametrisation are built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from whyformer.defaults import DEFAULT_METHOD, FOUNDING_METHOD
from whyformer.errors import InputError, MethodNotApplicable, unknown
from whyformer.methods.affinity import spread

if TYPE_CHECKING:
    from whyformer.methods.task import Scores, Task

Check = Callable[[Any], bool]
Checked = tuple[str, Check]  # (description of valid values, check)


# -- checks of settings ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bounds:
    """Check for a number from ``low`` to ``high``; a class, so that forms can read the bounds."""

    low: float
    high: float
    integer: bool = False

    def __call__(self, value: Any) -> bool:
        inside = not isinstance(value, bool) and self.low <= value <= self.high
        return inside and (not self.integer or isinstance(value, int))


@dataclass(frozen=True)
class OneOf:
    """Check for one of some values; a class, so that forms can offer them."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(value == x and type(value) is type(x) for x in self.values)


@dataclass(frozen=True)
class NameOrToken(OneOf):
    """Check for one of some values or the id of a token."""

    def __call__(self, value: Any) -> bool:
        return super().__call__(value) or (isinstance(value, int) and Bounds(0, 2**32 - 1, integer=True)(value))


def between(low: float, high: float, *, integer: bool = False) -> Checked:
    """Require a number from ``low`` to ``high``. Every setting is bounded, because the web page takes them from anyone.
    """
    return f"a {'whole ' if integer else ''}number of at least {low} and at most {high:,}", Bounds(low, high, integer)


def one_of(*values: Any) -> Checked:
    """Require one of some values."""
    return "one of " + ", ".join(map(repr, values)), OneOf(values)


def name_or_token(*values: Any) -> Checked:
    """Require one of some values or the id of a token."""
    return f"{one_of(*values)[0]}, or a token's id", NameOrToken(values)


def is_block(value: Any) -> bool:
    """Return True if value is a valid block index."""
    return isinstance(value, int) and not isinstance(value, bool)


def or_none(checked: Checked) -> Checked:
    """Accept None, or a value that passes the other check."""
    return f"None or {checked[0]}", lambda v: v is None or checked[1](v)


FLAG: Checked = ("True or False", lambda v: isinstance(v, bool))
BLOCK: Checked = ("a block number (an integer; negative ones count from the last block)", is_block)
OPTIONAL_BLOCK = or_none(BLOCK)

Block = Annotated[int, BLOCK]
OptionalBlock = Annotated[int | None, OPTIONAL_BLOCK]
Natural = Annotated[int, between(0, 2**32 - 1, integer=True)]
Count = Annotated[int, between(1, 10_000, integer=True)]
OptionalCount = Annotated[int | None, or_none(between(1, 10_000, integer=True))]
Amount = Annotated[float, between(0, 1_000)]


def _check_of(hint: Any) -> Checked | None:
    if hint is bool:
        return FLAG
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    return next(iter(getattr(hint, "__metadata__", ())), None)


# -- the registry ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        name: the method's name, for ``explain(method=...)``.
        summary: description in one line.
        settings: setting -> default.
        checks: setting -> (description of valid values, check), for settings that are checked.
        function: the function to run.
        family: "attention", "propagation", "gradient" or "perturbation".
        citation: publication of the method.
        level: level of its scores on pictures and on text, e.g. "patch or token", "pixel or token".
        modality: "both", "image" or "text".
        class_specific: False if the scores do not depend on the target.
        signed: True if scores can be negative, which counts against the target; or a function of the complete settings
            that returns this. Maps without signs are drawn in other colours.
        identity: True if the scores contain a 1 at the rows from which the target is read, due to the identity of
            residual connections (R ← R + Ā R from R = I); or a function of the complete settings that returns this.
            This 1 is not relevance.
        anywhere: True if the method needs no attention over all tokens, so that it also explains Swin.
        checkpoint: True if the method propagates through whole blocks, so that these can be recomputed in the backward
            pass (``explain(..., checkpoint=True)``).
    """

    name: str
    summary: str
    settings: dict[str, Any]
    checks: dict[str, Checked] = field(repr=False)
    function: Callable[..., Scores] = field(repr=False)
    _: KW_ONLY
    family: str
    citation: str
    level: str = "patch or token"
    modality: str = "both"
    class_specific: bool = True
    signed: bool | Callable[[dict[str, Any]], bool] = False
    identity: bool | Callable[[dict[str, Any]], bool] = False
    anywhere: bool = False
    checkpoint: bool = False

    def signs(self, settings: dict[str, Any]) -> bool:
        """Return whether scores with these complete settings are signed."""
        return self.signed if isinstance(self.signed, bool) else self.signed(settings)

    def claims(self, settings: dict[str, Any]) -> dict[str, bool]:
        """Return diagnostics of scores with these complete settings: ``signed``, and ``identity`` if True and
        ``class_specific`` if False."""
        has_identity = self.identity if isinstance(self.identity, bool) else self.identity(settings)
        unusual = {"identity": True} if has_identity else {}
        return {"signed": self.signs(settings), **unusual, **({} if self.class_specific else {"class_specific": False})}

    def run(self, task: Any, settings: dict[str, Any]) -> Scores:
        """Compute the scores with complete settings. Samples of several texts get a part for each text that the target
        depends on."""
        from whyformer.methods.texts import each_text, in_groups

        run = functools.partial(self.function, **settings)
        return each_text(task, run(task) if self.family == "perturbation" else in_groups(task, run))

    def complete(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Fill in the defaults of settings.

        Raises:
            InputError: a name is unknown, or a value is out of range.
        """
        for name in settings:
            if name not in self.settings:
                valid = ", ".join(f"{k}={v!r}" for k, v in self.settings.items()) or "none"
                with_it = [m.name for m in list_methods() if name in m.settings]
                others = f"; methods with this setting: {', '.join(with_it)}" if with_it else ""
                listing = f"Its settings and defaults: {valid}{others}"
                raise unknown(f"{self.name} has no setting", name, self.settings, listing)
        full = {**self.settings, **settings}
        for name, (description, check) in self.checks.items():
            try:
                valid_value = check(full[name])
            except (TypeError, ValueError):
                valid_value = False
            if not valid_value:
                raise InputError(
                    f"{self.name}: {name} must be {description}, not {full[name]!r} (default {self.settings[name]!r})"
                )
        return full


def summed(settings: dict[str, Any]) -> bool:
    """Return whether channels or width are summed with signs (``norm="sum"``); a value for ``signed``."""
    return bool(settings["norm"] == "sum")


METHODS: dict[str, Method] = {}


def method(summary: str, **facts: Any) -> Callable[[Callable[..., Scores]], Callable[..., Scores]]:
    """Register a function ``(task, *, setting: type = default, ...) -> Scores`` under its name.

    The settings and their checks are read from the signature: ``bool``, a ``Literal``, or ``Annotated`` with a check.
    A method that scores the model's rows returns :meth:`~whyformer.methods.task.Task.of_rows` of the scores, and need
    not know the places of rows in a picture. Methods for patches get a setting ``affinity`` (False), see
    :mod:`whyformer.methods.affinity`.

    Args:
        summary: description in one line.
        **facts: other fields of :class:`Method`: family, citation, and those that differ from their defaults.
    """
    patches = str(facts.get("level", "patch or token")).startswith("patch or")

    def register(function: Callable[..., Scores]) -> Callable[..., Scores]:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
        settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        checks = {name: check for name in settings if (check := _check_of(hints[name])) is not None}

        if patches:
            settings["affinity"], checks["affinity"] = False, FLAG

        @functools.wraps(function)
        def laid_out(task: Task, **values: Any) -> Scores:
            registered = METHODS[function.__name__]
            if task.options.checkpoint and not registered.checkpoint:
                raise _no_checkpoint(registered.name)
            affinity = patches and values.pop("affinity", False)
            scores = task.lay_out(function(task, **values))
            return spread(task, scores) if affinity else scores

        METHODS[function.__name__] = Method(function.__name__, summary, settings, checks, laid_out, **facts)
        return function

    return register


def _no_checkpoint(name: str) -> MethodNotApplicable:
    """Return the error for a method whose blocks cannot be recomputed."""
    others = ", ".join(sorted(m.name for m in METHODS.values() if m.checkpoint and m.name != "auto"))
    return MethodNotApplicable(
        f"{name} does not support checkpoint=True, because it does not propagate through whole blocks: omit it, or use "
        f"{others}"
    )


def find(name: str) -> Method:
    """Return the method of that name.

    Raises:
        InputError: no method has this name.
    """
    if not isinstance(name, str):
        kind = getattr(name, "__name__", None) or type(name).__name__
        raise InputError(f"method must be a name, such as 'rollout', not the object {kind!r}")
    if name in METHODS:
        return METHODS[name]
    raise unknown("there is no method", name, METHODS, f"Methods: {', '.join(m.name for m in list_methods())}")


class Listing(list[Method]):
    """A list of methods that prints as a table."""

    def __repr__(self) -> str:
        width = max((len(m.name) for m in self), default=0)
        return "\n".join(f"{m.name:{width}}  {m.family:12}  {m.summary}" for m in self)


def list_methods() -> Listing:
    """Return all methods with summary, level, modality, citation and settings, the default and the founding method
    first, the others by name."""
    first = (DEFAULT_METHOD, FOUNDING_METHOD)
    return Listing(METHODS[name] for name in sorted(METHODS, key=lambda n: (n not in first, n != DEFAULT_METHOD, n)))
