"""The registry of methods: at once the docs index, the command line's choices and the tests' parametrisation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from whyformer.defaults import DEFAULT_METHOD, FOUNDING_METHOD
from whyformer.errors import InputError, MethodNotApplicable, unknown

if TYPE_CHECKING:
    from whyformer.methods.task import Scores, Task

Check = Callable[[Any], bool]
Checked = tuple[str, Check]  # (what a setting must be, whether it is)


# -- what settings may be --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Between:
    """A check: a number from ``low`` to ``high``. A class, so that a form can read the bounds."""

    low: float
    high: float
    whole: bool = False

    def __call__(self, value: Any) -> bool:
        inside = not isinstance(value, bool) and self.low <= value <= self.high
        return inside and (not self.whole or isinstance(value, int))


@dataclass(frozen=True)
class OneOf:
    """A check: one of some values. A class, so that a form can offer them."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(value == x and type(value) is type(x) for x in self.values)


@dataclass(frozen=True)
class NameOrToken(OneOf):
    """A check: one of some values, or the id of a token."""

    def __call__(self, value: Any) -> bool:
        return super().__call__(value) or (isinstance(value, int) and Between(0, 2**32 - 1, whole=True)(value))


def between(low: float, high: float, *, whole: bool = False) -> Checked:
    """A number from ``low`` to ``high``: no setting is without a bound, for it may come from a stranger's browser."""
    return f"a {'whole ' if whole else ''}number of at least {low} and at most {high:,}", Between(low, high, whole)


def one_of(*values: Any) -> Checked:
    """One of some values."""
    return "one of " + ", ".join(map(repr, values)), OneOf(values)


def name_or_token(*values: Any) -> Checked:
    """One of some values, or the id of a token."""
    return f"{one_of(*values)[0]}, or a token's id", NameOrToken(values)


def is_block(value: Any) -> bool:
    """Whether it can be the number of a block."""
    return isinstance(value, int) and not isinstance(value, bool)


def or_none(checked: Checked) -> Checked:
    """None, or what passes the other check."""
    return f"None or {checked[0]}", lambda v: v is None or checked[1](v)


FLAG: Checked = ("True or False", lambda v: isinstance(v, bool))
BLOCK: Checked = ("a block number (an integer; negative ones count from the last block)", is_block)
OPTIONAL_BLOCK = or_none(BLOCK)

