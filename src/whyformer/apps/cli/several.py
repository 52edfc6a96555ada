"""Several inputs of one command, one after the other with one model: files, and folders of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from whyformer.apps.cli.telling import INCOMPLETE, one_line, remark
from whyformer.errors import InputError, WhyformerError
from whyformer.explanation.counts import amount

if TYPE_CHECKING:
    from whyformer.inputs.argument import Argument


def inputs_of(source: str, more: Sequence[str]) -> list[str] | None:
    """The files that are meant, those of folders by name; None where it is one input that is no folder.

    Raises:
        InputError: a folder holds none, or what stands beside others is no file.
    """
    if not more and not os.path.isdir(source):  # False too for what is longer than any name, or has a NUL in it
        return None
    from whyformer.inputs.pictures import SUFFIXES

    found: list[str] = []
    for name in (source, *more):
        path = Path(name)
        if os.path.isdir(name):
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in (*SUFFIXES, ".txt") and p.is_file())
            if not inside:
                raise InputError(f"{name} is a folder that holds no picture and no .txt file")
            found += map(str, inside)
        elif path.suffix.lower() in (*SUFFIXES, ".txt"):
            found.append(name)
        else:
            raise InputError(f"several inputs are files or folders, and '{name[:60]}' is neither; quote a sentence")
    return found


def each_of(names: Sequence[str], asked: Any, work: Callable[[Any, Argument, dict[str, Any]], None]) -> None:
    """Do the work for each file; one that cannot be read, or explained, is told and left out (status 3)."""
    from whyformer.inputs.argument import read_argument

    loaded: dict[str, Any] = {}
    taken: Counter[str] = Counter()
    failed = 0
    for name in names:
        try:
            given = read_argument(name)
            taken[given.name] += 1
            if taken[given.name] > 1:  # of files in different folders each has its own
                given = replace(given, name=f"{given.name[:30]}-{taken[given.name]}")
            work(replace(asked, source=name), given, loaded)
        except WhyformerError as error:
            failed += 1
            remark(asked, f"left out: {name}: {one_line(error)}")
    if failed:
        remark(asked, f"{failed} of {amount(len(names), 'input')} left out")
        raise typer.Exit(INCOMPLETE)
