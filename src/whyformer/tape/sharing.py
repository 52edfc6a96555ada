"""Streams that share rows: rows of one that enter another, and keys that are rows of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from whyformer.tape.rows import Rows
from whyformer.tape.streams import Stream
from whyformer.tape.structure import Attention

__all__ = ["find_copies", "same_rows", "split_keys"]


def find_copies(
    rows: Rows, attentions: Iterable[Attention], streams: Iterable[Stream]
) -> list[tuple[Stream, Stream, Tensor]]:
    """Return the streams that rows of learned vectors enter, as those of a Q-Former enter a prompt.

    Args:
        rows: of the pass.
        attentions: all attentions of the pass.
        streams: all streams of the pass.

    Returns:
        (the stream, the one that the rows come from, ``[B, N, M]`` True where a row of the first is one of the
        second) of each pair.
    """
    attending, products = [s for s in streams if s.blocks], {p.product for a in attentions for p in a.pieces}
    found = []
    for stream, before in ((s, t) for s in attending for t in attending if t.last < s.last and _are_alike(s, t)):
        same = same_rows(stream.rows, before.rows)
        families = [rows.families[f] for f in set(rows.family[stream.rows[same.any(2)]].tolist())]
        if families and all(not family.source or family.value in products for family in families):
            found.append((stream, before, same))
    return found


def split_keys(
    attention: Attention, queries: Stream, streams: Sequence[Stream]
) -> tuple[list[tuple[Stream, Tensor]], Tensor]:
    """Return the streams that the keys of an attention are rows of, where they are rows of several: the stream of the
    queries, and streams that end before the attention, the last one first.

    Args:
        attention: of known queries and keys.
        queries: the stream of its queries.
        streams: all streams.

    Returns:
        (stream, ``[B, K, N]`` True where a key is a row of the stream) of each, none if the keys are all rows of one
        stream; and ``[B, K]`` True at the other keys.
    """
    assert attention.keys is not None
    found, rest = list[tuple[Stream, Tensor]](), attention.keys
    attending = [s for s in streams if s.blocks]
    if not any(s.rows is attention.keys for s in attending):
        before = [s for s in attending if s is not queries and s.last < attention.map and _are_alike(s, queries)]
        for stream in (queries, *reversed(before)):
            same = same_rows(rest, stream.rows)
            if bool(same.any()):
                found.append((stream, same))
                rest = rest.masked_fill(same.any(2), 0)
    return found, rest > 0


def _are_alike(first: Stream, second: Stream) -> bool:
    """Return True if two streams have rows of as many samples, which texts that pictures are compared with have not."""
    return len(first.rows) == len(second.rows)


def same_rows(first: Tensor, second: Tensor) -> Tensor:
    """Return ``[B, N, M]``, True where a row of ``[B, N]`` is one of ``[B, M]``; 0 is no row."""
    return (first[:, :, None] == second[:, None, :]) & (first > 0)[:, :, None]
