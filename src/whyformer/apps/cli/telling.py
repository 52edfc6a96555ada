"""How commands speak: results as text or JSON, and errors as sentences with an exit status.

Status 0: done. 1: a bug. 2: something that the user can mend. 3 (:data:`INCOMPLETE`): done, but something is missing
from the result. 130: interrupted.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from whyformer.errors import WhyformerError

INCOMPLETE = 3
"""Exit status of work that was finished and written, but lacks something it should have: samples without figures (a
method failed, or a map was constant or NaN), or files of a report that cannot be read."""


def console() -> Any:
    """Where results go, without rich's own ideas of what to colour."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and control characters."""
    from whyformer.show.words import visible

    return visible(re.sub(r"\s+", " ", str(error)).strip()) or type(error).__name__


@contextmanager
def errors_as_sentences(debug: bool) -> Iterator[None]:
    """Status 2 and one sentence for what the user can mend, 1 for a bug; third-party chatter is for --debug."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    status = 2
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            yield
            return
    except WhyformerError as error:
        if debug:
            raise
        message = one_line(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except (typer.Exit, typer.Abort, BrokenPipeError):  # the last: who read this has gone; typer ends quietly
        raise
    except Exception as error:
        if debug:
            raise
        status, message = 1, f"whyformer failed ({type(error).__name__}: {one_line(error)}); --debug shows where"
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
