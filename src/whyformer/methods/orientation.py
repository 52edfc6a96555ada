"""Which axis of an input of vectors runs over its features: ``[B, N, D]``, or ``[B, D, N]`` of most spectrograms."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import nn

from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.tape.axes import axis_of_rows
from whyformer.tape.recording import record_call


def oriented(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with ``turned`` of each sequence of vectors as it was measured on the model; what the feature
    extractor said of its own stays.

    Raises:
        InputError: that cannot be measured.
    """
    sides = {name: inputs.side(name) for name in (inputs.name, *inputs.others)}
    unknown = {n: s for n, s in sides.items() if s.turned is None and s.modality == "tensor" and s.tensor.dim() == 3}
    if not unknown:
        return inputs
    found = {}
    # a model that fails on these inputs does so again where that is reported
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        tape, _ = record_call(model, *inputs.feed, hold=frozenset())
        for name, side in unknown.items():
            found[name] = axis_of_rows(tape, tape.number(side.tensor))
    for name, axis in found.items():
        if axis is None:
            raise InputError(
                f"along which axis of {name} {list(unknown[name].tensor.shape)} its features stand cannot be measured "
                "on this model: give a sound itself with processor= (AutoFeatureExtractor), or wrap the model so that "
                "it takes [B, N, D], one vector for each feature"
            )
    turned = {name: axis == 2 for name, axis in found.items()}
    others = {n: replace(one, turned=turned.get(n, one.turned)) for n, one in inputs.others.items()}
    return replace(inputs, turned=turned.get(inputs.name, inputs.turned), others=others)
