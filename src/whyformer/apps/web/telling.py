"""What the page says: pieces of it, and sentences for what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from whyformer.apps.web.work import Stopped
from whyformer.errors import WhyformerError
from whyformer.show.html import render

_LOG = logging.getLogger("whyformer.web")
CANCELLED = "Cancelled."


class Told(gr.Error):  # type: ignore[misc]
    """Work ended with something to tell the visitor, or the program that asked; the log of the server is not for it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, print_exception=False)

    def __str__(self) -> str:
        return str(self.message)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what goes wrong into :class:`Told`: the library's own words, or one sentence while the log has the rest."""
    try:
        yield
    except WhyformerError as error:
        raise Told(" ".join(str(error).split())) from error
    except Stopped as error:
        raise Told(CANCELLED) from error
    except (Told, GeneratorExit):
        raise
    except Exception as error:
        _LOG.exception("the page failed")
        raise Told(
            f"Something went wrong inside whyformer ({type(error).__name__}); the log of the server says more."
        ) from error


def status(words: str, *, error: bool = False, busy: bool = False) -> str:
    """A line for people and screen readers; ``busy`` says that it may take a while."""
    return piece("error", words=words) if error else piece("status", words=words, busy=busy)


def piece(name: str, **facts: Any) -> str:
    """A small piece of the page."""
    return render("web/pieces.html", piece=name, **facts)
