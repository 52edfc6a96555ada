"""How much the server takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from whyformer.errors import InputError


@dataclass(frozen=True)
class Limits:
    """The most that is taken from a client; what is beyond it is refused with 413, 429 or 504.

    Attributes:
        size: bytes of a request; pixels: of a picture; characters: of a text.
        setting: the largest number that a setting may be (steps, samples).
        queue: requests that may wait; further ones are refused.
        seconds: from a request's arrival to its answer.
        grace: seconds that accepted requests may take to finish when the server ends.
        batch: requests explained at once; wait: seconds that the first of them waits for others.
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

    @property
    def connections(self) -> int:
        """The most at once, idle ones too: four times the requests that wait or are explained."""
        return 4 * (self.queue + self.batch)

    def __post_init__(self) -> None:
        for one in fields(self):
            if not getattr(self, one.name) > 0:
                raise InputError(f"{one.name} must be more than 0, not {getattr(self, one.name)!r}")
