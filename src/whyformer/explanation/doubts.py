"""What speaks against a map of one sample, and what is to be known of its input, in sentences that every view shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from whyformer.explanation.features import Features

_LOST, _MISSED, _UNKNOWN = 0.01, 0.05, 0.1


def of_map(scores: Tensor, diagnostics: Mapping[str, Any], sample: int, size: float | None = None) -> list[str]:
    """What speaks against one map, as far as it can be told without asking the model again.

    Args:
        scores: of the sample's features, padding and special tokens left out.
        diagnostics: of the whole batch.
        size: Σ |score| of the sample, special tokens included; that of ``scores`` by default.
    """
    size = float(scores.abs().sum()) if size is None else size
    found = [*degenerate(scores), *not_conserved(diagnostics, sample), *incomplete(diagnostics, sample, size)]
    return [*found, *another_class(diagnostics, sample)]


def of_input(features: Features, sample: int) -> list[str]:
    """What speaks against every map of this input: the model did not read it all, or does not know its words."""
    return [*unread(features, sample), *unknown(features, sample)]


def degenerate(scores: Tensor) -> list[str]:
    """All scores are 0, or all are equal.

    Equal up to rounding, that is: they differ by at most 16 units in the last place of the largest.
    """
    import torch  # not at the top: what draws reads this file, and never needs torch

    if not bool(scores.any()):
        return ["all scores are 0, so this map says nothing"]
    if scores.numel() > 1 and scores.max() - scores.min() <= 16 * torch.finfo(scores.dtype).eps * scores.abs().max():
        return ["all scores are equal, so this map singles nothing out"]
    return []


def promises(diagnostics: Mapping[str, Any]) -> bool:
    """Whether the scores were to add up to something, which the run checked."""
    figure = diagnostics.get("conservation")
    return "completeness" in diagnostics or (isinstance(figure, Mapping) and figure.get("promised") is True)


def not_conserved(diagnostics: Mapping[str, Any], sample: int) -> list[str]:
    """Relevance was lost or gained on the way, by a method whose rules conserve it."""
    figure = diagnostics.get("conservation")
    if not isinstance(figure, Mapping) or figure.get("promised") is not True:
        return []
    error = float(figure["error"][sample])
    if error <= _LOST:
        return []
    return [
        f"relevance is not conserved: its sum over a block's input differs by {_percent(error)} from what it started "
        "with, so compare the order of scores, not their sizes, or use a gradient method"
    ]


def incomplete(diagnostics: Mapping[str, Any], sample: int, size: float) -> list[str]:
    """The scores miss the difference that they should add up to.

    More steps are named as the way out where all of them miss it by less than half of what every other one does.

    Args:
        size: Σ |score|, beside which the miss is judged: the difference itself may be close to 0.
    """
    figure = diagnostics.get("completeness")
    if not isinstance(figure, Mapping):
        return []
    whole, error = abs(float(figure["difference"][sample])), abs(float(figure["error"][sample]))
    if error <= _MISSED * max(whole, size):
        return []
    before = figure.get("error_of_half")
    helped = before is None or error < float(before[sample]) / 2
    way = "set more steps (at most 1,000), or choose another baseline" if helped else (
        "more steps may not help, as doubling them so far did not (the output jumps on the way from the baseline, or "
        "is too steep there): choose another baseline, or a method that follows no path, such as occlusion"
    )
    return [
        f"the scores add up to f(x) − f(baseline) only within {_percent(error / max(whole, size, 1e-12))} of their "
        f"size: {way}"
    ]


def another_class(diagnostics: Mapping[str, Any], sample: int) -> list[str]:
    """The model in half precision does not say what its float32 copy says, in which relevance flowed."""
    figure = diagnostics.get("precision")
    if not isinstance(figure, Mapping) or figure["same_class"][sample]:
        return []
    return [
        f"in {figure['model']} the model says another class than in {figure['relevance']}, in which relevance was "
        "propagated: this sample lies on the edge, or the weights do not bear half precision"
    ]


def unread(features: Features, sample: int) -> list[str]:
    """A part of the text was cut off before the model saw it."""
    if features.texts is None or features.extent is None:
        return []
    text, (begin, end) = features.texts[sample], features.extent[sample]
    missed = " ".join(unread_parts(text, begin, end))
    if not missed:
        return []
    count, unit = _measured(missed, text)
    whole, _ = _measured(text, text)
    return [f"the model did not read {count:,} of {whole:,} {unit}: they were cut off, and have no score"]


def unread_parts(text: str, begin: int, end: int) -> list[str]:
    """What lies before and behind the part of a text that was read, where there are letters."""
    return [part for part in (text[:begin], text[end:]) if part.strip()]


def unknown(features: Features, sample: int) -> list[str]:
    """More than a tenth of the tokens stand for what the model has no token for."""
    if features.unknown is None or features.tokens is None:
        return []
    own = features.tokens[sample] if features.offsets is None else [a for a, b in features.offsets[sample] if a < b]
    count, tokens = len(features.unknown[sample]), len(own)
    if count <= _UNKNOWN * tokens:
        return []
    return [f"{count} of {tokens} tokens are unknown to the model ([UNK]): it cannot know what stands there"]


def counted(text: str, whole: str | None = None) -> str:
    """How long a text is, in words; in characters where the whole of it is written without spaces."""
    count, unit = _measured(text, whole or text)
    return f"{count:,} {unit if count != 1 else unit[:-1]}"


def _measured(text: str, whole: str) -> tuple[int, str]:
    return (len(text), "characters") if len(whole) > 20 * len(whole.split()) else (len(text.split()), "words")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 10 else f"a factor of {share:,.0f}"
