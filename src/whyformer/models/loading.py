"""Load a model and its processor by name (bundled, local folder or hub id), without running remote code."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from whyformer.errors import InputError, LoadError
from whyformer.models.adapters import CONFIG, find_adapter
from whyformer.models.cache import once
from whyformer.models.structure import refuse_unfit, unwrapped

_MOST_LAYERS = 10_000
_PROCESSORS = ("processor", "processing_class", "image_processor", "tokenizer")  # attributes of pipelines and trainers
BUNDLED = ("digits", "sst2", "reader")


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        model: the model in eval mode.
        processor: its processor; None if the folder has none.
        modality: "image", "text", "sound" or "both" (a prompt with a picture).
        name: the name by which it was loaded.
    """

    model: nn.Module
    processor: Any
    modality: str
    name: str

    @property
    def reads(self) -> str:
        """Description of the modality."""
        names = {"image": "pictures", "sound": "sounds", "both": "a text and a picture"}
        return names.get(self.modality, self.modality)


def load(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None) -> Loaded:
    """Load a transformers model with trained weights, and its processor.

    The class is the one in its config (``architectures``). If that class has no head, a classifier is tried, which is
    an error if its head would be random.

    Args:
        name: ``"bundled:digits"``, ``"bundled:sst2"``, ``"bundled:reader"``, a folder written by ``save_pretrained``,
            or a hub id (``"owner/model"``; from the local cache if there is no network). It may hold an adapter of
            peft, such as LoRA, which is merged into its base model.
        device: "cpu" (default) or "cuda".
        dtype: float32 (default), float64, bfloat16 ...

    Raises:
        LoadError: the folder or files are missing, there is no network and no cached copy, weights are missing, or
            weights are only available as pickle files.
    """
    import transformers

    precision = _dtype(dtype)
    place = _place(name)
    try:
        adapter = find_adapter(place)
        base = place if adapter is None else _place(adapter.base)
        local: Any = {"trust_remote_code": False, "local_files_only": Path(base).is_dir()}
        config = transformers.AutoConfig.from_pretrained(base, **local)
        _check_depth(config.to_dict())
        kind, labels = _class_of(config), dict[str, int]()
        if adapter is not None:
            kind = adapter.class_of(config, kind)
            labels = adapter.labels(kind, config)
        with _quietly():
            model, report = kind.from_pretrained(
                base, dtype=precision, use_safetensors=True, output_loading_info=True, **labels, **local
            )
        missing = sorted(set(report.get("missing_keys", ())) - (adapter.shapes.keys() if adapter else set()))
        if missing:
            raise LoadError(
                f"'{name}' is not a trained {type(model).__name__}: its weights lack {', '.join(missing[:3])}"
                f"{' ...' if len(missing) > 3 else ''}, which would be random. Fine-tune it "
                "first, or load it yourself and pass the module"
            )
        modality = _modality(model)
        processor = load_processor(place if adapter is None or adapter.has_processor else base, modality)
        model = model if adapter is None else adapter.applied(model)
    except LoadError:
        raise
    except Exception as error:  # a damaged config or tokenizer may raise any error
        raise _load_error(error, name, Path(place)) from error
    if device is not None:
        model = model.to(_device(device))
    return Loaded(model.eval(), processor, modality, name)


def _load_error(error: Exception, name: str, place: Path) -> LoadError:
    """Summarize an error of transformers in one sentence."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
        first = f"{type(error).__name__}: {first}"
    if "torchvision" in repr(error.__cause__) + repr(getattr(error.__cause__, "__cause__", None)):
        first = "the installed torchvision does not match torch (it is not needed: pip uninstall torchvision)"
    hint = "" if place.is_dir() else (
        " If there is no network, download it first or pass a local folder; HF_HUB_OFFLINE=1 uses the local cache "
        "only"
    )
    return LoadError(f"cannot load '{name}': {first}{hint}")


def _check_depth(config: Any) -> None:
    """Raise for a config with so many layers that building the model would take forever."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_depth(value)
        elif isinstance(value, int) and re.search(r"layers|blocks|depth", str(name)) and value > _MOST_LAYERS:
            raise LoadError(f"the config has {name} = {value}; the limit is {_MOST_LAYERS}")


def _class_of(config: Any) -> Any:
    """Return the transformers class named in a config. For a class without a head, or one that does not exist, return
    the auto class of vision-language models or of classifiers that supports the config."""
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
    """Return the modality of a transformers model, by the arguments of its forward."""
    main, takes = getattr(model, "main_input_name", ""), inspect.signature(model.forward).parameters
    if {"input_ids", "pixel_values"} <= takes.keys():
        return "both"
    if str(main).startswith("pixel") or "ImageClassification" in type(model).__name__:
        return "image"
    return "sound" if main in ("input_values", "input_features") else "text"


