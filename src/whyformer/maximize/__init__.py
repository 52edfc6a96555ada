"""Activation maximisation: the picture that a class, a neuron or a token of a model answers to most."""

from whyformer.maximize.climbing import RECIPES, Maximized, maximize_activation

__all__ = ["RECIPES", "Maximized", "maximize_activation"]
