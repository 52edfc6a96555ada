"""Output of commands: progress, results as text or JSON, and errors as messages with an exit status.

Status 0: done. 1: a bug. 2: an error that the user can correct. 3 (:data:`INCOMPLETE`): done, but the result is
incomplete. 130: interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from whyformer.errors import WhyformerError

if TYPE_CHECKING:
    from rich.progress import Progress

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
INCOMPLETE = 3
"""Exit status of an incomplete result: samples without figures (a method failed, or a map was constant or NaN), or
files of a report that cannot be read."""


@contextmanager
def errors_as_sentences(debug: bool, resumes: bool = False) -> Iterator[None]:
    """Print errors as one line and exit with status 2, or 1 for a bug.

    Args:
        debug: raise errors, and show warnings of other libraries.
        resumes: True if the command continues when it is run again.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted{'; the same command goes on where this one stopped' if resumes else ''}", err=True)
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):  # BrokenPipeError: the reader has ended
        raise
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, WhyformerError) or (isinstance(error, OSError) and error.errno in _FULL)
        bug = f"whyformer failed ({type(error).__name__}: {one_line(error)}); --debug shows where"
        typer.echo(f"error: {one_line(error) if known else bug}", err=True)
        raise typer.Exit(2 if known else 1) from error


def one_line(text: object) -> str:
    """Return a text or the message of an error without line breaks and control characters."""
    from whyformer.show.words import visible

    return visible(re.sub(r"\s+", " ", str(text)).strip()) or type(text).__name__


class Bars:
    """Progress bars of a command (see :meth:`Printer.working`)."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    @contextmanager
    def step(self, description: str) -> Iterator[None]:
        """Show a step of unknown length, such as loading a model."""
        yield from self.track((None,), description)

    def track(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        """Wrap an iterable in a progress bar, for ``progress=`` of the library's functions."""
        task = self._bars.add_task(description, total=total)
        try:
            for item in work:
                if isinstance(item, str):  # a text that is being generated
                    self._bars.update(task, description=f"{description}: … {one_line(item)[-40:]}")
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)


Debug = Annotated[bool, Option("--debug", help="Show the traceback of errors.")]


@dataclass(frozen=True, kw_only=True)
class Printer:
    """Prints the output of a command; its fields are options."""

    quiet: Annotated[bool, Option("--quiet", "-q", help="Print errors and the output of --json only.")] = False
    as_json: Annotated[bool, Option("--json", help="Print only the result, as JSON.")] = False
    debug: Debug = False

    def result(self, facts: dict[str, Any], text: Any, files: Sequence[Path] | None = None) -> None:
        """Print the result of a command.

        Args:
            facts: the result for ``--json``.
            text: the result without ``--json``, a text or an object of rich.
            files: files that were written.
        """
        if self.as_json:
            typer.echo(json.dumps(facts if files is None else {**facts, "files": [str(path) for path in files]}))
        elif not self.quiet:
            from rich.console import Console

            from whyformer.show.words import visible

            console = Console(highlight=False, emoji=False)  # rich colours nothing by itself
            for line in (text, *(f"wrote {path}" for path in files or ())):
                if isinstance(line, str):
                    console.print(visible(line, keep="\n"), markup=False, soft_wrap=True)
                else:
                    console.print(line)

    def note(self, text: str) -> None:
        """Print a line on standard error."""
        if not self.quiet:
            typer.echo(text, err=True)

    @contextmanager
    def working(self) -> Iterator[Bars]:
        """Show progress bars on standard error, removed at the end. There are none if quiet, or if standard error is no
        terminal."""
        from rich import progress
        from rich.console import Console
        from rich.text import Text

        class Rate(progress.ProgressColumn):
            """Steps per second."""

            def render(self, task: progress.Task) -> Text:
                speed = task.finished_speed or task.speed
                return Text(f"{speed:.3g}/s" if speed and (task.total or 0) > 1 else "")

        columns = (
            progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20), progress.MofNCompleteColumn(), Rate(), progress.TimeElapsedColumn(),
            progress.TextColumn("left"), progress.TimeRemainingColumn(),
        )
        silent = self.quiet or not sys.stderr.isatty()
        with progress.Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as bars:
            yield Bars(bars)
