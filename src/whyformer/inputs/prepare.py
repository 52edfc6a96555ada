"""Turn pictures, sentences or tensors into :class:`Inputs`, and validate them before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.baselines import TOKENS
from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.inputs.feed import (
    argument_name,
    as_arguments,
    corrected,
    device_of,
    dtype_of,
    is_auxiliary,
    is_table,
    mask_names,
    name_outputs,
)
from whyformer.inputs.geometry import distortions, picture_features
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.mosaic import measure_mosaic
from whyformer.inputs.normalize import normalized
from whyformer.inputs.packing import are_patches, channels_last, check_assigned, has_several_pictures, is_evenly_packed
from whyformer.inputs.pictures import as_rgb, black_and_white, notes, without_normalisation
from whyformer.inputs.prompts import encode, is_prompt, padding_of, placeholders, with_pictures
from whyformer.inputs.sounds import Sound, with_sounds
from whyformer.inputs.sounds import encode as encode_sounds
from whyformer.inputs.stacking import holds_tensors, stacked
from whyformer.inputs.texts import check_texts, join_pairs, parts_read, text_lists, unknown
from whyformer.models.output import vocabulary_size, without_cached

_ID_NAMES = ("input_ids", "decoder_input_ids", "ids", "x", "src")
# types of models that count positions from padding_idx + 1
_OFFSET = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet")
_EXAMPLE = "Pass processor= (AutoImageProcessor or AutoTokenizer), or tensors as the model's forward takes them"


def prepare(model: nn.Module, inputs: Any, processor: Any = None, *, truncate: bool = False) -> Inputs:
    """Turn tensors, pictures or sentences into :class:`Inputs` on the model's device and in its dtype.

    A ``Path`` or file object is read, and so is a string with the suffix of a picture file unless the processor is a
    tokenizer. Bytes ``[H, W]`` or ``[H, W, 3]``, a tensor of bytes ``[3, H, W]`` and an array of fractions from 0 to 1
    ``[H, W, 3]`` are pictures; any other array is a tensor. A mapping with ``text`` and ``text_pair`` is a pair of
    texts per sample. A list holds samples, which may be tensors or mappings of tensors
    (:mod:`whyformer.inputs.stacking`); a tuple holds forward's positional arguments.

    Args:
        model: the model that will run on the inputs.
        inputs: as for :func:`whyformer.explain`.
        processor: image processor, tokenizer, feature extractor, or function picture -> tensor.
        truncate: truncate text that is longer than the model's limit; of a pair, the longer text first.

    Raises:
        InputError: the inputs are empty, too long, not finite, or of the wrong kind.
        LoadError: a file is missing or cannot be read.
    """
    return prepare_normalized(model, normalized(inputs, processor), processor, truncate=truncate)


def prepare_normalized(model: nn.Module, inputs: Any, processor: Any = None, *, truncate: bool = False) -> Inputs:
    """Call :func:`prepare` with inputs as returned by :func:`~whyformer.inputs.normalize.normalized`."""
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, Sequence) and len(inputs) == 0:
        raise InputError("the list of inputs is empty")
    if isinstance(inputs, Sequence) and all(isinstance(i, str) for i in inputs):
        prepared = _from_texts(model, list(inputs), processor, truncate)
    elif isinstance(inputs, Mapping) and set(inputs) == {"text", "text_pair"}:
        texts, pairs = text_lists(inputs["text"], inputs["text_pair"])
        prepared = _from_texts(model, texts, processor, truncate, pairs)
    elif isinstance(inputs, Sequence) and all(isinstance(i, Image.Image) for i in inputs):
        prepared = _from_pictures(model, list(inputs), processor)
    elif isinstance(inputs, Sequence) and all(isinstance(i, Sound) for i in inputs):
        prepared = _from_tensors((), encode_sounds(inputs, processor), model, None)
        prepared = with_sounds(prepared, inputs, processor)
    elif is_prompt(inputs):
        encoded, pictures = encode(model, inputs["text"], inputs["images"], processor)
        prepared = check_assigned(_from_tensors((), encoded, model, processor), len(pictures))
        prepared = with_pictures(prepared, pictures, processor)
    elif isinstance(inputs, Tensor | Mapping | tuple) or holds_tensors(inputs):
        inputs = stacked(model, inputs, processor) if isinstance(inputs, list) else inputs
        positional = inputs if isinstance(inputs, tuple) else (inputs,) if isinstance(inputs, Tensor) else ()
        args, kwargs, changes = corrected(model, positional, dict(inputs) if isinstance(inputs, Mapping) else {})
        prepared = _from_tensors(args, kwargs, model, processor)
        prepared = replace(prepared, notes=[changes] * prepared.batch if changes else None)
    else:
        items = sorted({type(i).__name__ for i in inputs}) if isinstance(inputs, list) else []
        kind = f"a list of {' and '.join(items)}" if items else type(inputs).__name__
        raise InputError(
            "inputs must be a picture (PIL image or file), a sound (.wav file), a string, a tensor, a mapping of "
            "tensors, a list of one of these kinds, of pairs of texts or of (text, picture), or a tuple of forward's "
            f"arguments, not {kind}"
        )
    return _move(prepared, model)


def _move(inputs: Inputs, model: nn.Module) -> Inputs:
    """Move inputs to the model's device, and pixels and vectors to its dtype; check that they are finite."""
    device, dtype = device_of(model), dtype_of(model)

    def move(place: str | int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(
                "the input contains NaN or infinity, which no explanation can handle: check the preprocessing"
            )
        # inference-mode tensors cannot enter a graph
        value = value.clone() if value.is_inference() else value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    moved = replace(inputs, kwargs=name_outputs(model, inputs.kwargs)).with_arguments(move)
    return moved.with_sides({n: side.with_masks(lambda mask: mask.to(device)) for n, side in moved.sides.items()})


# -- tensors -----------------------------------------------------------------------------------------------------
def _from_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, processor: Any) -> Inputs:
    arguments: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = {place: value for place, value in arguments if isinstance(value, Tensor)}
    if not tensors:
        listed = ", ".join(str(place) for place, _ in arguments) or "none"
        raise InputError(
            f"there is no tensor among the inputs ({listed}): pass arguments of the model's forward as tensors, texts "
            "as {'text': ..., 'text_pair': ...}, or a sound as {'array': ..., 'sampling_rate': ...}"
        )
    if any(t.dim() and len(t) == 0 for t in tensors.values()):
        raise InputError("the batch is empty")
    names = {place: place if isinstance(place, str) else argument_name(model, place) for place in tensors}
    content = {place: t for place, t in tensors.items() if not is_auxiliary(names[place])} or tensors
    floats = {place: t for place, t in content.items() if t.is_floating_point()}
    integers = {place: t for place, t in content.items() if t.dtype in (torch.long, torch.int)}
    ids = [p for p, t in integers.items() if t.dim() == 2 or (t.dim() == 3 and names[p] in _ID_NAMES)]
    ids.sort(key=lambda place: names[place] not in _ID_NAMES)
    pixels, vectors = ([p for p, t in floats.items() if t.dim() in dims] for dims in ((4, 5), (3,)))
    patches = [p for p in pixels if ids and are_patches(tensors[p], tensors[ids[0]], model)]
    pictures = [p for p in pixels if p not in patches]
    if ids and not (pictures or vectors):  # packed patches of equally large pictures
        samples = len(tensors[ids[0]])
        vectors = [p for p, t in floats.items() if t.dim() == 2 and is_evenly_packed(t, samples, kwargs)]
    vectors += patches
    text_first = bool(pictures and ids) and has_several_pictures(tensors[pictures[0]], tensors[ids[0]], model)
    scored = [*ids, *pictures, *vectors] if text_first or patches else [*pictures, *ids, *vectors]
    count = len(tensors[scored[0]]) if scored else None
    scored += [p for p, t in content.items() if p not in scored and is_table(t, count)]
    if not (pictures or ids):  # such as the values of a time series, before features of their times
        scored.sort(key=lambda place: names[place] != getattr(model, "main_input_name", None))
    if not scored:
        shapes = ", ".join(f"{names[p]}: {list(t.shape)} {t.dtype}" for p, t in tensors.items())
        raise InputError(
            f"none of the tensors can be explained ({shapes}): pass pixels [B, C, H, W], token ids [B, N], vectors "
            "[B, N, D], or numbers [B, F] (a table, a sound)"
        )
    by_name, places = {names[p]: t for p, t in tensors.items()}, {names[p]: p for p in tensors}
    masks = mask_names({names[p]: tensors[p] for p in [*ids, *scored] if p not in pictures}, by_name)
    sides = {}
    for place in scored:
        facts = _picture_facts if place in pictures else _text_facts if place in ids else _vector_facts
        mask = masks.get(names[place], "")
        side = facts(tensors[place], names[place], by_name.get(mask), model, processor)
        sides[side.name] = replace(side, scored=place, masked_by=places.get(mask))
    return Inputs(args, kwargs, "", scored[0]).with_sides(sides)


