"""Explanation methods. Importing this package registers them.

A method is a function from a :class:`~whyformer.methods.task.Task` (a model, its inputs and a target) to
:class:`~whyformer.methods.scores.Scores`. Begin with ``registry`` and ``task``, then read a short method, such as
``maps/attcat``. Most methods walk over a recorded pass: ``passes`` records it, ``layout`` holds its rows and
attentions, ``roots`` finds the values that get relevance, ``map_passes`` and ``maps/streams`` observe its attention
maps. ``task_inputs`` turns scores of rows into scores of inputs.
"""

from whyformer.methods import auto, multipliers, propagation  # noqa: F401 - each registers its methods
from whyformer.methods.gradients import gradcam, input_gradients  # noqa: F401
from whyformer.methods.maps import (  # noqa: F401
    attcat,
    beyond_intuition,
    flow,
    gae,
    gradcam_attention,
    gradient_weighted,
    legrad,
    rollout,
    transformer_attribution,
)
from whyformer.methods.perturbation import occlusion, tis, vit_cx  # noqa: F401
from whyformer.methods.registry import METHODS, Method, find, list_methods
from whyformer.methods.vectors import alti, decompx, globenc, norms, value_zeroing  # noqa: F401

__all__ = ["METHODS", "Method", "find", "list_methods"]
