"""Long timeouts for all HTTP clients in the tests, also those of gradio: httpx's default of five seconds is too short for a busy machine."""

import httpx

from waiting import HANG

# the default of all functions and clients of httpx
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, HANG)
