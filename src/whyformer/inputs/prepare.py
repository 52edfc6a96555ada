"""Turn pictures, sentences or tensors into :class:`Inputs`, refusing bad ones before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.inputs.argument import read_file
from whyformer.inputs.feed import put_right
from whyformer.inputs.geometry import measure_geometry
from whyformer.inputs.pictures import as_rgb, black_of, is_picture_name, notes, open_picture, without_normalisation

_ID_NAMES = ("input_ids", "decoder_input_ids", "ids", "x", "src")
_EXAMPLE = "Give processor= (AutoImageProcessor or AutoTokenizer), or tensors as the model's forward takes them"


@dataclass(frozen=True)
class Inputs:
    """What is fed to the model, and what is known about its features.

    Attributes:
        args, kwargs: the arguments of the model's forward.
        modality: "image", "text" or "tensor" (a sequence of vectors).
        scored: position or name of the argument whose features get scores.
        mask: ``[B, N]`` True at real tokens, False at padding; None if nothing is padded.
        special: ``[B, N]`` True at special tokens ([CLS], [SEP], <s> ...), None if unknown.
        features: what the scores will belong to, carried into the result.
        notes: what was done to each sample (a picture that was read, arguments that were left out), in words.
        fill_ids: (name, id) of tokens that may stand for "nothing here"; black: ``[C]`` in the model's space, None if
            unknown.
        samples: ``[B]`` which sample each row is a copy of, in perturbed copies; None: row i is sample i.
        shared: names of arguments that are the same for all samples (the texts that each picture is compared with).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modality: str
    scored: str | int
    mask: Tensor | None = None
    special: Tensor | None = None
    features: Features = field(default_factory=Features)
    notes: list[list[str]] | None = None
    fill_ids: tuple[tuple[str, int], ...] = ()
    black: tuple[float, ...] | None = None
    samples: Tensor | None = None
    shared: frozenset[str] = frozenset()

    @property
    def tensor(self) -> Tensor:
        """The scored tensor: ``[B, C, H, W]`` pixels, ``[B, N]`` ids or ``[B, N, D]`` vectors."""
        value = self.args[self.scored] if isinstance(self.scored, int) else self.kwargs[self.scored]
        assert isinstance(value, Tensor)
        return value

    @property
    def batch(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def image_size(self) -> tuple[int, int] | None:
        return (int(self.tensor.shape[-2]), int(self.tensor.shape[-1])) if self.modality == "image" else None

    @property
    def feed(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs

    def with_tensor(self, value: Tensor) -> Inputs:
        """The same with another scored tensor; for k copies of each sample the other arguments are repeated too."""
        times = value.shape[0] // self.batch

        def fit(other: Any) -> Any:
            return (
                other.repeat_interleave(times, 0) if isinstance(other, Tensor) and other.dim() and times != 1 else other
            )

        args = tuple(value if i == self.scored else fit(a) for i, a in enumerate(self.args))
        kwargs = {k: value if k == self.scored else v if k in self.shared else fit(v) for k, v in self.kwargs.items()}
        return replace(
            self, args=args, kwargs=kwargs, mask=fit(self.mask), special=fit(self.special), samples=fit(self._numbers),
        )  # fmt: skip

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(self.batch, device=self.tensor.device) if self.samples is None else self.samples

    def select(self, rows: slice) -> Inputs:
        """Some of the samples (what is only for display is left out)."""

        def cut(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == self.batch else value

        return Inputs(
            tuple(cut(a) for a in self.args), {k: v if k in self.shared else cut(v) for k, v in self.kwargs.items()},
            self.modality, self.scored, cut(self.mask), cut(self.special), fill_ids=self.fill_ids, black=self.black,
            samples=cut(self._numbers), shared=self.shared,
        )  # fmt: skip


def prepare(model: nn.Module, inputs: Any, processor: Any = None, *, truncate: bool = False) -> Inputs:
    """Make :class:`Inputs` out of tensors, pictures or sentences; moved to the model's device and dtype.

    A ``Path`` and an opened file are read; so is a text that ends like a picture file, unless the processor is a mere
    tokenizer.

    Raises:
        InputError: empty, too long (``truncate`` allows it), not finite, or of the wrong kind.
        LoadError: a file is missing or cannot be read.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, str | Path | Image.Image) or hasattr(inputs, "read"):
        inputs = [inputs]
    if isinstance(inputs, list | tuple):
        inputs = [_opened(i, processor) for i in inputs]
    if isinstance(inputs, Sequence) and len(inputs) == 0:
        raise InputError("the list of inputs is empty")
    if isinstance(inputs, Sequence) and all(isinstance(i, str) for i in inputs):
        made = _from_texts(model, list(inputs), processor, truncate)
    elif isinstance(inputs, Sequence) and all(isinstance(i, Image.Image) for i in inputs):
        made = _from_pictures(list(inputs), processor)
    elif isinstance(inputs, Tensor | Mapping) or (
        isinstance(inputs, list) and any(isinstance(i, Tensor) for i in inputs)
    ):
        listed = (inputs,) if isinstance(inputs, Tensor) else () if isinstance(inputs, Mapping) else tuple(inputs)
        args, kwargs, said = put_right(model, listed, dict(inputs) if isinstance(inputs, Mapping) else {})
        made = _from_tensors(args, kwargs, model, processor)
        made = replace(made, notes=[said] * made.batch if said else None)
    else:
        raise InputError(
            "inputs must be a picture (PIL image or file), a string, a list of one kind of these, a tensor or a "
            f"mapping of tensors; got {type(inputs).__name__}"
        )
    return _move(made, model)


def _opened(item: Any, processor: Any) -> Any:
    """The picture or the text where a file is given; anything else as it is."""
    if hasattr(item, "read"):
        return open_picture(item)
    if isinstance(item, Path):
        return read_file(item)
    reads_text = hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor")
    return open_picture(item) if isinstance(item, str) and is_picture_name(item) and not reads_text else item


def _move(made: Inputs, model: nn.Module) -> Inputs:
    """To the model's device; pixels and vectors to its dtype; checked to be finite."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(
                "the input holds NaN or infinity, so no explanation would mean anything; check the preprocessing"
            )
        # inference-mode tensors cannot enter a graph
        value = value.clone() if value.is_inference() else value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    moved = replace(made, args=tuple(move(a) for a in made.args), kwargs={k: move(v) for k, v in made.kwargs.items()})
    if moved.batch == 0:
        raise InputError("the batch is empty")
    extra = {n: getattr(moved, n).to(device) for n in ("mask", "special") if getattr(moved, n) is not None}
    return replace(moved, **extra)


# -- tensors -----------------------------------------------------------------------------------------------------
def _from_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, processor: Any) -> Inputs:
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(n, t) for n, t in named if isinstance(t, Tensor)]
    if not tensors:
        raise InputError("no tensor among the inputs")
    if any(t.dim() and t.shape[0] == 0 for _, t in tensors):
        raise InputError("the batch is empty")
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() in (4, 5):
            seen = Features(pictures=without_normalisation(tensor, processor))
            return Inputs(args, kwargs, "image", name, features=seen, black=black_of(processor))
    integers = [(n, t) for n, t in tensors if t.dtype in (torch.long, torch.int) and t.dim() == 2]
    for name, tensor in sorted(integers, key=lambda pair: pair[0] not in _ID_NAMES)[:1]:
        _check_vocabulary(tensor, model)
        _check_length(tensor.shape[1], longest_text(model, None), "shorten it, or cut the ids off yourself")
        mask = kwargs.get("attention_mask")
        mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else None
        rows = None if tokenizer is None else [tokenizer.convert_ids_to_tokens(row.tolist()) for row in tensor]
        special = None if tokenizer is None else _special_tokens(tensor, tokenizer)
        return Inputs(args, kwargs, "text", name, mask, special, Features(rows), fill_ids=_fill_ids(tokenizer))
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() == 3:
            return Inputs(args, kwargs, "tensor", name)
    shapes = ", ".join(f"{n}: {list(t.shape)} {t.dtype}" for n, t in tensors)
    raise InputError(
        f"cannot tell which tensor to explain ({shapes}): expected pixels [B, C, H, W], token "
        "ids [B, N] or vectors [B, N, D]; "
        "an unbatched sample needs a leading axis of 1"
    )


