"""``run_job``: run a job on its engine, this process or Ray.

On Ray, actors that each hold the model compute the parts, and this process writes the manifest.
Each actor writes its parts under their final names. A part that is computed twice has the same bytes, so Ray may
repeat a task whose actor died. All machines must see ``out`` and the input under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whyformer.jobs.actors import actor_results, connected
from whyformer.jobs.description import Job
from whyformer.jobs.local import Run, explain_opened, make_part, open_job
from whyformer.jobs.manifest import read_part
from whyformer.jobs.reading import Maps
from whyformer.progress import Track, tracking


def run_job(job: Job, *, track: Track | None = None, say: Callable[[str], None] = lambda text: None) -> Maps:
    """Run a job, or resume it, and return a reader of its output.

    Args:
        job: the job.
        track: (iterable, description, total) -> iterable, a progress bar around the parts.
        say: called with messages about the progress.

    Raises:
        WhyformerError: the job is invalid, ``out`` contains another job, too many rows failed, or the disk is full.
    """
    if job.engine == "ray":
        return run_on_ray(job, track=track, say=say)
    return explain_opened(open_job(job), track, say)


class PartActor:
    """An actor that loads the model once and computes parts one after another."""

    def __init__(self, job: Job) -> None:
        self.opened = open_job(job)

    def __call__(self, item: Mapping[str, int]) -> dict[str, Any]:
        """Compute the part ``number`` in batches of ``size``, and return a record of it.

        ``part`` is the entry of the part as JSON. It is empty if a batch did not fit into memory, and if the
        input ended with the previous part.
        """
        explained = make_part(self.opened, item["number"], item["size"])
        record = {"number": item["number"], "fits": explained is not None, "warned": 0, "part": ""}
        if explained is None or (not explained.facts.rows and item["number"]):
            return record
        part = explained.write(Path(self.opened.job.out))
        return {**record, "warned": explained.rows.warned, "part": json.dumps(asdict(part))}


def run_on_ray(job: Job, *, track: Track | None = None, say: Callable[[str], None] = lambda text: None) -> Maps:
    """Run a job (see :func:`run_job`) on Ray Data.

    Raises:
        MissingExtra: Ray is not installed.
        LoadError: the cluster does not answer, or actors died too often.
    """
    with Run(open_job(job), say) as run, connected(job.address, job.actors) as ray:
        while todo := list(run.todo(None)):  # finite: an input with a name has a known number of rows
            too_large = _compute_missing(ray, job, run, todo, track)
            if too_large is None:
                break
            run.halve(too_large)
        run.finish()
    return Maps(run.folder.path)


def _compute_missing(ray: Any, job: Job, run: Run, todo: list[int], track: Track | None) -> int | None:
    """Compute the missing parts; return the number of the first that did not fit into memory, or None."""
    device = None if job.options.device is None else str(job.options.device)
    items = [{"number": number, "size": run.size(number)} for number in todo]
    with closing(actor_results(ray, PartActor, (job,), items, actors=job.actors, device=device)) as records:
        return record_parts(run, tracking(track or False)(records, "parts", len(items)))


def record_parts(run: Run, records: Iterable[Mapping[str, Any]]) -> int | None:
    """Record the parts of the actors; return the number of the first that did not fit into memory, or None."""
    too_large = []
    for record in records:
        if not record["fits"]:
            too_large.append(record["number"])
        elif record["part"]:
            run.add(read_part(json.loads(record["part"])), record["warned"])
            run.check_failures()
    return min(too_large, default=None)
