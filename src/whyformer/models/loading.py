"""Load a model and its processor by name: bundled, a local folder, or a hub id. Never runs remote code."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import nn

from whyformer.errors import InputError, LoadError
from whyformer.models.structure import refuse_unfit, unwrapped

_MOST_LAYERS = 10_000
BUNDLED = ("digits", "sst2", "reader")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode with its processor, None where a folder holds none; ``modality`` is "image", "text", "sound"
    or "both" (a prompt with a picture)."""

    model: nn.Module
    processor: Any
    modality: str
    name: str

    @property
    def reads(self) -> str:
        """The modality in words."""
        words = {"image": "pictures", "sound": "sounds", "both": "a text and a picture"}
        return words.get(self.modality, self.modality)


def load(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None) -> Loaded:
    """Load a model of transformers with trained weights, and its processor.

    The class is the one that its config names (``architectures``). Where that has no head, it is a classifier, and
    refused, since its head would be random. :mod:`whyformer.targets` says what of its output may be explained.

    Args:
        name: ``"bundled:digits"``, ``"bundled:sst2"``, ``"bundled:reader"``, a folder that ``save_pretrained`` wrote,
            or a hub id (``"owner/model"``; from the local cache if there is no network).
        device: "cpu" (default) or "cuda".
        dtype: float32 (default), float64, bfloat16 ...

    Raises:
        LoadError: missing folder or files, no network and nothing cached, weights that would be random, only pickled
            weights.
    """
    import transformers

    precision = _dtype(dtype)
    place = _place(name)
    local: Any = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    try:
        config = transformers.AutoConfig.from_pretrained(place, **local)
        _check_depth(config.to_dict())
        with _quietly():
            model, report = _class_of(config).from_pretrained(
                place, dtype=precision, use_safetensors=True, output_loading_info=True, **local
            )
        missing = sorted(report.get("missing_keys", ()))
        if missing:
            raise LoadError(
                f"'{name}' is no trained {type(model).__name__}: its weights lack {', '.join(missing[:3])}"
                f"{' ...' if len(missing) > 3 else ''}, which would be random. Fine-tune it "
                "first, or load it yourself and pass the module"
            )
        modality = _modality(model)
        processor = None if _holds_weights_alone(Path(place)) else _processor(place, modality, local)
    except LoadError:
        raise
    except Exception as error:  # of any kind, where a config or a tokenizer is damaged
        raise _told(error, name, Path(place)) from error
    if device is not None:
        model = model.to(_device(device))
    return Loaded(model.eval(), processor, modality, name)


def _told(error: Exception, name: str, place: Path) -> LoadError:
    """What kept transformers from loading a model, in one sentence."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
        first = f"{type(error).__name__}: {first}"
    if "torchvision" in repr(error.__cause__) + repr(getattr(error.__cause__, "__cause__", None)):
        first = "the installed torchvision does not fit torch (it is not needed: pip uninstall torchvision)"
    hint = "" if place.is_dir() else (
        " If there is no network, download it first or pass a local folder; HF_HUB_OFFLINE=1 takes the hub's cache "
        "without asking"
    )
    return LoadError(f"cannot load '{name}': {first}{hint}")


def _check_depth(config: Any) -> None:
    """Refuse a config that asks for so many layers that building them would not end."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_depth(value)
        elif isinstance(value, int) and re.search(r"layers|blocks|depth", str(name)) and value > _MOST_LAYERS:
            raise LoadError(f"the config asks for {value} {name}; at most {_MOST_LAYERS} are taken")


def _class_of(config: Any) -> Any:
    """The class of transformers that a config names; of a model without a head, or of a class that is not there, what
    reads pictures and words, or a classifier."""
    import transformers
    from transformers.models.auto import modeling_auto

    headless = {
        name
        for table in ("", "FOR_TEXT_ENCODING_", "FOR_IMAGE_", "FOR_BACKBONE_")
        for names in getattr(modeling_auto, f"MODEL_{table}MAPPING_NAMES").values()
        for name in ([names] if isinstance(names, str) else names)
    }
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) and name not in headless:
            return named
    kinds: Any = (
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForZeroShotImageClassification,
        transformers.AutoModelForImageClassification,
        transformers.AutoModelForAudioClassification,
    )
    classifier: Any = transformers.AutoModelForSequenceClassification
    return next((kind for kind in kinds if type(config) in kind._model_mapping), classifier)


def _modality(model: nn.Module) -> str:
    """What a model of transformers reads, by the arguments of its forward."""
    main, takes = getattr(model, "main_input_name", ""), inspect.signature(model.forward).parameters
    if {"input_ids", "pixel_values"} <= takes.keys():
        return "both"
    if str(main).startswith("pixel") or "ImageClassification" in type(model).__name__:
        return "image"
    return "sound" if main in ("input_values", "input_features") else "text"


def _holds_weights_alone(folder: Path) -> bool:
    """Whether this is a folder with a model and no processor: transformers makes a tokenizer without words of that."""
    alone = re.compile(r"(generation_)?config\.json|.*\.index\.json|.*\.safetensors")
    return folder.is_dir() and all(alone.fullmatch(file.name) for file in folder.iterdir())


