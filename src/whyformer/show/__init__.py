"""Draw explanations: terminal, HTML, pictures. From an Explanation alone; never imports torch or a method."""

from whyformer.show.html import fragment, page
from whyformer.show.image import encode, figure, overlay
from whyformer.show.terminal import plain, render

__all__ = ["encode", "figure", "fragment", "overlay", "page", "plain", "render"]
