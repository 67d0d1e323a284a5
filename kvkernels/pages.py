"""Group tables: which physical slot holds which 128-token group of which sequence (pure integers).

Layers with the same window, sink, kind of body and tail are one *page class*: they seal and free
the same groups at the same time, so one table serves all of them and host work is done once per
step, not once per layer. A class owns pools of physical pages: slots (sealed records, or tiles of a
standard type), blocks (exact fp16 rows of sinks, previous and open group of records) and rings (the
precision tail). Pages are reference counted, so a fork shares them and copies one only when it
writes (C6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels import tail
from kvkernels.calls import GroupWrite, SeqView, TailView, TailWrite, Tile
from kvkernels.op import LayerSpec, first_without, oldest_key
from kvkernels.pools import PagePool, Taking
from kvkernels.records.layout import GROUP
from kvkernels.storage import Body, Pages, Storage
from kvkernels.tail import Degradation, RingState

Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageRules:
    """What layers must have in common to share group tables."""

    window: int | None
    window_kind: str
    sink_tokens: int
    body: Body
    tail_rows: int
    reserve: int

    @classmethod
    def of(cls, spec: LayerSpec, storage: Storage) -> PageRules:
        """The rules of a planned layer."""
        return cls(
            spec.window,
            spec.window_kind,
            spec.sink_tokens if storage.body is Body.RECORDS else 0,
            storage.body,
            storage.tail_rows,
            storage.reserve if storage.tail_rows else 0,
        )

    @property
    def ring_rows(self) -> int:
        """Rows of one ring: N + R (T8)."""
        return self.tail_rows + self.reserve

    def capacity(self, *, n_ctx: int, n_ubatch: int, n_seq: int) -> Pages:
        """Pages that never run out within these limits.

        Blocks: sinks, previous and open group, one new group per sequence in a step, and one more
        for each sequence whose step crosses two group boundaries, which takes at least 130 rows.
        Where n_ctx is too short for all of these, forks that write in one step still need the page
        they shared besides a copy each: one more for every two sequences; so do open tiles.
        """
        rings = n_seq if self.tail_rows else 0
        if self.body is Body.NONE:
            return Pages(0, 0, rings)
        groups = -(-n_ctx // GROUP)
        tiles = self.body is Body.TILES
        full = groups if tiles else max(0, n_ctx // GROUP - self.sink_tokens // GROUP)
        slots = n_seq * full
        if self.window is not None:
            kept = -(-(self.window + 2 * GROUP - 1) // GROUP) + 1
            slots = min(slots, n_seq * (kept + 1 + tiles) + n_ubatch // GROUP)
        if tiles:
            return Pages(slots + n_seq // 2, 0, rings)
        per_seq = self.sink_tokens // GROUP + 3
        shared = n_seq // 2 if groups < per_seq else 0
        crossing = min(n_seq, n_ubatch // (GROUP + 2))
        return Pages(slots, n_seq * min(per_seq, groups) + shared + crossing, rings)


@dataclass(frozen=True, slots=True)
class SeqPages:
    """Pages of one sequence in one class: immutable, replaced whole.

    ``table[g]`` is the slot of group g, -1 where there is none (sink, freed); it ends at the last
    sealed group, or with tiles at the open one. ``blocks[g]`` is the exact block of group g. Groups
    below ``first`` were freed (windowed classes).
    """

    table: Table = field(default_factory=lambda: np.empty(0, np.int32))
    blocks: Mapping[int, int] = field(default_factory=dict)
    first: int = 0
    ring: RingState | None = None

    def slots(self) -> list[int]:
        """Slots held."""
        return [int(s) for s in self.table[self.first :] if s >= 0]


@dataclass(slots=True)
class Writes:
    """What one commit writes in one class."""

    groups: list[GroupWrite] = field(default_factory=list)
    tails: list[TailWrite] = field(default_factory=list)


class PageClass:
    """Pools of the layers that share :class:`PageRules`."""

    def __init__(self, rules: PageRules, pages: Pages) -> None:
        self.rules = rules
        self.slots = PagePool("record slot" if rules.body is Body.RECORDS else "tile", pages.slots)
        self.blocks = PagePool("exact block", pages.blocks)
        self.rings = PagePool("tail ring", pages.rings)

    def append(
        self, pages: SeqPages, n: int, rows: int, source: int, taking: Taking, writes: Writes
    ) -> SeqPages:
        """Pages of the sequence after ``rows`` more tokens; how to fill them goes into
        ``writes``.
        """
        if self.rules.body is Body.RECORDS:
            pages = self._append_records(pages, n, rows, source, taking, writes.groups)
        elif self.rules.body is Body.TILES:
            pages = self._append_tiles(pages, n, rows, source, taking, writes.groups)
        if self.rules.tail_rows:
            ring = self._append_ring(pages.ring, n, rows, source, taking, writes.tails)
            pages = replace(pages, ring=ring)
        return pages

    def _append_records(
        self, pages: SeqPages, n: int, rows: int, source: int, taking: Taking, writes: list[Any]
    ) -> SeqPages:
        end = n + rows
        last_open, sinks = end // GROUP, self.rules.sink_tokens // GROUP
        first, table = self._extended(pages, last_open, end)
        blocks = dict(pages.blocks)
        for group, start, row, count in _pieces(n, end):
            sink = group < sinks
            base = blocks.get(group, -1) if row else -1
            block = slot = -1
            if sink or group >= last_open - 1:
                in_place = base >= 0 and not self.blocks.shared(base)
                block = base if in_place else taking.take(self.blocks)
                blocks[group] = block
            if row + count == GROUP and not sink and group >= first:
                slot = taking.take(self.slots)
                table[group] = slot
            writes.append(GroupWrite(group, source + start - n, row, count, block, base, slot))
        kept = {g: b for g, b in blocks.items() if g < sinks or g >= last_open - 1}
        return replace(pages, table=table, blocks=kept, first=first)

    def _append_tiles(
        self, pages: SeqPages, n: int, rows: int, source: int, taking: Taking, writes: list[Any]
    ) -> SeqPages:
        end = n + rows
        first, table = self._extended(pages, -(-end // GROUP), end)
        for group, start, row, count in _pieces(n, end):
            if group < first:
                continue  # no query can see it any more
            base = int(pages.table[group]) if row else -1
            in_place = base >= 0 and not self.slots.shared(base)
            table[group] = slot = base if in_place else taking.take(self.slots)
            writes.append(GroupWrite(group, source + start - n, row, count, -1, base, slot))
        return replace(pages, table=table, first=first)

    def _append_ring(
        self, ring: RingState | None, n: int, rows: int, source: int, taking: Taking,
        writes: list[TailWrite],
    ) -> RingState:  # fmt: skip
        rules = self.rules
        if ring is None:
            # A sequence that grew without a ring has none of its rows in it.
            ring = RingState(taking.take(self.rings), n, n)
            own, base = ring.ring, -1
        else:
            own = taking.own_ring(self.rings, ring.ring)
            base = -1 if own == ring.ring else ring.ring
        for i, (first, slot, count) in enumerate(tail.writes(n, rows, rules.ring_rows)):
            writes.append(TailWrite(own, -1 if i else base, source + first, slot, count))
        return ring.committed(own, rows, n + rows, rules.tail_rows, rules.ring_rows)

    def _extended(self, pages: SeqPages, groups: int, n: int) -> tuple[int, Table]:
        """(first group kept, a table of ``groups`` that begins as the old one)."""
        first = self._first_kept(pages.first, n)
        table = np.full(groups, -1, np.int32)
        table[: len(pages.table)] = pages.table
        table[: min(first, groups)] = -1
        return first, table

    def truncate(self, pages: SeqPages, n: int) -> SeqPages:
        """Pages after a rollback to ``n`` tokens: the group that holds row n is open again and
        loses its record.
        """
        open_group, partial = divmod(n, GROUP)
        last = open_group if partial else open_group - 1
        kept = {g: b for g, b in pages.blocks.items() if g <= last}
        groups = open_group if self.rules.body is Body.RECORDS else last + 1
        ring = pages.ring.shortened(n, self.rules.tail_rows) if pages.ring else None
        return SeqPages(pages.table[:groups], kept, min(pages.first, open_group), ring)

    def lowest(self, pages: SeqPages, n: int) -> int:
        """Smallest length a rollback can reach: back through groups whose exact rows are still
        here (C3, C5), through tiles that were not freed, or R rows of a ring that is all there is.
        """
        rules = self.rules
        if rules.body is Body.NONE:
            if pages.ring is None:
                return 0
            # R rows, and no further than the rows that the query there sees.
            start, kind = pages.ring.start, rules.window_kind
            seen = first_without(rules.window, kind, start) if rules.window else start
            return min(n, max(0, pages.ring.top - rules.reserve, seen))
        if rules.body is Body.TILES:
            if rules.window is None:
                return 0
            return min(n, first_without(rules.window, rules.window_kind, pages.first * GROUP))
        group = n // GROUP
        if n % GROUP and group not in pages.blocks:
            return n  # pragma: no cover - an open group always has its rows
        while group > 0 and group - 1 in pages.blocks:
            group -= 1
        return group * GROUP

    def oldest_exact(self, pages: SeqPages, n: int) -> tuple[int, Degradation]:
        """The row from which on all are held exactly, and what happened to them: in the ring, else
        in the blocks of records, else (tiles of an exact type) from the first one on.
        """
        if self.rules.tail_rows:
            ring = pages.ring or RingState(-1)
            return ring.start, ring.flags
        if self.rules.body is Body.TILES:
            return 0, Degradation.NONE
        oldest = n
        while oldest > 0 and (oldest - 1) // GROUP in pages.blocks:
            oldest = (oldest - 1) // GROUP * GROUP
        return oldest, Degradation.NONE

    def reaches(self, pages: SeqPages, to: int) -> bool:
        """Whether a query at ``to`` would find every row it sees: no window has dropped one."""
        if not to or self.rules.window is None:
            return True
        if self.rules.body is Body.NONE:
            return pages.ring is None or to >= self.lowest(pages, pages.ring.top)
        oldest = oldest_key(self.rules.window, self.rules.window_kind, to)
        return pages.first * GROUP <= oldest

    def retain(self, pages: SeqPages) -> None:
        """One more sequence holds these pages."""
        for slot in pages.slots():
            self.slots.retain(slot)
        for block in pages.blocks.values():
            self.blocks.retain(block)
        if pages.ring:
            self.rings.retain(pages.ring.ring)

    def release(self, old: SeqPages, new: SeqPages | None = None) -> None:
        """Let go of what ``old`` holds and ``new`` does not."""
        kept_slots = set(new.slots()) if new else set()
        kept_blocks = set(new.blocks.values()) if new else set()
        for slot in old.slots():
            if slot not in kept_slots:
                self.slots.release(slot)
        for block in old.blocks.values():
            if block not in kept_blocks:
                self.blocks.release(block)
        kept_ring = new.ring.ring if new and new.ring else -1
        if old.ring and old.ring.ring != kept_ring:
            self.rings.release(old.ring.ring)

    def _first_kept(self, first: int, n: int) -> int:
        if self.rules.window is None:
            return first
        # The oldest query that can still come sits one horizon (two groups) back and sees `window`
        # keys, whatever the kind of the window.
        return max(first, (n - (2 * GROUP - 1) - self.rules.window) // GROUP)


def _pieces(n: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(group, first token, its row in the group, rows) of tokens ``n .. end``."""
    for group in range(n // GROUP, (end - 1) // GROUP + 1):
        start = max(n, group * GROUP)
        yield group, start, start - group * GROUP, min(end, (group + 1) * GROUP) - start


def view(
    cls: PageClass, pages: SeqPages, *, seq: int, q_start: int, n_q: int, n_past: int
) -> SeqView:
    """The attention view of a published sequence of ``n_past`` tokens for ``n_q`` new rows."""
    rules, sealed = cls.rules, n_past // GROUP
    tiles = tuple(
        Tile(
            block,
            group * GROUP,
            min(n_past - group * GROUP, GROUP),
            group < sealed and pages.table[group] >= 0,
        )
        for group, block in sorted(pages.blocks.items())
        if group * GROUP < n_past
    )
    oldest = oldest_key(rules.window, rules.window_kind, n_past)
    start = max(pages.first, rules.sink_tokens // GROUP, oldest // GROUP)
    stop = sealed
    if rules.body is not Body.RECORDS:
        stop = len(pages.table)
    ring = None
    if pages.ring and pages.ring.start < n_past:
        ring = TailView(pages.ring.ring, pages.ring.start, rules.tail_rows, rules.ring_rows)
    return SeqView(seq, q_start, n_q, n_past, pages.table, (min(start, stop), stop), tiles, ring)
