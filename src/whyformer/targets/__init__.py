"""Targets: which number of a model's output is explained.

A target says *what* is explained, and its gradient is also what relevance starts from (a one-hot vector for a logit).
One row of logits a sample, a classifier's or a language model's for the next token, is read as it is: a target is then
a class (an index or a name, or one a sample), one of :class:`Logit`, :class:`Probability`, :class:`LogProbability` and
:class:`Contrast`, or any differentiable function of the logits ``[B, C]`` that returns ``[B]``.

Of any other output nothing is guessed: :class:`Token`, :class:`Span`, :class:`Query`, :class:`Pixel` and
:class:`Similarity` say which number is meant, or any differentiable function of the model's raw output that returns
``[B]``. Without one the error names those that fit.
"""

from whyformer.targets.naming import class_index, token_ids
from whyformer.targets.outputs import Pixel, Query, Similarity, Span, Token
from whyformer.targets.resolving import OUTPUT, Resolver, Target, of_samples, several_tokens
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
    "class_index",
    "of_samples",
    "several_tokens",
    "token_ids",
]
