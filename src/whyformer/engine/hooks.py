"""Hooks at the borders of blocks: where the graph begins, what is kept, what is listened to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whyformer.engine.isolation import here
from whyformer.engine.probes import BlockCalls, BlockFlows, BlockInputs, Entering, Reached, Until, asked
from whyformer.engine.shares import GraphShares
from whyformer.engine.trace import Path, Trace, is_lookup
from whyformer.models.facts import Block, Feed, facts
from whyformer.models.structure import block_groups
from whyformer.program.blocks import ProgramBlock
from whyformer.rules.core import Pass

if TYPE_CHECKING:
    from whyformer.engine.mode import Interception
    from whyformer.engine.run import Ends, Recording, Root


@contextlib.contextmanager
def block_hooks(
    recording: Recording, blocks: Sequence[Block], root: str | None, entries: Mapping[str, Root],
    values: Mapping[str, Tensor], ends: Ends | None,
) -> Iterator[None]:  # fmt: skip
    """Count the blocks, begin the graph at ``entries`` or behind the last block (``root`` "output"), keep what the
    probes ask for, and listen to what flows back."""
    mode = recording.mode
    trace, until, shares = asked(mode.probes, Trace), asked(mode.probes, Until), asked(mode.probes, GraphShares)
    inputs, calls = asked(mode.probes, BlockInputs), asked(mode.probes, BlockCalls)
    entering = asked(mode.probes, Entering)
    flows = asked(mode.probes, BlockFlows)
    given: Any = ((), {})
    passed: dict[int, _Passing] = {}
    lasts: set[Block] = {*(group[-1] for group in block_groups(mode.model).values()), *blocks[-1:]}

    def enter(module: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal given
        mode.block, mode.last = recording.blocks, module in lasts
        if calls is not None:
            given, calls.blocks[:] = (args, kwargs), blocks
        recording.blocks += 1
        name, hidden = _hidden(args, kwargs)
        if trace is not None:
            trace.entered(mode.block, module, hidden)
        mode.entered = torch.Size() if hidden is None else hidden.shape
        if hidden is None:
            return None
        if until is not None and until.call == mode.block:
            until.found.append((batch_first(hidden, mode.run), dict(recording.begun)))
            raise Reached
        if entering is not None and mode.block == 0:
            hidden = laid_out_as(hidden, entering.rows, mode.run)
        starting = [entry for entry, one in entries.items() if one.place == mode.block]
        if starting:
            for entry in starting:
                hidden = begin(entry, entries[entry], hidden)
        elif mode.features is not None and mode.block in mode.features.blocks:
            if not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_()
                mode.own.add(id(hidden))
            mode.block_input = hidden
        elif mode.composite.carrier == "relevance" and hidden.requires_grad:
            if recording.cuts is not None:
                leaf = hidden.detach().clone().requires_grad_()
                mode.own.add(id(leaf))
                recording.cuts.append((hidden, leaf))
                hidden = leaf
            hidden = _tapped(hidden, _account(recording, mode.block))
        if flows is not None and mode.block in flows.blocks and hidden.requires_grad:
            passing = passed[mode.block] = _Passing(recording, flows, mode.block, hidden.detach())
            hidden = passing.copy = _tapped(hidden, passing)
        if inputs is not None:
            inputs.found.append(mode.run.home(batch_first(hidden, mode.run)))
        if inputs is not None or calls is not None:  # what is kept stays as it came: the block may work in place
            hidden = hidden.clone()
        return _replace(args, kwargs, name, hidden)

    def begin(name: str, one: Root, hidden: Tensor) -> Tensor:
        """The rows that enter a block, those of one input (or all) beginning the graph."""
        value = values.get(name, batch_first(hidden, mode.run))
        leaf = recording.begun[name] = mode.add_root(value.detach().clone().requires_grad_())
        rows = laid_out_as(hidden, leaf.clone(), mode.run)  # a copy: the block may change it in place
        if one.rows is None:
            return rows
        mine = one.rows.to(leaf.device).reshape(*one.rows.shape, *[1] * (leaf.dim() - 2)).expand_as(leaf)
        return torch.where(laid_out_as(hidden, mine, mode.run), rows, hidden)

    def leave(module: Block, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        found = tensors_of(output)
        number = mode.block
        unrooted = mode.features is not None and number in mode.features.blocks and mode.norm_before != number
        if unrooted and mode.block_input is not None:  # a block without attention, or whose attention was not seen
            mode.add_root(mode.block_input)
            mode.block_input = None
        mode.block, mode.last = None, False
        if number in passed:
            passed.pop(number).left()
        if not found or number is None:
            return None
        if calls is not None:
            calls.found.append((module, *given, found[0][1].clone()))
        if trace is not None:
            trace.left(number, found)
        if shares is not None:
            for _, hidden in found:
                shares.settle(hidden)
        wanted = [(None, found[0][0])] if ends is None and module is blocks[-1] else []
        wanted += [(name, path) for name, (call, path) in (ends or {}).items() if call == number]
        for name, path in wanted:
            hidden = dict(found)[path]
            if root == "output":
                if ends is None:  # of a block that is called again the last call counts
                    mode.roots.clear()
                value = values.get("", batch_first(hidden, mode.run))
                leaf = mode.add_root(value.detach().clone().requires_grad_())
                output = put(output, path, laid_out_as(hidden, leaf.clone(), mode.run))
                recording.ended.append(name)
            elif hidden.requires_grad:
                recording.outputs[name] = _tapped(hidden, _listen(recording, name))
                output = put(output, path, recording.outputs[name])
        return output if wanted else None

    with around(mode, blocks, enter, leave):
        yield


@contextlib.contextmanager
def around(
    mode: Interception, blocks: Sequence[Block], before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """``before(block, args, kwargs)`` and ``after(block, args, kwargs, output)`` of each block that runs in this run:
    of a module nearer to its own forward than all other hooks, such as those by which transformers keeps hidden states
    for a decoder of masks; of a part of the program behind the calls at its borders."""

    def own(function: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            if here.run is not mode or mode.aside:
                return None
            with mode.uncounted():
                return function(*args)

        return hook

    handles = []
    try:
        for block in dict.fromkeys(blocks):
            if isinstance(block, ProgramBlock):
                mode.border(block, own(before), own(after))
                continue
            handles.append(block.register_forward_pre_hook(own(before), with_kwargs=True))
            handles.append(block.register_forward_hook(own(after), with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_block(
    mode: Interception, calls: BlockCalls, number: int, given: Feed, feed: Feed, begin: Callable[[], None]
) -> Any:
    """What a block call returns when it runs once more, in this mode: a module on what it was given; a part of the
    program, or a module whose maps are known by their place in the program, with all that lies before it, on what the
    model was fed. ``begin`` is called where it begins."""
    block, known = calls.found[number][0], facts(mode.model, feed, any_roots=True)
    if isinstance(block, nn.Module) and not known.maps:
        begin()
        return block(*given[0], **given[1])
    mode.facts, found, begun = known, list[Any](), -1

    def before(*_: Any) -> None:
        nonlocal begun
        begun += 1
        if begun == number:
            begin()

    def after(*left: Any) -> None:
        if begun == number:
            found.append(left[-1])
            raise Reached

    with contextlib.suppress(Reached), around(mode, calls.blocks, before, after):
        mode.model(*feed[0], **feed[1])
    return found[0]


def batch_first(tokens: Tensor, run: Pass) -> Tensor:
    """``[N, B, D]`` of a model that lays out tokens so as ``[B, N, D]``; anything else as it is."""
    swap = run.sequence_first and tokens.dim() == 3 and tokens.shape[1] in (run.batch, run.rows)
    return tokens.transpose(0, 1) if swap else tokens


def laid_out_as(like: Tensor, rows: Tensor, run: Pass) -> Tensor:
    """``[B, N, D]`` as the model lays out what is ``like`` it."""
    return rows if batch_first(like, run) is like else rows.transpose(0, 1)


def _tapped(hidden: Tensor, listener: Callable[[Tensor], None]) -> Tensor:
    """The same values; the listener is told what flows back through this place."""
    copy = hidden.clone()
    if copy.requires_grad:  # a parameter (learned queries) does not: nothing flows back to it
        copy.register_hook(listener)
    return copy


def _listen(recording: Recording, name: Any) -> Callable[[Tensor], None]:
    def listener(flow: Tensor) -> None:
        if not recording.run.relevance and name not in recording.readouts:
            recording.readouts[name] = recording.run.home(recording.run.batch_first(flow))

    return listener


@dataclass(eq=False)
class _Passing:
    """Tells of what enters a block when something flows back to it.

    Attributes:
        value: what enters; copy: what the block is given in its place, and may change.
    """

    recording: Recording
    flows: BlockFlows
    block: int
    value: Tensor
    copy: Tensor | None = None

    def __post_init__(self) -> None:
        self.written = self.value._version

    def left(self) -> None:
        """The block has run: where it left its copy as it was, which its graph holds, that stands for both."""
        copy, self.copy = self.copy, None
        if copy is not None and copy._version == 0:
            self.value, self.written = copy.detach(), 0

    def __call__(self, flow: Tensor) -> None:
        run = self.recording.run
        if self.value._version != self.written:
            raise RuntimeError("what entered a block has been modified by an inplace operation")
        self.flows.seen(self.block, *(run.home(batch_first(t, run)) for t in (self.value, flow)))


def _account(recording: Recording, block: int) -> Callable[[Tensor], None]:
    def listener(flow: Tensor) -> None:
        if recording.run.relevance:
            recording.block_sums[block] = recording.run.home(recording.run.per_sample(flow))

    return listener


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | int | None, Tensor | None]:
    """The hidden states among a block's arguments."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return i, value
    for name in ("hidden_states", "x", "src", "input"):
        if isinstance(kwargs.get(name), Tensor):
            return name, kwargs[name]
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3:
            return name, value
    return None, None


