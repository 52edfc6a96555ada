"""Prepare a user's inputs (pictures, sentences, tensors) for a model, with descriptions of their features."""

from whyformer.inputs.feed import argument_name, is_auxiliary
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prepare import prepare

__all__ = ["Inputs", "argument_name", "is_auxiliary", "prepare"]
