"""The inputs of a model as sources of rows."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from whyformer.tape.axes import find_features
from whyformer.tape.caches import Recent
from whyformer.tape.rows import Source
from whyformer.tape.values import Tape

__all__ = ["find_sources"]


def find_sources(
    tape: Tape,
    inputs: Mapping[str, Tensor],
    several: Container[str] = (),
    packed: Mapping[str, int] | None = None,
    turned: Container[str] = (),
) -> list[Source]:
    """Return sources for the inputs of a model.

    In integer inputs, each element is a row; so is each number of a table ``[B, F]`` or a sound ``[B, T]``, but not of
    packed patches ``[P, D]``. Other inputs have features along the axis over which the first layer or convolution that
    reads them sums, possibly after views (:func:`~whyformer.tape.axes.find_features`). If this axis is unknown, it is
    the third from the last for inputs with at least four axes, as in ``[B, C, H, W]`` and ``[B, T, C, H, W]``, else the
    last.

    Args:
        tape: a recorded pass.
        inputs: the tensors that were passed to the model, by name.
        several: names of inputs ``[B, C, N]`` that hold several texts for each sample.
        packed: maps the name of an input to the number of entries along its first axis that belong to each sample, such
            as pictures or patches.
        turned: names of inputs ``[B, D, N]`` whose features lie along axis 1.
    """
    sources = []
    for name, tensor in inputs.items():
        n = tape.number(tensor)
        key = tape.signature, n
        measured = 1 if name in turned else _FEATURES.once(key, lambda n=n: find_features(tape, n))
        vectors = tensor.dim() > 2 or name in (packed or ())
        default = -3 if tensor.dim() > 3 else -1 if vectors else None
        features = None if not tape.floating(n) else default if measured is None else measured
        samples = tuple(range(tensor.shape[:2].numel())) if name in several else None
        if packed and name in packed:
            samples = tuple(i // packed[name] for i in range(len(tensor)))
        sources.append(Source(name, n, features, samples))
    return sources


_FEATURES: Recent[int | None] = Recent(64)
