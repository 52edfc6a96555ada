"""Activation maximisation: the picture that a class, a neuron or a token of a model answers to most."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file
from torch import Tensor, nn

from whyformer.errors import InputError, ModelError
from whyformer.explaining import Track, tracking
from whyformer.explanation.storage import written_whole
from whyformer.explanation.views import gaussian_blur
from whyformer.inputs import prepare
from whyformer.inputs.pictures import without_normalisation
from whyformer.models.loading import opened
from whyformer.models.output import Output
from whyformer.models.readout import has_row, read_logits
from whyformer.models.structure import class_count, class_names
from whyformer.targets import class_index

_UNITS = (
    'a unit is a class (number or name), "module.path:neuron", "module.path:token:neuron", "module.path:token:*" (mean '
    'of a token) or "module.path:*" (mean of a layer)'
)


@dataclass(frozen=True, eq=False)
class Maximized:
    """The outcome of :func:`maximize_activation`.

    Attributes:
        image: ``[C, H, W]`` in model space (as the model's forward takes it), on the CPU.
        activation: S(image), without jitter.
        history: S before each step (of the jittered picture, if ``jitter`` is on) and at the end.
        unit: what was maximised, in words.
        settings: everything needed to repeat it.
        shown: ``[H, W, 3]`` uint8, the image with the processor's normalisation undone.
    """

    image: Tensor
    activation: float
    history: list[float]
    unit: str
    settings: dict[str, Any]
    shown: Tensor

    def picture(self, scale: int = 1) -> Image.Image:
        """As a PIL picture, each pixel ``scale`` times as wide and high."""
        made = Image.fromarray(self.shown.numpy())
        return made.resize((made.width * scale, made.height * scale), Image.Resampling.NEAREST)

    def save(self, path: str | Path) -> Path:
        """Write a ``.png`` (picture; facts in a text chunk) or a ``.safetensors`` (everything): whole or not at all."""
        path = Path(path)
        facts = {"unit": self.unit, "activation": self.activation, "history": self.history, "settings": self.settings}
        with written_whole(path) as partial:
            if path.suffix == ".png":
                note = PngInfo()
                note.add_itxt("whyformer", json.dumps(facts))
                self.picture().save(partial, format="PNG", pnginfo=note)
            elif path.suffix == ".safetensors":
                tensors = {"image": self.image.contiguous(), "shown": self.shown.contiguous()}
                save_file(tensors, partial, metadata={"whyformer": json.dumps(facts)})
            else:
                raise InputError(f"{path.name}: save as .png (the picture) or .safetensors (tensor and history too)")
        return path


def maximize_activation(
    model: nn.Module | str,
    unit: int | str,
    *,
    shape: Sequence[int] | None = None,
    like: Any = None,
    steps: int = 256,
    learning_rate: float = 0.05,
    weight_decay: float = 1e-4,
    jitter: int = 0,
    blur: float = 0.0,
    seed: int = 0,
    start: str | Tensor = "noise",
    processor: Any = None,
    progress: bool | Track = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> Maximized:
    """argmax_I S(I) − λ‖I‖² by gradient ascent (Adam) on the picture I in model space; survey 2.4.

    Args:
        model: a picture model in eval mode, or a name as in :func:`whyformer.explain`. It is left as it was.
        unit: S. A class number or name: its logit. ``"module.path:n"``: feature n of that module's output, averaged
            over its tokens (or positions). ``"module.path:t:n"``: feature n of token t (0 is the CLS token, where there
            is one). ``"module.path:t:*"``: mean over the features of token t. ``"module.path:*"``: mean of the whole
            output. Features lie on the last axis, for convolutions on axis 1, where tokens are positions row by row. Of
            a module that runs several times in a pass, the first time counts.
        shape: (C, H, W) or (H, W) of the picture; default what the model's config says.
        like: a tensor ``[..., C, H, W]`` or a PIL picture (with ``processor``) that gives the shape.
        steps: gradient steps.
        learning_rate: of Adam, in units of the model's input.
        weight_decay: λ; ‖I‖² sums over all channels and pixels.
        jitter: shift the picture by up to so many pixels (around the edge) at random in each step.
        blur: standard deviation in pixels of a Gaussian blur of the picture after each step; 0 is none.
        seed: of the starting noise and the jitter; torch's own random state is not touched.
        start: "noise" (N(0, 0.1²)), "zero", or a tensor to start from.
        processor: Hugging Face image processor whose normalisation :meth:`Maximized.picture` undoes (found by itself
            for a model given by name); without one the picture is scaled to its own range.
        progress: show a progress bar, or a function as in :func:`whyformer.explain`.
        device, dtype: for a model given by name.

    Raises:
        InputError: a text model (token ids cannot be climbed), an unknown unit, shape or start.
        ModelError: the activation is not finite or has no gradient to the picture.
    """
    model, processor = opened(model, processor, device=device, dtype=dtype)
    _check(steps=(steps, 1), jitter=(jitter, 0))
    _check(float, learning_rate=(learning_rate, 0), weight_decay=(weight_decay, 0), blur=(blur, 0))
    argument, goal = _argument(model), _goal(model, unit)
    draws = torch.Generator().manual_seed(seed)
    image = _start(model, start, shape, like, processor, draws)
    history: list[float] = []
    with torch.inference_mode(False), torch.enable_grad():
        image = image.clone().requires_grad_()
        climber = torch.optim.Adam([image], lr=learning_rate, maximize=True)

        def measure(picture: Tensor) -> Tensor:
            value = goal.value(model, lambda: model(picture) if argument is None else model(**{argument: picture}))
            if value.isfinite():
                return value
            raise ModelError(f"the activation of {goal.name} is not finite: check the weights, or use float32")

        for _ in tracking(progress)(range(steps), f"maximising {goal.name}", steps):
            shift = torch.randint(-jitter, jitter + 1, (2,), generator=draws).tolist() if jitter else (0, 0)
            value = measure(torch.roll(image, shift, (-2, -1)) if jitter else image)
            history.append(value.item())
            (image.grad,) = torch.autograd.grad(value - weight_decay * image.square().sum(), image)
            if len(history) == 1 and not bool((image.grad + 2 * weight_decay * image).any()):
                raise ModelError(f"{goal.name} has no gradient to the picture at the start, so there is no way up")
            climber.step()
            if blur > 0:
                image.data = gaussian_blur(image.data, blur)
        with torch.no_grad():
            history.append(measure(image).item())
    final = image.detach().cpu()
    shown = without_normalisation(final, processor)
    assert shown is not None
    settings = {
        "steps": steps, "learning_rate": learning_rate, "weight_decay": weight_decay, "jitter": jitter, "blur": blur,
        "seed": seed, "start": start if isinstance(start, str) else "given", "shape": list(final.shape[1:]),
    }  # fmt: skip
    return Maximized(final[0], history[-1], history, goal.name, settings, shown[0])


# -- what is maximised ---------------------------------------------------------------------------------------------
class _Reached(Exception):  # noqa: N818
    """Ends a forward pass early; never leaves this file."""


@dataclass(frozen=True)
class _Goal:
    """A class (``path`` None, ``neuron`` its index) or a place in a module's output; None is all of an axis."""

    name: str
    path: str | None
    token: int | None
    neuron: int | None

    def value(self, model: nn.Module, run: Callable[[], Any]) -> Tensor:
        """S of one pass, which stops where the unit is."""
        if self.path is None:
            output = run()
            if has_row(Output(model, output)):
                return read_logits(output)[0, self.neuron]
            raise InputError(f"the model's output is not one row of logits, so it has no classes: {_UNITS}")
        module, thread = model.get_submodule(self.path), threading.get_ident()

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                raise _Reached(output)

        handle = module.register_forward_hook(stop)
        try:
            run()
        except _Reached as reached:
            return self.read(module, *reached.args)
        finally:
            handle.remove()
        raise InputError(f"the module '{self.path}' does not run in a forward pass of this model")

    def read(self, module: nn.Module, output: Any) -> Tensor:
        """S out of the module's output."""
        while isinstance(output, tuple | list) and output:
            output = output[0]
        output = getattr(output, "last_hidden_state", output)
        if not isinstance(output, Tensor) or output.dim() < 2:
            raise InputError(f"the module '{self.path}' puts out {type(output).__name__}, no tensor with features")
        table = output[0] if output.shape[0] == 1 else output.squeeze(1)
        if table.dim() == 3 and isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | nn.AvgPool2d):
            table = table.movedim(0, -1)
        table = table.reshape(-1, table.shape[-1])
        for what, index, count in (("token", self.token, table.shape[0]), ("neuron", self.neuron, table.shape[1])):
            if index is not None and not -count <= index < count:
                raise InputError(f"{what} {index} is outside the output of '{self.path}', which has {count} {what}s")
        rows, columns = (slice(None) if place is None else place for place in (self.token, self.neuron))
        return table[rows, columns].mean()


