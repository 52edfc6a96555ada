"""HTTP clients of the tests, gradio's too, wait for a busy machine: httpx would give up after five seconds."""

import httpx

from waiting import HANG

# the one object that all functions and clients of httpx have as their default
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, HANG)
