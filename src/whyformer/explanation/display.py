"""Display of results in notebooks and terminals, the name of their method, and settings as text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


class Displayable:
    """A result that is displayed as HTML in notebooks and as coloured text in terminals.

    Subclasses define ``__rich__`` for terminals and ``_repr_html_`` for notebooks.
    """

    def show(self) -> None:
        """Display the result as a card in a notebook, or as coloured text on standard output."""
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)  # type: ignore[union-attr]
            return
        from rich.console import Console

        Console().print(self)


def actual_method(e: Explanation) -> str:
    """Return the method of the map; for ``auto`` the method that it chose."""
    choice = e.diagnostics.get("auto")
    name = choice.get("method") if isinstance(choice, Mapping) else None
    return name if isinstance(name, str) else e.method


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings like keyword arguments of a call."""
    return ", ".join(f"{k}={v}" for k, v in settings.items())
