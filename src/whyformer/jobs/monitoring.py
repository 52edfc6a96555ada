"""What a run says of itself while it works: lines of JSON in ``log.jsonl``, and figures for Prometheus on request."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import Any

from whyformer.errors import InputError
from whyformer.jobs.folder import Folder
from whyformer.jobs.manifest import LOG
from whyformer.jobs.rows import needed


class Monitor(ExitStack):
    """The log of a run, and its figures.

    Args:
        folder: the job's, where ``log.jsonl`` lies; a run adds to it.
        port: serve ``/metrics`` there, on this machine alone; needs ``whyformer[serve]``.
        total: rows of the job, where that is known.
    """

    def __init__(self, folder: Folder, port: int | None = None, total: int | None = None) -> None:
        super().__init__()
        self.total, self.done, self._start, self._before = total, 0, time.monotonic(), 0
        self._file = self.enter_context((folder.path / LOG).open("a", encoding="utf-8"))
        self._job = folder.job
        self._figures: dict[str, Any] = {}
        if port is not None:
            try:
                self._serve(port)
            except BaseException:
                self.close()
                raise

    def log(self, event: str, **facts: Any) -> None:
        """One line: when, which process, what happened, and how fast it goes."""
        who = {"job": self._job, "time": round(time.time(), 3), "pid": os.getpid()}
        line = {**who, "event": event, **facts, **self.rate()}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def begin(self, there: int) -> None:
        """Work begins; so many rows are there from an earlier run."""
        self.done = self._before = there
        self._start = time.monotonic()
        self.log("started", there=there, total=self.total)

    def rate(self) -> dict[str, Any]:
        """Rows a second of this run, and the seconds that are left at this rate."""
        made, passed = self.done - self._before, time.monotonic() - self._start
        if made <= 0 or passed <= 0:
            return {}
        speed = made / passed
        left = {} if self.total is None else {"seconds_left": float(f"{max(0, self.total - self.done) / speed:.3g}")}
        return {"rows_per_second": round(speed, 3), **left}

    def part(self, count: int, explanations: int, failures: int, warned: int) -> None:
        """So many rows of the input were handled, and what came of them; ``warned``: explanations with warnings."""
        self.done += count
        if not self._figures:
            return
        self._figures["rows"].inc(count)
        self._figures["explanations"].inc(explanations)
        self._figures["failures"].inc(failures)
        self._figures["warnings"].inc(warned)
        self._figures["rate"].set(self.rate().get("rows_per_second", 0))
        if self.total is not None:
            self._figures["left"].set(max(0, self.total - self.done))

    def _serve(self, port: int) -> None:
        client = needed("prometheus_client", "metrics_port")
        registry = client.CollectorRegistry()

        def made(kind: Any, name: str, what: str) -> Any:
            return kind(f"whyformer_{name}", what, registry=registry)

        self._figures = {
            "rows": made(client.Counter, "rows", "rows of the input that were handled"),
            "explanations": made(client.Counter, "explanations", "explanations made"),
            "failures": made(client.Counter, "failures", "rows, or methods of a row, that failed"),
            "warnings": made(client.Counter, "warnings", "explanations with warnings"),
            "rate": made(client.Gauge, "rows_per_second", "rows a second since this run began"),
            "left": made(client.Gauge, "rows_left", "rows that are still to do"),
        }
        try:
            server, thread = client.start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise InputError(f"metrics_port {port} cannot be listened to: {error.strerror or error}") from error
        self.callback(thread.join)
        self.callback(server.server_close)
        self.callback(server.shutdown)