def _check_vocabulary(ids: Tensor, model: nn.Module) -> None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if ids.numel() == 0:
        raise InputError("the text is empty")
    worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
    if isinstance(size, int) and not 0 <= worst < size:
        raise InputError(
            f"token id {worst} is outside the model's vocabulary of {size}: is this the model's own tokenizer?"
        )


# -- text --------------------------------------------------------------------------------------------------------
def _from_texts(model: nn.Module, texts: list[str], tokenizer: Any, truncate: bool) -> Inputs:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if tokenizer is None or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError(f"text needs the model's tokenizer. {_EXAMPLE}")
    for i, text in enumerate(texts):
        if not text.strip():
            raise InputError("the text is empty" if len(texts) == 1 else f"text number {i} is empty")
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise InputError(
            "this tokenizer has no padding token, so sentences of different length make no "
            "batch: set tokenizer.pad_token"
        )
    limit = longest_text(model, tokenizer)
    encoded = tokenizer(
        texts,
        return_tensors="pt",
        padding=len(texts) > 1,
        truncation=truncate,
        max_length=limit if truncate else None,
        return_offsets_mapping=bool(tokenizer.is_fast),
    )
    offsets = encoded.pop("offset_mapping", None)
    ids = encoded["input_ids"]
    _check_length(ids.shape[1], limit, "shorten it, or allow truncation (truncate=True, --truncate)")
    special = _special_tokens(ids, tokenizer)
    if bool(special.all(1).any()):
        raise InputError("the text holds no tokens the tokenizer knows")
    mask = encoded.get("attention_mask")
    features = Features(
        [tokenizer.convert_ids_to_tokens(row.tolist()) for row in ids],
        None if offsets is None else [[(int(a), int(b)) for a, b in row] for row in offsets],
        texts,
    )
    mask = None if mask is None else mask.bool()
    return Inputs((), dict(encoded), "text", "input_ids", mask, special, features, fill_ids=_fill_ids(tokenizer))


