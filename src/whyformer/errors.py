"""Errors that whyformer raises on purpose. Each message names the cause and the remedy."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from textwrap import shorten
from typing import Any


class WhyformerError(Exception):
    """An error that the user can fix; the command line prints it without a traceback and exits with status 2."""


class InputError(WhyformerError, ValueError):
    """The input, the target or a setting is missing, malformed or out of range."""


class NeedsTarget(InputError):  # noqa: N818 - reads better at the call site
    """The target does not fit the model's output; the message lists the targets that do."""


class TooLarge(InputError):  # noqa: N818 - reads better at the call site
    """The explanation needs more memory than is free; the message says which settings to change."""


class ModelError(WhyformerError, ValueError):
    """The model cannot be explained as it is (training mode, TorchScript, NaN weights ...)."""


class ModelChanged(ModelError):  # noqa: N818 - reads better at the call site
    """A parameter of the model was written to while the model was being explained."""


class MethodNotApplicable(WhyformerError, ValueError):  # noqa: N818 - reads better at the call site
    """The method does not apply to this model; the message names methods that do."""


class UnknownOperation(WhyformerError, NotImplementedError):  # noqa: N818
    """The composite has no rule for an operation through which relevance flows.

    Attributes:
        call: index of the call on the tape; None if unknown.
    """

    call: int | None = None


class LoadError(WhyformerError, OSError):
    """A model, a processor or a file could not be loaded."""


class MissingExtra(WhyformerError, ImportError):  # noqa: N818
    """An optional dependency is not installed; the message names the extra."""


def import_optional(package: str, purpose: str, extra: str = "jobs") -> Any:
    """Import an optional dependency.

    Args:
        package: the module to import.
        purpose: the feature that needs it, for the error message.
        extra: the extra of whyformer that installs it.

    Raises:
        MissingExtra: it is not installed; the message names the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtra(f'{purpose} needs the package {name}: pip install "whyformer[{extra}]"') from error


FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that third-party models and processors raise on unsuitable inputs."""

LONGEST = 100
"""Maximum number of characters of a user's text that an error message repeats and compares with known names."""


def without_frames(error: WhyformerError) -> WhyformerError:
    """Drop the tracebacks of an error and its causes, because their frames keep models and tensors alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def on_changed_inputs(error: Exception, who: str = "") -> InputError:
    """Convert an error that the model raised on perturbed inputs; ``who`` is the beginning of the message."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return InputError(f"{who}the model fails on changed inputs ({message})")


def check_type(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise InputError unless ``value`` is an instance of ``kinds``, which ``expected`` describes."""
    if not isinstance(value, kinds):
        raise InputError(f"{name} must be {expected}, not {shorten(repr(value), LONGEST)}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise InputError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")


def check_seed(name: str, value: Any) -> None:
    """Raise InputError unless ``value`` is an integer that a random generator of torch takes."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InputError(f"{name} must be an integer of at most 63 bits, not {value!r:.40}")


def unknown(start: str, name: str, valid: Iterable[str], listing: str) -> InputError:
    """Return the error for an unknown name: "<start> '<name>'. Did you mean '...'? <listing>"."""
    name = name if len(name) <= LONGEST else name[:LONGEST] + "…"  # matching a long text takes minutes
    spelt = {candidate.lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower(), list(spelt), 1)
    hint = f" Did you mean '{spelt[close[0]]}'?" if close else ""
    return InputError(f"{start} '{name}'.{hint} {listing}")
