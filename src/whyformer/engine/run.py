"""Record one forward pass of an unmodified model so that gradients or relevance can be sent back through it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from whyformer.engine.canonizers import Canonical, canonical
from whyformer.engine.mode import Interception
from whyformer.engine.probes import Plan
from whyformer.errors import ModelError
from whyformer.models.readout import output_mask, read_logits
from whyformer.models.structure import find_blocks, first_bad_parameter, sequence_first
from whyformer.rules import multiplier
from whyformer.rules.core import Pass, Ruled, same_memory


class Tap(torch.autograd.Function):
    """The identity; tells a listener what flows back through this place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, listener: Callable[[Tensor], None]) -> Tensor:
        ctx.listener = listener
        return same_memory(x)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        ctx.listener(flows[0])
        return flows[0], None


@dataclass
class Recording:
    """One recorded forward pass.

    Attributes:
        logits: ``[B, C]``.
        run: the state of its backward passes (carrier, ledger).
        roots: the leaves at which the graph begins: the model's input, the first block's input, a block's output ...
        block_inputs: input of each block in order of execution, where asked for.
        block_calls: (module, args, kwargs) of each block, where asked for.
        attentions: number of attentions seen.
        block_sums: block -> ``[B]`` total relevance at its input, after a relevance pass.
        readout: ``[B, N, D]`` gradient at the last block's output, after a gradient pass through it.
    """

    model: nn.Module
    mode: Interception
    run: Pass
    plan: Plan
    logits: Tensor = field(init=False)
    readout: Tensor | None = None
    block_inputs: list[Tensor] = field(default_factory=list)
    block_calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)
    block_sums: dict[int, Tensor] = field(default_factory=dict)
    blocks: int = 0

    @property
    def roots(self) -> list[Tensor]:
        return self.mode.roots

    @property
    def attentions(self) -> int:
        return self.mode.attentions

    def backward(self, seed: Tensor, *, relevance: bool = False, keep: bool = False) -> list[Tensor]:
        """Send ``seed`` ``[B, C]`` back from the logits to the roots.

        Args:
            relevance: carry relevance instead of gradients (relevance carrier only).
            keep: another backward pass will follow.

        Returns:
            What arrives at each root.
        """
        if not self.logits.requires_grad:
            raise ModelError(
                "nothing that the method watches reaches the logits: the model detaches them, "
                "runs under torch.no_grad (activation checkpointing does), or has no attention"
            )
        self.run.relevance = relevance
        self.run.ledger.clear()
        self.readout = None if not relevance else self.readout
        try:
            with torch.enable_grad():
                flows = torch.autograd.grad(self.logits, self.roots, seed, retain_graph=keep, allow_unused=True)
        except CheckpointError as error:
            raise ModelError(
                "activation checkpointing (torch.utils.checkpoint) repeats operations behind whyformer's back. Turn it "
                "off: model.gradient_checkpointing_disable(), or model.set_grad_checkpointing(False) in timm"
            ) from error
        if not keep:
            self._let_go()
        return [torch.zeros_like(r) if f is None else f for r, f in zip(self.roots, flows, strict=True)]

    def _let_go(self) -> None:
        # the graph refers to this recording (listeners, observers) and the recording to the graph: a circle through
        # C++ that Python's collector cannot see, so it has to be cut
        if hasattr(self, "logits"):
            self.logits = self.logits.detach()

    def release(self) -> None:
        """Let go of the graph and of all that was recorded on the way, whether or not it was used."""
        self._let_go()
        self.mode.block_input = self.mode.anchor = None
        for held in (self.mode.roots, self.mode.projections, self.block_inputs, self.block_calls):
            held.clear()


Feed = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module,
    feed: Feed,
    plan: Plan,
    *,
    root: str | None = None,
    root_input: str | int | None = None,
    root_value: Tensor | None = None,
    keep_inputs: bool = False,
    keep_calls: bool = False,
    blocks: list[nn.Module] | None = None,
) -> Recording:
    """Run the model once under the plan's composite; the model is left exactly as it was, also after an error.

    Args:
        feed: (args, kwargs) of the model's forward.
        root: where the graph begins: "input" (the tensor named by ``root_input``), "embedding" (what enters the first
            block), "output" (what leaves the last block), or None (at the plan's first attention, or nowhere).
        root_value: feed this to the root instead of its own value (a point on a path, a noisy copy).
        keep_inputs: keep each block's input (detached from nothing: part of the graph).
        keep_calls: keep each block's module, arguments and output.
        blocks: the blocks meant, where not the model's largest group (a tower of CLIP, a decoder).

    Raises:
        ModelError: NaN in the logits, or no block where one is needed.
    """
    args, kwargs = list(feed[0]), dict(feed[1])
    run = Pass(sequence_first=sequence_first(model))
    mode = Interception(model, plan, run)
    recording = Recording(model, mode, run, plan)
    if root == "input":
        place: Any = args if isinstance(root_input, int) else kwargs
        place[root_input] = mode.add_root(
            (place[root_input] if root_value is None else root_value).detach().clone().requires_grad_()
        )
    blocks = find_blocks(model) if blocks is None else blocks
    mode.grouped = bool(blocks)
    if root in ("embedding", "output") and not blocks:
        raise ModelError(
            "no repeated blocks found in this model (looked for an nn.ModuleList or "
            "nn.Sequential of one class), so the "
            "input of the first block is unknown; put the blocks into an nn.ModuleList"
        )
    graph = plan.first is not None or root is not None or bool(plan.features)
    gradient = torch.enable_grad() if graph else torch.no_grad()
    first = next((t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)), None)
    run.batch = int(first.shape[0]) if first is not None and first.dim() else 1
    with (
        torch.inference_mode(False),
        _hooks(model, blocks, recording, root, root_value, keep_inputs, keep_calls),
        gradient,
        mode,
    ):
        output = model(*args, **kwargs)
    made = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    mode._refuse_hidden_graphs(tuple(made))
    if plan.project is not None:
        for projection in mode.projections.values():
            if projection.norm_input is not None:
                projection.norm_input = batch_first(projection.norm_input, run)
            plan.project(projection)
    recording.logits = read_logits(output, output_mask(model, args, kwargs))
    run.batch = recording.logits.shape[0]
    if not bool(torch.isfinite(recording.logits).all()):
        bad = first_bad_parameter(model)
        cause = (
            f"its parameter '{bad}' holds NaN or infinity"
            if bad
            else "its activations overflow or its input is extreme"
        )
        raise ModelError(
            f"the model's logits are not finite: {cause}. Nothing was explained; check the weights, or use float32"
        )
    return recording


