"""Applications: the command line, the server, the web page and the report."""

import contextlib
from collections.abc import Iterator

from whyformer.errors import InputError

INPUTS = {"image": "a picture", "text": "a text", "sound": "a sound", "both": "a text and a picture"}
DEFAULT_MODEL = {"text": "bundled:sst2"}
"""Default models by kind of input. Bundled models of pictures read digits only, so they are no defaults."""
_BUNDLED = {
    "image": "bundled:digits reads handwritten digits only",
    "both": "bundled:reader reads handwritten digits only",
    "sound": "none is bundled",
}


def model_for(kind: str, name: str | None, option: str = "--model") -> str:
    """Return the name of a model, or the default for a kind of input.

    Args:
        kind: kind of input.
        name: the user's choice.
        option: option with which a user chooses a model, for the message.

    Raises:
        InputError: the name is empty, or no model is named and there is no default.
    """
    if name is not None and not name.strip():
        raise InputError(f"{option} is an empty name: name a model, or leave {option} out")
    if name is not None or kind in DEFAULT_MODEL:
        return DEFAULT_MODEL[kind] if name is None else name
    raise InputError(
        f"there is no default model for {INPUTS[kind]} ({_BUNDLED[kind]}): name one with {option}, a folder that "
        "save_pretrained wrote or a hub id (owner/name)"
    )


def is_local(host: str) -> bool:
    """Return True if only this machine can reach a host."""
    import ipaddress  # not at the top: every command reads this file

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Let SIGTERM interrupt the main thread as Ctrl+C does; in other threads, which receive no signals, do nothing."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
