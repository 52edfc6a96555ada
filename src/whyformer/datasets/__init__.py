"""Data sets: readers of common formats, and generated samples with known evidence (digit scenes, planted facts).

A reader returns a list of :class:`Picture` or :class:`Texts` (``samples``); ``readers`` chooses one by the layout of a
folder.
"""

from __future__ import annotations

from whyformer.datasets.labelled import class_folders, imagenet_samples, imagenet_validation, mnist
from whyformer.datasets.masks import imagenet_segmentation, indexed_masks, oxford_pets, scene_objects
from whyformer.datasets.readers import open_pictures, open_texts
from whyformer.datasets.samples import LayoutError, Picture, Text, Texts
from whyformer.datasets.saved import saved_pictures, saved_texts
from whyformer.datasets.scenes import Scene, digit_scenes, split_indices
from whyformer.datasets.texts import bace, eraser, imdb, meld, sst2, tweeteval

__all__ = [
    "LayoutError", "Picture", "Scene", "Text", "Texts", "bace", "class_folders", "digit_scenes", "eraser",
    "imagenet_samples", "imagenet_segmentation", "imagenet_validation", "imdb", "indexed_masks", "meld", "mnist",
    "open_pictures", "open_texts", "oxford_pets", "saved_pictures", "saved_texts", "scene_objects", "split_indices",
    "sst2", "tweeteval",
]  # fmt: skip
