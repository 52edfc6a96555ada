"""What a method is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError, MethodNotApplicable, WhyformerError, on_changed_inputs
from whyformer.inputs import Inputs
from whyformer.methods.conservation import Balance
from whyformer.methods.passes import ForwardPass, argument_of, record_pass, record_wide_pass
from whyformer.methods.replay import Replay
from whyformer.methods.roots import Roots
from whyformer.methods.scores import Scores
from whyformer.methods.sequence import AttendedPass
from whyformer.methods.sources import Sources
from whyformer.methods.structure import MERGED, NOT_YET, UNREAD
from whyformer.methods.together import Together
from whyformer.models.isolation import alone
from whyformer.models.kinds import takes_several
from whyformer.models.output import Output
from whyformer.models.readout import plain_logits, row_of
from whyformer.options import DEFAULTS, Options
from whyformer.rules.registered import declared
from whyformer.tape.places import Box, Places
from whyformer.tape.reading import find_read_box
from whyformer.tape.walking import GRADIENT, Composite

__all__ = ["MapWalk", "MapWatch", "Scores", "Task"]


@dataclass(frozen=True)
class MapWalk:
    """What a method knows besides maps of attention.

    Attributes:
        logits: ``[B, C]`` of the plain forward pass.
        read: ``[B, N]``, how much the target reads each row of the last block's output; None if that was not asked for.
        balance: of relevance, where the rules carry it.
    """

    logits: Tensor
    read: Tensor | None
    balance: Balance | None = None

    @property
    def row(self) -> Tensor:
        """``[B, N]``, how much the target reads each row of the last block's output."""
        assert self.read is not None
        return self.read


@dataclass(frozen=True)
class MapWatch:
    """What a method looks at on the way back from its target.

    Attributes:
        blocks: numbers of the blocks that matter.
        seen: called with a block, its map A and what flows to A, ``[B, H, N, N]`` each; the last block first. None to
            look at no map.
        gradient: call ``seen`` with ∂target/∂A too, as a fourth argument.
        scores: call ``seen`` with what A is the softmax of, in the place of A.
        entering: called with a block, what enters it, and what flows there, ``[B, N, D]`` each.
    """

    blocks: Collection[int]
    seen: Callable[..., None] | None = None
    gradient: bool = False
    scores: bool = False
    entering: Callable[[int, Tensor, Tensor], None] | None = None


