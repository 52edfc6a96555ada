"""What a method is given and what it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.isolation import alone
from whyformer.engine.places import picture_places
from whyformer.engine.probes import Probe
from whyformer.engine.run import Recording, record
from whyformer.errors import InputError, MethodNotApplicable, Strayed, WhyformerError, on_changed_inputs
from whyformer.inputs import Inputs
from whyformer.methods.graphs import NOT_YET, UNREAD, UNSEEN, MapWalk, MapWatch, map_graph, walk_graph
from whyformer.methods.passes import ForwardPass, record_pass, record_wide_pass
from whyformer.methods.replay import Replay
from whyformer.methods.roots import Roots
from whyformer.methods.rules import Rules
from whyformer.methods.scores import Scores
from whyformer.methods.sequence import AttendedPass
from whyformer.methods.sources import Sources, readout_row
from whyformer.methods.together import Together
from whyformer.models.facts import Block
from whyformer.models.output import Output
from whyformer.models.readout import plain_logits, row_of
from whyformer.rules.core import Composite
from whyformer.tape.places import Places
from whyformer.tape.walking import GRADIENT as GRADIENT_ON_TAPE

__all__ = ["MapWatch", "Rules", "Scores", "Task", "readout_row"]


@dataclass(frozen=True)
class Task(Sources):
    """One thing to explain: a model, its inputs and the target, with what most methods need.

    Attributes:
        resolve: logits ``[B, C]`` -> target callable for these samples.
        read: output of the model -> those logits, the row that the target is about.
        counted: whether that row is found by a token's number, which changes when other tokens are deleted.
        last: whether it is that of the last real token, so that a language model need not compute any other.
        progress: wraps an iterable of long work; checkpoint: whether blocks are run again on the way back.
        recordings, placed: what was recorded for it and for its copies, and where rows lie in the picture.
        replay, together: where one recorded pass serves several targets or several methods, what they share.
    """

    model: nn.Module
    inputs: Inputs
    resolve: Callable[[Tensor], Callable[[Tensor], Tensor]]
    progress: Callable[..., Any]
    method: str
    read: Callable[[Output], Tensor] = row_of
    counted: bool = False
    last: bool = False
    checkpoint: bool = False
    recordings: list[weakref.ref[Recording]] = field(default_factory=list, repr=False)
    placed: list[Places | None] = field(default_factory=list, repr=False)
    replay: Replay | None = field(default=None, repr=False)
    together: Together | None = field(default=None, repr=False)

    def seed(self, logits: Tensor) -> Tensor:
        """∂target/∂logits ``[B, C]``: what the backward passes start from (one-hot for a logit)."""
        self.inputs.check_rows(logits)
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            value = self.resolve(leaf.detach())(leaf)
            (seed,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True) if value.requires_grad else (None,)
        if seed is None:
            raise InputError("the target does not depend on the logits")
        return seed

    def value(self, logits: Tensor, like: Tensor | None = None) -> Tensor:
        """The target's value of each sample, ``[B]``; ``like`` are the logits that decide which class is meant."""
        return self.resolve(logits if like is None else like)(logits)

    def copies(self, times: int, logits: Tensor) -> Task:
        """The same task for ``times`` copies of each sample, next to each other; ``logits`` ``[B, C]`` of the unchanged
        samples decide which class is meant."""
        target = self.resolve(logits)

        def value(copied: Tensor) -> Tensor:
            rounds = copied.unflatten(0, (len(logits), times)).unbind(1)
            return torch.stack([target(part) for part in rounds], 1).flatten()

        repeated = self.inputs.with_tensor(self.inputs.tensor.repeat_interleave(times, 0))
        return replace(self, inputs=repeated, resolve=lambda _: value)

    def value_index(self, logits: Tensor) -> Tensor:
        """``[B]`` the class each sample's target is about: where its gradient with respect to the logits is largest."""
        return self.seed(logits).argmax(-1)

    def record(self, composite: Composite, *probes: Probe, **options: Any) -> Recording:
        """Record one forward pass of the inputs; the probes say what is looked at on the way."""
        known: dict[str, Any] = {"blocks": self._found, "read": self.read, "samples": self.inputs.samples}
        options = {**known, **({"checkpoint": True} if self.checkpoint else {}), **options}
        if self.replay is not None:
            return self.replay.record(self.inputs, composite, probes, options)
        try:
            recording = record(self.model, self.fed(self.inputs), composite, *probes, **options)
        except Strayed:
            if probes:  # they have seen a part of it: all begins once more
                raise
            recording = record(self.model, self.fed(self.inputs), composite, **options)
        self.recordings.append(weakref.ref(recording))
        return recording

    def passed(self, *, wide: bool = False) -> ForwardPass:
        """One recorded pass of the inputs, which several targets or methods may share; ``wide`` in float32 or wider,
        for relevance."""

        def made() -> ForwardPass:
            feed, samples = self.fed(self.inputs), self.inputs.samples
            if wide:
                return record_wide_pass(self.model, feed, self.read, samples, checkpoint=self.checkpoint)
            return record_pass(self.model, feed, samples, checkpoint=self.checkpoint)

        apart = wide and self.in_half_precision
        if self.replay is not None:
            return self.replay.passed(self.inputs, made, apart)
        return made() if self.together is None else self.together.passed(self, made, apart)

    def walk(
        self,
        rules: Rules,
        watch: MapWatch,
        values: Mapping[str, Tensor] | None = None,
        roots: Roots | None = None,
    ) -> MapWalk:
        """Walk back from the target and look at the maps of attention, or at what enters blocks.

        Args:
            rules: of the way back.
            watch: what is looked at.
            values, roots: as for :meth:`recorded`.

        Raises:
            MethodNotApplicable: no attention, or the last block's output does not reach the logits.
        """
        on_tape = self.tape_rules(rules)
        relevance = rules.graph.carrier == "relevance"
        options = {"relevance": relevance, "row_alone": watch.seen is None}
        attended = None if on_tape is None else self.attended(values, roots, **options)
        if attended is None or on_tape is None:
            return walk_graph(self, rules.graph, watch, values)
        seed, seen = self.seed(attended.logits), watch.seen
        first_run = [GRADIENT_ON_TAPE] if watch.gradient or on_tape.carrier == "relevance" else []

        def at_map(block: int, *flows: Tensor) -> None:
            shown = attended.scores(block) if watch.scores else attended.map(block)
            if seen is not None:
                seen(block, shown, flows[-1], *(flows[:1] if watch.gradient else ()))

        at = None if seen is None else at_map
        walked = attended.walk_blocks(seed, [*first_run, on_tape], at, watch.blocks, watch.entering)
        if walked.row is None and seen is not None:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        balance = None if walked.sums is None else replace(walked.sums.balance, precision=attended.whole.precision)
        return MapWalk(attended.logits, walked.row, balance)

    def map_pass(self, fuse: Callable[[int, int, Callable[[], Tensor]], Tensor | None]) -> tuple[MapWalk, list[Tensor]]:
        """Run the model once and look at the maps of all blocks, one of which is in memory at a time.

        Args:
            fuse: (block, N, what returns its map ``[B, H, N, N]``) -> ``[B, N, N]``, or None to leave the block out.

        Returns:
            The readout row, which is that of ½‖logits‖² and so the same for every class, and what ``fuse`` returned.
        """
        attended = self.attended()
        if attended is not None:
            row, kept = self.row_read(attended), {}
            for block in range(len(attended.attentions)):
                fused = fuse(block, attended.tokens, partial(attended.map, block))
                attended.release()
                if fused is not None:
                    kept[block] = fused
            return MapWalk(attended.logits, row), self.global_maps(kept, attended.tokens)
        return map_graph(self, fuse)

    def row_read(self, attended: AttendedPass) -> Tensor:
        """Return ``[B, N]``, how much ½‖logits‖² reads each row of the last state: the same for every class."""
        row = attended.walk(attended.logits, [GRADIENT_ON_TAPE]).row
        if row is None:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        return row

    def readout_pass(self, *probes: Probe) -> tuple[Recording, Tensor]:
        """(recording, readout row ``[B, N]``), the graph beginning at the last block's output: only the head is in it.

        The row comes from the gradient of ½‖logits‖², so that it is the same for every class.
        """
        if not self.structure.attentions:
            raise self.refuse(UNSEEN)
        self.refuse_streams()
        self.blocks("the last block")
        recording = self.record(GRADIENT, *probes, root="output")
        (gradient,) = recording.backward(recording.logits.detach())
        if gradient.dim() != 3:
            raise self.refuse(
                f"its last block's output of shape {list(gradient.shape)} is no [batch, tokens, width] matrix"
            )
        return recording, recording.run.home(readout_row(gradient))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around a method's work: neither a user's ``inference_mode`` nor a run around it has a part in it, and a model
        that is changed meanwhile is refused. Afterwards the graphs of all recordings are freed: without that each
        explanation would keep some of its memory for ever."""
        try:
            with alone(self.model), torch.inference_mode(False):
                yield
        finally:
            for recording in filter(None, (reference() for reference in self.recordings)):
                recording.release()
            self.recordings.clear()

    def forward(self, inputs: Inputs | None = None) -> Tensor:
        """The logits that the target is about, of a plain forward pass without gradients."""
        given = inputs or self.inputs
        try:
            return plain_logits(self.model, *self.fed(given), self.read, given.samples)
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            if inputs is None or isinstance(error, WhyformerError):
                raise
            raise on_changed_inputs(error, f"{self.method}: ") from error

    def layer(self, number: int, name: str = "start_layer") -> int:
        """The number of a layer of attention from 0, in the stream that is read out: a block, where there is one."""
        if self.structure.plain:
            return self.block(number, name)
        return self.block(number, name, max(map(self.structure.depth_of, self.structure.ends()), default=0))

    def block(self, number: int, name: str = "start_layer", count: int | None = None) -> int:
        """A block number from 0, checked against the model before work starts."""
        count = self.blocks() if count is None else count
        if count and not -count <= number < count:
            raise InputError(
                f"{self.method}: {name}={number} is outside the model, which has {count} blocks (0 to {count - 1})"
            )
        return number % count if count else number

    def blocks(self, unknown: str | None = None) -> int:
        """Number of calls of the blocks that the model lists; 0 if none, or refused as what is ``unknown`` then."""
        alone = self.structure.alone(self.inputs.name)
        own = sum(a.queries == alone for a in self.structure.attentions)
        count = max(len(self._found), own) if self._found else 0
        if not count and unknown is not None:
            raise self.refuse(f"its blocks are not in an nn.ModuleList or nn.Sequential, so {unknown} is unknown")
        return count

    @cached_property
    def _found(self) -> list[Block]:
        """The largest group of blocks; where there are several streams, that of the main input's."""
        group = None if self.structure.plain else self.structure.group_of(self.inputs.name)
        return next(iter(self.groups.values()), []) if group is None else self.groups[group]

    # -- where token rows lie in a picture -------------------------------------------------------------------
    def places(self, tokens: int, block: int | None = None) -> Places:
        """Where ``tokens`` rows lie in the picture: those of the first attention, else those of a block's features.

        Raises:
            MethodNotApplicable: that cannot be measured.
        """
        read = next((p for p in self.placed if p is not None and p.tokens == tokens), None)
        if read is not None:
            return read
        firsts = [] if self.structure.plain else [key for key in self.structure.firsts if self.inputs.name in key]
        for known, rows, grid in (self.rows(self.inputs.name, key) for key in firsts):
            if known == tokens and bool((rows == rows[:1]).all()) and bool((rows >= 0).all()):
                return Places(rows[0], grid, tokens)
        if not self.structure.plain and (self.inputs.others or block is None):
            raise self.refuse(
                f"which part of the picture each of its {tokens} tokens stands for differs from sample to sample, or "
                "cannot be measured; explain one at a time",
                verdict=NOT_YET,
            )
        one = self.inputs.select(slice(0, 1))
        found = picture_places(self.model, one.feed, one.scored)
        if block is not None and (found is None or found.tokens != tokens):
            found = picture_places(self.model, one.feed, one.scored, block)
        if found is None or found.tokens != tokens:
            said = f"which part of the picture each of its {tokens} tokens stands for cannot be measured"
            raise self.refuse(said, verdict=NOT_YET)
        return found

    def cells(self, tokens: int, block: int | None = None) -> Tensor:
        """``[B, P]`` or ``[1, P]`` which of ``tokens`` rows stands for each cell of the picture; see :meth:`places`."""
        key = None if self.structure.plain else self.structure.alone(self.inputs.name)
        if key is not None:
            known, rows, _ = self.rows(self.inputs.name, key)
            if known == tokens and bool((rows >= 0).all()):
                return rows
        return self.places(tokens, block).rows[None]

    def lay_out(self, scores: Scores) -> Scores:
        """Scores of a picture's token rows as scores of its cells; those of no cell (CLS, registers) are left out."""
        inputs = scores.inputs or self.inputs
        each = inputs.choices is not None and scores.values.shape == (inputs.rows, inputs.tensor.shape[-1])
        if scores.kind != "sequence" and not (scores.kind == "token" and each):
            return scores
        if inputs.choices is not None:
            if not each or (scores.kind == "sequence" and not self.structure.plain):
                raise self.refuse("its rows are not those of the texts of each sample", verdict=NOT_YET)
            chosen = self.value_index(scores.logits).cpu()
            values = scores.values.reshape(inputs.batch, inputs.choices, -1)
            values = values[torch.arange(inputs.batch), chosen.to(values.device)]
            return replace(scores, values=values, kind="token", inputs=inputs.of_choice(chosen))
        key = None if self.structure.plain or scores.places is not None else self.structure.alone(inputs.name)
        if key is not None:
            return self.of_sources({key: scores.values}, scores.logits, scores.diagnostics)
        if inputs.modality != "image":
            tokens = inputs.tensor.shape[inputs.axis]
            if inputs.modality == "text" and scores.values.shape[1] != tokens:  # a prompt of its own, padding inside
                scores = replace(scores, values=self.at_tokens(inputs.name, scores.values), kind="token")
            key = frozenset({inputs.name})
            if inputs.modality == "tensor" and scores.values.shape[1] != tokens and key in self.structure.firsts:
                return self.of_sources({key: scores.values}, scores.logits, scores.diagnostics)  # frames of a sound
            if scores.values.shape[1] != tokens:
                raise self.refuse(
                    f"it has {scores.values.shape[1]} rows for {tokens} tokens, so which belongs to which is unknown",
                    verdict=NOT_YET,
                )
            return scores
        places = scores.places or self.places(scores.values.shape[-1])
        return replace(scores, values=scores.values[:, places.rows], kind="patch", grid=places.grid)

    def same_rows(self, made: Tensor, wanted: Tensor) -> bool:
        """Whether these ``[B, N, D]`` are equal but for rounding, at all rows but padding."""
        if made.shape != wanted.shape:
            return False
        mask = self.inputs.row_mask
        real = mask if mask is not None and mask.shape == made.shape[:2] else torch.ones(made.shape[:2]).bool()
        off, size = (made - wanted).detach()[real.to(made.device)], wanted.detach()[real.to(made.device)]
        tolerance = max(1e-5, torch.finfo(made.dtype).eps ** 0.5 * 4)  # norms of a float64 model may work in float32
        return float(off.norm()) <= tolerance * float(size.norm())

    # -- checks on what was seen -----------------------------------------------------------------------------
    def refuse(self, reason: str, *, verdict: str = "has no meaning") -> MethodNotApplicable:
        """The error for a model on which this method cannot work; names methods that do apply."""
        from whyformer.methods.applying import applying

        others = ", ".join(name for name in applying(self) if name != self.method)
        said = f"{self.method} {verdict} on this model: {reason}"
        return MethodNotApplicable(f"{said}. Methods that apply: {others}" if others else said)

    def global_maps(self, maps: dict[int, Tensor], tokens: int | None = None) -> list[Tensor]:
        """The maps of all blocks in order, checked to be ``[B, N, N]`` over the same N tokens.

        Args:
            maps: by the attention's number; several are joined into one, so no block may have more than one of them.
            tokens: N; None where the caller takes an encoder and a decoder apart by itself.
        """
        if not maps:
            raise self.refuse(UNSEEN)
        batch, home = self.inputs.rows, self.inputs.tensor.device  # blocks may lie on several
        listed = [maps[i] if maps[i].is_meta else maps[i].to(home) for i in sorted(maps)]
        n = tokens or listed[-1].shape[-1]
        windows = any(m.shape[0] != batch for m in listed)
        if not windows and tokens is not None and len(listed) > 1 and self._several_in_a_block(maps):
            raise self.refuse(
                "a block of it attends more than once (to another sequence too, or with its heads one by one)",
                verdict=NOT_YET,
            )
        if not windows and all(m.shape[-2:] == (n, n) for m in listed):
            return listed
        if windows or len({m.shape[-1] for m in listed}) > 1:
            raise self.refuse(
                "its attention works in windows or at several resolutions, so there is no map over all tokens"
            )
        raise self.refuse(
            f"its attention maps ({list(listed[-1].shape[-2:])}) are not square over the {n} tokens (cross-attention)"
        )

    def _several_in_a_block(self, attentions: Collection[int]) -> bool:
        """Whether two of these attentions are in one block, in the recording that saw most of them."""
        there = [one.mode.attention_blocks for one in (reference() for reference in self.recordings) if one is not None]
        seen = max(there, key=len, default=[])
        blocks = [seen[i] for i in attentions] if seen else []
        known = [b for b in blocks if b is not None]
        return len(known) > len(set(known))
