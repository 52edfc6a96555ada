"""Find the streams of a pass, their blocks, and the rows that the output reads.

A *stream* is a set of rows that attend together: the tokens of an encoder or a decoder, a text, a picture. Its *spine*
consists of the values through which all paths from its rows to its last value pass; a *block* lies between two of them.
A *state* is a value that holds each row of the stream once, such as a hidden state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from whyformer.tape.attentions import Attention, depths
from whyformer.tape.calls import Call
from whyformer.tape.members import Members, leads
from whyformer.tape.mixing import find_mixing, mixes
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows
from whyformer.tape.tables import SOFTMAXES
from whyformer.tape.units import dominators
from whyformer.tape.values import Tape

__all__ = [
    "Block",
    "Stream",
    "entry",
    "find_first_maps",
    "find_streams",
    "is_passed",
    "path_to",
    "readout",
    "spine",
]


@dataclass(frozen=True, eq=False)
class Block:
    """A block of a stream, between two values of its spine.

    Attributes:
        entry, exit: numbers of its input and output. The exit of the last block is the last sum, before a final norm;
            if norms follow the sums, it is the output of that norm. The entry is −1 if the input is learned vectors.
        attentions: the attentions of its rows, in the order of execution.
    """

    entry: int
    exit: int
    attentions: tuple[Attention, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows that attend together.

    Attributes:
        rows: ``[B, N]`` row numbers, the same tensor as in its attentions (a dictionary compares it by identity).
        names: the inputs from which its rows are computed; empty if they are learned.
        spine: numbers of the values through which all paths from its rows to its last value pass.
        blocks: the blocks with attention, in the order of execution.
        is_mixed: True if its rows are mixtures of rows that attended before, as after a layer that merges patches.
        is_learned: True if its rows begin as learned vectors that attend to other rows, such as object queries.
        is_read: True if the output depends on its last value other than through the attention of another stream.
        all_blocks: ``blocks`` together with the blocks that mix rows without attention; only ``blocks`` if the spine
            bypasses the latter.
        mixing_count: number of blocks that mix rows without attention.
    """

    rows: Tensor
    names: tuple[str, ...]
    spine: tuple[int, ...]
    blocks: tuple[Block, ...]
    is_mixed: bool = False
    is_learned: bool = False
    is_read: bool = False
    all_blocks: tuple[Block, ...] = ()
    mixing_count: int = 0

    @property
    def last(self) -> int:
        """Number of its last state, the exit of its last block."""
        return self.blocks[-1].exit

    @property
    def attends_once(self) -> bool:
        """True if the rows attend once in each block."""
        return not self.mixing_count and all(len(block.attentions) == 1 for block in self.blocks)

    @property
    def attends_to_itself(self) -> bool:
        """True if the rows attend only to themselves, once in each block."""
        return self.attends_once and all(block.attentions[0].is_self for block in self.blocks)


def spine(program: Program) -> list[int]:
    """Return the values through which all paths from the roots to the output pass, in the order of execution."""
    return path_to(program.dominator, program.output)


def is_passed(program: Program, value: int) -> bool:
    """Return True if all paths from the roots to each output pass through a value."""
    return all(value in path_to(program.dominator, n) for n in program.outputs)


def path_to(above: Mapping[int, int], n: int) -> list[int]:
    """Return the dominators of a value, through which all paths to it pass, in the order of execution, including
    itself. ``above`` maps a value to its immediate dominator."""
    path = []
    while n >= 0:
        path.append(n)
        n = above[n]
    return path[::-1]


def entry(program: Program, rows: Rows, attentions: Sequence[Attention], source: str) -> int | None:
    """Return the input of the first block: the last value before the first attention or residual sum through which all
    paths from the rows of an input to the outputs pass, if it contains each of these rows once, possibly beside other
    rows. In a program without either, it is the last such value before the first sum of two branches.

    Args:
        program: the program from the values in which the rows of the input begin to the outputs.
        rows: the rows of the pass.
        attentions: the attentions of the pass.
        source: name of the input.

    Returns:
        Number of the value; None if there is no such value.
    """
    blocks = {a.map for a in attentions if program.carry[a.map]} | _residuals(program)
    first = min(blocks or _sums(program), default=-1)
    numbers = next((f.numbers for f in rows.families if f.source == source), None)
    if numbers is None:
        return None
    members, above = Members(numbers, rows), program.dominator
    chain = path_to(above, _common_dominator(above, [n for n in program.outputs if n in above]))
    return next((n for n in reversed(chain) if n < first and members.holds_each_once(n)), None)


