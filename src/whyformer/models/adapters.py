"""Adapters of the library peft, such as LoRA: folders or hub repositories that hold changes of a base model."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from whyformer.errors import LoadError

__all__ = ["CONFIG", "Adapter", "find_adapter"]

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names of weights in an adapter
_PROCESSORS = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_TASKS = {  # task in the config of an adapter -> task in the names of transformers' tables of classes
    "SEQ_CLS": "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLS": "TOKEN_CLASSIFICATION",
    "CAUSAL_LM": "CAUSAL_LM",
    "SEQ_2_SEQ_LM": "SEQ_TO_SEQ_CAUSAL_LM",
    "QUESTION_ANS": "QUESTION_ANSWERING",
}


@dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Attributes:
        folder: the folder that holds it.
        base: folder or hub id of its base model.
        task: the task in its config; "" for none.
        shapes: the shape of each weight in it, by the name of the weight in the base model.
    """

    folder: Path
    base: str
    task: str
    shapes: dict[str, list[int]]

    @property
    def has_processor(self) -> bool:
        """True if the folder also holds a tokenizer or processor."""
        return any((self.folder / name).is_file() for name in _PROCESSORS)

    def class_of(self, config: Any, otherwise: Any) -> Any:
        """Return the class for the adapter's task and the config of its base model; ``otherwise`` if there is none."""
        import transformers
        from transformers.models.auto import modeling_auto

        table = getattr(modeling_auto, f"MODEL_FOR_{_TASKS.get(self.task)}_MAPPING_NAMES", {})
        names = table.get(config.model_type)
        return getattr(transformers, names if isinstance(names, str) else names[0]) if names else otherwise

    def labels(self, model_class: Any, config: Any) -> dict[str, int]:
        """Return ``{"num_labels": n}`` if the head in the adapter has another number of classes than the config of the
        base model; otherwise {}."""
        with torch.device("meta"):
            weights = getattr(model_class, "from_config", model_class)(config).state_dict()  # an auto class, or another
        shared = ((shape, list(weights[name].shape)) for name, shape in self.shapes.items() if name in weights)
        sizes = {shape[0] for shape, of_base in shared if shape != of_base}
        return {"num_labels": sizes.pop()} if len(sizes) == 1 else {}

    def applied(self, model: nn.Module) -> nn.Module:
        """Return the base model with the adapter. Weights that can be merged into those of the model are merged, so
        that a layer remains one layer; learned prompts cannot."""
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            options: Any = {"torch_device": "cpu", "autocast_adapter_dtype": False}
            adapted = PeftModel.from_pretrained(model, str(self.folder), **options)
        merge = getattr(type(adapted.base_model), "merge_and_unload", None)
        return adapted if merge is None else merge(adapted.base_model)


def find_adapter(place: str) -> Adapter | None:
    """Return the adapter in a folder or hub repository; None if it holds a whole model.

    Raises:
        LoadError: peft is not installed, or the adapter has no safetensors weights or no base model.
    """
    from huggingface_hub import hf_hub_download
    from transformers.utils import find_adapter_config_file

    folder = Path(place)
    if folder.is_dir():
        is_adapter = (folder / CONFIG).is_file() and {p.name for p in folder.glob("*.safetensors")} <= {_WEIGHTS}
    else:
        file = find_adapter_config_file(place)
        is_adapter = file is not None
        folder = Path(file).parent if file is not None else folder
    if not is_adapter:
        return None
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    base, task = config.get("base_model_name_or_path"), config.get("task_type")
    if not isinstance(base, str) or not base:
        raise LoadError(f"the adapter '{place}' does not name its base model: merge it into the model and save that")
    if not Path(place).is_dir() and Path(base).expanduser().is_dir():
        raise LoadError(f"the adapter '{place}' names a folder of this machine as its base model, not a hub id: {base}")
    if find_spec("peft") is None:
        raise LoadError(
            f"'{place}' is an adapter of '{base}', which is loaded with peft: pip install 'whyformer[adapters]', or "
            "save the merged model with model.merge_and_unload().save_pretrained(folder)"
        )
    if not Path(place).is_dir():
        hf_hub_download(place, _WEIGHTS)  # into the same folder
    if not (folder / _WEIGHTS).is_file():
        raise LoadError(f"the adapter '{place}' has no {_WEIGHTS}, and pickled weights are not loaded")
    with safe_open(folder / _WEIGHTS, "pt") as weights:
        shapes = {name.removeprefix(_PREFIX): weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    return Adapter(folder, base, task if isinstance(task, str) else "", shapes)
