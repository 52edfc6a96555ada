"""The arguments of a model's forward: corrections before the run, and their names, channels and devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.models.output import parameters

_LOSS = ("label", "labels", "start_positions", "end_positions", "next_sentence_label", "return_loss")


def corrected(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Correct the arguments of a model's forward.

    Labels, with which a model returns a loss, are dropped if its forward does not require them; a decoder without other
    inputs reads them as its tokens. A single sample without a batch axis gets one if it is clearly such: ids ``[N]``,
    and pixels ``[C, H, W]`` of a model that begins with a convolution over C channels.

    Returns:
        (args, kwargs, notes on the changes).
    """
    notes = []
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    required = {n for n, p in parameters(model).items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    dropped = [n for n in kwargs if (n in _LOSS or n.endswith("_labels")) and n not in required]
    labels = kwargs.get("labels")
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    decodes = "decoder_input_ids" in parameters(model) and not any(n.startswith("decoder_input") for n in kwargs)
    if decodes and "labels" in dropped and isinstance(labels, Tensor) and labels.dim() == 2 and callable(shift):
        kwargs["decoder_input_ids"] = shift(labels=labels)
        notes.append("labels were used as the decoder's tokens (decoder_input_ids)")
    for name in dropped:
        del kwargs[name]
    if dropped:
        notes.append(f"ignored, because the output is explained and not a loss: {', '.join(dropped)}")
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    single = next(((n, v) for n, v in named if isinstance(v, Tensor) and _is_unbatched(model, n, v)), None)
    if single is not None:
        main, (axes, length) = single[0], (single[1].dim(), single[1].shape[-1])
        notes.append(f"a batch axis was added to {main if isinstance(main, str) else 'the input'}")

        def batched(value: Any) -> Any:
            is_batch_part = isinstance(value, Tensor) and value.dim() == axes and value.shape[-1] == length
            return value[None] if is_batch_part else value

        args, kwargs = tuple(map(batched, args)), {n: batched(v) for n, v in kwargs.items()}
    return args, kwargs, notes


def as_arguments(
    model: nn.Module, encoded: Mapping[str, Any], main: str
) -> tuple[tuple[Any, ...], dict[str, Any], str | int]:
    """Return the tensors of a processor as arguments of the model's forward: (args, kwargs, place of ``main``).

    If the forward of a custom module has no parameter with the name ``main``, this tensor is the first positional
    argument. Other tensors that the forward does not take, such as ``token_type_ids``, are left out.
    """
    accepted, kwargs = parameters(model), dict(encoded)
    first = next(iter(accepted.values()), None)
    takes_any = not accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    if not takes_any:
        kwargs = {name: value for name, value in encoded.items() if name in (main, *accepted)}
    unnamed = first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    if main in accepted or (takes_any and unnamed) or hasattr(model, "main_input_name"):
        return (), kwargs, main
    return (kwargs.pop(main),), kwargs, 0


def name_outputs(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add ``return_dict=True`` if a transformers model is set to return a tuple, so that its outputs have names; and
    ``use_cache=False`` if it is set to return a cache and got none: a state that all blocks write would connect them.
    """
    config = getattr(model, "config", None)
    settings = (getattr(config, "return_dict", None), kwargs.get("return_dict"))
    named = {**kwargs, "return_dict": True} if False in settings else kwargs
    passes_cache = any(name in kwargs for name in ("use_cache", "past_key_values", "state", "cache_params"))
    returned = getattr(config, "use_cache", None) is True and "use_cache" in parameters(model)
    return {**named, "use_cache": False} if returned and not passes_cache else named


def channels(model: nn.Module) -> int | None:
    """Return the number of picture channels the model takes, if it begins with a 2D convolution."""
    first = first_convolution(model)
    return None if first is None else first.in_channels


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """Return the 2D convolution that the model begins with, if it does."""
    leaves = (m for m in model.modules() if next(m.children(), None) is None)
    first = next((m for m in leaves if next(m.parameters(), None) is not None), None)
    return first if isinstance(first, nn.Conv2d) else None


def _is_unbatched(model: nn.Module, name: str | int, value: Tensor) -> bool:
    """Return whether a tensor is a single sample without a batch axis."""
    if value.is_floating_point():
        return value.dim() == 3 and name in (0, "pixel_values", "x") and value.shape[0] == channels(model)
    return value.dim() == 1 and len(value) > 0 and name in (0, "input_ids", "ids", "x", "src")


def device_of(model: nn.Module) -> torch.device:
    """Return the device for a model's inputs: that of its first parameter, or, if weights are loaded for each pass
    (accelerate's offloading), the device on which its modules run."""
    first = next(model.parameters(), None)
    if first is None or not first.is_meta:
        return torch.device("cpu") if first is None else first.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    device = next((d for h in hooks if (d := getattr(h, "execution_device", None)) is not None), None)
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype for a model's floating-point inputs, that of its first such parameter; float32 without one."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


_AUXILIARY = re.compile(
    r"mask|type|segment|position|mc_token|label|box|(^|_)pos|point|grid|sizes|shapes|ratio|pooling|crops|length|cache|langs|noise|timestep|indices"
)

_FEATURES = ("input_ids", "inputs_embeds", "embeds", "values", "ids")


def is_auxiliary(name: str) -> bool:
    """Return whether an argument of that name describes features: a mask, type, position, label or box."""
    return _AUXILIARY.search(name) is not None


def mask_names(features: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the argument that marks the padding of each text or sequence of vectors that has one.

    A mask is named like its features, with ``attention_mask`` instead of ``input_ids``, ``ids``,
    ``inputs_embeds``, ``embeds`` or ``values``: ``decoder_attention_mask`` belongs to ``decoder_input_ids``. An
    ``attention_mask`` that belongs to none by name belongs to the first features of its shape without ``input_ids`` in
    their name, to a decoder's only if there are no others. No mask belongs to two.

    Args:
        features: token ids and vectors by name, in order.
        arguments: the arguments of the model's forward by name.
    """
    masks = dict[str, str]()
    for name in sorted(features, key=lambda name: "input_ids" not in name):
        part = next((part for part in _FEATURES if part in name), None)
        mask = name.replace(part, "attention_mask") if part else f"{name}_attention_mask"
        if isinstance(arguments.get(mask), Tensor) and mask not in masks.values():
            masks[name] = mask
    shared = arguments.get("attention_mask")
    others = sorted((name for name in features if "input_ids" not in name), key=lambda name: "decoder" in name)
    if others and isinstance(shared, Tensor) and "attention_mask" not in masks.values():
        alike = [name for name in others if shared.shape in (features[name].shape, features[name].shape[:2])]
        masks.setdefault((alike or others)[0], "attention_mask")
    return masks


def is_table(tensor: Tensor, samples: int | None) -> bool:
    """Return whether a tensor is ``[samples, F]`` floats: features of a table, or a wave."""
    return tensor.is_floating_point() and tensor.dim() == 2 and samples in (None, len(tensor))


def argument_name(model: nn.Module, place: int) -> str:
    """Return the name of the model's positional argument at ``place``."""
    names = [name for name, p in parameters(model).items() if p.kind is not p.VAR_POSITIONAL]
    return names[place] if place < len(names) else f"input {place}"
