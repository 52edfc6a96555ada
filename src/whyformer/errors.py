"""Errors that whyformer raises on purpose: each names the cause and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WhyformerError(Exception):
    """Something the user can mend; the command line prints it without a traceback and exits with status 2."""


class InputError(WhyformerError, ValueError):
    """The input, the target or a setting is missing, malformed or out of range."""


class TooLarge(InputError):  # noqa: N818 - reads better at the call site
    """The explanation took more memory than there is; the message says what to change."""


class ModelError(WhyformerError, ValueError):
    """The model cannot be explained as it is (training mode, checkpointing, TorchScript, NaN weights ...)."""


class MethodNotApplicable(WhyformerError, ValueError):  # noqa: N818 - reads better at the call site
    """The method has no meaning on this model; the message names methods that do apply."""


class UnknownOperation(WhyformerError, NotImplementedError):  # noqa: N818
    """An operation carries relevance and the composite has no rule for it.

    Attributes:
        call: number of the call on the tape; None if it is unknown.
    """

    call: int | None = None


class LoadError(WhyformerError, OSError):
    """A model, a processor or a file could not be loaded."""


class MissingExtra(WhyformerError, ImportError):  # noqa: N818
    """An optional dependency is not installed; the message names the extra."""


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
"""What a model or a processor of others raises on inputs that it was not made for."""

LONGEST = 100
"""Characters of what a user wrote that an error compares with names, and repeats."""


def without_frames(error: WhyformerError) -> WhyformerError:
    """The error, and those that caused it, without the frames that raised them, which keep models and tensors."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def on_changed_inputs(error: Exception, who: str = "") -> InputError:
    """What a model's own error is told as where it was fed inputs that a method had changed."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return InputError(f"{who}the model fails on inputs that were changed ({said})")


def unknown(start: str, name: str, known: Iterable[str], listing: str) -> InputError:
    """The error for a name that does not exist: "<start> '<name>'. Did you mean '...'? <listing>"."""
    name = name if len(name) <= LONGEST else name[:LONGEST] + "…"  # likenesses of a long text take minutes
    spelt = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), 1)
    hint = f" Did you mean '{spelt[close[0]]}'?" if close else ""
    return InputError(f"{start} '{name}'.{hint} {listing}")
