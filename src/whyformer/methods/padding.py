"""Find out whether a model's output for a sample changes when the sample is padded to the size of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS
from whyformer.inputs import Inputs
from whyformer.inputs.pictures import as_rgb
from whyformer.inputs.prepare import processed
from whyformer.inputs.prompts import is_prompt, separate_prompts
from whyformer.inputs.texts import text_lists
from whyformer.models.cache import measured
from whyformer.models.ends import forward
from whyformer.models.memory import is_out_of_memory
from whyformer.models.output import Output

__all__ = ["depends_on_padding", "float_outputs", "padded_samples", "samples_in"]


def samples_in(inputs: Any, processor: Any) -> list[Any]:
    """Return each of several samples as a separate input, for inputs as returned by
    :func:`~whyformer.inputs.normalize.normalized`; empty for tensors, which the user has batched, and for one sample.
    """
    samples: list[Any] = []
    if isinstance(inputs, list):
        samples = [[sample] for sample in inputs]
    elif is_prompt(inputs):
        samples = separate_prompts(inputs, processor)
    elif isinstance(inputs, Mapping) and set(inputs) == {"text", "text_pair"}:
        pairs = zip(*text_lists(inputs["text"], inputs["text_pair"]), strict=True)
        samples = [{"text": [text], "text_pair": [pair]} for text, pair in pairs]
    return samples if len(samples) > 1 else []


def padded_samples(inputs: Inputs, samples: list[Any], processor: Any) -> list[int]:
    """Return the indices of the samples with the most and the least padding in a batch; empty if none was padded.

    A model that joins tokens (CANINE joins four) may read the padding of one length and not of another.

    Args:
        inputs: the batch.
        samples: its samples, as returned by :func:`samples_in`.
        processor: the processor that prepared the batch.
    """
    side = next((side for side in inputs.sides.values() if side.modality == "text"), inputs)
    tokenizer = getattr(processor, "tokenizer", processor)
    pad = getattr(tokenizer, "pad_token_id", None)
    image_processor = getattr(processor, "image_processor", processor)
    sizes, padded_size = list[float](), 0.0
    if side.features.durations is not None:
        sizes, padded_size = side.features.durations, max(side.features.durations)
    elif side.modality == "image" and hasattr(image_processor, "preprocess") and _are_pictures(samples):
        pictures = [as_rgb(picture) for (picture,) in samples]
        by_size = {p.size: p for p in pictures}
        if len(by_size) > 1:
            areas = {size: processed(image_processor, [p])[0].numel() for size, p in by_size.items()}
            sizes, padded_size = [areas[p.size] for p in pictures], side.tensor[0].numel()
    elif side.mask is not None and side.mask.dim() == 2:
        sizes, padded_size = side.mask.sum(1).tolist(), side.mask.shape[1]
    elif side.modality == "text" and side.tensor.dim() == 2 and isinstance(pad, int):
        sizes, padded_size = (side.tensor != pad).sum(1).tolist(), side.tensor.shape[1]
    padded = sorted((i for i, size in enumerate(sizes) if size < padded_size), key=sizes.__getitem__)
    return list(dict.fromkeys([*padded[:1], *padded[-1:]]))


def _are_pictures(samples: list[Any]) -> bool:
    return all(isinstance(sample, list) and isinstance(sample[0], Image.Image) for sample in samples)


def depends_on_padding(
    model: nn.Module, batch: Inputs, padded: Callable[[], list[int]], alone: Callable[[int], Inputs], pads_left: bool
) -> bool:
    """Return whether the padding of a batch changes the model's output, measured once per model and kind of input.

    Args:
        model: the model.
        batch: the padded samples.
        padded: function that returns the indices of the samples to measure; none if the batch has no padding.
        alone: (index) -> the sample without padding.
        pads_left: whether the padding comes first.
    """
    cache, key = measured(model), ("padding", batch.modality, frozenset(batch.others), pads_left)
    if cache.get(key) is False:
        return False
    numbers = padded()
    if key in cache:
        return bool(numbers)
    for number in numbers:
        pair = batch.of_samples([number]), alone(number)
        shapes = [[v.shape for v in (*i.args, *i.kwargs.values()) if torch.is_tensor(v)] for i in pair]
        changes = None if shapes[0] == shapes[1] else _changes_with_padding(model, *pair, pads_left)
        if changes is not None:
            cache[key] = changes
        if changes:
            return True
    return False


def _changes_with_padding(model: nn.Module, padded: Inputs, alone: Inputs, pads_left: bool) -> bool | None:
    """Return whether padding changes the output for a sample by more than rounding; None if the model fails.

    Outputs for padding (a row per token, a pixel) are not compared. Costs two plain forward passes of this sample.

    Args:
        padded: the sample as in the batch.
        alone: the sample without padding.
        pads_left: whether the padding comes first.
    """
    try:
        first, second = (float_outputs(forward(model, *inputs.feed)) for inputs in (alone, padded))
    except FOREIGN_ERRORS as error:  # the model fails again later, where the error is reported
        if is_out_of_memory(error):
            raise
        return None
    return first.keys() != second.keys() or any(differ(first[name], second[name], pads_left) for name in first)


def float_outputs(output: Output) -> dict[str, Tensor]:
    """Return the floating-point tensors of an output that are compared: the logits, or all if it has none."""
    logits = output.logits
    named = output.named if logits is None else {"logits": logits}
    return {name: value for name, value in named.items() if value.is_floating_point()}


def differ(alone: Tensor, padded: Tensor, pads_left: bool = False) -> bool:
    """Return whether an output differs by more than rounding from the first rows of another, or from the last if
    ``pads_left``."""
    if alone.dim() != padded.dim() or any(a > b for a, b in zip(alone.shape, padded.shape, strict=True)):
        return True
    sizes = zip(alone.shape, padded.shape, strict=True)
    padded = padded[tuple(slice(b - a, None) if pads_left else slice(a) for a, b in sizes)]
    finite = alone[alone.isfinite()].abs()
    limit = max(1e-4, 16 * torch.finfo(alone.dtype).eps) * float(finite.max() if len(finite) else 0)
    return not torch.allclose(padded.double(), alone.double(), rtol=0, atol=limit, equal_nan=True)
