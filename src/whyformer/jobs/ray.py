"""The same job on a Ray cluster: actors that each hold the model make the parts, and this process keeps the journal.

A part is written under its own name by whichever actor has it; made twice, it has the same bytes. So it does not
matter that Ray runs a task again when an actor dies in the middle of one. All machines see ``out`` and the input under
the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from whyformer.errors import LoadError
from whyformer.jobs.actors import connected, made_by_actors
from whyformer.jobs.description import Job
from whyformer.jobs.local import Run, Track, make_part, open_job
from whyformer.jobs.manifest import read_part
from whyformer.jobs.reading import Maps


class Maker:
    """An actor: the model, loaded once, and the input; makes one part after another."""

    def __init__(self, job: Job) -> None:
        self.opened = open_job(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Columns of what came of each part of a batch.

        ``part`` is what the journal says of the part, as JSON; empty where the batches did not fit into memory, and
        where the input ended with the part before.
        """
        made = [self._made(*one) for one in zip(batch["number"].tolist(), batch["size"].tolist(), strict=True)]
        return {name: [one[name] for one in made] for name in made[0]}

    def _made(self, number: int, size: int) -> dict[str, Any]:
        made = make_part(self.opened, number, size)
        record = {"number": number, "fits": made is not None, "warned": 0, "part": ""}
        if made is None or (not made.count and number):
            return record
        part = made.write(self.opened)
        return {**record, "warned": made.rows.warned, "part": json.dumps(asdict(part))}


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
    device = None if job.options.device is None else str(job.options.device)
    items = [{"number": number, "size": run.size(number)} for number in todo]
    with closing(made_by_actors(ray, Maker, (job,), items, actors=job.actors, device=device)) as records:
        return noted(run, records if track is None else track(records, "parts", len(items)))


def noted(run: Run, records: Iterable[Mapping[str, Any]]) -> int | None:
    """Note the parts that actors wrote; the number of the first that did not fit into memory, or None."""
    too_large = None
    for one in records:
        if not one["fits"]:
            too_large = one["number"] if too_large is None else min(too_large, one["number"])
        elif one["part"] and too_large is None:
            part = read_part(json.loads(one["part"]))
            run.monitor.part(part.rows, part.written, part.failed, one["warned"])
            run.written(part)
            run.failed += part.failed
            run.check_failures([])
    return too_large
