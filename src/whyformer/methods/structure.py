"""What a recorded pass shows of a model: its sequences of rows, their blocks, and which of them attend to which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from whyformer.methods.attended import (
    Key,
    MapPass,
    NamedAttention,
    has_one_resolution,
)
from whyformer.tape.streams import Stream

__all__ = ["MERGED", "NOT_YET", "UNREAD", "UNSEEN", "Structure"]

NOT_YET = "is not supported yet"
UNSEEN = "no attention was seen in its forward pass"
UNREAD = "the output of its last block is unknown or does not reach the logits"
MERGED = "its attention works in windows or at several resolutions, so there is no map over all tokens"


@dataclass(frozen=True, eq=False)
class Structure:
    """The sequences of a pass.

    Attributes:
        passed: the pass.
        main: name of the main input.
        sources: names of all inputs that get scores.
    """

    passed: MapPass
    main: str
    sources: tuple[str, ...]

    @property
    def attentions(self) -> Mapping[int, NamedAttention]:
        """The attentions in blocks, by number."""
        return self.passed.named

    @property
    def merges(self) -> bool:
        """True if rows attend, are merged, and attend again."""
        return not has_one_resolution(self.passed.layout)

    @property
    def attends(self) -> bool:
        """True if there is an attention on the way to the target."""
        return bool(self.passed.layout.attentions)

    @cached_property
    def streams(self) -> list[Stream]:
        """The sequences that have blocks."""
        return [stream for stream in self.passed.layout.streams if stream.all_blocks]

    @property
    def ends(self) -> Mapping[Key, Stream]:
        """Name of rows -> the sequence, for those that the target reads."""
        return self.passed.ends

    @property
    def layers(self) -> int:
        """The number of blocks of the sequence that the target reads; of several, the largest."""
        return max((len(stream.blocks) for stream in self.ends.values()), default=0)

    @cached_property
    def is_plain(self) -> bool:
        """True if there is one input, whose rows attend once in each block to rows that are made of it alone; or no
        attention at all."""
        if not self.attends:
            return True
        sources = self.passed.sources_of
        names = {name for a in self.passed.layout.attentions for side in (a.queries, a.keys) for name in sources(side)}
        return names <= {self.main} and len(self.sources) == 1 and all(s.attends_once for s in self.streams)

    def alone(self, name: str) -> Key | None:
        """Return the name of the rows that hold an input and are read out, if these look at themselves only, once in
        each of their blocks."""
        found = [key for key, stream in self.ends.items() if name in key and stream.attends_to_itself]
        return found[0] if len(found) == 1 else None

    @property
    def reached(self) -> set[Key]:
        """Names of the rows from which attention leads to the target."""
        found = set(self.ends)
        for number, attention in reversed(list(self.attentions.items())):
            found.update(learned for stream, learned, _ in self.passed.copies if stream in found)
            if attention.queries in found:
                found.update(self.passed.looked_at[number])
        return found

    def elements_of(self, name: str) -> Tensor | None:
        """Return ``[B, M]``, which element of an input each of its rows stands for, −1 for none; None if they are not
        looked up by ids."""
        rows, source = self.passed.layout.rows, self.passed.source_of(name)
        return next((f.elements for f in rows.families if f.source == source and f.elements is not None), None)

    @cached_property
    def without_maps(self) -> tuple[str, str] | None:
        """Why the maps of all attentions are not known: (the reason, what it means for a method); None if they are."""
        layout = self.passed.layout
        if not layout.is_whole:
            return "it looks its tokens up in two tables, and attention of the second one is not followed", NOT_YET
        if not layout.attentions:
            return UNSEEN, "has no meaning"
        mixed = next((s for s in self.streams if s.others and s.is_read), None)
        if mixed is not None:
            attending = sum(bool(block.attentions) for block in mixed.blocks)
            count = attending + mixed.others
            said = f"only {attending} of its {count} blocks attend, the others mix tokens in ways without a map"
            return said, "has no meaning"
        if not self.passed.is_complete:
            return "which rows look at which is unknown in one of its attentions", NOT_YET
        return None if self.ends else (UNREAD, NOT_YET)