def _has_weights_only(folder: Path) -> bool:
    """Return whether a folder has a model without a processor, from which transformers would make an empty tokenizer.
    """
    alone = re.compile(r"(generation_)?config\.json|.*\.index\.json|.*\.safetensors")
    return folder.is_dir() and all(alone.fullmatch(file.name) for file in folder.iterdir())


def load_processor(place: str, modality: str) -> Any:
    """Load the processor of a model, including its tokenizer if a model for pictures or sounds has one; None for a
    folder without a processor."""
    import transformers

    local: Any = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    if _has_weights_only(Path(place)):
        return None
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


def resolve_model(
    model: Any,
    processor: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, Any]:
    """Return (module, processor) of a user's model.

    A model loaded by name is cached until another one is loaded (:func:`unload`), and its processor is used unless one
    is passed. A pipeline and a trainer of transformers have both. Compiled and data-parallel models are unwrapped.

    Raises:
        InputError: device or dtype is passed with a module.
        ModelError: an explanation of the model would be wrong or impossible (:func:`refuse_unfit`).
    """
    if isinstance(model, str):
        model = _cached(model, str(device or "cpu"), dtype, _stamp(model))
    if isinstance(model, Loaded):
        model, processor = model.model, processor or model.processor
    elif device is not None or dtype is not None:
        raise InputError(
            "device and dtype are only for models loaded by name: move a module yourself with model.to(...)"
        )
    if isinstance(getattr(model, "model", None), nn.Module) and not isinstance(model, nn.Module):
        candidates = (getattr(model, name, None) for name in _PROCESSORS)
        model, processor = model.model, processor or next((c for c in candidates if c is not None), None)
    model = unwrapped(model)
    refuse_unfit(model)
    return model, processor


@lru_cache(maxsize=1)
def _cached(name: str, device: str, dtype: torch.dtype | str | None, stamp: Any) -> Loaded:
    return load(name, device=None if device == "cpu" else device, dtype=dtype)


def unload() -> None:
    """Release the model that was last loaded by name, which is cached for the next call with that name.

    Its memory is freed when nothing else refers to it; explanations do not.
    """
    _cached.cache_clear()


def _stamp(name: str) -> Any:
    """Return a value that changes when the files of a local folder change."""
    folder = Path(name).expanduser()
    if name.startswith("bundled:") or not folder.is_dir():
        return None
    return tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir() if file.is_file()))


def processor_of(model: nn.Module) -> Any:
    """Load the processor from the folder or hub id that a module was loaded from, ``model.name_or_path``; None if there
    is none."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)

    def saved() -> Any:
        with suppress(OSError, ValueError, KeyError, TypeError, ImportError):  # no files, or damaged ones
            return load_processor(str(name), _modality(model))

    return once(model, ("processor", name), saved) if isinstance(name, str) and name else None


@contextmanager
def _quietly() -> Iterator[None]:
    """Disable progress bars of transformers while weights are read."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def model_name(model: Any) -> str:
    """Return the name in a module's (or pipeline's) config from which it was loaded, as :func:`load` accepts it; else
    the name of its class."""
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
    """Return sixteen hex digits that identify the class and the weights, so that results of models are not confused."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        values = parameter.detach().cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes() if values.dim() else str(parameter).encode())
    return digest.hexdigest()[:16]


def _place(name: str) -> str:
    if name.startswith("bundled:"):
        short = name.removeprefix("bundled:")
        if short not in BUNDLED:
            raise LoadError(
                f"there is no bundled model '{short}'; the bundled models are "
                f"{', '.join(f'bundled:{b}' for b in BUNDLED)}"
            )
        return str(resources.files("whyformer") / "bundled" / short)
    if not name.strip():
        raise LoadError("the name of the model is empty: pass a hub id, a folder or a bundled model (bundled:sst2)")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / CONFIG).is_file():
            raise LoadError(f"the folder {name} has no config.json: pass a folder written by save_pretrained")
        if not any(path.glob("*.safetensors")):
            raise LoadError(
                f"the folder {name} has no .safetensors weights, and pickled weights are not loaded: convert them with "
                "save_pretrained"
            )
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or any(c.isspace() for c in name):
        raise LoadError(f"no such folder: {name}")
    return name


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    dtypes = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None:
        return torch.float32
    if dtype not in dtypes:
        raise InputError(f"dtype must be one of {', '.join(dtypes)}, not {dtype!r}")
    return dtypes[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"there is no device {device!r}: use 'cpu' or 'cuda'") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not available on this machine (or in this build of torch): use 'cpu'")
    return resolved
