"""Monitoring of a run: JSON lines in ``log.jsonl``, and optional metrics for Prometheus."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from whyformer.errors import InputError, import_optional
from whyformer.jobs import lines
from whyformer.jobs.folder import Folder
from whyformer.jobs.manifest import LOG, Part


class Monitor(ExitStack):
    """The log and the metrics of a run.

    Args:
        folder: output folder of the job; a run appends to its ``log.jsonl``.
        port: port of this machine at which to serve ``/metrics``; needs ``whyformer[serve]``.
        total: number of rows of the job, if known.
    """

    def __init__(self, folder: Folder, port: int | None = None, total: int | None = None) -> None:
        super().__init__()
        self.total, self.done, self._start, self._before = total, 0, time.monotonic(), 0
        path = folder.path / LOG
        truncated = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # the process was killed
        self._file = self.enter_context(path.open("ab"))
        self._file.write(b"\n" * truncated)
        self._job = folder.job
        self._figures: dict[str, Any] = {}
        if port is not None:
            try:
                self._serve(port)
            except BaseException:
                self.close()
                raise

    def log(self, event: str, **facts: Any) -> None:
        """Write a line with the time, the process, the event and the rate."""
        who = {"job": self._job, "time": round(time.time(), 3), "pid": os.getpid()}
        self._file.write(lines.encoded({**who, "event": event, **facts, **self.rate()}))
        self._file.flush()

    def begin(self, finished: int) -> None:
        """Log the start of the run, with the number of rows finished by earlier runs."""
        self.done = self._before = finished
        self._start = time.monotonic()
        self.log("started", there=finished, total=self.total)

    def rate(self) -> dict[str, Any]:
        """Return the rows per second of this run, and the remaining seconds at this rate."""
        finished, elapsed = self.done - self._before, time.monotonic() - self._start
        if finished <= 0 or elapsed <= 0:
            return {}
        speed = finished / elapsed
        rate = {"rows_per_second": round(speed, 3)}
        if self.total is not None:
            rate["seconds_left"] = float(f"{max(0, self.total - self.done) / speed:.3g}")
        return rate

    def part(self, part: Part, warned: int) -> None:
        """Count and log a finished part, with its number of explanations with warnings."""
        self.done += part.rows
        self.log("part", **asdict(part))
        if not self._figures:
            return
        self._figures["rows"].inc(part.rows)
        self._figures["explanations"].inc(part.written)
        self._figures["failures"].inc(part.failed)
        self._figures["warnings"].inc(warned)
        self._figures["rate"].set(self.rate().get("rows_per_second", 0))
        if self.total is not None:
            self._figures["left"].set(max(0, self.total - self.done))

    def _serve(self, port: int) -> None:
        client = import_optional("prometheus_client", "metrics_port", "serve")
        registry = client.CollectorRegistry()

        def metric(kind: Any, name: str, description: str) -> Any:
            return kind(f"whyformer_{name}", description, registry=registry)

        self._figures = {
            "rows": metric(client.Counter, "rows", "processed rows of the input"),
            "explanations": metric(client.Counter, "explanations", "computed explanations"),
            "failures": metric(client.Counter, "failures", "rows, or methods of a row, that failed"),
            "warnings": metric(client.Counter, "warnings", "explanations with warnings"),
            "rate": metric(client.Gauge, "rows_per_second", "rows per second since the start of this run"),
            "left": metric(client.Gauge, "rows_left", "remaining rows"),
        }
        try:
            server, thread = client.start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise InputError(f"cannot listen at metrics_port {port}: {error.strerror or error}") from error
        self.callback(thread.join)
        self.callback(server.server_close)
        self.callback(server.shutdown)