@dataclass(frozen=True)
class Task(Sources):
    """One thing to explain: a model, its inputs and the target, with what most methods need.

    Attributes:
        resolve: logits ``[B, C]`` -> target callable for these samples.
        read: output of the model -> those logits, the row that the target is about.
        counted: whether that row is found by a token's number, which changes when other tokens are deleted.
        last: whether it is that of the last real token, so that a language model need not compute any other.
        activation: those logits -> "softmax", "sigmoid" or "identity", what turns them into what the model says.
        progress: wraps an iterable of long work; options: of the model's passes.
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
    options: Options = DEFAULTS
    activation: Callable[[Tensor], str] = field(default=lambda logits: "softmax", repr=False)
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

    def depends_on(self, logits: Tensor) -> Tensor:
        """``[B, C]`` True at logits that the target depends on: where ∂target/∂logits is not 0."""
        return self.seed(logits) != 0

    def at_once(self, batch_size: int) -> int:
        """Return how many rows go through the model together: ``batch_size``, or 1 if it refuses several."""

        def twice() -> tuple[Any, Any]:
            return self.fed(self.inputs.with_tensor(self.inputs.tensor.repeat_interleave(2, 0)))

        return batch_size if takes_several(self.model, twice) else 1

    def value_index(self, logits: Tensor) -> Tensor:
        """``[B]`` the class each sample's target is about: of those that it depends on, where ∂target/∂logits is
        largest."""
        seed = self.seed(logits)
        return seed.masked_fill(seed == 0, -torch.inf).argmax(-1)

    def of_samples(self, numbers: list[int], logits: Tensor) -> Task:
        """The same task for some of the samples; ``logits`` ``[B, C]`` of all of them decide which class is meant."""
        target, places = self.resolve(logits), torch.tensor(numbers, device=logits.device)

        def value(rows: Tensor) -> Tensor:
            return target(logits.to(rows).index_put((places,), rows))[places]

        return replace(self, inputs=self.inputs.of_samples(numbers), resolve=lambda _: value)

    def passed(self, *, wide: bool = False) -> ForwardPass:
        """One recorded pass of the inputs, which several targets or methods may share; ``wide`` in float32 or wider,
        for relevance."""

        def made() -> ForwardPass:
            feed, samples = self.fed(self.inputs), self.inputs.samples
            if wide:
                return record_wide_pass(self.model, feed, self.read, samples, checkpoint=self.options.checkpoint)
            return record_pass(self.model, feed, samples, checkpoint=self.options.checkpoint)

        apart = wide and (self.in_half_precision or self.passed().is_half)
        if self.replay is not None:
            return self.replay.passed(self.inputs, made, apart)
        if apart not in self._passes:
            self._passes[apart] = made() if self.together is None else self.together.passed(self, made, apart)
        return self._passes[apart]

    @cached_property
    def _passes(self) -> dict[bool, ForwardPass]:
        return {}

    def walk(
        self,
        composite: Composite,
        watch: MapWatch,
        values: Mapping[str, Tensor] | None = None,
        roots: Roots | None = None,
    ) -> MapWalk:
        """Walk back from the target and look at the maps of attention, or at what enters blocks.

        Args:
            composite: the rules of the way back.
            watch: what is looked at.
            values, roots: as for :meth:`recorded`.

        Raises:
            MethodNotApplicable: no attention, or the last block's output does not reach the logits.
        """
        relevance, seen = composite.carrier == "relevance", watch.seen
        attended = self.attended(values, roots, relevance=relevance, row_alone=seen is None, merged=True)
        if min(watch.blocks, default=attended.first) < attended.first:
            raise self.refuse(MERGED)
        first_run = [GRADIENT] if watch.gradient or relevance else []

        def at_map(block: int, *flows: Tensor) -> None:
            shown = attended.scores(block) if watch.scores else attended.map(block)
            if seen is not None:
                seen(block, shown, flows[-1], *(flows[:1] if watch.gradient else ()))

        at, seed = None if seen is None else at_map, self.seed(attended.logits)
        walked = attended.walk_blocks(seed, [*first_run, composite], at, watch.blocks, watch.entering)
        if walked.row is None and seen is not None:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        balance = None if walked.sums is None else replace(walked.sums.balance, precision=attended.whole.precision)
        return MapWalk(attended.logits, walked.row, balance)

    def look_at_maps(
        self, fuse: Callable[[int, int, Callable[[], Tensor]], Tensor | None]
    ) -> tuple[MapWalk, list[Tensor]]:
        """Run the model once and look at the maps of all blocks, one of which is in memory at a time.

        Args:
            fuse: (block, N, what returns its map ``[B, H, N, N]``) -> ``[B, N, N]``, or None to leave the block out.

        Returns:
            The readout row, which is that of ½‖logits‖² and so the same for every class, and what ``fuse`` returned.
        """
        attended = self.attended(merged=True)
        row, kept = self.row_read(attended), {}

        def maps(block: int) -> Tensor:
            if block < attended.first:
                raise self.refuse(MERGED)
            return attended.map(block)

        for block in range(attended.first + len(attended.attentions)):
            fused = fuse(block, attended.tokens, partial(maps, block))
            attended.release()
            if fused is not None:
                kept[block] = fused
        return MapWalk(attended.logits, row), self.global_maps(kept)

    def row_read(self, attended: AttendedPass) -> Tensor:
        """Return ``[B, N]``, how much ½‖logits‖² reads each row of the last state: the same for every class."""
        row = attended.walk(attended.logits, [GRADIENT]).row
        if row is None:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        return row

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around a method's work: a user's ``inference_mode`` has no part in it, a model that is changed meanwhile is
        refused, and the rules of the options hold."""
        with alone(self.model), torch.inference_mode(False), declared(self.options.rules):
            yield

    def forward(self, inputs: Inputs | None = None) -> Tensor:
        """The logits that the target is about, of a plain forward pass without gradients."""
        given = inputs or self.inputs
        try:
            return plain_logits(self.model, *self.fed(given), self.read, given.samples)
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            if inputs is None or isinstance(error, WhyformerError):
                raise
            raise on_changed_inputs(error, f"{self.method}: ") from error

    # -- blocks
    def layer(self, number: int, name: str = "start_layer") -> int:
        """The number of a layer of attention from 0, in the stream that is read out: a block, where there is one."""
        return self.block(number, name, None if self.structure.is_plain else self.structure.layers)

    def block(self, number: int, name: str = "start_layer", count: int | None = None) -> int:
        """A block number from 0, checked against the model before work starts."""
        count = self.blocks() if count is None else count
        if count and not -count <= number < count:
            raise InputError(
                f"{self.method}: {name}={number} is outside the model, which has {count} blocks (0 to {count - 1})"
            )
        return number % count if count else number

    def blocks(self, unknown: str | None = None) -> int:
        """Number of the blocks that the rows of the main input go through; 0 if none was seen, or refused as what is
        ``unknown`` then."""
        count = len(self.structure.passed.blocks_of(self.inputs.name))
        if not count and unknown is not None:
            raise self.refuse(f"no blocks were seen in it, so {unknown} is unknown")
        return count

    # -- where token rows lie in a picture
    def places(self, tokens: int) -> Places:
        """Where ``tokens`` rows lie in the picture.

        Raises:
            MethodNotApplicable: that is unknown.
        """
        passed, name = self.structure.passed, self.inputs.name
        fitting = (s for s in self.structure.streams if name in s.names and s.rows.shape[1] == tokens)
        found = next((places for s in fitting if (places := passed.places(name, s)) is not None), None)
        if found is None:
            said = f"which part of the picture each of its {tokens} tokens stands for is unknown"
            raise self.refuse(f"{said}, or differs from sample to sample: explain one at a time", verdict=NOT_YET)
        return found

    def read_box(self, name: str) -> Box | None:
        """(left, top, right, bottom) of the pixels of a picture that the model reads; None for all of them, or if that
        is unknown, as for a model that cannot be recorded.

        Args:
            name: of the input.
        """
        passed = next(iter(self._passes.values()), None)
        if passed is None and (self.replay is not None or self.together is not None):
            passed = self.passed()
        with suppress(WhyformerError):
            inputs = self.inputs.select(slice(0, 1))
            passed = passed or record_pass(self.model, self.fed(inputs), inputs.samples)
            number = passed.tape.number(argument_of(passed.feed, self.given[name].scored))
            return find_read_box(passed.tape, number, passed.outputs.values())
        return None

    def cells(self, tokens: int) -> Tensor:
        """``[B, P]`` or ``[1, P]`` which of ``tokens`` rows stands for each cell of the picture; see :meth:`places`."""
        key = None if self.structure.is_plain else self.structure.alone(self.inputs.name)
        if key is not None:
            known, elements = self.located(self.inputs.name, key)
            if known == tokens and bool((elements.rows >= 0).all()):
                return elements.rows
        return self.places(tokens).rows[None]

    def lay_out(self, scores: Scores) -> Scores:
        """Scores of a picture's token rows as scores of its cells; those of no cell (CLS, registers) are left out. With
        the part of each picture that the model reads."""
        made = self._laid_out(scores)
        return replace(self._with_read(made), parts={n: self._with_read(part) for n, part in made.parts.items()})

    def _with_read(self, scores: Scores) -> Scores:
        inputs = scores.inputs or self.inputs
        return scores if inputs.modality != "image" else replace(scores, read=self.read_box(inputs.name))

    def _laid_out(self, scores: Scores) -> Scores:
        inputs = scores.inputs or self.inputs
        each = inputs.choices is not None and scores.values.shape == (inputs.rows, inputs.tensor.shape[-1])
        if scores.kind != "sequence" and not (scores.kind == "token" and each):
            return scores
        if inputs.choices is not None:
            if not each or (scores.kind == "sequence" and not self.structure.is_plain):
                raise self.refuse("its rows are not those of the texts of each sample", verdict=NOT_YET)
            return replace(scores, kind="token")
        key = None if self.structure.is_plain or scores.places is not None else self.structure.alone(inputs.name)
        if key is None and inputs.modality != "image" and scores.values.shape[1] != inputs.tensor.shape[inputs.axis]:
            key = frozenset({inputs.name})  # frames of a sound, or a text with a prompt of the model's own
        if key is not None:
            return self.of_sources({key: scores.values}, scores.logits, scores.diagnostics)
        if inputs.modality != "image":
            return scores
        places = scores.places or self.places(scores.values.shape[-1])
        return replace(scores, values=scores.values[:, places.rows], kind="patch", grid=places.grid, cells=places.box)

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

    def global_maps(self, maps: Mapping[int, Tensor]) -> list[Tensor]:
        """The maps of all blocks in order, ``[B, N, N]`` each.

        Args:
            maps: by the number of the block.

        Raises:
            MethodNotApplicable: there are none.
        """
        if not maps:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        home = self.inputs.tensor.device  # blocks may lie on several
        return [maps[i].to(home) for i in sorted(maps)]
