"""Messages of the page: status lines, pieces of HTML, and sentences for errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from whyformer.apps.web.visitor_session import Stopped
from whyformer.errors import WhyformerError
from whyformer.show.html import render

_LOG = logging.getLogger("whyformer.web")
CANCELLED = "Cancelled."


class PageError(gr.Error):  # type: ignore[misc]
    """An error that is shown to the visitor, or to the program that called, and is not logged."""

    def __init__(self, message: str) -> None:
        super().__init__(message, print_exception=False)

    def __str__(self) -> str:
        return str(self.message)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn exceptions into :class:`PageError`; of exceptions that are not whyformer's, only the log has the message."""
    try:
        yield
    except WhyformerError as error:
        raise PageError(" ".join(str(error).split())) from error
    except Stopped as error:
        raise PageError(CANCELLED) from error
    except (PageError, GeneratorExit):
        raise
    except Exception as error:
        _LOG.exception("the page failed")
        raise PageError(
            f"Something went wrong inside whyformer ({type(error).__name__}); see the log of the server."
        ) from error


def status(words: str, *, error: bool = False, busy: bool = False) -> str:
    """Return the status line, which screen readers announce; ``busy`` while work goes on."""
    return piece("error", words=words) if error else piece("status", words=words, busy=busy)


def piece(name: str, **facts: Any) -> str:
    """Render a piece of the template ``web/pieces.html``."""
    return render("web/pieces.html", piece=name, **facts)