def _goal(model: nn.Module, unit: int | str) -> _Goal:
    (labels, _), count = class_names(model), class_count(model)
    if isinstance(unit, bool) or not isinstance(unit, int | str):
        raise InputError(f"{_UNITS}; got {unit!r}")
    path, _, places = str(unit).partition(":")
    if places and path in dict(model.named_modules()):
        found = re.fullmatch(r"(?:(-?\d+):)?(-?\d+|\*)", places)
        if found is None:
            raise InputError(f"{_UNITS}; got {unit!r}")
        token, neuron = (None if place in (None, "*") else int(place) for place in found.groups())
        return _Goal(str(unit), path, token, neuron)
    if places and path.replace(".", "").isidentifier():
        raise InputError(f"the model has no module '{path}' (see model.named_modules()); {_UNITS}")
    index = class_index(unit, labels, count)
    return _Goal(f"class {(labels or {}).get(index, index)}", None, None, index)


# -- where it starts -----------------------------------------------------------------------------------------------
def _argument(model: nn.Module) -> str | None:
    """Name of the forward argument that takes the picture, None for the first by position; refuses text models."""
    name = getattr(model, "main_input_name", None)
    if name == "input_ids" and not hasattr(getattr(model, "config", None), "vision_config"):
        raise InputError(
            "activation maximisation climbs the gradient to the input, and token ids have none: it is for picture "
            "models. For text, see which tokens drive a class with explain(...)"
        )
    return name if name == "pixel_values" else None