def find_streams(program: Program, tape: Tape, rows: Rows, attentions: Sequence[Attention]) -> list[Stream]:
    """Return the streams, in the order of their first attention.

    The part of the tape that belongs to a stream consists of the values that hold only its rows. It ends where rows of
    another stream attend to them. A model without attention has the streams of its states.
    """
    key = "streams", program.roots, program.output, tuple(a.map for a in attentions)
    return list(rows.once(key, lambda: _find_streams(program, tape, rows, attentions)))


def _find_streams(program: Program, tape: Tape, rows: Rows, attentions: Sequence[Attention]) -> list[Stream]:
    if not attentions:
        return _streams_without_attention(program, tape, rows)
    groups: dict[Tensor, list[Attention]] = defaultdict(list)  # by queries
    for a in attentions:
        if a.queries is not None:
            groups[a.queries].append(a)
    groups = _merge_groups(groups)
    single = (group[0] for group in groups.values() if len(group) == 1)
    pools = [attention for attention in single if attention.is_learned and not _enter_later(attention, groups)]
    products = {n for a in attentions if a not in pools for n in a.products}
    depth = depths(tape, products)
    streams = [_stream(program, tape, rows, group, depth) for group in groups.values() if group[0] not in pools]
    if not any(s.blocks for s in streams):
        without = _streams_without_attention(program, tape, rows)
        ends = [(s.rows, s.all_blocks[0].entry, s.all_blocks[-1].exit) for s in without]
        is_one = len(pools) == 1 and pools[0].queries is not None and pools[0].queries.shape[1] == 1
        if not is_one or any(mixes(tape, rows, *between) is not False for between in ends):
            # the attention uses a layout that is not supported, or rows are mixed without attention
            return [replace(s, mixing_count=0) for s in without or streams]
        streams = [_stream(program, tape, rows, group, depth) for group in groups.values()]
    read = _states_read(program, tape, {s.blocks[-1].exit for s in streams if s.blocks}, products)
    return [replace(s, is_read=bool(s.blocks) and s.last in read) for s in streams]


def _merge_groups(groups: Mapping[Tensor, list[Attention]]) -> dict[Tensor, list[Attention]]:
    """Merge a group of attentions into another group if its queries are a part of the rows of that group, which attends
    before and after it: in a Q-Former that reads text, only the learned queries attend to the picture."""
    joined = {queries: list(group) for queries, group in groups.items()}
    for queries, group in groups.items():
        for rows, attentions in groups.items():
            between = attentions[0].map < group[0].map and group[-1].map < attentions[-1].map
            if between and queries.shape[1] < rows.shape[1] and bool(torch.isin(queries, rows).all()):
                joined[rows] = sorted([*joined[rows], *joined.pop(queries)], key=lambda a: a.map)
                break
    return joined


def _enter_later(attention: Attention, groups: Mapping[Tensor, list[Attention]]) -> bool:
    """Return True if the queries of an attention are some of the rows of a later group, as the outputs of a picture
    projector are some of the tokens of a prompt."""
    queries = attention.queries
    assert queries is not None
    later = (rows for rows, group in groups.items() if group[0].map > attention.map)
    more = (numbers for numbers in later if queries.shape[1] < numbers.shape[1])
    return any(bool(torch.isin(queries, numbers).all()) for numbers in more)


def _streams_without_attention(program: Program, tape: Tape, rows: Rows) -> list[Stream]:
    """Return the streams of a model without attention. A block begins before each branch that mixes rows."""
    streams, line = list[Stream](), spine(program) if program.output in program.dominator else []
    for numbers in _row_sets(rows, line):
        members = Members(numbers, rows)
        chain = [n for n in line if members.is_state(n)]
        sums = _sums(program).intersection(chain[1:])
        if sums:
            states = [chain[i - 1] for i, n in enumerate(chain) if n in sums]
            last = max(sums)
            between = pairwise([*states, last])
            starts = [first for first, n in between if mixes(tape, rows, numbers, first, n)] or states
            blocks = tuple(Block(n, end, ()) for n, end in zip(starts, [*starts[1:], last], strict=True))
            names = dict.fromkeys(rows.families[f].source for f in rows.family[numbers].unique().tolist())
            through = tuple(n for n in chain if n <= last)
            streams.append(
                Stream(numbers, tuple(filter(None, names)), through, (), all_blocks=blocks, mixing_count=len(blocks))
            )
    return [*streams[:-1], *(replace(s, is_read=True) for s in streams[-1:])]


