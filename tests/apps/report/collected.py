"""A folder such as a report is made of: saved explanations, JSON files of the command line, a benchmark, and junk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from show.made import picture, sentence
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.evaluation.statistics import Interval
from whyformer.explanation.result import Explanation


def named(e: Explanation, model: str, method: str = "transformer_attribution") -> Explanation:
    return replace(e, model=model, method=method)


def benchmark(name: str = "segmentation") -> Report:
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


def collect(folder: Path) -> Path:
    """Two pictures (one with two methods), two sentences (one twice), one benchmark, in nested folders."""
    for place in ("pictures/deep", "text", "bench"):
        (folder / place).mkdir(parents=True)
    dog = picture()
    named(dog, "tiny-vit").save(folder / "pictures/dog-a.safetensors")
    named(dog, "tiny-vit", "rollout").save(folder / "pictures/dog-b.safetensors")
    other = picture(torch.tensor([[-1.0, 0, 0, 0, 0, 1]] * 4), pictures=torch.zeros(1, 32, 48, 3, dtype=torch.uint8), target=0)
    named(other, "tiny-vit").save(folder / "pictures/deep/night.safetensors")
    facts = {"schema_version": 1, "command": "explain", "versions": {"whyformer": "0.0.9"}, "model": "tiny-bert", "input": "film"}
    listed = [named(sentence(), "tiny-bert", m).to_dict() for m in ("rollout", "gae")]
    (folder / "text/film.json").write_text(json.dumps({**facts, "explanations": listed}))
    (folder / "text/film.html").write_text("written beside it")
    named(sentence("A dull one.", target=0), "tiny-bert").save(folder / "text/dull.safetensors")
    benchmark().write(folder / "bench")
    error = {"sample": "7", "configuration": "rollout", "key": "k", "error": "boom", "kind": "failed"}
    (folder / "bench/records.jsonl").write_text(json.dumps(error) + "\n" + '{"torn')
    return folder
