"""Draw explanations: terminal, HTML, pictures. From an Explanation alone; never imports torch or a method."""

from whyformer.show.html import fragment, page
from whyformer.show.image import encode, figure
from whyformer.show.look import Look
from whyformer.show.painting import overlay
from whyformer.show.panels import matrix, panels
from whyformer.show.removal import strip
from whyformer.show.terminal import plain, render
from whyformer.show.tex import latex

__all__ = [
    "Look",
    "encode",
    "figure",
    "fragment",
    "latex",
    "matrix",
    "overlay",
    "page",
    "panels",
    "plain",
    "render",
    "strip",
]
