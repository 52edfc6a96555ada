"""Append tokens to the text inputs of a language model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.units import joined
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.texts import pieces

_DECODER = "decoder_input_ids"


def with_appended(inputs: Inputs, ids: list[int], tokenizer: Any, note: str) -> Inputs:
    """Append ``ids`` to the tokens of each sample (to the decoder's, if there is one), and a note.

    Raises:
        InputError: the text is padded on the right, or has other arguments per token.
    """
    side = inputs.others.get(_DECODER, inputs)
    name = side.scored if side is not inputs or isinstance(inputs.scored, str) else "input_ids"
    mask_name = "decoder_attention_mask" if name == _DECODER else "attention_mask"
    value = side.tensor if side is inputs else inputs.kwargs[str(name)]
    mask = inputs.kwargs.get(mask_name)
    others = [
        n
        for n, v in inputs.kwargs.items()
        if isinstance(v, Tensor) and n not in ("input_ids", "attention_mask", name, mask_name)
    ]
    unpadded = mask is None or bool(mask[:, -1].all())
    if value.dim() != 2 or inputs.args or others or not unpadded or inputs.modality != "text":
        names = ", ".join(others) or "by position"
        reason = f"has other arguments ({names})" if unpadded else "is padded on the right"
        raise InputError(
            f"a target of several tokens must be appended to the text, and this input {reason}: explain one text at a "
            "time, or name one token"
        )
    more = torch.tensor([ids], device=value.device).expand(len(value), -1)
    kwargs = {**inputs.kwargs, str(name): torch.cat([value, more], 1)}
    if mask is not None:
        kwargs[mask_name] = torch.cat([mask, mask.new_ones(more.shape)], 1)
    notes = [[*previous, note] for previous in inputs.notes or [[]] * inputs.batch]
    extended = _with_features(side, value[0, -1:].tolist(), ids, tokenizer)
    if side is inputs:
        return replace(extended, kwargs=kwargs, notes=notes)
    return replace(inputs, kwargs=kwargs, notes=notes, others={**inputs.others, _DECODER: extended})


def _with_features(side: Inputs, last: list[int], ids: list[int], tokenizer: Any) -> Inputs:
    """Extend the mask, special tokens and features by the appended ids; ``last`` is the last id before them."""

    def ones(values: Tensor | None, value: bool) -> Tensor | None:
        return None if values is None else torch.cat([values, values.new_full((len(values), len(ids)), value)], 1)

    features, texts = side.features, pieces(tokenizer, [*last, *ids])[len(last) :]
    more = tokenizer.convert_ids_to_tokens(ids)
    tokens = None if features.tokens is None else [[*row, *more] for row in features.tokens]
    offsets, sentences = None, None
    if features.offsets is not None and features.texts is not None:
        added, places = joined(texts)
        sentences = [text + added for text in features.texts]
        offsets = [
            [*row, *((a + len(text), b + len(text)) for a, b in places)]
            for row, text in zip(features.offsets, features.texts, strict=True)
        ]
    features = replace(features, tokens=tokens, offsets=offsets, texts=sentences)
    return replace(side, mask=ones(side.mask, True), special=ones(side.special, False), features=features)
