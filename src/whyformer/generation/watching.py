"""A caller's progress while a model writes: it is told the text so far, and may end the writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


class Watched:
    """What ``generate`` of transformers hands its tokens to, as it does to its streamers.

    Args:
        track: a function (iterable, description, total) -> iterable; its items are the text so far, without special
            tokens, and what it raises ends the writing.
        tokenizer: what makes text of tokens; None for none.
        count: the most tokens.
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
        """The prompt, and then each token."""
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens += tokens.flatten().tolist()
        next(self.steps, None)

    def end(self) -> None:
        """There is no more: a bar goes."""
        if hasattr(self.steps, "close"):
            self.steps.close()
