"""Limits of the server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from whyformer.errors import InputError


@dataclass(frozen=True)
class Limits:
    """Limits of requests; a request beyond one of them is refused with 413, 429 or 504.

    Attributes:
        size: bytes of a request.
        pixels: pixels of a picture.
        characters: characters of a text.
        setting: the largest number that a setting may be (steps, samples), unless its default is larger.
        queue: requests that may wait.
        seconds: time from the arrival of a request to its answer.
        grace: seconds in which accepted requests may finish when the server ends.
        batch: requests explained at once.
        wait: seconds that the first request of a batch waits for others.
    """

    size: int = 16 * 2**20
    pixels: int = 24_000_000
    characters: int = 20_000
    setting: int = 1000
    queue: int = 128
    seconds: float = 60.0
    grace: float = 30.0
    batch: int = 16
    wait: float = 0.005

    def __post_init__(self) -> None:
        for field in fields(self):
            if not (value := getattr(self, field.name)) > 0:
                raise InputError(f"{field.name} must be greater than 0, not {value!r}")