def _picture_facts(tensor: Tensor, name: str, mask: Tensor | None, model: nn.Module, processor: Any) -> Inputs:
    if channels_last(tensor, model):
        raise InputError(
            f"the {tensor.shape[-1]} channels of {name} {list(tensor.shape)} seem to come last: permute the "
            "axes to [B, C, H, W]; if the model takes channels last, wrap it in a module that permutes them back"
        )
    features = Features(pictures=without_normalisation(tensor, processor))
    black, white = black_and_white(processor)
    return Inputs((), {}, "image", name, features=features, black=black, white=white, name=name)


def _vector_facts(tensor: Tensor, name: str, mask: Tensor | None, model: nn.Module, processor: Any) -> Inputs:
    return Inputs((), {}, "tensor", name, _real(mask, tensor.shape[:2]), name=name)


def _real(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return a padding mask as truth values; None if it does not have one for each of the features."""
    real = None if mask is None else without_cached(mask, shape[-1]).bool()
    return real if real is not None and real.shape == shape else None


def _text_facts(tensor: Tensor, name: str, mask: Tensor | None, model: nn.Module, processor: Any) -> Inputs:
    check_vocabulary(tensor, model)
    limit = longest_text(model, None, decoder=name.startswith("decoder"))
    _check_length(tensor.shape[-1], limit, "shorten it, or truncate the ids")
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else getattr(processor, "tokenizer", None)
    rows: Any = None
    if tokenizer is not None:
        rows = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in tensor.flatten(0, -2)]
        if tensor.dim() == 3:  # multiple choice: group the rows by sample
            rows = [rows[i : i + tensor.shape[1]] for i in range(0, len(rows), tensor.shape[1])]
    special = None if tokenizer is None else torch.isin(tensor, tensor.new_tensor(named_special(tokenizer)))
    features = Features(rows, unknown=unknown(tensor, special, tokenizer))
    fill = _fill_ids(getattr(model, "config", None) if tokenizer is None else tokenizer)
    return Inputs((), {}, "text", name, _real(mask, tensor.shape), special, features, fill_ids=fill, name=name)


def check_vocabulary(ids: Tensor, model: nn.Module) -> None:
    """Raise if there are no ids, or an id outside the model's vocabulary."""
    if ids.numel() == 0:
        raise InputError("the text is empty")
    size = vocabulary_size(model)
    if size is None:
        return
    # a model may replace placeholders outside of its vocabulary (Gemma 3)
    outside = ids[((ids < 0) | (ids >= size)) & ~placeholders(model, ids, ("image", "video", "audio"))]
    if len(outside):
        raise InputError(
            f"token id {int(outside[0])} is outside the model's vocabulary of {size}: use the model's own tokenizer"
        )


# -- text --------------------------------------------------------------------------------------------------------
def _from_texts(
    model: nn.Module, texts: list[str], tokenizer: Any, truncate: bool, pairs: list[str] | None = None
) -> Inputs:
    mark, padding = getattr(tokenizer, "image_token", None), padding_of(model, tokenizer, len(texts))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    for text in texts:
        if isinstance(mark, str) and mark in text:
            raise InputError(f"the prompt has a placeholder for a picture ({mark}) and no picture: pass both")
    if tokenizer is None:
        raise InputError(f"text needs the model's tokenizer. {_EXAMPLE}")
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError(
            "this is a text, and the processor is no tokenizer: pass an input of the kind that the model reads, or, if "
            "it reads text, its tokenizer (AutoTokenizer) as processor="
        )
    check_texts(texts)
    check_texts(pairs or [], "text_pair")
    limit = longest_text(model, tokenizer)
    encoded = tokenizer(
        texts,
        pairs,
        return_tensors="pt",
        truncation=truncate,
        **({"max_length": limit} if truncate else {}) | padding,
        return_offsets_mapping=bool(tokenizer.is_fast),
        verbose=False,  # our own error names a text that is too long
    )
    offsets = encoded.pop("offset_mapping", None)
    ids = encoded["input_ids"]
    _check_length(ids.shape[1], limit, "shorten it, or allow truncation (truncate=True, --truncate)")
    facts = _text_facts(ids, "input_ids", encoded.get("attention_mask"), model, tokenizer)
    if facts.special is not None and bool(facts.special.all(1).any()):
        raise InputError("the text holds no tokens that the tokenizer knows")
    places = None if offsets is None else [[(int(a), int(b)) for a, b in row] for row in offsets]
    lengths = [len(text) for text in texts]
    if pairs is not None:
        texts, places = join_pairs(texts, pairs, places, encoded)
    extent, skipped = parts_read(texts, lengths, places, encoded) if truncate and places is not None else (None, None)
    features = replace(facts.features, offsets=places, texts=texts, extent=extent, skipped=skipped)
    args, kwargs, place = as_arguments(model, encoded, facts.name)
    name = place if isinstance(place, str) else argument_name(model, place)
    mask = "attention_mask" if "attention_mask" in kwargs else None
    return replace(facts, args=args, kwargs=kwargs, scored=place, features=features, masked_by=mask, name=name)


def _check_length(tokens: int, limit: int | None, way_out: str) -> None:
    if limit is not None and tokens > limit:
        raise InputError(f"the text has {tokens} tokens, and the model takes at most {limit}: {way_out}")


def longest_text(model: nn.Module, tokenizer: Any, *, decoder: bool = False) -> int | None:
    """Return the maximum number of tokens, the smaller of the tokenizer's and the position embeddings' limits.

    Args:
        model: the model.
        tokenizer: its tokenizer; None without one.
        decoder: the text is the decoder's, if an encoder and a decoder have different limits (LED).
    """
    config = getattr(model, "config", None)
    rope = getattr(config, "rope_parameters", None)
    names = (f"max_{'decoder' if decoder else 'encoder'}_position_embeddings", "max_position_embeddings", "max_seq_len")
    positions = next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
    if isinstance(rope, Mapping) and "dynamic" in str(rope.get("rope_type")):
        positions = None  # the rotary frequencies depend on the number of tokens, which is not limited
    elif positions and getattr(config, "model_type", "") in _OFFSET:
        positions -= (getattr(config, "pad_token_id", 1) or 0) + 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    # a tokenizer without a limit has a huge number
    return min((n for n in limits if isinstance(n, int) and 0 < n < 10**9), default=None)


def named_special(tokenizer: Any) -> list[int]:
    """Return the ids of [CLS], [SEP], <s>, </s> and padding; [UNK] and [MASK] count as content."""
    names = ("cls_token_id", "sep_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    return [i for i in (getattr(tokenizer, n, None) for n in names) if isinstance(i, int)]


def _fill_ids(owner: Any) -> tuple[tuple[str, int], ...]:
    """Return (name, id) of the tokens of a tokenizer, or of a model's config, that can replace others as "nothing
    here" in perturbations."""
    ids = {name: getattr(owner, f"{token}_token_id", None) for name, token in TOKENS.items()}
    return tuple((name, i) for name, i in ids.items() if isinstance(i, int))


# -- pictures ----------------------------------------------------------------------------------------------------
def _from_pictures(model: nn.Module, pictures: list[Image.Image], processor: Any) -> Inputs:
    if processor is None:
        raise InputError(f"a picture needs the model's image processor. {_EXAMPLE}")
    if hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor"):
        raise InputError(
            "this is a picture, and the processor is a tokenizer: pass a text, or, if the model reads pictures, its "
            "image processor (AutoImageProcessor) as processor="
        )
    # RGB pictures are not copied, so that many explanations share a large picture
    rgb = [as_rgb(p) for p in pictures]
    processor = getattr(processor, "image_processor", processor)
    if hasattr(processor, "preprocess"):
        args, kwargs, _ = as_arguments(model, _encoded(processor, rgb), "pixel_values")
    else:  # the transform of a model of timm or torchvision
        args, kwargs = (processed(processor, rgb),), {}
    facts, process = _from_tensors(args, kwargs, model, processor), partial(processed, processor)
    if facts.tensor.dim() == 3:  # patches of each picture, packed into a row
        mosaic = measure_mosaic(lambda group: process(group)[0], [[p] for p in rgb], packed=True)
        return replace(facts, mosaic=mosaic, notes=[notes(p) for p in rgb])
    features = facts.features
    if features.pictures is not None:
        features = replace(features, **picture_features(process, rgb))
    size = (int(facts.tensor.shape[-2]), int(facts.tensor.shape[-1]))
    boxes = features.geometry or [None] * len(rgb)
    changes = [notes(p) + distortions((p.height, p.width), size, b) for p, b in zip(rgb, boxes, strict=True)]
    return replace(facts, features=features, notes=changes)


def _encoded(processor: Any, pictures: list[Image.Image]) -> dict[str, Tensor]:
    """Return the tensors that an image processor makes of pictures, among them ``pixel_values``."""
    try:
        encoded = dict(processor(images=pictures, return_tensors="pt"))
        return {n: t for n, t in encoded.items() if isinstance(t, Tensor)} | {"pixel_values": encoded["pixel_values"]}
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"the image processor fails: check its preprocessor_config.json ({reason})") from error


def processed(processor: Any, pictures: list[Image.Image]) -> Tensor:
    """Return the processor's pixels ``[B, C, H, W]``."""
    if hasattr(processor, "preprocess"):
        return _encoded(processor, pictures)["pixel_values"]
    if not callable(processor):
        raise InputError(
            "processor must be a Hugging Face image processor or a function picture -> tensor, "
            f"not {type(processor).__name__}"
        )
    tensors = [processor(p) for p in pictures]
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tensors):
        raise InputError("the processor must return a tensor [C, H, W] for a picture")
    if len({t.shape for t in tensors}) > 1:
        raise InputError("the processor must resize the pictures of a batch to the same size")
    return torch.stack(tensors)
