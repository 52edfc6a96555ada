"""``run_job``: a job on the engine that it names."""

from __future__ import annotations

from collections.abc import Callable

from whyformer.jobs.description import Job
from whyformer.jobs.local import Track, explain_opened, open_job
from whyformer.jobs.ray import run_on_ray
from whyformer.jobs.reading import Maps


def run_job(job: Job, *, track: Track | None = None, say: Callable[[str], None] = lambda text: None) -> Maps:
    """Run a job, or go on with it where an earlier run stopped, and return the reader of what was written.

    Args:
        job: see :class:`~whyformer.jobs.description.Job`.
        track: (iterable, description, total) -> iterable, a progress bar around the parts.
        say: told what goes on.

    Raises:
        WhyformerError: the job is wrong, ``out`` holds another one, too many rows failed, or the disk is full.
    """
    if job.engine == "ray":
        return run_on_ray(job, track=track, say=say)
    return explain_opened(open_job(job), track, say)
