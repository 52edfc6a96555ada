"""Explanation methods. Importing this package registers them.

A method is a function from a :class:`~whyformer.methods.task.Task` (a model, its inputs and a target) to
:class:`~whyformer.methods.scores.Scores`. Begin with ``registry`` and ``task``, then read a short method, such as
``maps/attcat``. Most methods walk over a recorded pass: ``passes`` records it, ``roots`` finds the values that get
relevance, ``layout`` holds its rows and attentions, ``map_passes`` and ``maps/stream_maps`` observe its attention maps,
``structure`` answers questions about its sequences of rows, and ``task_inputs`` turns scores of rows into scores of
inputs. Of a ViT, for example, ``layout`` holds one stream of 197 rows with 12 blocks, ``map_passes`` names the rows
after their input (``{"pixel_values"}``), ``structure`` knows that the target reads this sequence only, and
``task_inputs`` assigns the scores of its rows to 14 × 14 patches.
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