def _start(model: nn.Module, start: Any, shape: Any, like: Any, processor: Any, draws: torch.Generator) -> Tensor:
    """``[1, C, H, W]`` on the model's device and in its dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    if isinstance(start, Tensor):
        shape = start.shape
    elif like is not None:
        shape = like.shape if isinstance(like, Tensor) else prepare(model, like, processor).tensor.shape
    sizes = tuple(int(n) for n in (_configured(model) if shape is None else shape))
    sizes = (1,) + ((3, *sizes) if len(sizes) == 2 else sizes[-3:])
    given = start.numel() if isinstance(start, Tensor) else math.prod(sizes)
    if len(sizes) != 4 or min(sizes) < 1 or sizes[1] not in (1, 3) or given != math.prod(sizes):
        raise InputError(f"one picture has the shape (1 or 3 channels, height, width), not {tuple(shape or ())}")
    if isinstance(start, Tensor):
        image = start.detach().reshape(sizes)
    elif start in ("noise", "zero"):
        image = torch.randn(sizes, generator=draws, dtype=torch.float64) * (0.1 if start == "noise" else 0)
    else:
        raise InputError(f'start must be "noise", "zero" or a tensor, not {start!r}')
    return image.to(parameter.device, parameter.dtype)


def _configured(model: nn.Module) -> Sequence[int]:
    """(C, H, W) that the model's config (Hugging Face) or default_cfg (timm) names."""
    config = getattr(model, "config", None)
    timm = (getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}).get("input_size")
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = getattr(config, "image_size", None) or getattr(model, "image_size", None) or patches
    if size is None:
        if timm is not None:
            return tuple(timm)
        raise InputError("the model does not say how large its pictures are: give shape=(channels, height, width)")
    pair = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return (getattr(config, "num_channels", None) or (timm[0] if timm else 3), *pair)


def _check(kind: type = int, /, **numbers: tuple[float, float]) -> None:
    for name, (value, low) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value < float("inf"):
            raise InputError(f"{name} must be a {'whole ' * (kind is int)}number of at least {low}, not {value!r}")
