"""What explanations, answers and comparisons have in common: they show themselves wherever they are."""

from __future__ import annotations

import sys


class Displayed:
    """A result that shows itself in a notebook as HTML and in a terminal in colours.

    A subclass has ``__rich__``, what rich prints, and ``_repr_html_``, what a notebook shows.
    """

    def show(self) -> None:
        """Show the result: in a notebook as a card, elsewhere as coloured text on standard output."""
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)  # type: ignore[union-attr]
            return
        from rich.console import Console

        Console().print(self)