def _row_sets(rows: Rows, values: Iterable[int]) -> list[Tensor]:
    """Return the distinct sets of rows, ``[B, N]``, of some values. Values with different numbers of rows in different
    samples are left out."""
    row_sets: dict[bytes, Tensor] = {}
    for label in (labels[0] for n in values if (labels := rows.labels.get(n))):
        numbers = rows.distinct(label)
        counts = rows.sample[numbers].bincount()
        if int(counts[0]) > 1 and bool((counts == counts[0]).all()):
            ordered = numbers[rows.sample[numbers].argsort(stable=True)]
            row_sets.setdefault(ordered.numpy().tobytes(), ordered.view(len(counts), -1))
    return list(row_sets.values())


def find_first_maps(
    program: Program, tape: Tape, rows: Rows, streams: Iterable[Stream], calls: Iterable[Call]
) -> dict[int, tuple[int, ...]]:
    """Return the attention maps of learned vectors that attend to one another before they attend to any input, so that
    these maps are constants.

    Args:
        program: the program from the values in which the rows of the inputs begin.
        tape: the pass.
        rows: the rows of the pass.
        streams: the streams of the program.
        calls: the calls on which the output depends.

    Returns:
        For the first such map of each stream, {its number: sample of each entry along its first axis}.
    """
    first_maps = dict[int, tuple[int, ...]]()
    softmaxes = [c for c in calls if c.name in SOFTMAXES and not program.carry[c.results[0]]]
    for stream in (s for s in streams if s.is_learned and s.blocks):
        (b, n), first = stream.rows.shape, tape.maker[stream.blocks[0].attentions[0].product].number
        maps = [p.map for block in stream.blocks for a in block.attentions if a.is_self for p in a.pieces]
        labels = {m: label[0] for m in reversed(maps) if (label := rows.labels.get(m))}
        samples = {tape.shapes[m]: rows.sample[label].flatten(1)[:, 0] for m, label in labels.items()}
        for c in (c for c in softmaxes if c.number < first):
            shape = tape.shapes[c.results[0]]
            if shape[-2:] == (n, n) and ((len(shape) == 4 and shape[0] == b) or (len(shape) == 3 and shape in samples)):
                first_maps[c.results[0]] = tuple(range(b) if len(shape) == 4 else samples[shape].tolist())
                break
    return first_maps


def _states_read(program: Program, tape: Tape, states: set[int], products: Container[int]) -> set[int]:
    """Return the states on which the output depends other than through an attention or a later state."""
    needed = {program.output}
    for call in reversed(tape.calls):
        if any(r in needed and r not in states and r not in products for r in call.results):
            needed.update(o for o in call.operands if program.carry[o])
    return needed & states


def _stream(program: Program, tape: Tape, rows: Rows, attentions: list[Attention], depth: Sequence[int]) -> Stream:
    """Return the stream of the rows ``[B, N]`` that are the queries of some attentions. ``depth`` is the number of
    attentions before each value, see :func:`depths`."""
    queries = attentions[0].queries
    assert queries is not None
    members = Members(queries, rows)
    chain, blocks = _spine_and_blocks(program, tape, members, attentions)
    families = [rows.families[f] for f in rows.family[queries].unique().tolist()]
    names = () if attentions[0].is_learned else tuple(dict.fromkeys(f.source for f in families if f.source))
    through = chain[: chain.index(blocks[-1].exit) + 1] if blocks else chain
    if not names and not any(attentions[0] in b.attentions for b in blocks[:1]) and (blocks or len(attentions) == 1):
        # learned vectors become rows by their first attention, so no value before it is on the spine
        blocks.insert(0, Block(-1, blocks[0].entry if blocks else chain[-1], (attentions[0],)))
    mixing = _find_mixing(program, tape, members, through, {n for a in attentions for n in a.products})
    return Stream(
        rows=queries,
        names=names,
        spine=tuple(through),
        blocks=tuple(blocks),
        is_mixed=any(depth[f.value] for f in families if f.source),
        is_learned=not names,
        all_blocks=_with_mixing(blocks, mixing, through),
        mixing_count=len(mixing),
    )