Block = Annotated[int, BLOCK]
OptionalBlock = Annotated[int | None, OPTIONAL_BLOCK]
Natural = Annotated[int, between(0, 2**32 - 1, whole=True)]
OptionalNatural = Annotated[int | None, or_none(between(0, 2**32 - 1, whole=True))]
Count = Annotated[int, between(1, 10_000, whole=True)]
OptionalCount = Annotated[int | None, or_none(between(1, 10_000, whole=True))]
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
        name: what ``explain(method=...)`` takes.
        summary: one line.
        settings: setting -> default.
        checks: setting -> (what it must be, whether a value is), where there is something to check.
        family: "attention", "propagation", "gradient" or "perturbation".
        citation: where it was published.
        level: level of its scores on pictures and on text, e.g. "patch or token", "pixel or token".
        modality: "both", "image" or "text".
        class_specific: False if the scores do not depend on the target.
        signed: True if scores below 0 are possible and speak against the target, or a function of the complete settings
            that says so. A map without such scores is shown in other colours, which claim less.
        identity: True if the scores hold a 1 for the rows at which the target is read, from the identity of residual
            connections (R ← R + Ā R from R = I); or such a function. That 1 is no relevance.
        anywhere: True if it needs no attention over all tokens (so it also explains Swin).
        checkpoint: True if what it sends back goes through whole blocks, so that these may be run again on the way
            (``explain(..., checkpoint=True)``).
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
        """Whether scores made with these complete settings have a sign."""
        return self.signed if isinstance(self.signed, bool) else self.signed(settings)

    def claims(self, settings: dict[str, Any]) -> dict[str, bool]:
        """What diagnostics say of scores made with these complete settings: ``signed``, and ``identity`` and
        ``class_specific`` where they are not as with most methods."""
        holds_one = self.identity if isinstance(self.identity, bool) else self.identity(settings)
        unusual = {"identity": True} if holds_one else {}
        return {"signed": self.signs(settings), **unusual, **({} if self.class_specific else {"class_specific": False})}

    def run(self, task: Any, settings: dict[str, Any]) -> Scores:
        """Its scores, with complete settings; of several texts of each sample, a part for each that the target depends
        on."""
        from whyformer.methods.texts import each_text, in_groups

        run = functools.partial(self.function, **settings)
        return each_text(task, run(task) if self.family == "perturbation" else in_groups(task, run))

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Settings with defaults filled in; refuses unknown names and values out of range."""
        for name in given:
            if name not in self.settings:
                valid = ", ".join(f"{k}={v!r}" for k, v in self.settings.items()) or "none"
                having = [m.name for m in list_methods() if name in m.settings]
                others = f"; methods that have one: {', '.join(having)}" if having else ""
                said = f"Its settings and defaults: {valid}{others}"
                raise unknown(f"{self.name} has no setting", name, self.settings, said)
        full = {**self.settings, **given}
        for name, (wanted, check) in self.checks.items():
            try:
                good = check(full[name])
            except (TypeError, ValueError):
                good = False
            if not good:
                raise InputError(
                    f"{self.name}: {name} must be {wanted}, not {full[name]!r} (default {self.settings[name]!r})"
                )
        return full


def summed(settings: dict[str, Any]) -> bool:
    """Whether channels or width are summed with their signs (``norm="sum"``): for ``signed`` of a method."""
    return bool(settings["norm"] == "sum")


METHODS: dict[str, Method] = {}


def method(summary: str, **facts: Any) -> Callable[[Callable[..., Scores]], Callable[..., Scores]]:
    """Register a function ``(task, *, setting: type = default, ...) -> Scores`` under its own name; ``facts`` are those
    of :class:`Method`: its family, its citation, and what differs from the defaults.

    Its signature says which settings there are and what they may be: ``bool``, a ``Literal``, or ``Annotated`` with a
    check. What the registry runs is the function and then :meth:`~whyformer.methods.task.Task.lay_out`, so that methods
    know token rows only, not where these lie in a picture. Methods of patches get a setting ``affinity`` (False), see
    :mod:`whyformer.methods.affinity`.
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
        def laid_out(task: Task, **chosen: Any) -> Scores:
            own = METHODS[function.__name__]
            if task.options.checkpoint and not own.checkpoint:
                raise _looks_inside(own.name)
            wanted = patches and chosen.pop("affinity", False)
            scores = task.lay_out(function(task, **chosen))
            return _spread(task, scores) if wanted else scores

        METHODS[function.__name__] = Method(function.__name__, summary, settings, checks, laid_out, **facts)
        return function

    return register


def _looks_inside(name: str) -> MethodNotApplicable:
    """Why blocks cannot be run again for a method."""
    others = ", ".join(sorted(one.name for one in METHODS.values() if one.checkpoint and one.name != "auto"))
    return MethodNotApplicable(
        f"{name} sends nothing back through whole blocks that could be run again on the way: leave checkpoint=True "
        f"out, or use {others}"
    )


def _spread(task: Task, scores: Scores) -> Scores:
    from whyformer.methods.affinity import spread

    return spread(task, scores)


def find(name: str) -> Method:
    """The method of that name, or an error that lists the names."""
    if not isinstance(name, str):
        given = getattr(name, "__name__", None) or type(name).__name__
        raise InputError(f"a method is given by its name, such as 'rollout', not as the object {given!r}")
    if name in METHODS:
        return METHODS[name]
    raise unknown("there is no method", name, METHODS, f"Methods: {', '.join(m.name for m in list_methods())}")


class Listing(list[Method]):
    """Methods in a list that prints as a table."""

    def __repr__(self) -> str:
        wide = max((len(m.name) for m in self), default=0)
        return "\n".join(f"{m.name:{wide}}  {m.family:12}  {m.summary}" for m in self)


def list_methods() -> Listing:
    """All methods, the default and the founding method first, the others by name: summary, level, modality, citation,
    and settings with their defaults."""
    first = (DEFAULT_METHOD, FOUNDING_METHOD)
    return Listing(METHODS[name] for name in sorted(METHODS, key=lambda n: (n not in first, n != DEFAULT_METHOD, n)))
