"""whyformer: which patches, pixels or tokens made a Transformer say this, and whether that may be believed."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whyformer.errors import WhyformerError

if TYPE_CHECKING:
    from whyformer import targets
    from whyformer.arbitrate import Arbitration, arbitrate
    from whyformer.attention_maps import attention_maps
    from whyformer.evaluate import evaluate
    from whyformer.explain import explain
    from whyformer.explanation import Explanation
    from whyformer.maximize import Maximized, maximize_activation
    from whyformer.methods import methods

__version__ = "0.1.0"
__all__ = [
    "Arbitration",
    "Explanation",
    "Maximized",
    "WhyformerError",
    "arbitrate",
    "attention_maps",
    "evaluate",
    "explain",
    "maximize_activation",
    "methods",
    "targets",
]

# Loaded on first use, so that `whyformer --help` need not wait for torch.
_PLACES = {
    "Arbitration": "arbitrate",
    "Explanation": "explanation",
    "Maximized": "maximize",
    "arbitrate": "arbitrate",
    "attention_maps": "attention_maps",
    "evaluate": "evaluate",
    "explain": "explain",
    "maximize_activation": "maximize",
    "methods": "methods",
}


def __getattr__(name: str) -> Any:
    if name == "targets":
        return import_module("whyformer.targets")
    if name not in _PLACES:
        raise AttributeError(f"module 'whyformer' has no attribute '{name}'")
    return getattr(import_module(f"whyformer.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The function ``whyformer.explain`` is not shadowed by the module of that name when the module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PLACES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