def _spine_and_blocks(
    program: Program, tape: Tape, members: Members, attentions: Sequence[Attention]
) -> tuple[list[int], list[Block]]:
    """Return (the values through which all paths from the rows to the last state that is read pass, the blocks that
    begin before the attentions)."""
    carry = members.carry(program, tape)
    above = dominators(tape, carry)
    read = _values_read(program, tape, carry)
    paths = [path_to(above, n) for n in _states_before(program, members, carry, read) or read]
    chain = path_to(above, _common_dominator(above, _last_read(program, paths)))
    blocks = _blocks(program, members, chain, [_last_before(chain, a.map, above) for a in attentions], attentions)
    if any(sum(a.is_self for a in b.attentions) > 1 for b in blocks):  # a path bypasses the sums between attentions
        complete = [n for n in chain if members.holds_all_rows(n)]
        chain = members.trunk(program.makers, complete[0], complete[-1])
        starts = [_last_leading(program, chain, a.map) for a in attentions]
        blocks = _blocks(program, members, chain, starts, attentions)
    return chain, blocks


def _states_before(program: Program, members: Members, carry: Sequence[bool], values: Sequence[int]) -> list[int]:
    """Return the first states on all paths back from some values."""
    todo, visited, states = list(values), set[int](), list[int]()
    while todo:
        n = todo.pop()
        if n in visited or not carry[n]:
            continue
        visited.add(n)
        if members.is_state(n):
            states.append(n)
        else:
            todo += program.makers[n].entries if n in program.makers else ()
    return sorted(states)


