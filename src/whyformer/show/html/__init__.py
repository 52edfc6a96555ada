"""HTML, the only place that makes it: Jinja templates with autoescape, and the functions that fill them.

What is made of an explanation needs nothing else: no script, no style sheet, no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from whyformer.show.html.environment import asset, render
from whyformer.show.html.parts import data_uri
from whyformer.show.layout import sections
from whyformer.show.look import Look

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

__all__ = ["asset", "data_uri", "fragment", "page", "render"]


def fragment(e: Explanation, **look: Any) -> str:
    """A card for each sample, for notebooks: the map, its scale, and the top classes; inline styles only.

    Args:
        **look: options of :class:`~whyformer.show.look.Look`, for pictures.
    """
    return render("cards.html", samples=list(e), look=Look.of(look))


def page(explanations: Explanation | Iterable[Explanation], title: str = "whyformer", **look: Any) -> str:
    """A whole document: for pictures a table of methods x classes, for text one line a method under each class."""
    return render("page.html", sections=sections(explanations), title=title, look=Look.of(look))
