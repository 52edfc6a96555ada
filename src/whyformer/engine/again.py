"""Blocks that keep nothing but what enters them: on the way back each is run again, under the same rules.

torch's own checkpointing repeats operations outside of the interception, so that their rules would be lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine import audit
from whyformer.engine.declared import declared_around
from whyformer.engine.hooks import around, put, tensors_of
from whyformer.engine.isolation import inside, users_hooks_aside, without_autocast
from whyformer.engine.mode import Interception
from whyformer.engine.probes import BlockFlows, Probe
from whyformer.engine.trace import Path
from whyformer.errors import ModelError
from whyformer.models.walking import modules

_STATE = ("attentions", "block", "entered", "last", "norm_before", "number", "statistics", "watch")
_WITHOUT = "leave checkpoint=True out, and explain a shorter text or use half precision where memory is short"


def refuse_unfit(
    blocks: Sequence[nn.Module], probes: Sequence[Probe], feed: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    """Raise where blocks cannot be run again: there are none, a method looks at what is inside of them, or they go on
    from keys and values of an earlier run."""
    if not blocks:
        raise ModelError(
            "checkpoint=True runs the blocks of a model again, and none are found in this one (looked for an "
            f"nn.ModuleList or nn.Sequential of one class): put the blocks into an nn.ModuleList, or {_WITHOUT}"
        )
    odd = next((type(p).__name__ for p in probes if not isinstance(p, BlockFlows)), None)
    if odd is not None:
        raise TypeError(f"the probe {odd} looks into blocks, which are run again")
    if any(map(_is_cache, (*feed[0], *feed[1].values()))):
        raise ModelError(
            "the inputs bring a cache of keys and values, which blocks that are run again would fill once more: give "
            f"the whole text instead, or {_WITHOUT}"
        )


def refuse_inner(output: Any) -> None:
    """Raise where the model's output was made of what is inside of a block."""
    if inner([t for _, t in tensors_of(output)], set(), set()):
        raise ModelError(
            "the model's output is made of what lies inside of a block (keys and values, attention, what a hook on it "
            f"takes up), not of the block's output alone, so what is below is not reached: {_WITHOUT}"
        )