def _last_read(program: Program, paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the ends of paths, without states (or norms of states) that lie on the path to a later end."""
    added = _sums(program)
    inner = {n for path in paths for n in path[:-1]}
    before = {n for path in paths for n in path[: max((i for i, n in enumerate(path) if n in added), default=0)]}
    last_sum = {path[-1]: max(added.intersection(path), default=-1) for path in paths}
    return [path[-1] for path in paths if path[-1] not in inner and last_sum[path[-1]] not in before]


def _find_mixing(program: Program, tape: Tape, members: Members, spine: Sequence[int], products: set[int]) -> list[int]:
    """Return the entries of the blocks that mix rows without attention."""
    added, complete = _sums(program), [n for n in spine if members.holds_all_rows(n)]
    start = sum(n < min(added.intersection(complete), default=-1) for n in complete)
    states = [*complete[:start][-1:], *(n for n in complete[start:] if n in added)]
    if len(states) == 2:  # a path bypasses the sums between
        states = [n for n in members.trunk(program.makers, *states) if n in added or n == states[0]]
    return find_mixing(program, tape, members, states, products)


def _with_mixing(blocks: Sequence[Block], mixing: Sequence[int], spine: Sequence[int]) -> tuple[Block, ...]:
    """Return the blocks of a stream together with those that mix its rows without attention, whose entries are
    ``mixing``."""
    if not blocks or not mixing or not all(n in spine for n in mixing):
        return tuple(blocks)
    inside = {b.entry: b.attentions for b in blocks}
    starts = sorted({*mixing, *inside}, key=lambda n: spine.index(n) if n >= 0 else n)
    ends = [*starts[1:], blocks[-1].exit]
    return tuple(Block(n, end, inside.get(n, ())) for n, end in zip(starts, ends, strict=True))


def _values_read(program: Program, tape: Tape, carry: list[bool]) -> list[int]:
    """Return the values of a stream that the rest of the tape reads, including the output."""
    returns = [False] * len(tape)  # branches whose rows are unknown, such as convolutions, that lead back to the stream
    for call in reversed(tape.calls):
        if any(carry[r] or returns[r] for r in call.results):
            for o in call.operands:
                returns[o] = returns[o] or not carry[o]
    outside = (u for u in program.units if not all(carry[r] or returns[r] for r in u.exits))
    read = [e for u in outside for e in u.entries if carry[e]]
    return [*read, program.output] if carry[program.output] else read


def _common_dominator(above: dict[int, int], values: Iterable[int]) -> int:
    """Return the last common dominator of some values; −1 if there is none."""
    chains = [path_to(above, n) for n in values]
    last = -1
    for same in zip(*chains, strict=False):
        if len(set(same)) > 1:
            break
        last = same[0]
    return last


def _blocks(
    program: Program, members: Members, chain: list[int], starts: Sequence[int], attentions: Sequence[Attention]
) -> list[Block]:
    """Cut a spine into blocks, before attentions. Self-attention and cross-attention belong to one block unless the sum
    of another branch lies between.

    Args:
        program: the program of the pass.
        members: the rows of the stream.
        chain: the spine.
        starts: for each attention, the position on the spine of the last value before it, or −1.
        attentions: the attentions.
    """
    place = {n: i for i, n in enumerate(chain)}
    states = [n for n in chain if members.holds_all_rows(n)]
    added = _sums(program)
    sums = [place[n] for n in states if n in added]
    groups: list[tuple[int, list[Attention]]] = []
    before = -1
    for start, a in sorted(zip(starts, attentions, strict=True), key=lambda pair: pair[0]):
        if start < 0 and a.map not in program.roots:
            continue
        others = sum(before < i <= start for i in sums)
        if groups and (start == before or (others < 2 and all(a.is_self != b.is_self for b in groups[-1][1]))):
            groups[-1][1].append(a)
        else:
            groups.append((start, [a]))
        before = start
    if not groups:
        return []
    after = [n for n in states if place[n] > groups[0][0]]
    last = _last_state(program, after, [n for n in after if place[n] > before] or chain[-1:])
    exits = [*(chain[start] for start, _ in groups[1:]), last]
    entries = [chain[start] if start >= 0 else -1 for start, _ in groups]
    return [Block(n, end, tuple(inside)) for n, end, (_, inside) in zip(entries, exits, groups, strict=True)]


def _last_before(chain: Sequence[int], value: int, above: Mapping[int, int]) -> int:
    """Return the position on a spine of the last value that dominates another value, or −1."""
    dominating = set(path_to(above, value) if value in above else ())
    return max((i for i, n in enumerate(chain) if n in dominating), default=-1)


def _last_leading(program: Program, chain: Sequence[int], value: int) -> int:
    """Return the position on a residual path of the last value from which a path leads to another value, or −1."""
    return next((i for i in reversed(range(len(chain))) if leads(program.makers, chain[i], value)), -1)


def _residuals(program: Program) -> set[int]:
    """Return the residual sums: sums of a value and the output of a branch computed from it."""
    sums, views = set[int](), {u.exit: u.entries[0] for u in program.units if u.kind == "view" and len(u.entries) == 1}

    def plain(n: int) -> int:
        while n in views:
            n = views[n]
        return n

    for u in program.units:
        if u.kind == "add" and len(set(u.entries)) == 2:
            a, b = (plain(e) for e in u.entries)
            if a in path_to(program.dominator, b)[:-1] or b in path_to(program.dominator, a)[:-1]:
                sums.add(u.exit)
    return sums


def _sums(program: Program) -> set[int]:
    """Return the sums of two branches, including ``torch.where`` over a sum and one of its branches."""
    sums: set[int] = set()
    for u in program.units:
        selects_sum = u.name == "where" and any(e in sums for e in u.entries)
        if len(set(u.entries)) > 1 and (u.kind == "add" or selects_sum):
            sums.add(u.exit)
    return sums


def _last_state(program: Program, inside: list[int], last: list[int]) -> int:
    """Return the exit of the last block: the last sum of two branches, or the norm after it if norms follow the sums.

    Args:
        program: the program of the pass.
        inside: the states in all blocks.
        last: the states after the entry of the last block.
    """
    norms, added = {u.exit for u in program.units if u.kind == "norm"}, _sums(program)
    sums = [i for i, n in enumerate(last) if n in added]
    if not sums:
        return last[-1]
    end = last[sums[-1]]
    after = [n for n in last[sums[-1] :] if n in norms]
    before = inside[: inside.index(end)]
    follow = any(n in norms for n in before) or (after and sum(n in added for n in before) == 0)
    return after[0] if after and follow else end


# -- readout ---------------------------------------------------------------------------------------------------------
def readout(rows: Rows, queries: Tensor, state: int, gradient: Tensor) -> Tensor:
    """Return ``[B, N]``, how much a target depends on each row of a state: the norms of its gradient, scaled to the
    sum 1.

    Args:
        rows: the rows of the pass.
        queries: ``[B, N]`` rows of a stream.
        state: number of the last state of the stream.
        gradient: gradient of the target with respect to that state.
    """
    norms = rows.sums(state, gradient.abs().square()).sqrt()[queries.to(gradient.device)]
    total = norms.sum(1, keepdim=True)
    return torch.where(total > 0, norms / torch.where(total > 0, total, 1), 0)