def _processor(place: str, modality: str, local: dict[str, Any]) -> Any:
    """The processor of a model: with its tokenizer, if a model that reads pictures or sounds has one."""
    import transformers

    if modality == "text":
        return transformers.AutoTokenizer.from_pretrained(place, **local)
    options = local if modality == "sound" else {**local, "backend": "pil"}
    try:
        return transformers.AutoProcessor.from_pretrained(place, **options)
    except (OSError, ValueError, TypeError, KeyError, ImportError):  # a classifier needs no tokenizer
        if modality == "both":
            raise
        kind: Any = transformers.AutoFeatureExtractor if modality == "sound" else transformers.AutoImageProcessor
        return kind.from_pretrained(place, **options)


def opened(
    model: Any,
    processor: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, Any]:
    """(model, processor) of what a user gave: a model given by name is kept until another one is loaded
    (:func:`unload`), with its own processor unless one is given; a pipeline of transformers has both. Of a compiled or
    a data-parallel model, the module in it.

    Raises:
        InputError: device or dtype for a module, which its owner moves.
        ModelError: an explanation would be wrong or impossible (:func:`refuse_unfit`).
    """
    if isinstance(model, str):
        model = _last(model, str(device or "cpu"), dtype, _stamp(model))
    if isinstance(model, Loaded):
        model, processor = model.model, processor or model.processor
    elif device is not None or dtype is not None:
        raise InputError(
            "device and dtype are for models given by name; move a model of your own yourself: model.to(...)"
        )
    if isinstance(getattr(model, "model", None), nn.Module) and not isinstance(model, nn.Module):  # a pipeline
        found = (getattr(model, name, None) for name in ("processor", "image_processor", "tokenizer"))
        model, processor = model.model, processor or next((one for one in found if one is not None), None)
    model = unwrapped(model)
    refuse_unfit(model)
    return model, processor


@lru_cache(maxsize=1)
def _last(name: str, device: str, dtype: torch.dtype | str | None, stamp: Any) -> Loaded:
    return load(name, device=None if device == "cpu" else device, dtype=dtype)


def unload() -> None:
    """Let go of the model that was loaded by name last, which is kept for the next call with that name.

    Its memory is freed once nothing else refers to it: explanations do not.
    """
    _last.cache_clear()


def _stamp(name: str) -> Any:
    """What changes when a local folder's files do."""
    folder = Path(name).expanduser()
    if name.startswith("bundled:") or not folder.is_dir():
        return None
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir() if file.is_file()))


_FOUND: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def processor_of(model: nn.Module) -> Any:
    """The processor that lies beside the files a module was loaded from, by ``model.name_or_path``; None if there is
    none, or the name leads nowhere."""
    if model not in _FOUND:
        _FOUND[model] = _beside(getattr(getattr(model, "config", None), "_name_or_path", None))
    return _FOUND[model]


def _beside(name: Any) -> Any:
    import transformers

    if not isinstance(name, str) or not name or _holds_weights_alone(Path(name)):
        return None
    try:
        return transformers.AutoProcessor.from_pretrained(
            name, backend="pil", trust_remote_code=False, local_files_only=Path(name).is_dir()
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError):  # no files, or damaged ones: the user is asked
        return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without bars on standard error while weights are read; as before afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_name(model: Any) -> str:
    """The name that a module's (or a pipeline's) config says it was loaded from, as :func:`load` takes it; else its
    class."""
    if isinstance(model, Loaded):
        return model.name
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return type(model).__name__
    path = Path(name)
    return f"bundled:{path.name}" if path.parent == Path(str(resources.files("whyformer") / "bundled")) else name


def fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits of the class and the weights: what another model said is never taken for this one's."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        held = parameter.detach().cpu().contiguous()
        digest.update(held.view(torch.uint8).numpy().tobytes() if held.dim() else str(parameter).encode())
    return digest.hexdigest()[:16]


def _place(name: str) -> str:
    if name.startswith("bundled:"):
        short = name.removeprefix("bundled:")
        if short not in BUNDLED:
            raise LoadError(
                f"there is no bundled model '{short}'; bundled are {', '.join(f'bundled:{b}' for b in BUNDLED)}"
            )
        return str(resources.files("whyformer") / "bundled" / short)
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"the folder {name} has no config.json: it was not written by save_pretrained")
        if not any(path.glob("*.safetensors")):
            raise LoadError(
                f"the folder {name} has no .safetensors weights; pickled weights are not loaded "
                "(convert them with save_pretrained)"
            )
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name or any(c.isspace() for c in name):
        raise LoadError(f"no such folder: {name}")
    return name


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None:
        return torch.float32
    if dtype not in known:
        raise InputError(f"dtype must be one of {', '.join(known)}, not {dtype!r}")
    return known[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"no device is called {device!r}; use 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' was asked for, and this machine (or this build of torch) has none; use 'cpu'")
    return chosen
