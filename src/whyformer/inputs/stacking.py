"""Stack a list of samples into one batch, or find out why that is impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import argument_name, channels
from whyformer.inputs.prompts import is_prompt, shape_of_prompt
from whyformer.models.output import parameters

_PADDED_BY_0 = ("attention_mask", "token_type_ids", "special_tokens_mask")
_ARGUMENTS = "Pass positional arguments of the model's forward as a tuple, explain(model, (a, b))"


def holds_tensors(inputs: Any) -> bool:
    """Return whether the inputs are a list of samples that are tensors or mappings of tensors."""
    if not isinstance(inputs, list):
        return False
    values = (value for i in inputs for value in (i.values() if isinstance(i, Mapping) else [i]))
    return any(isinstance(value, Tensor) for value in values)


def are_stackable(model: nn.Module, samples: Sequence[Any], processor: Any) -> bool:
    """Return whether samples can be one batch: their tensors have the same shapes, or are token ids of different
    lengths that can be padded.

    Args:
        model: the model.
        samples: a separate input for each sample (:func:`whyformer.methods.padding.samples_in`).
        processor: the model's processor.

    Raises:
        InputError: the samples are of different kinds.
    """
    if any(map(is_prompt, samples)):
        return len({shape_of_prompt(model, prompt, processor) for prompt in samples}) == 1
    if holds_tensors(values := [sample[0] for sample in samples if isinstance(sample, list)]):
        return not _obstacle(model, _columns(model, values)[0], processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    return not hasattr(tokenizer, "convert_ids_to_tokens") or tokenizer.pad_token is not None


def stacked(model: nn.Module, samples: Sequence[Any], processor: Any) -> Tensor | dict[str, Any]:
    """Stack samples that are tensors, or mappings of tensors, into one batch ``[B, ...]``.

    Each may have a batch axis of 1. Token ids of different lengths are padded, on the tokenizer's padding side, if the
    model takes an ``attention_mask``.

    Raises:
        InputError: the samples cannot be batched.
    """
    columns, batch = _columns(model, samples)
    if reason := _obstacle(model, columns, processor):
        raise InputError(f"these samples cannot be batched: {reason}")
    batch |= {name: torch.stack(values) for name, values in columns.items() if _are_alike(values)}
    unequal = columns.keys() - batch.keys()
    if not unequal:
        return batch if isinstance(samples[0], Mapping) else batch[next(iter(columns))]
    name = _padded_name(columns)
    batch[name], real = _padded(model, columns[name], processor)
    batch.setdefault("attention_mask", real)
    for other in unequal - {name}:
        values = columns[other]
        batch[other] = values[0].new_zeros(real.shape).masked_scatter(real.bool(), torch.cat(values))
    return batch


def _columns(model: nn.Module, samples: Sequence[Any]) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return, by argument name, the tensors of all samples without a batch axis, and the values that they share."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        if not all(isinstance(sample, Tensor) for sample in samples):
            kinds = ", ".join(dict.fromkeys(type(sample).__name__ for sample in samples))
            raise InputError(f"the samples of a list must be of one kind, and these are {kinds}. {_ARGUMENTS}")
        unbatched = [sample[0] if _is_batch_of_one(model, sample) else sample for sample in samples]
        return {argument_name(model, 0): unbatched}, {}
    names = list(samples[0])
    if any(set(sample) != set(names) for sample in samples):
        raise InputError("the mappings of a list must have the same keys")
    columns = {name: [sample[name] for sample in samples] for name in names}
    tensors = {n: values for n, values in columns.items() if all(isinstance(v, Tensor) and v.dim() for v in values)}
    others = {name: values for name, values in columns.items() if name not in tensors}
    for name, values in others.items():
        if any(isinstance(v, Tensor) for v in values) or any(v != values[0] for v in values):
            raise InputError(f"'{name}' must be a tensor with axes, or the same for all samples of the list")
    axes = {name: all(len(v) == 1 for v in values) for name, values in tensors.items()}
    is_batch = all(_is_batch_of_one(model, v) for v in next(iter(tensors.values()), []))
    # arguments without a batch axis, such as a table, are the same for all samples
    if all(axes[n] or (is_batch and all(torch.equal(v, values[0]) for v in values)) for n, values in tensors.items()):
        others |= {name: values for name, values in tensors.items() if not axes[name]}
        tensors = {name: [v[0] for v in values] for name, values in tensors.items() if axes[name]}
    return tensors, {name: values[0] for name, values in others.items()}


def _padded_name(columns: Mapping[str, list[Tensor]]) -> str:
    """Return the name of the argument whose token ids may be padded."""
    return next(iter(columns)) if len(columns) == 1 else "input_ids"


def _obstacle(model: nn.Module, columns: Mapping[str, list[Tensor]], processor: Any) -> str:
    """Return why the tensors of samples cannot be one batch; "" if they can."""
    name = _padded_name(columns)
    ids, unequal = columns.get(name), [n for n, values in columns.items() if not _are_alike(values)]
    if not unequal:
        return ""
    shapes = ", ".join(f"{n}: {_shapes(columns[n])}" for n in unequal)
    if any(len({(v.dim(), v.dtype) for v in columns[n]}) > 1 for n in unequal):
        raise InputError(f"a list holds samples, and these are of different kinds ({shapes}). {_ARGUMENTS}")
    if ids is None or set(unequal) - {name, *_PADDED_BY_0} or not all(map(_is_ids, ids)):
        return f"their shapes differ ({shapes})"
    for other in set(unequal) - {name}:
        if any(v.shape != i.shape for v, i in zip(columns[other], ids, strict=True)):
            raise InputError(f"'{other}' must have one number for each of its sample's input_ids")
    lengths = f"the token ids have different lengths ({', '.join(str(len(i)) for i in ids)})"
    if "attention_mask" not in parameters(model):
        return f"{lengths}, and the model takes no attention_mask to mark padding"
    if _padding_id(model, processor) is None:
        return f"{lengths}, and neither the tokenizer nor the model's config defines a padding token"
    return ""


def _are_alike(values: Sequence[Tensor]) -> bool:
    return len({(v.shape, v.dtype) for v in values}) == 1


def _padding_id(model: nn.Module, processor: Any) -> int | None:
    owners = (getattr(processor, "tokenizer", processor), getattr(model, "config", None))
    return next((i for o in owners if isinstance(i := getattr(o, "pad_token_id", None), int)), None)


def _padded(model: nn.Module, ids: Sequence[Tensor], processor: Any) -> tuple[Tensor, Tensor]:
    """Pad token ids ``[N]`` of different lengths; return (ids ``[B, N]``, mask of the real ones)."""
    tokenizer, pad = getattr(processor, "tokenizer", processor), _padding_id(model, processor)
    assert pad is not None
    side = "left" if getattr(tokenizer, "padding_side", "right") == "left" else "right"
    ones = [torch.ones_like(i) for i in ids]
    filled, mask = (
        torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
        for rows, value in ((ids, pad), (ones, 0))
    )
    return filled, mask


def _is_ids(sample: Tensor) -> bool:
    return sample.dim() == 1 and len(sample) > 0 and sample.dtype in (torch.long, torch.int)


def _is_batch_of_one(model: nn.Module, sample: Tensor) -> bool:
    """Return whether a sample has a batch axis: ids ``[1, N]``, pixels ``[1, C, H, W]``, or vectors ``[1, N, D]`` of a
    model that does not take single-channel pictures."""
    if sample.dim() == 0 or len(sample) != 1:
        return False
    if not sample.is_floating_point():
        return sample.dim() > 1
    return sample.dim() == 4 or (sample.dim() == 3 and channels(model) != 1)


def _shapes(samples: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(s.shape)} {str(s.dtype).removeprefix('torch.')}" for s in samples)
