"""Prepare a user's inputs (pictures, sentences, tensors) for a model, with descriptions of their features."""

from whyformer.inputs.feed import called, stands_beside
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prepare import prepare

__all__ = ["Inputs", "called", "prepare", "stands_beside"]
