"""Recorded passes of a model.

    recording = record_pass(model, feed)
    recording.logits(read_logits)
    recording.starts(read_logits, seed)  # the start of a backward walk from a target
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import ModelChanged, ModelError, UnknownOperation
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Sums
from whyformer.methods.layout import Layout
from whyformer.models.ends import end_in, without_end
from whyformer.models.isolation import WAIT
from whyformer.models.output import Output, with_tensors
from whyformer.models.precision import HALF, agreement, float32_copy, in_float32
from whyformer.models.readout import plain_logits, refuse_infinite
from whyformer.rules.registered import likes
from whyformer.tape.attentions import find_attentions
from whyformer.tape.caches import Recent
from whyformer.tape.calls import every_tensor, needed_calls
from whyformer.tape.checks import foreign_leaves, reads_of_unset
from whyformer.tape.ends import EndFunction
from whyformer.tape.labelling import find_rows
from whyformer.tape.program import read_program
from whyformer.tape.recording import record_call
from whyformer.tape.rows import Source
from whyformer.tape.sources import find_sources
from whyformer.tape.state import without_autocast
from whyformer.tape.streams import find_first_maps, find_streams, spine
from whyformer.tape.units import roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import Composite, walk_back

__all__ = [
    "Callback",
    "Change",
    "ForwardPass",
    "LogitsReader",
    "record_pass",
    "record_wide_pass",
]

Feed = tuple[tuple[Any, ...], dict[str, Any]]
LogitsReader = Callable[[Output], Tensor]
Change = Mapping[int, Callable[[Tensor], Tensor]]
Callback = Callable[..., None]


# -- one pass --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One recorded forward pass.

    Attributes:
        model: the model.
        feed: its (args, kwargs).
        samples: ``[B]`` the sample of which each row is a copy, see :class:`~whyformer.models.output.Output`.
        tape: the recorded calls and values.
        raw: the model's output.
        end: the function that the model applies to its logits at the end; None if there is none.
        precision: agreement of the float32 copy that ran with its model in half precision; None for other models.
        custom_ops: operations that users registered, see :func:`whyformer.rules.register`.
        wide: as for :func:`record_pass`.
    """

    model: nn.Module
    feed: Feed
    samples: Tensor | None
    tape: Tape
    raw: Any
    end: EndFunction | None
    precision: dict[str, Any] | None = None
    custom_ops: Mapping[Any, str] = field(default_factory=dict)
    wide: bool = False
    _layouts: dict[Any, Layout] = field(default_factory=dict, repr=False)
    _read: dict[LogitsReader, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def output(self, value: Callable[[int], Tensor] | None = None) -> Output:
        """Return the model's output, with its logits before the end function.

        Args:
            value: function from the number of a value to its replacement; None for the values themselves.
        """
        tape, of = self.tape, value or self.tape.__getitem__
        raw = self.raw
        if value is not None:
            raw = with_tensors(raw, lambda t: of(tape.number(t)) if tape.knows(t) else t)
        return without_end(Output(self.model, raw, *self.feed, self.samples), self.end, of)

    @cached_property
    def outputs(self) -> dict[str, int]:
        """Numbers of the floating-point tensors that the model returned, by name, or by position if unnamed."""
        named = Output(self.model, self.raw).named or {str(i): t for i, t in enumerate(every_tensor(self.raw))}
        return {n: self.tape.number(t) for n, t in named.items() if self.tape.knows(t) and t.is_floating_point()}

    def layout(
        self, sources: Mapping[str, Inputs], read_logits: LogitsReader | None = None, *, learned: bool = False
    ) -> Layout:
        """Return the rows that the values hold, and the attention between them.

        Args:
            sources: the inputs whose rows are tracked, by name.
            read_logits: function from the model's output to ``[B, C]``, the row of logits that a target reads. The
                layout has the attentions and streams on paths to this row; None for those on paths to any output.
            learned: also treat learned vectors as rows before they attend to any input, so that the maps among them
                are known.
        """
        outputs = tuple(sorted(self.outputs.values()))
        ends = outputs if read_logits is None else self._ends(read_logits)
        key = tuple(sources), ends, learned
        if key not in self._layouts:
            layout = self.layout(sources, read_logits) if learned else self._layout(sources, outputs, ends, {})
            if learned:
                program, calls = read_program(self.tape, layout.roots, ends), needed_calls(self.tape.calls, outputs)
                maps = find_first_maps(program, self.tape, layout.rows, layout.streams, calls)
                layout = self._layout(sources, outputs, ends, maps) if maps else layout
            self._layouts[key] = layout
        return self._layouts[key]

    def _layout(
        self,
        sources: Mapping[str, Inputs],
        outputs: tuple[int, ...],
        ends: tuple[int, ...],
        maps: Mapping[int, tuple[int, ...]],
    ) -> Layout:
        tape, main = self.tape, next(iter(sources.values()))
        fed = {name: argument_of(self.feed, side.scored) for name, side in sources.items()}
        several = [name for name, side in sources.items() if side.choices is not None]
        others = [n for n, side in sources.items() if side.modality != "text" and n not in main.shared]
        packed = {n: len(fed[n]) // main.batch for n in others if main.is_packed(fed[n])}
        transposed = [n for n, side in sources.items() if side.transposed]
        learned = [Source("", n, samples=samples, is_map=True) for n, samples in maps.items()]
        rows = find_rows(tape, [*find_sources(tape, fed, several, packed, transposed), *learned], outputs)
        program = read_program(tape, [*rows.roots.values(), *maps], ends)
        attentions = find_attentions(program, tape, rows)
        layout = Layout(tape, program, rows, attentions, find_streams(program, tape, rows, attentions), maps)
        if not rows.repeats:
            return layout
        every = read_program(tape, [*layout.roots, *(n for numbers in rows.repeats.values() for n in numbers)], ends)
        maps_of_all = {n for a in find_attentions(every, tape, rows) for n in a.maps}
        return replace(layout, is_complete=maps_of_all <= {n for a in attentions for n in a.maps})

    def _ends(self, read_logits: LogitsReader) -> tuple[int, ...]:
        """Return the numbers of the values that a target reads."""
        if read_logits not in self._read:
            row = read_logits(self.output())
            self._read[read_logits] = tuple(sorted(self.starts(read_logits, torch.ones_like(row))))
        return self._read[read_logits]

    @cached_property
    def modules(self) -> dict[int, str]:
        """Call -> path of its module. Records another pass if this one was recorded without module names."""
        return self.tape.modules or self.record(self.feed, names=True)[0].modules

    def record(self, feed: Feed, **options: Any) -> tuple[Tape, Any]:
        """Record another pass of the model; options as for :func:`~whyformer.tape.recording.record_call`."""
        return record_call(self.model, *feed, custom_ops=self.custom_ops, wide=self.wide, **options)

    @contextmanager
    def naming_modules(self) -> Iterator[None]:
        """Add to errors the module whose operation has no rule, and how to register an elementwise one."""
        try:
            yield
        except UnknownOperation as error:
            if error.call is None:
                raise
            path, call = self.modules.get(error.call, ""), self.tape.calls[error.call]
            name = type(self.model.get_submodule(path)).__name__
            message = f"in module '{path}' ({name}) {error}" if path else f"in {name} {error}"
            if any(self.tape.shapes[o] == self.tape.shapes[call.results[0]] for o in call.operands):
                message += "; or, if it is elementwise, register the class of a module that computes it alone: "
                message += 'whyformer.rules.register(Module, like="gelu"), or explain(..., rules={Module: "gelu"})'
            raise UnknownOperation(message) from error

    @cached_property
    def is_half(self) -> bool:
        """True if values were computed in half precision, as under autocast."""
        calls = needed_calls(self.tape.calls, self.outputs.values())
        return any(self.tape.dtypes[r] in (torch.float16, torch.bfloat16) for c in calls for r in c.results)

    def logits(self, read_logits: LogitsReader) -> Tensor:
        """Return ``[B, C]``, the row of logits that a target reads.

        Args:
            read_logits: function from the model's output to this row.

        Raises:
            ModelError: the logits are not finite.
        """
        logits = read_logits(self.output()).detach()
        refuse_infinite(self.model, logits)
        return logits

    def starts(self, read_logits: LogitsReader, seed: Tensor) -> dict[int, Tensor]:
        """Return the start of a backward walk: the gradient of seed · logits for each value that ``read_logits`` reads.

        Args:
            read_logits: as for :meth:`logits`.
            seed: ``[B, C]``, ∂target/∂logits.

        Raises:
            ModelError: ``read_logits`` reads no value that the pass computed.
        """
        tape, leaves = self.tape, dict[int, Tensor]()

        def leaf(n: int) -> Tensor:
            if not tape.floating(n) or n in tape.leaves:
                return tape[n]
            if n not in leaves:
                leaves[n] = tape[n].detach().requires_grad_()
            return leaves[n]

        with torch.enable_grad():
            row = read_logits(self.output(leaf))
            if not row.requires_grad:
                raise ModelError(
                    "the target does not depend on any value that the model computed: a target function detaches the "
                    "output or rounds it to whole numbers, or the model returns its input unchanged"
                )
            gradients = torch.autograd.grad(row, list(leaves.values()), seed, allow_unused=True)
        return {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}

    def walk_back(
        self,
        roots: Iterable[int],
        starts: Mapping[int, Tensor],
        composites: Sequence[Composite],
        *,
        seed: Tensor,
        layout: Layout | None = None,
        at: Mapping[int, Sequence[Callback]] | None = None,
        observed: Collection[int] = (),
    ) -> tuple[list[dict[int, Tensor]], Sums | None]:
        """Walk back from the values that a target reads, and sum the relevance at the blocks on the way.

        Args:
            roots: numbers of the values at which relevance ends.
            starts: value -> flow with which the walk starts there, see :meth:`starts`.
            composites: the rules of each run.
            seed: ``[B, C]``, ∂target/∂logits.
            layout: the rows of the pass, needed by a composite that propagates relevance.
            at: value -> functions to call with the flow that arrives there under each composite.
            observed: values whose flows are returned.

        Returns:
            The flows of each run at the observed values; the sums of relevance, None without such a composite.
        """
        program = read_program(self.tape, roots, starts)
        watchers = defaultdict[int, list[Callback]](list, {n: list(functions) for n, functions in (at or {}).items()})
        run, sums = next((i for i, c in enumerate(composites) if c.propagates == "relevance"), None), None
        if run is not None and layout is not None:
            borders, first = layout.borders(program), min((*watchers, *observed))  # the walk ends at the first
            sums = Sums(layout.rows, starts, seed, run, bool(borders), self.precision)
            for number, block in borders.items():
                if number >= first:
                    watchers[number].append(sums.entering(block, number))
        with self.naming_modules():
            callbacks: Any = {} if sums is None else {"samples": sums.samples, "on_unit": sums.on_unit}
            callbacks["at"] = {n: partial(_call_all, functions) for n, functions in watchers.items()}
            flows = walk_back(program, self.tape, [(c, starts) for c in composites], observed=observed, **callbacks)
        self.tape.release()
        return flows, sums


def _call_all(functions: Sequence[Callback], *flows: Tensor | None) -> None:
    for function in functions:
        function(*flows)


def argument_of(feed: Feed, place: str | int) -> Tensor:
    """Return the model's argument at a position or of a name."""
    argument: Tensor = feed[0][place] if isinstance(place, int) else feed[1][place]
    return argument


def record_pass(
    model: nn.Module,
    feed: Feed,
    samples: Tensor | None = None,
    change: Change | None = None,
    *,
    names: bool = False,
    checkpoint: bool = False,
    wide: bool = False,
) -> ForwardPass:
    """Run a model once and record it.

    Args:
        model: the model.
        feed: its (args, kwargs).
        samples: ``[B]`` the sample of which each row is a copy; None if row i is sample i.
        change: number of a value -> function that replaces it when it is computed.
        names: record the module of each call.
        checkpoint: store only the values between blocks, and recompute those inside when a walk reaches them.
        wide: compute half-precision operations in float32, also under the model's autocast.

    Raises:
        ModelError: the output depends on values that torch did not compute.
        ModelChanged: the pass writes to parameters.
    """
    before = [*model.parameters(), *model.buffers()]  # hooks may replace some during the pass
    custom_ops = likes()

    def recorded(stored: frozenset[int] | None) -> ForwardPass:
        options: Any = {"change": change, "names": names, "stored": stored, "custom_ops": custom_ops, "wide": wide}
        tape, raw = record_call(model, *feed, **options)
        if tape.changes_weights:
            raise ModelChanged(f"the model writes to its parameters while it is being explained. {WAIT}")
        end = end_in(tape, Output(model, raw, *feed, samples))
        return ForwardPass(model, feed, samples, tape, raw, end, custom_ops=custom_ops, wide=wide)

    with torch.inference_mode(False):
        recording = _between_blocks(model, feed, recorded) if checkpoint else recorded(None)
        _refuse_foreign_values(recording, [*before, *model.parameters(), *model.buffers()])
    return recording


def record_wide_pass(
    model: nn.Module, feed: Feed, read_logits: LogitsReader, samples: Tensor | None = None, *, checkpoint: bool = False
) -> ForwardPass:
    """Record a pass in float32 or wider: without autocast, and with a float32 copy of a model in half precision.

    Args:
        model, feed, samples, checkpoint: as for :func:`record_pass`.
        read_logits: function from the model's output to ``[B, C]``, the row of logits that the target reads.

    Raises:
        ModelError: the model cannot be copied.
    """
    half = next((p.dtype for p in model.parameters() if p.dtype in HALF), None)
    if half is None:
        with without_autocast():
            return record_pass(model, feed, samples, checkpoint=checkpoint, wide=True)
    logits = plain_logits(model, *feed, read_logits, samples)
    with without_autocast():
        recording = record_pass(float32_copy(model), in_float32(feed), samples, checkpoint=checkpoint, wide=True)
    return replace(recording, precision=agreement(half, logits, recording.logits(read_logits)))


_BETWEEN: Recent[tuple[int, frozenset[int]]] = Recent(16)  # (signature, values between blocks) of a pass


def _between_blocks(
    model: nn.Module, feed: Feed, recorded: Callable[[frozenset[int] | None], ForwardPass]
) -> ForwardPass:
    """Record a pass that stores only the values through which all paths lead, which are determined from another pass
    that stores nothing."""
    shapes = [t.shape for t in every_tensor(feed)]
    key = type(model), sum(1 for _ in model.modules()), tuple(shapes)
    cached = _BETWEEN.get(key)
    recording = recorded(frozenset() if cached is None else cached[1])
    if cached is None or cached[0] != recording.tape.signature:
        tape = recording.tape
        roots = [r for n in tape.inputs for r in roots_of(tape, n)]
        between = frozenset(spine(read_program(tape, roots, sorted(recording.outputs.values()))))
        _BETWEEN.put(key, (tape.signature, between))
        recording = recorded(between)
    return recording


# -- values of unknown origin ----------------------------------------------------------------------------------------
_TRUSTED: Recent[bool] = Recent(64)


def _refuse_foreign_values(recording: ForwardPass, parameters: Iterable[Tensor]) -> None:
    """Raise if the output depends on values that torch did not compute, because relevance would be lost there."""
    tape = recording.tape
    numbers = frozenset(tape.number(w) for w in parameters if tape.knows(w))
    others = sorted(n for n in tape.leaves - tape.inputs - numbers if tape.floating(n))
    key = tape.signature, numbers, tuple(tape[n].data_ptr() for n in others)  # constants have one address
    if _TRUSTED.get(key):
        return
    calls = needed_calls(tape.calls, recording.outputs.values())
    needed = {c.number for c in calls}
    reads = [c for c in reads_of_unset(tape) if c.number in needed]
    read = {o for c in calls for o in c.operands}
    unexplained = [] if reads or read.isdisjoint(others) else [n for n in _unexplained(recording, numbers) if n in read]
    if not reads and not unexplained:
        _TRUSTED.put(key, True)
        return
    call = reads[0] if reads else next(c for c in calls if unexplained[0] in c.operands)
    module = recording.modules.get(call.number, "")
    raise ModelError(
        f"'{call.name}'{f' in the module {module!r}' if module else ''} reads {'memory' if reads else 'a tensor'} that "
        "was written outside of torch (by numpy, another thread, or a kernel called with an address), so its "
        "dependence on the input is unknown. Use torch's operators there, or wrap the kernel with "
        "torch.library.custom_op and register_autograd, or register the torch.autograd.Function that calls it, "
        'whyformer.rules.register(Function, like="gelu"). For nn.DataParallel, pass model.module'
    )


def _unexplained(recording: ForwardPass, weights: Collection[int]) -> list[int]:
    """Return values that are neither results of calls nor weights, and that differ in a second pass on other inputs."""
    args, kwargs = recording.feed
    change = lambda v: _changed(recording.tape, v) if isinstance(v, Tensor) else v  # noqa: E731
    other, _ = recording.record((tuple(change(a) for a in args), {n: change(v) for n, v in kwargs.items()}))
    return foreign_leaves(recording.tape, other, weights)


def _changed(tape: Tape, value: Tensor) -> Tensor:
    """Return another input of the same kind: scale numbers; in each row of ids that are looked up, swap the last two
    that occur once, which leaves picture placeholders and end-of-text tokens in place. Other integers are unchanged."""
    if value.is_floating_point():
        return value * 0.75
    if value.dtype == torch.bool or not tape.knows(value) or not roots_of(tape, tape.number(value)):
        return value
    swapped = value.clone().reshape(-1, value.shape[-1] if value.dim() else 1)
    for row in swapped:
        _, inverse, counts = row.unique(return_inverse=True, return_counts=True)
        once = (counts[inverse] == 1).nonzero().flatten()[-2:]
        row[once] = row[once.flip(0)]
    return swapped.view_as(value)
