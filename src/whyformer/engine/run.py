"""Record one forward pass of an unmodified model so that gradients or relevance can be sent back through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from whyformer.engine import again, audit
from whyformer.engine.declared import declared_around
from whyformer.engine.hooks import batch_first, block_hooks, lookups
from whyformer.engine.isolation import inside, users_hooks_aside, without_autocast
from whyformer.engine.mode import Interception
from whyformer.engine.probes import BlockCalls, BlockInputs, Probe, Projections
from whyformer.engine.trace import Path
from whyformer.errors import ModelError, Strayed
from whyformer.models.ends import confirmed, end_of, watching
from whyformer.models.facts import Block, facts, groups_of
from whyformer.models.output import Output, with_leaves
from whyformer.models.precision import in_half_precision, single, widened
from whyformer.models.readout import refuse_infinite, row_of
from whyformer.models.structure import as_written, sequence_first
from whyformer.models.walking import modules
from whyformer.program.blocks import ProgramBlock
from whyformer.rules.core import Composite, Pass

Feed = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Root:
    """Where the graph begins for one input of the model.

    Attributes:
        kind: "input" (the tensor itself), "entry" (what enters a block) or "lookup" (rows looked up in a table).
        place: position or name of the input; number of the block call; number of the look-up.
        rows: ``[B, N]`` True at rows that are the input's, where those of others enter the block with them.
    """

    kind: str
    place: str | int
    rows: Tensor | None = None


Ends = Mapping[Any, tuple[int, Path]]
Starts = list[tuple[Tensor, Tensor]]


@dataclass
class Recording:
    """One recorded forward pass.

    Attributes:
        logits: ``[B, C]`` the row that the target is about.
        read: (tensor of the model's output, leaf in its place) from which ``logits`` were read.
        started: ``[B]`` (Σ, Σ|·|) of what the last backward pass started from at those tensors.
        run: the state of its backward passes (carrier, ledger).
        roots: the leaves at which the graph begins: the model's input, the first block's input, a block's output ...
        attentions: number of attentions seen.
        block_sums: block -> ``[B]`` total relevance at its input, after a relevance pass.
        readouts: ``[B, N, D]`` gradient at each end after a gradient pass: of those that were asked for, by name, or
            (None) at the last block's output.
        outputs: these outputs themselves, where the graph goes through them.
        begun: name -> the leaf at which the graph begins for that input.
        moved: whether a root was fed another value than its own.
        half: (type, logits) of a model in half precision, whose float32 copy was recorded (relevance carrier).
        ended: for root "output", the names of the ends, in the order of the roots.
        cuts: where the graph is cut for :meth:`sweep`, (what enters a block, the leaf that enters it in its place);
            None where it is whole.
        output: what the model returned, cut off from the graph as ``read`` says.
        kept: whether every backward pass leaves the graph for another one.
    """

    mode: Interception
    logits: Tensor = field(init=False)
    read: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    output: Output = field(init=False)
    kept: bool = False
    started: tuple[Tensor, Tensor] = field(init=False)
    readouts: dict[Any, Tensor] = field(default_factory=dict)
    outputs: dict[Any, Tensor] = field(default_factory=dict)
    begun: dict[str, Tensor] = field(default_factory=dict)
    moved: bool = False
    half: tuple[str, Tensor] | None = None
    ended: list[Any] = field(default_factory=list)
    cuts: Starts | None = None
    block_sums: dict[int, Tensor] = field(default_factory=dict)
    blocks: int = 0

    @property
    def run(self) -> Pass:
        return self.mode.run

    @property
    def readout(self) -> Tensor | None:
        """``[B, N, D]`` gradient at the last block's output."""
        return next(iter(self.readouts.values()), None)

    @property
    def roots(self) -> list[Tensor]:
        return self.mode.roots

    @property
    def attentions(self) -> int:
        return self.mode.attentions

    def backward(
        self, seed: Tensor, *, relevance: bool = False, keep: bool = False, at: Starts | None = None
    ) -> list[Tensor]:
        """Send ``seed`` ``[B, C]`` back from the logits to the roots, as ∂(seed · logits) at the tensors they are of;
        what arrives at each root is returned.

        Args:
            relevance: carry relevance instead of gradients (relevance carrier only).
            keep: another backward pass will follow.
            at: (tensor of the graph, what starts there) instead of the logits and the seed.
        """
        keep = keep or self.kept
        roots = self.roots
        self._prepare(relevance, keep)
        with self._going_back():
            starts = self.starts(seed) if at is None else at
            flows = torch.autograd.grad(
                [t for t, _ in starts], roots, [s for _, s in starts], retain_graph=keep, allow_unused=True
            )
        if not keep:
            self._let_go()
        found = list(zip(roots, flows, strict=True))
        reached = [f is not None and (self.moved or bool(f.any())) for r, f in found if r.dim()]
        if reached and not any(reached) and bool(seed.any()):
            raise ModelError(
                "nothing arrives at the input: the model cuts it off from the target on the way (detach, no_grad, "
                "rounding, an integer kernel), or all derivatives are 0 (a head of zeros; too small for float16: use "
                "bfloat16). Remove what cuts it off, explain another target, or use occlusion"
            )
        return [torch.zeros_like(r) if f is None else f for r, f in found]

    def back(self, seed: Tensor) -> dict[str, Tensor]:
        """Input -> what the composite carries back to the leaf at which the graph begins for it."""
        flows = self.backward(seed, relevance=self.mode.composite.carrier == "relevance")
        place = {id(root): i for i, root in enumerate(self.roots)}
        return {name: flows[place[id(leaf)]] for name, leaf in self.begun.items()}

    def sweep(self, seed: Tensor) -> bool:
        """Send gradients and relevance back together, block by block from the last, so that what is observed of one
        block can be reduced before the next is reached; the graph was recorded with ``cut``.

        Returns:
            Whether that was right: False, and nothing is worth anything, where a block's input is read behind the block
            too (rules need all the relevance of a tensor at once).
        """
        self._prepare(False, True)
        cuts = self.cuts or []
        with self._going_back():
            starts = self.starts(seed)
            outputs, flows = [t for t, _ in starts], {relevance: [s for _, s in starts] for relevance in (False, True)}
            for below in range(len(cuts), -1, -1):
                targets = [*(leaf for _, leaf in reversed(cuts[:below])), *self.roots]
                for relevance in (False, True):
                    self.run.relevance = relevance
                    found = torch.autograd.grad(
                        outputs, targets, flows[relevance], retain_graph=True, allow_unused=True
                    )
                    if any(flow is not None for flow in found[1:below]):
                        return False
                    if below:
                        flows[relevance] = [torch.zeros_like(targets[0]) if found[0] is None else found[0]]
                outputs = [cuts[below - 1][0]] if below else []
        self._let_go()
        return True

    def _prepare(self, relevance: bool, keep: bool) -> None:
        if not self.logits.requires_grad:
            raise ModelError(
                "nothing that the method watches reaches the logits: the model (or a target of your own) detaches "
                "them, runs under torch.no_grad (activation checkpointing does), rounds them to integers (quantised "
                "activations: explain the model before it was quantised, or use occlusion), or has no attention"
            )
        self.run.relevance, self.run.keep = relevance, keep
        self.run.ledger.clear()
        if not relevance:
            self.readouts.clear()

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        """Autograd's errors on the way back as ours."""
        try:
            with inside(None), torch.enable_grad(), without_autocast(self.mode.composite.carrier):
                yield
        except CheckpointError as error:
            raise ModelError(
                "activation checkpointing (torch.utils.checkpoint) repeats operations behind whyformer's back. Turn it "
                "off: model.gradient_checkpointing_disable(), or model.set_grad_checkpointing(False) in timm"
            ) from error
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise ModelError(
                "the model changes a tensor in place after an operation has read it, and the value that was read is "
                "needed on the way back. Write that step out of place (x = x + y, not x += y), or use another method"
            ) from error

    def starts(self, seed: Tensor) -> Starts:
        """(tensor of the output, what starts there) for those that the target reads."""
        leaves = [leaf for _, leaf in self.read]
        found = torch.autograd.grad(self.logits, leaves, seed, retain_graph=True, allow_unused=True)
        starts = [(t, s) for (t, _), s in zip(self.read, found, strict=True) if s is not None]
        read = [s.detach() for _, s in starts if not s.dim() or len(s) == len(seed)]
        rows = [s.reshape(len(seed), -1) for s in read] or [seed.flatten(1)]
        self.started = (
            torch.stack([r.sum(-1) for r in rows]).sum(0), torch.stack([r.abs().sum(-1) for r in rows]).sum(0)
        )  # fmt: skip
        return starts

    def _let_go(self) -> None:
        # the graph refers to this recording (listeners, observers) and the recording to the graph (by a cache of keys
        # and values too): a circle through C++ that Python's collector cannot see, so it has to be cut
        if hasattr(self, "logits"):
            self.logits = self.logits.detach()
        self.read.clear()
        self.outputs.clear()
        vars(self).pop("output", None)

    def release(self) -> None:
        """Let go of the graph and of all that was recorded on the way, whether or not it was used."""
        self._let_go()
        self.mode.block_input = self.mode.anchor = None
        self.mode.roots.clear()
        self.cuts = None
        for probe in self.mode.probes:
            if isinstance(probe, BlockInputs | BlockCalls | Projections):
                probe.found.clear()


@contextmanager
def running(mode: Interception, listed: Sequence[nn.Module] | None = None) -> Iterator[Interception]:
    """The model's operations go through ``mode``; those of other runs and of users' hooks do not count in it.
    ``listed`` are the model's modules."""
    with inside(mode), users_hooks_aside(mode, listed), mode:
        yield mode


def record(
    model: nn.Module,
    feed: Feed,
    composite: Composite,
    *probes: Probe,
    root: str | None = None,
    root_input: str | int | None = None,
    root_value: Tensor | None = None,
    roots: Mapping[str, Root] | None = None,
    values: Mapping[str, Tensor] | None = None,
    blocks: list[Block] | None = None,
    ends: Ends | None = None,
    read: Callable[[Output], Tensor] = row_of,
    samples: Tensor | None = None,
    cut: bool = False,
    checkpoint: bool = False,
) -> Recording:
    """Run the model once under the composite; the model is left exactly as it was, also after an error.

    Args:
        feed: (args, kwargs) of the model's forward.
        probes: what to look at on the way (:mod:`whyformer.engine.probes`), one of each kind at most.
        root: where the graph begins: "input" (the tensor named by ``root_input``), "embedding" (what enters the first
            block), "output" (what leaves the last block), or None (where the probes say, or nowhere).
        root_value: feed this to the root instead of its own value (a point on a path, a noisy copy).
        roots, values: the same for several inputs at once, by name.
        blocks: the blocks meant, where not the model's largest group (a tower of CLIP, a decoder).
        read: what the target is about: the output -> ``[B, C]``.
        samples: which sample each row is a copy of (see :class:`~whyformer.models.output.Output`).
        ends: by any name, the block calls whose outputs' gradients are kept (or at which, for "output", the graph
            begins), and where the rows meant stand in the output; by default the last block.
        cut: cut the graph at the inputs of blocks, for :meth:`Recording.sweep` (relevance carrier).
        checkpoint: keep of each block what enters it alone, and run it again in each backward pass: a third more time,
            and the memory of one block's graph. No probe but what looks at the borders of blocks.

    Raises:
        ModelError: NaN in the logits, or no block where one is needed.
    """
    blocks = next(iter(groups_of(model, feed).values()), []) if blocks is None else blocks
    starts, values = dict(roots or {}), dict(values or {})
    half = in_half_precision(model, feed, read, samples) if composite.carrier == "relevance" else None
    if half is not None:
        (model, blocks), feed, values, root_value = single(model, blocks), *widened((feed, values, root_value))
    args, kwargs = list(feed[0]), dict(feed[1])
    listed = modules(model)
    run = Pass(sequence_first=sequence_first(model, listed))
    mode = Interception(model, composite, run, probes)
    recording = Recording(mode)
    recording.cuts = [] if cut else None
    if root in ("input", "embedding"):
        starts[""] = Root("entry", 0) if root == "embedding" else Root("input", root_input or 0)
    if root_value is not None:
        values[""] = root_value
    recording.moved, recording.half = bool(values), half
    for name, one in starts.items():
        if one.kind == "input":
            place: Any = args if isinstance(one.place, int) else kwargs
            value = values.get(name, place[one.place])
            place[one.place] = recording.begun[name] = mode.add_root(value.detach().clone().requires_grad_())
    entries = {name: one for name, one in starts.items() if one.kind == "entry"}
    looked_up = {one.place: name for name, one in starts.items() if one.kind == "lookup"}
    mode.watch = next((p for p in probes if callable(p)), None) or lookups(recording, looked_up, values)
    mode.grouped = bool(blocks)
    if root in ("embedding", "output") and not blocks:
        raise ModelError(
            "no repeated blocks found in this model (looked for an nn.ModuleList or nn.Sequential of one class), so "
            "the input of the first block is unknown; put the blocks into an nn.ModuleList"
        )
    again_blocks = [block for block in blocks if isinstance(block, nn.Module)] if checkpoint else []
    if checkpoint:
        again.refuse_unfit(again_blocks, probes, feed)
    graph = root is not None or bool(starts) or mode.flows is not None or mode.features is not None
    gradient = torch.enable_grad() if graph else torch.no_grad()
    inputs = frozenset(one.place for one in starts.values() if one.kind == "input")
    within = again.without_caches(again_blocks) if checkpoint else None
    by_rules = bool(composite.audit and composite.rules)
    known = facts(model, (tuple(args), kwargs), inputs, within=within, any_roots=not by_rules)
    unseen = (probes and (known.maps or known.heads_first or known.scattered)) or (
        (mode.features is not None or mode.projections is not None) and known.written_norms
    )
    if by_rules or unseen or any(isinstance(block, ProgramBlock) for block in blocks):
        mode.facts = known
        mode.inputs = known.inputs if inputs else frozenset()
    run.take(next((t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)), None))
    try:
        with (
            torch.inference_mode(False),
            gradient,
            running(mode, listed),
            block_hooks(recording, blocks, root, entries, values, ends),
            declared_around(mode),
            again.run_again(mode, again_blocks),
            without_autocast(composite.carrier),
            as_written(model, listed),
        ):
            with watching(model, args, kwargs) as calls:
                output = model(*args, **kwargs)
            mode.ended()
            with mode.uncounted():
                end = end_of(Output(model, output, *feed, samples), calls)
        end = confirmed(Output(model, output, *feed, samples), end)
    except Strayed:
        within = again.without_caches(again_blocks) if checkpoint else None
        facts(model, (tuple(args), kwargs), inputs, again=True, within=within)
        raise
    made = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    audit.hidden(mode, tuple(made))
    if checkpoint:
        again.refuse_inner(output)
    if mode.projections is not None:
        for projection in mode.projections.found.values():
            projection.turn(lambda tokens: batch_first(tokens, run), run.home)
    with torch.inference_mode(False), torch.enable_grad() if graph else torch.no_grad():
        (cut, end), recording.read = with_leaves((output, end))
        recording.output = Output(model, cut, *feed, samples, end)
        recording.logits = read(recording.output)
    run.batch = recording.logits.shape[0]
    refuse_infinite(model, recording.logits)
    return recording
