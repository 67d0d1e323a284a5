"""Ring arithmetic of the precision tail: pure integers (semantics T6-T8, T11).

A ring of ``capacity = N + R`` rows holds the newest rows of one sequence; row p lies in slot
``p % capacity``. Its content is the rows ``start .. n``: a commit moves ``start`` up when it
overwrites, a rollback only shortens. Per query the newest N visible rows are taken from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntFlag

GROUP = 128


class Degradation(IntFlag):
    """Why a sequence has fewer exact rows than it could (T11). Cleared by N further rows."""

    NONE = 0
    BODY_ONLY_STATE = 1
    HISTORICAL_OP = 2
    STATE_RESTORE = 4
    PAYLOAD_INVALID = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slots of a ring: row ``base + t`` lies in slot ``slot + t`` for t < rows.

    ``slot`` is a multiple of 128, so ``base`` may be a row that has left the ring already; who
    reads starts no earlier than the oldest row still in it.
    """

    slot: int
    base: int
    rows: int


def start_after(start: int, n: int, capacity: int) -> int:
    """Oldest row in the ring once rows up to ``n`` were written."""
    return max(start, n - capacity)


def runs(oldest: int, n: int, capacity: int) -> tuple[Run, ...]:
    """The slots of rows ``oldest .. n`` in tiles of 128 slots, oldest lap first.

    Tiles sit on fixed slots, so that the order of additions depends on positions only (B7).
    """
    found = []
    if oldest < n:
        for lap in range(oldest // capacity, (n - 1) // capacity + 1):
            first, last = max(oldest, lap * capacity), min(n, (lap + 1) * capacity)
            for slot in range((first - lap * capacity) // GROUP * GROUP, capacity, GROUP):
                base = lap * capacity + slot
                if base >= last:
                    break
                found.append(Run(slot, base, min(last - base, GROUP)))
    return tuple(found)


def writes(position: int, rows: int, capacity: int) -> tuple[tuple[int, int, int], ...]:
    """(first row of the step, slot, rows) of what ``rows`` new rows from ``position`` on put into
    the ring: the newest ``capacity`` of them, in pieces that do not wrap.
    """
    first = max(0, rows - capacity)
    found = []
    while first < rows:
        slot = (position + first) % capacity
        n = min(rows - first, capacity - slot)
        found.append((first, slot, n))
        first += n
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RingState:
    """The ring of one sequence in one class: which one it is, the oldest row in it, the longest the
    sequence has been (``top``), and what happened to it. ``since``: rows committed since ``flags``
    were set.
    """

    ring: int
    start: int = 0
    top: int = 0
    flags: Degradation = Degradation.NONE
    since: int = 0

    def committed(self, ring: int, rows: int, n: int, kept: int, capacity: int) -> RingState:
        """After ``rows`` more, ``n`` in all; ``kept`` = N newest rows clear the flags (T11)."""
        since = self.since + rows
        flags = Degradation.NONE if since >= kept else self.flags
        start = start_after(self.start, n, capacity)
        return RingState(ring, start, max(self.top, n), flags, since if flags else 0)

    def overwritten(self, n: int, first: int, end: int, capacity: int) -> RingState:
        """Of a sequence of ``n`` rows, after a failed write of rows ``first .. end`` into the ring:
        what lay in their slots is gone.
        """
        start = n if first < n else min(n, max(self.start, end - capacity))
        flags = self.flags | Degradation.PAYLOAD_INVALID
        return replace(self, start=start, flags=flags, since=0)

    def shortened(self, n: int, kept: int) -> RingState:
        """After a rollback to ``n`` rows; with fewer exact rows than could be, that is marked."""
        if n <= self.start:  # nothing of it is left: what comes next fills it anew
            lost = Degradation.HISTORICAL_OP if n else Degradation.NONE
            return RingState(self.ring, n, n, lost)
        if n - self.start < min(kept, n):
            return replace(self, flags=self.flags | Degradation.HISTORICAL_OP, since=0)
        return self


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a group's tail is really exact (T11): ``exact`` of ``requested`` newest rows."""

    group: str
    requested: int
    exact: int
    flags: Degradation

    @property
    def state(self) -> str:
        """``complete``, ``partial`` or ``none``."""
        if self.exact == 0 and self.requested > 0:
            return "none"
        whole = self.exact >= self.requested and not self.flags
        return "complete" if whole else "partial"