def tensors_of(output: Any) -> list[tuple[Path, Tensor]]:
    """(where it stands, tensor) of the numbers that a block returns, in tuples, lists and mappings too; the hidden
    states are the first of them."""
    if isinstance(output, Tensor):
        return [((), output)] if output.is_floating_point() else []
    listed = isinstance(output, list | tuple)
    items = output.items() if isinstance(output, Mapping) else enumerate(output) if listed else ()
    return [((key, *path), found) for key, value in items for path, found in tensors_of(value)]


def put(output: Any, path: Path, value: Tensor | None) -> Any:
    """The same output with the tensor at ``path`` replaced."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(output, Mapping):
        changed = copy.copy(output)
        changed[key] = put(output[key], rest, value)  # type: ignore[index]
        return changed
    listed = [put(one, rest, value) if i == key else one for i, one in enumerate(output)]
    return type(output)(*listed) if hasattr(output, "_fields") else type(output)(listed)


def _replace(args: tuple[Any, ...], kwargs: dict[str, Any], name: str | int | None, value: Tensor) -> Any:
    if isinstance(name, int):
        return (*args[:name], value, *args[name + 1 :]), kwargs
    return args, {**kwargs, str(name): value}


def lookups(recording: Recording, wanted: Mapping[Any, str], values: Mapping[str, Tensor]) -> Callable[..., Any] | None:
    """Lets the graph begin at some look-ups, by their numbers."""
    if not wanted:
        return None
    count = 0

    def watch(mode: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        nonlocal count
        if not is_lookup(name, args):
            return result
        count += 1
        own = wanted.get(count - 1)
        if own is None:
            return result
        value = values.get(own, result)
        leaf = recording.begun[own] = mode.add_root(value.detach().clone().requires_grad_())
        with mode:
            return leaf.clone()  # the model may change it in place

    return watch
