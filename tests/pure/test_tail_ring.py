"""Ring arithmetic of the precision tail against rings whose slots are written one by one (T6-T8,
T11).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkernels.tail import (
    GROUP,
    Coverage,
    Degradation,
    RingState,
    Run,
    runs,
    start_after,
    writes,
)

NONE, HISTORICAL = Degradation.NONE, Degradation.HISTORICAL_OP
CAPACITY = st.one_of(st.integers(1, 40), st.integers(100, 700))


class Slots:
    """A ring written row by row. A token per row tells a row from what was there before a rollback
    at the same position.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[Any] = [None] * capacity
        self.rows: list[object] = []

    def append(self, rows: int) -> None:
        for _ in range(rows):
            token = object()
            self.slots[len(self.rows) % self.capacity] = token
            self.rows.append(token)

    def lose(self, first: int, end: int) -> None:
        for row in range(first, end):
            self.slots[row % self.capacity] = None

    def oldest(self) -> int:
        """From here on every row of the sequence lies in the ring."""
        row = len(self.rows)
        while row and self.slots[(row - 1) % self.capacity] is self.rows[row - 1]:
            row -= 1
        return row


@given(capacity=CAPACITY, position=st.integers(0, 2000), rows=st.integers(0, 1500))
def test_writes_fill_the_slots_of_the_newest_rows(capacity: int, position: int, rows: int) -> None:
    expected: dict[int, int] = {}
    for row in range(rows):
        expected[(position + row) % capacity] = row
    found: dict[int, int] = {}
    pieces = writes(position, rows, capacity)
    for first, slot, n in pieces:
        assert n > 0
        assert slot + n <= capacity
        for t in range(n):
            assert slot + t not in found
            found[slot + t] = first + t
    assert found == expected
    assert len(pieces) <= 2


@given(
    capacity=CAPACITY, n=st.integers(0, 3000), held=st.integers(0, 800), start=st.integers(0, 3000)
)
def test_T6_runs_visit_every_row_once_where_it_was_written(
    capacity: int, n: int, held: int, start: int
) -> None:
    oldest = max(0, n - min(held, capacity))
    found = runs(oldest, n, capacity)
    visited = [
        (run.base + t, run.slot + t)
        for run in found
        for t in range(run.rows)
        if run.base + t >= oldest
    ]
    assert visited == [(row, row % capacity) for row in range(oldest, n)]
    for run in found:
        assert run.slot % GROUP == 0
        assert 0 < run.rows <= GROUP
        assert run.slot + run.rows <= capacity
        assert run.base + run.rows > oldest  # no run for nothing
    # B7: a run's first slot never depends on where the reader starts.
    later = set(runs(min(n, oldest + start), n, capacity))
    assert {(run.slot, run.base) for run in later} <= {(run.slot, run.base) for run in found}


def test_T6_runs_by_hand() -> None:
    assert runs(0, 0, 300) == runs(7, 7, 300) == ()
    assert runs(0, 5, 300) == (Run(0, 0, 5),)
    # Rows 290..299 end a lap, in the slots from 256 on; 300..309 begin the next one.
    assert runs(290, 310, 300) == (Run(256, 256, 44), Run(0, 300, 10))
    assert runs(150, 450, 300) == (
        Run(128, 128, 128), Run(256, 256, 44), Run(0, 300, 128), Run(128, 428, 22),
    )  # fmt: skip


@given(start=st.integers(0, 900), more=st.integers(0, 900), capacity=CAPACITY)
def test_start_after(start: int, more: int, capacity: int) -> None:
    n = start + more
    expected = next(row for row in range(start, n + 1) if n - row <= capacity)
    assert start_after(start, n, capacity) == expected


