"""Count the outcomes of all forms and methods: ``python -m tests.forms.measure [--kind K ...] [--methods M ...] [--sample] [--jobs 2] --out FILE.json``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from .catalogue import all_forms
from .cells import (
    AGREE,
    FOREIGN,
    NOWHERE,
    REFUSED,
    SILENT,
    Cell,
    all_settings,
    cells_of,
    grouped,
    settings_named,
    wrong_forms,
)
from .form import Group

OUTCOMES = (AGREE, REFUSED, SILENT, FOREIGN, NOWHERE)
REGROUPED = "regrouped"
# words of a message with a remedy
WAY_OUT = re.compile(r"register|rules=|like=|instead|pass |use |give|Methods that apply|target=|leave ", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """A cell in the report."""

    kind: str
    form: str
    setting: str
    outcome: str
    difference: float
    said: str


def row(cell: Cell) -> Row:
    outcome = REGROUPED if cell.outcome == SILENT and cell.form.regroups else cell.outcome
    return Row(cell.form.kind, cell.form.id, cell.setting.id, outcome, min(cell.difference, OTHER), cell.message)


def measured(group: Group, settings: Sequence[str]) -> tuple[list[Row], list[str], float]:
    """(cells, forms with another output, CPU seconds) of one group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.process_time()
    forms = [f for f in all_forms() if f.group == group]
    rows = [row(cell) for cell in cells_of(forms, settings_named(settings))]
    return rows, wrong_forms(forms), time.process_time() - start


# -- selection -------------------------------------------------------------------------------------------------------------
def chosen_groups(kinds: Sequence[str] | None, sample: bool) -> list[Group]:
    """Groups of these kinds; ``sample`` selects one base per function."""
    groups = [g for g in grouped(all_forms()) if not kinds or g[0] in kinds]
    if not sample:
        return groups
    first: dict[tuple[str, str], Group] = {}
    for group in groups:
        first.setdefault(group[:2], group)
    return list(first.values())


SAMPLE = ("attnlrp", "decompx", "libragrad", "lrp", "lrp_ah_ln secant=True", "norm_attention", "transformer_attribution")


def chosen_settings(methods: Sequence[str] | None, sample: bool) -> list[str]:
    known = [s.id for s in all_settings()]
    if methods:
        return [name for name in known if name in methods or name.split()[0] in methods]
    return list(SAMPLE) if sample else known


def run(groups: Sequence[Group], settings: Sequence[str], jobs: int) -> tuple[list[Row], list[str], float]:
    """(cells, wrong forms, CPU seconds)"""
    rows: list[Row] = []
    wrong: list[str] = []
    if jobs == 1:
        results: Iterable[Any] = (measured(g, settings) for g in groups)
        seconds = _gather(results, groups, rows, wrong)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            seconds = _gather(pool.map(measured, groups, [settings] * len(groups)), groups, rows, wrong)
    return rows, wrong, seconds


def _gather(results: Iterable[Any], groups: Sequence[Group], rows: list[Row], wrong: list[str]) -> float:
    total = 0.0
    for done, (group, (group_rows, mistakes, seconds)) in enumerate(zip(groups, results, strict=True), 1):
        rows += group_rows
        wrong += mistakes
        total += seconds
        counts = Counter(r.outcome for r in group_rows)
        sys.stderr.write(f"{done}/{len(groups)} {' / '.join(group)}: {dict(counts)} {seconds:.1f} s\n")
    return total


# -- report -------------------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Row], key: str) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for r in rows:
        counts[getattr(r, key)][r.outcome] += 1
        counts["all"][r.outcome] += 1
    columns = (*OUTCOMES, REGROUPED)
    names = [n for n in counts if n != "all"] + ["all"]
    width = max(map(len, names)) + 2
    lines = [" " * width + "".join(f"{c:>11}" for c in columns)]
    lines += [f"{name:<{width}}" + "".join(f"{counts[name][c]:>11}" for c in columns) for name in names]
    return "\n".join(lines)


# the difference of scores of another shape or that are not finite
OTHER = 1e9


def worst(rows: Sequence[Row], most: int) -> list[Row]:
    """The form with the largest silent difference of each kind and setting, the largest first."""
    largest: dict[tuple[str, str], Row] = {}
    for r in sorted((r for r in rows if r.outcome == SILENT and r.difference < OTHER), key=lambda r: -r.difference):
        largest.setdefault((r.kind, r.setting), r)
    return list(largest.values())[:most]


def refusals(rows: Sequence[Row], outcome: str = REFUSED) -> list[dict[str, Any]]:
    """Messages with their counts and places, grouped without regard to numbers."""
    by_message: dict[str, list[Row]] = defaultdict(list)
    for r in rows:
        if r.outcome == outcome:
            by_message[re.sub(r"\d+", "#", r.said)].append(r)
    return [
        {
            "count": len(group), "offers a way out": bool(WAY_OUT.search(group[0].said)), "said": group[0].said,
            "methods": sorted({r.setting for r in group}), "forms": sorted({r.form for r in group})[:20],
        }
        for group in sorted(by_message.values(), key=lambda group: -len(group))
    ]


def report(rows: Sequence[Row], wrong: Sequence[str], seconds: float) -> dict[str, Any]:
    forms: Counter[str] = Counter(r.form for r in rows if r.outcome == SILENT)
    return {
        "seconds": round(seconds, 1),
        "cells": len(rows),
        "counts": dict(Counter(r.outcome for r in rows)),
        "by kind": {k: dict(Counter(r.outcome for r in rows if r.kind == k)) for k in dict.fromkeys(r.kind for r in rows)},
        "by method": {s: dict(Counter(r.outcome for r in rows if r.setting == s)) for s in dict.fromkeys(r.setting for r in rows)},
        "forms by silent cells": dict(forms.most_common()),
        "wrong forms": list(wrong),
        "silent": [vars(r) for r in sorted(rows, key=lambda r: -r.difference) if r.outcome == SILENT],
        "regrouped": [vars(r) for r in rows if r.outcome == REGROUPED],
        "refusals": refusals(rows),
        "foreign": refusals(rows, FOREIGN),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.forms.measure", description=__doc__)
    parser.add_argument("--kind", action="append", help="only forms of this kind; may be given again")
    parser.add_argument("--methods", nargs="+", help="only these methods, or settings as the table has them")
    parser.add_argument("--sample", action="store_true", help="one model of each function, seven settings")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--worst", type=int, default=25)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    groups, settings = chosen_groups(options.kind, options.sample), chosen_settings(options.methods, options.sample)
    if not groups or not settings:
        kinds = ", ".join(dict.fromkeys(form.kind for form in all_forms()))
        parser.error(f"nothing to do. Kinds: {kinds}. Settings: {', '.join(s.id for s in all_settings())}")
    rows, wrong, seconds = run(groups, settings, options.jobs)
    options.out.write_text(json.dumps(report(rows, wrong, seconds), indent=1), encoding="utf-8")
    lines = [table(rows, "kind"), "", table(rows, "setting"), "", "largest silent differences, one of each kind and setting:"]
    lines += [f"  {r.difference:9.2e}  {r.form}  [{r.setting}]" for r in worst(rows, options.worst)]
    lines += [f"scores of another shape, or not finite: {sum(r.outcome == SILENT and r.difference >= OTHER for r in rows)}"]
    lines += [f"wrong form: {w}" for w in wrong] + [f"{len(rows)} cells in {seconds:.0f} s of one processor"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
