"""Results as JSON values, the same from every entrance: which command made them, and the picture that maps lie on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whyformer.explanation.versions import record, versions
from whyformer.show import painting
from whyformer.show.html import data_uri

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_LONGEST = 672  # pixels, of the picture in a JSON file


def explanations(command: str, results: Sequence[Explanation], model: str, title: str) -> dict[str, Any]:
    """The record of explanations of one input."""
    made = [e.to_dict() for e in results]
    return record(command, versions=versions(), model=model, input=title, explanations=made)


def picture_of(results: Sequence[Explanation]) -> dict[str, Any]:
    """What the maps lie on, so that a JSON file can be drawn again on its own."""
    import numpy as np

    for e in results:
        shown = painting.base(e)
        if shown is not None:
            shown = shown.convert("RGB")
            shown.thumbnail((_LONGEST, _LONGEST))
            return {"picture": str(data_uri(painting.png(np.asarray(shown))))}
    return {}