@contextlib.contextmanager
def without_caches(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """The blocks are given no cache: one that is begun in a pass is for a next one, and what a block adds to it, it
    would add again."""

    mine = threading.get_ident()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != mine:
            return None
        return tuple(None if _is_cache(v) else v for v in args), {
            k: None if _is_cache(v) else v for k, v in kwargs.items()
        }

    handles = [block.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def run_again(mode: Interception, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """In this forward pass each of the blocks runs on copies that the graph does not reach; its graph is let go of when
    the next one begins, and made anew when something flows back to its output. The last one's is there still, then."""
    open_calls: list[_Call | None] = []
    latest: _Call | None = None

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [(path, t) for path, t in tensors_of((args, kwargs)) if mode.carries((t,), {})]
        nonlocal latest
        call = None
        if latest is not None:
            latest.graph = None
            latest = None
        if found and not any(open_calls) and not mode.muted and mode.declared.of_module(module) is None:
            call = _Call(mode, module, args, kwargs, [path for path, _ in found], [t for _, t in found])
        open_calls.append(call)
        return (args, kwargs) if call is None else call.begin()

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal latest
        call = open_calls.pop()
        latest = call or latest
        return None if call is None else call.end(output)

    with around(mode, blocks, before, after), without_caches(blocks):
        yield


@dataclass(eq=False)
class _Call:
    """One call of a block.

    Attributes:
        given: what carries among the arguments, until it is run; enters: its places.
        kept: (what entered, how often it had been written to), in that order.
        places: of the outputs that carry; sums: of each of their rows (Σ, Σ|·|); made: they, until they are handed out.
        graph: (the copies of what entered, these outputs, how often those had been written to), until it is let go of.
    """

    mode: Interception
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    enters: list[Path]
    given: list[Tensor]
    kept: list[tuple[Tensor, int]] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    made: tuple[Tensor, ...] = ()
    leaves: list[Tensor] = field(default_factory=list)
    graph: tuple[list[Tensor], list[Tensor], list[int]] | None = None

    def __post_init__(self) -> None:
        mode = self.mode
        self.kept = [(t.detach(), t._version) for t in self.given]
        self.state = {name: getattr(mode, name) for name in _STATE}
        self.attended, self.batch = list(mode.attention_blocks), mode.run.batch
        devices = {"cpu", *(t.device.type for t in self.given)}
        self.autocast = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]

    def begin(self) -> Any:
        """Its arguments, those that carry as copies at which the graph begins."""
        self.leaves = [value.detach().requires_grad_() for value, _ in self.kept]
        feed: Any = (self.args, self.kwargs)
        for path, leaf in zip(self.enters, self.leaves, strict=True):
            leaf._whyformer_inner = True  # type: ignore[attr-defined]
            self.mode.own.add(id(leaf))
            feed = put(feed, path, leaf.clone())  # a copy: the block may change it in place
        return feed

    def end(self, output: Any) -> Any:
        """Its output without its graph."""
        made = [(path, t) for path, t in tensors_of(output) if t.requires_grad]
        leaks = inner([t for _, t in made], {id(leaf) for leaf in self.leaves}, self.mode.own)
        self.graph = self.leaves, [t for _, t in made], [t._version for _, t in made]
        self._let_go()
        name = audit.named(self.mode.model, self.module)
        if leaks:
            raise ModelError(
                f"{name} reads what another block has kept beside its output (shared keys and values, for one), so it "
                f"cannot be run again by itself: {_WITHOUT}"
            )
        given, self.given = self.given, []
        for path in self.enters:
            self.args, self.kwargs = put((self.args, self.kwargs), path, None)
        self.places = [path for path, _ in made]
        with torch._C.DisableTorchFunction():
            self.made = tuple(t.detach() for _, t in made)
            self.sums = [_sums(t) for t in self.made]
            handed: tuple[Tensor, ...] = _Again.apply(self, *given) if made else ()
        for path, tensor in zip(self.places, handed, strict=True):
            tensor._whyformer_seen = True  # type: ignore[attr-defined]
            output = put(output, path, tensor)
        return output

    def back(self, flows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What flows back to what entered, from what flows back to its outputs."""
        if any(value._version != written for value, written in self.kept):
            raise RuntimeError("what entered a block has been modified by an inplace operation")
        leaves, outputs, written = self.graph or ([], [], [])
        self.graph = None
        if not outputs or [t._version for t in outputs] != written:
            outputs = self._again()
            leaves = list(self.leaves)
            self._let_go()
        wanted = [(o, f) for o, f in zip(outputs, flows, strict=True) if f is not None]
        if not wanted:
            return [None] * len(leaves)
        with inside(None):
            ends, starts = [o for o, _ in wanted], [f for _, f in wanted]
            found = torch.autograd.grad(ends, leaves, starts, allow_unused=True)
        if not self.mode.run.keep:
            self.kept, self.args, self.kwargs = [], (), {}
        return list(found)

    def _again(self) -> list[Tensor]:
        """Its outputs, made anew."""
        mode, module = self.mode, self.module
        now = {name: getattr(mode, name) for name in _STATE}
        attended, batch = mode.attention_blocks, mode.run.batch
        vars(mode).update(self.state)
        mode.attention_blocks, mode.run.batch = list(self.attended), self.batch
        try:
            with contextlib.ExitStack() as stack:
                for context in (
                    torch.inference_mode(False), torch.enable_grad(), inside(mode),
                    users_hooks_aside(mode, modules(module)),
                    mode, declared_around(mode, module), without_autocast(mode.composite.carrier),
                ):  # fmt: skip
                    stack.enter_context(context)
                if mode.composite.carrier != "relevance":
                    for device, dtype in self.autocast:
                        stack.enter_context(torch.autocast(device, dtype=dtype))
                with mode.uncounted():
                    args, kwargs = self.begin()
                # not the module itself: what its own hooks do stands before and behind
                made = dict(tensors_of(module.forward(*args, **kwargs)))
        finally:
            vars(mode).update(now)
            mode.attention_blocks, mode.run.batch = attended, batch
        outputs = [made.get(path) for path in self.places]
        for output, (total, size) in zip(outputs, self.sums, strict=True):
            eps = torch.finfo(torch.float32 if output is None else output.dtype).eps
            if output is None or output.shape[: total.dim()] != total.shape or not output.requires_grad:
                break
            if bool(((_sums(output.detach())[0] - total).abs() > 16 * eps * size).any()):
                break
        else:
            return [o for o in outputs if o is not None]
        raise ModelError(
            f"{audit.named(mode.model, module)} gives another output when it is run again (a cache that it fills, or "
            f"noise), so its graph cannot be made anew: {_WITHOUT}"
        )

    def _let_go(self) -> None:
        self.mode.own.difference_update(map(id, self.leaves))
        self.leaves = []


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")


def _sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ, Σ|·|) of each row."""
    rows = value.to(torch.promote_types(value.dtype, torch.float32))
    return (rows.sum(-1), rows.abs().sum(-1)) if rows.dim() else (rows, rows.abs())


class _Again(torch.autograd.Function):
    """A block's outputs for what entered it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        made, call.made = call.made, ()
        return made

    @staticmethod
    def backward(ctx: Any, *flows: Tensor | None) -> Any:
        return (None, *ctx.call.back(flows))


def inner(outputs: Sequence[Tensor], mine: set[int], own: set[int]) -> bool:
    """Whether their graph reaches another leaf of a run than ``mine``: one of ``own``, or where a block's graph began
    that is let go of."""
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in mine and (id(leaf) in own or hasattr(leaf, "_whyformer_inner")):
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return False
