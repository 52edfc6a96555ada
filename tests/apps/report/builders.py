"""A folder with inputs of a report: saved explanations, JSON files of the command line, a benchmark, and other files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from show.builders import picture, sentence
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.evaluation.statistics import Interval
from whyformer.explanation.result import Explanation


def with_names(e: Explanation, model: str, method: str = "transformer_attribution") -> Explanation:
    return replace(e, model=model, method=method)


def benchmark_report(name: str = "segmentation") -> Report:
    cells = {
        ("Pixel accuracy", "rollout"): Cell(Interval(61.5, 58.0, 65.0, 20), 55.42),
        ("Pixel accuracy", "gae"): Cell(Interval(9.25, 8.0, 11.0, 20), None),
        ("mIoU", "rollout"): Cell(None),
        ("mIoU", "gae"): Cell(Interval(70.0, 70.0, 70.0, 20), None),
    }
    table = Table("main", "Agreement with the mask", "Figure", ("Pixel accuracy", "mIoU"), ("rollout", "gae"), cells)
    curves = Curves("positive", "positive perturbation", "share", "accuracy", {"rollout": ([0.0, 0.5, 1.0], [1.0, 0.6, 0.2])})
    counts = {"rollout": {"scored": 19, "failed": 1, "constant": 0, "nan": 0}}
    stated = {"model": "bundled:digits", "versions": "whyformer 0.1.0"}
    return Report((table,), (curves,), stated, ("20 pictures: few.",), benchmark=name, counts=counts)


def build_folder(folder: Path) -> Path:
    """Two pictures (one with two methods), two sentences (one twice), one benchmark, in nested folders."""
    for subfolder in ("pictures/deep", "text", "bench"):
        (folder / subfolder).mkdir(parents=True)
    dog = picture()
    with_names(dog, "tiny-vit").save(folder / "pictures/dog-a.safetensors")
    with_names(dog, "tiny-vit", "rollout").save(folder / "pictures/dog-b.safetensors")
    night = picture(torch.tensor([[-1.0, 0, 0, 0, 0, 1]] * 4), pictures=torch.zeros(1, 32, 48, 3, dtype=torch.uint8), target=0)
    with_names(night, "tiny-vit").save(folder / "pictures/deep/night.safetensors")
    facts = {"schema_version": 1, "command": "explain", "versions": {"whyformer": "0.0.9"}, "model": "tiny-bert", "input": "film"}
    explanations = [with_names(sentence(), "tiny-bert", m).to_dict() for m in ("rollout", "gae")]
    (folder / "text/film.json").write_text(json.dumps({**facts, "explanations": explanations}))
    (folder / "text/film.html").write_text("written beside it")
    with_names(sentence("A dull one.", target=0), "tiny-bert").save(folder / "text/dull.safetensors")
    benchmark_report().write(folder / "bench")
    error = {"sample": "7", "configuration": "rollout", "key": "k", "error": "boom", "kind": "failed"}
    (folder / "bench/records.jsonl").write_text(json.dumps(error) + "\n" + '{"torn')
    return folder
