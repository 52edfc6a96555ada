"""Find streams that share rows, and keys that belong to several streams."""

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
    """Return pairs of streams that share rows of learned vectors: the second stream creates them, and the first reads
    them, as a prompt contains the outputs of a Q-Former.

    Args:
        rows: the rows of the pass.
        attentions: all attentions of the pass.
        streams: all streams of the pass.

    Returns:
        For each pair, (first stream, second stream, ``[B, N, M]``, True where a row of the first is a row of the
        second).
    """
    attending, products = [s for s in streams if s.blocks], {p.product for a in attentions for p in a.pieces}
    matches = []
    for stream, before in ((s, t) for s in attending for t in attending if t.last < s.last and _are_alike(s, t)):
        same = same_rows(stream.rows, before.rows)
        families = [rows.families[f] for f in set(rows.family[stream.rows[same.any(2)]].tolist())]
        if families and all(not family.source or family.value in products for family in families):
            matches.append((stream, before, same))
    return matches


def split_keys(
    attention: Attention, queries: Stream, streams: Sequence[Stream]
) -> tuple[list[tuple[Stream, Tensor]], Tensor]:
    """Assign the keys of an attention to streams, if they belong to several: the stream of the queries, and streams
    that end before the attention, the latest first.

    Args:
        attention: an attention whose queries and keys are known.
        queries: the stream of its queries.
        streams: all streams.

    Returns:
        A list of (stream, ``[B, K, N]``, True where a key is a row of the stream), empty if all keys belong to one
        stream; and ``[B, K]``, True at keys that belong to none of the listed streams.
    """
    assert attention.keys is not None
    matches, rest = list[tuple[Stream, Tensor]](), attention.keys
    attending = [s for s in streams if s.blocks]
    if not any(s.rows is attention.keys for s in attending):
        before = [s for s in attending if s is not queries and s.last < attention.map and _are_alike(s, queries)]
        for stream in (queries, *reversed(before)):
            same = same_rows(rest, stream.rows)
            if bool(same.any()):
                matches.append((stream, same))
                rest = rest.masked_fill(same.any(2), 0)
    return matches, rest > 0


def _are_alike(first: Stream, second: Stream) -> bool:
    """Return True if two streams have the same number of samples; texts that are compared with pictures may differ."""
    return len(first.rows) == len(second.rows)


def same_rows(first: Tensor, second: Tensor) -> Tensor:
    """Return ``[B, N, M]``, True where a row of ``[B, N]`` equals a row of ``[B, M]``; 0 is no row."""
    return (first[:, :, None] == second[:, None, :]) & (first > 0)[:, :, None]
