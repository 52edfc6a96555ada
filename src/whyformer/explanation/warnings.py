"""Warnings about the map and the input of one sample, as sentences that every view shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from whyformer.explanation.features import Features

_LOST, _MISSED, _UNKNOWN, _ROUNDED = 0.01, 0.05, 0.1, 0.01


def of_map(scores: Tensor, diagnostics: Mapping[str, Any], sample: int, size: float | None = None) -> list[str]:
    """Return warnings about one map that need no further forward pass.

    Args:
        scores: scores of the sample, without padding and special tokens.
        diagnostics: diagnostics of the whole batch.
        sample: index of the sample.
        size: Σ |score| of the sample, special tokens included; Σ |score| of ``scores`` by default.
    """
    size = float(scores.abs().sum()) if size is None else size
    warnings = [*degenerate(scores), *not_conserved(diagnostics, sample), *amplified(scores, diagnostics, sample, size)]
    return [*warnings, *incomplete(diagnostics, sample, size), *another_class(diagnostics, sample)]


def of_input(features: Features, sample: int) -> list[str]:
    """Return warnings that hold for every map of an input: truncated text and unknown tokens."""
    return [*unread(features, sample), *unknown(features, sample)]


def degenerate(scores: Tensor) -> list[str]:
    """Warn if all scores are 0 or equal: they differ by at most 16 ε · max |score|."""
    import torch  # here because drawing imports this module and does not need torch

    if not bool(scores.any()):
        return ["all scores are 0, so this map shows no effect of the input"]
    if scores.numel() > 1 and scores.max() - scores.min() <= 16 * torch.finfo(scores.dtype).eps * scores.abs().max():
        return ["all scores are equal, so this map highlights nothing"]
    return []


def promises(diagnostics: Mapping[str, Any]) -> bool:
    """Return True if the method promises a sum of scores, which the run checked."""
    figure = diagnostics.get("conservation")
    return "completeness" in diagnostics or (isinstance(figure, Mapping) and figure.get("promised") is True)


def not_conserved(diagnostics: Mapping[str, Any], sample: int) -> list[str]:
    """Warn if relevance was lost or gained although the rules of the method conserve it."""
    figure = diagnostics.get("conservation")
    if not isinstance(figure, Mapping) or figure.get("promised") is not True:
        return []
    error = float(figure["error"][sample])
    if error <= _LOST:
        return []
    return [
        f"relevance is not conserved: its sum over a block's input differs by {_percent(error)} from its initial "
        "value, so compare the order of scores, not their sizes, or use a gradient method"
    ]


def amplified(scores: Tensor, diagnostics: Mapping[str, Any], sample: int, size: float) -> list[str]:
    """Warn if rounding may change the scores by more than 1 %, estimated by Σ |score| / |ΣR_start| · ε: relevance grows
    where it is divided by sums whose terms nearly cancel, and so do the rounding errors of these sums."""
    import torch  # as in degenerate

    figure = diagnostics.get("conservation")
    if not isinstance(figure, Mapping) or "scale" not in figure:
        return []
    growth = size / max(float(figure["scale"][sample]), 1e-300)
    error = growth * torch.finfo(scores.dtype).eps
    if error <= _ROUNDED:
        return []
    exact = growth * torch.finfo(torch.float64).eps <= _ROUNDED
    return [
        f"relevance grows by a factor of {growth:.0e} on its way to the input, at sums whose terms nearly cancel, so "
        f"rounding may change the scores by {_percent(error) if error < 1 else 'more than their size'}: use another "
        "method, such as transformer_attribution" + (", or run the model in float64 (model.double())" if exact else "")
    ]


def incomplete(diagnostics: Mapping[str, Any], sample: int, size: float) -> list[str]:
    """Warn if the scores do not add up to f(x) − f(baseline): within 5 % of their size, and within half of the
    difference or 1 % of their size.

    More steps are advised if the error of all steps is less than half the error of every second step.

    Args:
        diagnostics: diagnostics of the whole batch.
        sample: index of the sample.
        size: Σ |score|. The error is not only compared with f(x) − f(baseline), which may be close to 0.
    """
    figure = diagnostics.get("completeness")
    if not isinstance(figure, Mapping):
        return []
    difference, error = abs(float(figure["difference"][sample])), abs(float(figure["error"][sample]))
    total = max(difference, size, 1e-12)
    if error <= min(_MISSED * total, max(difference / 2, _LOST * total)):
        return []
    before = figure.get("error_of_half")
    helped = before is None or error < float(before[sample]) / 2
    way = "set more steps (at most 1,000), or choose another baseline" if helped else (
        "more steps may not help, as doubling them did not (the output jumps or is very steep on the path from the "
        "baseline): choose another baseline, or a method without a path, such as occlusion"
    )
    return [
        f"the scores add up to f(x) − f(baseline) only within {_percent(error / total)} of Σ|score|, of which "
        f"f(x) − f(baseline) is {_percent(difference / total)}: {way}"
    ]


def another_class(diagnostics: Mapping[str, Any], sample: int) -> list[str]:
    """Warn if the model in half precision predicts another class than the copy that relevance was propagated in."""
    figure = diagnostics.get("precision")
    if not isinstance(figure, Mapping) or figure["same_class"][sample]:
        return []
    return [
        f"in {figure['model']} the model predicts another class than in {figure['relevance']}, in which relevance was "
        "propagated: the sample is close to the decision boundary, or the weights are not suited to half precision"
    ]


def unread(features: Features, sample: int) -> list[str]:
    """Warn if the text was truncated."""
    if features.texts is None or features.extent is None:
        return []
    text, (begin, end) = features.texts[sample], features.extent[sample]
    inside = [] if features.skipped is None else [text[a:b] for a, b in features.skipped[sample]]
    missed = " ".join([*inside, *unread_parts(text, begin, end)])
    if not missed:
        return []
    count, unit = _measured(missed, text)
    length, _ = _measured(text, text)
    return [f"the model did not read {count:,} of {length:,} {unit}: they were truncated and have no score"]


def unread_parts(text: str, begin: int, end: int) -> list[str]:
    """Return the parts of a text before and after the characters that were read, unless they are blank."""
    return [part for part in (text[:begin], text[end:]) if part.strip()]


def unknown(features: Features, sample: int) -> list[str]:
    """Warn if more than a tenth of the tokens are unknown to the model."""
    if features.unknown is None or features.tokens is None:
        return []
    count, offsets = len(features.unknown[sample]), features.offsets
    tokens = len(features.tokens[sample]) if offsets is None else sum(begin < end for begin, end in offsets[sample])
    if count <= _UNKNOWN * tokens:
        return []
    return [f"{count} of {tokens} tokens are unknown to the model ([UNK]): it cannot tell them apart"]


def counted(text: str, reference: str | None = None) -> str:
    """Return the length of a text in words, or in characters if ``reference`` is written without spaces."""
    count, unit = _measured(text, reference or text)
    return f"{count:,} {unit if count != 1 else unit[:-1]}"


def _measured(text: str, reference: str) -> tuple[int, str]:
    return (len(text), "characters") if len(reference) > 20 * len(reference.split()) else (len(text.split()), "words")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 10 else f"a factor of {share:,.0f}"
