"""Targets: the number of a model's output to explain.

Methods explain the value of the target, and propagation of relevance starts from its gradient (a one-hot vector for a
logit). If the model returns one row of logits per sample (a classifier, or a language model's logits of the next
token), a target is a class (an index or a name, or a list of one per sample), a :class:`Logit`, :class:`Probability`,
:class:`LogProbability` or :class:`Contrast`, or any differentiable function of the logits ``[B, C]`` that returns
``[B]``.

Any other output needs an explicit target: :class:`Token`, :class:`Span`, :class:`Query`, :class:`Pixel`,
:class:`Similarity`, or any differentiable function of the model's raw output that returns ``[B]``. Without a target,
the error lists those that fit the output.
"""

from whyformer.targets.naming import class_index, distinct_texts, token_ids
from whyformer.targets.outputs import Pixel, Query, Similarity, Span, Token
from whyformer.targets.reading import is_written_target, of_samples, reads_output, with_class, written_target
from whyformer.targets.resolving import OUTPUT, Resolver, Target, check_target, several_tokens
from whyformer.targets.rows import Contrast, Logit, LogProbability, Probability, RowTarget

__all__ = [
    "OUTPUT",
    "Contrast",
    "LogProbability",
    "Logit",
    "Pixel",
    "Probability",
    "Query",
    "Resolver",
    "RowTarget",
    "Similarity",
    "Span",
    "Target",
    "Token",
    "check_target",
    "class_index",
    "distinct_texts",
    "is_written_target",
    "of_samples",
    "reads_output",
    "several_tokens",
    "token_ids",
    "with_class",
    "written_target",
]
