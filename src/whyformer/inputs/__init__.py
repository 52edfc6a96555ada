"""From what a user has (picture, sentence, tensors) to what a model is fed and what its scores belong to."""

from whyformer.inputs.feed import called, stands_beside
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prepare import prepare

__all__ = ["Inputs", "called", "prepare", "stands_beside"]
