"""Pixel flipping and localisation of Quantus for seeded maps of grey images of 8 × 8 pixels."""

from __future__ import annotations

import sys
import warnings

import numpy as np
from peer_tools import checkout, save, stand_ins, tiny_models

warnings.filterwarnings("ignore")
sys.path.insert(0, str(checkout()))
with stand_ins("cv2", "pandas", "cachetools"):
    import quantus

STEP = 4  # pixels flipped per step
draw = np.random.default_rng(0)
pictures = draw.standard_normal((3, 1, 8, 8))
maps = draw.standard_normal((3, 1, 8, 8))
objects = draw.random((3, 1, 8, 8)) < 0.4
objects[0, 0].flat[maps[0].argmax()] = True
objects[1, 0].flat[maps[1].argmax()] = False
classes = np.array([0, 1, 2])
model = tiny_models.PooledModel(channels=1)
arguments = {"model": model, "x_batch": pictures, "y_batch": classes, "s_batch": objects, "device": "cpu"}
options = {"disable_warnings": True, "normalise": False, "abs": False}
flipping = quantus.PixelFlipping(features_in_step=STEP, perturb_baseline=0.0, disable_warnings=True)
save(
    "quantus",
    pictures=pictures[:, 0],
    maps=maps[:, 0],
    objects=objects[:, 0],
    classes=classes,
    pixel_flipping=flipping(**arguments, a_batch=maps),
    pointing_game=quantus.PointingGame(**options)(**arguments, a_batch=maps),
    attribution_localisation=quantus.AttributionLocalisation(positive_attributions=True, **options)(**arguments, a_batch=maps),
    relevance_mass_of_size=quantus.RelevanceMassAccuracy(**options)(**arguments, a_batch=np.abs(maps)),
)
