"""Hooks at the borders of blocks: where the graph begins, what is kept, what is listened to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from whyformer.engine.isolation import here
from whyformer.engine.probes import BlockCalls, BlockInputs, asked
from whyformer.rules.core import Pass

if TYPE_CHECKING:
    from whyformer.engine.run import Recording


@contextlib.contextmanager
def block_hooks(
    recording: Recording, blocks: list[nn.Module], root: str | None, root_value: Tensor | None
) -> Iterator[None]:
    """Count the blocks, begin the graph at ``root``, keep what the probes ask for, and listen to what flows back."""
    mode = recording.mode
    inputs, calls = asked(mode.probes, BlockInputs), asked(mode.probes, BlockCalls)
    given: Any = ((), {})

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal given
        mode.block, given = recording.blocks, (args, kwargs)
        recording.blocks += 1
        name, hidden = _hidden(args, kwargs)
        if hidden is None:
            return None
        if root == "embedding" and mode.block == 0:
            value = batch_first(hidden, mode.run) if root_value is None else root_value
            leaf = mode.add_root(value.detach().clone().requires_grad_())
            hidden = batch_first(leaf.clone(), mode.run, back=True)  # a copy: the block may change it in place
        elif mode.features is not None and mode.block in mode.features.blocks:
            if not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_()
                mode.own.add(id(hidden))
            mode.block_input = hidden
        elif mode.composite.carrier == "relevance" and hidden.requires_grad:
            hidden = _tapped(hidden, _account(recording, mode.block))
        if inputs is not None:
            inputs.found.append(batch_first(hidden, mode.run))
        if inputs is not None or calls is not None:  # what is kept stays as it came: the block may work in place
            hidden = hidden.clone()
        return _replace(args, kwargs, name, hidden)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if calls is not None:
            calls.found.append((module, *given, hidden.clone()))
        mode.block = None
        if module is not blocks[-1]:
            return None
        if root == "output":
            mode.roots[:] = []
            leaf = mode.add_root(batch_first(hidden, mode.run).detach().clone().requires_grad_())
            tapped = batch_first(leaf, mode.run, back=True)
        elif hidden.requires_grad:
            tapped = _tapped(hidden, _listen(recording))
        else:
            return None
        return tapped if isinstance(output, Tensor) else type(output)([tapped, *output[1:]])

    def own(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: function(*a, **k) if here.run is mode and not mode.aside else None

    handles = []
    try:
        for block in blocks:
            handles.append(block.register_forward_pre_hook(own(enter), with_kwargs=True))
            handles.append(block.register_forward_hook(own(leave), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def batch_first(tokens: Tensor, run: Pass, *, back: bool = False) -> Tensor:
    """``[N, B, D]`` of a model that lays out tokens so as ``[B, N, D]`` (or ``back``); anything else as it is."""
    swap = run.sequence_first and tokens.dim() == 3 and tokens.shape[0 if back else 1] == run.batch
    return tokens.transpose(0, 1) if swap else tokens


def _tapped(hidden: Tensor, listener: Callable[[Tensor], None]) -> Tensor:
    """The same values; the listener is told what flows back through this place."""
    copy = hidden.clone()
    copy.register_hook(listener)
    return copy


def _listen(recording: Recording) -> Callable[[Tensor], None]:
    def listener(flow: Tensor) -> None:
        if not recording.run.relevance and recording.readout is None:
            recording.readout = recording.run.batch_first(flow)

    return listener


def _account(recording: Recording, block: int) -> Callable[[Tensor], None]:
    def listener(flow: Tensor) -> None:
        if recording.run.relevance:
            recording.block_sums[block] = recording.run.per_sample(flow)

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


def _replace(args: tuple[Any, ...], kwargs: dict[str, Any], name: str | int | None, value: Tensor) -> Any:
    if isinstance(name, int):
        return (*args[:name], value, *args[name + 1 :]), kwargs
    return args, {**kwargs, str(name): value}
