"""whyformer: which patches, pixels or tokens a Transformer's prediction rests on, and how far to trust the answer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whyformer.errors import WhyformerError

if TYPE_CHECKING:
    from whyformer import targets
    from whyformer.attention import attention_maps
    from whyformer.auditing import Audit, audit
    from whyformer.comparing import Comparison, compare
    from whyformer.evaluation.arbitration import Arbitration, arbitrate
    from whyformer.evaluation.single import evaluate
    from whyformer.evaluation.trust import trust
    from whyformer.explainer import Explainer
    from whyformer.explaining import explain
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation
    from whyformer.generation import explain_generation, explain_span
    from whyformer.jobs.many import explain_many
    from whyformer.jobs.reading import read
    from whyformer.maximize import maximize_activation
    from whyformer.methods import list_methods
    from whyformer.models.loading import unload
    from whyformer.recording import Record, record

__version__ = "0.1.0"
__all__ = [
    "Arbitration",
    "Audit",
    "Comparison",
    "Explainer",
    "Explanation",
    "Generation",
    "Record",
    "WhyformerError",
    "arbitrate",
    "attention_maps",
    "audit",
    "compare",
    "evaluate",
    "explain",
    "explain_generation",
    "explain_many",
    "explain_span",
    "list_methods",
    "maximize_activation",
    "read",
    "record",
    "targets",
    "trust",
    "unload",
]

# Public name -> module that defines it; imported on first use, so that `whyformer --help` does not import torch.
_PLACES = {
    "Arbitration": "evaluation.arbitration",
    "Audit": "auditing",
    "Comparison": "comparing",
    "Explainer": "explainer",
    "Explanation": "explanation.result",
    "Generation": "explanation.generation",
    "Maximized": "maximize",
    "Record": "recording",
    "arbitrate": "evaluation.arbitration",
    "attention_maps": "attention",
    "audit": "auditing",
    "compare": "comparing",
    "evaluate": "evaluation.single",
    "evaluation": "",
    "explain": "explaining",
    "explain_generation": "generation",
    "explain_many": "jobs.many",
    "explain_span": "generation",
    "list_methods": "methods",
    "maximize_activation": "maximize",
    "methods": "",
    "read": "jobs.reading",
    "record": "recording",
    "rules": "",
    "targets": "",
    "trust": "evaluation.trust",
    "unload": "models.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'whyformer' has no attribute '{name}'")
    module = _PLACES[name]
    return getattr(import_module(f"whyformer.{module}"), name) if module else import_module(f"whyformer.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
