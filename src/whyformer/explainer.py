"""``Explainer``: a model with its options, said once for all that is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyformer.attention import AttentionMaps, attention_maps
from whyformer.comparing import Asked, Comparison, compare
from whyformer.defaults import DEFAULT_METHOD
from whyformer.explaining import OpenedModel
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.generation import explain_generation, explain_span
from whyformer.progress import Track
from whyformer.targets import Target


class Explainer(OpenedModel):
    """A model, its processor and the options, for several explanations.

    ``Explainer(model, processor, **options).explain(x)`` is ``explain(model, x, processor=processor, **options)``. What
    takes a model (:func:`whyformer.trust`, :func:`whyformer.explain_many`, :func:`whyformer.record` ...) takes an
    explainer in its place.

    Args:
        model, processor: as for :func:`whyformer.explain`.
        **options: ``device``, ``dtype``, ``truncate``, ``rules`` and ``checkpoint``, see
            :class:`~whyformer.options.Options`.

    Raises:
        InputError: ``device`` or ``dtype`` for a module. LoadError: the name. ModelError: an explanation would be
            wrong or impossible.
    """

    def compare(
        self,
        inputs: Any,
        methods: Sequence[Asked] | None = None,
        targets: Sequence[Target] | None = None,
        *,
        likeliest: int = 1,
        progress: bool | Track = False,
    ) -> Comparison:
        """As :func:`whyformer.compare`, by this model."""
        return compare(self, inputs, methods, targets, likeliest=likeliest, progress=progress)

    def explain_generation(
        self, prompt: Any, continuation: Any = None, method: str = DEFAULT_METHOD, **settings: Any
    ) -> Generation | list[Generation]:
        """As :func:`whyformer.explain_generation`, by this model."""
        return explain_generation(self, prompt, continuation, method, **settings)

    def explain_span(self, g: Generation, first: int, last: int, **prompt: Any) -> Explanation:
        """As :func:`whyformer.explain_span`, by this model."""
        return explain_span(g, first, last, self, **prompt)

    def attention_maps(self, inputs: Any, *, target: Target = None, gradient: bool = False) -> AttentionMaps:
        """As :func:`whyformer.attention_maps`, of this model."""
        return attention_maps(self, inputs, target=target, gradient=gradient)
