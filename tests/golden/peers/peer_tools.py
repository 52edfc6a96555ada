"""Helpers of the scripts in this folder: the peer's checkout, stand-ins for packages that it imports, and storing arrays."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # for zoo, which has the tiny seeded models
importlib.import_module("conftest")  # disables the network and makes torchvision importable
tiny_models = importlib.import_module("tiny_models")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def checkout() -> Path:
    """Checkout of the peer's repository, from the script's only argument."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: {sys.argv[0]} CHECKOUT")
    return Path(sys.argv[1]).resolve()


class StandIn(types.ModuleType):
    """A package that a peer imports without need: its classes are empty, its functions return decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (nn.Module,), {})
        return lambda *args, **kwargs: lambda wrapped: wrapped


@contextmanager
def stand_ins(*names: str, **attributes: Any) -> Iterator[None]:
    """Replace packages by stand-ins while a peer is loaded; ``attributes`` are set on these."""
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = StandIn(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(path: Path, name: str) -> types.ModuleType:
    """Load a file of a peer as a module; with a dotted name, relative imports refer to that package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def function(path: Path, name: str, **names: Any) -> Any:
    """Load a function of a script that cannot be imported; ``names`` are the globals that it uses."""
    import ast

    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(tree, str(path), "exec"), names)
    return names[name]


def cell(notebook: Path, function: str, **extra: Any) -> Any:
    """Load a function that a notebook cell defines, with additional globals ``extra``."""
    import json

    source = ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {"torch": torch, "np": np, "nn": nn, **extra}
    exec(next(s for s in source if f"def {function}(" in s), names)
    return names[function]


@contextmanager
def float32() -> Iterator[None]:
    """Set the default dtype to float32, in which the zoo draws its weights and inputs."""
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


def text_model(model: str = "bert") -> tuple[nn.Module, dict[str, Tensor]]:
    """A text model of the zoo with eager attention, in float64, and its two sentences."""
    import zoo

    with float32():
        module, inputs = getattr(zoo, model)("eager")
    return module.double(), inputs


def image_model() -> tuple[nn.Module, Tensor]:
    """The zoo's timm ViT without fused attention, in float64, and its two images."""
    import zoo

    with float32():
        model, inputs = zoo.timm_vit()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model.double(), inputs.double()


def save(name: str, **arrays: Any) -> None:
    """Save arrays as ``NAME.npz`` in this folder."""
    numbers = {key: np.asarray(value.detach() if isinstance(value, Tensor) else value) for key, value in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **numbers)
    print(name, {key: value.shape for key, value in numbers.items()})  # noqa: T201


def layers_of(model: nn.Module, layer: Any, **options: Any) -> nn.ModuleList:
    """The peer's BERT layers with the weights of the zoo's BERT."""
    config = types.SimpleNamespace(**{**model.config.to_dict(), **options})
    layers = nn.ModuleList(layer(config) for _ in model.bert.encoder.layer).eval()
    layers.load_state_dict(model.bert.encoder.layer.state_dict())
    return layers


def additive_mask(mask: Tensor) -> Tensor:
    """Additive attention mask as in early BERT code."""
    return (1.0 - mask[:, None, None, :].double()) * -10000.0
