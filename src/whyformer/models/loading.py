"""Load a model and its processor by name: bundled, a local folder, or a hub id. Never runs remote code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from whyformer.errors import InputError, LoadError
from whyformer.models.structure import refuse_unfit

BUNDLED = ("digits", "sst2")
# what is loaded as it is; of anything else a classifier is made, and refused if that is not trained
_HEADS = (
    "MaskedLM", "CausalLM", "LMHeadModel", "TokenClassification", "QuestionAnswering", "ObjectDetection",
    "SemanticSegmentation", "DepthEstimation",
)  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode with its processor; ``modality`` is "image" or "text"."""

    model: nn.Module
    processor: Any
    modality: str
    name: str


def load(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | str | None = None) -> Loaded:
    """Load a classifier, or a model with another head that a target can be read from (:mod:`whyformer.targets`).

    Args:
        name: ``"bundled:digits"``, ``"bundled:sst2"``, a folder that ``save_pretrained`` wrote, or a hub id
            (``"owner/model"``; from the local cache if there is no network).
        device: "cpu" (default) or "cuda".
        dtype: float32 (default), float64, bfloat16 ...

    Raises:
        LoadError: missing folder or files, no network and nothing cached, not a classifier, only pickled weights.
    """
    import transformers

    precision = _dtype(dtype)
    place = _place(name)
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        architectures = " ".join(getattr(config, "architectures", None) or [])
        image = any(hasattr(config, size) for size in ("patch_size", "image_size"))
        image = image or any(word in architectures for word in ("Image", "Detection", "Segmentation", "Depth"))
        kind: Any = (
            transformers.AutoModelForImageClassification if image else transformers.AutoModelForSequenceClassification
        )
        if any(architectures.endswith(head) for head in _HEADS):
            kind = getattr(transformers, architectures, kind)
        model, report = kind.from_pretrained(
            place, dtype=precision, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        missing = sorted(report.get("missing_keys", ()))
        if missing:
            raise LoadError(
                f"'{name}' is no trained classifier ({architectures or config.model_type}): its "
                f"weights lack {', '.join(missing[:3])}"
                f"{' ...' if len(missing) > 3 else ''}, which would be random. Fine-tune it "
                "first, or load it yourself and pass the module"
            )
        if image:
            processor = transformers.AutoImageProcessor.from_pretrained(place, backend="pil", trust_remote_code=False)
        else:
            processor = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except LoadError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "torchvision" in repr(error.__cause__) + repr(getattr(error.__cause__, "__cause__", None)):
            first = "the installed torchvision does not fit torch (it is not needed: pip uninstall torchvision)"
        hint = "" if Path(place).is_dir() else " If there is no network, download it first or pass a local folder."
        raise LoadError(f"cannot load '{name}': {first}{hint}") from error
    if device is not None:
        model = model.to(_device(device))
    return Loaded(model.eval(), processor, "image" if image else "text", name)


def opened(
    model: nn.Module | str,
    processor: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, Any]:
    """(model, processor) of what a user gave: a name is loaded, with its own processor unless one is given.

    Raises:
        InputError: device or dtype for a module, which its owner moves.
        ModelError: an explanation would be wrong or impossible (:func:`refuse_unfit`).
    """
    if isinstance(model, str):
        loaded = load(model, device=device, dtype=dtype)
        model, processor = loaded.model, processor or loaded.processor
    elif device is not None or dtype is not None:
        raise InputError(
            "device and dtype are for models given by name; move a model of your own yourself: model.to(...)"
        )
    refuse_unfit(model)
    return model, processor


def model_name(model: nn.Module) -> str:
    """The name that a module's config says it was loaded from, as :func:`load` takes it; else its class."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return type(model).__name__
    path = Path(name)
    return f"bundled:{path.name}" if path.parent == Path(str(resources.files("whyformer") / "bundled")) else name


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