class RingMachine(RuleBasedStateMachine):
    """Commits, rollbacks and failed writes: ``start`` is the oldest row that is really there, and
    nothing that is missing goes unmarked.
    """

    @initialize(kept=st.integers(1, 30), reserve=st.integers(1, 9))
    def begin(self, kept: int, reserve: int) -> None:
        self.kept, self.capacity = kept, kept + reserve
        self.ring, self.slots = RingState(3), Slots(self.capacity)
        self.top = 0
        self.exact_since = 0  # rows since something was lost, less those taken back

    @property
    def n(self) -> int:
        return len(self.slots.rows)

    @rule(rows=st.integers(1, 60))
    def commit(self, rows: int) -> None:
        self.slots.append(rows)
        before = self.ring
        self.ring = before.committed(3, rows, self.n, self.kept, self.capacity)
        self.top = max(self.top, self.n)
        self.exact_since += rows
        if before.flags:
            cleared = not self.ring.flags
            assert cleared == (self.exact_since >= self.kept)
            assert self.ring.since == (0 if cleared else self.exact_since)

    @precondition(lambda self: self.n > 0)
    @rule(share=st.floats(0, 1))
    def roll_back(self, share: float) -> None:
        n = round(self.n * share)
        was, start = self.ring.flags, self.ring.start
        del self.slots.rows[n:]
        self.ring = self.ring.shortened(n, self.kept)
        if n <= start:
            self.top, self.exact_since = n, 0
            assert self.ring.flags == (HISTORICAL if n else NONE)
        elif n - start < min(self.kept, n):
            self.exact_since = 0
            assert self.ring.flags == was | HISTORICAL
        else:
            assert self.ring.flags == was

    @rule(rows=st.integers(1, 60))
    def fail(self, rows: int) -> None:
        self.slots.lose(self.n, self.n + rows)
        self.ring = self.ring.overwritten(self.n, self.n, self.n + rows, self.capacity)
        assert self.ring.flags & Degradation.PAYLOAD_INVALID
        self.exact_since = 0

    @invariant()
    def is_what_the_slots_hold(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert self.ring.start == self.slots.oldest()
        assert self.ring.top == self.top
        exact = min(self.n - self.ring.start, self.kept)
        wanted = min(self.n, self.kept)
        coverage = Coverage("full@l0", wanted, exact, self.ring.flags)
        if exact < wanted:
            assert self.ring.flags
            assert coverage.state == ("partial" if exact else "none")
        if coverage.state == "complete":
            assert exact == wanted


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_T11_N_rows_clear_the_flags_and_no_fewer() -> None:
    ring = RingState(0).committed(0, 100, 100, 20, 24)
    assert (ring.start, ring.flags) == (76, NONE)
    ring = ring.shortened(90, 20)  # 14 of 20 are left
    assert (ring.start, ring.flags, ring.since) == (76, HISTORICAL, 0)
    ring = ring.committed(0, 19, 109, 20, 24)
    assert (ring.start, ring.flags, ring.since) == (85, HISTORICAL, 19)
    ring = ring.committed(0, 1, 110, 20, 24)
    assert (ring.start, ring.flags, ring.since) == (86, NONE, 0)


def test_T11_a_rollback_inside_the_reserve_loses_nothing() -> None:
    ring = RingState(0).committed(0, 100, 100, 20, 24)
    assert ring.shortened(96, 20) == ring
    assert ring.shortened(95, 20).flags == HISTORICAL
    assert ring.shortened(76, 20) == RingState(0, 76, 76, HISTORICAL)
    assert ring.shortened(0, 20) == RingState(0, 0, 0, NONE)


def test_T11_a_short_sequence_is_whole_with_what_it_has() -> None:
    ring = RingState(0).committed(0, 7, 7, 20, 24)
    assert ring.shortened(3, 20).flags == NONE


@given(
    n=st.integers(0, 200), more=st.integers(0, 60), rows=st.integers(1, 60), start=st.integers(0, 9)
)
def test_T11_a_failed_write_of_a_longer_sharer_loses_all_or_what_it_reached(
    n: int, more: int, rows: int, start: int
) -> None:
    """The writer of a ring that two sequences show may be longer than the other one."""
    capacity, first = 24, n + more
    shown = max(0, n - capacity) + min(start, min(n, capacity))
    ring = RingState(0, shown, n).overwritten(n, first, first + rows, capacity)
    lost = {p % capacity for p in range(first, first + rows)}
    left = n
    while left > shown and (left - 1) % capacity not in lost:
        left -= 1
    assert n >= ring.start >= shown
    assert ring.start >= left  # never a row that is not there
    if not more:
        assert ring.start == left
    assert ring.flags == Degradation.PAYLOAD_INVALID


def test_T11_a_sharer_that_is_longer_than_the_write_keeps_nothing() -> None:
    ring = RingState(0, 76, 100).overwritten(100, 96, 98, 24)
    assert (ring.start, ring.flags) == (100, Degradation.PAYLOAD_INVALID)


@pytest.mark.parametrize(
    ("requested", "exact", "flags", "state"),
    [
        (0, 0, NONE, "complete"),
        (128, 128, NONE, "complete"),
        (128, 128, HISTORICAL, "partial"),
        (128, 127, NONE, "partial"),
        (128, 1, HISTORICAL, "partial"),
        (128, 0, NONE, "none"),
        (128, 0, Degradation.PAYLOAD_INVALID, "none"),
        (0, 0, HISTORICAL, "partial"),
    ],
)
def test_T11_states(requested: int, exact: int, flags: Degradation, state: str) -> None:
    assert Coverage("full@l0", requested, exact, flags).state == state
