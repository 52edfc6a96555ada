"""The same job on a Ray cluster: actors that each hold the model make the parts, and this process keeps the journal.

A part is written under its own name by whichever actor has it; made twice, it has the same bytes. So it does not
matter that Ray runs a task again when an actor dies in the middle of one. All machines see ``out`` and the input under
the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whyformer.errors import LoadError
from whyformer.jobs.actors import connected, made_by_actors
from whyformer.jobs.description import Job
from whyformer.jobs.folder import Part, part_name
from whyformer.jobs.local import Run, Track, make_part, open_job
from whyformer.jobs.reading import Maps


class Maker:
    """An actor: the model, loaded once, and the input; makes one part after another."""

    def __init__(self, job: Job) -> None:
        self.opened = open_job(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """What the journal says of each part of a batch; of one that did not fit into memory the number alone."""
        found = []
        for number, size in zip(batch["number"].tolist(), batch["size"].tolist(), strict=True):
            rows = self.opened.part(number)
            made = make_part(self.opened, number, rows, size)
            if made is None:
                found.append(
                    {"number": number, "fits": False, "warned": 0, **dict.fromkeys(Part.__annotations__, None)}
                )
            elif not made.count and number:  # the input ended with the part before
                found.append({"number": number, "fits": True, "warned": 0, **dict.fromkeys(Part.__annotations__, None)})
            else:
                part = made.write(Path(self.opened.job.out) / part_name(number))
                found.append({"number": number, "fits": True, "warned": made.rows.warned, **asdict(part)})
        return {name: [one[name] for one in found] for name in found[0]}


def run_on_ray(job: Job, *, track: Track | None = None, say: Callable[[str], None] = lambda text: None) -> Maps:
    """As :func:`whyformer.jobs.engines.run_job`, on Ray Data.

    Raises:
        MissingExtra: Ray is not installed. LoadError: the cluster does not answer, or actors died too often.
    """
    with ExitStack() as stack:
        run = stack.enter_context(Run(open_job(job), say))
        ray = stack.enter_context(connected(job.address, job.actors))
        while todo := list(run.todo(None) if run.opened.count is not None else _known_end(run)):
            too_large = _pass(ray, job, run, todo, track)
            if too_large is None:
                break
            run.halve(too_large)
        run.finish()
    return Maps(run.folder.path)


def _known_end(run: Run) -> list[int]:
    raise LoadError(f'engine = "ray" needs an input that says how many rows it has; {run.opened.source.name} does not')


def _pass(ray: Any, job: Job, run: Run, todo: list[int], track: Track | None) -> int | None:
    """Make the parts that are missing; the first that did not fit into memory, or None."""
    items = [{"number": number, "size": run.size(number)} for number in todo]
    rows = made_by_actors(ray, Maker, (job,), items, actors=job.actors, device=job.device)
    too_large = None
    for one in rows if track is None else track(rows, "batches", len(items)):
        if not one["fits"]:
            too_large = one["number"] if too_large is None else min(too_large, one["number"])
        elif one["file"] is not None and too_large is None:
            part = Part(**{name: one[name] for name in Part.__annotations__})
            run.monitor.part(part.rows, part.written, part.failed, one["warned"])
            run.written(part)
            run.failed += part.failed
            run.check_failures([])
    return too_large
