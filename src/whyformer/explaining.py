"""``explain``, and :class:`OpenedModel`, on which all entry points are built."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, Self, Unpack

import torch
from torch import nn

from whyformer.batches import in_batches
from whyformer.defaults import DEFAULT_METHOD
from whyformer.explanation.result import Explanation
from whyformer.inputs import Inputs
from whyformer.inputs.normalize import count_of, normalized, refuse_file_names, wants_processor
from whyformer.inputs.prepare import prepare_normalized
from whyformer.inputs.stacking import are_stackable
from whyformer.methods import find
from whyformer.methods.batch_axes import with_batch_axes
from whyformer.methods.diagnosis import check_choices
from whyformer.methods.orientation import oriented
from whyformer.methods.padding import depends_on_padding, padded_samples, samples_in
from whyformer.methods.padding_masks import with_padding_mask
from whyformer.methods.settings import OptionsAndSettings, Settings
from whyformer.models.kinds import accepts_batches, comparison_of
from whyformer.models.loading import model_name, processor_of, resolve_model
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
    """Explain a prediction: score how much each patch, pixel or token contributes to it.

    Args:
        model: any unmodified ``torch.nn.Module`` in eval mode; or a name (a hub id, a local folder,
            ``"bundled:digits"`` or ``"bundled:sst2"``), which is loaded once; or a pipeline or ``Trainer`` of
            transformers; or an :class:`~whyformer.Explainer`.
        inputs: a tensor or mapping of tensors as the model's forward takes them (pixels ``[B, C, H, W]``, ids
            ``[B, N]``); or a tuple of forward's positional arguments; or a list of samples, in which token ids of
            different lengths are padded. With ``processor`` also a picture, a string, or a list of either, which is
            explained in batches of 32, fewer if memory runs out. A picture is a PIL image or a file (a path, or a
            binary file object), read as described in :mod:`whyformer.inputs.pictures`; ``diagnostics["input"]``
            lists the conversions applied to it.
        method: a name from :func:`whyformer.list_methods`; default "auto", which runs the method that measured best
            for this kind of input and names it in ``diagnostics["auto"]``.
        target: None (each sample's predicted class), a class index, a list of one index per sample, a class name (see
            :func:`whyformer.targets.class_index`), a target from :mod:`whyformer.targets` as an object or as text
            (``"Token(-1, 17)"``), or a function that returns ``[B]``. The function gets the logits ``[B, C]`` of a
            batch (of the next token for a language model). If the model has no such row of logits per sample, a target
            is required, and a function gets the model's raw output.
        processor: Hugging Face image processor or tokenizer, or a function picture -> tensor; loaded automatically
            when ``model`` is a name or a pipeline, or was loaded from a folder or hub id (``model.name_or_path``) that
            has one.
        progress: whether to show a progress bar on long work; or a function (iterable, description, total) ->
            iterable that wraps the work, such as another progress bar (it may raise to stop the work).
        **options_and_settings: the options of :class:`~whyformer.options.Options` (``device``, ``dtype``,
            ``truncate``, ``rules``, ``checkpoint``) and the method's settings; see :func:`whyformer.list_methods`.

    Returns:
        An :class:`~whyformer.Explanation` of the whole batch; a batch of B equals B single runs.

    Raises:
        WhyformerError: one of :mod:`whyformer.errors`; each message names the cause and the remedy.
    """
    options, settings = split(options_and_settings)
    find(method).complete(settings)  # validate settings before loading the model
    opened_model = open_model(model, processor, **options)

    def explained(ready: Prepared, target: Target, is_all: bool = True) -> Explanation:
        bar = progress if is_all or callable(progress) else False
        return ready.explain(method, target, progress=bar, **settings)

    refuse_file_names(inputs, opened_model.processor)
    count, read = count_of(inputs, opened_model.processor), partial(read_inputs, opened_model)
    if count is None or count == 1:
        return explained(read(inputs), target)
    return in_batches(inputs, count, target, tracking(progress), read, explained)


class OpenedModel:
    """A loaded model with its processor and options.

    Args:
        model, processor: as for :func:`explain`.
        **options: those of :class:`~whyformer.options.Options`.

    Attributes:
        model: the module.
        processor: the processor; None without one.
        name: the name that was passed, the name in the model's config, or the name of its class.
        options: an :class:`~whyformer.options.Options`.
    """

    def __init__(self, model: Any, processor: Any = None, **options: Unpack[Keywords]) -> None:
        self.options = Options(**options)
        self.name: str = model if isinstance(model, str) else model_name(model)
        self.model: nn.Module
        self.model, self.processor = resolve_model(
            model, processor, device=self.options.device, dtype=self.options.dtype
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: the processor, or a part of it; None without one."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        return tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.named.items())
        return f"{type(self).__name__}({self.name!r}{options})"

    def using(self, processor: Any = None, **options: Unpack[Keywords]) -> Self:
        """Return the same model with another processor or other options, except ``device`` and ``dtype``.

        The model is checked again, because it may have changed since it was opened.
        """
        copy = object.__new__(type(self))
        copy.name, copy.model = self.name, self.model
        copy.processor = self.processor if processor is None else processor
        resolve_model(copy.model, device=options.get("device"), dtype=options.get("dtype"))
        copy.options = replace(self.options, **options)
        return copy

    def prepare(self, inputs: Any) -> Prepared:
        """Read the inputs and check them for this model, which may have changed since its last use.

        Raises:
            InputError, LoadError: the inputs cannot be read, or do not fit the model.
            ModelError: the model is in a state in which an explanation would be wrong or impossible.
        """
        return prepared(self, inputs)

    def explain(
        self,
        inputs: Any,
        method: str = DEFAULT_METHOD,
        target: Target = None,
        *,
        progress: bool | Track = False,
        **settings: Unpack[Settings],
    ) -> Explanation:
        """Call :func:`whyformer.explain` with this model."""
        return explain(self, inputs, method, target, progress=progress, **settings)


def open_model(model: Any, processor: Any = None, **options: Unpack[Keywords]) -> OpenedModel:
    """Return the opened model; an already opened one is returned with these options applied."""
    if isinstance(model, OpenedModel):
        return model.using(processor, **options)
    return OpenedModel(model, processor, **options)


def prepared(model: Any, inputs: Any, processor: Any = None, **options: Unpack[Keywords]) -> Prepared:
    """Open a model and read inputs for it; see :meth:`OpenedModel.prepare`."""
    return read_inputs(open_model(model, processor, **options), inputs)


def read_inputs(opened_model: OpenedModel, inputs: Any) -> Prepared:
    """Read inputs for a model that was just opened, and check them."""
    if opened_model.processor is None and wants_processor(inputs):
        opened_model = opened_model.using(processor_of(opened_model.model))
    model, processor, truncate = opened_model.model, opened_model.processor, opened_model.options.truncate
    inputs = normalized(inputs, processor)
    facts, samples = (class_names(model)[0], class_count(model)), samples_in(inputs, processor)

    def prepare(inputs: Any) -> Prepared:
        ready = prepare_normalized(model, inputs, processor, truncate=truncate)
        return Prepared(opened_model, _measured(model, ready), *facts)

    single = cache(lambda number: prepare(samples[number]))

    def copies() -> Any:
        sample = single(0).inputs
        return sample.with_tensor(sample.tensor.repeat_interleave(2, 0)).feed

    if not samples or (are_stackable(model, samples, processor) and accepts_batches(model, copies)):
        batch = prepare(inputs)
        padded, alone = partial(padded_samples, batch.inputs, samples, processor), lambda number: single(number).inputs
        if not samples or not depends_on_padding(model, batch.inputs, padded, alone, batch.padding[1]):
            return batch
        return replace(batch, singles=tuple(map(single, range(len(samples)))))
    singles = tuple(map(single, range(len(samples))))
    kinds = {single.inputs.modality for single in singles}
    ids = torch.zeros(len(singles), 1, dtype=torch.long)
    kind = "text" if "text" in kinds else kinds.pop()
    placeholder = Inputs((), {"input_ids": ids}, kind, "input_ids", name="input_ids")
    return Prepared(opened_model, placeholder, *facts, singles)


def _measured(model: nn.Module, inputs: Inputs) -> Inputs:
    """Complete the inputs with the meaning of their axes, as measured on the model, and check them."""
    completed = oriented(model, _with_pictures_first(model, with_padding_mask(model, inputs)))
    completed = with_batch_axes(model, completed)
    check_choices(model, completed)
    return completed


def _with_pictures_first(model: nn.Module, inputs: Inputs) -> Inputs:
    """Make packed picture patches the main input if the model compares pictures with texts."""
    patches = next((name for name, other in inputs.others.items() if other.modality == "tensor"), None)
    if patches is None or inputs.modality != "text" or not comparison_of(model, *inputs.feed):
        return inputs
    return inputs.with_main(patches)
