"""``explain``, and what all entrances build on: an opened model with its processor and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self, Unpack

import torch
from torch import nn

from whyformer.batches import in_batches
from whyformer.defaults import DEFAULT_METHOD
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs, prepare
from whyformer.inputs.given import count_of, wants_processor
from whyformer.inputs.prompts import is_prompt, unstackable
from whyformer.methods import find
from whyformer.methods.batch_axes import with_batch_axes
from whyformer.methods.diagnosis import check_choices
from whyformer.methods.orientation import oriented
from whyformer.methods.settings import OptionsAndSettings, Settings
from whyformer.models.kinds import compares
from whyformer.models.loading import model_name, opened, processor_of
from whyformer.models.structure import class_count, class_names
from whyformer.options import Keywords, Options, shows_options, split
from whyformer.prepared import Prepared
from whyformer.progress import Track, tracking
from whyformer.targets import Target


@shows_options
def explain(
    model: Any,
    inputs: Any,
    method: str = DEFAULT_METHOD,
    target: Target = None,
    processor: Any = None,
    *,
    progress: bool | Track = False,
    **options_and_settings: Unpack[OptionsAndSettings],
) -> Explanation:
    """Explain a prediction: which patches, pixels or tokens made the model say this class.

    Args:
        model: any ``torch.nn.Module`` in eval mode, unmodified; or a name: a hub id, a local folder,
            ``"bundled:digits"``, ``"bundled:sst2"``, which is loaded once; or a pipeline of transformers; or an
            :class:`~whyformer.Explainer`.
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
        progress: show a progress bar on long work; or a function (iterable, description, total) -> iterable that
            stands around it, such as another kind of bar (it may raise, to stop the work).
        **options_and_settings: the options of :class:`~whyformer.options.Options` (``device``, ``dtype``,
            ``truncate``, ``rules``, ``checkpoint``) and the method's settings; see :func:`whyformer.list_methods`.

    Returns:
        An :class:`~whyformer.Explanation` of the whole batch; a batch of B equals B single runs.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`; each names the cause and the way out.
    """
    options, settings = split(options_and_settings)
    find(method).complete(settings)  # a slip of the pen is told before a model is loaded
    opened = open_model(model, processor, **options)
    return opened.explain(inputs, method, target, progress=progress, **settings)


class OpenedModel:
    """An opened model, its processor, and the options of everything that is asked of it.

    Args:
        model, processor: as for :func:`explain`.
        **options: those of :class:`~whyformer.options.Options`.

    Attributes:
        model: the module; processor: None where none was given.
        name: of the model, as it was given, as its config has it, or its class.
        options: an :class:`~whyformer.options.Options`.

    Raises:
        InputError: ``device`` or ``dtype`` for a module. LoadError: the name. ModelError: an explanation would be
            wrong or impossible.
    """

    def __init__(self, model: Any, processor: Any = None, **options: Unpack[Keywords]) -> None:
        self.options = Options(**options)
        self.name: str = model if isinstance(model, str) else model_name(model)
        self.model: nn.Module
        self.model, self.processor = opened(
            model, processor, device=self.options.device, dtype=self.options.dtype
        )

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.options.named.items())
        return f"{type(self).__name__}({self.name!r}{given})"

    def using(self, processor: Any = None, **options: Unpack[Keywords]) -> Self:
        """The same model with another processor or other options, but not another ``device`` or ``dtype``."""
        made = object.__new__(type(self))
        made.name, made.model = self.name, self.model
        made.processor = self.processor if processor is None else processor
        opened(made.model, device=options.get("device"), dtype=options.get("dtype"))  # raises where either is given
        made.options = replace(self.options, **options)
        return made

    def prepare(self, inputs: Any) -> Prepared:
        """The inputs, read and checked for this model."""
        processor = self.processor
        if processor is None and wants_processor(inputs):
            processor = processor_of(self.model)
        found = self if processor is self.processor else self.using(processor)
        facts = (class_names(self.model)[0], class_count(self.model))
        singles = unstackable(self.model, inputs, processor) if is_prompt(inputs) else []
        if not singles:
            made = prepare(self.model, inputs, processor, truncate=self.options.truncate)
            return Prepared(found, _measured(self.model, made), *facts)
        each = [self.prepare(one) for one in singles]
        kinds = {one.inputs.modality for one in each}
        ids = torch.zeros(len(each), 1, dtype=torch.long)
        kind = "text" if "text" in kinds else kinds.pop()
        return Prepared(found, Inputs((), {"input_ids": ids}, kind, "input_ids", name="input_ids"), *facts, tuple(each))

    def explain(
        self,
        inputs: Any,
        method: str = DEFAULT_METHOD,
        target: Target = None,
        *,
        progress: bool | Track = False,
        **settings: Unpack[Settings],
    ) -> Explanation:
        """As :func:`explain`, by this model."""
        given: dict[str, Any] = {**settings}
        find(method).complete(given)

        def explained(one: Prepared, own: Target, whole: bool = True) -> Explanation:
            shown = progress if whole or callable(progress) else False
            return one.explain(method, own, progress=shown, **given)

        count = count_of(inputs, self.processor)
        if count is None or count == 1:
            return explained(self.prepare(inputs), target)
        return in_batches(inputs, count, target, tracking(progress), self.prepare, explained)


def open_model(model: Any, processor: Any = None, **options: Unpack[Keywords]) -> OpenedModel:
    """Open the model that a function was given. One that is open already is taken as it is, or with these options."""
    if not isinstance(model, OpenedModel):
        return OpenedModel(model, processor, **options)
    return model if processor is None and not options else model.using(processor, **options)


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
