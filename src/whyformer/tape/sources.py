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

    Args:
        tape: a recorded pass.
        inputs: the tensors that were passed to the model, by name.
        several: names of inputs ``[B, C, N]`` that hold several texts of each sample.
        packed: name -> how many entries along the first axis belong to each sample, such as pictures or patches.
        turned: names of inputs ``[B, D, N]`` whose features are known to lie along axis 1.

    Each element of integers is a row, and each number of a table ``[B, F]`` or a sound ``[B, T]``, not of packed
    patches ``[P, D]``. The features of other inputs lie along the axis that the first layer or convolution that reads
    them sums over, which may be behind views (:func:`~whyformer.tape.axes.find_features`); if that is unknown, along
    the third from the last of four axes or more, as in ``[B, C, H, W]`` and ``[B, T, C, H, W]``, else along the last.
    """
    found = []
    for name, tensor in inputs.items():
        n = tape.number(tensor)
        known = 1 if name in turned else _features(tape, n)
        vectors = tensor.dim() > 2 or name in (packed or ())
        default = -3 if tensor.dim() > 3 else -1 if vectors else None
        features = None if not tape.floating(n) else default if known is None else known
        samples = tuple(range(tensor.shape[:2].numel())) if name in several else None
        if packed and name in packed:
            samples = tuple(i // packed[name] for i in range(len(tensor)))
        found.append(Source(name, n, features, samples))
    return found


_FEATURES: Recent[tuple[int | None]] = Recent(64)


def _features(tape: Tape, n: int) -> int | None:
    key = tape.signature, n
    return (_FEATURES.get(key) or _FEATURES.put(key, (find_features(tape, n),)))[0]
