"""Computation on a Ray cluster: actors that each hold a model process pieces and return the results to this process.

The result of a piece depends on its description alone, so Ray may repeat a piece whose actor died, at most
:data:`RETRIES` times.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from whyformer.errors import InputError, LoadError, import_optional

RETRIES = 100
"""Number of times that an actor may die before the computation fails."""


def check_engine(engine: str, address: str | None, actors: int) -> None:
    """Raise InputError for settings of a cluster without one."""
    if engine != "ray" and (address is not None or actors != 1):
        name = "actors" if address is None else "address"
        raise InputError(f'{name} is a setting of engine = "ray" (--engine ray): set this engine, or leave {name} out')


@contextmanager
def connected(address: str | None, actors: int) -> Iterator[Any]:
    """Connect to a Ray cluster, or start one on this machine, and yield Ray; an existing connection is reused.

    A new connection is closed at the end.

    Raises:
        MissingExtra: Ray is not installed.
        LoadError: the cluster does not answer.
    """
    ray = import_optional("ray", 'engine = "ray"', "ray")
    import_optional("ray.data", 'engine = "ray"', "ray")
    if ray.is_initialized():
        yield ray
        return
    try:
        # one CPU in addition to those of the actors, for the tasks that transfer pieces
        settings = {} if address else {"num_cpus": actors + 1, "include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level="error", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LoadError(f"the Ray cluster {address or 'of this machine'} does not answer: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def actor_results(
    ray: Any, actor: type, values: tuple[Any, ...], pieces: Sequence[dict[str, Any]], *, actors: int, device: str | None
) -> Generator[dict[str, Any], None, None]:
    """Yield the results of actors for pieces, in order; Ray limits the number of results that wait for this process.

    Close the generator (:func:`contextlib.closing`) before the connection: Ray waits forever for actors of a closed
    cluster.

    Args:
        ray: the connected Ray, see :func:`connected`.
        actor: class that is created with the arguments ``values``, and called with a piece to return its result.
        values: arguments of the constructor of ``actor``.
        pieces: pieces, as mappings of plain values; so are results.
        actors: largest number of actors.
        device: device of the model; each actor takes a GPU if it is "cuda".

    Raises:
        LoadError: an actor failed, or died too often.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    gpus = 1 if (device or "").startswith("cuda") else 0
    results = ray.data.from_items(list(pieces), override_num_blocks=len(pieces)).map(
        actor, fn_constructor_args=values, num_cpus=0 if gpus else 1, num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors), max_restarts=RETRIES, max_task_retries=RETRIES,
    )  # fmt: skip
    try:
        yield from results.iter_rows()
    except ray.exceptions.RayError as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"an actor of the Ray cluster failed: {message[-1]}") from error
