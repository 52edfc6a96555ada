"""An input that is read and checked for a model: what every entrance starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from whyformer.errors import FOREIGN_ERRORS, InputError, TooLarge, WhyformerError
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.inputs.longer import lengthened
from whyformer.inputs.unfit import no_table, unfit
from whyformer.methods import find
from whyformer.methods.diagnosis import check_samples, with_unscored
from whyformer.methods.finishing import Finish, finishing, note_claims
from whyformer.methods.task import Scores, Task
from whyformer.methods.together import Together
from whyformer.models.ends import end_function, final_activation
from whyformer.models.kinds import LANGUAGE, compares
from whyformer.models.memory import is_out_of_memory
from whyformer.progress import Track, tracking
from whyformer.targets import Resolver, Span, Target, of_samples, several_tokens

if TYPE_CHECKING:
    from whyformer.explaining import OpenedModel

_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
# no subclasses: running out of memory, and what a caller's own hook or progress raises, are told as they are
_UNTOLD = {ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError}
_UNTOLD |= {TypeError, ValueError, ZeroDivisionError}



@dataclass(frozen=True, eq=False)
class Prepared:
    """An opened model and one input or batch, read and checked for it
    (see :meth:`OpenedModel.prepare <whyformer.explaining.OpenedModel.prepare>`).

    Attributes:
        opened: the model with its processor and options.
        labels: class index -> name, where the model names its classes; classes: how many, where it says so.
        singles: each prompt by itself, where the tensors of several prompts do not stack.
        also: classes whose logits a result keeps in any case, of a row of many.
    """

    opened: OpenedModel
    inputs: Inputs
    labels: dict[int, str] | None
    classes: int | None
    singles: tuple[Prepared, ...] = ()
    also: tuple[int, ...] = ()
    _logits: list[torch.Tensor] = field(default_factory=list, repr=False)

    @property
    def model(self) -> nn.Module:
        """The model that is explained."""
        return self.opened.model

    @property
    def processor(self) -> Any:
        """Its processor, None where there is none."""
        return self.opened.processor

    @property
    def name(self) -> str:
        """The model's name: as it was given, as its config has it, or its class."""
        return self.opened.name

    @property
    def end_function(self) -> str:
        """The name of the function that the model's logits go through at its end, as far as it was run; "" for none."""
        return end_function(self.model, *self.inputs.feed)

    def activation(self, outputs: int, returned: bool = False) -> str:
        """What turns a row of so many logits into what it says (see :func:`final_activation`), once the model was run.

        Args:
            returned: whether the row is what the model returned, its end function applied.
        """
        end = self.end_function
        return "identity" if returned and end else final_activation(self.model, end, outputs)

    def resolver(self, target: Target = None) -> Resolver:
        """What a user calls the target, checked against the model's classes."""
        facts = (self.labels, self.classes, self.inputs.batch, self.processor)
        return Resolver(target, *facts, activation=self.activation)

    def task(self, target: Target | Resolver = None, name: str = "", progress: bool | Track = False) -> Task:
        """The inputs and the target as methods take them; ``name`` is what errors call the work."""
        resolver = target if isinstance(target, Resolver) else self.resolver(target)
        inputs = self.inputs
        self.refuse_singles(name or "this")
        texts = inputs.kwargs.keys() & _TEXT if inputs.modality != "text" and not resolver.pairs else ()
        if texts and compares(self.model, *inputs.feed):  # the texts are the classes of every picture
            inputs = replace(inputs, shared=frozenset(texts))
        facts = (resolver.counted, resolver.last, self.opened.options, resolver.activation)
        return Task(self.model, inputs, resolver.callable, tracking(progress), name, resolver.read, *facts)

    def refuse_singles(self, name: str) -> None:
        """Raise where these are prompts that make no batch, by what needs one."""
        if self.singles:
            raise InputError(f"the pictures of these prompts make no batch, as {name} needs: take one prompt")

    def logits(self) -> torch.Tensor:
        """``[B, C]`` of a plain forward pass, made once."""
        if not self._logits and self.singles:
            self._logits.append(torch.cat([one.logits() for one in self.singles]))
        elif not self._logits:
            self._logits.append(self.task().forward())
        return self._logits[0]

    def likeliest(self, count: int) -> list[Target]:
        """A target for each of the ``count`` highest logits: None for the first, then one class a sample."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"likeliest must be a whole number of at least 1, not {count!r}")
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
        together: Together | None = None,
        **settings: Any,
    ) -> Explanation:
        """As :func:`~whyformer.explain`; ``together`` is what it shares with other methods of the same target."""
        if not self.singles:
            return self._whole(method, target, progress, together, settings)
        self.resolver(target)
        made = [
            one.explain(method, of_samples(target, [i]), progress=progress, **settings)
            for i, one in enumerate(self.singles)
        ]
        return joined(made, *self.padding)

    @property
    def padding(self) -> tuple[str, bool]:
        """(what fills up texts to the longest, whether it stands in front of them)."""
        words = getattr(self.processor, "tokenizer", self.processor)
        return getattr(words, "pad_token", None) or "", getattr(words, "padding_side", "right") == "left"

    def _whole(
        self,
        method: str,
        target: Target,
        progress: bool | Track,
        together: Together | None,
        settings: dict[str, Any],
    ) -> Explanation:
        span = several_tokens(target, self.processor, self.labels, self.classes)
        if span is not None and self._speaks():
            target = Span(-len(span[1]), -1)
            return self._behind(*span).explain(method, target, progress=progress, **settings)
        chosen = find(method)
        full = chosen.complete(settings)
        if chosen.modality != "both" and self.inputs.modality != chosen.modality:
            raise InputError(
                f"{method} explains {'pictures' if chosen.modality == 'image' else 'text'}, and "
                f"this input is {self.inputs.modality}"
            )
        resolver = self.resolver(target)
        task = replace(self.task(resolver, method, progress), together=together)
        with self.explaining_errors(task), task.at_work():
            scores = chosen.run(task, full)
            check_samples(task, scores.logits)
            scores = with_unscored(task, scores)
            explanation = self.finish(scores, resolver, method, full)
        note_claims(explanation, chosen, full)
        return explanation

    def _speaks(self) -> bool:
        """Whether this is a language model."""
        with suppress(InputError):
            self.logits()
        return LANGUAGE.get(self.model, False)

    def _behind(self, text: str, ids: list[int]) -> Prepared:
        """With the tokens of a text behind those of a language model, where they are a span."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        named = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
        said = f"{text!r} is {len(ids)} tokens ({named}): the log-probability of this span is explained"
        return replace(self, inputs=lengthened(self.inputs, ids, tokenizer, said), _logits=[])

    @contextmanager
    def explaining_errors(self, task: Task) -> Iterator[None]:
        """Raise errors of the model's forward with their cause and the way out."""
        try:
            yield
        except Exception as error:
            told = self.told(error, task)
            if told is None:
                raise
            raise told from error

    def told(self, error: Exception, task: Task) -> WhyformerError | None:
        """What another kind of error is told as; None where it is the model's, the target's or the caller's."""
        if is_out_of_memory(error):
            return out_of_memory(task)
        if type(error) not in _UNTOLD:
            return None
        reason = unfit(self.model, self.inputs, error)
        if reason is not None:
            return InputError(reason)
        try:
            task.value(task.forward())
        except FOREIGN_ERRORS:  # without the method too
            reason = no_table(self.inputs, error)
            return None if reason is None else InputError(reason)
        return task.refuse(f"it ended in {type(error).__name__}: {error}", verdict="is not supported yet")

    def finish(self, scores: Scores, resolver: Resolver, method: str, settings: dict[str, Any]) -> Explanation:
        """The :class:`~whyformer.Explanation` of a method's scores."""
        return self.finishing(resolver, scores.logits)(scores, method, settings)

    def finishing(self, resolver: Resolver, logits: torch.Tensor) -> Finish:
        """What makes explanations of this input from scores."""
        return finishing(self.inputs, self.name, resolver, logits, self.end_function, self.also)


def out_of_memory(task: Task) -> TooLarge:
    """What running out of memory is told as: what ran, and what takes less."""
    batch, chosen = task.inputs.batch, find(task.method)
    ways = ["fewer inputs at once"] if batch > 1 else []
    ways += ["checkpoint=True"] if chosen.checkpoint and not task.options.checkpoint else []
    ways += [] if chosen.checkpoint else ["a method that keeps no attention maps (attnlrp, input_x_gradient)"]
    ways += ["batch_size=1"] if chosen.settings.get("batch_size", 1) > 1 else []
    ways += ["half precision (dtype='bfloat16')", "or a shorter or smaller input"]
    many = f" of {batch} inputs" if batch > 1 else ""
    return TooLarge(f"memory ran out in {task.method}{many}: take {', '.join(ways)}")
