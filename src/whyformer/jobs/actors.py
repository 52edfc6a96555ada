"""Work on a Ray cluster: actors that each hold a model make pieces, and this process is given what came of them.

A piece is a function of its description, so that it does not matter that Ray makes one again when an actor dies in the
middle of it: at most :data:`RETRIES` times.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from whyformer.errors import InputError, LoadError
from whyformer.jobs.rows import needed

ENGINES = ("local", "ray")
RETRIES = 100
"""How often an actor may die before the work is given up."""


def check_engine(engine: Any, address: Any, actors: Any, workers: Any) -> None:
    """Refuse an engine that there is not.

    Raises:
        InputError: with what it may be.
    """
    if engine not in ENGINES:
        raise InputError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if not isinstance(address, str | None):
        raise InputError(f"address must be a text, not {address!r}")
    for name, value in {"actors": actors, "workers": workers}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


@contextmanager
def connected(address: str | None, actors: int) -> Iterator[Any]:
    """Ray, connected to a cluster, or to one that is started here; ended afterwards unless it was there before.

    Raises:
        MissingExtra: Ray is not installed. LoadError: the cluster does not answer.
    """
    ray = needed("ray", 'engine = "ray"')
    needed("ray.data", 'engine = "ray"')
    if ray.is_initialized():
        yield ray
        return
    try:
        # a CPU more than actors take: the tasks that carry the pieces need one
        own = {} if address else {"num_cpus": actors + 1, "include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LoadError(f"the Ray cluster {address or 'of this machine'} does not answer: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def made_by_actors(
    ray: Any, actor: type, given: tuple[Any, ...], pieces: Sequence[dict[str, Any]], *, actors: int, device: str | None
) -> Generator[dict[str, Any], None, None]:
    """What actors make of pieces, in their order; Ray holds back those that would wait for this process.

    Close the iterator (:func:`contextlib.closing`) before the connection ends: Ray waits for ever for actors of a
    cluster that is gone.

    Args:
        actor: called with ``given`` once, and then with columns of some pieces; gives columns of what came of them.
        pieces: rows of plain values.
        actors: at most so many, as many as there is work for; each takes a GPU if ``device`` is one.

    Raises:
        LoadError: an actor failed, or died too often.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    gpus = 1 if (device or "").startswith("cuda") else 0
    made = ray.data.from_items(list(pieces), override_num_blocks=len(pieces)).map_batches(
        actor, fn_constructor_args=given, batch_size=1, num_cpus=0 if gpus else 1, num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors), max_restarts=RETRIES, max_task_retries=RETRIES,
    )  # fmt: skip
    try:
        yield from made.iter_rows()
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"an actor of the Ray cluster failed: {said[-1]}") from error
