"""The recorded pass of a model with its rows, program, attentions and streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.tape.attentions import Attention, find_attentions
from whyformer.tape.labelling import find_rows
from whyformer.tape.program import Program, read_program
from whyformer.tape.recording import record
from whyformer.tape.rows import Rows
from whyformer.tape.sources import find_sources
from whyformer.tape.streams import Stream, find_streams
from whyformer.tape.values import Tape

INPUTS_WITHOUT_ROWS = {"attention_mask", "token_type_ids", "pixel_mask"}


@dataclass
class RecordedStructure:
    tape: Tape
    rows: Rows
    program: Program
    attentions: list[Attention]
    streams: list[Stream]

    @property
    def stream(self) -> Stream:
        """The only stream."""
        (stream,) = self.streams
        return stream

    def maps(self, attention: Attention) -> Tensor:
        """``[B, H, Q, K]``"""
        return attention.arrange(*(self.tape[n] for n in attention.maps))

    def input_scores(self, name: str, scores: Tensor) -> Tensor:
        """Scores ``[B, M]`` of the tokens or patches of an input, from scores ``[B, N]`` of the rows of the only stream."""
        return self.stream_scores(name, self.stream, scores)

    def stream_scores(self, name: str, stream: Stream, scores: Tensor) -> Tensor:
        inside = set(stream.rows.flatten().tolist())
        family = [f for f in self.rows.families if f.source == name and set(f.numbers.flatten().tolist()) <= inside][-1]
        return scores.new_zeros(len(self.rows)).index_put((stream.rows,), scores)[family.numbers]


def logits(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


def read_structure(model: nn.Module, inputs: Any, pick: Callable[[Any], Tensor] = logits) -> RecordedStructure:
    named = inputs if isinstance(inputs, dict) else {"x": inputs}
    tape, output = record(model, **inputs) if isinstance(inputs, dict) else record(model, inputs)
    rows = find_rows(tape, find_sources(tape, {name: t for name, t in named.items() if name not in INPUTS_WITHOUT_ROWS}))
    program = read_program(tape, rows.roots.values(), tape.number(pick(output)))
    attentions = find_attentions(program, tape, rows)
    return RecordedStructure(tape, rows, program, attentions, find_streams(program, tape, rows, attentions))


def one_hot(reading: RecordedStructure, targets: list[int]) -> Tensor:
    """∂target/∂logits"""
    seed = torch.zeros(reading.program.shapes[reading.program.output], dtype=torch.float64)
    seed[range(len(targets)), targets] = 1
    return seed
