"""The task that a method works on: a model, its inputs and a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError, MethodNotApplicable, WhyformerError, on_changed_inputs
from whyformer.inputs import Inputs
from whyformer.methods.map_passes import MapPass, WalkResult
from whyformer.methods.passes import Callback, ForwardPass, argument_of, record_pass
from whyformer.methods.scores import Scores
from whyformer.methods.sharing import SharedPasses
from whyformer.methods.structure import NOT_YET, UNREAD
from whyformer.methods.task_inputs import TaskInputs
from whyformer.models.isolation import refuse_changes
from whyformer.models.kinds import accepts_batches
from whyformer.models.output import Output
from whyformer.models.readout import plain_logits, row_of
from whyformer.options import DEFAULTS, Options
from whyformer.rules.registered import custom_rules
from whyformer.tape.feeding import find_read_box
from whyformer.tape.places import Box
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite

__all__ = ["Scores", "Task"]


@dataclass(frozen=True)
class Task(TaskInputs):
    """A model, its inputs and a target to explain, with the operations that most methods need.

    Attributes:
        model: the model.
        inputs: the inputs.
        resolve: function from logits ``[B, C]`` to the target as a callable for these samples.
        progress: function that wraps an iterable of long work.
        method: name of the method.
        read_logits: function from the model's output to the row of logits that the target selects from.
        known_counted: the value of :attr:`counted`; None until the model has run.
        last: whether the row of logits is that of the last real token, so that a language model may skip the others.
        options: options of the model's passes.
        activation: function from the row of logits to its activation, "softmax", "sigmoid" or "identity".
        shared: passes shared by several methods or targets.
    """

    model: nn.Module
    inputs: Inputs
    resolve: Callable[[Tensor], Callable[[Tensor], Tensor]]
    progress: Callable[..., Any]
    method: str
    read_logits: Callable[[Output], Tensor] = row_of
    known_counted: Callable[[], bool | None] = lambda: False
    last: bool = False
    options: Options = DEFAULTS
    activation: Callable[[Tensor], str] = field(default=lambda logits: "softmax", repr=False)
    shared: SharedPasses | None = field(default=None, repr=False)

    @property
    def counted(self) -> bool:
        """Whether a token's index selects the row that the target reads, so that it changes when other tokens are
        deleted."""
        if self.known_counted() is None:
            self.forward()
        return bool(self.known_counted())

    def seed(self, logits: Tensor) -> Tensor:
        """Return ∂target/∂logits ``[B, C]``, the start of backward passes (one-hot for a logit).

        Raises:
            InputError: the target does not depend on the logits; or as for :meth:`target`.
        """
        self.inputs.check_rows(logits)
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            value = self.target(leaf.detach())(leaf)
            (seed,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True) if value.requires_grad else (None,)
        if seed is None:
            raise InputError("the target does not depend on the logits")
        return seed

    def target(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the target as a callable for these samples.

        Raises:
            InputError: its value is not finite, as for a class that the model excludes by a logit of −∞.
        """
        target = self.resolve(logits)
        if not bool(target(logits).isfinite().all()):
            raise InputError("the target's value is not finite: choose a class with a finite logit")
        return target

    def value(self, logits: Tensor, like: Tensor | None = None) -> Tensor:
        """Return the target's value ``[B]``. The predicted class is that of ``like``; of ``logits`` if None."""
        return self.resolve(logits if like is None else like)(logits)

    def copies(self, times: int, logits: Tensor) -> Task:
        """Return the task for ``times`` adjacent copies of each sample; the predicted class is taken from the
        unchanged samples' ``logits`` ``[B, C]``."""
        target = self.resolve(logits)

        def value(copied: Tensor) -> Tensor:
            rounds = copied.unflatten(0, (len(logits), times)).unbind(1)
            return torch.stack([target(part) for part in rounds], 1).flatten()

        repeated = self.inputs.with_tensor(self.inputs.tensor.repeat_interleave(times, 0))
        copied = replace(self, inputs=repeated, resolve=lambda _: value)
        vars(copied)["derived"] = self.derived  # the same for copies, which would need a pass to find it
        return copied

    def depends_on(self, logits: Tensor) -> Tensor:
        """Return ``[B, C]`` True at logits on which the target depends, where ∂target/∂logits is not 0."""
        return self.seed(logits) != 0

    def at_once(self, batch_size: int) -> int:
        """Return the batch size for the model's passes: ``batch_size``, or 1 if the model does not accept batches."""

        def twice() -> tuple[Any, Any]:
            return self.feed(self.inputs.with_tensor(self.inputs.tensor.repeat_interleave(2, 0)))

        return batch_size if accepts_batches(self.model, twice) else 1

    def value_index(self, logits: Tensor) -> Tensor:
        """Return the class ``[B]`` of each sample's target: the one with the largest ∂target/∂logits ≠ 0."""
        seed = self.seed(logits)
        return seed.masked_fill(seed == 0, -torch.inf).argmax(-1)

    def of_samples(self, numbers: list[int], logits: Tensor) -> Task:
        """Return the task for some samples; the predicted class is taken from the ``logits`` ``[B, C]`` of all samples.
        """
        target, places = self.resolve(logits), torch.tensor(numbers, device=logits.device)

        def value(rows: Tensor) -> Tensor:
            return target(logits.to(rows).index_put((places,), rows))[places]

        return replace(self, inputs=self.inputs.of_samples(numbers), resolve=lambda _: value)

    def walk(
        self,
        map_pass: MapPass,
        composite: Composite,
        on_map: Callback,
        watched: Iterable[int],
        *,
        gradient: bool = False,
        scores: bool = False,
        at: Mapping[int, Callback] | None = None,
    ) -> WalkResult:
        """Walk back from the target over a recorded pass and observe its attention maps.

        Args:
            map_pass: the pass.
            composite: the rules of the backward walk.
            on_map: called with an attention's index, its map A and the flow that arrives at A, ``[B, H, Q, K]`` each,
                the last attention first.
            watched: indices of the observed attentions.
            gradient: also pass ∂target/∂A to ``on_map``, as the fourth argument.
            scores: pass the attention scores before the softmax to ``on_map`` instead of A.
            at: value -> function to call with the flows that arrive there, see :meth:`MapPass.walk`.

        Raises:
            MethodNotApplicable: the output of the last block does not reach the logits.
        """
        first_run = [GRADIENT] if gradient or composite.propagates == "relevance" else []

        def at_map(index: int, *flows: Tensor) -> None:
            attention_map = map_pass.scores(index) if scores else map_pass.map(index)
            on_map(index, attention_map, flows[-1], *(flows[:1] if gradient else ()))

        walked = map_pass.walk(self.seed(map_pass.logits), [*first_run, composite], at_map, watched, at=at)
        if not walked.readouts:
            raise self.refuse(UNREAD, verdict=NOT_YET)
        return walked

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context manager for the work of a method: turn ``inference_mode`` off, raise an error if the model changes,
        and apply the rules of the options."""
        with refuse_changes(self.model), torch.inference_mode(False), custom_rules(self.options.rules):
            yield

    def forward(self, inputs: Inputs | None = None) -> Tensor:
        """Return the row of logits that the target reads, from a plain forward pass without gradients."""
        used = inputs or self.inputs
        try:
            return plain_logits(self.model, *self.feed(used), self.read_logits, used.samples)
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            if inputs is None or isinstance(error, WhyformerError):
                raise
            raise on_changed_inputs(error, f"{self.method}: ") from error

    # -- blocks
    def layer(self, number: int, name: str = "start_layer") -> int:
        """Return the index of an attention layer, from 0, in the stream that the target reads."""
        return self.block(number, name, self.structure.layers)

    def block(self, number: int, name: str = "start_layer", count: int | None = None) -> int:
        """Return a block's index from 0, after checking it against the model."""
        count = self.blocks() if count is None else count
        if count and not -count <= number < count:
            raise InputError(
                f"{self.method}: {name}={number} is outside the model, which has {count} blocks (0 to {count - 1})"
            )
        return number % count if count else number

    def blocks(self, unknown: str | None = None) -> int:
        """Return the number of blocks that the rows of the main input pass through. If there are none, return 0; with
        ``unknown``, which says what is unknown without blocks, raise an error instead."""
        count = len(self.structure.map_pass.blocks_of(self.inputs.name))
        if not count and unknown is not None:
            raise self.refuse(f"it has no recognizable blocks, so {unknown} is unknown")
        return count

    # -- the layout of scores
    def read_box(self, name: str) -> Box | None:
        """Return (left, top, right, bottom) of the pixels of a picture that the model reads; None for all of them, or
        if unknown, such as for a model that cannot be recorded.

        Args:
            name: name of the input.
        """
        recorded = next(iter(self._passes.values()), None)
        if recorded is None and self.shared is not None:
            recorded = self.shared.known_pass(self.inputs)
        place = self.scored_inputs[name].scored
        inputs = self.inputs.with_main(name).select(slice(0, 1))

        def parts(inputs: Inputs, recorded: ForwardPass | None = None) -> tuple[Tape, int, Iterable[int]]:
            recorded = recorded or record_pass(self.model, self.feed(inputs), inputs.samples)
            return recorded.tape, recorded.tape.number(argument_of(recorded.feed, place)), recorded.outputs.values()

        def noise() -> tuple[Tape, int, Iterable[int]]:
            pixels = torch.randn(inputs.tensor.shape, generator=torch.Generator().manual_seed(0))
            return parts(inputs.with_tensor(pixels.to(inputs.tensor)))

        with suppress(WhyformerError):
            return find_read_box(*parts(inputs, recorded), noise)
        return None

    def lay_out(self, scores: Scores) -> Scores:
        """Add the box of the pixels that the model reads to scores of pictures.

        Raises:
            MethodNotApplicable: there is not one score for each token of each text of a sample.
        """
        inputs = scores.inputs or self.inputs
        one_per_token = inputs.choices is None or scores.values.shape == (inputs.rows, inputs.tensor.shape[-1])
        if scores.kind == "token" and not one_per_token:
            raise self.refuse("its rows are not the tokens of each sample's texts", verdict=NOT_YET)
        parts = {n: self._with_read(part) for n, part in scores.parts.items()}
        return replace(self._with_read(scores), parts=parts)

    def _with_read(self, scores: Scores) -> Scores:
        inputs = scores.inputs or self.inputs
        return scores if inputs.modality != "image" else replace(scores, read=self.read_box(inputs.name))

    def same_rows(self, values: Tensor, expected: Tensor) -> bool:
        """Return whether two ``[B, N, D]`` are equal up to rounding, except at padding."""
        if values.shape != expected.shape:
            return False
        mask = self.inputs.row_mask
        real = mask if mask is not None and mask.shape == values.shape[:2] else torch.ones(values.shape[:2]).bool()
        real = real.to(values.device)
        difference, size = (values - expected).detach()[real], expected.detach()[real]
        tolerance = max(1e-5, torch.finfo(values.dtype).eps ** 0.5 * 4)  # norms of float64 models may run in float32
        return float(difference.norm()) <= tolerance * float(size.norm())

    # -- checks of the recorded pass -------------------------------------------------------------------------
    def refuse(self, reason: str, *, verdict: str = "has no meaning") -> MethodNotApplicable:
        """Return the error for a model that this method does not support; it names methods that apply."""
        from whyformer.methods.applicability import applicable

        others = ", ".join(name for name in applicable(self) if name != self.method)
        message = f"{self.method} {verdict} on this model: {reason}"
        return MethodNotApplicable(f"{message}. Methods that apply: {others}" if others else message)
