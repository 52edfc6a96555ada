"""What an explanation of a text will take, told before it is begun where that is more memory than is free."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from whyformer.errors import MemoryWarning, TooLarge
from whyformer.explanation.counts import amount, in_bytes
from whyformer.inputs.feed import place_of
from whyformer.models.memory import free_memory, total_memory, widths

if TYPE_CHECKING:
    from whyformer.methods.registry import Method
    from whyformer.methods.sources import Sources

WORTH_A_LOOK = 2**28
"""Less is not looked at: reading how much is free takes longer."""
MAPS = 3.0
"""So many maps ``[B, H, N, N]`` of one block are there at a time where a method looks at maps."""


@dataclass(frozen=True)
class Needs:
    """Bytes that an explanation takes beside the model: about (``graph`` and ``maps``), and ``least`` of all."""

    graph: float
    maps: float
    least: float

    @property
    def total(self) -> float:
        return self.graph + self.maps


def needs(task: Sources, method: Method, settings: Mapping[str, Any], checkpoint: bool) -> Needs | None:
    """What a method takes for a text: the graph grows with the tokens N (of each block what :func:`widths` says, with
    ``checkpoint`` of one block), maps of attention with N². None where the input is no text, and for methods that
    only run forward on changed inputs.
    """
    inputs, blocks = task.inputs, task.all_blocks
    if method.family == "perturbation" or inputs.modality != "text" or inputs.tensor.dim() != 2 or not blocks:
        return None
    config = getattr(task.model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    heads = getattr(config, "num_attention_heads", None)
    reading = not method.checkpoint and not method.class_specific  # no graph: the blocks' layers are of no account
    width, numbers = (0, 0) if reading and heads else widths(blocks)
    heads = heads or max(1, width // 64)
    rows, tokens = inputs.tensor.shape
    size = next((p.dtype.itemsize for p in task.model.parameters() if p.dtype.is_floating_point), 4)
    copies = settings.get("samples", settings.get("steps", 1)) if "batch_size" in settings else 1
    each = size * rows * min(copies, max(1, settings.get("batch_size", 1) // rows))  # bytes of a number of each token
    one_map = each * heads * tokens**2
    kept, entering = each * tokens * numbers, each * tokens * width * len(blocks)
    if method.checkpoint:
        written = getattr(config, "_attn_implementation", None) == "eager"
        maps = MAPS * one_map if method.name == "gim" or written else 0
        if checkpoint:
            return Needs(kept / len(blocks) + 2 * entering, maps, entering)  # a copy is where something listens
        return Needs(kept, maps * (len(blocks) if written else 1), 4 * entering)
    of_blocks = each * len(blocks) * tokens**2  # without heads
    if not method.class_specific:
        return Needs(0, MAPS * one_map + of_blocks, of_blocks)
    return Needs((2 if method.relevance else 1) * kept, MAPS * one_map + of_blocks, of_blocks + 4 * entering)


def foresee(task: Any, method: Method, settings: Mapping[str, Any]) -> None:
    """Warn where a text's explanation would take more memory than is free.

    Raises:
        TooLarge: it would take more than there is at all, at the least; or, whatever is free, more than
            ``task.progress.memory``, where a server allows each of its visitors so much.
    """
    if task.replay is not None and task.replay.made:  # the pass is there
        return
    found = needs(task, method, settings, task.checkpoint)
    allowed = getattr(task.progress, "memory", math.inf)
    if found is None or found.total < min(WORTH_A_LOOK, allowed):
        return
    place = place_of(task.model)
    free, there = free_memory(place), total_memory(place)
    if found.total <= min(free, allowed):
        return
    tokens = amount(task.inputs.tensor.shape[1], "token")
    many = f" in a batch of {task.inputs.tensor.shape[0]}" if task.inputs.tensor.shape[0] > 1 else ""
    room = f"{in_bytes(free)} of {in_bytes(there)} are free"
    room = f"{in_bytes(allowed)} are allowed here" if found.total > allowed else room
    said = (
        f"{method.name} of {tokens}{many} takes about {in_bytes(found.total)} of memory, of which "
        f"{in_bytes(found.maps)} for maps of attention, and {room}: "
        f"{_ways_out(task, method, settings)}"
    )
    if found.least > there or found.total > allowed:
        raise TooLarge(said)
    warnings.warn(said, MemoryWarning, stacklevel=2)


def _ways_out(task: Any, method: Method, settings: Mapping[str, Any]) -> str:
    ways = []
    if task.inputs.tensor.shape[0] > 1:
        ways.append("fewer texts at once")
    if method.checkpoint and not task.checkpoint:
        less = needs(task, method, settings, True)
        assert less is not None
        ways.append(f"checkpoint=True (about {in_bytes(less.total)})")
    if not method.checkpoint:
        ways.append("a method without maps (attnlrp, input_x_gradient), with checkpoint=True if need be")
    if settings.get("batch_size", 1) > 1:
        ways.append("batch_size=1")
    if any(p.dtype in (torch.float32, torch.float64) for p in task.model.parameters()):
        ways.append("half precision (dtype='bfloat16')")
    return f"take {', '.join([*ways, 'or a shorter text'])}"
