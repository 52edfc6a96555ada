"""Figures from the papers, to stand beside the measured ones (methods.md §7).

Each is for the paper's own model and data, so a measured figure for another model is beside it for the order, not
the value.
"""

from __future__ import annotations

from typing import Any


def _rows(names: tuple[str, ...], rows: dict[str, tuple[float | None, ...]]) -> dict[str, dict[str, float]]:
    """Row -> name -> figure, without the gaps of the paper; figures that are missing at the end are gaps too."""
    return {
        row: {name: figure for name, figure in zip(names, figures, strict=False) if figure is not None}
        for row, figures in rows.items()
    }


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

TABLE_1_ROWS = {
    "negative/predicted": "Negative, predicted ↑",
    "negative/target": "Negative, target ↑",
    "positive/predicted": "Positive, predicted ↓",
    "positive/target": "Positive, target ↓",
}
TABLE_1 = _rows(
    tuple(CVPR_SETTINGS),
    {
        "negative/predicted": (53.10, 45.55, 41.52, 43.49, 50.49, 54.16),
        "negative/target": (None, None, 42.02, 43.49, 50.49, 55.04),
        "positive/predicted": (20.05, 23.99, 34.06, 41.94, 19.64, 17.03),
        "positive/target": (None, None, 33.56, 41.93, 19.64, 16.04),
    },
)

TABLE_2_ROWS = {"pixel_accuracy": "Pixel accuracy ↑", "map": "mAP ↑", "miou": "mIoU ↑"}
TABLE_2 = _rows(
    tuple(CVPR_SETTINGS),
    {
        "pixel_accuracy": (73.54, 67.84, 64.44, 51.09, 76.31, 79.70),
        "map": (84.76, 80.24, 71.60, 55.68, 84.67, 86.03),
        "miou": (55.42, 46.37, 40.82, 32.89, 57.94, 61.95),
    },
)

ABLATION_SETTINGS: dict[str, dict[str, Any]] = {
    "without gradient": {"method": "transformer_attribution", "start_layer": 1, "weighting": "none"},
    "last block": {"method": "transformer_attribution", "block": -1},
    "first block": {"method": "transformer_attribution", "block": 1},
    "full method": {"method": "transformer_attribution", "start_layer": 1},
}
"""The variants of Table 3. "first block" is the paper's ∇A^(B−1)R, which the reference code takes from block 1
(from 0)."""

ABLATION_METHODS = (
    "without gradient=transformer_attribution:start_layer=1:weighting=none,last block=transformer_attribution:block=-1,"
    "first block=transformer_attribution:block=1,full method=transformer_attribution:start_layer=1"
)

TABLE_3 = _rows(
    tuple(ABLATION_SETTINGS),
    {
        "pixel_accuracy": (77.66, 78.32, 60.30, 79.70),
        "map": (85.66, 85.25, 73.63, 86.03),
        "miou": (59.88, 59.93, 39.06, 61.95),
        "positive/predicted": (18.23, 18.01, 27.33, 17.03),
        "negative/predicted": (52.88, 52.43, 37.42, 54.16),
    },
)

ALI_DATA = ("imdb", "sst2", "bace", "mnist", "emotion", "hate", "sentiment", "meld", "semaine")
ALI_METHODS = "raw_attention,rollout,gae,input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln"
_AUAC_BY_METHOD = _rows(
    ALI_DATA,
    {
        "random": (0.673, 0.664, 0.624, 0.324, 0.516, 0.640, 0.484, 0.460, 0.432),
        "raw_attention": (0.708, 0.712, 0.620, 0.862, 0.542, 0.663, 0.515, 0.483, 0.451),
        "attention_flow": (None, 0.711, 0.637),
        "rollout": (0.738, 0.713, 0.653, 0.358, 0.554, 0.659, 0.520, 0.489, 0.441),
        "gae": (0.872, 0.821, 0.675, 0.426, 0.675, 0.762, 0.611, 0.548, 0.532),
        "input_x_gradient": (0.920, 0.847, 0.646, 0.942, 0.652, 0.772, 0.651, 0.591, 0.529),
        "lrp_ah": (0.911, 0.855, 0.645, 0.942, 0.675, 0.797, 0.668, 0.594, 0.544),
        "lrp_ln": (0.935, 0.907, 0.702, 0.947, 0.735, 0.829, 0.710, 0.632, 0.593),
        "lrp_ah_ln": (0.939, 0.908, 0.707, 0.948, 0.750, 0.838, 0.713, 0.635, 0.606),
    },
)
AUAC = {data: {method: row[data] for method, row in _AUAC_BY_METHOD.items() if data in row} for data in ALI_DATA}
"""Ali et al. 2022: data set -> method -> AUAC (A-Last is ``raw_attention``). Models of the paper, not ours."""
ALI_SETTINGS: dict[str, dict[str, Any]] = {name: {} for name in _AUAC_BY_METHOD if name != "random"}
