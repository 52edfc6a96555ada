"""Figures from the papers, to stand beside the measured ones (methods.md §7).

Each is for the paper's own model and data, so a measured figure for another model is beside it for the order, not
the value.
"""

from __future__ import annotations

from typing import Any

CVPR_SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {"start_layer": 1},
    "raw_attention": {},
    "gradcam_attention": {},
    "lrp": {},
    "partial_lrp": {},
    "transformer_attribution": {"start_layer": 1},
}
"""Settings under which the reference code made Tables 1 and 2 (methods.md §1.4)."""

CVPR_METHODS = (
    "rollout:start_layer=1,raw_attention,gradcam_attention,lrp,partial_lrp,transformer_attribution:start_layer=1"
)

ABLATION_SETTINGS: dict[str, dict[str, Any]] = {
    "without gradient": {"start_layer": 1, "weighting": "none"},
    "last block": {"block": -1},
    "first block": {"block": 1},
    "full method": {"start_layer": 1},
}
"""The variants of Table 3. "first block" is the paper's ∇A^(B−1)R, which the reference code takes from block 1
(from 0)."""

ABLATION_METHODS = (
    "without gradient=transformer_attribution:start_layer=1:weighting=none,last block=transformer_attribution:block=-1,"
    "first block=transformer_attribution:block=1,full method=transformer_attribution:start_layer=1"
)

TABLE_1_ROWS = {
    "negative/predicted": "Negative, predicted ↑",
    "negative/target": "Negative, target ↑",
    "positive/predicted": "Positive, predicted ↓",
    "positive/target": "Positive, target ↓",
}
TABLE_1: dict[str, dict[str, float]] = {
    "negative/predicted": {
        "rollout": 53.10,
        "raw_attention": 45.55,
        "gradcam_attention": 41.52,
        "lrp": 43.49,
        "partial_lrp": 50.49,
        "transformer_attribution": 54.16,
    },
    "negative/target": {
        "gradcam_attention": 42.02,
        "lrp": 43.49,
        "partial_lrp": 50.49,
        "transformer_attribution": 55.04,
    },
    "positive/predicted": {
        "rollout": 20.05,
        "raw_attention": 23.99,
        "gradcam_attention": 34.06,
        "lrp": 41.94,
        "partial_lrp": 19.64,
        "transformer_attribution": 17.03,
    },
    "positive/target": {
        "gradcam_attention": 33.56,
        "lrp": 41.93,
        "partial_lrp": 19.64,
        "transformer_attribution": 16.04,
    },
}

TABLE_2_ROWS = {"pixel_accuracy": "Pixel accuracy ↑", "map": "mAP ↑", "miou": "mIoU ↑"}
TABLE_2: dict[str, dict[str, float]] = {
    "pixel_accuracy": {
        "rollout": 73.54,
        "raw_attention": 67.84,
        "gradcam_attention": 64.44,
        "lrp": 51.09,
        "partial_lrp": 76.31,
        "transformer_attribution": 79.70,
    },
    "map": {
        "rollout": 84.76,
        "raw_attention": 80.24,
        "gradcam_attention": 71.60,
        "lrp": 55.68,
        "partial_lrp": 84.67,
        "transformer_attribution": 86.03,
    },
    "miou": {
        "rollout": 55.42,
        "raw_attention": 46.37,
        "gradcam_attention": 40.82,
        "lrp": 32.89,
        "partial_lrp": 57.94,
        "transformer_attribution": 61.95,
    },
}

TABLE_3: dict[str, dict[str, float]] = {
    "without gradient": {
        "pixel_accuracy": 77.66,
        "map": 85.66,
        "miou": 59.88,
        "positive/predicted": 18.23,
        "negative/predicted": 52.88,
    },
    "last block": {
        "pixel_accuracy": 78.32,
        "map": 85.25,
        "miou": 59.93,
        "positive/predicted": 18.01,
        "negative/predicted": 52.43,
    },
    "first block": {
        "pixel_accuracy": 60.30,
        "map": 73.63,
        "miou": 39.06,
        "positive/predicted": 27.33,
        "negative/predicted": 37.42,
    },
    "full method": {
        "pixel_accuracy": 79.70,
        "map": 86.03,
        "miou": 61.95,
        "positive/predicted": 17.03,
        "negative/predicted": 54.16,
    },
}

ALI_DATA = ("imdb", "sst2", "bace", "mnist", "emotion", "hate", "sentiment", "meld", "semaine")
ALI_METHODS = "raw_attention,rollout,gae,input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln"
ALI_SETTINGS: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "raw_attention",
        "attention_flow",
        "rollout",
        "gae",
        "input_x_gradient",
        "lrp_ah",
        "lrp_ln",
        "lrp_ah_ln",
    )
}
_ALI_ROWS = {
    "random": (0.673, 0.664, 0.624, 0.324, 0.516, 0.640, 0.484, 0.460, 0.432),
    "raw_attention": (0.708, 0.712, 0.620, 0.862, 0.542, 0.663, 0.515, 0.483, 0.451),
    "attention_flow": (None, 0.711, 0.637),
    "rollout": (0.738, 0.713, 0.653, 0.358, 0.554, 0.659, 0.520, 0.489, 0.441),
    "gae": (0.872, 0.821, 0.675, 0.426, 0.675, 0.762, 0.611, 0.548, 0.532),
    "input_x_gradient": (0.920, 0.847, 0.646, 0.942, 0.652, 0.772, 0.651, 0.591, 0.529),
    "lrp_ah": (0.911, 0.855, 0.645, 0.942, 0.675, 0.797, 0.668, 0.594, 0.544),
    "lrp_ln": (0.935, 0.907, 0.702, 0.947, 0.735, 0.829, 0.710, 0.632, 0.593),
    "lrp_ah_ln": (0.939, 0.908, 0.707, 0.948, 0.750, 0.838, 0.713, 0.635, 0.606),
}
AUAC: dict[str, dict[str, float]] = {
    data: {m: row[i] for m, row in _ALI_ROWS.items() if i < len(row) and (row[i] is not None)}  # type: ignore[misc]
    for i, data in enumerate(ALI_DATA)
}
"""Ali et al. 2022: data set -> method -> AUAC (A-Last is ``raw_attention``). Models of the paper, not ours."""
