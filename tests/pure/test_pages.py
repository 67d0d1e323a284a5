"""Pages as pure integers: pools never run out within the limits, counts are right, and every page
holds what its sequence says, whatever order of appends, rollbacks and forks.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.calls import GroupWrite
from kvkernels.errors import CapacityError
from kvkernels.pages import PageClass, PagePool, SeqPages, view
from kvkernels.records.layout import GROUP

WINDOWS = st.sampled_from([None, None, 1, 100, 127, 128, 129, 150, 300, 640])


class Tokens:
    """One page class with sequences whose rows are numbered; pages hold row numbers."""

    def __init__(
        self, window: int | None, sink: int, n_ctx: int, n_ubatch: int, n_seq: int
    ) -> None:
        slots, blocks = PageClass.capacity(
            window=window, sink_tokens=sink, n_ctx=n_ctx, n_ubatch=n_ubatch, n_seq=n_seq
        )
        self.cls = PageClass(window=window, sink_tokens=sink, slots=slots, blocks=blocks)
        self.limits = (n_ctx, n_ubatch, n_seq)
        self.rows: dict[int, list[int]] = {}
        self.pages: dict[int, SeqPages] = {}
        self.records: list[list[int]] = [[] for _ in range(slots)]
        self.blocks: list[list[int]] = [[-1] * GROUP for _ in range(blocks)]
        self.fresh = 0

    def append(self, n_tokens: dict[int, int], *, fail: bool = False) -> None:
        """A step, as the cache does it: all pages are taken, written, published, then let go."""
        taken: list[tuple[PagePool, int]] = []
        new: dict[int, tuple[list[int], SeqPages]] = {}
        for seq, n in n_tokens.items():
            old, rows = self.pages.get(seq, SeqPages()), self.rows.get(seq, [])
            pages, writes = self.cls.append(old, len(rows), n, 0, taken)
            fresh = list(range(self.fresh, self.fresh + n))
            self.fresh += n
            for write in writes:
                self._write(write, fresh)
            new[seq] = rows + fresh, pages
        if fail:
            for pool, page in taken:
                pool.release(page)
            return
        for seq, (rows, pages) in new.items():
            old = self.pages.get(seq, SeqPages())
            self.rows[seq], self.pages[seq] = rows, pages
            self.cls.release(old, pages)

    def _write(self, w: GroupWrite, fresh: list[int]) -> None:
        part = fresh[w.source : w.source + w.rows]
        if w.block >= 0:
            target = self.blocks[w.block]
            if w.base != w.block and w.row:
                target[: w.row] = self.blocks[w.base][: w.row]
        else:
            target = [-1] * GROUP
            assert w.row == 0 or w.base >= 0
            if w.row:
                target[: w.row] = self.blocks[w.base][: w.row]
        target[w.row : w.row + w.rows] = part
        if w.slot >= 0:
            self.records[w.slot] = list(target)

    def truncate(self, seq: int, n: int) -> None:
        old = self.pages[seq]
        self.pages[seq] = self.cls.truncate(old, n)
        self.rows[seq] = self.rows[seq][:n]
        self.cls.release(old, self.pages[seq])

    def fork(self, src: int, dst: int) -> None:
        old = self.pages.get(dst)
        self.cls.retain(self.pages[src])
        self.pages[dst], self.rows[dst] = self.pages[src], list(self.rows[src])
        if old is not None:
            self.cls.release(old)

    def remove(self, seq: int) -> None:
        self.cls.release(self.pages.pop(seq))
        del self.rows[seq]

    def check(self) -> None:
        slots: Counter[int] = Counter()
        blocks: Counter[int] = Counter()
        for seq, pages in self.pages.items():
            rows = self.rows[seq]
            n = len(rows)
            slots.update(pages.slots())
            blocks.update(pages.blocks.values())
            assert len(set(pages.slots())) == len(pages.slots())
            for group, slot in enumerate(pages.table):
                if slot >= 0:
                    assert self.records[slot] == rows[group * GROUP : (group + 1) * GROUP]
            for group, block in pages.blocks.items():
                part = rows[group * GROUP : (group + 1) * GROUP]
                assert self.blocks[block][: len(part)] == part
            self._check_view(pages, n)
        assert self.cls.slots._refs == [slots[i] for i in range(self.cls.slots.capacity)]
        assert self.cls.blocks._refs == [blocks[i] for i in range(self.cls.blocks.capacity)]
        for pool in (self.cls.slots, self.cls.blocks):
            assert pool.free == pool._refs.count(0)
            assert sorted(pool._free) == [i for i, refs in enumerate(pool._refs) if not refs]

    def _check_view(self, pages: SeqPages, n: int) -> None:
        """Every row that the next query sees is in a record or an exact tile; in both only where
        the tile is marked as the twin of a record.
        """
        seen = view(self.cls, pages, seq=0, q_start=0, n_q=1, n_past=n)
        records = set(range(seen.body[0] * GROUP, seen.body[1] * GROUP))
        assert all(pages.table[group] >= 0 for group in range(*seen.body))
        exact = {t.base + i: t for t in seen.tiles for i in range(t.rows)}
        lowest = 0 if self.cls.window is None else max(0, n + 1 - self.cls.window)
        assert set(range(lowest, n)) <= records | exact.keys()
        for row in exact.keys() & records:
            assert exact[row].twin
        assert sum(t.twin for t in seen.tiles) <= 1  # one group number is all a launch carries


@settings(max_examples=300, deadline=None)
@given(
    window=WINDOWS,
    sink=st.sampled_from([0, 0, 128, 384]),
    n_ctx=st.integers(1, 300) | st.integers(1, 900),
    n_ubatch=st.integers(1, 700),
    n_seq=st.integers(1, 4),
    seed=st.integers(0, 10**9),
)
def test_pools_never_run_out_and_pages_never_mix(
    window: int | None, sink: int, n_ctx: int, n_ubatch: int, n_seq: int, seed: int
) -> None:
    world = Tokens(window, 0 if window else sink, n_ctx, n_ubatch, n_seq)
    source = random.Random(seed)
    for _ in range(40):
        known = sorted(world.pages)
        action = source.choice(["step"] * 6 + ["full", "fail", "rollback", "fork", "remove"])
        if action in ("step", "full", "fail"):
            room, step = n_ubatch, {}
            chosen = source.sample(range(n_seq), source.randint(1, n_seq))
            for i, seq in enumerate(chosen):
                free = min(n_ctx - len(world.rows.get(seq, [])), room - (len(chosen) - 1 - i))
                if free >= 1:
                    n = free if action == "full" and i == 0 else source.randint(1, free)
                    step[seq] = min(n, source.choice([1, 3, 130, 260, 900]))
                    room -= step[seq]
            if step:
                world.append(step, fail=action == "fail")
        elif not known:
            continue
        elif action == "rollback":
            seq = source.choice(known)
            n = len(world.rows[seq])
            world.truncate(seq, source.randint(world.cls.lowest(world.pages[seq], n), n))
        elif action == "fork":
            src, dst = source.choice(known), source.randrange(n_seq)
            if src != dst:
                world.fork(src, dst)
        else:
            world.remove(source.choice(known))
        world.check()
    for seq in list(world.pages):
        world.remove(seq)
    world.check()


@pytest.mark.parametrize("window", [None, 1, 150, 640])
def test_every_sequence_at_its_limit(window: int | None) -> None:
    """The largest steps there are, all sequences forked from one and then each on its own."""
    for n_seq in (1, 2, 3):
        for n_ubatch in (1, 128, 130, 260, 391):
            world = Tokens(window, 0 if window else 128, 1100, n_ubatch, n_seq)
            while len(world.rows.get(0, [])) + n_ubatch <= 400:
                world.append({0: n_ubatch})
            if 0 in world.rows:
                for seq in range(1, n_seq):
                    world.fork(0, seq)
            while True:
                n = n_ubatch // n_seq
                step = {
                    s: min(n, 1100 - len(world.rows.get(s, [])))
                    for s in range(n_seq)
                    if len(world.rows.get(s, [])) < 1100
                }
                if not n or not step:
                    break
                world.append(step)
            world.check()


def test_capacity_is_no_larger_than_it_has_to_be() -> None:
    """One page less runs out somewhere: the formula is a bound, not a guess."""
    slots, blocks = PageClass.capacity(
        window=None, sink_tokens=128, n_ctx=512, n_ubatch=512, n_seq=1
    )
    assert (slots, blocks) == (3, 4 + 1)
    cls = PageClass(window=None, sink_tokens=128, slots=slots - 1, blocks=blocks)
    with pytest.raises(CapacityError, match="no free record slot: all 2 are held"):
        cls.append(SeqPages(), 0, 512, 0, [])


def test_pool() -> None:
    pool = PagePool("page", 3)
    assert [pool.take(), pool.take()] == [0, 1]
    assert pool.free == 1
    pool.retain(0)
    assert pool.shared(0)
    assert not pool.shared(1)
    pool.release(0)
    pool.release(0)
    assert pool.free == 2
    assert [pool.take(), pool.take()] == [0, 2]
    with pytest.raises(CapacityError, match=r"no free page: all 3 are held; remove a sequence"):
        pool.take()
    pool.release(1)
    with pytest.raises(AssertionError):
        pool.release(1)
    with pytest.raises(AssertionError):
        pool.retain(1)
