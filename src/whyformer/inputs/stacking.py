"""Stack a list of samples that are tensors, or mappings of tensors, into one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import argument_name, channels
from whyformer.models.output import parameters

_PADDED_BY_0 = ("attention_mask", "token_type_ids", "special_tokens_mask")
_ARGUMENTS = "Pass positional arguments of the model's forward as a tuple, explain(model, (a, b))"


def holds_tensors(inputs: Any) -> bool:
    """Return whether the inputs are a list of samples that are tensors or mappings of tensors."""
    if not isinstance(inputs, list):
        return False
    values = (value for i in inputs for value in (i.values() if isinstance(i, Mapping) else [i]))
    return any(isinstance(value, Tensor) for value in values)


def stacked(model: nn.Module, samples: Sequence[Any], processor: Any) -> Tensor | dict[str, Any]:
    """Stack samples that are tensors, or mappings of tensors, into one batch ``[B, ...]``.

    Each may have a batch axis of 1. Token ids of different lengths are padded, on the tokenizer's padding side, if the
    model takes an ``attention_mask``.

    Raises:
        InputError: the samples cannot be batched.
    """
    if all(isinstance(sample, Mapping) for sample in samples):
        return _mapping(model, samples, processor)
    if not all(isinstance(sample, Tensor) for sample in samples):
        kinds = ", ".join(dict.fromkeys(type(sample).__name__ for sample in samples))
        raise InputError(f"the samples of a list must be of one kind, and these are {kinds}. {_ARGUMENTS}")
    unbatched = [sample[0] if _is_batch_of_one(model, sample) else sample for sample in samples]
    if len({sample.shape for sample in unbatched}) == 1 and len({sample.dtype for sample in unbatched}) == 1:
        return torch.stack(unbatched)
    if not all(map(_is_ids, unbatched)):
        shapes = _shapes(samples)
        raise InputError(f"a list holds samples, and these cannot be batched: {shapes}. {_ARGUMENTS}; {_ALONE}")
    ids, mask = _padded(model, unbatched, processor)
    return {argument_name(model, 0): ids, "attention_mask": mask}


_ALONE = "explain samples of different shapes one at a time (explain_many does that)"


def _mapping(model: nn.Module, samples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Stack samples that are mappings from argument names to values."""
    names = list(samples[0])
    if any(set(sample) != set(names) for sample in samples):
        raise InputError("the mappings of a list must have the same keys")
    columns = {name: [sample[name] for sample in samples] for name in names}
    tensors = {n: values for n, values in columns.items() if all(isinstance(v, Tensor) and v.dim() for v in values)}
    for name in columns.keys() - tensors.keys():
        if any(isinstance(v, Tensor) for v in columns[name]) or any(v != columns[name][0] for v in columns[name]):
            raise InputError(f"'{name}' must be a tensor with axes, or the same for all samples of the list")
    batch: dict[str, Any] = {name: values[0] for name, values in columns.items()}
    has_axis = all(len(v) == 1 for values in tensors.values() for v in values)
    unbatched = {n: [v[0] for v in values] if has_axis else values for n, values in tensors.items()}
    unequal = [n for n, values in unbatched.items() if len({v.shape for v in values}) > 1]
    batch |= {n: torch.stack(values) for n, values in unbatched.items() if n not in unequal}
    if not unequal:
        return batch
    ids, wrong = unbatched.get("input_ids"), set(unequal) - {"input_ids", *_PADDED_BY_0}
    if ids is None or wrong or not all(map(_is_ids, ids)):
        shapes = ", ".join(f"{n}: {_shapes(unbatched[n])}" for n in sorted(wrong or set(unequal)))
        raise InputError(f"these samples cannot be batched ({shapes}): {_ALONE}")
    batch["input_ids"], real = _padded(model, ids, processor)
    batch.setdefault("attention_mask", real)
    for name in set(unequal) - {"input_ids"}:
        if any(v.shape != i.shape for v, i in zip(unbatched[name], ids, strict=True)):
            raise InputError(f"'{name}' must have one number for each of its sample's input_ids")
        batch[name] = unbatched[name][0].new_zeros(real.shape).masked_scatter(real.bool(), torch.cat(unbatched[name]))
    return batch


def _padded(model: nn.Module, ids: Sequence[Tensor], processor: Any) -> tuple[Tensor, Tensor]:
    """Pad token ids ``[N]`` of different lengths; return (ids ``[B, N]``, mask of the real ones)."""
    if "attention_mask" not in parameters(model):
        raise InputError(
            f"these token ids have different lengths ({', '.join(str(len(i)) for i in ids)}), and the model takes no "
            f"attention_mask to mark padding: {_ALONE}"
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    owners = (tokenizer, getattr(model, "config", None))
    pad = next((i for o in owners if isinstance(i := getattr(o, "pad_token_id", None), int)), None)
    if pad is None:
        raise InputError(
            "these token ids have different lengths, and neither a tokenizer (processor=...) nor the model's config "
            "defines a padding token: set model.config.pad_token_id"
        )
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
