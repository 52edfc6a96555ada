"""What the scripts beside this file share: a peer's checkout, stand-ins for packages it imports, and where arrays go."""

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
sys.path.insert(0, str(HERE.parents[1]))  # for zoo, whose tiny seeded models are explained
importlib.import_module("conftest")  # no network, and a torchvision that imports
small = importlib.import_module("small")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def checkout() -> Path:
    """The checkout of the peer's repository, the script's only argument."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: {sys.argv[0]} CHECKOUT")
    return Path(sys.argv[1]).resolve()


class StandIn(types.ModuleType):
    """A package that a peer imports and that nothing computed here needs: classes are empty, functions decorate."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (nn.Module,), {})
        return lambda *args, **kwargs: lambda wrapped: wrapped


@contextmanager
def stand_ins(*names: str, **attributes: Any) -> Iterator[None]:
    """While a peer is loaded, a stand-in in the place of each package; ``attributes`` are what these must really have."""
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
    """One file of a peer as a module; with a dotted name its relative imports are looked up in that package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def function(path: Path, name: str, **given: Any) -> Any:
    """One function of a script that cannot be imported; ``given`` are the names that it uses."""
    import ast

    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(tree, str(path), "exec"), given)
    return given[name]


def cell(notebook: Path, function: str, **given: Any) -> Any:
    """A function that a notebook defines, without the rest of the notebook but for what is ``given``."""
    import json

    source = ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {"torch": torch, "np": np, "nn": nn, **given}
    exec(next(s for s in source if f"def {function}(" in s), names)
    return names[function]


@contextmanager
def single() -> Iterator[None]:
    """The zoo's weights and inputs are drawn in single precision."""
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


def text(model: str = "bert") -> tuple[nn.Module, dict[str, Tensor]]:
    """A text model of the zoo with written-out attention, in float64, and its two sentences."""
    import zoo

    with single():
        built, inputs = getattr(zoo, model)("eager")
    return built.double(), inputs


def picture() -> tuple[nn.Module, Tensor]:
    """The zoo's timm ViT with written-out attention, in float64, and its two pictures."""
    import zoo

    with single():
        model, inputs = zoo.timm_vit()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model.double(), inputs.double()


def save(name: str, **arrays: Any) -> None:
    """``NAME.npz`` beside the scripts."""
    numbers = {key: np.asarray(value.detach() if isinstance(value, Tensor) else value) for key, value in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **numbers)
    print(name, {key: value.shape for key, value in numbers.items()})  # noqa: T201


def layers_of(model: nn.Module, layer: Any, **more: Any) -> nn.ModuleList:
    """A peer's own BERT layers with the weights of the zoo's BERT."""
    config = types.SimpleNamespace(**{**model.config.to_dict(), **more})
    made = nn.ModuleList(layer(config) for _ in model.bert.encoder.layer).eval()
    made.load_state_dict(model.bert.encoder.layer.state_dict())
    return made


def masked(mask: Tensor) -> Tensor:
    """What BERT code of that time adds to the attention's scores."""
    return (1.0 - mask[:, None, None, :].double()) * -10000.0
