"""What captum and inseq say of the prompts of the benchmark ``evidence``, in one table with whyformer's own methods.

    python benchmarks/other_libraries.py --model FOLDER [--prompts 40] [--methods NAMES] [--out FOLDER]

Each of their methods becomes one of whyformer's for the run (``captum_...``, ``inseq_...``), so that prompts, figures
and clock are the same. They explain the log-probability (captum) or the probability (inseq, its default) of the
answer's token; of inseq's scores those are taken that its ``aggregate()`` makes (a norm over the width, for gradients).
The cost of theirs holds one forward pass that is ours. What is not installed is left out, and said: ``pip install
captum inseq``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from whyformer.benchmarks import run_benchmark
from whyformer.errors import InputError
from whyformer.methods.registry import method
from whyformer.methods.task import Scores, Task
from whyformer.models import load

OURS = (
    "attnlrp of 4/5=attnlrp:share=0.8", "attnlrp of the input=attnlrp", "gim",
    "input_x_gradient", "occlusion",
)  # fmt: skip
STEPS = 16
Attribute = Callable[[torch.nn.Module, Any, str, int], torch.Tensor]
"""(model, tokenizer, text, token that follows) -> scores of the text's tokens ``[N]``."""


# -- captum ----------------------------------------------------------------------------------------------------------
def captum_gradient(layer_method: str, **settings: Any) -> Attribute:
    """``LLMGradientAttribution`` of a method of layers, at the embeddings."""

    def attribute(model: torch.nn.Module, tokenizer: Any, text: str, token: int) -> torch.Tensor:
        from captum import attr

        inner = getattr(attr, layer_method)(model, model.get_input_embeddings())  # type: ignore[operator]
        given = attr.TextTokenInput(text, tokenizer)
        made = attr.LLMGradientAttribution(inner, tokenizer).attribute(given, target=torch.tensor([token]), **settings)
        return made.seq_attr

    return attribute


def captum_perturbation(perturbation: str, **settings: Any) -> Attribute:
    """``LLMAttribution`` of a method that takes tokens out."""

    def attribute(model: torch.nn.Module, tokenizer: Any, text: str, token: int) -> torch.Tensor:
        from captum import attr

        given = attr.TextTokenInput(text, tokenizer)
        wrapped = attr.LLMAttribution(getattr(attr, perturbation)(model), tokenizer)
        return wrapped.attribute(given, target=torch.tensor([token]), **settings).seq_attr

    return attribute


# -- inseq -----------------------------------------------------------------------------------------------------------
@cache
def inseq_model(model: torch.nn.Module, tokenizer: Any, name: str) -> Any:
    import inseq

    return inseq.load_model(model, name, tokenizer=tokenizer, device=str(next(model.parameters()).device))


def inseq_method(name: str, **settings: Any) -> Attribute:
    def attribute(model: torch.nn.Module, tokenizer: Any, text: str, token: int) -> torch.Tensor:
        wrapped = inseq_model(model, tokenizer, name)
        made = wrapped.attribute(text, text + tokenizer.decode([token]), show_progress=False, **settings)
        return made[0].aggregate().target_attributions[:-1, 0]

    return attribute


THEIRS: dict[str, tuple[str, Attribute]] = {
    "captum_gradient_x_activation": ("captum", captum_gradient("LayerGradientXActivation")),
    "captum_integrated_gradients": ("captum", captum_gradient("LayerIntegratedGradients", n_steps=STEPS)),
    "captum_feature_ablation": ("captum", captum_perturbation("FeatureAblation")),
    "captum_shapley": ("captum", captum_perturbation("ShapleyValueSampling", n_samples=5)),
    "captum_lime": ("captum", captum_perturbation("Lime", n_samples=100)),
    "inseq_saliency": ("inseq", inseq_method("saliency")),
    "inseq_input_x_gradient": ("inseq", inseq_method("input_x_gradient")),
    "inseq_integrated_gradients": ("inseq", inseq_method("integrated_gradients", n_steps=STEPS)),
    "inseq_deeplift": ("inseq", inseq_method("layer_deeplift")),
    "inseq_occlusion": ("inseq", inseq_method("occlusion")),
    "inseq_attention": ("inseq", inseq_method("attention")),
    "inseq_value_zeroing": ("inseq", inseq_method("value_zeroing")),
}
LEFT = ("captum_shapley", "captum_lime", "inseq_deeplift", "inseq_attention", "inseq_value_zeroing")
"""Not asked for by default: two take very long, and the others give NaN or fail with transformers 5."""


def register(name: str, attribute: Attribute, tokenizer: Any) -> None:
    """Make it one of whyformer's methods."""

    def explained(task: Task) -> Scores:
        logits = task.forward()
        ids = task.inputs.tensor[0].tolist()
        text = tokenizer.decode(ids)
        if tokenizer(text)["input_ids"] != ids:
            raise InputError("the text of these tokens has other tokens, and other libraries want a text")
        wanted = [p.requires_grad for p in task.model.parameters()]
        try:
            with torch.enable_grad():
                found = attribute(task.model, tokenizer, text, int(task.value_index(logits)))
        finally:
            for parameter, needed in zip(task.model.parameters(), wanted, strict=True):
                parameter.requires_grad_(needed)
        scores = found.detach().double().reshape(1, -1)
        if scores.shape[1] != len(ids):
            raise InputError(f"{scores.shape[1]} scores for {len(ids)} tokens")
        if not scores.isfinite().all():
            raise InputError("some of its scores are NaN")
        return Scores(scores.cpu(), logits)

    explained.__name__ = name
    explained.__doc__ = "As the other library has it."
    family = {"family": "gradient", "level": "pixel or token", "modality": "text", "anywhere": True, "signed": True}
    method(f"{name}, for comparison", citation=name.partition("_")[0], **family)(explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--removal", type=int, default=20, help="prompts for cost and removal")
    parser.add_argument("--methods", help="names, with commas; by default the quick ones")
    parser.add_argument("--out", default="results/other-libraries")
    asked = parser.parse_args()
    there = {library for library in ("captum", "inseq") if importlib.util.find_spec(library)}
    for library in sorted({"captum", "inseq"} - there):
        print(f"{library} is not installed, so its methods are left out: pip install {library}", file=sys.stderr)
    tokenizer = load(asked.model).processor
    chosen = [*OURS, *(n for n in THEIRS if n not in LEFT)] if asked.methods is None else asked.methods.split(",")
    for name, (library, attribute) in THEIRS.items():
        if library in there:
            register(name, attribute, tokenizer)
    chosen = [n for n in chosen if n not in THEIRS or THEIRS[n][0] in there]
    outcome = run_benchmark(
        "evidence", asked.model, out=asked.out, methods=",".join(chosen), prompts=asked.prompts, removal=asked.removal
    )
    print(outcome.report.markdown())


if __name__ == "__main__":
    main()
