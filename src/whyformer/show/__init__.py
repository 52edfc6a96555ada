"""Draw explanations: terminal, HTML, pictures. From an Explanation alone; never imports torch or a method."""

from whyformer.show.bars import bars, summary, waterfall
from whyformer.show.figures import figure, gallery, matrix, panels, strip
from whyformer.show.film import film
from whyformer.show.html import fragment, page
from whyformer.show.html.heads import heads
from whyformer.show.look import Look
from whyformer.show.painting import overlay
from whyformer.show.paper import encode
from whyformer.show.terminal import plain, render

__all__ = [
    "Look",
    "bars",
    "encode",
    "figure",
    "film",
    "fragment",
    "gallery",
    "heads",
    "matrix",
    "overlay",
    "page",
    "panels",
    "plain",
    "render",
    "strip",
    "summary",
    "waterfall",
]