@contextlib.contextmanager
def _hooks(
    model: nn.Module,
    blocks: list[nn.Module],
    recording: Recording,
    root: str | None,
    root_value: Tensor | None,
    keep_inputs: bool,
    keep_calls: bool,
) -> Iterator[None]:
    """Hooks for the length of one run, deaf to other threads: canonical modules, block boundaries, taps."""
    mode, thread = recording.mode, threading.get_ident()
    handles = []
    given: Feed = ((), {})

    def mine(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: function(*a, **k) if threading.get_ident() == thread else None

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal given
        mode.block, given = recording.blocks, (args, kwargs)
        recording.blocks += 1
        name, hidden = _hidden(args, kwargs)
        if hidden is None:
            return None
        if root == "embedding" and mode.block == 0:
            value = batch_first(hidden, recording.run) if root_value is None else root_value
            leaf = mode.add_root(value.detach().clone().requires_grad_())
            hidden = batch_first(leaf.clone(), recording.run, back=True)  # a copy: the block may change it in place
            args, kwargs = _replace(args, kwargs, name, hidden)
        elif mode.block in recording.plan.features:
            if not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_()
                mode.own.add(id(hidden))
                args, kwargs = _replace(args, kwargs, name, hidden)
            mode.block_input = hidden
        elif recording.plan.composite.carrier == "relevance" and hidden.requires_grad:
            hidden = Tap.apply(hidden, _account(recording, mode.block))
            args, kwargs = _replace(args, kwargs, name, hidden)
        if keep_inputs:
            recording.block_inputs.append(batch_first(hidden, recording.run))
        if keep_inputs or keep_calls:  # what is kept stays as it came: the block may change its input in place
            args, kwargs = _replace(args, kwargs, name, hidden.clone())
        return args, kwargs

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if keep_calls:
            recording.block_calls.append((module, *given, hidden.clone()))
        mode.block = None
        if module is not blocks[-1]:
            return None
        if root == "output":
            mode.roots[:] = []
            root_leaf = mode.add_root(batch_first(hidden, recording.run).detach().clone().requires_grad_())
            tapped = batch_first(root_leaf, recording.run, back=True)
        elif hidden.requires_grad:
            tapped = Tap.apply(hidden, _listen(recording))
        else:
            return None
        return tapped if isinstance(output, Tensor) else type(output)([tapped, *output[1:]])

    try:
        for block in blocks:
            handles.append(block.register_forward_pre_hook(mine(enter), with_kwargs=True))
            handles.append(block.register_forward_hook(mine(leave), with_kwargs=True))
        for module in model.modules() if recording.plan.composite.rules else ():
            row = canonical(module)
            if row is not None and row.operation in recording.plan.composite.rules:
                handles.extend(_canonize(module, row, recording, mine))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _listen(recording: Recording) -> Callable[[Tensor], None]:
    def listener(flow: Tensor) -> None:
        if not recording.run.relevance and recording.readout is None:
            recording.readout = recording.run.batch_first(flow)

    return listener


def batch_first(tokens: Tensor, run: Pass, *, back: bool = False) -> Tensor:
    """``[N, B, D]`` of a model that lays out tokens so as ``[B, N, D]`` (or ``back``); anything else as it is."""
    swap = run.sequence_first and tokens.dim() == 3 and tokens.shape[0 if back else 1] == run.batch
    return tokens.transpose(0, 1) if swap else tokens


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


def _canonize(module: nn.Module, row: Canonical, recording: Recording, mine: Callable[..., Any]) -> list[Any]:
    """The module keeps its own forward value (run muted, without graph) and gets the rule of its operation."""
    mode, plan = recording.mode, recording.plan

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if mode.muted == 0 and mode._carries(args, {}):
            mode.muted = id(module)
            torch._C._set_grad_enabled(False)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if mode.muted != id(module):
            return None
        mode.muted = 0
        torch._C._set_grad_enabled(True)
        x = args[0]
        rule = plan.composite.rules[row.operation]
        if plan.composite.carrier == "relevance":
            # the canonical gradient is recomputed: the rule's closed form may be that of another variant
            return Ruled.apply(
                replace(rule, gradient=None), recording.run, _once(output, lambda x: row.compute(module, x)), {}, x
            )
        if row.operation == "rms_norm":
            info = row.info(module)
            return multiplier.detached_norm(x, output, info["weight"], info["eps"], 1, centred=False)
        return multiplier.secant(lambda x: row.compute(module, x), x, output)

    return [module.register_forward_pre_hook(mine(before)), module.register_forward_hook(mine(after))]


def _once(value: Tensor, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``value`` the first time (the module's own result), ``compute`` ever after (its gradient)."""
    state = [value]

    def call(x: Tensor) -> Tensor:
        return state.pop() if state else compute(x)

    return call
