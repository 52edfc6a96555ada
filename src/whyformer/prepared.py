"""An input that is read and checked for a model; all entry points start from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from whyformer.errors import FOREIGN_ERRORS, InputError, TooLarge, WhyformerError, check_count
from whyformer.explanation.joining import joined, without_padding
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.inputs.appending import with_appended
from whyformer.inputs.failures import failure_reason
from whyformer.methods import METHODS, find
from whyformer.methods.diagnosis import check_samples, random_states, with_randomness, with_unscored
from whyformer.methods.finishing import Finish, finishing, note_claims
from whyformer.methods.scores import Scores
from whyformer.methods.sharing import SharedPasses
from whyformer.methods.task import Task
from whyformer.models.ends import end_function, final_activation
from whyformer.models.isolation import settled
from whyformer.models.kinds import comparison_of, is_known_language_model
from whyformer.models.memory import is_out_of_memory
from whyformer.progress import Track, tracking
from whyformer.targets import Resolver, Span, Target, distinct_texts, of_samples, several_tokens, written_target

if TYPE_CHECKING:
    from whyformer.explaining import OpenedModel

T = TypeVar("T")
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
# exact types only: out-of-memory errors and errors of a caller's hook or progress function are re-raised unchanged
_FOREIGN = {ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError}
_FOREIGN |= {TypeError, ValueError, ZeroDivisionError}



@dataclass(frozen=True, eq=False)
class Prepared:
    """An opened model and one input or batch that is read and checked for it
    (see :meth:`OpenedModel.prepare <whyformer.explaining.OpenedModel.prepare>`).

    Attributes:
        opened: the model with its processor and options.
        labels: class index -> name; None if the model does not name its classes.
        classes: number of classes; None if the model does not state it.
        singles: each sample separately, if they cannot be one batch or padding would change the prediction.
        also: classes whose logits the result always includes when it stores only some logits of a long row.
    """

    opened: OpenedModel
    inputs: Inputs
    labels: dict[int, str] | None
    classes: int | None
    singles: tuple[Prepared, ...] = ()
    also: tuple[int, ...] = ()
    _logits: dict[str | None, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> nn.Module:
        """The model to explain."""
        return self.opened.model

    @property
    def processor(self) -> Any:
        """The model's processor; None without one."""
        return self.opened.processor

    @property
    def name(self) -> str:
        """The model's name: as passed, as in its config, or the name of its class."""
        return self.opened.name

    @property
    def end_function(self) -> str:
        """Name of the function that the model applies to its logits at the end, if a run has shown one; "" for none."""
        return end_function(self.model, *self.inputs.feed)

    def activation(self, outputs: int, returned: bool = False) -> str:
        """Return the activation of a row of logits (see :func:`final_activation`). The model must have run.

        Args:
            outputs: length of the row.
            returned: whether the row is the model's return value, to which its end function is already applied.
        """
        end = self.end_function
        return "identity" if returned and end else final_activation(self.model, end, outputs, self._comparison)

    @property
    def _comparison(self) -> str:
        """The activation of a model that compares the pictures with the texts; "" for other models and inputs."""
        kinds = {side.modality for side in self.inputs.sides.values()}
        return comparison_of(self.model, *self.inputs.feed) if "text" in kinds and len(kinds) > 1 else ""

    def resolver(self, target: Target = None) -> Resolver:
        """Resolve a user's target against the model's classes."""
        facts = (self.labels, self.classes, self.inputs.batch, self.processor)
        return Resolver(target, *facts, activation=self.activation, texts=self.texts)

    def texts(self) -> list[list[str]] | None:
        """Return the texts that are the classes of each sample: the choices of multiple choice, or the texts that each
        picture is compared with; None for other classes, or without a tokenizer."""
        if self.singles:
            by_sample = [single.texts() for single in self.singles]
            return None if None in by_sample else [texts[0] for texts in by_sample if texts]
        inputs, tokenizer = self.inputs, self.opened.tokenizer
        sides = inputs.sides.values()
        text = next((side for side in sides if side.modality == "text" and side.special is not None), None)
        if text is None or tokenizer is None:
            return None
        assert text.special is not None
        if text.choices is not None:
            return [distinct_texts(tokenizer, *rows) for rows in zip(text.tensor, text.special, strict=True)]
        if inputs.modality == "text" or not self._comparison:
            return None
        return [distinct_texts(tokenizer, text.tensor, text.special)] * inputs.batch

    def task(self, target: Target | Resolver = None, name: str = "", progress: bool | Track = False) -> Task:
        """Return the task that methods run on; ``name`` names the work in error messages."""
        resolver = target if isinstance(target, Resolver) else self.resolver(target)
        inputs = self.inputs
        self.refuse_singles(name or "this")
        texts = inputs.kwargs.keys() & _TEXT if inputs.modality != "text" else ()
        if texts and self._comparison and not resolver.pairs:  # the texts are the classes
            inputs = replace(inputs, shared=frozenset(texts))
        facts = (lambda: resolver.counted, resolver.last, self.opened.options, resolver.activation)
        return Task(self.model, inputs, resolver.callable, tracking(progress), name, resolver.read, *facts)

    def refuse_singles(self, name: str) -> None:
        """Raise if the samples cannot be batched, which the work called ``name`` requires."""
        if self.singles:
            raise InputError(
                f"{name} needs a batch, and these samples make none: their shapes differ, there is no padding token, "
                "the model takes one sample at a time, or padding would change its prediction; pass one sample"
            )

    def batches(self, target: Target) -> list[tuple[Prepared, Target]]:
        """Return the inputs of each batch with its target: each of :attr:`singles` alone, or all samples together.

        Raises:
            InputError: the target does not fit the model or the samples.
        """
        if not self.singles:
            return [(self, target)]
        self.resolver(target)
        return [(single, of_samples(target, [i])) for i, single in enumerate(self.singles)]

    def separate(self, explanation: Explanation) -> list[Explanation]:
        """Return the explanation of each batch of :meth:`each`, without padding, from that of all samples.

        Raises:
            InputError: as for :meth:`columns`.
        """
        if not self.singles:
            return [explanation]
        e = self.main_part(explanation)
        place = torch.arange(e.scores.shape[-1])
        real = [torch.isin(place, place[columns]) for columns in self.columns(e.scores)]
        return [without_padding(e[i], row) for i, row in enumerate(real)]

    def main_part(self, explanation: Explanation) -> Explanation:
        """Return the explanation of the main input.

        Raises:
            InputError: it has scores of other inputs only.
        """
        name = self.inputs.name
        if name in explanation.inputs:
            return explanation.part(name)
        if explanation.input is not None and not self.singles:
            raise InputError(
                f"features of {name!r} are removed, and this explanation has scores of {explanation.input!r}: "
                "pass the whole explanation, not a part of it"
            )
        return explanation

    def columns(self, scores: torch.Tensor) -> list[slice]:
        """Return the columns of the tokens of each of :attr:`singles`, in padded scores ``[B, N]`` of all samples.

        Raises:
            InputError: the samples are pictures, whose maps were brought to a common grid, or there is not a score for
                each token.
        """
        if any(single.inputs.modality == "image" for single in self.singles):
            raise InputError(
                "these samples cannot be batched, and the maps of their pictures have a common grid: pass one sample "
                "and its explanation at a time"
            )
        lengths = [single.inputs.extent[1] for single in self.singles]
        if tuple(scores.shape) != (expected := (len(lengths), max(lengths))):
            raise InputError(
                f"scores of shape {list(scores.shape)} do not fit {expected[0]} samples of up to {expected[1]} tokens: "
                "pass one score for each token, those of pictures and special tokens included"
            )
        return [slice(expected[1] - n, None) if self.padding[1] else slice(n) for n in lengths]

    def logits(self, target: str | None = None) -> torch.Tensor:
        """Return the row of logits ``[B, C]`` that a target reads, from a plain forward pass that is run once.

        Args:
            target: a target as text, such as ``"Token(5)"``; None for the row that is read without a target.
        """
        if target not in self._logits and self.singles:
            rows = [single.logits(written_target(goal)) for single, goal in self.batches(target)]
            self._logits[target] = torch.cat(rows)
        elif target not in self._logits:
            self._logits[target] = self.forward(self.task(target))
        return self._logits[target]

    def likeliest(self, count: int) -> list[Target]:
        """Return ``count`` targets in descending order of logits, each one class per sample; [None] for 1."""
        check_count("likeliest", count)
        if count == 1:
            return [None]
        best = self.logits().argsort(dim=-1, descending=True, stable=True)[:, :count]
        return list(best.T.tolist())

    def explain(
        self,
        method: str,
        target: Target = None,
        *,
        progress: bool | Track = False,
        shared: SharedPasses | None = None,
        **settings: Any,
    ) -> Explanation:
        """Explain as :func:`whyformer.explain` does; ``shared`` shares work with other methods of the same target."""
        if not self.singles:
            return self._explain_batch(method, target, progress, shared, settings)
        results = [single.explain(method, goal, progress=progress, **settings) for single, goal in self.batches(target)]
        return joined(results, *self.padding)

    @property
    def padding(self) -> tuple[str, bool]:
        """(padding token of the tokenizer or "", whether it pads on the left)."""
        tokenizer = self.opened.tokenizer
        return getattr(tokenizer, "pad_token", None) or "", getattr(tokenizer, "padding_side", "right") == "left"

    def _explain_batch(
        self,
        method: str,
        target: Target,
        progress: bool | Track,
        shared: SharedPasses | None,
        settings: dict[str, Any],
    ) -> Explanation:
        span = several_tokens(target, self.processor, self.labels, self.classes)
        if span is not None and self._is_language_model():
            target = Span(-len(span[1]), -1)
            return self._with_appended(*span).explain(method, target, progress=progress, **settings)
        definition = find(method)
        full = definition.complete(settings)
        if definition.modality != "both" and self.inputs.modality != definition.modality:
            raise InputError(
                f"{method} explains {'pictures' if definition.modality == 'image' else 'text'}, and "
                f"this input is of kind {self.inputs.modality!r}"
            )
        resolver = self.resolver(target)

        def explained(task: Task) -> Explanation:
            states = random_states(self.model)
            scores = _checked(definition.run(task, full), task)
            check_samples(task, scores.logits)
            scores = with_unscored(task, with_randomness(task, scores, states))
            return self.finishing(resolver, scores.logits)(scores, method, full)

        explanation = self.work(replace(self.task(resolver, method, progress), shared=shared), explained)
        note_claims(explanation, definition, full)
        return explanation

    def _is_language_model(self) -> bool:
        with suppress(InputError):
            self.logits()
        return is_known_language_model(self.model)

    def _with_appended(self, text: str, ids: list[int]) -> Prepared:
        """Append the tokens of a text to the input of a language model, to explain them as a span."""
        tokenizer = self.opened.tokenizer
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
        note = f"{text!r} is {len(ids)} tokens ({names}): the log-probability of this span is explained"
        return replace(self, inputs=with_appended(self.inputs, ids, tokenizer, note), _logits={})

    def forward(self, task: Task) -> torch.Tensor:
        """Return the row of logits that the task's target reads, with the errors of :meth:`work`."""
        return self.work(task, Task.forward)

    def work(self, task: Task, function: Callable[[Task], T]) -> T:
        """Return ``function(task)``; errors of the model's forward are raised as errors that name the cause and the
        remedy. The function is run again if the model changed meanwhile for the first time (see :func:`settled`)."""

        def guarded() -> T:
            # the method, the methods that "auto" tries, and checks share a pass, but none of before the model changed
            fresh = replace(task, shared=task.shared or SharedPasses())
            try:
                with task.at_work():
                    return function(fresh)
            except Exception as error:
                converted = self._converted_error(error, task)
                if converted is None:
                    raise
                raise converted from error

        return settled(self.model, guarded)

    def _converted_error(self, error: Exception, task: Task) -> WhyformerError | None:
        """Convert an error of another library to one of whyformer; return None if the model, the target or the caller
        raised it."""
        if is_out_of_memory(error):
            return out_of_memory(task)
        if type(error) not in _FOREIGN:
            return None
        cause = failure_reason(self.model, self.inputs, error)
        if cause is not None:
            return InputError(cause)
        try:
            task.value(task.forward())
        except FOREIGN_ERRORS:  # the model fails without the method too
            return None
        return task.refuse(f"it failed with {type(error).__name__}: {error}", verdict="is not supported yet")

    def finishing(self, resolver: Resolver, logits: torch.Tensor) -> Finish:
        """Return the function that turns scores into explanations of this input."""
        return finishing(self.inputs, self.name, resolver, logits, self.end_function, self.also)


