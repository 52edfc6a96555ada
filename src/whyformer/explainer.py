"""``Explainer``: a model with its processor and options, for several explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyformer.attention import AttentionMaps, attention_maps
from whyformer.comparing import Comparison, MethodSpec, compare
from whyformer.defaults import DEFAULT_METHOD
from whyformer.explaining import OpenedModel
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.generation import explain_generation, explain_span
from whyformer.progress import Track
from whyformer.targets import Target


class Explainer(OpenedModel):
    """A model with its processor and options, for several explanations.

    ``Explainer(model, processor, **options).explain(x)`` equals ``explain(model, x, processor=processor, **options)``.
    Every function that takes a model (:func:`whyformer.trust`, :func:`whyformer.explain_many`,
    :func:`whyformer.record` ...) also takes an explainer.

    Args:
        model, processor: as for :func:`whyformer.explain`.
        **options: ``device``, ``dtype``, ``truncate``, ``rules`` and ``checkpoint``, see
            :class:`~whyformer.options.Options`.

    Raises:
        InputError: ``device`` or ``dtype`` is passed with a module.
        LoadError: the model cannot be loaded by its name.
        ModelError: the model is in a state in which an explanation would be wrong or impossible.
    """

    def compare(
        self,
        inputs: Any,
        methods: Sequence[MethodSpec] | None = None,
        targets: Sequence[Target] | None = None,
        *,
        likeliest: int = 1,
        progress: bool | Track = False,
    ) -> Comparison:
        """Call :func:`whyformer.compare` with this model."""
        return compare(self, inputs, methods, targets, likeliest=likeliest, progress=progress)

    def explain_generation(
        self, prompt: Any, continuation: Any = None, method: str = DEFAULT_METHOD, **settings: Any
    ) -> Generation | list[Generation]:
        """Call :func:`whyformer.explain_generation` with this model."""
        return explain_generation(self, prompt, continuation, method, **settings)

    def explain_span(self, g: Generation, first: int, last: int, **prompt: Any) -> Explanation:
        """Call :func:`whyformer.explain_span` with this model."""
        return explain_span(g, first, last, self, **prompt)

    def attention_maps(self, inputs: Any, *, target: Target = None, gradient: bool = False) -> AttentionMaps:
        """Call :func:`whyformer.attention_maps` with this model."""
        return attention_maps(self, inputs, target=target, gradient=gradient)
