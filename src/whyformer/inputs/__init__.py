"""From what a user has (picture, sentence, tensors) to what a model is fed and what its scores belong to."""

from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prepare import prepare

__all__ = ["Inputs", "prepare"]
