"""Activation maximisation: the picture that maximizes a class, a neuron or a token of a model."""

from whyformer.maximize.climbing import RECIPES, Maximized, maximize_activation

__all__ = ["RECIPES", "Maximized", "maximize_activation"]
