"""Group tables: which physical slot holds which 128-token group of which sequence (pure integers).

Layers with the same window and sink are one *page class*: they seal and free the same groups at the
same time, so one table serves all of them and host work is done once per step, not once per layer.
A class owns two pools of physical pages: record slots (sealed groups) and blocks (exact fp16 rows
of sinks, previous and open group). Pages are reference counted, so a fork shares them and copies a
block only when it writes (C6).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import GroupWrite, SeqView, Tile
from kvkernels.errors import CapacityError
from kvkernels.records.layout import GROUP

Table = NDArray[np.int32]


class PagePool:
    """Fixed set of physical pages with reference counts; the lowest free page is taken first."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._refs = [0] * capacity
        self._free = list(range(capacity))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, held once by the caller."""
        if not self._free:
            raise CapacityError(
                f"no free {self.name}: all {self.capacity} are held; "
                "remove a sequence or plan with larger n_ctx or n_seq"
            )
        page = heapq.heappop(self._free)
        self._refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._refs[page] > 0
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        assert self._refs[page] > 0
        self._refs[page] -= 1
        if not self._refs[page]:
            heapq.heappush(self._free, page)

    def shared(self, page: int) -> bool:
        """Whether somebody else holds this page too."""
        return self._refs[page] > 1


@dataclass(frozen=True, slots=True)
class SeqPages:
    """Pages of one sequence in one class: immutable, replaced whole.

    ``table[g]`` is the record slot of group g, -1 where there is none (sink, freed); it ends at the
    last sealed group. ``blocks[g]`` is the exact block of group g. Groups below ``first`` were
    freed (windowed classes).
    """

    table: Table = field(default_factory=lambda: np.empty(0, np.int32))
    blocks: Mapping[int, int] = field(default_factory=dict)
    first: int = 0

    def slots(self) -> list[int]:
        """Record slots held."""
        return [int(s) for s in self.table[self.first :] if s >= 0]


class PageClass:
    """Pools and rules of the layers that share a window and a sink."""

    def __init__(self, *, window: int | None, sink_tokens: int, slots: int, blocks: int) -> None:
        self.window, self.sink_groups = window, sink_tokens // GROUP
        self.slots = PagePool("record slot", slots)
        self.blocks = PagePool("exact block", blocks)

    @staticmethod
    def capacity(
        *, window: int | None, sink_tokens: int, n_ctx: int, n_ubatch: int, n_seq: int
    ) -> tuple[int, int]:
        """(record slots, exact blocks) that never run out within these limits.

        Blocks: sinks, previous and open group, one new group per sequence in a step, and one more
        for each sequence whose step crosses two group boundaries, which takes at least 130 rows.
        Where n_ctx is too short for all of these, forks that write in one step still need the block
        they shared besides a copy each: one more for every two sequences.
        """
        full = n_ctx // GROUP - sink_tokens // GROUP
        if window is None:
            slots = n_seq * max(full, 0)
        else:
            kept = -(-(window + 2 * GROUP - 1) // GROUP) + 1
            slots = min(n_seq * max(full, 0), n_seq * (kept + 1) + n_ubatch // GROUP)
        groups = -(-n_ctx // GROUP)
        per_seq = sink_tokens // GROUP + 3
        shared = n_seq // 2 if groups < per_seq else 0
        crossing = min(n_seq, n_ubatch // (GROUP + 2))
        return slots, n_seq * min(per_seq, groups) + shared + crossing

    def append(
        self, pages: SeqPages, n: int, rows: int, source: int, taken: list[tuple[PagePool, int]]
    ) -> tuple[SeqPages, list[GroupWrite]]:
        """Pages of the sequence after ``rows`` more tokens, and how to fill them.

        Pages taken are appended to ``taken`` at once, so that a caller can give them back whatever
        happens next.
        """

        def take(pool: PagePool) -> int:
            page = pool.take()
            taken.append((pool, page))
            return page

        end = n + rows
        last_open = end // GROUP
        first = self._first_kept(pages.first, end)
        blocks = dict(pages.blocks)
        table = np.full(last_open, -1, np.int32)
        table[: len(pages.table)] = pages.table
        table[: min(first, last_open)] = -1
        writes = []
        for group in range(n // GROUP, (end - 1) // GROUP + 1):
            start = max(n, group * GROUP)
            row, count = start - group * GROUP, min(end, (group + 1) * GROUP) - start
            sink = group < self.sink_groups
            base = blocks.get(group, -1) if row else -1
            block = slot = -1
            if sink or group >= last_open - 1:
                in_place = base >= 0 and not self.blocks.shared(base)
                block = base if in_place else take(self.blocks)
                blocks[group] = block
            if row + count == GROUP and not sink and group >= first:
                slot = take(self.slots)
                table[group] = slot
            writes.append(GroupWrite(group, source + start - n, row, count, block, base, slot))
        kept = {g: b for g, b in blocks.items() if g < self.sink_groups or g >= last_open - 1}
        return SeqPages(table, kept, first), writes

    def truncate(self, pages: SeqPages, n: int) -> SeqPages:
        """Pages after a rollback to ``n`` tokens: the group that holds row n is open again and
        loses its record.
        """
        open_group = n // GROUP
        last = open_group if n % GROUP else open_group - 1
        kept = {g: b for g, b in pages.blocks.items() if g <= last}
        return SeqPages(pages.table[:open_group], kept, min(pages.first, open_group))

    def lowest(self, pages: SeqPages, n: int) -> int:
        """Smallest length a rollback can reach: back through groups whose exact rows are still
        here (C3, C5).
        """
        group = n // GROUP
        if n % GROUP and group not in pages.blocks:
            return n  # pragma: no cover - an open group always has its rows
        while group > 0 and group - 1 in pages.blocks:
            group -= 1
        return group * GROUP

    def retain(self, pages: SeqPages) -> None:
        """One more sequence holds these pages."""
        for slot in pages.slots():
            self.slots.retain(slot)
        for block in pages.blocks.values():
            self.blocks.retain(block)

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

    def _first_kept(self, first: int, n: int) -> int:
        if self.window is None:
            return first
        # The oldest query that can still come sits one horizon (two groups) back and sees `window`
        # keys.
        return max(first, (n - (2 * GROUP - 1) - self.window) // GROUP)


def view(
    cls: PageClass, pages: SeqPages, *, seq: int, q_start: int, n_q: int, n_past: int
) -> SeqView:
    """The attention view of a published sequence of ``n_past`` tokens for ``n_q`` new rows."""
    sealed = n_past // GROUP
    tiles = [
        Tile(
            block,
            group * GROUP,
            min(n_past - group * GROUP, GROUP),
            group < sealed and pages.table[group] >= 0,
        )
        for group, block in sorted(pages.blocks.items())
        if group * GROUP < n_past
    ]
    start = max(pages.first, cls.sink_groups)
    if cls.window is not None:
        start = max(start, (n_past - cls.window + 1) // GROUP)
    return SeqView(
        seq, q_start, n_q, n_past, pages.table, (min(start, sealed), sealed), tuple(tiles)
    )
