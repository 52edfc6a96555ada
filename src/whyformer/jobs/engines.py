"""``run_job``: run a job on its engine."""

from __future__ import annotations

from collections.abc import Callable

from whyformer.jobs.description import Job
from whyformer.jobs.local import Track, explain_opened, open_job
from whyformer.jobs.ray import run_on_ray
from whyformer.jobs.reading import Maps


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
