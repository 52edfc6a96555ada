"""Draw explanations: terminal, HTML, pictures. From an Explanation alone; never imports torch or a method."""

from whyformer.show.figures import figure, matrix, panels, strip
from whyformer.show.html import fragment, page
from whyformer.show.look import Look
from whyformer.show.painting import overlay
from whyformer.show.paper import encode
from whyformer.show.terminal import plain, render

__all__ = [
    "Look",
    "encode",
    "figure",
    "fragment",
    "matrix",
    "overlay",
    "page",
    "panels",
    "plain",
    "render",
    "strip",
]