def _check_length(tokens: int, limit: int | None, way_out: str) -> None:
    if limit is not None and tokens > limit:
        raise InputError(f"the text has {tokens} tokens and the model takes at most {limit}: {way_out}")


def longest_text(model: nn.Module, tokenizer: Any) -> int | None:
    """The most tokens the model takes: the smaller of what tokenizer and position embeddings say."""
    config = getattr(model, "config", None)
    limits = [
        n
        for n in (getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None))
        if n and 0 < n < 10**9
    ]
    offset = 0
    if limits and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet"):
        offset = (getattr(config, "pad_token_id", 1) or 0) + 1  # these count positions from padding_idx + 1
        limits = [n - offset if n == getattr(config, "max_position_embeddings", None) else n for n in limits]
    return min(limits) if limits else None


def _special_tokens(ids: Tensor, tokenizer: Any) -> Tensor:
    """[CLS], [SEP], <s>, </s> and padding; [UNK] and [MASK] stand for content."""
    names = ("cls_token_id", "sep_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    found = [i for i in (getattr(tokenizer, n, None) for n in names) if isinstance(i, int)]
    return torch.isin(ids, torch.tensor(found, dtype=ids.dtype)) if found else torch.zeros_like(ids, dtype=torch.bool)


def _fill_ids(tokenizer: Any) -> tuple[tuple[str, int], ...]:
    """Ids that may stand for "nothing here" in perturbations."""
    names = {"pad": "pad_token_id", "mask": "mask_token_id", "unk": "unk_token_id"}
    return tuple((k, int(i)) for k, n in names.items() if isinstance(i := getattr(tokenizer, n, None), int))


# -- pictures ----------------------------------------------------------------------------------------------------
def _from_pictures(pictures: list[Image.Image], processor: Any) -> Inputs:
    if processor is None:
        raise InputError(f"a picture needs the model's image processor. {_EXAMPLE}")
    if hasattr(processor, "convert_ids_to_tokens") and not hasattr(processor, "image_processor"):
        raise InputError(f"this is a picture, and the processor is a tokenizer, which reads text. {_EXAMPLE}")
    # the very pictures where they are RGB already, so that many explanations of a large one share it
    rgb = [as_rgb(p) for p in pictures]
    processor = getattr(processor, "image_processor", processor)
    pixels = _processed(processor, rgb)
    shown = without_normalisation(pixels, processor)
    geometry = None
    if shown is not None:
        geometry = measure_geometry(partial(_processed, processor), [(p.height, p.width) for p in rgb])
    features = Features(pictures=shown, originals=None if geometry is None else rgb, geometry=geometry)
    named = hasattr(processor, "preprocess")
    args: tuple[Any, ...] = () if named else (pixels,)
    kwargs = {"pixel_values": pixels} if named else {}
    said = [notes(p) for p in rgb]
    return Inputs(
        args, kwargs, "image", "pixel_values" if named else 0, features=features, notes=said, black=black_of(processor)
    )


def _processed(processor: Any, pictures: list[Image.Image]) -> Tensor:
    """``[B, C, H, W]`` as the model takes it."""
    if hasattr(processor, "preprocess"):
        pixels: Tensor = dict(processor(images=pictures, return_tensors="pt"))["pixel_values"]
        return pixels
    if not callable(processor):
        raise InputError(
            "processor must be a Hugging Face image processor or a function picture -> tensor, "
            f"not {type(processor).__name__}"
        )
    made = [processor(p) for p in pictures]
    if not all(isinstance(m, Tensor) and m.dim() == 3 for m in made):
        raise InputError("the processor must return a tensor [C, H, W] for a picture")
    if len({m.shape for m in made}) > 1:
        raise InputError("the processor must bring pictures of one batch to the same size")
    return torch.stack(made)
