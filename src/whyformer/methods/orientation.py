"""Measure which axis of an input of vectors indexes its features: ``[B, N, D]``, or ``[B, D, N]`` (spectrograms)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import nn

from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.tape.recording import record_call
from whyformer.tape.sources import axis_of_rows


def oriented(model: nn.Module, inputs: Inputs) -> Inputs:
    """Set ``transposed`` of each sequence of vectors by measuring the model, unless the feature extractor has set it.

    Raises:
        InputError: it cannot be measured.
    """
    sides = inputs.sides
    vectors = {n: side for n, side in sides.items() if side.modality == "tensor" and side.tensor.dim() == 3}
    unknown = {n: side for n, side in vectors.items() if side.transposed is None}
    if not unknown:
        return inputs
    axes = {}
    # a model that fails on these inputs fails again later, where the error is reported
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        tape, _ = record_call(model, *inputs.feed, stored=frozenset())
        for name, side in unknown.items():
            axes[name] = axis_of_rows(tape, tape.number(side.tensor))
    for name, axis in axes.items():
        if axis is None:
            raise InputError(
                f"the axis of {name} {list(unknown[name].tensor.shape)} that indexes features cannot be measured on "
                "this model: pass a sound itself with processor= (AutoFeatureExtractor), or wrap the model so that it "
                "takes [B, N, D], one vector per feature"
            )
    return inputs.with_sides(sides | {name: replace(sides[name], transposed=axis == 2) for name, axis in axes.items()})
