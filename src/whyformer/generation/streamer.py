"""Report the text so far to a caller while a model generates, who may stop the generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


class Streamer:
    """A streamer for ``generate`` of transformers.

    Args:
        track: a function (iterable, description, total) -> iterable. Its items are the text so far, without special
            tokens; an exception that it raises ends the generation.
        tokenizer: decodes the tokens; without one the items are empty.
        count: largest number of tokens.
    """

    def __init__(self, track: Callable[..., Iterable[Any]], tokenizer: Any, count: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] | None = None
        self.steps = iter(track(self._texts(), "writing", count))

    def _texts(self) -> Iterator[str]:
        while True:
            tokens = self.tokens or []
            yield "" if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def put(self, tokens: Tensor) -> None:
        """Receive the prompt, and then each token."""
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens += tokens.flatten().tolist()
        next(self.steps, None)

    def end(self) -> None:
        """Finish the progress bar."""
        if hasattr(self.steps, "close"):
            self.steps.close()
