"""Walks over a recorded pass with a single stream of attending rows.

    attended = attended_pass(map_pass, "input_ids")
    walked = attended.walk(seed, [GRADIENT, deep_taylor()], on_map, blocks)

``on_map`` is called at each map, the last block first, with the flow that arrives under each composite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whyformer.errors import ModelError
from whyformer.methods.map_passes import MapPass
from whyformer.methods.passes import record_pass
from whyformer.tape.streams import Stream

__all__ = ["AttendedPass", "attended_pass"]


@dataclass(frozen=True, eq=False)
class AttendedPass(MapPass):
    """A recorded pass of a single stream of rows, which attend to one another once in each block. Other inputs are
    constant.

    Attributes:
        first: index of the stream's first block, the number of blocks before the last merge of rows.
    """

    first: int = 0

    @property
    def stream(self) -> Stream:
        """The stream."""
        (stream,) = self.ends.values()
        return stream

    def features(self, value: int, tensor: Tensor) -> Tensor:
        """Return :meth:`features_of` the stream."""
        return self.features_of(self.stream, value, tensor)

    def laid_out(self, value: int, features: Tensor) -> Tensor:
        """Return features ``[B, N, D]`` in the layout of a value, with zeros outside of rows; the inverse of
        :meth:`features`."""
        rows, numbers, empty = self.layout.rows, self.stream.rows, torch.zeros_like(self.recording.tape[value])
        shape = rows.features(value, empty, numbers).shape
        return rows.with_features(value, empty, numbers, features.reshape(shape))

    def with_value(self, value: int, other: Tensor) -> AttendedPass:
        """Record another pass of the model in which a value is replaced by one of the same shape.

        Raises:
            ModelError: the model then runs other operations.
        """
        recording = self.recording
        changed = record_pass(recording.model, recording.feed, recording.samples, {value: lambda _: other})
        if changed.tape.signature != recording.tape.signature:
            raise ModelError("the model runs other operations if the output of its blocks is changed")
        return replace(self, recording=changed)


def attended_pass(map_pass: MapPass, name: str) -> AttendedPass | None:
    """Return a pass with its single stream of attending rows; None if there is no such stream.

    Args:
        map_pass: a recorded pass.
        name: an input in the stream.
    """
    layout, read_out = map_pass.layout, [s for s in map_pass.ends.values() if name in s.names]
    if len(read_out) != 1 or not read_out[0].attends_to_itself:
        return None
    (stream,) = read_out
    names = () if len(layout.streams) == 1 else stream.names
    first = sum(len(s.blocks) for s in layout.earlier(stream))
    attentions = {i: block.attentions[0] for i, block in enumerate(stream.blocks, first)}
    shared = map_pass.sources, map_pass.input_of
    fields = map_pass.recording, layout, map_pass.read_logits, attentions, {"": stream}, *shared
    return AttendedPass(*fields, names, first)