def _checked(scores: Scores, task: Task) -> Scores:
    """Return a method's result; raise InputError unless it has a number for each token of a text."""
    values, inputs = scores.values, task.inputs
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (values, scores.logits)):
        raise InputError(f"the method {task.method} must return Scores with tensors of floating-point numbers")
    ours = (scores.inputs is None or scores.inputs is inputs) and inputs.modality == "text" and inputs.choices is None
    if ours and tuple(values.shape) != inputs.extent:
        raise InputError(
            f"the method {task.method} must return a score for each token, {list(inputs.extent)}, not "
            f"{list(values.shape)}"
        )
    return scores


def out_of_memory(task: Task) -> TooLarge:
    """Return the error for running out of memory: the method that ran, and ways to use less memory."""
    batch, method = task.inputs.batch, METHODS.get(task.method)  # None for attention_maps and audit
    ways = ["fewer inputs at once"] if batch > 1 else []
    if method is not None:
        ways += ["checkpoint=True"] if method.checkpoint and not task.options.checkpoint else []
        ways += [] if method.checkpoint else ["a method that stores no attention maps (attnlrp, input_x_gradient)"]
        ways += ["batch_size=1"] if method.settings.get("batch_size", 1) > 1 else []
    ways += ["half precision (dtype='bfloat16')", "or a shorter or smaller input"]
    many = f" of {batch} inputs" if batch > 1 else ""
    return TooLarge(f"memory ran out in {task.method}{many}: try {', '.join(ways)}")
