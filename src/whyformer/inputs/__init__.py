"""From what a user has (picture, sentence, tensors) to what a model is fed and what its scores belong to."""

from whyformer.inputs.prepare import Inputs, prepare

__all__ = ["Inputs", "prepare"]
