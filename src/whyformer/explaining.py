"""``explain``, and the one way from what a user has to a model that is ready to be explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from whyformer.batches import in_batches
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import FOREIGN_ERRORS, InputError, TooLarge, WhyformerError
from whyformer.explanation.joining import joined
from whyformer.explanation.mosaic import on_pictures
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs, prepare
from whyformer.inputs.given import count_of, wants_processor
from whyformer.inputs.longer import lengthened
from whyformer.inputs.prompts import is_prompt, unstackable
from whyformer.inputs.unfit import no_table, unfit
from whyformer.methods import find
from whyformer.methods.batch_axes import with_batch_axes
from whyformer.methods.diagnosis import check_choices, check_samples, with_unscored
from whyformer.methods.finishing import finish, note_claims
from whyformer.methods.orientation import oriented
from whyformer.methods.task import Scores, Task
from whyformer.methods.together import Together
from whyformer.models.ends import end_function, final_activation
from whyformer.models.kinds import LANGUAGE, compares
from whyformer.models.loading import model_name, opened, processor_of
from whyformer.models.memory import is_out_of_memory
from whyformer.models.structure import class_count, class_names
from whyformer.progress import Track, tracking
from whyformer.rules.core import Rule
from whyformer.rules.registered import declared
from whyformer.targets import Resolver, Span, Target, of_samples, several_tokens

_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}


def explain(
    model: nn.Module | str,
    inputs: Any,
    method: str = DEFAULT_METHOD,
    target: Target = None,
    processor: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    truncate: bool = False,
    progress: bool | Track = False,
    rules: Mapping[Any, str | Rule] | None = None,
    checkpoint: bool = False,
    **settings: Any,
) -> Explanation:
    """Explain a prediction: which patches, pixels or tokens made the model say this class.

    Args:
        model: any ``torch.nn.Module`` in eval mode, unmodified; or a name: a hub id, a local folder,
            ``"bundled:digits"``, ``"bundled:sst2"``, which is loaded once; or a pipeline of transformers.
        inputs: a tensor or mapping of tensors as the model's forward takes them (pixels ``[B, C, H, W]``, ids
            ``[B, N]``), or a list of samples that are (token ids of unlike lengths are padded), or a tuple of the
            arguments of forward; or with ``processor`` a picture, a string, or a list of either, of which 32 go through
            the model at a time, fewer where memory runs out. A picture is a PIL image or a file (path, or opened for
            reading bytes), read as :mod:`whyformer.inputs.pictures` says; what had to be done to it stands in
            ``diagnostics["input"]``.
        method: a name from :func:`whyformer.list_methods`; by default "auto", which takes what measured best for this
            kind of input and names it in ``diagnostics["auto"]``.
        target: None (each sample's predicted class), a class index, one index a sample, a class name (see
            :func:`whyformer.targets.class_index`), or one of :mod:`whyformer.targets`, also written out (``"Token(-1,
            17)"``), or a function: of the logits ``[B, C]`` of the samples that go through the model together, or
            of the model's raw output where that is not one row of logits a sample (nor a language model's), and needs
            a target. It returns ``[B]``.
        processor: Hugging Face image processor or tokenizer, or a function picture -> tensor; found by itself when
            ``model`` is a name or a pipeline, or was loaded from a place that has one (``model.name_or_path``).
        device, dtype: where and in which precision a model given by name is loaded.
        truncate: allow text longer than the model takes to be cut off.
        progress: show a progress bar on long work; or a function (iterable, description, total) -> iterable that
            stands around it, such as another kind of bar (it may raise, to stop the work).
        rules: operations of your own and what they are like, ``{MyActivation: "gelu"}``: for this call what
            :func:`whyformer.rules.register` says for all.
        checkpoint: for long texts and large models, keep of each block what enters it alone, and run it again on the
            way back: the same scores in about half as much time more. For methods that send something back through
            whole blocks (``checkpoint`` of :func:`whyformer.list_methods`).
        **settings: the method's settings; see :func:`whyformer.list_methods`.

    Returns:
        An :class:`~whyformer.Explanation` of the whole batch; a batch of B equals B single runs.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`; each names the cause and the way out.
    """
    find(method).complete(settings)  # a slip of the pen is told before a model is loaded

    def ready(batch: Any) -> Ready:
        return begin(model, batch, processor, device=device, dtype=dtype, truncate=truncate, checkpoint=checkpoint)

    def explained(one: Ready, own: Target, whole: bool = True) -> Explanation:
        shown = progress if whole or callable(progress) else False
        with declared(rules):
            return one.explain(method, own, progress=shown, **settings)

    count = count_of(inputs, processor)
    if count is None or count == 1:
        return explained(ready(inputs), target)
    return in_batches(inputs, count, target, tracking(progress), ready, explained)


# no subclasses: running out of memory, and what a caller's own hook or progress raises, are told as they are
_UNTOLD = {ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError}
_UNTOLD |= {TypeError, ValueError, ZeroDivisionError}


# -- one way in ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Ready:
    """A model and its inputs, opened, named and prepared: what every entrance starts from (see :func:`begin`).

    Attributes:
        name: of the model, as it was given, as its config has it, or its class.
        labels: class index -> name, where the model names its classes; classes: how many, where it says so.
        checkpoint: whether blocks are run again on the way back.
        singles: each prompt by itself, where the tensors of several prompts do not stack.
        also: classes whose logits a result keeps in any case, of a row of many.
    """

    model: nn.Module
    inputs: Inputs
    processor: Any
    name: str
    labels: dict[int, str] | None
    classes: int | None
    checkpoint: bool = False
    singles: tuple[Ready, ...] = ()
    also: tuple[int, ...] = ()
    _logits: list[torch.Tensor] = field(default_factory=list, repr=False)

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
        facts = (resolver.counted, resolver.last, self.checkpoint, resolver.activation)
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
        self, method: str, target: Target = None, *, progress: bool | Track = False,
        together: Together | None = None, **settings: Any,
    ) -> Explanation:  # fmt: skip
        """As :func:`explain`; ``together`` is what it shares with other methods of the same target, if anything."""
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
        self, method: str, target: Target, progress: bool | Track, together: Together | None,
        settings: dict[str, Any],
    ) -> Explanation:  # fmt: skip
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

    def _behind(self, text: str, ids: list[int]) -> Ready:
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

        def one(part: Scores) -> Explanation:
            inputs = part.inputs or self.inputs
            made = finish(part, inputs, resolver, method, settings, self.end_function, self.also)
            return replace(made, model=self.name)

        made = {(scores.inputs or self.inputs).name: one(scores), **{n: one(part) for n, part in scores.parts.items()}}
        parts: dict[str, Explanation] = {}
        for name, part in made.items():
            mosaic = self.inputs.side(name).mosaic if name in (self.inputs.name, *self.inputs.others) else None
            laid = None if mosaic is None else on_pictures(replace(part, input=name), mosaic)
            parts |= {name: replace(part, input=name)} if laid is None else laid
        main, *others = parts
        return replace(parts[main], parts={other: parts[other] for other in others})


def out_of_memory(task: Task) -> TooLarge:
    """What running out of memory is told as: what ran, and what takes less."""
    batch, chosen = task.inputs.batch, find(task.method)
    ways = ["fewer inputs at once"] if batch > 1 else []
    ways += ["checkpoint=True"] if chosen.checkpoint and not task.checkpoint else []
    ways += [] if chosen.checkpoint else ["a method that keeps no attention maps (attnlrp, input_x_gradient)"]
    ways += ["batch_size=1"] if chosen.settings.get("batch_size", 1) > 1 else []
    ways += ["half precision (dtype='bfloat16')", "or a shorter or smaller input"]
    many = f" of {batch} inputs" if batch > 1 else ""
    return TooLarge(f"memory ran out in {task.method}{many}: take {', '.join(ways)}")


def begin(
    model: nn.Module | str, inputs: Any, processor: Any = None, *, device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None, truncate: bool = False, checkpoint: bool = False,
) -> Ready:  # fmt: skip
    """Open the model, read its classes and prepare the inputs; arguments as for :func:`explain`."""
    name = model if isinstance(model, str) else model_name(model)
    model, processor = opened(model, processor, device=device, dtype=dtype)
    if processor is None and wants_processor(inputs):
        processor = processor_of(model)
    facts = (processor, name, class_names(model)[0], class_count(model), checkpoint)
    singles = unstackable(model, inputs, processor) if is_prompt(inputs) else []
    if not singles:
        return Ready(model, _measured(model, prepare(model, inputs, processor, truncate=truncate)), *facts)
    each = [begin(model, one, processor, truncate=truncate, checkpoint=checkpoint) for one in singles]
    kinds = {one.inputs.modality for one in each}
    ids = torch.zeros(len(each), 1, dtype=torch.long)
    stand = Inputs((), {"input_ids": ids}, "text" if "text" in kinds else kinds.pop(), "input_ids", name="input_ids")
    return Ready(model, stand, *facts, tuple(replace(one, name=name) for one in each))


def _measured(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with what the model shows of their axes, which are checked."""
    made = with_batch_axes(model, oriented(model, _with_pictures_first(model, inputs)))
    check_choices(model, made)
    return made


def _with_pictures_first(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with the packed patches of pictures as the main one, where the model compares pictures with texts."""
    patches = next((name for name, one in inputs.others.items() if one.modality == "tensor"), None)
    if patches is None or inputs.modality != "text" or not compares(model, *inputs.feed):
        return inputs
    return inputs.with_main(patches)
