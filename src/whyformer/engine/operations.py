"""The operations as the engine runs them: of what kind each is, and how a call of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from whyformer.engine import readings
from whyformer.program.operations import KINDS, is_in_place, names, operation_name, out_of_place, plain_name

__all__ = ["KINDS", "Operation", "is_in_place", "names", "operation", "operation_name", "out_of_place"]


@dataclass(frozen=True)
class Operation:
    """An operation, its kind (:data:`whyformer.program.operations.KINDS`), and its reader: (row, function, arguments
    by position, by name) -> :class:`~whyformer.engine.readings.Reading`."""

    name: str
    kind: str = ""
    read: readings.Reader = readings.first


READERS: dict[str, readings.Reader] = {}


def _read(names: str, reader: readings.Reader) -> None:
    READERS.update(dict.fromkeys(names.split(), reader))


_read("amax max", readings.largest)
_read("scatter_reduce", readings.scattered)
_read("linear", readings.layer)
_read("conv1d conv2d conv3d", readings.convolution)
_read("conv_transpose1d conv_transpose2d conv_transpose3d", readings.transposed)
_read("grid_sample", readings.sampled)
_read("fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn", readings.transform)
_read("linalg_solve_triangular", readings.system)
_read("matmul bmm mm mv", readings.matmul)
_read("einsum", readings.einsum)
_read("add sub", readings.addition)
_read("mul", readings.multiplication)
_read("div", readings.division)
_read("index_add scatter_add", readings.gathered)
_read("clamp clamp_min clamp_max", readings.bounded)
_read("gelu", readings.gelu)
_read("pow", readings.power)
_read("layer_norm rms_norm", readings.norm)
_read("softmax", readings.softmax)


@lru_cache(maxsize=4096)
def operation(name: str) -> Operation:
    """The row of an operation; one that works in place (``relu_``) has the row of what it does, unless its own."""
    base = plain_name(name)
    return Operation(base, KINDS.get(base, ""), READERS.get(base, readings.first))
