"""A list of samples as tensors: one batch of them, as the model's forward takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import called, channels, parameters

_PADDED_BY_0 = ("attention_mask", "token_type_ids", "special_tokens_mask")
_ARGUMENTS = "Positional arguments of the model's forward go in a tuple, explain(model, (a, b))"


def holds_tensors(inputs: Any) -> bool:
    """Whether this is a list with samples that are tensors or mappings of tensors."""
    if not isinstance(inputs, list):
        return False
    return any(isinstance(i, Tensor) or (isinstance(i, Mapping) and _has_tensors(i)) for i in inputs)


def _has_tensors(sample: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Tensor) for v in sample.values())


def stacked(model: nn.Module, samples: Sequence[Any], processor: Any) -> Tensor | dict[str, Any]:
    """The batch ``[B, ...]`` of samples that are tensors, or mappings of tensors.

    Each may have a batch axis of 1. Token ids of unlike lengths are padded, on the side on which the tokenizer pads, if
    the model takes an ``attention_mask``.

    Raises:
        InputError: they make no batch.
    """
    if all(isinstance(one, Mapping) for one in samples):
        return _mapping(model, samples, processor)
    if not all(isinstance(one, Tensor) for one in samples):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in samples))
        raise InputError(f"the samples of a list must be of one kind, and these are {kinds}. {_ARGUMENTS}")
    alone = [one[0] if _is_batch_of_one(model, one) else one for one in samples]
    if len({one.shape for one in alone}) == 1 and len({one.dtype for one in alone}) == 1:
        return torch.stack(alone)
    if not all(map(_is_ids, alone)):
        raise InputError(f"a list holds samples, and these make no batch: {_shapes(samples)}. {_ARGUMENTS}; {_ALONE}")
    ids, mask = _padded(model, alone, processor)
    return {called(model, 0): ids, "attention_mask": mask}


_ALONE = "samples of unlike shapes are explained one at a time (explain_many does that)"


def _mapping(model: nn.Module, samples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """The batch of samples that name their arguments."""
    names = list(samples[0])
    if any(set(one) != set(names) for one in samples):
        raise InputError("a list of mappings holds samples, and these have unlike keys: give all of them the same ones")
    known = {name: [one[name] for one in samples] for name in names}
    tensors = {n: own for n, own in known.items() if all(isinstance(v, Tensor) and v.dim() for v in own)}
    for name in known.keys() - tensors.keys():
        if any(isinstance(v, Tensor) for v in known[name]) or any(v != known[name][0] for v in known[name]):
            raise InputError(f"'{name}' is no tensor with axes, and not the same for all samples of the list")
    made: dict[str, Any] = {name: own[0] for name, own in known.items()}
    has_axis = all(len(v) == 1 for own in tensors.values() for v in own)
    alone = {n: [v[0] for v in own] if has_axis else own for n, own in tensors.items()}
    unlike = [n for n, own in alone.items() if len({v.shape for v in own}) > 1]
    made |= {n: torch.stack(own) for n, own in alone.items() if n not in unlike}
    if not unlike:
        return made
    ids, wrong = alone.get("input_ids"), set(unlike) - {"input_ids", *_PADDED_BY_0}
    if ids is None or wrong or not all(map(_is_ids, ids)):
        names_of = sorted(wrong or set(unlike))
        shapes = ", ".join(f"{n}: {_shapes(alone[n])}" for n in names_of)
        raise InputError(f"these samples make no batch ({shapes}): {_ALONE}")
    made["input_ids"], real = _padded(model, ids, processor)
    made.setdefault("attention_mask", real)
    for name in set(unlike) - {"input_ids"}:
        if any(v.shape != i.shape for v, i in zip(alone[name], ids, strict=True)):
            raise InputError(f"'{name}' must have one number for each of the input_ids of its sample")
        made[name] = alone[name][0].new_zeros(real.shape).masked_scatter(real.bool(), torch.cat(alone[name]))
    return made


def _padded(model: nn.Module, ids: Sequence[Tensor], processor: Any) -> tuple[Tensor, Tensor]:
    """(``[B, N]`` ids, the mask of the real ones) of token ids ``[N]`` of unlike lengths."""
    if "attention_mask" not in parameters(model):
        raise InputError(
            f"these token ids are of unlike lengths ({', '.join(str(len(i)) for i in ids)}), and the model takes no "
            f"attention_mask that would tell it what is padding: {_ALONE}"
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    owners = (tokenizer, getattr(model, "config", None))
    pad = next((i for o in owners if isinstance(i := getattr(o, "pad_token_id", None), int)), None)
    if pad is None:
        raise InputError(
            "these token ids are of unlike lengths, and neither a tokenizer (processor=...) nor the model's config "
            "says which token pads them: set model.config.pad_token_id"
        )
    side = "left" if getattr(tokenizer, "padding_side", "right") == "left" else "right"
    ones = [torch.ones_like(i) for i in ids]
    filled, mask = (
        torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True, padding_value=value, padding_side=side)
        for own, value in ((ids, pad), (ones, 0))
    )
    return filled, mask


def _is_ids(one: Tensor) -> bool:
    return one.dim() == 1 and len(one) > 0 and one.dtype in (torch.long, torch.int)


def _is_batch_of_one(model: nn.Module, one: Tensor) -> bool:
    """Whether a sample has a batch axis: ids ``[1, N]``, pixels ``[1, C, H, W]``, vectors ``[1, N, D]`` of a model that
    does not begin with pictures of one channel."""
    if one.dim() == 0 or len(one) != 1:
        return False
    if not one.is_floating_point():
        return one.dim() > 1
    return one.dim() == 4 or (one.dim() == 3 and channels(model) != 1)


def _shapes(samples: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in samples)
