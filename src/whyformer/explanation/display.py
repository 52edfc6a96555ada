"""Display of results in notebooks and terminals."""

from __future__ import annotations

import sys


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
